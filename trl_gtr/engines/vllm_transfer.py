"""How a server gets the learner's weights: through a file that both see, or over a network of their own."""

from __future__ import annotations

import json
import socket
import uuid
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from transformers.integrations import is_deepspeed_zero3_enabled

from ..tasks.contract import Contract
from .base import EngineLost
from .vllm_connection import Connection, ServerLost
from .vllm_requests import Weights
from .vllm_stream import WeightStream, open_store
from .vllm_weight_files import ScratchFolder, write_weights


class WeightTransfer(Contract):
    """Brings weights to a server. Process 0 does it after every update, any process if the server was restarted."""

    @abstractmethod
    def offer(self, weights: Weights, version: str) -> str:
        """Make new weights ready, on process 0. Returns what the others need to know."""

    @abstractmethod
    def follow(self, weights: Weights, offered: str) -> None:
        """Make the same weights ready on another process."""

    @abstractmethod
    def send(self, connection: Connection, version: str) -> dict[str, Any]:
        """Have the server load them. Returns its state. Raises `ServerLost` if it has to be repeated."""

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

    def send(self, connection: Connection, version: str) -> dict[str, Any]:
        try:
            return connection.call("gtr_load_file", self._file, version)
        except ServerLost as error:
            if "No such file" in str(error):
                raise ValueError(
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
        port: Where this process listens; 0: at any free port.
        timeout: Seconds to wait for the server.
    """

    def __init__(self, backend: str, port: int, timeout: float) -> None:
        self.backend, self.timeout = backend, timeout
        self._store = open_store(port, timeout)
        self._weights: Weights | None = None
        self._stream: WeightStream | None = None
        self._members: list[str] = []
        self._sent = ""
        self._pool = ThreadPoolExecutor(1, "vllm-weights")

    def offer(self, weights: Weights, version: str) -> str:
        self._weights = weights
        return version

    def follow(self, weights: Weights, offered: str) -> None:
        self._weights, self._sent = weights, offered

    def send(self, connection: Connection, version: str) -> dict[str, Any]:
        assert self._weights is not None  # `offer` or `follow` came before
        if version == self._sent and is_deepspeed_zero3_enabled():
            raise EngineLost(
                "The vLLM server was restarted during a rollout. With ZeRO-3 no process holds whole weights to send "
                "again: continue from the checkpoint."
            )
        members = [state["process"] for state in connection.call_all("gtr_state")]
        if members != self._members:
            self._stream = None
        name = uuid.uuid4().hex if self._stream is None else self._stream.name
        group: dict[str, Any] = {
            "name": name,
            "size": 1 + len(members),
            "backend": self.backend,
            "timeout": self.timeout,
        }
        where = {"host": _address_towards(connection.base_url), "port": self._store.port}
        answer = self._pool.submit(connection.call, "gtr_receive", json.dumps(where | group), version)
        try:
            stream = self._stream or WeightStream(self._store, rank=0, **group)
            answer.add_done_callback(lambda done: stream.abort() if done.exception() else None)
            stream.send(self._weights())
            state: dict[str, Any] = answer.result()
            stream.forget_announcements()
        except BaseException as error:
            self._stream = None  # its members may have stopped anywhere
            if isinstance(error, RuntimeError):
                raise ServerLost(f"it did not take the weights: {answer.exception() or error}") from error
            raise
        self._stream, self._members, self._sent = stream, members, version
        return state

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _address_towards(url: str) -> str:
    """This machine's address as the server sees it."""
    parts = urlsplit(url)
    with socket.create_connection(
        (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)), 10
    ) as link:
        return str(link.getsockname()[0])
