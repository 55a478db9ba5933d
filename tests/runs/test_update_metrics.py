"""What is logged of one update: with and without values, on one process and on several."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rollout_cases import rollout
from toy import ColourTask

from trl_gtr.distributed.means import Means
from trl_gtr.guides.base import Guide
from trl_gtr.guides.buffer import CorrectionBuffer
from trl_gtr.learning.experience import Experience
from trl_gtr.policy.scores import Scores
from trl_gtr.runs.update_metrics import peak_memory, update_metrics, value_metrics

TASK = ColourTask()
ALONE = SimpleNamespace(world_size=1, rank=0, gather=lambda own: [own], sum=lambda own: own)


def experience(played, values=None, returns=None):
    count = len(played)
    zeros, mask = torch.zeros(count), torch.ones(count, 1, dtype=torch.bool)
    starts = torch.ones(count, dtype=torch.int64)
    return Experience(
        played.transitions,
        Scores(zeros, zeros, zeros, zeros[:, None], mask, starts, values),
        advantages=zeros,
        returns=returns,
        learned=np.ones((1, count), bool),
        env_steps=count,
        cloning_coef=0.0,
    )


def metrics_of(played, guide, means=None, **values):
    seconds = {"generate": 1.5, "update": 0.5, "collect_rank_0": 100.0}
    return update_metrics(
        played, experience(played, **values), means or Means(), seconds, task=TASK, guide=guide, processes=ALONE
    )


def played():
    response = TASK.format.parse('{"thoughts": "it is red", "action": "red"}')
    return rollout([[1.0], [-1.0], [1.0], [0.0]], response=response)


def test_speed_times_and_what_was_counted_on_the_way():
    means = Means()
    means.add("loss/total", 3.0)
    metrics = metrics_of(played(), Guide(), means)
    assert metrics["speed/steps_per_second"] == 4 / 2.0  # collect_rank_0 is part of the others
    assert metrics["time/update"] == 0.5
    assert metrics["loss/total"] == 3.0
    assert metrics["reward"] == 0.25
    assert metrics["memory/cpu_gb"] > 0


def test_without_values_nothing_is_said_of_them():
    metrics = metrics_of(played(), Guide())
    assert not [name for name in metrics if name.startswith("value/")]
    assert value_metrics(experience(played()), Means(), ALONE) == {}


def test_explained_variance_is_of_all_processes_together():
    means = Means()
    own = experience(played(), torch.tensor([1.0, 2.0, 3.0, 3.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert value_metrics(own, means, ALONE)["value/explained_variance"] == pytest.approx(1 - 0.1875 / 1.25)
    assert means.reduce() == {"value/mean": 2.25, "value/return": 2.5}
    other = (torch.tensor([5.0]), torch.tensor([5.0]))
    two = SimpleNamespace(gather=lambda own: [own, other])
    # residuals 0 0 0 1 0: variance 0.16; returns 1 to 5: variance 2
    assert value_metrics(own, Means(), two)["value/explained_variance"] == pytest.approx(1 - 0.16 / 2)


def test_equal_returns_explain_nothing():
    equal = experience(played(), torch.zeros(4), torch.ones(4))
    assert value_metrics(equal, Means(), ALONE) == {}


def test_the_guide_has_its_say():
    class Teacher(Guide):
        def __init__(self):
            self.buffer = CorrectionBuffer(4, seed=0)
            for ids in ([1, 2], [3, 4]):
                self.buffer.add("prompt", np.zeros((2, 2, 3), np.uint8), ids, 1)

        def metrics(self):
            return {"teacher/thoughts": 7.0}

    metrics = metrics_of(played(), Teacher())
    assert (metrics["buffer/size"], metrics["buffer/images"], metrics["teacher/thoughts"]) == (2, 1, 7.0)
    assert metrics_of(played(), Guide())["buffer/size"] == 0


def test_peak_memory_is_in_gigabytes():
    assert 0.01 < peak_memory()["memory/cpu_gb"] < 1000
