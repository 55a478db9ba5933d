"""A vLLM server's HTTP side without vLLM: enough to see what the learner sends and how it takes failures."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from trl_gtr.engines.vllm_worker import WeightReceiver, norm_sums, plain_config


class Receiver(WeightReceiver):
    """A worker that keeps what it receives, instead of loading it.

    Args:
        config: What it claims to serve.
        stop_after: Fail after so many tensors.
    """

    rank = 0

    def __init__(self, config: dict[str, Any], stop_after: int | None = None) -> None:
        self.config, self.gtr_process, self.stop_after = config, uuid.uuid4().hex, stop_after
        self.weights: dict[str, torch.Tensor] = {}

    def gtr_load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weights = {}
        for name, weight in weights:
            self.weights[name] = weight
            if len(self.weights) == self.stop_after:
                raise OSError("out of memory")

    def gtr_config(self) -> dict[str, Any]:
        return self.config

    def gtr_sums(self) -> dict[str, list[str]]:
        return norm_sums(self.weights.items())


class FakeVLLM:
    """Answers every prompt with the same ids, and keeps what it was sent.

    Args:
        model: What it claims to serve.
        expand: From a prompt's ids to those with expanded image tokens.
        fail: Called with each path and body; a returned number is answered as HTTP status.
    """

    def __init__(
        self,
        model: Any,
        expand: Callable[[list[int]], list[int]],
        ids: list[int],
        fail: Callable[[str, dict[str, Any]], int | None] = lambda path, body: None,
    ) -> None:
        self.expand, self.ids, self.fail, self.busy = expand, ids, fail, 0
        self.worker = Receiver(plain_config(model.config))
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> FakeVLLM:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def forget(self) -> None:
        """What a restart does to it."""
        self.worker = Receiver(self.worker.config)

    def count(self, part: str) -> int:
        """Requests whose path or method holds this."""
        return sum(part in path or part in str(body.get("method")) for path, body in self.posts)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/collective_rpc":
            return {"results": [getattr(self.worker, body["method"])(*body["args"])]}
        if path == "/inference/v1/generate":
            content = [{"token_id": token, "logprob": -0.5} for token in self.ids]
            choice = {"token_ids": self.ids, "logprobs": {"content": content}, "finish_reason": "stop"}
            return {"prompt_token_ids": self.expand(body["token_ids"]), "choices": [choice]}
        if path.startswith("/reset_prefix_cache"):
            self.busy -= 1
            return {"success": self.busy < 0}
        return None


def _handler(server: FakeVLLM) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(server.fail(self.path, {}) or 200, None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.posts.append((self.path, body))
            status = server.fail(self.path, body)
            try:
                self._reply(status or 200, {"error": "told to fail"} if status else server.answer(self.path, body))
            except (OSError, RuntimeError) as error:  # as FastAPI does with an exception of a worker
                self._reply(500, {"error": str(error)})

        def _reply(self, status: int, content: Any) -> None:
            data = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            with suppress(BrokenPipeError):  # of a client that no longer waits
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
