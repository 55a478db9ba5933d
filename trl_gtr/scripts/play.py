"""Play a task yourself, or watch an agent play it, with a verdict on every thought.

    trl-gtr play --task points24
    trl-gtr play --task points24 --hands pool --agent runs/points24
    trl-gtr play --task blackjack --page

Without --agent you play: type what you see and think, then an action, and the task's judge tells you what is true.
--agent takes the same names as `trl-gtr evaluate`: expert, random, tiny, a folder or hub name, or openai:MODEL. --page
shows the game in a browser, on this machine only, instead of the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console

from ..evaluation.game import Game
from ..tasks import Task
from .arguments import AgentArguments, parse_arguments
from .play_page import serve
from .play_terminal import TerminalGame
from .usage import one_line_errors

if TYPE_CHECKING:
    from ..evaluation.agents import Agent


@dataclass
class Arguments(AgentArguments):
    agent: str | None = field(default=None, metadata={"help": "Watch this agent; without it, you play."})
    episodes: int = field(default=3, metadata={"help": "Deals to play in the terminal."})
    page: bool = field(default=False, metadata={"help": "Play in a browser, at an address of this machine."})
    port: int = field(default=0, metadata={"help": "The page's port; 0: any free one."})

    _argument_group_name = "options"


def main(argv: Sequence[str] | None = None) -> int:
    with one_line_errors((ValueError, OSError, ImportError, TypeError)):
        (args,) = parse_arguments([Arguments], argv, description=__doc__, prog="trl-gtr play")
        if args.episodes < 1:
            raise ValueError(f"--episodes must be at least 1, not {args.episodes}.")
        task = args.make_task()
        agent, expected = _agent(args, task)
        game = Game(task, args.seed)
    try:
        with one_line_errors(expected):
            if args.page:
                serve(game, agent, args.port)
            else:
                TerminalGame(game, agent, Console(highlight=False)).play(args.episodes)
    except KeyboardInterrupt:
        return 130
    finally:
        game.close()
    return 0


def _agent(args: Arguments, task: Task) -> tuple[Agent | None, tuple[type[Exception], ...]]:
    """The agent, if one is to play, and the errors to expect of it."""
    if args.agent is None:
        return None, ()
    import torch  # a person doesn't need it

    from ..evaluation.agents import NoAnswer
    from .playing import make_agent

    torch.manual_seed(args.seed)
    return make_agent(args.agent, task, args), (NoAnswer,)
