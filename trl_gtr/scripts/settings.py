"""Settings before parsing: command-line arguments, YAML files, and task options."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..distributed.presets import GAE_FIELDS, PRESETS, VALUE_FIELDS
from ..storage.plain_data import json_options, read_yaml
from ..tasks import task_options

CONFIGS = Path(__file__).parent.parent / "configs"
# Default settings for each task (with the embedded model), used without `--config`.
_DEFAULTS = {
    "points24": "points24_tiny.yaml",
    "ezpoints": "gym_cards_tiny.yaml",
    "number_line": "gym_cards_tiny.yaml",
    "blackjack": "gym_cards_tiny.yaml",
    "alfworld": "alfworld_tiny.yaml",
    "frozen_lake": "frozen_lake_tiny.yaml",
    "minigrid": "minigrid_tiny.yaml",
}


def default_config(task: str) -> Path | None:
    """The shipped settings for a task; `None` for a custom task."""
    return CONFIGS / _DEFAULTS[task] if task in _DEFAULTS else None


def command_line(argv: Sequence[str] | None = None) -> list[str]:
    """The command line (`sys.argv` by default), with `--config=FILE` split as TRL's parser expects."""
    given = sys.argv[1:] if argv is None else argv
    return [part for word in given for part in (word.split("=", 1) if word.startswith("--config=") else [word])]


class Given(NamedTuple):
    """An option as given on the command line."""

    name: str
    """Without its dashes; "" for arguments that belong to no option."""
    words: list[str]
    values: list[str]


def given_options(words: Sequence[str]) -> Iterator[Given]:
    """The options on a command line, each with all arguments up to the next option."""
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    if words and starts[:1] != [0]:
        stray = list(words[: starts[0]] if starts else words)
        yield Given("", stray, stray)
    for start, end in pairwise([*starts, len(words)]):
        name, equals, value = words[start][2:].partition("=")
        values = [*([value] if equals else []), *words[start + 1 : end]]
        yield Given(name.replace("-", "_"), list(words[start:end]), values)


def value_of(words: Sequence[str], option: str) -> str | None:
    """The value of an option (the last one if repeated); `None` if it isn't given."""
    found = None
    for given in given_options(words):
        if given.name == option:
            if not given.values:
                raise ValueError(f"--{option} needs a value.")
            found = given.values[0]
    return found


def read_options(file: str | Path) -> dict[str, Any]:
    """The options in a configuration file."""
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} must contain options as `name: value`.")
    return content


def with_defaults(words: Sequence[str], task: str) -> list[str]:
    """Add defaults to a command line: `--task`, and as `--config` the task's shipped settings.

    Args:
        words: The command line.
        task: The task if neither the command line nor its file names one.
    """
    words = list(words)
    config = default_config(value_of(words, "task") or task)
    if config is not None and value_of(words, "config") is None:
        words = ["--config", str(config), *words]
    if value_of(words, "task") is None and "task" not in settings_of(words):
        words = ["--task", task, *words]
    return words


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """Contents of the `--config` file; empty without one."""
    file = value_of(words, "config")
    return {} if file is None else read_options(file)


def preset_of(words: Sequence[str]) -> dict[str, Any]:
    """The settings of the preset named on the command line or in its file; empty without one."""
    name = value_of(words, "preset") or settings_of(words).get("preset")
    if name is not None and name not in PRESETS:
        raise ValueError(f"There is no preset {name!r}: choose one of {', '.join(PRESETS)}.")
    return {} if name is None else PRESETS[name]


def unused_settings(words: Sequence[str]) -> tuple[str, ...]:
    """Settings of a shipped file that a method named on the command line has no use for."""
    file = value_of(words, "config")
    method = value_of(words, "advantage_estimator") or preset_of(words).get("advantage_estimator", "gae")
    return (*VALUE_FIELDS, *GAE_FIELDS) if _is_shipped(file) and method != "gae" else ()


def _is_shipped(file: str | None) -> bool:
    return file is not None and Path(file).parent == CONFIGS


def task_of(words: Sequence[str], default_task: str) -> str:
    """The task's name, from the command line, else the file, else the default."""
    return value_of(words, "task") or settings_of(words).get("task", default_task)


def find_own_modules() -> None:
    """Let `module:Class` refer to modules in the current folder, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def with_task_options(words: Sequence[str], task: str, taken: Container[str]) -> list[str]:
    """Merge all task options on the command line into one JSON `--task_options`.

    Task options can also be given by their plain names (`--hands pool`), unless the name is `taken` by a setting.
    Individual options on the command line override those in the file.
    """
    declared = task_options(task)
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
    in_file = task_options_of(settings_of(words).get("task_options"))
    other_level = "level" in declared and options.get("level", declared["level"].default) != declared["level"].default
    if other_level and _is_shipped(value_of(words, "config")):
        in_file.pop("env_kwargs", None)  # the step limit there is meant for the default level
    return [*rest, "--task_options", json.dumps(in_file | options)]


def _plain_value(words: Sequence[str]) -> Any:
    """Parse an option's arguments as YAML: a flag, a number, a string or a list."""
    try:
        values = [yaml.safe_load(word) for word in words]
    except yaml.YAMLError as error:
        raise ValueError(f"{' '.join(words)} is not valid YAML: {error}") from error
    return True if not values else values[0] if len(values) == 1 else values


def task_options_of(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """Task options, from a YAML file or as JSON from the command line."""
    return json_options(given, "task_options", '{"cut": false}')
