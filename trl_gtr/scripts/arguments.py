"""Arguments of commands and scripts: the command line over a YAML file, every mistake an error of one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trl import TrlParser

from ..tasks import Task, make_task, task_options
from .options import Option
from .settings import command_line, find_own_modules, task_of, task_options_of, value_of, with_task_options
from .usage import check_names, format_help, options_of_task


@dataclass
class TaskArguments:
    """The task of a command. Options that it declares may be given by their own names too: `--hands pool`."""

    task: str = field(
        default="points24",
        metadata={"help": "points24, ezpoints, number_line, blackjack, alfworld, or module:Class."},
    )
    task_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the task by name; a mapping in a file, JSON on the command line."}
    )

    def make_task(self, **more: Any) -> Task:
        """The task; `more` options go over those that are given."""
        return make_task(self.task, **task_options_of(self.task_options) | more)


class Parser(TrlParser):
    """TRL's parser, with one-line errors and a short help: there are hundreds of options."""

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

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # argparse would print the usage and a line of its own

    @property
    def names(self) -> set[str]:
        """The options' names, as in a file."""
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
    """The heading of a class's options: what it says about itself, else its name."""
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
    """One instance of each dataclass: the command line over `--config FILE`, over `defaults`.

    Where one of them has a field `task_options`, the options that the task declares may be given by their plain names.

    Args:
        dataclass_types: Whose fields are the options.
        argv: The command line; the program's own if left out.
        default_config: The file that stands for a missing `--config`.
        description: What `--help` says first: the script's docstring.
        defaults: Other defaults than those of the dataclasses.
        hidden: Fields that `--help` leaves out.
        prog: How the program is called.
    """
    words = command_line(argv)
    parser = Parser(dataclass_types, description, hidden, prog)
    parser.set_defaults(**(defaults or {}))
    if value_of(words, "config") is None and default_config is not None:
        words = ["--config", str(default_config), *words]
    find_own_modules()
    if "task_options" in parser.names:
        task = task_of(words, parser.get_default("task"))
        parser.task_options = options_of_task(task)
        check_names(words, {*parser.names, *task_options(task)})
        words = with_task_options(words, task, parser.names)
    else:
        check_names(words, parser.names)
    return parser.parse_args_and_config(words)
