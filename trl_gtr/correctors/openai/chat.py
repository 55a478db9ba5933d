"""Sends one question over HTTP with OpenAI's chat-completions protocol: retries, budget, limits.

Every attempt ends in bounded time whatever the server does. Its cost is reserved before it and settled after it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from ...responses.safe_text import hide_secrets, one_line, storable
from ...types import Usage
from ..base import FailureKind
from .bounded_http import MAX_BODY, MAX_ERROR_BODY, UnreadableBody
from .budget import CallSizes

logger = logging.getLogger(__name__)

ResponseFormat = Literal["json_schema", "json_object", "text"]

MAX_COMPLAINT = 300
"""Maximum characters kept of a server's error message."""
MAX_NAME = 200
"""Maximum characters in a tool call's name or id."""
NO_COMPLETION = "the body is no chat completion"
"""`Reply.problem` for a body that is not a chat completion."""
MAX_TOKENS = 10**7
"""Larger token counts for a single call are ignored as implausible."""


class ChatError(Exception):
    """There is no reply. `retry_after` is in seconds, if the server gave it."""

    def __init__(self, kind: FailureKind, detail: str, *, retry: bool = False, retry_after: float | None = None):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail, self.retry, self.retry_after = kind, detail, retry, retry_after


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON as written by the model, not validated."""


@dataclass(frozen=True)
class Reply:
    """A model's reply, not validated."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    refusal: str | None = None
    problem: str | None = None
    """Why the whole reply is unreadable."""


@dataclass(frozen=True)
class Features:
    """Features used beyond plain chat. Dropped one by one when the server rejects them."""

    response_format: ResponseFormat = "json_schema"
    native_tools: bool = True
    token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    temperature: bool = True

    def without(self, complaint: str, body: Mapping[str, Any]) -> Features | None:
        """Features to use after a 400 with this message; `None` if it names nothing that can be dropped."""
        complaint = complaint.lower()
        if "temperature" in complaint and "temperature" in body:
            return replace(self, temperature=False)
        if ("max_tokens" in complaint or "max_completion_tokens" in complaint) and "max_tokens" in body:
            return replace(self, token_limit="max_completion_tokens")
        if "tool" in complaint and "tools" in body:
            return replace(self, native_tools=False)
        if any(word in complaint for word in ("response_format", "schema", "json")) and "response_format" in body:
            plainer: ResponseFormat = "json_object" if body["response_format"]["type"] == "json_schema" else "text"
            return replace(self, response_format=plainer)
        return None


@dataclass
class Meter:
    """Tracks one correction's cost and deadline."""

    deadline: float
    """`time.monotonic()` by which it must end."""
    features: Features
    """Server features this correction uses."""
    usage: Usage = field(default_factory=Usage)
    retries: int = 0
    dropped: bool = False
    """A feature was dropped after an error; it is not yet known whether that helps."""

    def remaining(self) -> float:
        return self.deadline - time.monotonic()


