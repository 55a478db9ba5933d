"""The HTTP connection to a vLLM server."""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

from .base import EngineLost

logger = logging.getLogger(__name__)

START_COMMAND = "python -m trl_gtr.engines.vllm_serve --model <the run's model>"
POLL = 0.5
"""Seconds between polls of a server that is down."""
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerLost(ConnectionError):
    """The server doesn't answer, or its engine has died."""


class Refused(ValueError):
    """The server doesn't know this request, or doesn't take it."""


class Connection:
    """JSON over HTTP.

    Args:
        base_url: The server's address.
        timeout: Seconds to wait for one answer, and for a server that is down.
        stopped: Whether the run is to end, so that there is nothing to wait for.
    """

    def __init__(self, base_url: str, timeout: float, stopped: Callable[[], bool] = lambda: False) -> None:
        self.base_url, self.timeout, self.stopped = base_url.rstrip("/").removesuffix("/v1"), timeout, stopped

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request. Raises `ServerLost` if there is none, `Refused` if the server refuses."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"{self.base_url}{path}", data, {"Content-Type": "application/json"})
        text = self._read(request, self.timeout)
        try:
            return json.loads(text) if text.strip() else None
        except ValueError as error:  # a page of something between us and the server
            raise ServerLost(f"it answered {text[:100]!r}, which is no JSON") from error

    def _read(self, request: Any, timeout: float) -> bytes:
        try:
            with _WITHOUT_PROXY.open(request, timeout=timeout) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            words = _body(error)
            if error.code >= 500:
                raise ServerLost(f"HTTP {error.code}: {words}") from error
            raise Refused(f"The vLLM server at {self.base_url} answered HTTP {error.code}: {words}") from error
        except (OSError, HTTPException) as error:
            raise ServerLost(str(error) or type(error).__name__) from error

    def wait(self, restarting: bool = False) -> None:
        """Wait until the server is up; raise after `timeout` seconds.

        Args:
            restarting: It was up before, so whatever refuses in its place is waited out too.
        """
        end, told = time.monotonic() + self.timeout, False
        down = (ServerLost, Refused) if restarting else ServerLost
        while True:
            try:
                self._read(f"{self.base_url}/health", min(10.0, self.timeout))
                return
            except down as error:
                if time.monotonic() > end:
                    raise EngineLost(
                        f"There is no vLLM server at {self.base_url} ({error}), waited {self.timeout:g} s. Start one "
                        f"(`{START_COMMAND}`), set `vllm_base_url`, or raise `vllm_server_timeout`."
                    ) from error
                if not told:
                    told = True
                    logger.warning(
                        "Waiting up to %g s for a vLLM server at %s (%s). Start one: %s",
                        self.timeout,
                        self.base_url,
                        error,
                        START_COMMAND,
                    )
            self.pause()

    def pause(self) -> None:
        """Wait a moment before the server is asked again, unless the run is to end."""
        if self.stopped():
            raise EngineLost(f"The run was stopped while it waited for the vLLM server at {self.base_url}.")
        time.sleep(POLL)

    def call(self, method: str, *args: str | bool) -> Any:
        """Call a method on all of the server's workers and return the first one's result."""
        return self.call_all(method, *args)[0]

    def call_all(self, method: str, *args: str | bool) -> list[Any]:
        """Call a method on all of the server's workers and return all results."""
        answer = self.post("/collective_rpc", {"method": method, "args": list(args)})
        if not isinstance(answer, dict) or "results" not in answer:
            raise ServerLost(f"it answered {str(answer)[:100]!r} to {method}")
        results: list[Any] = answer["results"]
        return results


def _body(error: urllib.error.HTTPError) -> str:
    try:
        return error.read().decode(errors="replace")[:500]
    except (OSError, HTTPException):
        return "no details"
