"""Check this machine, or a task before training on it.

    trl-gtr check
    trl-gtr check --task my_module:MyTask

Without --task: versions, extras, GPUs, and which parts of ALFWorld can run here. With it, random play and the task's
expert play a few episodes, and everything wrong or missing is listed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from packaging.requirements import Requirement

from ..environments.alfworld.check import report
from ..evaluation.task_check import check_task
from ..responses.safe_text import one_line
from .arguments import TaskArguments, parse_arguments
from .usage import one_line_errors

EXTRAS = ("openai", "minigrid", "ray", "deepspeed", "report")
"""Those for users, except `alfworld`, which has a check of its own."""


@dataclass
class Arguments(TaskArguments):
    task: str = field(default="", metadata={"help": "The task; without one, this machine is checked."})
    episodes: int = field(default=8, metadata={"help": "Episodes for random play, and as many for the expert."})
    seed: int = field(default=0, metadata={"help": "Seed for the deals."})

    _argument_group_name = "options"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if something is wrong with the task, or if something required is missing or unsuitable."""
    with one_line_errors((ValueError, OSError, ImportError, TypeError)):
        (args,) = parse_arguments([Arguments], argv, description=__doc__, prog="trl-gtr check")
        if args.task:
            return _check_task(args)
    return _check_machine()


def _check_task(args: Arguments) -> int:
    findings = check_task(args.make_task(), args.episodes, args.seed)
    for finding in findings:
        print(one_line(finding))
    wrong = sum(finding.severity == "wrong" for finding in findings)
    print(f"{args.task}: {f'{wrong} to fix' if wrong else 'ready for training'}")
    return 1 if wrong else 0


def _check_machine() -> int:
    import torch  # slow, so not needed to check a task

    wrong = 0
    print(f"Python {sys.version.split()[0]}, trl-gtr {importlib.metadata.version('trl-gtr')}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"GPUs: {', '.join(gpus) or 'none: fine for the tiny model'}\n")
    for extra, requirements in _requirements().items():
        found = [_finding(requirement) for requirement in requirements]
        missing = [finding for finding in found if not finding.startswith("ok")]
        if not extra:
            wrong = len(missing)
        state = "ok" if not missing else f'missing: pip install "trl-gtr[{extra}]"' if extra else "wrong"
        print(f"{f'extra {extra}' if extra else 'needed'}: {state}")
        for finding in found:
            print(f"  {finding}")
    print(f"\nALFWorld\n{report()[0]}")
    return 1 if wrong else 0


def _requirements() -> dict[str, list[Requirement]]:
    """Requirements of the package (under the empty name) and of its user-facing extras."""
    found: dict[str, list[Requirement]] = {"": []}
    for text in importlib.metadata.requires("trl-gtr") or []:
        requirement = Requirement(text)
        extra = next((each for each in EXTRAS if f'"{each}"' in str(requirement.marker)), "")
        if extra or requirement.marker is None:
            found.setdefault(extra, []).append(requirement)
    return found


def _finding(requirement: Requirement) -> str:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"missing  {requirement.name}{requirement.specifier}"
    fits = requirement.specifier.contains(version, prereleases=True)
    return f"{'ok      ' if fits else 'unfit   '} {requirement.name} {version} (wanted {requirement.specifier})"