class ChatClient:
    """Sends chat requests through an `openai` async client, from one event loop.

    Args:
        client: `AsyncOpenAI` or `AsyncAzureOpenAI`, with its own retries off.
        sizes: Estimates the cost of a call, and holds the budget.
        timeout: Seconds for one attempt, from connecting to the last byte.
        max_retries: Retries after timeouts, lost connections, 408, 409, 429 and 5xx.
        delay: Seconds before the first retry; doubled for each further one, with jitter.
    """

    def __init__(
        self,
        client: Any,
        sizes: CallSizes,
        *,
        model: str,
        temperature: float,
        timeout: float,
        max_retries: int,
        delay: float,
    ):
        self.client, self.model, self.temperature = client, model, temperature
        self.sizes, self.budget, self.max_length = sizes, sizes.budget, sizes.max_length
        self.timeout, self.max_retries, self.first_delay = timeout, max_retries, delay
        self.features = Features()
        self._jitter = random.Random()
        self.answered = False
        """The server has answered at least once."""
        self._settled = asyncio.Condition()

    async def ask(
        self,
        messages: list[dict[str, Any]],
        schema: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]],
        meter: Meter,
    ) -> Reply:
        """Get the model's reply; raises `ChatError` when retries or time run out.

        Args:
            schema: JSON schema of the reply, which rules out tool calls. `None` while the reply may be a tool call.
        """
        tries = 0
        while True:
            body = self._body(meter.features, messages, schema, tools)
            try:
                reply = await self._try(body, meter)
                self._learn(meter)
                return reply
            except ChatError as error:
                if error.kind == "rejected" and error.retry:
                    self._drop(error, body, meter)
                    continue
                if not error.retry or tries >= self.max_retries:
                    raise
                delay = max(self._delay(tries), error.retry_after or 0.0)
                if delay >= meter.remaining():
                    raise
                tries += 1
                meter.retries += 1
                await asyncio.sleep(delay)

    def _drop(self, error: ChatError, body: Mapping[str, Any], meter: Meter) -> None:
        """After a 400, drop a feature for this correction only, or give up. The step itself may be at fault, so others
        keep their schema and tools."""
        fewer = meter.features.without(error.detail, body)
        if fewer is None:
            raise error
        meter.features, meter.dropped = fewer, True
        if "tools" in body and not fewer.native_tools:
            raise ToolsUnsupported("rejected", error.detail)

    def _learn(self, meter: Meter) -> None:
        """The server answered, so drop the same features for all later corrections."""
        if meter.dropped and meter.features != self.features:
            logger.warning("the server rejects %s; continuing with %s", self.features, meter.features)
            self.features = meter.features
        meter.dropped = False

    def _delay(self, tries: int) -> float:
        return self.first_delay * 2**tries * self._jitter.uniform(0.5, 1.0)

    def _body(
        self,
        features: Features,
        messages: list[dict[str, Any]],
        schema: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            features.token_limit: self.max_length,
        }
        if features.temperature:
            body["temperature"] = self.temperature
        if tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in tools]
            if schema is not None:
                body["tool_choice"] = "none"
        # Not while a tool may be called: constrained decoding would rule out the call.
        if features.response_format == "json_schema" and schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "judgement", "strict": True, "schema": schema},
            }
        elif features.response_format != "text" and (schema is not None or not tools):
            body["response_format"] = {"type": "json_object"}
        return body

    async def _try(self, body: dict[str, Any], meter: Meter) -> Reply:
        remaining = min(self.timeout, meter.remaining())
        if remaining <= 0:
            raise ChatError("timeout", "no time left")
        estimate = await self._reserve(body)
        actual = estimate  # an aborted call may have been billed
        try:
            payload = await asyncio.wait_for(self._send(body, remaining), remaining)
            self.answered = True
            reply, usage = read_reply(payload)
            if usage is not None:
                actual = self.sizes.counted(body, *usage)
            else:
                actual = self.sizes.uncounted(estimate, len(payload), learn=reply.problem != NO_COMPLETION)
            return reply
        except TimeoutError:  # not the builtin one on Python 3.10
            raise ChatError("timeout", f"no answer within {remaining:.3g} s", retry=True) from None
        except EndlessAnswer:
            actual = self.sizes.uncounted(estimate, MAX_BODY)
            raise
        except UnbilledError as error:
            actual = Usage(calls=1)
            raise error.reason from None
        finally:
            self.budget.settle(estimate, actual)
            meter.usage = meter.usage + actual
            async with self._settled:
                self._settled.notify_all()

    async def _reserve(self, body: Mapping[str, Any]) -> Usage:
        """Reserve and return what the call may cost; waits for calls in flight if the budget is too small for both."""
        while True:
            estimate = self.sizes.estimate(body)  # again after each wait: finished calls improve the estimate
            # Until the server has counted a prompt, estimates are guesses, so the first call goes alone.
            reserved = self.budget.reserve(estimate, alone=not self.answered)
            if reserved:
                return estimate
            if reserved is False:
                raise ChatError("budget", "the corrector's budget is spent")
            async with self._settled:
                await self._settled.wait()

    async def _send(self, body: dict[str, Any], timeout: float) -> str:
        """Send a request and return the body of a 200. Anything else raises `ChatError`, or `UnbilledError` if it
        can't have been billed."""
        import openai

        try:
            create = self.client.chat.completions.with_streaming_response.create
            # `extra_body` is sent as it is; the client's conversion of typed messages takes longer than the rest of
            # the call.
            more = {key: value for key, value in body.items() if key != "model"}
            # A shorter connect timeout shows whether anything was sent.
            limits = openai.Timeout(timeout, connect=0.9 * timeout)
            async with create(model=body["model"], messages=[], extra_body=more, timeout=limits) as response:
                return self.redact(await _read_body(response))
        except openai.APIStatusError as error:
            raise UnbilledError(self.status_error(error)) from None
        except openai.APITimeoutError as error:
            if type(error.__cause__).__name__ == "ConnectTimeout":
                raise UnbilledError(
                    ChatError("timeout", f"no connection to {self.client.base_url.host}", retry=True)
                ) from None
            raise ChatError("timeout", f"no answer within {timeout:.3g} s", retry=True) from None
        except openai.APIConnectionError as error:
            cause = type(error.__cause__).__name__ if error.__cause__ else "no connection"
            reason = ChatError("connection", cause, retry=True)
            # A refused connection costs nothing; one lost later may.
            raise (UnbilledError(reason) if cause == "ConnectError" else reason) from None

    def status_error(self, error: Any) -> ChatError:
        """Convert an HTTP error, with the key redacted."""
        status = error.status_code
        code, param = getattr(error, "code", None), getattr(error, "param", None)
        was_cut = len(error.response.content) >= MAX_ERROR_BODY
        # Redact before truncating: a partial key would not be found.
        words = one_line(self.redact(_complaint(error.body), was_cut=was_cut), MAX_COMPLAINT)
        if param:
            words += f" ({one_line(self.redact(str(param)), MAX_NAME)})"
        detail = f"HTTP {status}: {words}"
        if code == "content_filter":
            return ChatError("refused", detail)
        if 300 <= status < 400:
            elsewhere = one_line(self.redact(error.response.headers.get("location", "nowhere")), MAX_COMPLAINT)
            return ChatError(
                "rejected", f"HTTP {status}: redirected to {elsewhere}; set base_url to the final address"
            )
        if status in (400, 422):
            too_long = code == "context_length_exceeded" or "context length" in words.lower()
            return ChatError("rejected", detail, retry=not too_long)
        if status == 401 and not self.answered:
            return KeyRejected("rejected", detail)
        if status == 429 and code == "insufficient_quota":
            return ChatError("server", detail)
        if status in (408, 409, 429) or status >= 500:
            return ChatError("server", detail, retry=True, retry_after=_retry_after(error.response.headers))
        return ChatError("rejected", detail)

    def redact(self, text: str, *, was_cut: bool = False) -> str:
        """Remove keys from text to be logged or stored, even if a server repeats them in another encoding."""
        secrets = (getattr(self.client, "api_key", None), getattr(self.client, "_azure_ad_token", None))
        return hide_secrets(text, secrets, was_cut=was_cut)


