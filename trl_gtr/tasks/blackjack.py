"""The Blackjack task: read your total and the dealer's card from the image, then stand or hit.

{"thoughts": "My total is 16 and the dealer shows 10, so I hit.", "action": "hit"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym

from .. import environments  # noqa: F401  registers the games
from ..responses.action_text import from_thoughts, match_action
from ..responses.format import Field, ThoughtFormat
from ..types import Response, Transition
from .base import Rubric, Task, contradicts
from .choices import CHOSEN, NOT_CHOSEN, SENTENCE, mentions, settle
from .wrappers import InfoCopies

ENV_ID = "gym_cards/Blackjack-v0"
ACTIONS = ("stand", "hit")

PROMPT = """\
You are playing blackjack. The picture shows the dealer's cards, one of them face down, and your own cards.
Goal: a total closer to 21 than the dealer's, but not above 21.
J, Q and K count 10; A counts 11, or 1 where 11 would be too much.
"hit" draws one more card. "stand" ends your turn; then the dealer draws up to 17 or more.
Allowed actions: stand, hit
{instructions}"""

FIELDS = (Field("thoughts", "text", "your total, the card that the dealer shows, and what follows from them"),)

# The expert's sentences; which one is used depends on the player's total.
FRAMES = (
    "My total is {total} and the dealer shows {dealer}, so I {action}.",
    "The dealer shows {dealer}. I have a total of {total}, so it is best to {action}.",
    "With a total of {total} against the dealer's {dealer} I {action}.",
)

RUBRIC = Rubric(
    role="You judge one step of an agent that plays blackjack.",
    questions={
        "totals": "What is the player's total, which card does the dealer show, and did the agent read both right?",
        "choice": "Is the agent's choice between stand and hit sound for these two?",
    },
    advice="J, Q and K count 10; A counts 11, or 1 where 11 would lift the total above 21. Cards come from an endless "
    "deck, the dealer draws up to 17 or more, and there is neither doubling nor splitting.",
)

_VALUES = {"a": 1, "ace": 1, "11": 1, "j": 10, "q": 10, "k": 10, "jack": 10, "queen": 10, "king": 10}
_RANK = re.compile(r"(?<!\w)(?:1[01]|[1-9]|[AJQK]|(?i:ace|jack|queen|king))(?!\w)")
_DEALER = re.compile(r"\bdealer\b", re.IGNORECASE)
_TOTALS = (re.compile(r"\b(?:total|sum)\b", re.IGNORECASE), re.compile(r"\b(?:I have|I hold|hand)\b", re.IGNORECASE))
_NUMBER = re.compile(r"(?<![\w.])[1-9][0-9]?(?![\w]|\.[0-9])")
_IN_TOTAL = re.compile(r"(?<![\w.])([1-9][0-9]?) in total\b", re.IGNORECASE)
_CHOICE = re.compile(
    r"\b(?:(?P<stand>stand(?:ing)?|stay(?:ing)?)|hit(?:ting)?|draw(?:ing)? (?:a|another|one|one more) card)\b",
    re.IGNORECASE,
)
# Mentioned but not chosen: "don't hit", "if I hit", "a hit would", "the dealer must hit" …
_NOT_CHOSEN = re.compile(
    rf"""{NOT_CHOSEN}
    |\b(?:a|the|another|any|every|by|(?:risk|danger|chance|fear)\ of)\s*$
    |\bdealer\s+(?:(?!so\b|I\b)\w+\s+){{0,2}}(?:to\s+)?$""",
    re.IGNORECASE | re.VERBOSE,
)
_RULED_OUT = re.compile(
    r"\s+(?:would|could|might|may|can|risks?|loses|busts?|a chance|is not|isn['’]t|will(?: \w+){0,3} (?:bust|lose))\b",
    re.IGNORECASE,
)
# … or rejected in favour of the other one: "too risky to hit", "hitting is dangerous".
_REJECTED = re.compile(
    r"""\b(?:avoid(?:ing)?|against|refuse\ to)\s*$
    |\bno\ (?:need|reason|point)\ (?:to|in)\s*$
    |(?:\bunsafe|\bnot\ safe|n['’]t\ safe)\ to\s*$
    |(?<!not\ )(?<!n['’]t\ )(?<!less\ )(?<!too\ )\b(?:too\ \w+|risky|dangerous|unwise)\ to\s*$""",
    re.IGNORECASE | re.VERBOSE,
)
_IS_BAD = re.compile(r"\s+(?:is|would be) (?:too|risky|dangerous|bad|wrong|worse|unsafe)\b", re.IGNORECASE)
_CHOSEN = re.compile(CHOSEN, re.IGNORECASE | re.VERBOSE)
_IS_BEST = re.compile(r"\s+is (?:the |my )?(?:best|better|right|safer|safest|wise|wiser)\b", re.IGNORECASE)


def read_total(thoughts: str) -> int | None:
    """The player's total named in the text.

    "16 in total" wins; else, in the first sentence with *total* or *sum* and a number, the first number after the
    word, else the last before it. If there is no such sentence, the same with *I have*, *I hold* and *hand*.
    """
    if in_total := _IN_TOTAL.search(thoughts):
        return int(in_total[1])
    for cue in _TOTALS:
        for sentence in SENTENCE.split(thoughts):
            if match := _nearest(sentence, cue, _NUMBER):
                return int(match)
    return None


def read_dealer(thoughts: str) -> int | None:
    """The value (ace 1) of the dealer's card named in the text.

    In the first sentence with *dealer* and a rank: the first rank after the word, else the last before it.
    """
    for sentence in SENTENCE.split(thoughts):
        if match := _nearest(sentence, _DEALER, _RANK):
            return _VALUES.get(match.casefold()) or int(match)
    return None


def read_choice(thoughts: str) -> str | None:
    """The action the text settles on, `stand` or `hit`; `None` if it is ambiguous.

    "stay" means stand, "draw a card" means hit. Reasons ("because hitting …") and mentions that aren't choices are
    ignored: "I don't hit", "if I hit", "rather than hit", "a hit would …", "the dealer must hit". If nothing is
    chosen but exactly one action is rejected ("it is too risky to hit"), it is the other one.
    """
    choices, rejected = [], set()
    for match, before in mentions(thoughts, _CHOICE):
        name = "stand" if match["stand"] else "hit"
        if _REJECTED.search(before) or _IS_BAD.match(match.string, match.end()):
            rejected.add(name)
        elif not _NOT_CHOSEN.search(before) and not _RULED_OUT.match(match.string, match.end()):
            choices.append((name, bool(_CHOSEN.search(before) or _IS_BEST.match(match.string, match.end()))))
    if choices or len(rejected) != 1:
        return settle(choices)
    return "hit" if "stand" in rejected else "stand"


def _nearest(sentence: str, cue: re.Pattern[str], wanted: re.Pattern[str]) -> str | None:
    if not (place := cue.search(sentence)):
        return None
    if after := wanted.search(sentence, place.end()):
        return after.group()
    before = wanted.findall(sentence[: place.start()])
    return before[-1] if before else None


def totals(cards: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """The hand's possible totals, best first: two if an ace can count 11 without going over 21, else one."""
    hard = sum(int(card[0]) for card in cards)
    return (hard + 10, hard) if hard <= 11 and any(int(card[0]) == 1 for card in cards) else (hard,)


def best_action(total: int, soft: bool, dealer: int) -> str:
    """Basic strategy for an infinite deck and a dealer who stands on 17, with only stand and hit.

    `dealer` is the value of the shown card (ace 1).
    """
    if soft:
        stand = total >= 19 or (total == 18 and 2 <= dealer <= 8)
    else:
        stand = total >= 17 or (total >= 13 and 2 <= dealer <= 6) or (total == 12 and 4 <= dealer <= 6)
    return "stand" if stand else "hit"


class BlackjackTask(Task):
    """The task around `gym_cards/Blackjack-v0`. Stateless.

    Args:
        env_kwargs: Options of the environment.
        cut: Without effect: no episode of this game is hopeless.
        thoughts: Ask for thoughts; false trains actions alone.
    """

    name = "blackjack"
    rubric = RUBRIC
    reading_parts = ("total", "dealer")

    def __init__(
        self, *, env_kwargs: Mapping[str, Any] | None = None, cut: bool = True, thoughts: bool = True
    ) -> None:
        self.env_kwargs = dict(env_kwargs or {})
        self.cut = cut  # unused: a hand that can't be won is already over
        conclusion = partial(from_thoughts, read_choice)
        self.format = ThoughtFormat(FIELDS if thoughts else (), action_help="stand or hit", conclusion=conclusion)
        self._prompt = PROMPT.format(instructions=self.format.instructions())

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        return InfoCopies(gym.make(ENV_ID, disable_env_checker=True, **self.env_kwargs))

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        return self._prompt

    def public_state(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {"actions": list(ACTIONS)}

    def legal_actions(self, info: Mapping[str, Any]) -> Sequence[str]:
        return ACTIONS

    def to_env_action(self, response: Response, info: Mapping[str, Any]) -> int | None:
        return match_action(response.action, ACTIONS) if response.valid else None

    def believed_info(self, fields: Mapping[str, Any], public_state: Mapping[str, Any]) -> dict[str, Any]:
        """The hand as the thought reads it, as a single card worth the total."""
        thoughts = str(fields.get("thoughts", ""))
        total, dealer = read_total(thoughts), read_dealer(thoughts)
        if total is None or not 4 <= total <= 21:
            raise ValueError("the thought must name the player's total, from 4 to 21")
        if dealer is None:
            raise ValueError("the thought must name the card that the dealer shows")
        return {"Player Card": [[total, "", ""]], "Dealer Card": [[dealer, "", ""]]}

    def judge(self, response: Response, info: Mapping[str, Any]) -> dict[str, bool]:
        """The player's total (either one, if an ace can count both ways) and the value of the dealer's shown card."""
        thoughts = response.fields.get("thoughts")
        if not isinstance(thoughts, str):
            return {"total": False, "dealer": False}
        return {
            "total": read_total(thoughts) in totals(info["Player Card"]),
            "dealer": read_dealer(thoughts) == _shown(info),
        }

    def solvable(self, info: Mapping[str, Any]) -> bool:
        return totals(info["Player Card"])[0] <= 21

    def difficulty(self, info: Mapping[str, Any]) -> str:
        """By the total dealt: from 12 to 16, both choices are bad."""
        total = totals(info["Player Card"])[0]
        return "11 or less" if total <= 11 else "12 to 16" if total <= 16 else "17 or more"

    def expert(self, info: Mapping[str, Any], hint: Response | None = None) -> Response | None:
        counts, dealer = totals(info["Player Card"]), _shown(info)
        soft = len(counts) == 2
        action = best_action(counts[0], soft, dealer)
        words = {
            "total": f"soft {counts[0]}" if soft else counts[0],
            "dealer": "A" if dealer == 1 else dealer,
            "action": action,
        }
        thoughts = FRAMES[counts[0] % len(FRAMES)].format(**words)
        if hint and all(self.judge(hint, info).values()) and not contradicts(self, hint.fields, action, info):
            thoughts = hint.fields["thoughts"]
        return self.format.respond({"thoughts": thoughts} if self.format.fields else {}, action)

    def success(self, transitions: Sequence[Transition]) -> bool:
        return bool(transitions) and transitions[-1].reward > 0


def _shown(info: Mapping[str, Any]) -> int:
    """The value of the dealer's open card, dealt first. The hidden one is never read here."""
    return int(info["Dealer Card"][0][0])
