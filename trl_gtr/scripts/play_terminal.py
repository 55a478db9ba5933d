"""`trl-gtr play` in a terminal: the picture in half blocks, typed thoughts, and verdicts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from ..evaluation.game import Game, PlayedStep, readable, written_response
from ..responses.safe_text import printable

if TYPE_CHECKING:
    from ..evaluation.agents import Agent

MAX_COLUMNS = 64
HELP = (
    "Type each part of your thought, then an action. Enter repeats what is in brackets; on the first part it skips "
    "the thought. ? gives a hint, q quits."
)


class Quit(Exception):
    """The player wants to stop."""


class TerminalGame:
    """Shows a game and asks for responses, from a person or an agent.

    Args:
        game: The game to play.
        agent: Plays; `None` asks the person.
        console: Where to print.
        ask: Shows a prompt and returns a typed line.
        pause: Wait for Enter after each of the agent's steps; by default if someone can type.
    """

    def __init__(
        self,
        game: Game,
        agent: Agent | None,
        console: Console,
        ask: Callable[[str], str] = input,
        pause: bool | None = None,
    ) -> None:
        self.game, self.agent, self.console, self.ask = game, agent, console, ask
        self.pause = sys.stdin.isatty() if pause is None else pause
        self.typed: dict[str, str] = {}
        """The person's last thought in this deal."""

    def play(self, episodes: int) -> None:
        """Play until so many deals are finished, or the player quits."""
        self._print(self.game.rules if self.agent is None else f"{self.game.task.name}, seed {self.game.seed}", "dim")
        if self.agent is None:
            self._print(HELP, "bold")
        try:
            while True:
                self._play_deal()
                if self.game.played >= episodes:
                    break
                self.game.deal()
        except Quit:
            pass
        except EOFError:
            self._print("")  # ends the line of the question
        self._print(f"{self.game.won} of {self.game.played} deals won", "bold")

    def _play_deal(self) -> None:
        self.typed = {}
        while not self.game.ended:
            self._show_picture()
            has_thought = True
            if self.agent is None:
                text = self._read()
                has_thought = bool(self.typed)
            else:
                (text,) = self.agent.respond([self.game.prompt], [self.game.image], [self.game.episode.info])
            self._show_step(self.game.step(text), has_thought)
            if self.agent is not None and self.pause and self.ask("Enter: next step, q: quit ").strip() == "q":
                raise Quit
        outcome = ("won", "bold green") if self.game.succeeded else ("not won", "bold red")
        self._print(f"Deal {self.game.played}: {outcome[0]}", outcome[1])

    # -- the person ------------------------------------------------------------------------------------------------

    def _read(self) -> str:
        """A response with a legal action, from what the person types."""
        while True:
            self._read_thought()
            action = self._line("action> ")
            try:
                text = written_response(self.game.task.format, self.typed, action)
            except ValueError as error:
                self._print(f"{error} Try again.", "yellow")
                continue
            if self.game.is_legal(text):
                return text
            legal = ", ".join(self.game.task.legal_actions(self.game.episode.info))
            self._print(f"{action!r} is not legal here. Legal: {legal}", "yellow")

    def _read_thought(self) -> None:
        for place, field in enumerate(self.game.task.format.fields):
            kept = self.typed.get(field.key)
            line = self._line(f"{field.key}{f' [{kept}]' if kept else ''}> ")
            if line:
                self.typed[field.key] = line
            elif place == 0 and kept is None:
                return  # no thought this time

    def _line(self, prompt: str) -> str:
        """A typed line; handles hints and quitting."""
        while (line := self.ask(printable(prompt)).strip()) == "?":
            self._print(self.game.hint() or "The expert has no answer here.", "cyan")
        if line == "q":
            raise Quit
        return line

    # -- showing ---------------------------------------------------------------------------------------------------

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(Text(printable(text), style))

    def _show_picture(self) -> None:
        if self.console.color_system is not None:
            self.console.print(half_blocks(self.game.image, min(self.console.width - 1, MAX_COLUMNS)))

    def _show_step(self, step: PlayedStep, has_thought: bool) -> None:
        response, replaced = step.transition.response, step.transition.substitute
        if self.agent is not None:
            for key, value in response.fields.items():
                self._print(f"  {key}: {readable(value)}")
            self._print(f"  action: {response.action}" + (f" ({response.error})" if response.error else ""), "bold")
        if replaced is not None:
            self._print(f"  no legal action: {replaced} was played instead", "yellow")
        self._print(f"  reward {step.transition.reward:g}", "dim")
        if has_thought:
            for words, style in verdict(step):
                self._print(f"  {words}", style)


def verdict(step: PlayedStep) -> list[tuple[str, str]]:
    """What judge and expert say about a thought, line by line with a style."""
    lines = []
    if step.judgement:
        parts = "  ".join(f"{name} {'✓' if true else '✗'}" for name, true in step.judgement.items())
        true = all(step.judgement.values())
        lines.append((f"judge: {'true' if true else 'untrue'}   {parts}", "green" if true else "red"))
    else:
        lines.append(("this task has no judge", "dim"))
    correction = step.correction
    if correction is not None and correction.verdict == "unsolvable":
        lines.append(("expert: this can't be won any more", "yellow"))
    elif correction is not None and correction.thought is not None:
        said = "; ".join(f"{key}: {readable(value)}" for key, value in correction.thought.items())
        lines.append((f"expert: {said}; action: {correction.action}", "cyan"))
    elif correction is not None and correction.action not in (None, step.transition.response.action):
        lines.append((f"expert: the thought is right, but I would choose {correction.action}", "cyan"))
    return lines


def half_blocks(image: np.ndarray, columns: int) -> Text:
    """The picture as text: each character shows two pixels, one above the other."""
    height, width = image.shape[:2]
    rows = max(round(columns * height / width / 2), 1)
    pixels = np.asarray(Image.fromarray(image).resize((columns, 2 * rows), Image.Resampling.LANCZOS))
    text = Text(no_wrap=True)
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
        text.append("\n")
    return text
