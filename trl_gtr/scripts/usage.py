"""Help and errors for command lines: one line per option, and one line per mistake."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..responses.safe_text import one_line
from ..tasks import TASKS, task_options, task_options_help
from .options import Option
from .settings import given_options, read_options, value_of

NAME_WIDTH, MOST_WIDTH = 30, 119
_SENTENCE_END = re.compile(r"(?<!e\.g)\.\s")
_PATIENCE = 20.0
"""Seconds that other processes wait for rank 0 to report an error they all have."""


@contextmanager
def one_line_errors(
    kinds: type[Exception] | tuple[type[Exception], ...] = (ValueError, OSError, ImportError),
    status: int = 2,
) -> Iterator[None]:
    """Report user errors, and Ctrl-C before training, in one line, without a traceback.

    Args:
        kinds: The error types to report.
        status: The exit status; 2 is a usage error.
    """
    try:
        yield
    except kinds as error:
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            time.sleep(_PATIENCE)  # rank 0 reports the same error, and its exit ends this process
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(status) from None
    except KeyboardInterrupt:
        print("Interrupted before training.", file=sys.stderr)
        raise SystemExit(130) from None


def check_names(words: Sequence[str], known: Collection[str]) -> None:
    """Raise a `ValueError` with a suggestion if the command line or its `--config` file has an unknown option."""
    named = [(given.name, "on the command line") for given in given_options(words)]
    if (file := value_of(words, "config")) is not None:
        named += [(str(name), f"in {file}") for name in read_options(file) if name != "env"]
    for name, place in named:
        plain = name.removeprefix("no_")
        if name and name != "config" and name not in known and plain not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else "`--help` lists the options."
            raise ValueError(f"Unknown option `{name}` {place}: {hint}")


def format_help(
    usage: str, description: str | None, options: Iterable[Option], values: Mapping[str, Any], *, full: bool = False
) -> str:
    """A grouped help text: one line per option with its default, or with `full` the whole description.

    Args:
        usage: The usage line.
        description: What the command does.
        options: The options, in this order.
        values: Defaults of this command that override the options' own.
        full: Show whole descriptions.
    """
    width = min(shutil.get_terminal_size((MOST_WIDTH, 24)).columns, MOST_WIDTH)
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.group, []).append(option)
    names_task = any(option.name == "task" for members in groups.values() for option in members)
    parts = [f"usage: {usage}", (description or "").strip(), _tasks() if names_task else ""]
    for group, members in groups.items():
        lines = (_line(each, values.get(each.name, each.default), width, full) for each in members)
        parts.append("\n".join([f"{group}:", *lines]))
    return "\n\n".join(filter(None, parts)) + "\n"


def _tasks() -> str:
    more = "gym:ID for any gymnasium environment, or module:Class for your own"
    return f"tasks:\n  {', '.join(TASKS)},\n  {more}"


def options_of_task(task: str) -> list[Option]:
    """A task's own options, with descriptions from the `Args` of its class or function."""
    described = task_options_help(task)
    return [
        Option(
            name, None if each.default is each.empty else each.default, described.get(name, ""), f"options of {task}"
        )
        for name, each in task_options(task).items()
    ]


def _line(option: Option, default: Any, width: int, full: bool) -> str:
    help_text = " ".join(option.help.split())
    shown = "" if default in (None, "", (), []) else f" [{_written(default)}]"
    if not full:
        first = _SENTENCE_END.split(help_text)[0].rstrip(".")
        room = width - NAME_WIDTH - len(shown) - len("  --")
        help_text = first if len(first) <= room else f"{first[: room - 1].rstrip()}…"
    return f"  --{option.name:<{NAME_WIDTH}}{help_text}{shown}".rstrip()


def _written(value: Any) -> str:
    """A default as written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
