"""Argument parsing: the command line overrides a YAML file, and mistakes give one-line errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trl import TrlParser

from ..tasks import Task, make_task, task_options
from .options import Option
from .settings import (
    command_line,
    find_own_modules,
    preset_of,
    task_of,
    task_options_of,
    unused_settings,
    value_of,
    with_task_options,
)
from .usage import check_names, format_help, options_of_task


@dataclass
class TaskArguments:
    """The task. Its own options can also be given by name, e.g. `--hands pool`."""

    task: str = field(default="points24", metadata={"help": "The task: a name listed above, gym:ID, or module:Class."})
    task_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Task options by name: a mapping in a file, JSON on the command line."}
    )

    def make_task(self, **more: Any) -> Task:
        """Create the task; `more` options override the given ones."""
        return make_task(self.task, **task_options_of(self.task_options) | more)


DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class AgentArguments(TaskArguments):
    """The task, and how agents play it."""

    seed: int = field(default=0, metadata={"help": "Seed for the deals."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature; 0 is greedy."})
    max_completion_length: int = field(default=256, metadata={"help": "Maximum new tokens per response."})
    device: str | None = field(default=None, metadata={"help": "Device for models; default: a GPU if there is one."})
    dtype: str = field(default="float32", metadata={"help": "Precision of models, e.g. bfloat16."})
    base_url: str | None = field(default=None, metadata={"help": "Server for openai:MODEL agents."})
    any_task: bool = field(default=False, metadata={"help": "Allow agents trained on another task."})

    def __post_init__(self) -> None:
        if self.max_completion_length < 1:
            raise ValueError(f"--max_completion_length must be at least 1, not {self.max_completion_length}.")
        if self.temperature < 0:
            raise ValueError("--temperature must not be negative; 0 is greedy.")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype}: choose one of {', '.join(DTYPES)}.")


class Parser(TrlParser):
    """TRL's parser with one-line errors and a short help, since there are hundreds of options."""

    def __init__(
        self,
        dataclass_types: Iterable[Any],
        description: str | None = None,
        hidden: Container[str] = (),
        prog: str | None = None,
    ) -> None:
        super().__init__(dataclass_types, prog=prog, description=description, allow_abbrev=False)
        self.hidden = hidden
        self.task_options: list[Option] = []
        self.ignored: Container[str] = ()
        """Settings of the file that are not read."""

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        read = {name: value for name, value in settings.items() if name not in self.ignored}
        return list(super().set_defaults_with_config(**read))

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # argparse would also print the usage

    @property
    def names(self) -> set[str]:
        """The options' names, as used in a file."""
        return {action.dest for action in self._actions}

    def format_help(self) -> str:
        fields = [
            Option(each.name, self.get_default(each.name), each.metadata.get("help", ""), _group(dataclass))
            for dataclass in self.dataclass_types
            for each in dataclasses.fields(dataclass)
            if each.init and each.name not in self.hidden
        ]
        usage = f"{self.prog} [--config FILE.yaml] [--OPTION VALUE ...]"
        return format_help(usage, self.description, [*fields, *self.task_options], {})


def _group(dataclass: Any) -> str:
    """The heading for a class's options."""
    return vars(dataclass).get("_argument_group_name") or dataclass.__name__


def parse_arguments(
    dataclass_types: Iterable[Any],
    argv: Sequence[str] | None = None,
    *,
    default_config: str | Path | None = None,
    description: str | None = None,
    defaults: dict[str, Any] | None = None,
    hidden: Container[str] = (),
    prog: str | None = None,
) -> tuple[Any, ...]:
    """One instance of each dataclass. The command line overrides `--config FILE`, which overrides `--preset NAME`, and
    that the `defaults`.

    If one of them has a field `task_options`, the task's options can also be given by their plain names.

    Args:
        dataclass_types: Their fields are the options.
        argv: The command line; `sys.argv` by default.
        default_config: The file to use without `--config`.
        description: First lines of `--help`: the script's docstring.
        defaults: Override the dataclasses' defaults.
        hidden: Fields not shown by `--help`.
        prog: The program's name.
    """
    words = command_line(argv)
    parser = Parser(dataclass_types, description, hidden, prog)
    parser.set_defaults(**(defaults or {}))
    if value_of(words, "config") is None and default_config is not None:
        words = ["--config", str(default_config), *words]
    find_own_modules()
    if "preset" in parser.names:
        parser.set_defaults(**preset_of(words))
        parser.ignored = unused_settings(words)
    if "task_options" in parser.names and (task := task_of(words, parser.get_default("task"))):
        parser.task_options = options_of_task(task)
        check_names(words, {*parser.names, *task_options(task)})
        words = with_task_options(words, task, parser.names)
    else:
        check_names(words, parser.names)
    return parser.parse_args_and_config(words)
