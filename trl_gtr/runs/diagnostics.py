"""Thought-collapse metrics, in pure Python and numpy.

A collapsed agent says the same thing whatever it sees. Each metric captures one aspect of that: how varied the words
are (`distinct_n`, `self_bleu`), whether they depend on the state (`said_elsewhere`), whether one sentence has
taken over (`top_thought_share`), and whether they are true (`judged_rates`).

Diversity metrics depend on the amount of text: compare rollouts of equal size.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..tasks.base import Task
from ..types import Response, Rollout, Transition

BLEU_ORDER = 4


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct word n-grams over all word n-grams (Li et al., 2016); in [0, 1], higher is more varied.

    0 if no text has n words.
    """
    if n < 1:
        raise ValueError(f"n-grams need at least one word, got n={n}.")
    grams, _ = _ngrams(_Words(texts), n)
    return len(np.unique(grams)) / len(grams) if len(grams) else 0.0


def self_bleu(texts: Sequence[str], sample: int = 64, seed: int = 0) -> float:
    """Mean BLEU-4 of each text against all the others (Zhu et al., 2018); in [0, 1], *lower* is more varied.

    Precisions for n ≥ 2 use add-one smoothing (Lin and Och, 2004); orders longer than the text are skipped. Texts
    without words are skipped, and fewer than two texts give 0.

    Args:
        texts: The thoughts.
        sample: Compare at most this many texts, drawn at random. The score grows with it, so keep it fixed.
        seed: Seed for the draw.
    """
    worded = [text for text in texts if text.strip()]
    if len(worded) > sample:
        chosen = np.random.default_rng(seed).choice(len(worded), size=sample, replace=False)
        worded = [worded[i] for i in chosen]
    if len(worded) < 2:
        return 0.0
    words = _Words(worded)
    log_precision, orders = np.zeros(len(worded)), np.zeros(len(worded))
    for n in range(1, BLEU_ORDER + 1):
        matched, total = _matches_elsewhere(words, n)
        smoothing = 0 if n == 1 else 1
        long_enough = total > 0
        with np.errstate(divide="ignore"):  # no common word: log 0 = −inf, so the score is 0
            log_precision[long_enough] += np.log((matched + smoothing) / (total + smoothing))[long_enough]
        orders += long_enough
    return float(np.mean(_brevity_penalties(words.lengths) * np.exp(log_precision / orders)))


def said_elsewhere(thoughts: Sequence[str], states: Sequence[Any]) -> list[bool]:
    """Whether each thought was also said, word for word, in a *different* state.

    Even a perfect agent repeats itself when two states call for the same thought (the same ranks in other suits):
    compare with the start of the run, or look at the share that is repeated *and* untrue.

    Args:
        thoughts: One per step.
        states: One per step, compared with `==`.
    """
    steps_of: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for step, (thought, _) in enumerate(zip(thoughts, states, strict=True)):
        steps_of[tuple(thought.split())].append(step)
    elsewhere = [False] * len(thoughts)
    for first, *others in steps_of.values():
        # If any two states in a group differ, every member differs from at least one of them.
        if any(states[step] != states[first] for step in others):
            for step in (first, *others):
                elsewhere[step] = True
    return elsewhere


def top_thought_share(thoughts: Sequence[str]) -> float:
    """Share of the most frequent thought; in [0, 1]."""
    if not thoughts:
        return 0.0
    counts = Counter(tuple(thought.split()) for thought in thoughts)
    return counts.most_common(1)[0][1] / len(thoughts)


def mean_words(texts: Sequence[str]) -> float:
    """Mean number of words."""
    return sum(len(text.split()) for text in texts) / len(texts) if texts else 0.0


def judged_rates(judgements: Sequence[Mapping[str, bool]]) -> dict[str, float]:
    """Rates over `task.judge`'s answers: one for each part, and `"true"` if all parts are right.

    Answers without parts are skipped; if none are left, the result is empty.
    """
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for judgement in judgements:
        if judgement:
            verdicts["true"].append(all(judgement.values()))
            for part, right in judgement.items():
                verdicts[part].append(right)
    return {part: _share(rights) for part, rights in verdicts.items()}


def thought_text(response: Response) -> str:
    """The free text of a thought: its `thoughts` part, or the whole segment if there is none."""
    text = response.fields.get("thoughts")
    return text if isinstance(text, str) else response.thought


