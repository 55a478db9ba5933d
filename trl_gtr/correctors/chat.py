"""One question over HTTP to a server that speaks OpenAI's chat-completions protocol: retries, budget, limits.

A try ends in bounded time whatever the server does; its cost is reserved before and settled after it.
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

from ..types import Usage
from .base import FailureKind
from .budget import Budget

logger = logging.getLogger(__name__)

MAX_BODY = 1 << 20
"""Bytes; a chat answer is a few thousand."""


class ChatError(Exception):
    """There is no reply. `retry_after` in seconds where the server named a time."""

    def __init__(self, kind: FailureKind, detail: str, *, retry: bool = False, retry_after: float | None = None):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail, self.retry, self.retry_after = kind, detail, retry, retry_after


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON as the model wrote it; nothing is known of it."""


@dataclass(frozen=True)
class Reply:
    """What a model said, not yet believed."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    refusal: str | None = None
    problem: str | None = None
    """Why the reply as a whole can't be read."""


@dataclass(frozen=True)
class Features:
    """What is asked of the server beyond plain chat. Dropped one by one when it rejects them."""

    response_format: Literal["json_schema", "json_object", "text"] = "json_schema"
    native_tools: bool = True
    token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    temperature: bool = True

    def without(self, complaint: str, uses_tools: bool) -> Features | None:
        """What to ask for after a 400 with this text; `None` if nothing is left to drop."""
        complaint = complaint.lower()
        if "temperature" in complaint and self.temperature:
            return replace(self, temperature=False)
        if "max_completion_tokens" in complaint and self.token_limit == "max_tokens":
            return replace(self, token_limit="max_completion_tokens")
        if "tool" in complaint and uses_tools and self.native_tools:
            return replace(self, native_tools=False)
        if self.response_format == "json_schema":
            return replace(self, response_format="json_object")
        if self.response_format == "json_object":
            return replace(self, response_format="text")
        if uses_tools and self.native_tools:
            return replace(self, native_tools=False)
        return None


@dataclass
class Meter:
    """Adds up what one correction costs and until when it may last."""

    deadline: float
    """`time.monotonic()` at which it must have ended."""
    usage: Usage = field(default_factory=Usage)
    retries: int = 0

    def remaining(self) -> float:
        return self.deadline - time.monotonic()


