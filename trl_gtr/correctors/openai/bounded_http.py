"""Limits how much of a response is read from the socket, whatever the server sends and however it compresses it.

The limit is a response hook of the HTTP client. It also covers the bodies of errors and redirects, which the libraries
would read in full.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

MAX_BODY = 1 << 20
"""Maximum decompressed bytes of an answer; a typical chat answer has a few thousand."""
MAX_ERROR_BODY = 1 << 16
"""Maximum decompressed bytes of any other body; a typical error has a few hundred."""
ENCODING = "gzip"
"""The encoding to request: decompressible in chunks up to the limit, and the same on every server."""
OTHER_ENCODINGS = ("br", "compress", "deflate", "zstd")
"""Other content encodings."""


class UnreadableBody(ValueError):
    """A body in an encoding that wasn't requested, or that doesn't match its header."""


def client(timeout: float, *, asynchronous: bool) -> Any:
    """An HTTP client for one of the `openai` package's clients.

    It doesn't follow redirects: each hop would be an uncounted call, and a redirect loop twenty of them.
    """
    import openai

    make: Any = openai.DefaultAsyncHttpxClient if asynchronous else openai.DefaultHttpxClient
    return make(
        follow_redirects=False,
        headers={"Accept-Encoding": ENCODING},
        event_hooks={"response": [_bound_async if asynchronous else _bound]},
        timeout=timeout,
    )


async def _bound_async(response: Any) -> None:
    """Limit what is read from a response. An answer that is too long yields one byte more than allowed."""
    source, reader = response.stream, _BodyReader(response)

    class Bounded(_library(response).AsyncByteStream):  # type: ignore[misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            with reader.errors():
                async for chunk in source:
                    yield reader.take(chunk)
                    if reader.left == 0:
                        return

        async def aclose(self) -> None:
            await source.aclose()

    response.stream = Bounded()


def _bound(response: Any) -> None:
    """The same for a client without an event loop."""
    source, reader = response.stream, _BodyReader(response)

    class Bounded(_library(response).SyncByteStream):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            with reader.errors():
                for chunk in source:
                    yield reader.take(chunk)
                    if reader.left == 0:
                        return

        def close(self) -> None:
            source.close()

    response.stream = Bounded()


def _library(response: Any) -> Any:
    """The HTTP library behind a response, which the openai package chooses."""
    return importlib.import_module(type(response).__module__.partition(".")[0])


class _BodyReader:
    """Decompresses a body in chunks, up to its limit."""

    def __init__(self, response: Any) -> None:
        self.answer = response.status_code == 200
        self.left = MAX_BODY + 1 if self.answer else MAX_ERROR_BODY
        # Removed, or the client would decompress the body again.
        self.encoding = response.headers.pop("content-encoding", "identity").strip().lower()
        self._decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16)

    def take(self, chunk: bytes) -> bytes:
        if self.encoding in ("identity", ""):
            data = chunk[: self.left]
        elif self.encoding in (ENCODING, f"x-{ENCODING}"):
            try:
                data = self._decompressor.decompress(chunk, self.left)
            except zlib.error:
                raise UnreadableBody(f"the answer isn't valid {ENCODING}, although its header says so") from None
        else:
            name = (
                self.encoding if self.encoding in OTHER_ENCODINGS else "something else"
            )  # the header may say anything
            raise UnreadableBody(f"the answer is compressed with {name}; only {ENCODING} was requested")
        self.left -= len(data)
        return data

    def errors(self) -> suppress:
        """Suppress errors while reading an HTTP error's body: its status says enough."""
        return suppress(*() if self.answer else (Exception,))
