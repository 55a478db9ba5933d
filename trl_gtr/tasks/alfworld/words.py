"""Read the objects, the sub-goal and the command named in an ALFWorld thought."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...environments.alfworld.furniture import LOOKS
from ...environments.alfworld.icons import ICONS
from ...environments.alfworld.world import kind_of
from ..choices import without_reasons

THINGS = frozenset(ICONS)
PLACES = frozenset(LOOKS)

# ALFWorld writes these as one word; people write two.
_TWO_WORDS = (
    *("alarm clock", "baseball bat", "basket ball", "butter knife", "cell phone", "credit card", "desk lamp"),
    *("dish sponge", "floor lamp", "glass bottle", "hand towel", "house plant", "key chain", "paper towel"),
    *("pepper shaker", "remote control", "salt shaker", "scrub brush", "soap bar", "soap bottle", "spray bottle"),
    *("teddy bear", "tennis racket", "tissue box", "toilet paper", "watering can", "wine bottle", "arm chair"),
    *("bathtub basin", "coffee machine", "coffee table", "counter top", "dining table", "garbage can"),
    *("laundry hamper", "side table", "sink basin", "stove burner", "towel holder", "tv stand"),
)
_JOINED = re.compile(r"\b(?:" + "|".join(words.replace(" ", "[ -]") for words in _TWO_WORDS) + r")")
_KINDS = "|".join(sorted(THINGS | PLACES, key=len, reverse=True))
_NAMED = re.compile(rf"\b(?P<kind>{_KINDS})(?:e?s)?(?: (?P<number>\d+))?\b")
_SENTENCE = re.compile(r"(?<=[.;!?])\s+|\n")

_SEE = re.compile(r"\b(?:i see|i can see|there (?:is|are)|shows?|in view|in front of me)\b(?P<rest>.*)")
_HOLD = re.compile(r"\b(?:i hold|i am holding|i'm holding|i carry|i am carrying|i'm carrying)\b(?P<rest>.*)")
_CLAUSE_END = re.compile(
    r"\bso\b|\bbut\b|\bbecause\b|\bmy\b|\bi (?:must|need|have to|will|should|am|go|hold)\b|,? and i\b"
)
_NOT = re.compile(
    rf"\b(?:no|not|without|don't see an?y?|do not see an?y?|cannot see an?y?) (?P<kind>{_KINDS})(?:e?s)?\b"
)

_CUE = re.compile(r"sub-?\s?goal|\b(?:needs? to|have to|must|should|want to|i will|i'll|going to|next)\b")
_VERBS = (
    ("drop", r"put(?:ting)? down|drop(?:ping)?|set(?:ting)? down|free(?:ing)? my hand of"),
    ("find", r"find(?:ing)?|look(?:ing)? (?:around )?for|search(?:ing)?(?: for)?|locat(?:e|ing)"),
    ("take", r"tak(?:e|ing)|pick(?:ing)? up|grab(?:bing)?"),
    ("find take", r"get(?:ting)?|fetch(?:ing)?"),
    ("clean", r"clean(?:ing)?|wash(?:ing)?|rins(?:e|ing)"),
    ("heat", r"heat(?:ing)?|warm(?:ing)?(?: up)?"),
    ("cool", r"cool(?:ing)?|chill(?:ing)?"),
    ("use", r"us(?:e|ing)|turn(?:ing)? on|switch(?:ing)? on"),
    ("put", r"put(?:ting)?|plac(?:e|ing)|mov(?:e|ing)|bring(?:ing)?|stor(?:e|ing)"),
)
_VERB = re.compile(r"\b(?:" + "|".join(f"(?P<v{i}>{pattern})" for i, (_, pattern) in enumerate(_VERBS)) + r")\b")

_THING = r"(?:the )?(\w+ \d+)"
_COMMAND = re.compile(
    rf"(?<!not )(?<!n't )(?<!never )\b(?:(?P<one>go to|open|close|use|toggle|examine) {_THING}"
    rf"|(?P<from>take) {_THING} from {_THING}|(?P<to>move|put) {_THING} (?:to|in/on|into|onto|in|on) {_THING}"
    rf"|(?P<with>heat|cool|clean|slice) {_THING} with {_THING})\b"
)
_LATER = re.compile(r"^(?:if|then|after|afterwards|later|once|when)\b")
_SO = re.compile(r"\bso\b(?! (?:that|i can)\b)|\baction is\b")


def plain(thoughts: str) -> str:
    """Lower case, with every kind written as one word."""
    return _JOINED.sub(lambda match: re.sub(r"[ -]", "", match[0]), " ".join(thoughts.lower().split()))


def named_things(text: str) -> Iterator[tuple[str, str]]:
    """Kind and number (or "") of everything named in a text from `plain`."""
    for match in _NAMED.finditer(text):
        yield match["kind"], match["number"] or ""


def objects_right(thoughts: str, view: Mapping[str, Any]) -> bool:
    """Whether everything named by number is there, and claims about seeing and holding are true.

    - a numbered object must be in view or in the hand, a numbered receptacle in the room;
    - kinds without a number must be in view after "I see", "there is" …, and in the hand after "I hold" …;
    - "no mug" is wrong if a mug is in view.
    """
    text = plain(thoughts)
    seen = {thing for _, _, contents in view["here"] for thing in contents}
    held = {view["holding"]} - {""}
    kinds_seen, kinds_held = {kind_of(thing) for thing in seen}, {kind_of(thing) for thing in held}
    known = seen | held | set(view["room"])
    if any(number and f"{kind} {number}" not in known for kind, number in named_things(text)):
        return False
    for sentence in _SENTENCE.split(text):
        denied = {match["kind"] for match in _NOT.finditer(sentence)}
        if denied & kinds_seen:
            return False
        here = kinds_seen | kinds_held | denied | {kind_of(name) for name, _, _ in view["here"]}
        if not _claimed(_SEE, sentence) <= here or not _claimed(_HOLD, sentence) <= kinds_held | denied:
            return False
    return True


def _claimed(cue: re.Pattern[str], sentence: str) -> set[str]:
    """The kinds of objects named without a number in the clause after the cue."""
    match = cue.search(sentence)
    if match is None:
        return set()
    rest = match["rest"]
    end = _CLAUSE_END.search(rest)
    clause = rest[: end.start()] if end else rest
    return {kind for kind, number in named_things(clause) if not number and kind in THINGS}


def read_subgoal(thoughts: str) -> tuple[tuple[str, ...], str, set[str]] | None:
    """The last sub-goal named in the thought: possible verbs, the kind of object, and all kinds after the verb.

    It is found in a sentence with "sub-goal", "need to", "have to", "must", "should", "want to", "I will" or "next":
    the first verb after the cue, and the first kind of object after the verb.
    """
    found = None
    for sentence in _SENTENCE.split(plain(thoughts)):
        cue = _CUE.search(sentence)
        verb = _VERB.search(sentence, cue.end()) if cue else None
        if verb is None:
            continue
        rest = sentence[verb.end() :]
        named = [kind for kind, _ in named_things(rest)]
        things = [kind for kind in named if kind in THINGS]
        if things:
            index = next(i for i in range(len(_VERBS)) if verb[f"v{i}"])
            found = tuple(_VERBS[index][0].split()), things[0], set(named)
    return found


def subgoal_right(thoughts: str, subgoal: tuple[str, ...] | list[str]) -> bool:
    """Whether the thought names this sub-goal (verb, kind of object, kind of receptacle)."""
    read = read_subgoal(thoughts)
    if read is None or not subgoal:
        return False
    verbs, thing, named = read
    verb, wanted, receptacle = subgoal
    return verb in verbs and thing == wanted and (verb != "put" or receptacle in named)


def read_command(thoughts: str) -> str | None:
    """The command the thought concludes with, admissible or not, in ALFWorld 0.4's wording.

    It is taken from the last sentence that names a complete command outside of a reason ("because …") and doesn't
    start with a word such as *if*, *then* or *later*: the first command after the last "so" or "action is" that
    precedes one, else the first. "So that I can …" states a purpose, not a conclusion.
    """
    for sentence in reversed(_SENTENCE.split(plain(thoughts))):
        sentence = without_reasons(sentence, _COMMAND)
        found = [] if _LATER.match(sentence) else list(_COMMAND.finditer(sentence))
        if found:
            cue = max((so.end() for so in _SO.finditer(sentence) if so.end() < found[-1].start()), default=0)
            return _spelt(next(match for match in found if match.start() > cue or not cue))
    return None


def _spelt(command: re.Match[str]) -> str:
    things = [name for name in command.groups() if name and name[-1].isdecimal()]
    if command["one"]:
        return f"{command['one']} {things[0]}"
    if command["from"]:
        return f"take {things[0]} from {things[1]}"
    return f"move {things[0]} to {things[1]}" if command["to"] else f"{command['with']} {things[0]} with {things[1]}"
