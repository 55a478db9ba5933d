"""`trl-gtr COMMAND …`: passes the remaining arguments to the command's module in `trl_gtr.scripts`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

# command → module in `scripts` (imported on use) and description
COMMANDS = {
    "train": ("launch", "train an agent with GTR, through accelerate's launcher"),
    "evaluate": ("evaluate", "play a task with agents on the same deals"),
    "play": ("play", "play a task yourself, or watch an agent, with a verdict on every thought"),
    "report": ("report", "one page with curves, episodes and settings of one or more runs"),
    "plan": ("plan", "memory, time and cost of a run, before it starts"),
    "check": ("check", "what is installed here; with --task, whether a task is ready for training"),
}


def main(argv: Sequence[str] | None = None) -> int:
    command, *words = (sys.argv[1:] if argv is None else list(argv)) or [""]
    if command in ("-h", "--help"):
        print(_help())
        return 0
    if command == "--version":
        print(version("trl-gtr"))
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean `trl-gtr {near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}."
        print(f"error: {f'Unknown command `{command}`' if command else 'Missing command'}: {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f".scripts.{COMMANDS[command][0]}", __package__)
    return module.main(words)


def _help() -> str:
    lines = [f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: trl-gtr COMMAND ...   (trl-gtr COMMAND --help: its options)", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
