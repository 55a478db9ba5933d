"""Merges of a few small models against a reference that holds everything in memory."""

import pytest
import torch
from torch import nn

from trl_gtr.guides.merging import FullWeight, LoraWeight, MergeRule, RunningSums, Snapshots, trimmed

SCALE = 2.0


def reference_ties(start, policies, weights, density):
    """TIES (arXiv 2306.01708) on one tensor, with all policies in memory."""
    differences = []
    for policy in policies:
        difference = (policy - start).flatten()
        order = difference.abs().argsort(descending=True, stable=True)  # of equal ones, the first
        kept = torch.zeros_like(difference)
        largest = order[: round(density * len(order))]
        kept[largest] = difference[largest]
        differences.append(kept)
    stacked, weights = torch.stack(differences), torch.tensor(weights)[:, None]
    sign = torch.sign((weights * stacked).sum(0))
    agree = (torch.sign(stacked) == sign) & (sign != 0)
    total = (weights * stacked * agree).sum(0)
    mean = total / (weights * agree).sum(0).clamp(min=1e-30)
    return start + mean.view_as(start)


def reference_weights(weighting, policies, alpha=0.5):
    """Of the start and of every policy after it."""
    if weighting == "sma":
        return [1 / (policies + 1)] * (policies + 1)
    return [(1 - alpha) ** policies] + [alpha * (1 - alpha) ** (policies - i) for i in range(1, policies + 1)]


def full_past(rule, folder, seed=0):
    """A past of the start and three policies, all as plain tensors; the last is in the model."""
    generator = torch.Generator().manual_seed(seed)
    policies = [torch.randn(6, 7, generator=generator) for _ in range(4)]
    trained = nn.Parameter(torch.zeros(6, 7))
    past = RunningSums(rule, [FullWeight("layer.weight", nn.Parameter(torch.zeros(6, 7)), trained)], folder)
    for policy in policies:
        trained.data.copy_(policy)
        past.add()
    return past, policies


def lora_past(rule, folder, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = nn.Parameter(torch.randn(6, 7, generator=generator))
    down, up = nn.Parameter(torch.zeros(2, 7)), nn.Parameter(torch.zeros(6, 2))
    merged = nn.Parameter(torch.zeros(6, 7))
    past = Snapshots(rule, [LoraWeight("layer", merged, base, down, up, SCALE, transposed=False)], folder)
    policies = []
    for _ in range(4):
        down.data.copy_(torch.randn(2, 7, generator=generator))
        up.data.copy_(torch.randn(6, 2, generator=generator))
        policies.append(base.detach() + SCALE * up.detach() @ down.detach())
        past.add()
    return past, policies


@pytest.mark.parametrize("make_past", [full_past, lora_past])
@pytest.mark.parametrize("weighting", ["sma", "ema"])
@pytest.mark.parametrize("density", [0.3, 0.8, 1.0])
def test_ties_is_the_reference_exactly(tmp_path, make_past, weighting, density):
    past, policies = make_past(MergeRule("ties", weighting, density), tmp_path)
    distance = past.merge()
    expected = reference_ties(policies[0], policies, reference_weights(weighting, 3), density)
    merged = past.weights[0].merged
    torch.testing.assert_close(merged.detach(), expected, rtol=1e-6, atol=1e-6)
    assert distance.to_teacher == pytest.approx(float((policies[-1] - expected).norm()), rel=1e-5)
    assert distance.travelled == pytest.approx(float((policies[-1] - policies[0]).norm()), rel=1e-5)


@pytest.mark.parametrize("make_past", [full_past, lora_past])
@pytest.mark.parametrize("weighting", ["sma", "ema"])
def test_linear_is_the_weighted_mean_of_all_policies(tmp_path, make_past, weighting):
    past, policies = make_past(MergeRule("linear", weighting), tmp_path)
    past.merge()
    weights = torch.tensor(reference_weights(weighting, 3))[:, None, None]
    expected = (weights * torch.stack(policies)).sum(0)
    torch.testing.assert_close(past.weights[0].merged.detach(), expected, rtol=1e-6, atol=1e-6)


def test_ema_moves_the_teacher_towards_each_new_policy(tmp_path):
    trained = nn.Parameter(torch.zeros(1))
    weight = FullWeight("w", nn.Parameter(torch.zeros(1)), trained)
    past, teacher = RunningSums(MergeRule("linear", "ema", ema_alpha=0.25), [weight], tmp_path), 0.0
    past.add()
    for value in (4.0, -8.0, 1.0):
        trained.data.fill_(value)
        past.add()
        past.merge()
        teacher = 0.25 * value + 0.75 * teacher
        assert weight.merged.item() == pytest.approx(teacher)


def test_policies_that_agree_merge_into_themselves(tmp_path):
    """Weights of 1/n must not shrink the teacher to start + τ/n."""
    trained = nn.Parameter(torch.zeros(5))
    weight = FullWeight("w", nn.Parameter(torch.zeros(5)), trained)
    past = RunningSums(MergeRule("ties", "sma", ties_density=1.0), [weight], tmp_path)
    past.add()
    trained.data.copy_(torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0]))
    for _ in range(5):
        past.add()
    past.merge()
    assert torch.equal(weight.merged, trained)


