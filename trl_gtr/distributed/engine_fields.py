"""Settings of the engine that generates, and of where environments run.

Names are those of TRL's `GRPOConfig` where it has them, except for `vllm_base_url` (there `vllm_server_base_url`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .field_rules import field_with_rule as _field


@dataclass
class EngineFields:
    """Which engine generates in rollouts and evaluations, and how it is set up."""

    # --- the engine -------------------------------------------------------------------------------------------
    engine: Literal["transformers", "vllm"] = _field(
        "transformers",
        "What generates: 'transformers', with the trained model itself, or 'vllm', which has a copy of the weights "
        'that is renewed after every update (`pip install "trl-gtr[vllm]"`).',
    )
    vllm_mode: Literal["colocate", "server"] = _field(
        "colocate",
        "'colocate': vLLM in every process of the run, on its device. 'server': one vLLM server, which all processes "
        "share; this environment then needs no vLLM (see docs/scaling).",
        resume="free",
    )
    vllm_base_url: str = _field(
        "http://localhost:8000", "Address of the server, for `vllm_mode='server'`.", resume="free"
    )
    vllm_server_timeout: float = _field(
        240.0,
        "Seconds to wait for the server: at the start, and when it doesn't answer or has been restarted.",
        resume="free",
        above=0,
    )
    vllm_sync: Literal["file", "nccl", "gloo"] = _field(
        "file",
        "How a server gets new weights: through a 'file' in `vllm_sync_dir`, or over the network, from GPU to GPU "
        "with 'nccl', from CPU to CPU with 'gloo'.",
        resume="free",
    )
    vllm_group_port: int = _field(
        51216,
        "Port on which processes listen with 'nccl' and 'gloo'; process r uses this port + r. 0: any free ones.",
        resume="free",
        at_least=0,
        at_most=65535,
    )
    vllm_sync_dir: str | None = _field(
        None,
        "Folder through which the server gets new weights; the server must see it under the same path. None: "
        "/dev/shm, for a server on the same machine.",
        resume="free",
    )
    vllm_gpu_memory_utilization: float = _field(
        0.3,
        "Share of the GPU's memory that a colocated vLLM takes for its weights and cache.",
        resume="free",
        above=0,
        at_most=1,
    )
    vllm_max_model_length: int | None = _field(
        None,
        "Longest prompt and response together, in tokens, that a colocated vLLM reserves its cache for. None: what "
        "the model allows.",
        resume="free",
        at_least=1,
    )
    vllm_tensor_parallel_size: int = _field(
        1, "GPUs that each colocated vLLM is divided over; a server has its own option.", resume="free", at_least=1
    )
    vllm_enable_sleep_mode: bool = _field(
        False,
        "Free the memory of a colocated vLLM's cache while the model learns. Its weights wait in the CPU's memory. "
        "Needs a GPU.",
        resume="free",
    )

    # --- another engine's samples -----------------------------------------------------------------------------
    vllm_importance_sampling_correction: bool = _field(
        True,
        "Weight policy losses by the probability ratio of learner and sampler, truncated, where the engine reports "
        "its own log-probs.",
    )
    vllm_importance_sampling_mode: Literal["sequence_truncate", "token_truncate"] = _field(
        "sequence_truncate", "One such weight per response or, with `ratio_level='token'`, one per token."
    )
    vllm_importance_sampling_clip_max: float = _field(2.0, "The largest such weight.", above=0)
    vllm_importance_sampling_threshold: float = _field(
        1e-3,
        "No weights are needed up to this mean difference between the log-probs of learner and sampler.",
        at_least=0,
    )
    vllm_max_mismatch: float = _field(
        0.05,
        "A KL per token between sampler and learner above this ends the run: the sampler's weights are old, or not "
        "the learner's.",
        resume="free",
        above=0,
    )


@dataclass
class EnvironmentFields:
    """Where environments run."""

    # --- the environments -------------------------------------------------------------------------------------
    asynchronous: bool = _field(
        False,
        "Every environment gets its next response as soon as it is ready, instead of waiting for all others at every "
        "step. For responses of unequal length; needs `engine='vllm'`. Not with groups.",
    )
    vectorization: Literal["auto", "local", "workers", "ray"] = _field(
        "auto",
        "Where environments run: 'local', in this process; 'workers', each in a process of its own; 'ray', each in a "
        "process of a Ray cluster. 'auto': as the task says, 'local' or 'workers'. The rollouts are the same.",
        resume="free",
    )
    ray_address: str | None = _field(
        None, "A running Ray cluster: HOST:PORT or 'auto'. None: its own Ray instance on this machine.", resume="free"
    )
    ray_envs_per_actor: int = _field(1, "Environments per Ray actor, each in its own process.", "free", at_least=1)