class UnbilledError(Exception):
    """Wraps the `ChatError` of a call that can't have been billed."""

    def __init__(self, reason: ChatError):
        super().__init__(str(reason))
        self.reason = reason


class KeyRejected(ChatError):
    """HTTP 401 on the very first call: later ones would fail too."""


class EndlessAnswer(ChatError):
    """The answer exceeded `MAX_BODY`."""


class ToolsUnsupported(ChatError):
    """The server doesn't support tools: ask again with the tools described in the prompt."""


async def _read_body(response: Any) -> str:
    payload = bytearray()
    try:
        async for chunk in response.iter_bytes():
            payload += chunk
            if len(payload) > MAX_BODY:
                raise EndlessAnswer("unusable", f"the answer is longer than {MAX_BODY} bytes")
    except ChatError:
        raise
    except UnreadableBody as error:
        raise ChatError("unusable", one_line(error)) from None
    except Exception as error:  # from the HTTP library that the openai package uses
        name = type(error).__name__
        raise ChatError("timeout" if "Timeout" in name else "connection", name, retry=True) from None
    return payload.decode(errors="replace")


def read_reply(payload: str) -> tuple[Reply, tuple[int, int] | None]:
    """Parse a chat-completions body into a reply and its (prompt, completion) tokens, if given. Never raises."""
    try:
        body = json.loads(payload)
        choice = body["choices"][0]
        message = choice["message"]
        calls = tuple(
            ToolCall(
                storable(str(call["id"]))[:MAX_NAME],
                storable(str(call["function"]["name"]))[:MAX_NAME],
                storable(str(call["function"]["arguments"])),
            )
            for call in message.get("tool_calls") or ()
        )
        content, refusal = message.get("content"), message.get("refusal")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return Reply(problem=NO_COMPLETION), None
    problem = "it was cut off at the length limit" if choice.get("finish_reason") == "length" else None
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content, problem = "", "its content is no text"
    if choice.get("finish_reason") == "content_filter" and not refusal:
        refusal = "content filter"
    refusal = storable(str(refusal))[:200] if refusal else None
    return Reply(storable(content), calls, refusal, problem), _tokens(body.get("usage"))


def _tokens(usage: Any) -> tuple[int, int] | None:
    """The server's token counts, if given and plausible."""
    if not isinstance(usage, Mapping):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if isinstance(prompt, int) and isinstance(completion, int) and min(prompt, completion) >= 0:
        return (prompt, completion) if max(prompt, completion) <= MAX_TOKENS else None
    return None


def _complaint(body: Any) -> str:
    """The server's error message."""
    if isinstance(body, Mapping):
        body = body.get("message") or body.get("detail") or body.get("error") or dict(body)
    return str(body)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds the server asks to wait, from `retry-after-ms` or `retry-after` (seconds or a date)."""
    try:
        if "retry-after-ms" in headers:
            seconds = float(headers["retry-after-ms"]) / 1000
        elif "retry-after" in headers:
            value = headers["retry-after"]
            if value.strip().replace(".", "", 1).isdigit():
                seconds = float(value)
            else:
                seconds = parsedate_to_datetime(value).timestamp() - time.time()
        else:
            return None
    except (ValueError, TypeError, OverflowError):
        return None
    return seconds if seconds > 0 else None