def rollout_diagnostics(rollout: Rollout, task: Task) -> dict[str, float]:
    """All metrics of one rollout, by name.

    `thoughts/distinct_2`, `thoughts/distinct_4`, `thoughts/self_bleu`, `thoughts/identical_across_states`,
    `thoughts/top_share`, `thoughts/length_words`; if `task.judge` knows the truth, `thoughts/true`,
    `thoughts/true_<part>` and `thoughts/identical_untrue`, the share that is wrong in its state and repeated in
    others; and if the task names its `reading_parts`, `thoughts/reading`, the share with all of them right.
    Empty if there is nothing to measure: no steps, or a response format without a thought.
    """
    if not rollout.transitions or not task.format.fields:
        return {}
    thoughts = [thought_text(step.response) for step in rollout.transitions]
    elsewhere = said_elsewhere(thoughts, [_State(step) for step in rollout.transitions])
    metrics = {
        "thoughts/distinct_2": distinct_n(thoughts, 2),
        "thoughts/distinct_4": distinct_n(thoughts, 4),
        "thoughts/self_bleu": self_bleu(thoughts),
        "thoughts/identical_across_states": _share(elsewhere),
        "thoughts/top_share": top_thought_share(thoughts),
        "thoughts/length_words": mean_words(thoughts),
    }
    judgements = [task.judge(step.response, step.info) for step in rollout.transitions]
    return metrics | _truth(task, judgements, elsewhere)


def _truth(task: Task, judgements: Sequence[Mapping[str, bool]], elsewhere: Sequence[bool]) -> dict[str, float]:
    """Share of true thoughts among those the task can judge; empty if it can judge none."""
    judged = [pair for pair in zip(judgements, elsewhere, strict=True) if pair[0]]
    if not judged:
        return {}
    rates = judged_rates(judgements)
    metrics = {
        "thoughts/true": rates.pop("true"),
        **{f"thoughts/true_{part.replace(' ', '_')}": rate for part, rate in rates.items()},
        "thoughts/identical_untrue": _share([repeated and not all(parts.values()) for parts, repeated in judged]),
    }
    if task.reading_parts:
        metrics["thoughts/reading"] = _share([all(parts[part] for part in task.reading_parts) for parts, _ in judged])
    return metrics


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


class _State:
    """What the agent saw in this step: image and prompt, without the turns before.

    Compared on demand rather than hashed: the prompt usually decides, and hashing 512 images takes longer than all
    the metrics together.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, step: Transition):
        self.prompt, self.image = step.prompt, step.image

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _State):
            return NotImplemented
        return self.prompt == other.prompt and np.array_equal(self.image, other.image)


class _Words:
    """Texts as one flat array of word ids."""

    def __init__(self, texts: Sequence[str]):
        tokenized = [text.split() for text in texts]
        vocabulary: dict[str, int] = {}
        self.ids = np.array([vocabulary.setdefault(word, len(vocabulary)) for text in tokenized for word in text], int)
        self.lengths = np.array([len(text) for text in tokenized], int)
        self.text = np.repeat(np.arange(len(tokenized)), self.lengths)
        """Index of the text each word belongs to."""


def _ngrams(words: _Words, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Each n-gram as a number, and the index of its text."""
    grams, vocabulary_size = words.ids, int(words.ids.max(initial=0)) + 1
    for k in range(1, n):
        if int(grams.max(initial=0)) >= 2**62 // vocabulary_size:
            grams = np.unique(grams, return_inverse=True)[1]  # renumber before the product overflows
        grams = grams[:-1] * vocabulary_size + words.ids[k:]
    first = words.text[: len(grams)]
    inside = first == words.text[n - 1 :]  # n-grams don't cross text boundaries
    return grams[inside], first[inside]


def _matches_elsewhere(words: _Words, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Number of n-grams in each text that match another text, and in total; both of shape (texts,).

    BLEU's clipping: a text's count of an n-gram matches up to the highest count in any other text. Sorted by count,
    every text but the last matches fully (in the last), and the last matches the second-highest count.
    """
    grams, text = _ngrams(words, n)
    num_texts = len(words.lengths)
    total = np.bincount(text, minlength=num_texts)
    if not len(grams):
        return np.zeros(num_texts), total
    pairs, counts = np.unique(np.unique(grams, return_inverse=True)[1] * num_texts + text, return_counts=True)
    order = np.lexsort((counts, pairs // num_texts))
    gram, owner, count = (pairs // num_texts)[order], (pairs % num_texts)[order], counts[order]
    changes = gram[1:] != gram[:-1]
    first, last = np.append(True, changes), np.append(changes, True)
    second_highest = np.where(first, 0, np.roll(count, 1))
    matched = np.where(last, second_highest, count)
    return np.bincount(owner, weights=matched, minlength=num_texts), total


def _brevity_penalties(lengths: np.ndarray) -> np.ndarray:
    """BLEU's penalty for each text that is shorter than the closest other in length (the shorter one in a tie)."""
    penalties = np.ones(len(lengths))
    of_length = Counter(lengths.tolist())
    for i, length in enumerate(lengths.tolist()):
        others = [other for other, texts in of_length.items() if other != length or texts > 1]
        closest = min(others, key=lambda other: (abs(other - length), other))
        if length < closest:
            penalties[i] = math.exp(1 - closest / length)
    return penalties
