"""What the processes of one run say to each other: sums, gradients, and a barrier that names who is late.

Small things go over a gloo group of their own: it can tell which process is missing, which NCCL can't.
"""

from __future__ import annotations

import logging
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
"""Numbers that travel in one collective."""


class Processes:
    """All processes of the run, seen from one of them. Every method must be called by all.

    Args:
        accelerator: Of the trainer.
        timeout: Seconds after which a process that is missing at a barrier ends the run (`ddp_timeout`).
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
        """Everybody's `value`, in the order of the ranks."""
        values = [value]
        if self.world_size > 1:
            values = [None] * self.world_size
            dist.all_gather_object(values, value, group=self._group)
        return values

    def sum(self, number: float) -> float:
        return sum(self.gather(number))

    def barrier(self, occasion: str) -> float:
        """Wait for everybody; seconds that it took. Names those who are missing after the time-out."""
        start = time.perf_counter()
        if self.world_size > 1:
            try:
                dist.monitored_barrier(self._group, timedelta(seconds=self.timeout), wait_all_ranks=True)
            except RuntimeError as error:
                raise RuntimeError(
                    f"Process {self.rank} waited {self.timeout:g} s for the others at the end of the {occasion}: "
                    f"{error} Look at what they do, lower `rollout_timeout` or raise `ddp_timeout`."
                ) from error
        return time.perf_counter() - start

    @contextmanager
    def raise_on_all_ranks(self, what: str, advice: str) -> Iterator[None]:
        """An error in here on any process is an `OSError` on all of them, so that none waits for the one that failed.

        Args:
            what: What has not worked, for the message.
            advice: What to do, behind it.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as failure:  # a full disk has many names: OSError, SafetensorError, RuntimeError
            error = failure
        faults = self.gather(repr(error) if error else None)
        if any(faults):
            listed = "; ".join(f"process {rank}: {fault}" for rank, fault in enumerate(faults) if fault)
            raise OSError(f"{what} ({listed}). {advice}") from error

    def check_on_first(self, check: Callable[[], None]) -> None:
        """Run a check on the first process only; the `ValueError` that it may raise is raised on all."""
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
        """Give every process the weights of the first, so that they start alike whatever made them."""
        if self.world_size == 1 or self.deepspeed:
            return
        for bucket in _buckets(tensor.detach() for tensor in (*module.parameters(), *module.buffers())):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            dist.broadcast(flat, src=0)
            _scatter(flat, bucket)

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put the mean of all processes' gradients into each one's.

        In one go at the end of a mini-batch, not by DDP's hooks during the backward pass: those expect each backward
        pass to follow one forward pass and to reach every parameter, and neither is so here.
        """
        if self.world_size == 1 or self.deepspeed:
            return
        for bucket in _buckets(p.grad for p in parameters if p.grad is not None):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            flat /= self.world_size
            _scatter(flat, bucket)


def _scatter(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """Write what was sent in one piece back into its tensors."""
    for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """In order, each bucket of one dtype and not much larger than `_BUCKET`."""
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
