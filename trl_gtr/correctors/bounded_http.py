"""No more of a server's answer than is wanted is taken from the socket, whatever it sends and however it packs it.

`bound` is a response hook of the HTTP client. It also bounds what nobody asked for but the libraries read whole: the
bodies of errors and of redirects.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import AsyncIterator
from typing import Any

MAX_BODY = 1 << 20
"""Bytes of an answer, unpacked; a chat answer is a few thousand."""
MAX_ERROR_BODY = 1 << 16
"""Bytes of any other body, unpacked; an error is a few hundred."""
HEADERS = {"Accept-Encoding": "gzip, deflate"}
"""What can be unpacked piece by piece, up to the limit."""


async def bound(response: Any) -> None:
    """Put a limit between a response and its socket. An answer that is longer shows by one byte more than allowed."""
    answer = response.status_code == 200
    packed = response.headers.pop("content-encoding", "identity").strip().lower()  # the client won't unpack it again
    # Which library the response is of the openai package decides.
    library = importlib.import_module(type(response).__module__.partition(".")[0])
    bytes_of = _taken if answer else _taken_quietly
    source, limit = response.stream, MAX_BODY + 1 if answer else MAX_ERROR_BODY

    class Bounded(library.AsyncByteStream):  # type: ignore[name-defined]
        def __aiter__(self) -> AsyncIterator[bytes]:
            return bytes_of(source, packed, limit)

        async def aclose(self) -> None:
            await source.aclose()

    response.stream = Bounded()


async def _taken(source: Any, packed: str, limit: int) -> AsyncIterator[bytes]:
    """At most `limit` bytes, unpacked."""
    if packed not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise ValueError(f"the answer is packed with {packed!r}, which nobody asked for")
    unpacker = None if packed in ("identity", "") else zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib
    async for chunk in source:
        data = chunk[:limit] if unpacker is None else unpacker.decompress(chunk, limit)
        limit -= len(data)
        if data:
            yield data
        if limit == 0:
            return


async def _taken_quietly(source: Any, packed: str, limit: int) -> AsyncIterator[bytes]:
    """The same of an error: its status says enough if the words can't be read."""
    try:
        async for data in _taken(source, packed, limit):
            yield data
    except Exception:  # of the HTTP library or of unpacking
        return
