"""Communication between the processes of a run: sums, gradients, and a barrier that names missing ranks.

Small messages use a separate gloo group, which, unlike NCCL, can tell which process is missing.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_BUCKET = 2**25
"""Elements per collective."""


class Processes:
    """All processes of the run. Every method must be called on all of them.

    Args:
        accelerator: The trainer's accelerator.
        timeout: Seconds to wait at a barrier before the run fails (`ddp_timeout`).
    """

    def __init__(self, accelerator: Accelerator, timeout: float) -> None:
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.timeout = timeout
        self.deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        self.zero3 = self.deepspeed and accelerator.state.deepspeed_plugin.zero_stage == 3
        self._group = None
        if self.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every process, in rank order."""
        values = [value]
        if self.world_size > 1:
            values = [None] * self.world_size
            dist.all_gather_object(values, value, group=self._group)
        return values

    def sum(self, number: float) -> float:
        return sum(self.gather(number))

    def barrier(self, occasion: str) -> float:
        """Wait for all processes and return the seconds waited. A time-out error names the missing ranks."""
        start = time.perf_counter()
        if self.world_size > 1:
            try:
                dist.monitored_barrier(self._group, timedelta(seconds=self.timeout), wait_all_ranks=True)
            except RuntimeError as error:
                raise RuntimeError(
                    f"Process {self.rank} waited {self.timeout:g} s for the others at the end of the {occasion}: "
                    f"{error} Check what they are doing, lower `rollout_timeout` or raise `ddp_timeout`."
                ) from error
        return time.perf_counter() - start

    @contextmanager
    def raise_on_all_ranks(self, what: str, advice: str) -> Iterator[None]:
        """Turn an error on any process into an `OSError` on all, so that none waits for the one that failed.

        Args:
            what: What failed, for the message.
            advice: What to do about it.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as failure:  # a full disk can raise OSError, SafetensorError or RuntimeError
            error = failure
        faults = self.gather(repr(error) if error else None)
        if any(faults):
            listed = "; ".join(f"process {rank}: {fault}" for rank, fault in enumerate(faults) if fault)
            raise OSError(f"{what} ({listed}). {advice}") from error

    def raise_first(self, fault: Exception | None) -> None:
        """If any process has failed, raise on all, so that none waits for it: its own fault, or the first one's.

        Args:
            fault: Why this process failed, if it did.
        """
        faults = self.gather(None if fault is None else _portable(fault))
        if (first := next((each for each in faults if each is not None), None)) is not None:
            raise fault or first

    def check_on_first(self, check: Callable[[], None]) -> None:
        """Run a check on rank 0 only; if it raises a `ValueError`, raise it on all ranks."""
        fault: str | None = None
        if self.rank == 0:
            try:
                check()
            except ValueError as error:
                fault = str(error)
        fault = self.gather(fault)[0]
        if fault is not None:
            raise ValueError(fault)

    def share_weights(self, module: nn.Module) -> None:
        """Broadcast rank 0's weights, so that all processes start the same."""
        if not self.deepspeed:  # which does so itself
            self.broadcast(tensor.detach() for tensor in (*module.parameters(), *module.buffers()))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give rank 0's values to the same tensors of all processes."""
        if self.world_size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            dist.broadcast(flat, src=0)
            _scatter(flat, bucket)

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients over all processes.

        Done once at the end of a mini-batch instead of by DDP's hooks during the backward pass: those expect each
        backward pass to follow one forward pass and to reach every parameter, and neither holds here.
        """
        if self.world_size == 1 or self.deepspeed:
            return
        for bucket in _buckets(p.grad for p in parameters if p.grad is not None):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            flat /= self.world_size
            _scatter(flat, bucket)


def _scatter(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """Copy a flat buffer back into its tensors."""
    for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors, in order, into buckets of one dtype and about `_BUCKET` elements."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size >= _BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def _portable(fault: Exception) -> Exception:
    """The fault as it can be sent to another process."""
    try:
        return pickle.loads(pickle.dumps(fault))  # without its traceback
    except Exception:  # whatever its constructor raises
        return RuntimeError(repr(fault))
