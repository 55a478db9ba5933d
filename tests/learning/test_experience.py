"""Scoring a rollout: batches, their order, and the values that close it; with numbers instead of a network."""

import numpy as np
import pytest
import torch
from rollout_cases import IMAGE, PROMPT, rollout, transition

from trl_gtr.learning.experience import add_shaping, bootstrap_values, in_batches, score_in_batches
from trl_gtr.policy.scores import Scores

LENGTHS = [3, 1, 2, 3, 1]


def score(chosen: list[int]) -> Scores:
    """Sample i has `LENGTHS[i]` tokens of log-prob -i each."""
    lengths = torch.tensor([LENGTHS[i] for i in chosen])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    numbers = torch.tensor(chosen, dtype=torch.float32)
    tokens = -numbers[:, None] * mask
    return Scores(tokens.sum(1), tokens.sum(1), 0 * numbers, tokens, mask, lengths, value=numbers)


def test_batches_of_a_size() -> None:
    assert in_batches(np.array([4, 2, 0, 1, 3]), 2) == [[4, 2], [0, 1], [3]]


def test_under_zero3_all_processes_have_equally_many_batches() -> None:
    batches = in_batches(np.array([4, 2, 0]), 2, gather=lambda own: [own, 4])
    assert batches == [[4, 2], [0], [4, 2], [4, 2]]
    assert in_batches(np.array([4, 2, 0]), 2, gather=lambda own: [own, 1]) == [[4, 2], [0]]


@pytest.mark.parametrize("passes", [None, lambda own: [own, 5]])
def test_scores_come_back_in_the_order_of_the_samples(passes) -> None:
    seen = []

    def watched(chosen: list[int]) -> Scores:
        seen.append([LENGTHS[i] for i in chosen])
        return score(chosen)

    scores = score_in_batches(watched, LENGTHS, lambda order: in_batches(order, 2, passes))
    assert seen[:3] == [[1, 1], [2, 3], [3]]  # of similar lengths
    assert len(seen) == (3 if passes is None else 5)
    assert len(scores) == 5
    assert scores.value is not None
    assert scores.value.tolist() == [0, 1, 2, 3, 4]
    assert scores.logprob.tolist() == [-i * length for i, length in enumerate(LENGTHS)]
    assert scores.mask.sum(1).tolist() == LENGTHS


def test_cut_episodes_are_closed_by_their_own_last_observation() -> None:
    played = rollout([[0.0, 0.0], [0.0, 0.0]])
    ends = {"truncated": True, "bootstrap": True}
    played.transitions[1] = transition(1, 0, **ends, final_prompt="cut")
    played.last_prompts = ["first", "second"]
    asked = []

    def value(prompts, images):
        asked.append((list(prompts), len(images)))
        return torch.tensor([7.0, 8.0, 9.0])

    values = bootstrap_values(played, torch.tensor([1.0, 2.0, 3.0, 4.0]), value)
    assert asked == [(["cut", "first", "second"], 3)]
    assert values.own.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert values.final.tolist() == [0.0, 7.0, 0.0, 0.0]
    assert values.last.tolist() == [8.0, 9.0]


def test_without_a_cut_only_the_last_observations_are_valued() -> None:
    played = rollout([[0.0], [0.0]])
    values = bootstrap_values(played, torch.zeros(2), lambda prompts, images: torch.full((len(prompts),), 5.0))
    assert played.last_prompts == [PROMPT]
    assert played.last_images[0] is IMAGE
    assert values.final.tolist() == [0.0, 0.0]
    assert values.last.tolist() == [5.0]


def test_shaping_may_lie_on_another_device_than_advantages() -> None:
    """Values lie with the network, returns of groups on the CPU; "meta" stands in for a GPU."""
    assert add_shaping(torch.zeros(2, device="meta"), torch.ones(2)).device.type == "meta"
    assert add_shaping(torch.zeros(2), torch.ones(2)).tolist() == [1.0, 1.0]
    assert add_shaping(torch.zeros(2), None).tolist() == [0.0, 0.0]
