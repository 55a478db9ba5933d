"""`trl_gtr.runs.diagnostics` against values worked out by hand."""

import math
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from toy import BareColourTask

from trl_gtr.responses.format import ThoughtFormat
from trl_gtr.runs.diagnostics import (
    distinct_n,
    judged_rates,
    mean_words,
    rollout_diagnostics,
    said_elsewhere,
    self_bleu,
    thought_text,
    top_thought_share,
)
from trl_gtr.types import Response, Rollout, Transition

texts_of_few_words = st.lists(st.lists(st.sampled_from("abc"), max_size=8).map(" ".join), max_size=12)


def identical_share(thoughts: list[str], states: list[Any]) -> float:
    said = said_elsewhere(thoughts, states)
    return sum(said) / max(1, len(said))


class TestDistinct:
    def test_by_hand(self):
        texts = ["a b a b", "a b c"]
        assert distinct_n(texts, 1) == pytest.approx(3 / 7)
        assert distinct_n(texts, 2) == pytest.approx(3 / 5)  # ab, ba, bc of ab ba ab ab bc
        assert distinct_n(texts, 4) == 1
        assert distinct_n(["the sum is 24"] * 4, 2) == pytest.approx(3 / 12)

    def test_no_ngrams(self):
        assert distinct_n([], 2) == 0
        assert distinct_n(["", "one", "two"], 2) == 0

    def test_ngrams_stay_inside_a_text(self):
        assert distinct_n(["a", "b", "a", "b"], 2) == 0
        assert distinct_n(["a b", "b a"], 2) == 1

    def test_many_words_and_long_ngrams(self):
        """4096 words to the power of 8 are more n-grams than 64 bits can number; the first word must still count."""
        dictionary = " ".join(map(str, range(4096)))
        assert distinct_n([dictionary, "0 9 8 7 6 5 4 3", "1 9 8 7 6 5 4 3"], 8) == 1
        assert distinct_n([dictionary, "0 9 8 7 6 5 4 3", "0 9 8 7 6 5 4 3"], 8) == pytest.approx(4090 / 4091)

    def test_words_need_spaces(self):
        assert distinct_n(["10", "1 0"], 1) == 1

    def test_misuse_raises(self):
        with pytest.raises(ValueError, match="n=0"):
            distinct_n(["a"], 0)


def slow_self_bleu(texts):
    """BLEU-4 by its definition: every text against each of the others."""
    tokenized = [text.split() for text in texts if text.split()]
    scores = []
    for i, words in enumerate(tokenized):
        others = tokenized[:i] + tokenized[i + 1 :]
        if not others:
            return 0.0
        precisions = []
        for n in range(1, min(4, len(words)) + 1):
            count, *references = (
                Counter(tuple(ws[k : k + n]) for k in range(len(ws) - n + 1)) for ws in (words, *others)
            )
            matched = sum(min(c, max(reference[gram] for reference in references)) for gram, c in count.items())
            precisions.append((matched + (n > 1)) / (sum(count.values()) + (n > 1)))
        reference_length = min((abs(len(ws) - len(words)), len(ws)) for ws in others)[1]
        penalty = min(1.0, math.exp(1 - reference_length / len(words)))
        scores.append(penalty * math.prod(precisions) ** (1 / len(precisions)))
    return sum(scores) / len(scores) if scores else 0.0


