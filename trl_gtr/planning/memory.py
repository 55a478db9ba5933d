"""GPU memory of one process, part by part, while acting and while learning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..storage.plain_data import read_yaml
from .estimate import GIB, Estimate, readable_bytes
from .observations import Observations
from .skeleton import Skeleton, numbers, size
from .work import Passes, Work

RESERVE = 2 * GIB
"""For the CUDA context, NCCL, temporaries and fragmentation. A guess, not a measurement."""
VLLM_CACHE_ON_CPU = GIB
"""What a colocated vLLM is told to take."""
_ZERO_BUCKET = 500_000_000  # elements; DeepSpeed's default


@dataclass(frozen=True)
class Sharding:
    """How DeepSpeed shards a run; stage 0 means without DeepSpeed."""

    stage: int = 0
    processes: int | None = None
    offloads_optimizer: bool = False

    @classmethod
    def read(cls, file: str | Path) -> Sharding:
        """Read a file for `accelerate launch --config_file`."""
        content = read_yaml(file)
        if not isinstance(content, Mapping) or "distributed_type" not in content:
            raise ValueError(f"{file} is not an accelerate configuration: it has no `distributed_type`.")
        processes = int(content.get("num_processes", 1))
        if content["distributed_type"] == "FSDP":
            raise ValueError("FSDP is not supported: use DDP or DeepSpeed (examples/accelerate_configs).")
        if content["distributed_type"] != "DEEPSPEED":
            return cls(processes=processes)
        options: Mapping[str, Any] = content.get("deepspeed_config") or {}
        if "zero_stage" not in options:
            raise ValueError(f"{file} doesn't set `zero_stage`, so it is unclear what is sharded.")
        offloads = options.get("offload_optimizer_device", "none") not in (None, "none")
        return cls(int(options["zero_stage"]), processes, offloads)


@dataclass(frozen=True)
class Memory:
    """Memory of one process, in bytes."""

    lasting: list[Estimate]
    """Always allocated."""
    acting: list[Estimate]
    learning: list[Estimate]
    beside: list[Estimate]
    """Not counted: the other gradient-checkpointing setting, and host memory."""

    @property
    def peak_acting(self) -> float:
        return _total(self.lasting, self.acting)

    @property
    def peak_learning(self) -> float:
        return _total(self.lasting, self.learning)


def memory(
    skeleton: Skeleton,
    work: Work,
    seen: Observations,
    passes: Passes,
    sharding: Sharding,
    *,
    available: float,
    on_cpu: bool,
) -> Memory:
    """What each part of a run takes.

    Args:
        available: Bytes of memory per process, of which a colocated vLLM takes a share.
        on_cpu: Whether there is no card.
    """
    reserve = [] if on_cpu else [Estimate("reserve", RESERVE, "bytes", "assumed: CUDA, NCCL, temporary results")]
    divided = _divided if sharding.stage else _undivided
    lasting, gradients = divided(skeleton, work, sharding)
    if work.teacher is not None:
        how = "its own copy of the weights that are merged; no gradients, no moments"
        lasting.append(Estimate("merged teacher", size(skeleton.merged), "bytes", how))
    whole = []
    if sharding.stage == 3:
        weights = numbers(list(skeleton.module.parameters())) * (2 if work.args.bf16 else 4)
        whole = [Estimate("gathered weights", weights, "bytes", "ZeRO-3: the full model while acting")]
    generating = _generating(skeleton, work, seen, available, on_cpu)
    if work.args.engine == "vllm" and not work.args.vllm_enable_sleep_mode:
        lasting, generating = [*lasting, *generating], []
    return Memory(
        lasting,
        [*whole, *generating, *reserve],
        [*gradients, _activations(work, passes, bool(work.args.gradient_checkpointing)), *reserve],
        [
            _activations(work, passes, not work.args.gradient_checkpointing),
            _feature_cache(work, seen),
        ],
    )


def memory_section(found: Memory, available: float, where: str) -> list[Estimate]:
    peak = max(found.peak_acting, found.peak_learning)
    free = available - peak
    verdict = ("fits", f"{readable_bytes(free)} free") if free >= 0 else ("too large", f"by {readable_bytes(-free)}")
    return [
        *found.lasting,
        *(each for each in found.acting if each.name != "reserve"),
        *found.learning,
        Estimate("peak, acting", found.peak_acting, "bytes", _names(found.acting)),
        Estimate("peak, learning", found.peak_learning, "bytes", _names(found.learning)),
        Estimate("available", available, "bytes", where),
        Estimate("verdict", verdict[0], "", f"{verdict[1]}: larger peak vs. available memory"),
    ]


def _undivided(skeleton: Skeleton, work: Work, sharding: Sharding) -> tuple[list[Estimate], list[Estimate]]:
    """Plain data parallelism: each process holds everything."""
    policy, head = skeleton.trained, skeleton.value_head
    adam, how = 2 * size([*policy, *head]), "two moments per trained parameter, in its dtype"
    if work.clones and not work.joint:
        adam, how = adam + 2 * size(policy), f"{how}; cloning has its own moments"
    found = [
        *([Estimate("weights", size(skeleton.frozen), "bytes", "counted; frozen")] if skeleton.lora_targets else []),
        Estimate("adapters" if skeleton.lora_targets else "weights", size(policy), "bytes", "counted; trained"),
        *([Estimate("value head", size(head), "bytes", "counted; trained, float32")] if head else []),
        Estimate("Adam", adam, "bytes", how),
    ]
    if work.args.kl_coef > 0 and not skeleton.lora_targets:
        found.append(Estimate("reference", size(policy), "bytes", "kl_coef: a copy of the starting policy"))
    gradients = Estimate("gradients", size([*policy, *head]), "bytes", "one per trained parameter, in its dtype")
    return found, [gradients]


def _divided(skeleton: Skeleton, work: Work, sharding: Sharding) -> tuple[list[Estimate], list[Estimate]]:
    """DeepSpeed: the engine's weights in one dtype; float32 master weights and moments are sharded."""
    count, width = work.args.processes, 2 if work.args.bf16 else 4
    frozen, trained = numbers(skeleton.frozen), numbers([*skeleton.trained, *skeleton.value_head])
    parts = count if sharding.stage == 3 else 1
    found = []
    if frozen:
        found.append(Estimate("weights", frozen * width / parts, "bytes", _over("counted; frozen", parts)))
    found.append(Estimate("trained weights", trained * width / parts, "bytes", _over("counted", parts)))
    adam = 0 if sharding.offloads_optimizer else 12 * trained / count
    where = "offloaded to the host" if sharding.offloads_optimizer else "float32 master and two moments"
    found.append(Estimate("Adam", adam, "bytes", _over(where, count)))
    if work.args.kl_coef > 0 and not skeleton.lora_targets:
        found.append(Estimate("reference", trained * width, "bytes", "kl_coef: a copy of the starting policy"))
    parts = count if sharding.stage >= 2 else 1
    bucket = min(_ZERO_BUCKET, trained) * width
    return found, [
        Estimate("gradients", trained * width / parts, "bytes", _over(f"{width} bytes per parameter", parts)),
        Estimate("ZeRO bucket", bucket, "bytes", "DeepSpeed's default of 5e8 elements, or all trained parameters"),
    ]


