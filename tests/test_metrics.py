"""Means: exact over pieces of different sizes."""

import pickle

import torch

from trl_gtr.metrics import Means
from trl_gtr.rollout_metrics import add_up
from trl_gtr.types import Share


def test_pieces_weigh_by_their_size():
    means = Means()
    means.add("a", torch.tensor([1.0, 2.0, 3.0]))
    means.add("a", [10.0])
    means.add("b", 4)
    means.add("c", [True, False])
    assert means.reduce() == {"a": 4.0, "b": 4.0, "c": 0.5}


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
