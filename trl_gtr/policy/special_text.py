"""Keeps text from an environment or a model from being tokenized as special tokens."""

from __future__ import annotations

import re
from typing import Any

from .loading import special_texts


class SpecialText:
    """Breaks up text that spells a special token: "<image>" becomes "< image>", which reads the same.

    A processor takes its text as one string, in which it can't tell the chat template's own tokens from those spelled
    by an observation or a thought. An extra `<image>` would crash the run, an EOS would end the turn.

    Args:
        processor: The processor whose special tokens to break up.
    """

    def __init__(self, processor: Any) -> None:
        texts = [text for text in special_texts(processor) if len(text) > 1]  # a single character can't be broken up
        self._special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def broken_up(self, text: str) -> str:
        """The text with a space after the first character of anything that spells a special token."""
        return self._special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
