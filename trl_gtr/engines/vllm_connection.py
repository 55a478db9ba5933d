"""The HTTP connection to a vLLM server."""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
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
    """

    def __init__(self, base_url: str, timeout: float) -> None:
        self.base_url, self.timeout = base_url.rstrip("/").removesuffix("/v1"), timeout

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request. Raises `ServerLost` if there is none, `Refused` if the server refuses."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"{self.base_url}{path}", data, {"Content-Type": "application/json"})
        return self._open(request, self.timeout)

    def _open(self, request: Any, timeout: float) -> Any:
        try:
            with _WITHOUT_PROXY.open(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            words = _body(error)
            if error.code >= 500:
                raise ServerLost(f"HTTP {error.code}: {words}") from error
            raise Refused(f"The vLLM server at {self.base_url} answered HTTP {error.code}: {words}") from error
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
            except ServerLost as error:
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
            time.sleep(POLL)

    def call(self, method: str, *args: str | bool) -> Any:
        """Call a method on all of the server's workers and return the first one's result."""
        return self.call_all(method, *args)[0]

    def call_all(self, method: str, *args: str | bool) -> list[Any]:
        """Call a method on all of the server's workers and return all results."""
        results: list[Any] = self.post("/collective_rpc", {"method": method, "args": list(args)})["results"]
        return results


def _body(error: urllib.error.HTTPError) -> str:
    try:
        return error.read().decode(errors="replace")[:500]
    except (OSError, HTTPException):
        return "no details"
