"""Collecting on several processes: what each of them hears of the others."""

import logging
from types import SimpleNamespace

import pytest
from function_engine import FunctionEngine
from rollout_cases import rollout

from trl_gtr.engines.base import EngineLost
from trl_gtr.rollouts.all_ranks import check_on_all_ranks, collect_on_all_ranks


def processes(*others):
    """This one and others that report what is given."""
    return SimpleNamespace(barrier=lambda occasion: 0.25, gather=lambda own: [own, *others])


def test_all_processes_learn_of_signals_and_faults():
    played = rollout([[1.0, 2.0]])
    fault = FloatingPointError("the logits")
    collected = collect_on_all_ranks(lambda: played, processes((2, 3.0, 15, fault)), lambda: None)
    assert collected.rollout is played
    assert played.times["wait_for_processes"] == 0.25
    assert collected.steps == (2, 2)
    assert collected.received == (None, 15)
    assert collected.faults == (None, fault)


@pytest.mark.parametrize("fault", [FloatingPointError("the logits are not finite"), EngineLost("no server")])
def test_a_process_that_cannot_act_reports_it(fault):
    def broken():
        raise fault

    collected = collect_on_all_ranks(broken, processes(), lambda: None)
    assert len(collected.rollout) == 0
    assert collected.faults == (fault,)
    stopped = collect_on_all_ranks(broken, processes(), lambda: 15)
    assert stopped.received == (15,)
    # An engine that is lost while the run is being stopped is no news: nobody waits for it any more.
    assert stopped.faults == (None if isinstance(fault, EngineLost) else fault,)


def test_all_processes_learn_that_one_may_not_start():
    engine = FunctionEngine(lambda prompts, images: [])
    collector = SimpleNamespace(first_observation=("what is this?", None))
    told = []
    check_on_all_ranks(engine, collector, SimpleNamespace(raise_first=told.append))
    refused = ValueError("other tokens")
    engine.check = lambda prompt, image: (_ for _ in ()).throw(refused)
    check_on_all_ranks(engine, collector, SimpleNamespace(raise_first=told.append))
    assert told == [None, refused]


def test_late_processes_are_named_and_all_times_kept(caplog):
    collected = collect_on_all_ranks(lambda: rollout([[1.0], [1.0]]), processes((1, 9.0, None, None)), lambda: None)
    with caplog.at_level(logging.WARNING):
        collected.warn_of_late(planned=2)
    assert "Process 1 ran out of time (rollout_timeout): it collected 1 of 2 steps in 9.0 s." in caplog.text
    assert "Process 0" not in caplog.text
    assert collected.rollout.times["collect_rank_1"] == 9.0


def test_alone_there_is_one_time(caplog):
    collected = collect_on_all_ranks(lambda: rollout([[1.0]]), processes(), lambda: None)
    collected.warn_of_late(planned=1)
    assert not caplog.records
    assert "collect_rank_0" not in collected.rollout.times
