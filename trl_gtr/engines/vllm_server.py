"""vLLM as a server of its own, over HTTP: the learner's environment needs no vLLM.

`python -m trl_gtr.engines.vllm_serve --model …` starts one.
"""

from __future__ import annotations

import base64
import io
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from http.client import BAD_REQUEST
from typing import Any, TypeVar

from PIL import Image
from safetensors import SafetensorError

from ..distributed.processes import Processes
from .base import EngineLost, EngineRefused
from .vllm_connection import START_COMMAND, Connection, Refused, ServerLost, fields_of
from .vllm_requests import Backend, Request, Sampled, Weights
from .vllm_transfer import NotShared, WeightTransfer
from .vllm_worker import Checksums, differing, plain_config

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ATTEMPTS = 3
_MAX_CONNECTIONS = 256
_STATE = ("version", "loads", "process")
_CLAIM = ("granted", "process", "stream")


class VLLMServer(Backend):
    """A server that all processes of the run share. Process 0 sends it the weights.

    Args:
        connection: To the server.
        model: The learner's model, to compare with what is served.
        transfer: Brings the weights to the server.
        processes: All processes of the run; `None` if there is only this one.
    """

    def __init__(
        self, connection: Connection, model: Any, transfer: WeightTransfer, processes: Processes | None = None
    ) -> None:
        self.connection, self.transfer, self.processes = connection, transfer, processes
        self._sending = threading.Lock()
        self._state: dict[str, Any] = {}  # of the server, when it was last asked
        self._failures, self._loaded = 0, False
        self._name = uuid.uuid4().hex
        self._pool = ThreadPoolExecutor(_MAX_CONNECTIONS, "vllm")
        try:
            connection.wait()
            self._check_model(model)
        except BaseException:
            self.close()
            raise

    def _check_model(self, model: Any) -> None:
        try:
            served = self.connection.call("gtr_config", has=["model_type"])
        except (ServerLost, ValueError) as error:
            raise ValueError(
                f"The vLLM server at {self.connection.base_url} can't take new weights ({error}). Start it with "
                f"`{START_COMMAND}`."
            ) from error
        if served.pop("data_parallel_size", 1) > 1:
            raise ValueError("The vLLM server has several copies of the model: start it without --data-parallel-size.")
        if found := differing(served, plain_config(model.config)):
            raise ValueError(self._other_model(found))

    def _other_model(self, found: Sequence[str]) -> str:
        return (
            f"The vLLM server at {self.connection.base_url} serves another model than the run's "
            f"({'; '.join(found[:3])}). Start it with the run's model."
        )

    def load(self, weights: Weights, version: str) -> None:
        self._load(weights, version)
        self._loaded = True

    def _load(self, weights: Weights, version: str) -> None:
        if self.processes is None:
            self._replace(weights, version)
            return
        offered = ""
        error: Exception | None = None
        if self.processes.rank == 0:
            try:
                offered = self._replace(weights, version)
            except Exception as failure:  # all must learn of it: the others wait
                error = failure
        self.processes.raise_first(error)
        offered = self.processes.gather(offered)[0]
        if self.processes.rank:
            self.transfer.follow(weights, offered)

    def _replace(self, weights: Weights, version: str) -> str:
        with self._saved_for(ValueError, OSError, SafetensorError):
            offered = self.transfer.offer(weights, version)
        self._state = self._until_answered(lambda: self._send(version))
        if not self._loaded:
            self._check_weights(weights)
        return offered

    def _check_weights(self, weights: Weights) -> None:
        """Raise if the server has other weights than were sent. Afterwards its workers check that by themselves."""
        sums = Checksums()
        for _ in sums.watch(weights()):
            pass
        served = self._until_answered(lambda: fields_of(self.connection.call("gtr_sums")))
        if wrong := sums.unknown(served):
            raise EngineRefused(self._other_model([f"{name} has other weights than were sent" for name in wrong]))

    @contextmanager
    def _saved_for(self, *errors: type[Exception]) -> Iterator[None]:
        """Before anything was loaded, these are mistakes in the settings. Later the run is saved, and ends."""
        try:
            yield
        except EngineLost:
            raise
        except errors as error:
            raise (EngineLost if self._loaded else EngineRefused)(str(error)) from error

    def sample(self, requests: Sequence[Request], version: str) -> list[Sampled]:
        return self._until_answered(lambda: self._sample(requests, version))

    def sample_one(self, request: Request, version: str) -> Sampled:
        return self._until_answered(lambda: self._sample([request], version))[0]

    def _sample(self, requests: Sequence[Request], version: str) -> list[Sampled]:
        """The responses, if the server had these weights all the time: its state is the same before and afterwards.

        The state before may be an older one, for it counts how often weights were loaded.
        """
        failures = self._failures
        with self._sending:
            if self._failures != failures:
                raise ServerLost("another request has found it lost")  # not to wait one after another
            try:
                before = self._state
                if before.get("version") != version:
                    before = self._current()
                    if before["version"] != version:
                        before = self._send_again(version)
                    self._state = before
            except (ServerLost, Refused):
                self._failures += 1
                raise
        sampled = self._ask_all(requests)
        if self._current() != before:
            raise ServerLost("its weights changed while it was sampling: it was restarted, or another run uses it too")
        return sampled

    def _current(self) -> dict[str, Any]:
        """The server's state now."""
        state: dict[str, Any] = self.connection.call("gtr_state", has=_STATE)
        return state

    def _send(self, version: str, again: bool = False) -> dict[str, Any]:
        """Have the server load the weights, and forget everything computed with the old ones. Returns its state.

        Args:
            again: The server was restarted. Other processes may have noticed it too, and only one may send: the state
                has no version while another does.
        """
        workers = self.connection.call_all("gtr_claim", self._name, version, not again, has=_CLAIM)
        if not all(worker["granted"] for worker in workers):
            return self._current()
        if again:
            logger.warning("The vLLM server has lost the latest weights (was it restarted?): it gets them again.")
        try:
            with self._saved_for(NotShared):
                self.transfer.send(self.connection, workers)
            # The prefix cache twice: requests under way fill it from the old encoder cache until that is empty too.
            for cache in ("prefix", "mm", "encoder", "prefix"):
                self._reset(cache)
            state: dict[str, Any] = self.connection.call("gtr_use", version, self._name, has=_STATE)
            return state
        except BaseException:
            with suppress(ServerLost, Refused):
                self.connection.call("gtr_release", self._name)
            raise

    def _reset(self, cache: str) -> None:
        options = "?reset_running_requests=true" if cache == "prefix" else ""
        answer = self.connection.post(f"/reset_{cache}_cache{options}")
        if cache == "prefix" and not fields_of(answer, ["success"])["success"]:
            raise ServerLost("its prefix cache, from the old weights, could not be emptied")

    def _send_again(self, version: str) -> dict[str, Any]:
        """The server's state once it has the weights, from this process or another."""
        self.transfer.check_again()
        end = time.monotonic() + self.connection.timeout
        while (state := self._send(version, again=True))["version"] != version:
            if time.monotonic() > end:
                raise ServerLost("it got no weights from the process that began to send them")
            self.connection.pause()
        return state

    def _ask_all(self, requests: Sequence[Request]) -> list[Sampled]:
        asked = [self._pool.submit(self._ask, each) for each in requests]
        if wait(asked, return_when=FIRST_EXCEPTION).not_done:
            for each in asked:
                each.cancel()  # those that haven't begun: a hanging server would let them wait too
            wait(asked)  # so that none is still under way when they are repeated
        failed = [each for each in asked if not each.cancelled() and each.exception()]
        return [each.result() for each in failed or asked]

    def _ask(self, request: Request) -> Sampled:
        body = {
            "token_ids": request.ids,
            "content_parts": [{"type": "image_url", "url": _data_url(each)} for each in request.pictures],
            "sampling_params": request.sampling,
            "return_token_ids": True,
        }
        try:
            answer = self.connection.post("/inference/v1/generate", body)
        except Refused as error:
            if error.status == BAD_REQUEST:  # of this prompt, such as one that is too long: the next try ends like it
                raise EngineLost(f"{error} (Is the server's --max-model-len too small?)") from error
            raise
        try:
            [choice] = answer["choices"]
            if choice["finish_reason"] not in ("stop", "length"):
                raise ServerLost(f"it ended a response with {choice['finish_reason']!r}")
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            return Sampled(answer["prompt_token_ids"], choice["token_ids"], logprobs)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerLost(f"it answered {str(answer)[:100]!r}, which is no response") from error

    def _until_answered(self, ask: Callable[[], T]) -> T:
        """Repeat what a lost server left unanswered, once it is up again, within its time limit."""
        failures, end = 0, math.inf
        while True:
            try:
                return ask()
            except (ServerLost, Refused) as error:
                self._state, failures = {}, failures + 1
                end = min(end, time.monotonic() + self.connection.timeout)
                if failures == _ATTEMPTS or time.monotonic() >= end:
                    advice = f" Was it restarted in another way than with `{START_COMMAND}`?"
                    raise EngineLost(
                        f"The vLLM server at {self.connection.base_url} failed {failures} times in a row: {error}"
                        f"{advice if isinstance(error, Refused) else ''}"
                    ) from error
                logger.warning("The vLLM server failed (%s); waiting for it, to try again.", error)
                self.connection.pause()
                self.connection.wait(restarting=True)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self.transfer.close()


def _data_url(image: Any) -> str:
    """The image as a PNG, which is lossless."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
