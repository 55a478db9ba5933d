"""The amount of work in a run: updates, optimizer steps, tokens, FLOPs, and hours on a card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..config import GTRConfig
from .cards import Card
from .estimate import Estimate
from .observations import Observations
from .skeleton import Skeleton, size
from .trace import Pass


@dataclass
class PlannedConfig(GTRConfig):
    """The run's settings, with the number of processes it will have."""

    processes: int = field(default=1, metadata={"help": "Number of processes, one per card."})

    def __post_init__(self) -> None:
        # The planning machine may differ from the training one, so don't check its hardware. float16 takes as much
        # memory as bfloat16.
        half = bool(self.bf16 or self.fp16 or (self.bf16 is None and not self.use_cpu))
        self.__dict__.update(bf16=False, fp16=False)
        super().__post_init__()
        self.bf16 = half

    def _set_sizes(self, processes: int) -> None:
        super()._set_sizes(self.processes)


@dataclass(frozen=True)
class Work:
    """Upper bounds for a run: no epoch is cut short by `target_kl`."""

    args: PlannedConfig
    clones: bool
    """Whether thoughts are cloned, from the first update on."""
    values: bool = True
    """Whether there is a value head, whose values close a rollout."""
    longest_episode: int | None = None
    """Steps, if whole episodes are played; `None` if a rollout has a fixed number of steps."""
    teacher: Literal["sft", "kl"] | None = None
    """The variant of the merged teacher, if it is the guide."""

    @property
    def joint(self) -> bool:
        """Whether PPO and cloning share their backward passes."""
        return self.clones and self.args.update_schedule == "joint"

    @property
    def steps(self) -> int:
        """Environment steps per update; with whole episodes, the expected number."""
        return self.args.num_envs * self.args.rollout_steps

    @property
    def ppo_samples(self) -> int:
        """PPO samples per update."""
        return self.args.num_ppo_epochs * self.steps if self.args.ppo_coef > 0 else 0

    @property
    def cloned_samples(self) -> int:
        """Cloning samples per update."""
        if self.joint:
            return self.args.num_ppo_epochs * self.steps
        return self.args.cloning_steps * self.mini_batch if self.clones else 0

    @property
    def optimizer_steps(self) -> int:
        """Per update."""
        passes = max(self.ppo_samples, self.cloned_samples) if self.joint else self.ppo_samples + self.cloned_samples
        return passes // self.mini_batch

    @property
    def scored_samples(self) -> int:
        """Forward passes without gradient per update: old log-probs, those of the starting policy and the teacher if
        needed, and values of the last states."""
        networks = 1 + (self.args.kl_coef > 0) + (self.teacher == "kl")
        return networks * self.steps + (self.args.num_envs if self.values else 0)

    @property
    def generated_samples(self) -> int:
        """Responses generated per update: the agent's, and the teacher's."""
        return self.steps * (2 if self.teacher == "sft" else 1)

    @property
    def mini_batch(self) -> int:
        """Samples per optimizer step, over all processes."""
        assert self.args.mini_batch_size is not None  # filled in by the config
        return self.args.mini_batch_size


def update_section(work: Work, seen: Observations) -> list[Estimate]:
    """Work in one update."""
    args, prompt, response = work.args, _mean(seen.prompt_tokens), _mean(seen.response_tokens)
    trained = work.ppo_samples + work.cloned_samples
    cut = f"mini-batch / ({args.per_device_train_batch_size} × {args.processes} processes)"
    generated = "steps, by the agent and its teacher," if work.teacher == "sft" else "steps"
    samples = f"{work.ppo_samples:,} samples of PPO and {work.cloned_samples:,} of cloning, with their prompts"
    steps = [Estimate("environment steps", work.steps, "", "num_envs × rollout_steps")]
    if work.longest_episode is not None:
        rounds = 1 + args.refill_groups
        most = f"num_envs × step limit ({work.longest_episode}){f' × {rounds}, with refills' if rounds > 1 else ''}"
        steps = [
            Estimate("environment steps", work.steps, "", "num_envs × rollout_steps, the expected episode length"),
            Estimate("most steps", args.num_envs * work.longest_episode * rounds, "", most),
        ]
    return [
        *steps,
        Estimate("mini-batch", work.mini_batch, "", "setting; over all processes"),
        Estimate("accumulation steps", args.gradient_accumulation_steps, "", cut),
        Estimate("optimizer steps", work.optimizer_steps, "", "epochs × mini-batches, and cloning's own; at most"),
        Estimate("generated tokens", work.generated_samples * response, "", f"{generated} × the mean response"),
        Estimate("trained tokens", trained * (prompt + response), "", samples),
    ]


