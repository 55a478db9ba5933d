"""A run's full plan, computed from its settings, task and processor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trl import ModelConfig

from ..correctors.arguments import CorrectorArguments
from ..guides.arguments import GuideArguments
from ..learning.advantages import choose_estimator
from ..policy.scoring import VLMPolicy
from ..rollouts.playing import step_limit
from ..tasks import Task
from .estimate import Estimate, key
from .memory import Sharding, memory, memory_section
from .money import corrector_section
from .observations import Observations, observe
from .skeleton import Skeleton, build_skeleton, numbers
from .trace import trace
from .work import Passes, PlannedConfig, Speed, Work, run_section, update_section


@dataclass(frozen=True)
class Plan:
    """Sections of estimates, in printing order."""

    title: str
    sections: dict[str, list[Estimate]]

    def to_json(self) -> dict[str, Any]:
        sections = {
            key(name): {key(each.name): each.to_json() for each in found} for name, found in self.sections.items()
        }
        return {"title": self.title, **sections}


def make_plan(
    task: Task,
    args: PlannedConfig,
    model_args: ModelConfig,
    corrector_args: CorrectorArguments,
    *,
    speed: Speed | None,
    available: float,
    where: str,
    sharding: Sharding | None = None,
    guide_args: GuideArguments | None = None,
) -> Plan:
    """Plan a run.

    Args:
        speed: Speed of the card; `None` on a CPU, where it is unknown.
        available: Bytes of memory per process.
        where: Describes that memory.
        sharding: How DeepSpeed shards the run, if it does.
        guide_args: Who teaches thoughts; by default the corrector.
    """
    estimator = choose_estimator(None, args, task)
    head = args.value_head_sizes if estimator.needs_values else None
    skeleton = build_skeleton(model_args, head, detach_value=not args.value_gradient_to_trunk)
    policy = VLMPolicy.from_settings(skeleton.module.policy, skeleton.processor, args)
    seen = observe(task, policy, skeleton.module.policy)
    guide = guide_args or GuideArguments()
    if not guide.asks_corrector:
        corrector_args = replace(corrector_args, corrector="none")
    teaches = corrector_args.corrector != "none" or guide.variant == "sft"
    work = Work(
        args,
        clones=args.thought_cloning_coef > 0 and teaches,
        values=estimator.needs_values,
        longest_episode=_longest_episode(task) if estimator.needs_groups else None,
        teacher=guide.variant,
    )
    rows = args.per_device_train_batch_size
    longest, shortest = (
        trace(skeleton.module, policy, *seen.rows(rows), length, bool(args.bf16))
        for length in (args.max_completion_length, 1)
    )
    passes = Passes(rows, longest, args.max_completion_length, shortest)
    parts = skeleton, work, seen, passes, sharding or Sharding()
    found = memory(*parts, available=available, on_cpu=speed is None)
    processes = f"{args.processes} process{'es' if args.processes > 1 else ''}"
    return Plan(
        f"{model_args.model_name_or_path} on {task.name}, {processes}",
        {
            "model": model_section(skeleton),
            "tokens": token_section(seen, args),
            "memory": memory_section(found, available, where),
            "not in that memory": found.beside,
            "an update": update_section(work, seen),
            "the run": run_section(work, seen, passes, skeleton, speed),
            "corrector": corrector_section(work, seen, corrector_args),
        },
    )


def _longest_episode(task: Task) -> int:
    env = task.make_env()
    try:
        return step_limit(env)
    finally:
        env.close()


def model_section(skeleton: Skeleton) -> list[Estimate]:
    base, policy, head = skeleton.base_parameters, numbers(skeleton.trained), numbers(skeleton.value_head)
    built = "counted on the model without weights"
    found = [Estimate("parameters", base, "", f"{built}, built from the checkpoint's config")]
    if skeleton.lora_targets:
        parts = ", ".join(f"{count} in {part}" for part, count in skeleton.targets_by_part().items())
        found.append(Estimate("LoRA targets", len(skeleton.lora_targets), "", parts))
    share = policy / (base + policy if skeleton.lora_targets else base)
    none = "none: the method has no values to predict"
    return [
        *found,
        Estimate("trained parameters", policy, "", built),
        Estimate("trained share", share, "share", "of the policy's parameters, including the adapter"),
        Estimate("value head", head, "", f"{built}; trained too" if head else none),
    ]


def token_section(seen: Observations, args: PlannedConfig) -> list[Estimate]:
    states, prompts, responses = len(seen.requests), seen.prompt_tokens, seen.response_tokens
    return [
        Estimate(
            "image", seen.image_tokens, "", f"the most of {states} real observations; a fifth of the actions random"
        ),
        Estimate(
            "prompt", sum(prompts) / states, "", "mean of the same, by processor and chat template, image included"
        ),
        Estimate("longest prompt", max(prompts), "", "of the same"),
        Estimate("response", sum(responses) / states, "", "mean of the expert's responses in these states"),
        Estimate("longest response", max(responses), "", "of the same"),
        Estimate(
            "response limit", args.max_completion_length, "", "max_completion_length; memory is computed with it"
        ),
    ]
