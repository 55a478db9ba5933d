"""What the grid worlds' tasks share: positions are read from the picture, and several moves may be equally good."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...responses.action_text import from_thoughts, match_action
from ...responses.format import Field, ThoughtFormat
from ...types import Response, Transition
from ..base import Task
from .words import named_move, same_reading

Reading = Mapping[str, str | list[str]]


class GridTask(Task):
    """A grid world whose state is read from the picture, field by field, and whose best moves are known.

    A subclass defines `name`, `moves`, `fields`, `template`, `make_env`, `reading`, `best_moves` and `reason`.
    """

    moves: Sequence[str]
    """The name of each environment action, by index; words that `named_move` knows."""
    fields: Sequence[Field]
    """What is read from the picture; `thoughts` follows."""
    named_move: Callable[[str], str | None] = staticmethod(named_move)
    """Finds the move that a thought settles on."""
    template: str
    """The prompt, with the fields `{moves}` and `{instructions}`."""

    def __init__(self, *, env_kwargs: Mapping[str, Any] | None = None, thoughts: bool = True) -> None:
        self.env_kwargs = dict(env_kwargs or {})
        self.options = {
            **self.options,
            **({"env_kwargs": self.env_kwargs} if self.env_kwargs else {}),
            **({} if thoughts else {"thoughts": False}),
        }
        told = Field("thoughts", "text", "what follows from it, and which action is best")
        self.format = ThoughtFormat(
            (*self.fields, told) if thoughts else (),
            action_help="one of the allowed actions",
            conclusion=partial(from_thoughts, self.named_move),
        )
        self.reading_parts = tuple(field.key for field in self.fields)
        self._prompt = self.template.format(moves=", ".join(self.moves), instructions=self.format.instructions())

    # -- a game's own ----------------------------------------------------------------------------------------------

    @abstractmethod
    def reading(self, info: Mapping[str, Any]) -> Reading:
        """The true value of each field."""

    @abstractmethod
    def best_moves(self, info: Mapping[str, Any]) -> Sequence[str]:
        """Every best move, the expert's choice first; empty if the goal is out of reach."""

    @abstractmethod
    def reason(self, info: Mapping[str, Any], move: str) -> str:
        """The expert's sentence for this move."""

    # -- the same for all ------------------------------------------------------------------------------------------

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        return self._prompt

    def legal_actions(self, info: Mapping[str, Any]) -> Sequence[str]:
        return self.moves

    def to_env_action(self, response: Response, info: Mapping[str, Any]) -> int | None:
        return match_action(response.action, self.moves) if response.valid else None

    def public_state(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {"actions": list(self.moves)}

    def judge(self, response: Response, info: Mapping[str, Any]) -> dict[str, bool]:
        """Each field, and whether thought and action agree on a best move."""
        true = self.reading(info)
        parts = {key: same_reading(response.fields.get(key), true[key]) for key in self.reading_parts}
        concluded, place = self.format.conclusion(response.fields), match_action(response.action, self.moves)
        parts["move"] = place is not None and concluded == self.moves[place] and concluded in self.best_moves(info)
        return parts

    def expert(self, info: Mapping[str, Any], hint: Response | None = None) -> Response | None:
        best = self.best_moves(info)
        if not best:
            return None
        move, thoughts = best[0], None
        if hint is not None:
            concluded = self.format.conclusion(hint.fields)
            if concluded in best:
                move, thoughts = str(concluded), str(hint.fields["thoughts"])
            elif (place := match_action(hint.action, self.moves)) is not None and self.moves[place] in best:
                move = self.moves[place]
        values = {**self.reading(info), "thoughts": thoughts or self.reason(info, move)}
        return self.format.respond({field.key: values[field.key] for field in self.format.fields}, move)

    def solvable(self, info: Mapping[str, Any]) -> bool:
        return bool(self.best_moves(info))

    def success(self, transitions: Sequence[Transition]) -> bool:
        """Whether the goal was reached: with it the episode terminates and pays."""
        return bool(transitions) and transitions[-1].terminated and transitions[-1].reward > 0
