"""Means: exact over pieces of different sizes."""

import math
import pickle

import torch

from trl_gtr.distributed.means import Means
from trl_gtr.runs.rollout_metrics import add_up
from trl_gtr.types import Share


def test_pieces_weigh_by_their_size():
    means = Means()
    means.add("a", torch.tensor([1.0, 2.0, 3.0]))
    means.add("a", [10.0])
    means.add("b", 4)
    means.add("c", [True, False])
    assert means.reduce() == {"a": 4.0, "b": 4.0, "c": 0.5}


class _OnDevice(torch.Tensor):
    """Says that it lies on a GPU until `.cpu()` is called."""

    def cpu(self):
        return self.as_subclass(torch.Tensor)

    def detach(self):
        return self

    def double(self):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")


def test_no_float64_is_made_on_a_gpu_and_nothing_is_lost():
    numbers = torch.full((3001,), 0.1) + torch.arange(3001) * 1e4
    means = Means()
    means.add("a", numbers.as_subclass(_OnDevice))
    assert means.reduce()["a"] == math.fsum(numbers.tolist()) / 3001


def test_nothing_counted_is_left_out():
    means = Means()
    means.add("a", [])
    assert means.reduce() == {}


def test_maxima():
    means = Means()
    means.maximum("m", -2.0)
    means.maximum("m", -5.0)
    assert means.reduce() == {"m": -2.0}


def test_metrics_of_several_correctors_are_added_up_shares_by_their_parts():
    one = {"calls": 3.0, "precision": Share(1, 2)}
    two = {"calls": 4.0, "precision": Share(9, 10), "repairs": 1.0}
    both = add_up(pickle.loads(pickle.dumps([one, two])))
    assert both == {"calls": 7.0, "precision": 10 / 12, "repairs": 1.0}
