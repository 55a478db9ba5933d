"""Text from outside, made safe in one place: for files and requests, for a terminal, and without keys in it.

What a model, a server, a file's name or a file of a run says may hold half characters, control sequences or a key.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterable

from ..storage.files import LONE_SURROGATE

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # moves the cursor, rings, or starts an escape sequence
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # turns the direction of what follows
    "\u2028\u2029"  # breaks a line
    "\ud800-\udfff]"  # can't be encoded
)
MIN_SECRET = 8
"""Characters; shorter keys are placeholders such as "none"."""
_LONGEST_SPELLING = 12
"""Characters that may spell one character of a key, as in `\\\\\\\\u0073`."""


def storable(text: str) -> str:
    """What can be encoded: each half character (lone surrogate) becomes U+FFFD."""
    return LONE_SURROGATE.sub("\ufffd", text)


def printable(text: object) -> str:
    """What a terminal may be shown: control characters are spelt out (`\\x1b`); tabs and line breaks stay."""
    return _UNPRINTABLE.sub(_spell, str(text))


def one_line(text: object, most: int | None = None) -> str:
    """`printable` on one line, cut to `most` characters. Hide keys first: half a key would not be found."""
    return printable(" ".join(str(text).split()))[:most]


def _spell(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def hide_secrets(text: str, secrets: Iterable[str | None], *, was_cut: bool = False) -> str:
    """The text with `[key]` in place of each secret, however it is spelt: plain, escaped as in JSON (`\\u0073`), in
    URLs (`%73`) or in HTML (`&#115;`), each of them also in part and repeatedly, or as base64.

    Args:
        was_cut: The text ends somewhere in its middle. Its last part is dropped, for it may be the start of a secret.
    """
    known = [secret for secret in secrets if isinstance(secret, str) and len(secret) >= MIN_SECRET]
    for secret in known:
        text = _spellings(secret).sub("[key]", text)
    if was_cut and known:
        text = text[: -_LONGEST_SPELLING * max(map(len, known))]
    return text


@functools.lru_cache(maxsize=8)
def _spellings(secret: str) -> re.Pattern[str]:
    in_base64 = (_base64_core(secret.encode("utf-8", "replace"), shift) for shift in range(3))
    return re.compile("|".join(["".join(map(_character, secret)), *in_base64]))


def _character(character: str) -> str:
    """One character however it is spelt. Every repetition is bounded: a search must take linear time."""
    code = ord(character)
    spellings = [
        rf"\\{{0,8}}{re.escape(character)}",
        rf"\\{{1,8}}(?:u(?i:{code:04x})|x(?i:{code:02x}))",
        rf"%(?:25){{0,4}}(?i:{code:02x})",
        rf"&(?:amp;){{0,4}}#(?:0{{0,6}}{code}|[xX]0{{0,6}}(?i:{code:x}));",
    ]
    return f"(?:{'|'.join(spellings)})"


def _base64_core(secret: bytes, shift: int) -> str:
    """The characters that the secret alone decides, `shift` bytes after a multiple of three; in both alphabets."""
    encoded = base64.b64encode(bytes(shift) + secret).decode()
    core = encoded[-(-8 * shift // 6) : 8 * (shift + len(secret)) // 6]
    return core.replace("+", "[+-]").replace("/", "[/_]")
