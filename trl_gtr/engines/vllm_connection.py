"""The HTTP connection to a vLLM server."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from multiprocessing.connection import wait
from typing import Any
from urllib.parse import urlsplit

from .base import EngineLost

logger = logging.getLogger(__name__)

START_COMMAND = "python -m trl_gtr.engines.vllm_serve --model <the run's model>"
POLL = 0.5
"""Seconds between polls of a server that is down, and between looks at whether the run is to end."""
_REACH = 10.0
"""Seconds to connect, and to hear whether the server is up."""
_JSON = {"Content-Type": "application/json"}


class ServerLost(ConnectionError):
    """The server doesn't answer, or its engine has died."""


class Refused(ValueError):
    """The server doesn't know this request, or doesn't take it.

    Args:
        message: Its words.
        status: The HTTP status.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


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
        text = self._read(path, self.timeout, json.dumps(body or {}).encode())
        try:
            return json.loads(text) if text.strip() else None
        except ValueError as error:  # a page of something between us and the server
            raise ServerLost(f"it answered {text[:100]!r}, which is no JSON") from error

    def _read(self, path: str, timeout: float, body: bytes | None = None) -> bytes:
        """The content at a path; with a body, the answer to it."""
        try:
            with closing(self._open(timeout)) as link:
                link.request("GET" if body is None else "POST", urlsplit(self.base_url).path + path, body, _JSON)
                self._wait_for_answer(link.sock, timeout)
                answer = link.getresponse()
                status, text = answer.status, answer.read()
        except EngineLost:
            raise
        except (OSError, HTTPException) as error:
            raise ServerLost(str(error) or type(error).__name__) from error
        if status < 300:
            return text
        words = text.decode(errors="replace")[:500]
        if status >= 500:
            raise ServerLost(f"HTTP {status}: {words}")
        raise Refused(f"The vLLM server at {self.base_url} answered HTTP {status}: {words}", status)

    def _open(self, timeout: float) -> HTTPConnection:
        """Not through a proxy: what is sent is large, and private."""
        parts = urlsplit(self.base_url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        link = kind(parts.hostname or "", parts.port, timeout=min(_REACH, timeout))
        link.connect()
        link.sock.settimeout(timeout)
        return link

    def _wait_for_answer(self, link: Any, timeout: float) -> None:
        """In slices, so that a signal ends the wait for a server that hangs."""
        end = time.monotonic() + timeout
        while not wait([link], max(0.0, min(POLL, end - time.monotonic()))):
            if time.monotonic() >= end:
                raise ServerLost(f"no answer within {timeout:g} s")
            self._check_stopped()

    def wait(self, restarting: bool = False) -> None:
        """Wait until the server is up; raise after `timeout` seconds.

        Args:
            restarting: It was up before, so whatever refuses in its place is waited out too.
        """
        end, told = time.monotonic() + self.timeout, False
        down = (ServerLost, Refused) if restarting else ServerLost
        while True:
            try:
                self._read("/health", min(_REACH, self.timeout))
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
        self._check_stopped()
        time.sleep(POLL)

    def _check_stopped(self) -> None:
        if self.stopped():
            raise EngineLost(f"The run was stopped while it waited for the vLLM server at {self.base_url}.")

    def call(self, method: str, *args: str | bool, has: Sequence[str] = ()) -> Any:
        """Call a method on all of the server's workers and return the first one's result. For `has` see `call_all`."""
        return self.call_all(method, *args, has=has)[0]

    def call_all(self, method: str, *args: str | bool, has: Sequence[str] = ()) -> list[Any]:
        """Call a method on all of the server's workers and return all results.

        Args:
            has: Fields that each result must have.
        """
        answer = self.post("/collective_rpc", {"method": method, "args": list(args)})
        results: list[Any] = fields_of(answer, ["results"])["results"]
        if not isinstance(results, list) or not results:
            raise ServerLost(f"it answered {str(answer)[:100]!r} to {method}")
        return [fields_of(each, has) if has else each for each in results]


def fields_of(answer: Any, names: Sequence[str] = ()) -> Any:
    """The answer, if it has fields, and these among them; anything else comes from something in between."""
    if not isinstance(answer, dict) or any(name not in answer for name in names):
        raise ServerLost(f"it answered {str(answer)[:100]!r}, without {', '.join(names) or 'any fields'}")
    return answer