@dataclass(frozen=True)
class Speed:
    """Assumed speed of a card."""

    card: Card
    name: str
    bf16: bool
    utilisation: float
    """Share of peak FLOPs while prefilling, scoring and training."""
    decoding_utilisation: float
    """Share of the memory bandwidth while decoding."""

    @property
    def flops(self) -> float:
        return self.utilisation * (self.card.bf16_flops if self.bf16 else self.card.fp32_flops)

    @property
    def bandwidth(self) -> float:
        return self.decoding_utilisation * self.card.bandwidth


@dataclass(frozen=True)
class Passes:
    """Traced micro-batches of the longest prompts, with the longest response and with a single token."""

    rows: int
    longest: Pass
    response_tokens: int
    shortest: Pass

    def flops(self, response: float) -> float:
        """Forward pass of one sample with a response of this length, interpolated between the two traces."""
        share = (response - 1) / max(1, self.response_tokens - 1)
        return (self.shortest.flops + share * (self.longest.flops - self.shortest.flops)) / self.rows

    def training_flops(self, response: float, checkpointing: bool) -> float:
        """Forward and backward pass of one sample."""
        again = self.longest.recomputed_flops if checkpointing else 0.0
        factor = 1 + (self.longest.backward_flops + again) / self.longest.flops
        return factor * self.flops(response)


def run_section(
    work: Work, seen: Observations, passes: Passes, skeleton: Skeleton, speed: Speed | None
) -> list[Estimate]:
    """Work in the whole run: FLOPs, and hours if the card is known."""
    args, response = work.args, _mean(seen.response_tokens)
    forward = passes.flops(response)
    training = passes.training_flops(response, bool(args.gradient_checkpointing))
    updates, again = args.num_updates, ", layers recomputed" if args.gradient_checkpointing else ""
    scoring = updates * work.scored_samples * forward
    learning = updates * (work.ppo_samples + work.cloned_samples) * training
    collecting = updates * work.generated_samples * forward  # decoding a token costs as much as prefilling it
    found = [
        Estimate("updates", updates, "", "total_env_steps / environment steps, rounded up"),
        Estimate("optimizer steps", updates * work.optimizer_steps, "", "at most: target_kl may stop an update early"),
        Estimate("forward pass", forward, "FLOPs", "traced: the longest prompt with a mean response"),
        Estimate("training pass", training, "FLOPs", f"traced: forward, backward{again}"),
        Estimate(
            "all passes", collecting + scoring + learning, "FLOPs", "collecting, scoring, learning; all processes"
        ),
    ]
    if speed is None:
        return [*found, Estimate("hours", "unknown", "", "on a CPU: run one update and read `time/*` in its log")]
    count, assumed = args.processes, f"at {speed.utilisation:.0%} of {speed.name}'s peak: assumed"
    hours = {
        "collecting": _collecting_seconds(work, seen, passes, skeleton, speed) / 3600,
        "scoring": scoring / count / speed.flops / 3600,
        "learning": learning / count / speed.flops / 3600,
    }
    reading = f"each token reads all weights, at {speed.decoding_utilisation:.0%} of the bandwidth: assumed"
    notes = {"collecting": reading, "scoring": assumed, "learning": assumed}
    left_out = "without evaluations, checkpoints, slow environments, late corrections"
    return [
        *found,
        *(Estimate(name, value, "hours", notes[name]) for name, value in hours.items()),
        Estimate("hours", sum(hours.values()), "hours", left_out),
        Estimate("card hours", sum(hours.values()) * count, "hours", f"hours × {count} cards"),
    ]


def _collecting_seconds(work: Work, seen: Observations, passes: Passes, skeleton: Skeleton, speed: Speed) -> float:
    """A vector step prefills its prompts, then decodes until its longest response ends."""
    args = work.args
    reading = args.num_envs / args.processes * passes.flops(1) / speed.flops
    token = size(list(skeleton.module.policy.parameters())) / speed.bandwidth
    batches = 2 if args.overlap else 1
    rounds = args.rollout_steps * work.generated_samples / work.steps  # the teacher's batches are assumed as large
    return args.num_updates * rounds * (reading + batches * max(seen.response_tokens) * token)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
