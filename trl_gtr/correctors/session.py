"""One life of a corrector's connection: a client, its event loop, and the corrections under way in it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from ..types import Correction, CorrectionRequest, Usage
from .background import BackgroundLoop
from .base import failed, request_digest
from .breaker import Breaker
from .chat import ChatClient, ChatError, Meter, ToolsUnsupported
from .conversation import Conversation


@dataclass
class _Flight:
    """A correction under way and how many wait for it."""

    task: asyncio.Future[Correction]
    waiting: int = 0


class Session:
    """Lets at most `concurrency` corrections talk to the server at once, each for at most `deadline` seconds.

    Args:
        counts: Where retries, repairs and shared requests are added up.
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

    def submit(self, request: CorrectionRequest, image_part: Mapping[str, Any]) -> Future[Correction]:
        if self.closed:
            done: Future[Correction] = Future()
            done.set_result(failed("cancelled", "the run ended"))
            return done
        return self._background.submit(self._join(request_digest(request), request, image_part))

    def list_models(self) -> list[str]:
        """The names of the server's models; costs nothing."""

        async def names() -> list[str]:
            page = await asyncio.wait_for(self.chat.client.models.list(), self.chat.timeout)
            return [model.id for model in page.data or ()]

        return self._background.submit(names()).result()

    def waiting(self) -> int:
        """How many callers wait for a correction."""
        return sum(flight.waiting for flight in list(self._flights.values()))

    def close(self) -> None:
        """What is under way comes back as failed, cancelled; nothing is sent any more."""
        self.closed = True
        self._background.stop(finally_run=self.chat.client.close)

    async def _join(self, digest: str, request: CorrectionRequest, image_part: Mapping[str, Any]) -> Correction:
        """The correction, shared with identical requests that are under way: one of them is sent and pays."""
        started = time.perf_counter()
        if self.closed:
            return failed("cancelled", "the run ended")
        flight = self._flights.get(digest)
        first = flight is None
        if flight is None:
            flight = self._flights[digest] = _Flight(asyncio.ensure_future(self._correct(request, image_part)))
            flight.task.add_done_callback(lambda _: self._flights.pop(digest, None))
        flight.waiting += 1
        try:
            correction = await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if not self.closed:
                raise
            correction = failed("cancelled", "the run ended")
        finally:
            flight.waiting -= 1
            if flight.waiting == 0:
                flight.task.cancel()  # nobody wants it any more; no effect if it is done
        self.counts["shared"] += not first
        usage = correction.usage if first else Usage()
        return replace(correction, usage=usage, latency=time.perf_counter() - started)

    async def _correct(self, request: CorrectionRequest, image_part: Mapping[str, Any]) -> Correction:
        async with self._slots:
            if not self._breaker.allows():
                return failed("unavailable", "the server has failed many times in a row")
            meter = Meter(time.monotonic() + self.deadline)
            try:
                # The deadline again, for a conversation that hangs outside any single try.
                correction = await asyncio.wait_for(self._talk(request, image_part, meter), self.deadline)
                self._breaker.record(reached=True)
            except ChatError as error:
                if error.kind in ("timeout", "connection", "server", "rejected"):
                    self._breaker.record(reached=False)
                else:
                    self._breaker.abandon()
                correction = failed(error.kind, error.detail)
            except asyncio.TimeoutError:  # not the builtin one on Python 3.10
                self._breaker.record(reached=False)
                correction = failed("timeout", f"no correction within {self.deadline:.3g} s")
            except BaseException:
                self._breaker.abandon()
                raise
            finally:
                self.counts["retries"] += meter.retries
        return replace(correction, usage=meter.usage)

    async def _talk(self, request: CorrectionRequest, image_part: Mapping[str, Any], meter: Meter) -> Correction:
        conversation = self._conversation(request, image_part)
        while True:
            try:
                reply = await self.chat.ask(conversation.messages, conversation.schema, conversation.tools, meter)
            except ToolsUnsupported:
                conversation = self._conversation(request, image_part)
                continue
            repairs = conversation.repairs_left
            correction = conversation.hear(reply)
            self.counts["repairs"] += repairs - conversation.repairs_left
            if correction is not None:
                return correction

    def _conversation(self, request: CorrectionRequest, image_part: Mapping[str, Any]) -> Conversation:
        in_words = not self.chat.features.native_tools
        return Conversation(request, image_part, tools_in_words=in_words, max_tool_rounds=self.max_tool_rounds)
