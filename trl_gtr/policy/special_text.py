"""Text that spells a special token, from an environment or a model, and how it is kept from becoming one."""

from __future__ import annotations

import re
from typing import Any

from .loading import special_texts


class SpecialText:
    """Breaks up what spells a special token: "<image>" becomes "< image>", which means the same to a reader.

    A processor takes its text as one string in which it can't tell the chat template's own tokens from those that an
    observation or a thought happens to spell. An `<image>` too many ends the run, an EOS the turn.

    Args:
        processor: Whose special tokens.
    """

    def __init__(self, processor: Any) -> None:
        texts = [text for text in special_texts(processor) if len(text) > 1]  # a single character can't be broken up
        self._special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def broken_up(self, text: str) -> str:
        """The text with a space behind the first character of whatever spells a special token."""
        return self._special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
