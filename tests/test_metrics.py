"""Means: exact over pieces of different sizes."""

import torch

from trl_gtr.metrics import Means


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
