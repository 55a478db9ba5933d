"""`trl_gtr.learning.cloning`: the loss on the label tokens alone, and its weight."""

import math

import pytest
import torch

from trl_gtr.learning.cloning import cloning_coefficient, cloning_loss


class TestLoss:
    def test_closed_form(self):
        """Uniform over 4 tokens costs log 4 a token; the mean is over label tokens, then over samples."""
        logprobs = torch.tensor([[-1.0, -2.0, -6.0, -50.0], [-4.0, -100.0, -100.0, -100.0]])
        mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
        assert cloning_loss(logprobs, mask).tolist() == [3.0, 4.0]
        uniform = torch.log_softmax(torch.zeros(2, 5, 4), dim=-1)[..., 0]
        loss = cloning_loss(uniform, torch.ones(2, 5, dtype=torch.bool))
        assert loss.tolist() == pytest.approx([math.log(4)] * 2)

    def test_agrees_with_cross_entropy(self):
        rng = torch.Generator().manual_seed(0)
        logits = torch.randn(3, 6, 11, generator=rng)
        targets = torch.randint(11, (3, 6), generator=rng)
        lengths = torch.tensor([6, 1, 4])
        mask = torch.arange(6) < lengths[:, None]
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, targets[..., None]).squeeze(2)
        for row, length in enumerate(lengths.tolist()):
            expected = torch.nn.functional.cross_entropy(logits[row, :length], targets[row, :length])
            torch.testing.assert_close(cloning_loss(logprobs, mask)[row], expected)

    def test_only_labels_get_a_gradient_and_it_raises_them(self):
        logprobs = torch.full((2, 4), -1.0, requires_grad=True)
        mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
        cloning_loss(logprobs, mask).mean().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == [[-0.25, -0.25, 0, 0], [-0.125] * 4]

    def test_padding_is_not_read(self):
        logprobs = torch.tensor([[-1.0, -math.inf, math.nan]], requires_grad=True)
        loss = cloning_loss(logprobs, torch.tensor([[True, False, False]]))
        assert loss.tolist() == [1.0]
        loss.sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == [[-1.0, 0.0, 0.0]]

    def test_filler_row_gives_nothing(self):
        logprobs = torch.full((1, 3), -2.0, requires_grad=True)
        loss = cloning_loss(logprobs, torch.zeros(1, 3, dtype=torch.bool))
        assert loss.tolist() == [0.0]
        loss.sum().backward()
        assert logprobs.grad is not None
        assert not logprobs.grad.any()

    def test_micro_batches_add_up(self):
        rng = torch.Generator().manual_seed(0)
        features = torch.randn(8, 6, 3, generator=rng, dtype=torch.float64)
        mask = torch.arange(6) < torch.randint(1, 7, (8, 1), generator=rng)

        def gradient(micro_batch):
            weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
            for rows in torch.arange(8).split(micro_batch):
                (cloning_loss(features[rows] @ weights, mask[rows]).sum() / 8).backward()
            return weights.grad

        torch.testing.assert_close(gradient(1), gradient(8))
        assert gradient(8).abs().max() > 1e-3

    def test_misuse_raises(self):
        logprobs, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
        for arguments in (
            (logprobs, mask[:, :1]),
            (logprobs[0], mask[0]),
            (logprobs, mask.float()),
            (logprobs, mask[0]),
        ):
            with pytest.raises(ValueError, match="label_mask"):
                cloning_loss(*arguments)


class TestCoefficient:
    def test_share_fades_with_the_corrections(self):
        assert cloning_coefficient("share", 2.0, corrected=128, steps=512) == 0.5
        assert cloning_coefficient("share", 2.0, corrected=0, steps=512) == 0.0
        assert cloning_coefficient("share", 2.0, corrected=0, steps=0) == 0.0

    def test_constant_does_not(self):
        for corrected in (0, 128, 512):
            assert cloning_coefficient("constant", 2.0, corrected=corrected, steps=512) == 2.0

    def test_misuse_raises(self):
        with pytest.raises(ValueError, match="cloning_weight"):
            cloning_coefficient("sometimes", 1.0, corrected=1, steps=2)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="corrected=3"):
            cloning_coefficient("share", 1.0, corrected=3, steps=2)
