"""Sampled episodes on disk: `<output_dir>/episodes/`, one Parquet file per update and process.

`datasets.load_dataset("<output_dir>/episodes")` opens them; [`SCHEMA`] lists the columns (explained in
docs/report.md). Files are written atomically, and a resumed run first removes those newer than its checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features, Image, List, Value
from PIL import Image as PILImage
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..config import GTRConfig
from ..learning.experience import Experience
from ..policy.spans import SpanFinder
from ..responses.safe_text import storable
from ..storage.files import atomic_write, writing_log
from ..tasks.base import Task
from ..types import Rollout, turns_before
from .diagnostics import thought_text

FOLDER = "episodes"
SCHEMA = Features(
    {
        "update": Value("int64"),
        "env_index": Value("int32"),
        "episode": Value("int64"),
        "step": Value("int32"),
        "image": Image(),
        "prompt": Value("string"),
        "history_turns": Value("int32"),
        "history_images": Value("int32"),
        "response": Value("string"),
        "thought": Value("string"),
        "thought_text": Value("string"),
        "action": Value("string"),
        "valid": Value("bool"),
        "legal": Value("bool"),
        "substitute": Value("string"),
        "error": Value("string"),
        "verdict": Value("string"),
        "corrected_thought": Value("string"),
        "corrected_action": Value("string"),
        "failure": Value("string"),
        "reason": Value("string"),
        "judgement": List({"part": Value("string"), "right": Value("bool")}),
        "reward": Value("float32"),
        "value": Value("float32"),
        "return": Value("float32"),
        "advantage": Value("float32"),
        "ended": Value("bool"),
        "success": Value("bool"),
        "tokens": List(Value("string")),
        "token_logprobs": List(Value("float32")),
        "action_start": Value("int32"),
    }
)
_SHARD = re.compile(r"(\.?)update-(\d+)-process-\d+\.parquet")


class EpisodeLog(TrainerCallback):
    """Writes whole episodes, sampled by their number so that a resumed run samples the same ones.

    Args:
        args: `episode_log_rate` and `episode_log_max_steps` set how many.
        task: Judges thoughts and success.
        spans: Decodes tokens.
    """

    def __init__(self, args: GTRConfig, task: Task, spans: SpanFinder) -> None:
        self.task, self.spans = task, spans
        self.rate = min(args.episode_log_rate, args.episode_log_max_steps / args.total_env_steps)
        self.folder = Path(args.output_dir) / FOLDER

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # A resumed run continues from its checkpoint; a new one finds none of these files.
        if state.is_world_process_zero:
            for update, shard in list(shards(self.folder)):
                if update is None or update > state.global_step:
                    shard.unlink()

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        rollout: Rollout | None = None,
        experience: Experience | None = None,
        **kwargs: Any,
    ) -> None:
        if rollout is None or experience is None:
            return
        rows = list(self._rows(rollout, experience, state.global_step, args))
        if rows:
            path = self.folder / f"update-{state.global_step:06d}-process-{args.process_index}.parquet"
            with writing_log(path):
                write_shard(path, rows)

    def _rows(self, rollout: Rollout, experience: Experience, update: int, args: Any) -> Iterator[dict[str, Any]]:
        scores, absent = experience.scores, [None] * len(experience)
        numbers = {
            "value": absent if scores.value is None else scores.value.tolist(),
            "return": absent if experience.returns is None else experience.returns.tolist(),
            "advantage": experience.advantages.tolist(),
        }
        # Keyed by environment and last step, which identify an episode within a rollout.
        successes = {
            (episode[-1].env_index, episode[-1].step): self.task.success(episode) for episode in rollout.episodes
        }
        ends = _last_steps(rollout)
        for i, step in enumerate(rollout.transitions):
            if not self._drawn(args.seed, step.env_index, step.episode):
                continue
            yield {
                "update": update,
                "env_index": step.env_index,
                "episode": step.episode,
                "step": step.episode_step,
                "image": step.image,
                "success": successes.get((step.env_index, ends[i])),
                "ended": step.terminated or step.truncated,
                **self._words(rollout, i),
                **{name: values[i] for name, values in numbers.items()},
                "tokens": self.spans.pieces(step.response_ids),
                "token_logprobs": scores.token_logprobs[i][scores.mask[i]].tolist(),
                "action_start": int(scores.action_start[i]),
            }

    def _words(self, rollout: Rollout, i: int) -> dict[str, Any]:
        step, correction = rollout.transitions[i], rollout.corrections[i]
        response = step.response
        corrected = correction.thought if correction else None
        turns = turns_before(step.prompt)
        return {
            "prompt": str(step.prompt),
            "history_turns": len(turns),
            "history_images": sum(turn.image is not None for turn in turns),
            "response": response.text,
            "thought": response.thought,
            "thought_text": thought_text(response),
            "action": response.action,
            "valid": response.valid,
            "legal": step.legal,
            "substitute": step.substitute,
            "error": response.error,
            "verdict": correction.verdict if correction else None,
            "corrected_thought": None if corrected is None else self.task.format.render_thought(corrected),
            "corrected_action": correction.action if correction else None,
            "failure": correction.failure if correction else None,
            "reason": correction.reason if correction else None,
            "judgement": [
                {"part": part, "right": right} for part, right in self.task.judge(response, step.info).items()
            ],
            "reward": step.reward,
        }

    def _drawn(self, seed: int, env_index: int, episode: int) -> bool:
        digest = hashlib.blake2b(f"{seed}/{env_index}/{episode}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.rate * 2**64


def shards(folder: Path) -> Iterator[tuple[int | None, Path]]:
    """The log's files in a folder, each with its update, or `None` if it was never finished."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = _SHARD.fullmatch(path.name)
        if name is not None and path.is_file():
            yield None if name[1] else int(name[2]), path


def _last_steps(rollout: Rollout) -> list[int]:
    """For each transition, the rollout step in which its episode ended, or -1 if it didn't."""
    ends: list[int] = []
    ending: dict[int, int] = {}
    for step in reversed(rollout.transitions):
        if step.terminated or step.truncated:
            ending[step.env_index] = step.step
        ends.append(ending.get(step.env_index, -1))
    return ends[::-1]


def write_shard(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Write one Parquet file atomically."""
    table = pa.Table.from_pylist([_storable(row) for row in rows], schema=SCHEMA.arrow_schema)
    # Pass an open file, since pyarrow rejects paths that aren't UTF-8.
    with atomic_write(Path(path)) as unfinished, unfinished.open("wb") as file:
        pq.write_table(table, file)


def _storable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Encode images as PNG and replace lone surrogates, which can't be stored."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return storable(value)
        if isinstance(value, np.ndarray):
            png = io.BytesIO()
            PILImage.fromarray(value).save(png, "PNG")
            return {"bytes": png.getvalue(), "path": None}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return {name: clean(value) for name, value in row.items()}
