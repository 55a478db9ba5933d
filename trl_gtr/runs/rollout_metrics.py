"""Metrics of one rollout, and a table of sampled steps."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..distributed.means import Means
from ..responses.safe_text import printable
from ..tasks.base import Task
from ..types import Correction, Rollout, Share, Transition

_TAIL = 60


def count_rollout(rollout: Rollout, task: Task, means: Means) -> None:
    """Add the rollout's episodes, responses and corrections to `means`."""
    for episode in rollout.episodes:
        if rollout.in_workers:
            lost = bool((episode[-1].final_info or {}).get("worker_lost"))
            means.add("episode/worker_lost", lost)
            if lost:
                continue  # its outcome is unknown
        success = task.success(episode)
        means.add("episode/return", sum(step.reward for step in episode))
        means.add("episode/length", len(episode))
        means.add("episode/success", success)
        if task.solvable(episode[0].info):
            means.add("episode/success_solvable", success)
        for name, value in task.metrics(episode).items():
            means.add(f"episode/{name}", value)
    steps = rollout.transitions
    means.add("reward", [step.reward for step in steps])
    means.add("response/valid", [step.response.valid for step in steps])
    means.add("response/legal", [step.legal for step in steps])
    means.add("response/hit_length_limit", [step.hit_length_limit for step in steps])
    means.add("response/tokens", [len(step.response_ids) for step in steps])
    verdicts = collections.Counter(c.verdict for c in rollout.corrections if c is not None)
    asked = sum(verdicts.values())
    for verdict in ("right", "corrected", "unsolvable", "failed"):
        if asked:
            means.add(f"corrector/{verdict}", [1.0] * verdicts[verdict] + [0.0] * (asked - verdicts[verdict]))
    answers = [c for c in rollout.corrections if c is not None and c.failure != "late"]
    means.add("corrector/latency", [answer.latency for answer in answers])


def without_images(rollout: Rollout) -> Rollout:
    """A rollout that is cheap to send: texts and verdicts, with images replaced by digests for comparison."""

    def light(step: Transition) -> Transition:
        digest = np.frombuffer(hashlib.blake2b(step.image.tobytes(), digest_size=16).digest(), np.uint8)
        return replace(step, image=digest, final_image=None, prompt=str(step.prompt), final_prompt=None)

    steps = [light(step) for step in rollout.transitions]
    return replace(rollout, transitions=steps, last_images=[], last_prompts=[], episodes=[])


def add_up(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of all processes: totals are summed, [`Share`]s by numerator and denominator."""
    total: dict[str, float] = {}
    for name, value in ((name, value) for each in metrics for name, value in each.items()):
        before = total.get(name)
        if isinstance(value, Share) and isinstance(before, Share):
            total[name] = Share(before.part + value.part, before.whole + value.whole)
        else:
            total[name] = value if before is None else before + value
    return total


def completions_table(rollout: Rollout, rows: int, seed: int, advantages: np.ndarray | None = None) -> Table:
    """A table of `rows` random steps: end of the prompt, thought, correction, action, reward."""
    table = Table(title="Sampled steps", show_lines=True)
    for column in ("prompt", "thought", "correction", "action", "reward", "advantage"):
        table.add_column(column, overflow="fold")
    chosen = np.random.default_rng(seed).choice(len(rollout), size=min(rows, len(rollout)), replace=False)
    for i in sorted(chosen):
        step, correction = rollout.transitions[i], rollout.corrections[i]
        table.add_row(
            _cell("…" + step.prompt[-_TAIL:]),
            _cell(step.response.thought if step.response.action_span else step.response.text),
            _cell("" if correction is None else _describe(correction)),
            _cell((step.response.action or "") + ("" if step.legal else " (not legal)")),
            f"{step.reward:g}",
            "" if advantages is None else f"{advantages[i]:+.2f}",
        )
    return table


def _cell(text: str) -> Text:
    """Text from a model, without rich markup or terminal control sequences."""
    return Text(printable(text))


def print_completions(rollout: Rollout, rows: int, seed: int, advantages: np.ndarray | None = None) -> None:
    Console().print(completions_table(rollout, rows, seed, advantages))


def _describe(correction: Correction) -> str:
    if correction.thought is not None:
        return "; ".join(f"{key}: {value}" for key, value in correction.thought.items())
    return correction.verdict + (f" ({correction.explanation})" if correction.explanation else "")
