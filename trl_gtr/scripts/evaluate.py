"""Play a task with one or more agents on the same deals and compare them.

    trl-gtr evaluate --task points24 --hands pool --agents expert random tiny runs/points24
    trl-gtr evaluate --task ezpoints --agents openai:gpt-4o --episodes 50
    trl-gtr evaluate --task alfworld --split valid_unseen --episodes all

An agent is `expert`, `random`, `tiny`, a folder or hub name of a vision-language model, or `openai:MODEL` for one
behind an OpenAI-compatible server (`--base_url`). Greedy unless `--temperature` says otherwise. Success is shown with
its 95 % interval, over all deals, over those that can be won, and by the task's own kinds of deals. ALFWorld's games
and a set of Points24's hands are each played once before any comes again; `--episodes all` ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .arguments import TaskArguments, parse_arguments
from .usage import one_line_errors

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class Arguments(TaskArguments):
    agents: list[str] | None = field(
        default=None, metadata={"help": "Who plays; left out: the expert, chance and the embedded model."}
    )
    episodes: str = field(
        default="200", metadata={"help": "Episodes for each agent, or 'all': each game or hand of a set once."}
    )
    seed: int = field(default=0, metadata={"help": "Decides the deals."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature; 0 is greedy."})
    max_completion_length: int = field(default=256, metadata={"help": "Most new tokens of a response."})
    batch_size: int = field(default=32, metadata={"help": "Episodes side by side."})
    device: str | None = field(default=None, metadata={"help": "Where models run; left out: a GPU if there is one."})
    dtype: str = field(default="float32", metadata={"help": "Precision of models, e.g. bfloat16."})
    base_url: str | None = field(default=None, metadata={"help": "Server of openai:MODEL agents."})
    any_task: bool = field(default=False, metadata={"help": "Let agents play that were trained on another task."})
    output: str | None = field(default=None, metadata={"help": "Write every episode's result to this JSON file."})

    _argument_group_name = "options"


def main(argv: Sequence[str] | None = None, description: str | None = __doc__, prog: str = "trl-gtr evaluate") -> int:
    with one_line_errors():
        (args,) = parse_arguments([Arguments], argv, description=description, prog=prog)
        _check(args)
    from .playing import play  # torch, which neither `--help` nor a typo should wait for

    play(args)
    return 0


def _check(args: Arguments) -> None:
    """What would otherwise be found out when everything has been played."""
    for name in ("batch_size", "max_completion_length"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}.")
    if args.temperature < 0:
        raise ValueError("--temperature must not be negative; 0 is greedy.")
    if args.dtype not in DTYPES:
        raise ValueError(f"--dtype {args.dtype}: there is {', '.join(DTYPES)}.")
    if args.output and not Path(args.output).absolute().parent.is_dir():
        raise ValueError(f"--output {args.output}: there is no such folder. Make it first.")