def test_a_mean_of_products_is_not_a_product_of_means(tmp_path):
    past, policies = lora_past(MergeRule("linear", "sma"), tmp_path)
    past.merge()
    weight = past.weights[0]
    from safetensors.torch import load_file

    snapshots = [load_file(file) for file in past.files().values()]
    down = torch.stack([each["layer.lora_A"] for each in snapshots]).mean(0)
    up = torch.stack([each["layer.lora_B"] for each in snapshots]).mean(0)
    apart = weight.base.detach() + SCALE * up @ down
    assert (weight.merged - torch.stack(policies).mean(0)).abs().max() < 1e-5
    assert (weight.merged - apart).abs().max() > 0.1


def test_every_merge_is_a_new_one(tmp_path):
    past, _ = full_past(MergeRule(), tmp_path)
    past.merge()
    first = past.weights[0].merged.detach().clone()
    past.weights[0].trained.data.add_(1.0)
    past.add()
    past.merge()
    assert not torch.equal(past.weights[0].merged, first)


def test_trimming_keeps_the_largest_entries():
    tensor = torch.tensor([[1.0, -5.0, 0.5], [-0.1, 3.0, 2.0]])
    assert torch.equal(trimmed(tensor, 0.5), torch.tensor([[0.0, -5.0, 0.0], [0.0, 3.0, 2.0]]))
    assert torch.equal(trimmed(tensor, 0.01), torch.tensor([[0.0, -5.0, 0.0], [0.0, 0.0, 0.0]]))
    assert trimmed(tensor, 1.0) is tensor


def test_of_entries_that_are_equally_large_the_first_are_kept():
    assert torch.equal(trimmed(torch.ones(10), 0.2), torch.tensor([1.0, 1.0] + [0.0] * 8))
    tensor = torch.tensor([[0.0, -2.0, 1.0], [2.0, 3.0, 2.0]])
    assert torch.equal(trimmed(tensor, 0.5), torch.tensor([[0.0, -2.0, 0.0], [2.0, 3.0, 0.0]]))
    assert torch.equal(trimmed(torch.tensor([0.0, 0.0, 1.0, 0.0]), 0.5), torch.tensor([0.0, 0.0, 1.0, 0.0]))


@pytest.mark.parametrize("density", [0.2, 0.5, 0.8])
def test_ties_is_the_reference_where_many_entries_are_equally_large(tmp_path, density):
    """As in bfloat16, where differences have few values."""
    generator = torch.Generator().manual_seed(0)
    policies = [torch.randint(-2, 3, (6, 7), generator=generator).float() for _ in range(4)]
    trained = nn.Parameter(torch.zeros(6, 7))
    weight = FullWeight("layer.weight", nn.Parameter(torch.zeros(6, 7)), trained)
    past = RunningSums(MergeRule("ties", "ema", density), [weight], tmp_path)
    for policy in policies:
        trained.data.copy_(policy)
        past.add()
    past.merge()
    expected = reference_ties(policies[0], policies, reference_weights("ema", 3), density)
    torch.testing.assert_close(weight.merged.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make_past", [full_past, lora_past])
def test_a_past_goes_on_from_a_checkpoints_files(tmp_path, make_past):
    past, _ = make_past(MergeRule(), tmp_path / "run")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name, file in past.files().items():
        (checkpoint / name).hardlink_to(file)
    past.merge()
    merged = past.weights[0].merged.detach().clone()
    past.add()  # after the checkpoint
    past.restore({file.name: file for file in checkpoint.iterdir()})
    assert past.count == 4
    past.weights[0].merged.data.zero_()
    past.merge()
    assert torch.equal(past.weights[0].merged, merged)
    assert {file.name for file in checkpoint.iterdir()} == set(past.files())


def test_files_stay_few_or_small(tmp_path):
    full, _ = full_past(MergeRule(), tmp_path / "full")
    assert set(full.files()) == {"start_000000.safetensors", "sums_000003.safetensors"}
    assert full.bytes_needed(policies=100, checkpoints=1) == 6 * 7 * 4 * (1 + 4 * 3)
    lora, _ = lora_past(MergeRule(), tmp_path / "lora")
    assert len(lora.files()) == 4
    assert lora.bytes_needed(policies=100, checkpoints=1) == 100 * (2 * 7 + 6 * 2) * 4


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"merge": "dare"}, "`merge` must be one of ties, linear, got 'dare'"),
        ({"weighting": "ewma"}, "`weighting` must be one of sma, ema"),
        ({"ties_density": 0.0}, "`ties_density` must be above 0 and at most 1, got 0.0"),
        ({"ties_density": 1.5}, r"got 1\.5"),
        ({"ema_alpha": 0.0}, "`ema_alpha` must be above 0"),
    ],
)
def test_impossible_rules_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        MergeRule(**settings)
