"""Sanitise untrusted text for files, requests and terminals, and redact keys.

Text from models, servers, file names and run files may contain lone surrogates, control sequences or API keys.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterable

from ..storage.files import LONE_SURROGATE

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional text controls
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff]"  # surrogates, which can't be encoded
)
MIN_SECRET = 8
"""In characters; shorter keys are placeholders such as "none"."""
_LONGEST_SPELLING = 12
"""Maximum length of one escaped character of a key, as in `\\\\\\\\u0073`."""


def storable(text: str) -> str:
    """Make text encodable: replace each lone surrogate with U+FFFD."""
    return LONE_SURROGATE.sub("\ufffd", text)


def printable(text: object) -> str:
    """Make text safe for a terminal: escape control characters (`\\x1b`) but keep tabs and line breaks."""
    return _UNPRINTABLE.sub(_escape, str(text))


def one_line(text: object, most: int | None = None) -> str:
    """`printable` on one line, cut to `most` characters. Redact keys first: a truncated key would not be found."""
    return printable(" ".join(str(text).split()))[:most]


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def hide_secrets(text: str, secrets: Iterable[str | None], *, was_cut: bool = False) -> str:
    """Replace each secret with `[key]`, however it is encoded: plain, escaped as in JSON (`\\u0073`), URLs (`%73`) or
    HTML (`&#115;`), also partially or repeatedly, or as base64.

    Args:
        was_cut: The text was truncated. Its end is dropped, as it may be the start of a secret.
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
    """One character in any encoding. Repetitions are bounded, so that a search takes linear time."""
    code = ord(character)
    spellings = [
        rf"\\{{0,8}}{re.escape(character)}",
        rf"\\{{1,8}}(?:u(?i:{code:04x})|x(?i:{code:02x}))",
        rf"%(?:25){{0,4}}(?i:{code:02x})",
        rf"&(?:amp;){{0,4}}#(?:0{{0,6}}{code}|[xX]0{{0,6}}(?i:{code:x}));",
    ]
    return f"(?:{'|'.join(spellings)})"


def _base64_core(secret: bytes, shift: int) -> str:
    """The base64 characters determined by the secret alone, at byte offset `shift` modulo 3; in both alphabets."""
    encoded = base64.b64encode(bytes(shift) + secret).decode()
    core = encoded[-(-8 * shift // 6) : 8 * (shift + len(secret)) // 6]
    return core.replace("+", "[+-]").replace("/", "[/_]")