class ChatClient:
    """Sends chat requests through an `openai` async client, from one event loop.

    Args:
        client: `AsyncOpenAI` or `AsyncAzureOpenAI`, with its own retries off.
        max_length: Tokens of an answer.
        timeout: Seconds for one try, from connecting to the last byte.
        max_retries: Further tries after time-outs, lost connections, 408, 409, 429 and 5xx.
        delay: Seconds before the first retry; doubled for each further one, with jitter.
    """

    def __init__(
        self,
        client: Any,
        budget: Budget,
        *,
        model: str,
        temperature: float,
        max_length: int,
        timeout: float,
        max_retries: int,
        delay: float,
    ):
        self.client, self.budget, self.model = client, budget, model
        self.temperature, self.max_length = temperature, max_length
        self.timeout, self.max_retries, self.first_delay = timeout, max_retries, delay
        self.features = Features()
        self._jitter = random.Random()
        self._largest_prompt = 0
        self._settled = asyncio.Condition()

    async def ask(
        self,
        messages: list[dict[str, Any]],
        schema: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]],
        meter: Meter,
    ) -> Reply:
        """The model's reply, or a `ChatError` once tries or time are used up."""
        tries = 0
        while True:
            features = self.features
            if tools and not features.native_tools:
                raise ToolsUnsupported("rejected", "the server takes no tools")
            try:
                return await self._try(self._body(features, messages, schema, tools), meter)
            except ChatError as error:
                if error.kind == "rejected" and error.retry and self._drop(features, error, bool(tools)):
                    continue
                if not error.retry or error.kind == "rejected" or tries >= self.max_retries:
                    raise
                delay = max(self._delay(tries), error.retry_after or 0.0)
                if delay >= meter.remaining():
                    raise
                tries += 1
                meter.retries += 1
                await asyncio.sleep(delay)

    def _drop(self, sent: Features, error: ChatError, uses_tools: bool) -> bool:
        """After a 400: is there another form of the request to try? Learnt once for all that follow."""
        if self.features != sent:
            return True  # another request in flight has learnt it meanwhile
        fewer = sent.without(error.detail, uses_tools)
        if fewer is None:
            return False
        logger.warning("the server rejects %s; going on with %s (%s)", sent, fewer, error.detail)
        self.features = fewer
        return True

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
        if features.response_format == "json_schema" and schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "judgement", "strict": True, "schema": schema},
            }
        elif features.response_format != "text":
            body["response_format"] = {"type": "json_object"}
        if tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        return body

    async def _try(self, body: dict[str, Any], meter: Meter) -> Reply:
        remaining = min(self.timeout, meter.remaining())
        if remaining <= 0:
            raise ChatError("timeout", "no time left")
        estimate = self._estimate(body)
        await self._reserve(estimate)
        actual = estimate  # what breaks off half-way may have been billed
        try:
            payload = await asyncio.wait_for(self._send(body, remaining), remaining)
            reply, usage = read_reply(payload)
            if usage is not None:
                actual = self.budget.cost(*usage)
                self._largest_prompt = max(self._largest_prompt, usage[0])
            return reply
        except asyncio.TimeoutError:  # not the builtin one on Python 3.10
            raise ChatError("timeout", f"no answer within {remaining:.3g} s", retry=True) from None
        except UnbilledError as error:
            actual = Usage(calls=1)
            raise error.reason from None
        finally:
            self.budget.settle(estimate, actual)
            meter.usage = meter.usage + actual
            async with self._settled:
                self._settled.notify_all()

    async def _reserve(self, estimate: Usage) -> None:
        while True:
            reserved = self.budget.reserve(estimate)
            if reserved:
                return
            if reserved is False:
                raise ChatError("budget", "the corrector's budget is spent")
            async with self._settled:
                await self._settled.wait()

    def _estimate(self, body: Mapping[str, Any]) -> Usage:
        """At least what the call will cost: words at three bytes a token, and the largest prompt seen so far."""
        text = sum(len(part.encode()) for message in body["messages"] for part in _texts(message))
        # 1500 tokens cover the picture and the tools with most models.
        prompt = max(text // 3 + 1500, int(1.25 * self._largest_prompt))
        return self.budget.cost(prompt, self.max_length)

    async def _send(self, body: dict[str, Any], timeout: float) -> str:
        """The body of a 200. Everything else is a `ChatError` or, where nothing can have been billed, unbilled."""
        import httpx2
        import openai

        try:
            create = self.client.chat.completions.with_streaming_response.create
            # As extra_body the messages pass as they are; the client's walk through every typed part of them takes
            # longer than all the rest of a call.
            more = {key: value for key, value in body.items() if key != "model"}
            async with create(model=body["model"], messages=[], extra_body=more, timeout=timeout) as response:
                payload = bytearray()
                async for chunk in response.iter_bytes():
                    payload += chunk
                    if len(payload) > MAX_BODY:
                        raise ChatError("unusable", f"the answer is longer than {MAX_BODY} bytes")
                return self.redact(payload.decode(errors="replace"))
        except openai.APIStatusError as error:
            raise UnbilledError(self.status_error(error)) from None
        except (openai.APITimeoutError, httpx2.TimeoutException):
            raise ChatError("timeout", f"no answer within {timeout:.3g} s", retry=True) from None
        except openai.APIConnectionError as error:
            cause = type(error.__cause__).__name__ if error.__cause__ else "no connection"
            reason = ChatError("connection", cause, retry=True)
            # A refused connection costs nothing; one that is lost later may.
            raise (UnbilledError(reason) if isinstance(error.__cause__, httpx2.ConnectError) else reason) from None
        except httpx2.TransportError as error:
            raise ChatError("connection", type(error).__name__, retry=True) from None

    def status_error(self, error: Any) -> ChatError:
        """An HTTP error as ours, its text without the key."""
        status = error.status_code
        detail = f"HTTP {status}: {self.redact(_complaint(error.body))}"
        if status in (400, 422):
            return ChatError("rejected", detail, retry=True)
        if status == 429 and getattr(error, "code", None) == "insufficient_quota":
            return ChatError("server", detail)
        if status in (408, 409, 429) or status >= 500:
            return ChatError("server", detail, retry=True, retry_after=_retry_after(error.response.headers))
        return ChatError("rejected", detail)

    def redact(self, text: str) -> str:
        """No key in what is logged or kept, even where a server repeats it."""
        for secret in (getattr(self.client, "api_key", None), getattr(self.client, "_azure_ad_token", None)):
            if isinstance(secret, str) and len(secret) >= 8:  # shorter ones are placeholders such as "none"
                text = text.replace(secret, "[key]")
        return text


class UnbilledError(Exception):
    """Carries a `ChatError` of a call that the server can't have charged for."""

    def __init__(self, reason: ChatError):
        super().__init__(str(reason))
        self.reason = reason


class ToolsUnsupported(ChatError):
    """The server takes no tools: the question must be put again with the tools described in words."""


def read_reply(payload: str) -> tuple[Reply, tuple[int, int] | None]:
    """The reply in a chat-completions body and its (prompt, completion) tokens where they are given. Never raises."""
    try:
        body = json.loads(payload)
        choice = body["choices"][0]
        message = choice["message"]
        calls = tuple(
            ToolCall(str(call["id"]), str(call["function"]["name"]), str(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        )
        content, refusal = message.get("content"), message.get("refusal")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return Reply(problem="the body is no chat completion"), None
    problem = "it was cut off at the length limit" if choice.get("finish_reason") == "length" else None
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content, problem = "", "its content is no text"
    if choice.get("finish_reason") == "content_filter" and not refusal:
        refusal = "content filter"
    return Reply(content, calls, str(refusal)[:200] if refusal else None, problem), _tokens(body.get("usage"))


def _tokens(usage: Any) -> tuple[int, int] | None:
    """What the server counted, if it did and the numbers can be."""
    if not isinstance(usage, Mapping):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if isinstance(prompt, int) and isinstance(completion, int) and min(prompt, completion) >= 0:
        return prompt, completion
    return None


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def _complaint(body: Any) -> str:
    """The server's words about an error, on one short line."""
    if isinstance(body, Mapping):
        body = body.get("message") or body.get("detail") or body.get("error") or dict(body)
    return " ".join(str(body).split())[:300]


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait: `retry-after-ms`, or `retry-after` as seconds or as a date."""
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
