"""Settings before they are parsed: the words of a command line, YAML files, and the options of tasks among them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..storage.plain_data import json_options
from ..tasks import task_options

CONFIGS = Path(__file__).parent.parent / "configs"
# Settings of the embedded model for each task, for a command without `--config`.
_DEFAULTS = {
    "points24": "points24_tiny.yaml",
    "ezpoints": "gym_cards_tiny.yaml",
    "number_line": "gym_cards_tiny.yaml",
    "blackjack": "gym_cards_tiny.yaml",
    "alfworld": "alfworld_tiny.yaml",
}


def default_config(task: str) -> Path | None:
    """The shipped settings for a task; `None` for a task of one's own."""
    return CONFIGS / _DEFAULTS[task] if task in _DEFAULTS else None


def command_line(argv: Sequence[str] | None = None) -> list[str]:
    """The words of a command line, the program's own if left out; `--config=FILE` as TRL's parser wants it."""
    given = sys.argv[1:] if argv is None else argv
    return [part for word in given for part in (word.split("=", 1) if word.startswith("--config=") else [word])]


class Given(NamedTuple):
    """An option as the command line has it."""

    name: str
    """Without its dashes; "" for words that belong to no option."""
    words: list[str]
    values: list[str]


def given_options(words: Sequence[str]) -> Iterator[Given]:
    """The options of a command line, each with all words up to the next one."""
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    if words and starts[:1] != [0]:
        stray = list(words[: starts[0]] if starts else words)
        yield Given("", stray, stray)
    for start, end in pairwise([*starts, len(words)]):
        name, equals, value = words[start][2:].partition("=")
        values = [*([value] if equals else []), *words[start + 1 : end]]
        yield Given(name.replace("-", "_"), list(words[start:end]), values)


def value_of(words: Sequence[str], option: str) -> str | None:
    """The value of an option, the last one if it is given twice; `None` if it isn't given."""
    found = None
    for given in given_options(words):
        if given.name == option:
            if not given.values:
                raise ValueError(f"--{option} needs a value.")
            found = given.values[0]
    return found


def read_yaml(file: str | Path) -> dict[str, Any]:
    """The options that a configuration file holds."""
    try:
        content = yaml.safe_load(Path(file).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"The configuration file {file} can't be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold options as `name: value`.")
    return content


def with_defaults(words: Sequence[str], task: str) -> list[str]:
    """The words with what they leave out: `--config`, the shipped settings of their task, and `--task`.

    Args:
        words: A command line.
        task: The task of a command line that names none, and whose file names none.
    """
    words = list(words)
    config = default_config(value_of(words, "task") or task)
    if config is not None and value_of(words, "config") is None:
        words = ["--config", str(config), *words]
    if value_of(words, "task") is None and "task" not in settings_of(words):
        words = ["--task", task, *words]
    return words


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """What the file behind `--config` says; empty without one."""
    file = value_of(words, "config")
    return {} if file is None else read_yaml(file)


def task_of(words: Sequence[str], default_task: str) -> str:
    """The name of the task: the command line's, else the file's, else the default one."""
    return value_of(words, "task") or settings_of(words).get("task", default_task)


def find_own_modules() -> None:
    """Let `module:Class` name modules of the current folder, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def with_task_options(words: Sequence[str], task: str, taken: Container[str]) -> list[str]:
    """The words with all options of the task in one `--task_options`, as JSON.

    An option that the task declares can be given by its plain name too (`--hands pool`), unless a setting of that name
    is `taken`. Options of the command line go over those of the file, name by name.
    """
    file, declared = settings_of(words), task_options(task)
    rest: list[str] = []
    options: dict[str, Any] = {}
    for given in given_options(words):
        if given.name == "task_options":
            options = task_options_of(" ".join(given.values)) | options
        elif given.name in declared and given.name not in taken:
            options[given.name] = _plain_value(given.values)
        else:
            rest += given.words
    if not options:
        return rest
    return [*rest, "--task_options", json.dumps(task_options_of(file.get("task_options")) | options)]


def _plain_value(words: Sequence[str]) -> Any:
    """What an option's words mean, by YAML's rules: a flag, a number, a text, or a list."""
    try:
        values = [yaml.safe_load(word) for word in words]
    except yaml.YAMLError as error:
        raise ValueError(f"{' '.join(words)} is not valid YAML: {error}") from error
    return True if not values else values[0] if len(values) == 1 else values


def task_options_of(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """Options of a task, from a YAML file or, as JSON, from the command line."""
    return json_options(given, "task_options", '{"cut": false}')
