"""The Points24 and EZPoints tasks: read the cards, aim at a formula, append its next symbol.

{"cards": ["4", "9", "A", "K"], "formula": "4+9", "thoughts": "I aim at 4+9+1+10=24. The formula so far is 4+9, so the
next symbol is +.", "action": "+"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym

from ... import environments  # noqa: F401  registers the games
from ...responses.action_text import from_thoughts, match_action, plain_signs
from ...responses.format import Field, ThoughtFormat
from ...types import Response, Transition
from ..base import Task
from ..wrappers import CutHopeless, HandPool
from .hands import named_hands
from .rubric import rubric, solver_tool
from .rules import COUNTS, RANKS, PointsRules, printed_ranks, read_ranks, written
from .thoughts import read_aim, read_symbol, write_thought

PROMPT = """\
You are playing {game}. The picture shows {cards} playing cards and, below them, the formula written so far.
Goal: a formula that equals {target} and uses the number of every card exactly once. {counts}
You write it one symbol at a time and choose = when it is complete.
Allowed symbols: {symbols}
Formula so far: "{formula}"
{instructions}"""


EZPOINTS = PointsRules(cards=2, target=12, operators="+*", parentheses=False, max_elements=5)


class PointsTask(Task):
    """The task around `gym_cards/Points24-v0` or `gym_cards/EZPoints-v0`. Stateless."""

    reading_parts = ("cards",)
    reward_scale = 0.1  # a win pays 10

    def __init__(
        self,
        name: str,
        env_id: str,
        game: str,
        rules: PointsRules,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        hands: Sequence[Sequence[str | int]] | None = None,
        cut: bool = True,
        thoughts: bool = True,
    ) -> None:
        self.name, self.env_id, self.rules, self.cut = name, env_id, rules, cut
        self.env_kwargs = dict(env_kwargs or {})
        self.hands = None if hands is None else checked_hands(hands, rules)
        next_symbol = partial(read_symbol, symbols=rules.symbols, target=rules.target)
        self.format = ThoughtFormat(
            _fields(rules) if thoughts else (),
            action_help="the next symbol",
            conclusion=partial(from_thoughts, next_symbol),
        )
        self.rubric = rubric(rules)
        self.tools = (solver_tool(rules),) if rules.parentheses else ()
        self._prompt = PROMPT.format(
            game=game,
            cards=("two", "three", "four")[rules.cards - 2],
            target=rules.target,
            counts=COUNTS[rules.highest],
            symbols=", ".join(rules.symbols),
            instructions=self.format.instructions(),
            formula="{formula}",
        )

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        env = gym.make(self.env_id, disable_env_checker=True, **self.env_kwargs)
        if self.hands is not None:
            env = HandPool(env, self.hands)
        return CutHopeless(env, self.rules, cut=self.cut and not evaluation)

    def starts(self) -> Sequence[Mapping[str, Any]] | None:
        return None if self.hands is None else [{"hand": place} for place in range(len(self.hands))]

    def describe_start(self, info: Mapping[str, Any]) -> dict[str, str]:
        return {"hand": " ".join(printed_ranks(info)), "source": "hands"}

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        return self._prompt.replace("{formula}", _shown(info))

    def public_state(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Without the cards, which must be read from the image."""
        return {"formula": _shown(info), "target": self.rules.target, "symbols": list(self.rules.symbols)}

    def legal_actions(self, info: Mapping[str, Any]) -> Sequence[str]:
        return self.rules.symbols

    def to_env_action(self, response: Response, info: Mapping[str, Any]) -> int | None:
        return match_action(response.action, self.rules.symbols, signs=True) if response.valid else None

    def believed_info(self, fields: Mapping[str, Any], public_state: Mapping[str, Any]) -> dict[str, Any]:
        """The state if the cards are as the thought reads them."""
        ranks = read_ranks(fields.get("cards"))
        if ranks is None or len(ranks) != self.rules.cards:
            raise ValueError(f"the hand has {self.rules.cards} cards, of ranks {', '.join(RANKS)}")
        return {
            "Cards": ["H" + ("T" if rank == "10" else rank) for rank in ranks],
            "Numbers": [self.rules.number(rank) for rank in ranks],
            "Formula": re.findall(r"[0-9]+|.", public_state["formula"]),
        }

    def judge(self, response: Response, info: Mapping[str, Any]) -> dict[str, bool]:
        """Whether the cards, the formula so far, the formula aimed at and the named action are right.

        `action`: the thought names the response's own action and, if the aim is right, that is the aim's next symbol;
        otherwise the thought contradicts itself.
        """
        ranks, formula = read_ranks(response.fields.get("cards")), response.fields.get("formula")
        aim, symbol = self._read(response)
        index = match_action(response.action, self.rules.symbols, signs=True)
        aim_right = aim is not None and self.rules.wins(aim, info)
        named = symbol is not None and index is not None and symbol == self.rules.symbols[index]
        return {
            "cards": ranks is not None and sorted(ranks) == sorted(printed_ranks(info)),
            "formula": isinstance(formula, str) and "".join(plain_signs(formula).split()) == "".join(written(info)),
            "aim": aim_right,
            "action": named and (not aim_right or symbol == _next_symbol(aim or (), info)),
        }

    def target(self, response: Response, info: Mapping[str, Any]) -> str | None:
        """The formula the thought aims at, without spaces."""
        aim, _ = self._read(response)
        return "".join(aim) if aim else None

    def solvable(self, info: Mapping[str, Any]) -> bool:
        return self.rules.reachable(info)

    def difficulty(self, info: Mapping[str, Any]) -> str:
        """What the hand's simplest formula uses; the expert plays this one."""
        formula = self.rules.complete({**info, "Formula": []})
        if formula is None:
            return "no formula"
        if "(" in formula:
            return "with parentheses"
        return "with * or /" if {"*", "/"} & set(formula) else "only + and -"

    def expert(self, info: Mapping[str, Any], hint: Response | None = None) -> Response | None:
        thought: dict[str, Any] = {"cards": printed_ranks(info), "formula": "".join(written(info))}
        aim = None
        if hint is not None:
            judged = self.judge(hint, info)
            thought |= {key: hint.fields[key] for key in ("cards", "formula") if judged[key]}
            if judged["aim"]:
                aim, symbol = self._read(hint)
                if aim is not None and symbol == _next_symbol(aim, info):
                    thought["thoughts"] = hint.fields["thoughts"]
        aim = aim or self.rules.complete(info)
        if aim is None:
            return None
        action = _next_symbol(aim, info)
        thought.setdefault("thoughts", write_thought(aim, written(info), self.rules.target, action))
        if not self.format.fields:
            thought = {}
        return self.format.respond(thought, action)

    def success(self, transitions: Sequence[Transition]) -> bool:
        return bool(transitions) and transitions[-1].reward == 10

    def _read(self, response: Response) -> tuple[tuple[str, ...] | None, str | None]:
        """The aim and the next symbol named in the thought."""
        thoughts = response.fields.get("thoughts")
        if not isinstance(thoughts, str):
            return None, None
        rules = self.rules
        return read_aim(thoughts, rules.target, rules.cards), read_symbol(thoughts, rules.symbols, rules.target)


