"""`trl-gtr report | evaluate | plan | check`: look at runs, compare agents, plan a run, see what can run here."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from packaging.requirements import Requirement

from .responses.safe_text import printable


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trl-gtr", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser(
        "report",
        help="one page of curves, episodes and settings of one run or several",
        description="Write one self-contained HTML page about runs; also while they run.",
    )
    report.add_argument("runs", nargs="+", help="output folders")
    report.add_argument("--labels", nargs="+", help="a name a run; runs of one name are seeds, drawn with a band")
    report.add_argument("--output", help="the file; default: report.html in the first run's folder")
    report.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=30.0,
        metavar="SECONDS",
        help="write it again while the runs go on; an open page follows (default: every 30 seconds)",
    )
    commands.add_parser("evaluate", help="play a task with agents on the same deals (own --help)", add_help=False)
    commands.add_parser("plan", help="memory, time and cost of a run, before it (own --help)", add_help=False)
    commands.add_parser("check", help="versions, extras and what of ALFWorld can run here")
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["evaluate"]:
        from .scripts import evaluate as evaluate_command  # it has options of its own, and loads torch

        evaluate_command.main(words[1:])
        return 0
    if words[:1] == ["plan"]:
        from .scripts import plan as plan_command

        plan_command.main(words[1:])
        return 0
    args = parser.parse_args(words)
    if args.command == "report":
        return _report(args)
    return _check()


def _report(args: argparse.Namespace) -> int:
    from .report import watch_report, write_report

    try:
        if args.watch is None:
            pages = iter([write_report(args.runs, args.labels, args.output)])
        else:
            pages = watch_report(args.runs, args.labels, args.output, args.watch)
        for path in pages:
            print(f"{printable(path)} ({path.stat().st_size / 1e6:.1f} MB)", flush=True)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _check() -> int:
    """What is installed, against what the package asks for; 1 if something that it needs is missing or too old."""
    import torch

    from .environments.alfworld.check import report

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
    """What the package needs (under the empty name) and what its extras for users need."""
    found: dict[str, list[Requirement]] = {"": []}
    for text in importlib.metadata.requires("trl-gtr") or []:
        requirement = Requirement(text)
        extra = next((e for e in ("openai", "deepspeed", "report") if f'"{e}"' in str(requirement.marker)), "")
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


if __name__ == "__main__":
    sys.exit(main())
