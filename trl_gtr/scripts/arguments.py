"""Arguments of the example scripts: the command line over a YAML file, every typo an error of one line."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import TrlParser

from ..responses.safe_text import one_line


class Parser(TrlParser):
    """TRL's parser, with a short usage and one-line errors: there are hundreds of options."""

    def __init__(
        self, dataclass_types: Iterable[Any], description: str | None = None, hidden: Container[str] = ()
    ) -> None:
        super().__init__(
            dataclass_types,
            description=description,
            usage="%(prog)s [--config FILE.yaml] [--OPTION VALUE ...]",
            formatter_class=_Help,
            allow_abbrev=False,
        )
        for action in self._actions:
            if action.dest in hidden:
                action.help = argparse.SUPPRESS

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # argparse would print the usage and a line of its own

    def check_names(self, argv: Sequence[str]) -> None:
        """Raise a `ValueError` that suggests the nearest option if there is no such option."""
        known = {name.removeprefix("--") for name in self._option_string_actions} | {"config"}
        named = [(word[2:].partition("=")[0], "the command line") for word in argv if word.startswith("--")]
        if "--config" in argv:
            file = _after(argv, "--config")
            named += [(key, file) for key in _read_yaml(file) if key != "env"]
        for name, place in named:
            if name and str(name) not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean `{near[0]}`?" if near else "`--help` lists the options."
                raise ValueError(f"There is no option `{name}`, as {place} has it: {hint}")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults behind every option; the script's docstring as it is."""


def parse_arguments(
    dataclass_types: Iterable[Any],
    argv: Sequence[str] | None = None,
    *,
    default_config: str | Path | None = None,
    description: str | None = None,
    defaults: dict[str, Any] | None = None,
    hidden: Container[str] = (),
) -> tuple[Any, ...]:
    """One instance of each dataclass: the command line over `--config FILE`, over `defaults`.

    Args:
        dataclass_types: Whose fields are the options.
        argv: The command line; the program's own if left out.
        default_config: The file that stands for a missing `--config`.
        description: What `--help` says first: the script's docstring.
        defaults: Other defaults than those of the dataclasses.
        hidden: Fields that `--help` leaves out.
    """
    given = sys.argv[1:] if argv is None else argv
    words = [part for word in given for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if default_config is not None and "--config" not in words:
        words = ["--config", str(default_config), *words]
    parser = Parser(dataclass_types, description, hidden)
    parser.set_defaults(**(defaults or {}))
    parser.check_names(words)
    return parser.parse_args_and_config(words)


@contextmanager
def one_line_errors(
    kinds: type[Exception] | tuple[type[Exception], ...] = (ValueError, OSError, ImportError),
) -> Iterator[None]:
    """For everything before training: what the user got wrong is said in one line, without a traceback.

    Args:
        kinds: The errors that are meant.
    """
    try:
        yield
    except kinds as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def _after(argv: Sequence[str], option: str) -> str:
    place = argv.index(option) + 1
    if place == len(argv):
        raise ValueError(f"{option} needs a value.")
    return argv[place]


def _read_yaml(file: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(file).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"The configuration file {file} can't be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold options as `name: value`.")
    return content
