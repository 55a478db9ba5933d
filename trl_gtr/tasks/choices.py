"""Tell the action a sentence chooses from actions it only mentions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

SENTENCE = re.compile(r"[;!?\n]|\.(?=\s|$)")
_REASON = re.compile(
    r"\b(?:because|since|as (?:I|we|it|the|my|this|that|hitting|standing|going|\d+))\b", re.IGNORECASE
)
_CONCLUSION = re.compile(r"\b(?:so(?! that)|therefore|hence|thus|but)\b", re.IGNORECASE)
_COMMA_OR_CONCLUSION = re.compile(rf",|{_CONCLUSION.pattern}", re.IGNORECASE)
_REACH = 40  # characters of context before a mention

# Matched against the text right before a mention; alternatives for a verbose pattern.
NOT_CHOSEN = r"""(?:\b(?:not|never|without)\b|n['’]t\b)(?:\s+(?!so\b|I\b)\w+){0,2}\s*["'`“‘(]?$
    |\b(?:no|avoid(?:ing)?|against)\s*$
    |\b(?:than|instead\ of)(?:\ (?:to|go|going))?\s*$
    |\b(?:if|when|whether|unless|should|were)\ (?:I|we|you)\ (?:to\ )?(?:go\ |move\ |choose\ )?$"""
CHOSEN = r"""\b(?:so(?!\ that)|therefore|hence|thus|action\ is)\b.*$
    |\b(?:best|better|safer|safest|wise|wiser|right)\ to\ (?:go\ |move\ )?$
    |\b(?:I|we)(?:['’]ll)?\ (?:(?:will|shall|must|should|have|need|choose|decide|want|prefer|would\ rather|am\ going|to
        |go|move|use|play|take|just|simply|then)\ )*$"""


def mentions(text: str, names: re.Pattern[str]) -> Iterator[tuple[re.Match[str], str]]:
    """Yield every mention of an action outside of reasons, with the text before it."""
    for sentence in SENTENCE.split(text):
        for match in names.finditer(without_reasons(sentence, names)):
            yield match, match.string[max(0, match.start() - _REACH) : match.start()]


def without_reasons(sentence: str, names: re.Pattern[str]) -> str:
    """Drop reasons, i.e. what follows "because", "since" or "as": "I stand because …", "Because …, I stand".

    After an action, a reason runs to the end of the sentence or to a "so" or "but"; before one, to the next comma at
    most.
    """
    kept, at, named = [], 0, False
    while reason := _REASON.search(sentence, at):
        named = named or names.search(sentence, at, reason.start()) is not None
        end = (_CONCLUSION if named else _COMMA_OR_CONCLUSION).search(sentence, reason.end())
        if end is None and not named:
            break
        kept.append(sentence[at : reason.start()])
        at = end.start() if end else len(sentence)
    return "".join((*kept, sentence[at:]))


def settle(choices: Iterable[tuple[str, bool]]) -> str | None:
    """The last action marked as chosen; if none is marked, the only action named; else `None`."""
    choices = list(choices)
    if cued := [name for name, cue in choices if cue]:
        return cued[-1]
    named = {name for name, _ in choices}
    return named.pop() if len(named) == 1 else None
