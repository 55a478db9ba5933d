"""How a server gets the learner's weights: through a file that both see, or over a network of their own."""

from __future__ import annotations

import json
import socket
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from ..tasks.contract import Contract
from .base import EngineLost
from .vllm_connection import Connection, ServerLost
from .vllm_requests import Weights
from .vllm_stream import StreamBroken, WeightStream, open_store, wait_for_workers
from .vllm_weight_files import ScratchFolder, write_weights


class NotShared(ValueError):
    """The server can't read what was written for it."""


class WeightTransfer(Contract):
    """Brings weights to a server. Process 0 does it after every update, any process if the server was restarted."""

    @abstractmethod
    def offer(self, weights: Weights, version: str) -> str:
        """Make new weights ready, on process 0. Returns what the others need to know."""

    @abstractmethod
    def follow(self, weights: Weights, offered: str) -> None:
        """Make the same weights ready on another process."""

    @abstractmethod
    def send(self, connection: Connection, workers: Sequence[Mapping[str, Any]]) -> None:
        """Have the server load them. Raises `ServerLost` if it has to be repeated, `NotShared` if that is no use.

        Args:
            workers: What each of the server's workers said to `gtr_claim`.
        """

    def check_again(self) -> None:
        """Raise `EngineLost` if this process alone can't send the weights again to a server that was restarted."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections."""


class FileTransfer(WeightTransfer):
    """Through a safetensors file, which is kept until the next: a server that was restarted gets it again.

    Args:
        folder: Where the file goes, see `GTRConfig.vllm_sync_dir`.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._scratch, self._file = ScratchFolder(folder), ""

    def offer(self, weights: Weights, version: str) -> str:
        if self._file:
            Path(self._file).unlink(missing_ok=True)  # there may be no room for both
        self._file = str(write_weights(weights(), self._scratch.path / f"{version}.safetensors"))
        return self._file

    def follow(self, weights: Weights, offered: str) -> None:
        self._file = offered

    def send(self, connection: Connection, workers: Sequence[Mapping[str, Any]]) -> None:
        try:
            connection.call("gtr_load_file", self._file)
        except ServerLost as error:
            if "No such file" in str(error) or "Permission denied" in str(error):
                raise NotShared(
                    f"The vLLM server can't read {self._file}: set `vllm_sync_dir` to a folder that it and this "
                    "process share, or `vllm_sync` to 'nccl' or 'gloo'."
                ) from error
            raise

    def close(self) -> None:
        self._scratch.close()


class StreamTransfer(WeightTransfer):
    """Over a process group of the learner and the server's workers. They join it at the first transfer, and again
    after a restart.

    Args:
        backend: "nccl" or "gloo".
        port: Where this process listens; 0: on any free port.
        timeout: Seconds to wait for the server.
    """

    def __init__(self, backend: str, port: int, timeout: float) -> None:
        self.backend, self.timeout = backend, timeout
        # Of this thread: a server that was restarted may get the weights from another.
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        self._store: Any = open_store(port, timeout)
        self._weights: Weights | None = None
        self._stream: WeightStream | None = None
        self._members: list[str] = []
        self._pool = ThreadPoolExecutor(1, "vllm-weights")

    def offer(self, weights: Weights, version: str) -> str:
        self._weights = weights
        return version

    def follow(self, weights: Weights, offered: str) -> None:
        self._weights = weights

    def check_again(self) -> None:
        if is_deepspeed_zero3_enabled():
            raise EngineLost(
                "The vLLM server was restarted during a rollout. With ZeRO-3 no process holds whole weights to send "
                "again: continue from the checkpoint."
            )

    def send(self, connection: Connection, workers: Sequence[Mapping[str, Any]]) -> None:
        assert self._weights is not None  # `offer` or `follow` came before
        members = [worker["process"] for worker in workers]
        if members != self._members or any(worker["stream"] != self._name for worker in workers):
            self._stream = None  # another process has sent since then, or the server was restarted
        name = self._name or uuid.uuid4().hex
        group: dict[str, Any] = {
            "name": name,
            "size": 1 + len(members),
            "backend": self.backend,
            "timeout": self.timeout,
        }
        where = {"host": _address_towards(connection.base_url), "port": self._store.port}
        answer = self._pool.submit(connection.call, "gtr_receive", json.dumps(where | group))
        stream = self._stream
        try:
            if stream is None:
                wait_for_workers(self._store, name, len(members), answer.done, self.timeout)
                stream = WeightStream(self._store, rank=0, device=self._device, **group)
            self._send_all(stream, self._weights, answer)
        except BaseException as error:
            self._stream = None  # its members may have stopped anywhere
            if stream is not None:
                stream.give_up()  # so that they don't wait
            if isinstance(error, StreamBroken):
                raise ServerLost(f"it did not take the weights: {answer.exception() or error}") from error
            raise
        self._stream, self._members = stream, members

    @property
    def _name(self) -> str:
        return "" if self._stream is None else self._stream.name

    @staticmethod
    def _send_all(stream: WeightStream, weights: Weights, answer: Future[Any]) -> None:
        answer.add_done_callback(lambda done: stream.abort() if done.exception() else None)
        stream.send(weights())
        answer.result()
        stream.forget_announcements()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._stream = self._weights = self._store = None  # frees the port


def _address_towards(url: str) -> str:
    """This machine's address as the server sees it."""
    parts = urlsplit(url)
    server = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
    try:
        with socket.create_connection(server, 10) as link:
            return str(link.getsockname()[0])
    except OSError as error:
        raise ServerLost(str(error)) from error