def _activations(work: Work, passes: Passes, checkpointing: bool) -> Estimate:
    """For one micro-batch. A joint step keeps those of PPO and cloning until their shared backward pass."""
    count = 2 if work.joint and work.ppo_samples else 1
    kept, rows = passes.longest, work.args.per_device_train_batch_size
    how = f"traced: {'PPO and cloning, each ' if count == 2 else ''}{rows} of the longest prompts and responses"
    if checkpointing:
        value = count * kept.saved_with_checkpointing + kept.largest_layer
        return Estimate("activations checkpointed", value, "bytes", f"{how}, one layer recomputed")
    return Estimate("activations, all kept", count * kept.saved, "bytes", how)


def _generating(skeleton: Skeleton, work: Work, seen: Observations, available: float, on_cpu: bool) -> list[Estimate]:
    """What the engine takes besides the trained model."""
    args = work.args
    if args.engine == "transformers":
        return [_kv_cache(skeleton, work, seen)]
    if args.vllm_mode == "server":
        return [Estimate("vLLM server", 0, "bytes", "weights and cache are where the server runs")]
    if on_cpu:
        weights = skeleton.base_parameters * (2 if args.bf16 else 4)
        how = f"a copy of the weights, and {readable_bytes(VLLM_CACHE_ON_CPU)} of cache"
        return [Estimate("vLLM", weights + VLLM_CACHE_ON_CPU, "bytes", how)]
    share = args.vllm_gpu_memory_utilization
    how = f"vllm_gpu_memory_utilization: {share:.0%} of the card, for a copy of the weights and its cache"
    return [Estimate("vLLM", share * available, "bytes", how)]


def _kv_cache(skeleton: Skeleton, work: Work, seen: Observations) -> Estimate:
    args = work.args
    acting = math.ceil(args.num_envs / args.processes / (2 if args.overlap else 1))
    rows = max(acting, args.per_device_eval_batch_size)
    tokens = max(seen.prompt_tokens) + args.max_completion_length
    width = 2 if args.bf16 else next(skeleton.module.policy.parameters()).element_size()
    value = rows * tokens * skeleton.kv_bytes_per_token(width)
    return Estimate("KV cache", value, "bytes", f"2 × layers × KV heads × head size; {rows} rows of {tokens:,} tokens")


def _feature_cache(work: Work, seen: Observations) -> Estimate:
    args = work.args
    pictures = work.steps // args.processes
    needed, limit = pictures * seen.picture_bytes, args.feature_cache_gb * GIB
    enough = "all fit" if needed <= limit else f"{limit / needed:.0%} fit into feature_cache_gb"
    how = f"in host memory: {pictures:,} pictures of {readable_bytes(seen.picture_bytes)}; {enough}"
    return Estimate("feature cache", min(needed, limit), "bytes", how)


def _over(how: str, parts: int) -> str:
    return how if parts == 1 else f"{how}; over {parts} processes"


def _total(*groups: list[Estimate]) -> float:
    return sum(float(each.value) for group in groups for each in group)


def _names(found: list[Estimate]) -> str:
    return ", ".join(["lasting parts", *(each.name for each in found)])
