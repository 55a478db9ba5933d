"""The GTR-Turbo guide (arXiv 2512.13043): the teacher is a merge of the run's own past policies."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ..config import GTRConfig
from ..correctors.base import Corrector
from ..distributed.means import Means
from ..engines.base import UNABLE, Engine
from ..engines.choice import check_temperature
from ..policy.network import PolicyWithValue
from ..policy.scores import Scores
from ..tasks.base import Task
from ..types import Correction, Rollout, Transition
from .base import Guide, GuidedRun
from .buffer import CorrectionBuffer
from .corrected import CorrectedThoughts
from .merging import FOLDER, LoraWeight, Merge, MergeRule, Past, RunningSums, Snapshots, Weighting
from .teacher_model import make_teacher

logger = logging.getLogger(__name__)

Variant = Literal["sft", "kl"]
MAX_KL = 10.0
"""Upper bound of a token's KL, and the KL of a response without a valid thought."""


class MergedTeacher(Guide):
    """Learns from a merge of the run's past policies: no labels from outside, no second model to choose.

    The first teacher is the start. Every `merge_every` updates the acting policy joins the past, and after that update
    the past is merged anew: a teacher is made of policies before the one that acts.

    Args:
        variant: `"sft"`: the teacher writes a thought for every valid response of the agent, which is cloned.
            `"kl"`: the agent's thought is scored under the teacher, and its KL is taken from the step's advantage.
        merge: `"ties"` or `"linear"`, see [`MergeRule`].
        weighting: `"ema"` or `"sma"`.
        merge_every: Updates between merges. More than the run has: the teacher stays the start.
        ties_density: Share of each tensor that TIES keeps.
        ema_alpha: Weight of the newest policy in `"ema"`.
        kl_beta: Weight of the KL, in reward units, in `"kl"`.
        temperature, top_k: For sampling the teacher's thoughts in `"sft"`.
        tries: How often the teacher is asked until its response is valid.
        corrector: Its labels are cloned where it answers; the teacher teaches the rest. `"kl"` applies to all steps.
    """

    teaches_alone = True

    def __init__(
        self,
        variant: Variant = "sft",
        *,
        merge: Merge = "ties",
        weighting: Weighting = "ema",
        merge_every: int = 1,
        ties_density: float = 0.8,
        ema_alpha: float = 0.5,
        kl_beta: float = 1.0,
        temperature: float = 0.2,
        top_k: int = 5,
        tries: int = 3,
        corrector: Corrector | None = None,
    ) -> None:
        if variant not in get_args(Variant):
            raise ValueError(f"`variant` must be 'sft' or 'kl', got {variant!r}.")
        for name, count, least in (("merge_every", merge_every, 1), ("tries", tries, 1), ("top_k", top_k, 0)):
            if not isinstance(count, int) or count < least:
                raise ValueError(f"`{name}` must be a whole number, at least {least}, got {count}.")
        if not (0 <= kl_beta < math.inf and 0 < temperature < math.inf):
            raise ValueError(
                "`kl_beta` must be at least 0, `temperature` above 0, and both finite, got "
                f"{kl_beta} and {temperature}."
            )
        self.shapes_advantages = variant == "kl"
        self.variant, self.rule = variant, MergeRule(merge, weighting, ties_density, ema_alpha)
        self.merge_every, self.kl_beta, self.tries = merge_every, kl_beta, tries
        self.temperature, self.top_k = temperature, top_k
        self.corrected = None if corrector is None else CorrectedThoughts(corrector)
        self.corrector = None if self.corrected is None else self.corrected.corrector
        self.buffer: CorrectionBuffer | None = None
        self.engine: Engine | None = None
        self.writer: Engine | None = None
        """Generates the thoughts to clone, with a temperature and top-k of its own."""
        self._attached: _Attached | None = None
        self._updates = 0
        self._added_in = -1
        """The update in which a policy was last added."""
        self._adding = 0.0
        """Seconds that adding the newest policy has taken."""

    @property
    def description(self) -> str:
        return f"GTR-Turbo ({self.variant}): a teacher merged from the run's past ({self.rule.merge})"

    def settings(self) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "tries": self.tries}
        about = {"variant": self.variant, "merge_every": self.merge_every, "kl_beta": self.kl_beta}
        return {**about, **vars(self.rule), **sampling}

    def check(self, task: Task) -> None:
        if self.corrected is not None:
            self.corrected.check(task)

    def check_settings(self, args: GTRConfig) -> None:
        if self.variant == "sft" and args.thought_cloning_coef == 0:
            raise ValueError("The teacher's thoughts are cloned: set `thought_cloning_coef` above 0, or variant='kl'.")
        if self.variant == "sft":
            check_temperature(args, self.temperature)
        if self.variant == "kl" and args.ppo_coef == 0:
            raise ValueError(
                "The KL to the teacher shapes PPO's advantages: set `ppo_coef` above 0, or variant='sft'."
            )

    def attach(self, run: GuidedRun) -> None:
        args, processes = run.args, run.processes
        if processes.zero3:
            raise ValueError("A merged teacher needs whole weights, which ZeRO-3 shards: use ZeRO-2.")
        model, weights = make_teacher(run.model)
        kind = Snapshots if isinstance(weights[0], LoraWeight) else RunningSums
        past = kind(self.rule, weights, Path(args.output_dir) / FOLDER)
        processes.check_on_first(lambda: check_disk(past, args, self.merge_every))
        self._attached = _Attached(run, model, past)
        self.engine = run.make_engine(model)
        self.writer = run.make_engine(model, temperature=self.temperature, top_k=self.top_k)
        if self.corrected is not None:
            self.corrected.attach(run)
            self.buffer = self.corrected.buffer
        elif self.variant == "sft":
            self.buffer = CorrectionBuffer(args.correction_buffer_size, seed=args.seed + processes.rank)

    @property
    def _run(self) -> _Attached:
        if self._attached is None:
            raise RuntimeError("This guide is not attached to a run: pass it to a GTRTrainer.")
        return self._attached

    @property
    def teacher(self) -> nn.Module:
        """The teacher: a vision-language model without an adapter."""
        return self._run.model

    # --- teaching ----------------------------------------------------------------------------------------------------

    def labels(self, rollout: Rollout, update: int, means: Means) -> int:
        run, past = self._run.run, self._run.past
        if past.count == 0:  # not before training begins: the output folder may hold an earlier run until then
            self._add_policy(run, update)
            self._merge()
        pairs = zip(rollout.transitions, rollout.corrections, strict=True)
        steps = [step for step, correction in pairs if step.response.valid and not _answered(correction)]
        # First what may fail: nothing of a rollout that is abandoned may be in the checkpoint.
        thoughts = self._written(steps, update, means) if self.variant == "sft" else [None] * len(steps)
        if self._added_in != update and (self._updates + 1) % self.merge_every == 0:
            self._add_policy(run, update)  # merged after this update, whose teacher does without the acting policy
        corrected = 0 if self.corrected is None else self.corrected.labels(rollout, update, means)
        return corrected + sum(self._add_label(step, ids, update) for step, ids in zip(steps, thoughts, strict=True))

    def _written(self, steps: Sequence[Transition], update: int, means: Means) -> list[np.ndarray | None]:
        """The teacher's thoughts for these steps. If it can't write, this raises on all processes: none may wait."""
        run, thoughts = self._run.run, []
        fault: Exception | None = None
        seed = np.random.SeedSequence([run.args.seed, update, run.processes.rank]).generate_state(1)[0]
        device = run.args.device
        # Separate random numbers: the teacher must not change what the agent samples.
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(int(seed))
            try:
                thoughts = self._thoughts(steps, means)
            except UNABLE as error:
                fault = error
        run.processes.raise_first(fault)
        return thoughts

    def _thoughts(self, steps: Sequence[Transition], means: Means) -> list[np.ndarray | None]:
        """The teacher's thought for each step, as sampled ids; `None` if none of its responses was valid."""
        run, writer = self._run.run, self.writer
        assert writer is not None
        thoughts: list[np.ndarray | None] = [None] * len(steps)
        missing, tries, size = list(range(len(steps))), 0, run.args.per_device_eval_batch_size
        written: list[bool] = []
        with writer.ready():
            while missing and tries < self.tries:
                for start in range(0, len(missing), size):
                    batch = missing[start : start + size]
                    images = [steps[i].image for i in batch]
                    for i, generation in zip(
                        batch, writer.generate([steps[i].prompt for i in batch], images), strict=True
                    ):
                        response = run.task.format.parse(generation.text)
                        written.append(response.valid)
                        if response.valid:
                            end = run.policy.spans.action_start(generation.ids, response.action_span)
                            thoughts[i] = generation.ids[:end]
                missing, tries = [i for i in missing if thoughts[i] is None], tries + 1
        means.add("teacher/parsed", [thought is not None for thought in thoughts])
        means.add("teacher/valid", written)
        return thoughts

    def _add_label(self, step: Transition, thought: np.ndarray | None, update: int) -> bool:
        """Add a thought to the buffer, followed by the agent's own action, which is no label."""
        if thought is None or len(thought) == 0 or self.buffer is None:
            return False
        own = self._run.run.policy.spans.action_start(step.response_ids, step.response.action_span)
        ids = np.concatenate([thought, step.response_ids[own:]])
        self.buffer.add(step.prompt, step.image, ids, len(thought), update=update)
        return True

    def shaping(self, rollout: Rollout, scores: Scores, means: Means) -> Tensor | None:
        if self.variant == "sft":
            return None
        run, steps = self._run.run, rollout.transitions
        teacher = run.score(steps, PolicyWithValue(self._run.model, None))
        valid = torch.tensor([step.response.valid for step in steps], device=scores.mask.device)
        kl = torch.where(valid, thought_kl(scores, teacher), MAX_KL)
        means.add("teacher/kl", kl[valid])
        scale = run.args.reward_scale or float(run.task.reward_scale)
        return -self.kl_beta * scale * kl

    # --- merging -----------------------------------------------------------------------------------------------------

    def after_update(self, model: nn.Module, means: Means) -> None:
        self._updates += 1
        if self._updates % self.merge_every:
            return
        started = time.perf_counter()
        self._merge(means)
        means.maximum("teacher/merge_seconds", self._adding + time.perf_counter() - started)

    def _add_policy(self, run: GuidedRun, update: int) -> None:
        past, started = self._run.past, time.perf_counter()
        with run.processes.raise_on_all_ranks(f"The policy could not be added to {past.folder}", _FREE_SPACE):
            if run.processes.rank == 0:
                if past.count == 0:
                    past.clear()
                past.add()
        past.count = run.processes.gather(past.count)[0]
        self._adding, self._added_in = time.perf_counter() - started, update

    def _merge(self, means: Means | None = None) -> None:
        """Merge on the first process, and send the teacher to all others."""
        run, past = self._run.run, self._run.past
        with run.processes.raise_on_all_ranks("The past policies could not be merged", _FREE_SPACE), torch.no_grad():
            if run.processes.rank == 0:
                distance = past.merge()
                if means is not None:
                    means.add("teacher/distance", distance.to_teacher)
                    means.add("teacher/travelled", distance.travelled)
        run.processes.broadcast([weight.merged for weight in past.weights])

    # --- state -------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        return {} if self.corrected is None else self.corrected.metrics()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"updates": self._updates, "added_in": self._added_in}
        if self.corrected is not None:
            state["corrected"] = self.corrected.state_dict()
        elif self.buffer is not None:
            state["buffer"] = {name: torch.from_numpy(array) for name, array in self.buffer.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "updates" not in state:
            if state:  # saved by a run with another guide (`allow_changed_config`)
                logger.warning("The checkpoint's guide was another: the teacher starts with the policy as it is now.")
            return
        self._updates, self._added_in = state["updates"], state.get("added_in", -1)
        if self.corrected is not None:
            self.corrected.load_state_dict(state.get("corrected", {}))
        elif self.buffer is not None and "buffer" in state:
            self.buffer.load_state_dict(state["buffer"])

    def files(self) -> dict[str, Path]:
        return {} if self._attached is None else self._attached.past.files()

    def load_files(self, files: Mapping[str, Path]) -> None:
        run, past = self._run.run, self._run.past
        run.processes.check_on_first(lambda: past.check_files(files))
        with run.processes.raise_on_all_ranks(
            f"The past policies could not be restored to {past.folder}", _FREE_SPACE
        ):
            if run.processes.rank == 0:
                past.restore(files)
        past.count = run.processes.gather(past.count)[0]
        self._merge()

    def close(self) -> None:
        if self.corrected is not None:
            self.corrected.close()

    def release(self) -> None:
        super().release()
        if self.writer is not None:
            self.writer.close()


_FREE_SPACE = "Free some disk space and resume."


class _Attached(NamedTuple):
    """What a teacher has once it is attached to a run."""

    run: GuidedRun
    model: Any
    past: Past


def thought_kl(policy: Scores, teacher: Scores) -> Tensor:
    """Mean over a response's thought tokens of log π − log π_teacher, each bounded to [0, `MAX_KL`]: (B,).

    Both score the same ids, which the policy has sampled, so this estimates the KL from the teacher to the policy.
    """
    positions = torch.arange(policy.mask.shape[1], device=policy.mask.device)
    thought = policy.mask & (positions[None] < policy.action_start[:, None])
    ratios = (policy.token_logprobs - teacher.token_logprobs).clamp(0.0, MAX_KL)
    return torch.where(thought, ratios, torch.zeros_like(ratios)).sum(1) / thought.sum(1).clamp(min=1)


def check_disk(past: Past, args: GTRConfig, merge_every: int) -> None:
    """Raise a `ValueError` if the disk can't hold the past of the whole run.

    With groups its length is only an estimate; if the disk can't hold that of the longest such run, this warns.
    """
    needed = _bytes_needed(past, args, merge_every, args.num_updates)
    existing = next(folder for folder in (past.folder.absolute(), *past.folder.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free + past.bytes_held()  # replaced, or part of what a resumed run needs
    if needed > free:
        raise ValueError(
            f"The merged teacher needs {needed / 1e9:.3g} GB in {past.folder} for this run, but only "
            f"{free / 1e9:.3g} GB are free. Raise `merge_every`, lower `save_total_limit`, or choose another "
            "`output_dir`."
        )
    if args.group_size == 1:
        return
    longest = math.ceil(args.total_env_steps / args.num_envs)  # at least one step in each environment
    needed = _bytes_needed(past, args, merge_every, longest)
    if needed > free:
        logger.warning(
            "The disk holds the past of the expected %d updates. If episodes are so short that there are up to %d, "
            "the merged teacher needs %.3g GB in %s, but only %.3g GB are free.",
            args.num_updates, longest, needed / 1e9, past.folder, free / 1e9,
        )  # fmt: skip


def _bytes_needed(past: Past, args: GTRConfig, merge_every: int, updates: int) -> int:
    return past.bytes_needed(1 + updates // merge_every, _kept_checkpoints(args, updates))


def _kept_checkpoints(args: GTRConfig, updates: int) -> int:
    if args.save_strategy == "no":
        return 0
    every = args.save_steps if args.save_steps >= 1 else args.save_steps * args.num_updates  # or a share of the run
    saved = math.ceil(updates / max(1.0, every))
    return min(saved, args.save_total_limit or saved)


def _answered(correction: Correction | None) -> bool:
    return correction is not None and correction.verdict != "failed"
