"""Play a task with one or more agents on the same deals and compare them.

    trl-gtr evaluate --task points24 --hands pool --agents expert random tiny runs/points24
    trl-gtr evaluate --task ezpoints --agents openai:gpt-4o --episodes 50
    trl-gtr evaluate --task alfworld --split valid_unseen --episodes all

An agent is `expert`, `random`, `tiny`, a folder or hub name of a vision-language model, or `openai:MODEL` for one
behind an OpenAI-compatible server (`--base_url`). Decoding is greedy unless `--temperature` is set. Success is shown
with its 95 % interval, over all deals, over winnable ones, and by kind of deal. ALFWorld's games and a set of Points24
hands are each played once before any repeats; `--episodes all` stops there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .arguments import AgentArguments, parse_arguments
from .usage import one_line_errors


@dataclass
class Arguments(AgentArguments):
    agents: list[str] | None = field(
        default=None, metadata={"help": "The agents; default: the expert, random play and the embedded model."}
    )
    episodes: str = field(
        default="200", metadata={"help": "Episodes per agent, or 'all': each game or hand in the set once."}
    )
    batch_size: int = field(default=32, metadata={"help": "Episodes played in parallel."})
    output: str | None = field(default=None, metadata={"help": "Write every episode's result to this JSON file."})

    _argument_group_name = "options"


def main(argv: Sequence[str] | None = None, description: str | None = __doc__, prog: str = "trl-gtr evaluate") -> int:
    with one_line_errors():
        (args,) = parse_arguments([Arguments], argv, description=description, prog=prog)
        _check(args)
    from .playing import play  # imports torch, which would slow down `--help` and error messages

    play(args)
    return 0


def _check(args: Arguments) -> None:
    """Catch errors that would otherwise appear only after playing."""
    if args.batch_size < 1:
        raise ValueError(f"--batch_size must be at least 1, not {args.batch_size}.")
    if args.output and not Path(args.output).absolute().parent.is_dir():
        raise ValueError(f"--output {args.output}: the folder does not exist. Create it first.")
