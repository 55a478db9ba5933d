"""The ALFWorld model's vocabulary: kinds of objects and places, numbers, and the fixed parts of all sentences.

"take mug 2 from desk 1" is six tokens: the verb, a kind, a number, " from ", a kind, a number. What the model learns
about one mug thus applies to every mug.
"""

from __future__ import annotations

from itertools import product

from ..tasks import make_task
from ..tasks.alfworld import prompt as words
from ..tasks.alfworld.words import PLACES, THINGS
from .vocabulary import BLANK

NUMBERS = tuple(f" {number}" for number in range(1, 13))
VERBS = ("go to ", "take ", "move ", "put ", "open ", "close ", "clean ", "heat ", "cool ", "use ", "examine ")
COMMANDS = ("help", "inventory", "look", "none", " from ", " to ", " in/on ", " with ")
# How ALFWorld phrases its tasks: "put a hot mug in desk", "find two pens and put them in drawer".
TASKS = (
    *("put a clean ", "put a hot ", "put a cool ", "put a ", "put some ", "put two ", "find two ", "look at "),
    *("clean some ", "heat some ", "cool some ", "examine the ", " and put it in ", " and put them in "),
    *(" in ", " on ", " under the ", " with the "),
)
STATES = ("hot", "cool", "clean")


def pieces() -> list[str]:
    """All single-token parts, without duplicates, in a fixed order."""
    found = dict.fromkeys([*prompt_parts(), *sentence_parts(), *TASKS, *VERBS, *(f", {verb}" for verb in VERBS)])
    found |= dict.fromkeys([*COMMANDS, *NUMBERS, *sorted(THINGS | PLACES)])
    return [piece for piece in found if len(piece) > 1]


def prompt_parts() -> list[str]:
    """The text common to all prompts."""
    info = {"task": BLANK, "previous_actions": [BLANK], "admissible_commands": [BLANK]}
    return [
        part
        for thoughts in (True, False)
        for part in make_task("alfworld", thoughts=thoughts).prompt(None, info).split(BLANK)
    ]


def sentence_parts() -> list[str]:
    """The text between the names in the expert's responses. The action key starts a new part."""
    form = make_task("alfworld").format
    opening, closing = form.render_thought({"thoughts": BLANK}).split(BLANK)
    before, after = form.render({"thoughts": BLANK}, BLANK).split(BLANK)[1:]
    parts = [f"{opening}I am in the middle of the room. ", f"{opening}I am at ", " and see ", "nothing", ", ", " and "]
    parts += [f" and {number} more" for number in range(1, 10)]
    parts += [", which is closed. ", ". ", "My hand is empty. ", "I hold ", ", which is ", *STATES, f".{closing}"]
    for frame, subgoal in product(words.FRAMES, words.SUBGOALS.values()):
        sentence = frame.format(subgoal=subgoal.format(object=BLANK, receptacle=BLANK), action=BLANK)
        parts += sentence.split(BLANK)
    return [*parts, before.removeprefix(closing), after]
