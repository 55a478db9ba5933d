"""vLLM as a server of its own, over HTTP: the learner's environment needs no vLLM.

`python -m trl_gtr.engines.vllm_serve --model …` starts one.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..distributed.processes import Processes
from .base import EngineLost
from .vllm_requests import Backend, Request, Sampled
from .vllm_weight_files import sync_folder, write_weights
from .vllm_worker import plain_config

logger = logging.getLogger(__name__)

START_COMMAND = "python -m trl_gtr.engines.vllm_serve --model <the run's model>"
_ATTEMPTS = 3
_POLL = 0.5  # seconds
_MAX_CONNECTIONS = 256
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerLost(ConnectionError):
    """The server doesn't answer, or its engine has died."""


class Connection:
    """JSON over HTTP.

    Args:
        base_url: The server's address.
        timeout: Seconds to wait for one answer, and for a server that is down.
    """

    def __init__(self, base_url: str, timeout: float) -> None:
        self.base_url, self.timeout = base_url.rstrip("/").removesuffix("/v1"), timeout

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request. Raises `ServerLost` if there is none, `ValueError` if the server refuses."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"{self.base_url}{path}", data, {"Content-Type": "application/json"})
        return self._open(request, self.timeout)

    def _open(self, request: Any, timeout: float) -> Any:
        try:
            with _WITHOUT_PROXY.open(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            words = error.read().decode(errors="replace")[:500]
            if error.code >= 500:
                raise ServerLost(f"HTTP {error.code}: {words}") from error
            raise ValueError(f"The vLLM server at {self.base_url} answered HTTP {error.code}: {words}") from error
        except (OSError, HTTPException) as error:
            raise ServerLost(str(error) or type(error).__name__) from error
        return json.loads(text) if text.strip() else None

    def wait(self) -> None:
        """Wait until the server is up; raise after `timeout` seconds."""
        end, told = time.monotonic() + self.timeout, False
        while True:
            try:
                self._open(f"{self.base_url}/health", min(10.0, self.timeout))
                return
            except (ServerLost, ValueError) as error:
                if time.monotonic() > end:
                    raise EngineLost(
                        f"There is no vLLM server at {self.base_url} ({error}), waited {self.timeout:g} s. Start one "
                        f"(`{START_COMMAND}`), set `vllm_base_url`, or raise `vllm_server_timeout`."
                    ) from error
                if not told:
                    told = True
                    logger.warning(
                        "Waiting up to %g s for a vLLM server at %s. Start one: %s",
                        self.timeout,
                        self.base_url,
                        START_COMMAND,
                    )
            time.sleep(_POLL)

    def call(self, method: str, *args: str) -> Any:
        """Call a method on all of the server's workers and return the first one's result."""
        return self.post("/collective_rpc", {"method": method, "args": list(args)})["results"][0]


class VLLMServer(Backend):
    """A server that all processes of the run share. Process 0 sends it the weights.

    The weights go through a file, which is kept until the next: a server that was restarted gets it again.

    Args:
        connection: To the server.
        model: The learner's model, to compare with what is served.
        processes: All processes of the run; `None` if there is only this one.
        folder: Where the file goes, see `GTRConfig.vllm_sync_dir`.
    """

    def __init__(
        self, connection: Connection, model: Any, processes: Processes | None = None, folder: str | None = None
    ) -> None:
        self.connection, self.processes = connection, processes
        self._scratch = tempfile.TemporaryDirectory(prefix="trl-gtr-", dir=sync_folder(folder))
        self._file = ""
        self._sending = threading.Lock()
        self._pool = ThreadPoolExecutor(_MAX_CONNECTIONS, "vllm")
        try:
            connection.wait()
            self._check_model(model)
        except BaseException:
            self.close()
            raise

    def _check_model(self, model: Any) -> None:
        try:
            served = self.connection.call("gtr_config")
        except (ServerLost, ValueError) as error:
            raise ValueError(
                f"The vLLM server at {self.connection.base_url} can't take new weights ({error}). Start it with "
                f"`{START_COMMAND}`."
            ) from error
        ours = plain_config(model.config)
        differing = [
            f"{name}: {served.get(name)!r}, not {ours[name]!r}" for name in ours if served.get(name) != ours[name]
        ]
        if differing:
            raise ValueError(
                f"The vLLM server at {self.connection.base_url} serves another model than the run's "
                f"({'; '.join(differing[:3])}). Start it with the run's model."
            )

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> None:
        if self.processes is None:
            self._replace(weights, version)
            return
        with self.processes.raise_on_all_ranks("The vLLM server did not get the new weights", "Check its log."):
            if self.processes.rank == 0:
                self._replace(weights, version)
        self._file = self.processes.gather(self._file)[0]

    def _replace(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> None:
        old = self._file
        self._file = str(write_weights(weights, Path(self._scratch.name) / f"{version}.safetensors"))
        self._until_answered(lambda: self._send(version))
        if old:
            Path(old).unlink(missing_ok=True)

    def sample(self, requests: Sequence[Request], version: str) -> list[Sampled]:
        return self._until_answered(lambda: self._sample(requests, version))

    def sample_one(self, request: Request, version: str) -> Sampled:
        return self._until_answered(lambda: self._sample([request], version))[0]

    def _sample(self, requests: Sequence[Request], version: str) -> list[Sampled]:
        with self._sending:
            before = self.connection.call("gtr_state")
            if before["version"] != version:
                logger.warning("The vLLM server has lost the latest weights (was it restarted?): it gets them again.")
                before = self._send(version)
        asked = [self._pool.submit(self._ask, each) for each in requests]
        wait(asked)  # after a failure too, so that none is still under way when they are repeated
        sampled = [each.result() for each in asked]
        if self.connection.call("gtr_state") != before:
            raise ServerLost("its weights changed while it was sampling; does another run use it too?")
        return sampled

    def _send(self, version: str) -> dict[str, Any]:
        """Have the server load the file, and forget everything computed with the old weights."""
        try:
            state = self.connection.call("gtr_load_file", self._file, version)
        except ServerLost as error:
            if "No such file" in str(error):
                raise ValueError(
                    f"The vLLM server can't read {self._file}: set `vllm_sync_dir` to a folder that it and this "
                    "process share."
                ) from error
            raise
        if not self.connection.post("/reset_prefix_cache?reset_running_requests=true")["success"]:
            raise ServerLost("its prefix cache, from the old weights, could not be emptied")
        for cache in ("mm", "encoder"):
            self.connection.post(f"/reset_{cache}_cache")
        return state

    def _ask(self, request: Request) -> Sampled:
        body = {
            "token_ids": request.ids,
            "content_parts": [{"type": "image_url", "url": _data_url(each)} for each in request.pictures],
            "sampling_params": request.sampling,
            "return_token_ids": True,
        }
        answer = self.connection.post("/inference/v1/generate", body)
        [choice] = answer["choices"]
        if choice["finish_reason"] not in ("stop", "length"):
            raise ServerLost(f"it ended a response with {choice['finish_reason']!r}")
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        return Sampled(answer["prompt_token_ids"], choice["token_ids"], logprobs)

    def _until_answered(self, ask: Callable[[], Any]) -> Any:
        """Repeat what a lost server left unanswered, once it is up again."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return ask()
            except ServerLost as error:
                if attempt == _ATTEMPTS:
                    raise EngineLost(
                        f"The vLLM server at {self.connection.base_url} failed {_ATTEMPTS} times in a row: {error}"
                    ) from error
                logger.warning("The vLLM server doesn't answer (%s); waiting for it.", error)
                time.sleep(_POLL)
                self.connection.wait()
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._scratch.cleanup()


def _data_url(image: Any) -> str:
    """The image as a PNG, which is lossless."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
