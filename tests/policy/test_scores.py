"""`Scores`: batches of different lengths become one record, in any order, and nothing of a row is lost."""

import pytest
import torch

from trl_gtr.policy.scores import Scores


def scores(lengths: list[int], first: float = 0.0, values: bool = True) -> Scores:
    """Row i's tokens all have log-prob -(first + i + 1); its action begins at its second token."""
    rows = torch.arange(len(lengths)) + first + 1
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Scores(
        logprob=-rows,
        thought_logprob=-10 * rows,
        action_logprob=-100 * rows,
        token_logprobs=-rows[:, None] * mask,
        mask=mask,
        action_start=torch.ones(len(lengths), dtype=torch.int64),
        value=rows / 2 if values else None,
        entropy=rows / 4,
    )


def tokens(record: Scores) -> list[list[float]]:
    return [row[kept].tolist() for row, kept in zip(record.token_logprobs, record.mask, strict=True)]


def test_batches_of_different_lengths_are_padded() -> None:
    whole = Scores.concatenate([scores([1, 2]), scores([3], first=2)])
    assert len(whole) == 3
    assert whole.mask.shape == whole.token_logprobs.shape == (3, 3)
    assert whole.token_logprobs[0].tolist() == [-1, 0, 0]
    assert tokens(whole) == [[-1], [-2, -2], [-3, -3, -3]]
    assert whole.logprob.tolist() == [-1, -2, -3]
    assert whole.value is not None
    assert whole.value.tolist() == [0.5, 1.0, 1.5]


def test_rows_come_in_the_order_asked_for_without_spare_padding() -> None:
    whole = scores([1, 4, 2])
    chosen = whole.rows([2, 0])
    assert chosen.mask.shape == (2, 2)
    assert tokens(chosen) == [[-3, -3], [-1]]
    assert chosen.thought_logprob.tolist() == [-30, -10]
    assert chosen.action_logprob.tolist() == [-300, -100]
    assert chosen.entropy is not None
    assert chosen.entropy.tolist() == [0.75, 0.25]


@pytest.mark.parametrize("values", [True, False])
def test_values_may_be_absent(values: bool) -> None:
    whole = Scores.concatenate([scores([1], values=values), scores([2], values=values)])
    assert (whole.value is not None) is values
    assert (whole.rows([1]).value is not None) is values


def test_gradients_flow_through_rows() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    record = scores([1, 1])
    moved = Scores(weight, *(getattr(record, name) for name in list(Scores.__dataclass_fields__)[1:]))
    moved.rows([1]).logprob.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 1.0]
