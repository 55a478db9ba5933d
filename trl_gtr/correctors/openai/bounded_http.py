"""No more of a server's answer than is wanted is taken from the socket, whatever it sends and however it packs it.

The limit is a response hook of the HTTP client. It also bounds what nobody asked for but the libraries read whole: the
bodies of errors and of redirects.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

MAX_BODY = 1 << 20
"""Bytes of an answer, unpacked; a chat answer is a few thousand."""
MAX_ERROR_BODY = 1 << 16
"""Bytes of any other body, unpacked; an error is a few hundred."""
PACKING = "gzip"
"""What can be unpacked piece by piece, up to the limit, and is packed alike by every server."""
KNOWN = ("br", "compress", "deflate", "zstd")
"""Other packings there are."""


class UnreadableBody(ValueError):
    """A body that is packed in a way nobody asked for, or isn't packed as it says."""


def client(timeout: float, *, asynchronous: bool) -> Any:
    """An HTTP client for one of the `openai` package's clients.

    It follows no redirects: each hop would be a call that nobody counts, and a loop of them twenty.
    """
    import openai

    make: Any = openai.DefaultAsyncHttpxClient if asynchronous else openai.DefaultHttpxClient
    return make(
        follow_redirects=False,
        headers={"Accept-Encoding": PACKING},
        event_hooks={"response": [_bound_async if asynchronous else _bound]},
        timeout=timeout,
    )


async def _bound_async(response: Any) -> None:
    """Put a limit between a response and its socket. An answer that is longer shows by one byte more than allowed."""
    source, taker = response.stream, _Taker(response)

    class Bounded(_library(response).AsyncByteStream):  # type: ignore[misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            with taker.errors():
                async for chunk in source:
                    yield taker.take(chunk)
                    if taker.left == 0:
                        return

        async def aclose(self) -> None:
            await source.aclose()

    response.stream = Bounded()


def _bound(response: Any) -> None:
    """The same for a client without an event loop."""
    source, taker = response.stream, _Taker(response)

    class Bounded(_library(response).SyncByteStream):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            with taker.errors():
                for chunk in source:
                    yield taker.take(chunk)
                    if taker.left == 0:
                        return

        def close(self) -> None:
            source.close()

    response.stream = Bounded()


def _library(response: Any) -> Any:
    """Which library the response is of the openai package decides."""
    return importlib.import_module(type(response).__module__.partition(".")[0])


class _Taker:
    """Unpacks a body piece by piece, as far as its limit."""

    def __init__(self, response: Any) -> None:
        self.answer = response.status_code == 200
        self.left = MAX_BODY + 1 if self.answer else MAX_ERROR_BODY
        # Taken out, or the client would unpack the body again.
        self.packing = response.headers.pop("content-encoding", "identity").strip().lower()
        self._unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)

    def take(self, chunk: bytes) -> bytes:
        if self.packing in ("identity", ""):
            data = chunk[: self.left]
        elif self.packing in (PACKING, f"x-{PACKING}"):
            try:
                data = self._unpacker.decompress(chunk, self.left)
            except zlib.error:
                raise UnreadableBody(f"the answer isn't packed with {PACKING} as it says") from None
        else:
            name = self.packing if self.packing in KNOWN else "something else"  # a server may say anything here
            raise UnreadableBody(f"the answer is packed with {name}; only {PACKING} was asked for")
        self.left -= len(data)
        return data

    def errors(self) -> suppress:
        """Which errors nobody needs to hear of: an HTTP error's status says enough if its words can't be read."""
        return suppress(*() if self.answer else (Exception,))