def points24(
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    hands: Sequence[Sequence[str | int]] | str | None = None,
    cut: bool = True,
    thoughts: bool = True,
) -> PointsTask:
    """Make 24 from four cards.

    Args:
        env_kwargs: Options of the environment, e.g. {"solvable_only": true}.
        hands: A list of hands to deal from, or a named set: pool, unseen, solvable, all.
        cut: End episodes that can no longer be won, in training.
        thoughts: Ask for thoughts; false trains actions alone.
    """
    kwargs = dict(env_kwargs or {})
    hands = named_hands(hands) if isinstance(hands, str) else hands
    rules = PointsRules(
        cards=4,
        target=int(kwargs.get("target_points", 24)),
        operators="+-*/",
        parentheses=True,
        max_elements=20,
        highest=10 if kwargs.get("treat_face_cards_as_10", True) else 13,
    )
    options: dict[str, Any] = {"env_kwargs": kwargs, "hands": hands, "cut": cut, "thoughts": thoughts}
    return PointsTask("points24", "gym_cards/Points24-v0", "the card game 24", rules, **options)


def ezpoints(
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    hands: Sequence[Sequence[str | int]] | None = None,
    cut: bool = True,
    thoughts: bool = True,
) -> PointsTask:
    """Make 12 from two cards.

    Args:
        env_kwargs: Options of the environment.
        hands: A list of hands to deal from.
        cut: End episodes that can no longer be won, in training.
        thoughts: Ask for thoughts; false trains actions alone.
    """
    options: dict[str, Any] = {"env_kwargs": env_kwargs, "hands": hands, "cut": cut, "thoughts": thoughts}
    return PointsTask("ezpoints", "gym_cards/EZPoints-v0", "a card game with two cards", EZPOINTS, **options)


def checked_hands(hands: Sequence[Sequence[str | int]], rules: PointsRules) -> list[list[str]]:
    """Hands as lists of card names or ranks; raises `ValueError` for an invalid hand."""
    if isinstance(hands, str):
        raise ValueError(f"hands: only Points24 has named sets of hands; list the hands instead of {hands!r}.")
    checked = [[str(card).strip().upper() for card in hand] for hand in hands]
    names = {*RANKS, *(suit + ("T" if rank == "10" else rank) for suit in "HSDC" for rank in RANKS)}
    for hand in checked:
        if len(hand) != rules.cards or not names.issuperset(hand):
            raise ValueError(
                f"hands: {hand} is not a valid hand. A hand has {rules.cards} cards, each a rank ({', '.join(RANKS)}) "
                'or a suit and rank ("H4", "ST", "DK").'
            )
        if rules == EZPOINTS and not rules.solutions([rules.number(_rank_of(card)) for card in hand]):
            raise ValueError(f"hands: {hand} don't make 12 with + or *, so EZPoints never deals them.")
    if not checked:
        raise ValueError("hands is empty; omit it to deal at random.")
    return checked


def _rank_of(card: str) -> str:
    """The rank of a card given by name or rank."""
    rank = card if card in RANKS else card[1:]
    return "10" if rank == "T" else rank


def _shown(info: Mapping[str, Any]) -> str:
    """The current formula as shown in the image."""
    return "".join(str(element) for element in info["Formula"])


def _next_symbol(aim: Sequence[str], info: Mapping[str, Any]) -> str:
    place = len(written(info))
    return aim[place] if place < len(aim) else "="


def _fields(rules: PointsRules) -> tuple[Field, ...]:
    return (
        Field("cards", "list", "the rank printed on each card: A, 2 to 10, J, Q or K"),
        Field("formula", "text", "the formula so far"),
        Field(
            "thoughts",
            "text",
            f'the whole formula you aim at, as in "...={rules.target}", and the symbol that is next',
        ),
    )