class TestSelfBleu:
    def test_identical_texts(self):
        for text in ("a", "a b c", "the cards are five six and nine"):
            assert self_bleu([text] * 3) == pytest.approx(1)

    def test_unrelated_texts(self):
        assert self_bleu(["a b c d", "e f g h"]) == 0

    def test_two_texts_by_hand(self):
        # One of four words differs, at the end: p1 = 3/4, p2 = (2+1)/(3+1), p3 = (1+1)/(2+1), p4 = (0+1)/(1+1).
        expected = (3 / 4 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
        assert self_bleu(["a b c d", "a b c e"]) == pytest.approx(expected)

    def test_counts_are_clipped_by_the_other_text(self):
        # One a of "a a a" is in "a b c": p1 = 1/3, p2 = (0+1)/(2+1), p3 = (0+1)/(1+1). The other way round the same.
        assert self_bleu(["a a a", "a b c"]) == pytest.approx((1 / 3 * 1 / 3 * 1 / 2) ** (1 / 3))

    def test_best_reference_of_several(self):
        # "a a b" finds two a's only in "a a c", and the b only in "b d e".
        texts = ["a a b", "a a c", "b d e"]
        first = (3 / 3 * (1 + 1) / (2 + 1) * (0 + 1) / (1 + 1)) ** (1 / 3)
        second = (2 / 3 * (1 + 1) / (2 + 1) * (0 + 1) / (1 + 1)) ** (1 / 3)
        third = (1 / 3 * (0 + 1) / (2 + 1) * (0 + 1) / (1 + 1)) ** (1 / 3)
        assert self_bleu(texts) == pytest.approx((first + second + third) / 3)

    def test_brevity(self):
        # "a b" is half as long as its one reference: exp(1 − 4/2), precisions 1. "a b c d" is longer: no penalty,
        # p1 = 2/4, p2 = (1+1)/(3+1), p3 = (0+1)/(2+1), p4 = (0+1)/(1+1).
        short, long = math.exp(-1), (1 / 2 * 1 / 2 * 1 / 3 * 1 / 2) ** 0.25
        assert self_bleu(["a b", "a b c d"]) == pytest.approx((short + long) / 2)

    def test_brevity_looks_at_the_closest_length(self):
        # For two words, 1 and 3 are as close: the shorter one counts, no penalty; all precisions are 1. For one word 2
        # is closest: exp(1 − 2). The three words: p1 = 2/3, p2 = (1+1)/(2+1), p3 = (0+1)/(1+1).
        expected = (1 + math.exp(-1) + (2 / 3 * 2 / 3 * 1 / 2) ** (1 / 3)) / 3
        assert self_bleu(["a b", "a", "a b c"]) == pytest.approx(expected)

    def test_too_few_texts(self):
        assert self_bleu([]) == self_bleu(["a b"]) == self_bleu(["a b", "", " "]) == 0

    def test_sample_bounds_the_cost(self):
        rng = np.random.default_rng(0)
        texts = [" ".join(rng.choice(list("abcdefgh"), 12)) for _ in range(500)]
        assert self_bleu(texts, sample=20, seed=1) == self_bleu(texts, sample=20, seed=1)
        assert self_bleu(texts, sample=20, seed=1) != self_bleu(texts, sample=20, seed=2)
        # more references, more matches: which is why the size of the sample must stay
        assert self_bleu(texts, sample=200) > self_bleu(texts, sample=20)

    @settings(deadline=None)
    @given(texts_of_few_words)
    def test_definition_and_bounds(self, texts):
        assert self_bleu(texts) == pytest.approx(slow_self_bleu(texts), abs=1e-12)
        assert 0 <= self_bleu(texts) <= 1 + 1e-12


class TestIdentical:
    def test_by_hand(self):
        thoughts = ["hit", "hit", "stand", "stand", "think", "hit"]
        states = [1, 1, 2, 3, 4, 1]
        assert identical_share(thoughts, states) == pytest.approx(2 / 6)  # "stand" alone was said in two states
        assert identical_share(["hit"] * 3, [1, 1, 2]) == 1
        assert identical_share(["hit"] * 3, [1, 1, 1]) == 0
        assert identical_share(["a", "b", "c"], [1, 2, 3]) == 0
        assert identical_share([], []) == 0

    def test_word_for_word(self):
        assert identical_share(["the  sum\nis 24", "the sum is 24"], [1, 2]) == 1  # spaces are no words
        assert identical_share(["the sum is 24", "The sum is 24"], [1, 2]) == 0

    def test_lengths_must_agree(self):
        with pytest.raises(ValueError, match="zip"):
            identical_share(["a"], [1, 2])

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=15))
    def test_against_all_pairs(self, steps):
        said = [any(t == u and s != r for u, r in steps) for t, s in steps]
        expected = sum(said) / len(said) if said else 0
        assert identical_share([t for t, _ in steps], [s for _, s in steps]) == expected


class TestTopShareAndLength:
    def test_top_share(self):
        assert top_thought_share(["a", "b", "a ", "c"]) == 0.5
        assert top_thought_share(["a", "b"]) == 0.5
        assert top_thought_share([]) == 0

    def test_mean_words(self):
        assert mean_words(["a b c", "", "a  b"]) == pytest.approx(5 / 3)
        assert mean_words([]) == 0


class TestJudgedRates:
    def test_by_hand(self):
        judgements = [
            {"cards": True, "formula": True},
            {"cards": True, "formula": False},
            {"cards": False, "formula": True},
            {"cards": True, "formula": True},
        ]
        assert judged_rates(judgements) == {"cards": 0.75, "formula": 0.75, "true": 0.5}

    def test_no_truth_known(self):
        assert judged_rates([]) == {}
        assert judged_rates([{}, {}]) == {}


@settings(deadline=None)
@given(texts_of_few_words)
def test_all_shares_are_shares(texts):
    for value in (distinct_n(texts, 1), distinct_n(texts, 2), distinct_n(texts, 4), top_thought_share(texts)):
        assert 0 <= value <= 1


class SumTask(BareColourTask):
    """A thought is right if it names the number shown; its sum part never is."""

    reading_parts = ("number seen",)

    def judge(self, response, info):
        return {"number seen": str(info["number"]) in response.text, "sum": False}


def step(thought, number, image, prompt="p", fields=True):
    text = thought + '", "action": "+"'
    response = Response(text, {"thoughts": thought} if fields else {}, "+", thought_span=(0, len(thought)))
    return Transition(
        env_index=0,
        step=0,
        image=image,
        prompt=prompt,
        response=response,
        response_ids=np.arange(3),
        reward=0.0,
        terminated=False,
        truncated=False,
        bootstrap=False,
        legal=True,
        info={"number": number},
    )


