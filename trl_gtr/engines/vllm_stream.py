"""Weights over the network, tensor by tensor, from the learner to all workers of a server.

Both sides import this module, also a server whose environment has none of this package's other dependencies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_POLL = 0.01
"""Seconds between checks of who has arrived."""
_ARRIVED = "arrived"


class StreamBroken(ConnectionError):
    """A member of the group is lost, or doesn't answer."""


class WeightStream:
    """The learner as rank 0 and the server's workers, in a process group of their own.

    A tensor's name, dtype and shape go through the store, its values are broadcast. So the sender has one tensor at a
    time in memory, and nobody has to know beforehand which ones come.

    Args:
        store: The learner's store, or a connection to it.
        name: Of this group, never used before in the store.
        rank: 0 sends, all others receive.
        size: Number of members.
        backend: "nccl", from GPU to GPU, or "gloo", from CPU to CPU.
        timeout: Seconds to wait for the other members.
        device: Where this member has the tensors, with NCCL its GPU; `None`: the CPU.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        name: str,
        rank: int,
        size: int,
        backend: str,
        timeout: float,
        device: torch.device | None = None,
    ) -> None:
        self.name, self._store, self._count = name, dist.PrefixStore(name, store), 0
        self._freed = 0
        self._device = device or torch.device("cpu")
        self._timeout = timedelta(seconds=timeout)
        self._store.add(_ARRIVED, 1)
        with _broken_by_errors():
            self._group = _new_group(dist.PrefixStore("group", self._store), rank, size, backend, self._timeout)

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send all weights to the members that are in `receive`."""
        for name, weight in weights:
            dtype = str(weight.dtype).removeprefix("torch.")
            self._announce({"name": name, "dtype": dtype, "shape": list(weight.shape)})
            self._broadcast(weight.to(self._device).contiguous())
        self._announce(None)

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that rank 0 sends."""
        while (told := self._hear()) is not None:
            if not told:
                raise StreamBroken("the learner gave up sending")
            weight = torch.empty(told["shape"], dtype=getattr(torch, told["dtype"]), device=self._device)
            self._broadcast(weight)
            yield told["name"], weight

    def forget_announcements(self) -> None:
        """Free the store's memory, once all members have received everything."""
        for count in range(self._freed, self._count):
            self._store.delete_key(str(count))
        self._freed = self._count

    def give_up(self) -> None:
        """Tell the members that no more weights come, and leave the group."""
        with suppress(StreamBroken):
            self._announce({})
        self.abort()

    def abort(self) -> None:
        """Leave the group, and end what waits in it."""
        self._group.abort()

    def _announce(self, tensor: dict[str, Any] | None) -> None:
        with _broken_by_errors():
            self._store.set(str(self._count), json.dumps(tensor))
        self._count += 1

    def _hear(self) -> dict[str, Any] | None:
        with _broken_by_errors():
            told: dict[str, Any] | None = json.loads(self._store.get(str(self._count)))
        self._count += 1
        return told

    def _broadcast(self, weight: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with _broken_by_errors():
            self._group.broadcast([weight], options).wait(self._timeout)


def wait_for_workers(store: dist.Store, name: str, count: int, failed: Callable[[], bool], timeout: float) -> None:
    """Wait until all workers are about to join the group: one that never comes would keep rank 0 waiting in it.

    Args:
        failed: Whether they are known not to come.
    """
    group, end = dist.PrefixStore(name, store), time.monotonic() + timeout
    while group.add(_ARRIVED, 0) < count:
        if failed() or time.monotonic() > end:
            raise StreamBroken("not all workers of the server came to take the weights")
        time.sleep(_POLL)


@contextmanager
def _broken_by_errors() -> Iterator[None]:
    """All that torch raises for a lost member, an aborted group or a time-out."""
    try:
        yield
    except RuntimeError as error:
        raise StreamBroken(str(error)) from error


def _new_group(store: dist.Store, rank: int, size: int, backend: str, timeout: timedelta) -> Any:
    """Outside of torch's global groups, of which both sides have their own."""
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def connect(host: str, port: int, timeout: float) -> dist.Store:
    """A connection to the learner's store."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def open_store(port: int, timeout: float) -> dist.TCPStore:
    """The learner's store.

    Args:
        port: To listen on; 0: any free one.
    """
    wait = timedelta(seconds=timeout)
    try:
        return dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=wait)
    except dist.DistNetworkError as error:
        raise ValueError(f"Can't listen on port {port}: set `vllm_group_port` to a free one. ({error})") from error
