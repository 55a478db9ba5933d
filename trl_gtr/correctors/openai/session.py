"""A corrector's session: a client, its event loop, and the corrections in flight."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from ...responses.safe_text import printable
from ...types import Cancellation, Correction, CorrectionRequest, Usage
from ..background import BackgroundLoop
from ..base import failed, request_digest
from .breaker import Breaker
from .chat import ChatClient, ChatError, KeyRejected, Meter, ToolsUnsupported
from .conversation import Conversation

logger = logging.getLogger(__name__)


class _Flight:
    """A correction in flight and the number of waiters."""

    task: asyncio.Future[Correction]

    def __init__(self) -> None:
        self.waiting = 0
        self.began: float | None = None
        """`time.perf_counter()` when it got a slot."""
        self.usage = Usage()
        """Its cost, once it has ended."""

    def seconds(self, since: float) -> float:
        """Seconds it has been in progress since then."""
        return 0.0 if self.began is None else time.perf_counter() - max(self.began, since)


class Session:
    """Runs at most `concurrency` corrections at once, each for at most `deadline` seconds.

    Args:
        counts: Counter for retries, repairs and shared requests.
    """

    def __init__(
        self, chat: ChatClient, counts: Counter[str], *, concurrency: int, deadline: float, max_tool_rounds: int
    ):
        if concurrency < 1 or deadline <= 0:
            raise ValueError(f"concurrency and deadline must be positive, not {concurrency} and {deadline}")
        self.chat, self.counts, self.deadline, self.max_tool_rounds = chat, counts, deadline, max_tool_rounds
        self.closed = False
        self._background = BackgroundLoop("corrector")
        self._slots = asyncio.Semaphore(concurrency)
        self._breaker = Breaker(failures=max(8, concurrency))
        self._flights: dict[str, _Flight] = {}
        self._reported = False

    def submit(self, request: CorrectionRequest, pictures: Sequence[Mapping[str, Any]]) -> Future[Correction]:
        """Start a correction. The future is cancelled if the session is closed; the correction fails as cancelled if
        it closes meanwhile."""
        return self._background.submit(self._join, request_digest(request), request, pictures)

    def list_models(self) -> list[str]:
        """Names of the server's models, if it lists them; free."""

        async def ask() -> str:
            request = self.chat.client.models.with_raw_response.list()
            return (await asyncio.wait_for(request, self.chat.timeout)).http_response.text

        text = self.chat.redact(self._background.submit(ask).result())
        try:
            return [model["id"] for model in json.loads(text)["data"] if isinstance(model["id"], str)]
        except (ValueError, LookupError, TypeError, RecursionError):
            return []  # not every server follows the protocol here

    def close(self) -> None:
        """Cancel corrections in flight; they come back as failed. Nothing more is sent."""
        self.closed = True
        self._background.stop(finally_run=self.chat.client.close)

    async def _join(
        self, digest: str, request: CorrectionRequest, pictures: Sequence[Mapping[str, Any]]
    ) -> Correction:
        """Get a correction, shared with identical requests in flight: only one is sent and paid for."""
        if request.cancellation.cancelled:
            return failed("late", "given up before its turn came")
        started = time.perf_counter()
        flight = self._flights.get(digest)
        first = flight is None
        if flight is None:
            flight = self._flights[digest] = _Flight()
            flight.task = asyncio.ensure_future(self._correct(request, pictures, flight))
            flight.task.add_done_callback(partial(self._remove, digest, flight))
        flight.waiting += 1
        try:
            correction = await self._unless_cancelled(flight, request.cancellation)
        except asyncio.CancelledError:
            if not self.closed:
                raise
            correction = failed("cancelled", "the run ended")
        finally:
            flight.waiting -= 1
            if flight.waiting == 0:
                flight.task.cancel()  # no one is waiting; no effect if done
                self._remove(digest, flight)  # later requests must not join it
        if correction is None:
            if flight.waiting == 0:
                await asyncio.wait({flight.task})  # until its connection is closed and its cost known
            correction = failed("late", "given up unanswered" if flight.began else "given up before its turn came")
        self.counts["shared"] += not first
        return replace(correction, usage=flight.usage if first else Usage(), latency=flight.seconds(since=started))

    async def _unless_cancelled(self, flight: _Flight, cancellation: Cancellation) -> Correction | None:
        """The answer, or `None` if the request was cancelled."""
        loop = asyncio.get_running_loop()
        late = loop.create_future()

        def give_up() -> None:  # from another thread
            loop.call_soon_threadsafe(late.cancel)

        with cancellation.calling(give_up):
            await asyncio.wait({flight.task, late}, return_when=asyncio.FIRST_COMPLETED)
        late.cancel()
        return flight.task.result() if flight.task.done() else None

    def _remove(self, digest: str, flight: _Flight, _: object = None) -> None:
        if self._flights.get(digest) is flight:
            del self._flights[digest]

    async def _correct(
        self, request: CorrectionRequest, pictures: Sequence[Mapping[str, Any]], flight: _Flight
    ) -> Correction:
        async with self._slots:
            flight.began = time.perf_counter()
            if not self._breaker.allows():
                return failed("unavailable", "the server has failed many times in a row")
            meter = Meter(time.monotonic() + self.deadline, self.chat.features)
            try:
                # The deadline again, in case the conversation hangs outside an HTTP attempt.
                correction = await asyncio.wait_for(self._converse(request, pictures, meter), self.deadline)
                self._breaker.record(reached=True)
            except KeyRejected:
                self._breaker.abandon()
                raise
            except ChatError as error:
                if error.kind in ("timeout", "connection", "server", "rejected"):
                    self._breaker.record(reached=False)
                else:
                    self._breaker.abandon()
                correction = failed(error.kind, error.detail)
            except TimeoutError:  # not the builtin one on Python 3.10
                self._breaker.record(reached=False)
                correction = failed("timeout", f"no correction within {self.deadline:.3g} s")
            except asyncio.CancelledError:
                self._breaker.abandon()
                raise
            except Exception as error:  # a bug here must not end the run
                self._breaker.abandon()
                self._report(error)
                correction = failed("unusable", type(error).__name__)
            finally:
                self.counts["retries"] += meter.retries
                flight.usage = meter.usage
        return correction

    def _report(self, error: Exception) -> None:
        """Log the full traceback once, with the key redacted."""
        if not self._reported:
            trace = printable(self.chat.redact("".join(traceback.format_exception(error))))
            logger.error("could not handle an answer; further failures will only be counted\n%s", trace)
        self._reported = True

    async def _converse(
        self, request: CorrectionRequest, pictures: Sequence[Mapping[str, Any]], meter: Meter
    ) -> Correction:
        conversation = self._conversation(request, pictures, meter)
        while True:
            try:
                reply = await self.chat.ask(conversation.messages, conversation.schema, conversation.tools, meter)
            except ToolsUnsupported:
                conversation = self._conversation(request, pictures, meter)
                continue
            repairs = conversation.repairs_left
            # Tools can take many milliseconds; don't block the event loop.
            if reply.tool_calls:
                correction = await asyncio.to_thread(conversation.hear, reply)
            else:
                correction = conversation.hear(reply)
            self.counts["repairs"] += repairs - conversation.repairs_left
            if correction is not None:
                return correction

    def _conversation(
        self, request: CorrectionRequest, pictures: Sequence[Mapping[str, Any]], meter: Meter
    ) -> Conversation:
        in_words = not meter.features.native_tools
        return Conversation(request, pictures, tools_in_words=in_words, max_tool_rounds=self.max_tool_rounds)