def rollout_of(transitions):
    return Rollout(transitions, [None] * len(transitions), last_images=[], last_prompts=[])


def shade(value):
    return np.full((4, 4, 3), value, np.uint8)


class TestRollout:
    def test_all_measures_by_hand(self):
        metrics = rollout_diagnostics(
            rollout_of(
                [
                    step("I see 7 here", 7, shade(0)),
                    step("I see 7 here", 7, shade(0)),
                    step("I see 3 here", 3, shade(1)),
                    step("I see 3 here", 4, shade(2)),
                ]
            ),
            SumTask(),
        )
        assert metrics.pop("thoughts/self_bleu") == pytest.approx(1)  # each text has its twin
        assert metrics == {
            "thoughts/distinct_2": pytest.approx(5 / 12),
            "thoughts/distinct_4": 0.5,
            "thoughts/identical_across_states": 0.5,  # "3" was said of two images, "7" twice of the same
            "thoughts/top_share": 0.5,
            "thoughts/length_words": 4,
            "thoughts/true": 0,
            "thoughts/identical_untrue": 0.5,
            "thoughts/true_number_seen": 0.75,
            "thoughts/true_sum": 0,
            "thoughts/reading": 0.75,
        }

    def test_repeated_and_untrue(self):
        """The same words in two states, wrong in one of them; others that are wrong but said once."""

        class Task(BareColourTask):
            def judge(self, response, info):
                return {"number": str(info["number"]) in response.text}

        steps = [("3", 3), ("3", 4), ("7", 8), ("5", 5)]
        metrics = rollout_diagnostics(rollout_of([step(t, n, shade(i)) for i, (t, n) in enumerate(steps)]), Task())
        assert metrics["thoughts/identical_across_states"] == 0.5
        assert metrics["thoughts/true"] == 0.5
        assert metrics["thoughts/identical_untrue"] == 0.25

    def test_state_is_image_and_prompt(self):
        def share(*steps):
            return rollout_diagnostics(rollout_of(list(steps)), BareColourTask())["thoughts/identical_across_states"]

        assert share(step("a", 1, shade(0)), step("a", 2, shade(0))) == 0
        assert share(step("a", 1, shade(0)), step("a", 1, shade(1))) == 1
        assert share(step("a", 1, shade(0), prompt="p"), step("a", 1, shade(0), prompt="q")) == 1

    def test_steps_that_nobody_can_judge_are_left_out(self):
        class Task(SumTask):
            def judge(self, response, info):
                return {} if info["number"] is None else super().judge(response, info)

        judged = [step("I see 7", 7, shade(0)), step("I see 7", 8, shade(1))]
        metrics = rollout_diagnostics(rollout_of([*judged, step("I see 7", None, shade(2))]), Task())
        alone = rollout_diagnostics(rollout_of(judged), Task())
        of_truth = {name for name in metrics if "true" in name or "reading" in name}
        assert {"thoughts/true", "thoughts/identical_untrue", "thoughts/reading"} <= of_truth
        assert {name: metrics[name] for name in of_truth} == {name: alone[name] for name in of_truth}

    def test_without_truth(self):
        metrics = rollout_diagnostics(rollout_of([step("a b", 1, shade(0))]), BareColourTask())
        assert {name for name in metrics if "true" in name or "reading" in name} == set()
        assert metrics["thoughts/length_words"] == 2

    def test_empty_rollout(self):
        assert rollout_diagnostics(rollout_of([]), BareColourTask()) == {}

    def test_format_without_thoughts(self):
        """Where no thought is asked for, none has collapsed."""
        task = BareColourTask()
        steps = [step("", i, shade(i)) for i in range(3)]
        assert rollout_diagnostics(rollout_of(steps), task)["thoughts/identical_across_states"] == 1
        task.format = ThoughtFormat(())
        assert rollout_diagnostics(rollout_of(steps), task) == {}

    def test_thought_text(self):
        assert thought_text(step("free words", 1, shade(0)).response) == "free words"
        assert thought_text(step("the segment", 1, shade(0), fields=False).response) == "the segment"
        listed = Response("[1]", {"thoughts": [1]}, thought_span=(0, 3))
        assert thought_text(listed) == "[1]"

    def test_cost_is_bounded(self):
        """512 steps of 300×300 pixels and 40 words; the bar is loose, for busy machines."""
        rng = np.random.default_rng(0)
        vocabulary = [f"word{i}" for i in range(200)]
        steps = [
            step(" ".join(rng.choice(vocabulary, 40)), 1, rng.integers(0, 255, (300, 300, 3), dtype=np.uint8))
            for _ in range(256)
        ]
        # The other half said and saw the same, in memory of its own: each pair of images must be compared.
        rollout = rollout_of(steps + [step(s.response.fields["thoughts"], 1, s.image.copy()) for s in steps])
        durations = []
        for _ in range(3):
            start = time.perf_counter()
            metrics = rollout_diagnostics(rollout, BareColourTask())
            durations.append(time.perf_counter() - start)
        assert metrics["thoughts/identical_across_states"] == 0
        assert min(durations) < 0.5
