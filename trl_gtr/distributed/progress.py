"""Signs of life while something takes long: a bar for what is under way, and warnings on lines of their own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from tqdm.auto import tqdm
from tqdm.contrib import DummyTqdmFile
from transformers.utils import logging as transformers_logging


class Progress:
    """Is told what is under way, one phase after the other. This one shows nothing."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While bars may be shown."""
        yield

    def begin(self, phase: str, total: int, unit: str) -> None:
        """Begin a phase, and end the one before.

        Args:
            phase: Its name.
            total: How many units it has.
            unit: What is counted, in the singular.
        """

    def advance(self, count: int = 1, **values: str) -> None:
        """`count` more units are done; `values` are shown behind the bar."""

    def end(self) -> None:
        """End the phase."""


class BarProgress(Progress):
    """A bar below that of the run, removed at the end of each phase. Where there is no terminal, nothing is shown."""

    def __init__(self) -> None:
        self._stream: Any = None
        """The terminal, while `sys.stderr` is replaced."""
        self._bar: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Anything that is written to stderr in this block gets lines of its own, above the bars.

        The bars of transformers, one for each file of a checkpoint, are hidden.
        """
        if self._stream is not None:
            yield
            return
        self._stream = sys.stderr
        lines = DummyTqdmFile(sys.stderr)
        handlers = [handler for handler in _stream_handlers() if handler.stream is sys.stderr]
        other_bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            for handler in handlers:
                handler.setStream(lines)
            with redirect_stderr(lines):
                yield
        finally:
            for handler in handlers:
                handler.setStream(self._stream)
            if other_bars:
                transformers_logging.enable_progress_bar()
            self.end()
            self._stream = None

    def begin(self, phase: str, total: int, unit: str) -> None:
        self.end()
        stream = self._stream or sys.stderr
        # disable=None: unless the stream is a terminal
        self._bar = tqdm(
            total=total, desc=f"  {phase}", unit=unit, leave=False, dynamic_ncols=True, disable=None, file=stream
        )

    def advance(self, count: int = 1, **values: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix(values, refresh=False)
            self._bar.update(count)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _stream_handlers() -> Iterator[logging.StreamHandler]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):  # the others are placeholders
            yield from (handler for handler in logger.handlers if type(handler) is logging.StreamHandler)
