"""AsynchronousCollector: the rollouts of lock-step, whatever the order in which responses arrive."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counter_env import CutCounterTask, MeetingTask
from function_engine import FunctionEngine
from test_overlapped_collector import Echo, contents, count_or_mumble, say_red
from toy import ColourTask, quiet_config

from trl_gtr import Engine, ExpertCorrector, GTRTrainer, RolloutCollector
from trl_gtr.rollouts.all_ranks import make_collector
from trl_gtr.rollouts.asynchronous_collector import MAX_LEAD, AsynchronousCollector
from trl_gtr.rollouts.vector_envs import Vectorization
from trl_gtr.storage.plain_data import fingerprint
from trl_gtr.types import Generation


class Continuous(FunctionEngine):
    """Answers each request alone, after those that a shuffled queue puts first."""

    def __init__(self, function: Callable[..., list[Generation]], order: int = 0) -> None:
        super().__init__(function)
        self.order = random.Random(order)
        self.seeds: list[int] = []
        self._condition = threading.Condition()
        self._waiting: list[object] = []

    def respond(self, prompt: str, image: np.ndarray, seed: int) -> Generation:
        me = object()
        with self._condition:
            self.seeds.append(seed)
            self._waiting.insert(self.order.randrange(len(self._waiting) + 1), me)
            self._condition.notify_all()
            # One after another; those in front may have come later. A lone request need not wait for company.
            self._condition.wait_for(lambda: self._waiting[0] is me, timeout=10)
            self._waiting.remove(me)
            self._condition.notify_all()
        [generation] = self.function([prompt], [image])
        return generation


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_rollouts_are_those_of_lock_step(order: int) -> None:
    """Wins, cuts, losses, bootstrapping and random actions included; corrections stay with their steps."""
    settings: dict[str, Any] = {"num_envs": 5, "seed": 3}
    expected = RolloutCollector(CutCounterTask(), Echo(), **settings)
    found = AsynchronousCollector(CutCounterTask(), Echo(), **settings)
    for _ in range(3):
        engine = Continuous(count_or_mumble, order)
        assert contents(found.collect(engine, 7)) == contents(expected.collect(FunctionEngine(count_or_mumble), 7))
    assert fingerprint(found.state_dict()) == fingerprint(expected.state_dict())


def test_each_collector_goes_on_from_the_others_checkpoint() -> None:
    first = AsynchronousCollector(CutCounterTask(), num_envs=4, seed=0)
    engine = Continuous(count_or_mumble)
    first.collect(engine, 5)
    second = RolloutCollector(CutCounterTask(), num_envs=4, seed=0)
    second.load_state_dict(first.state_dict())
    after = second.collect(FunctionEngine(count_or_mumble), 4)
    assert contents(first.collect(engine, 4)) == contents(after)


def test_workers_start_at_the_same_time_and_play_as_in_this_process(tmp_path: Path) -> None:
    workers = AsynchronousCollector(
        MeetingTask(tmp_path, 3), num_envs=3, seed=0, vectorization=Vectorization("workers")
    )
    try:
        here = AsynchronousCollector(CutCounterTask("sync"), num_envs=3, seed=0)
        found, expected = (each.collect(Continuous(count_or_mumble), 5) for each in (workers, here))
        assert contents(found) == contents(expected)
        assert fingerprint(workers.state_dict()["random"]) == fingerprint(here.state_dict()["random"])
    finally:
        workers.close()


def test_seeds_depend_on_environment_and_step_alone() -> None:
    def seeds(order: int) -> list[int]:
        torch.manual_seed(0)
        engine = Continuous(say_red, order)
        AsynchronousCollector(ColourTask(length=3), num_envs=3, seed=0).collect(engine, 4)
        return sorted(engine.seeds)

    assert seeds(0) == seeds(5)
    assert len(set(seeds(0))) == 12
    assert all(0 <= seed < 2**62 for seed in seeds(0))


def test_nobody_waits_for_a_slow_response() -> None:
    """One environment is answered only when all others have played their whole rollout."""
    others_done = threading.Semaphore(0)

    class SlowForOne(Continuous):
        def respond(self, prompt: str, image: np.ndarray, seed: int) -> Generation:
            if threading.current_thread() is not first.get("thread", threading.current_thread()):
                others_done.release()
            elif not first:
                first["thread"] = threading.current_thread()
                assert all(others_done.acquire(timeout=20) for _ in range(3 * MAX_LEAD))
            return say_red([prompt], [image])[0]

    first: dict[str, threading.Thread] = {}
    rollout = AsynchronousCollector(ColourTask(length=3), num_envs=4, seed=0).collect(SlowForOne(say_red), MAX_LEAD)
    assert [(t.step, t.env_index) for t in rollout.transitions] == [(s, e) for s in range(MAX_LEAD) for e in range(4)]


def test_nobody_gets_far_ahead() -> None:
    """While one environment waits for its first response, the others play `MAX_LEAD` steps and no more."""
    asked, begun = threading.Semaphore(0), threading.Event()

    class OneWaits(Continuous):
        def respond(self, prompt: str, image: np.ndarray, seed: int) -> Generation:
            if not begun.is_set():
                begun.set()
                assert all(asked.acquire(timeout=20) for _ in range(2 * MAX_LEAD))
                assert not asked.acquire(timeout=0.3)
            asked.release()
            return say_red([prompt], [image])[0]

    collector = AsynchronousCollector(ColourTask(length=3), num_envs=3, seed=0)
    assert len(collector.collect(OneWaits(say_red), 3 * MAX_LEAD)) == 9 * MAX_LEAD


def test_out_of_time_all_play_as_many_steps_as_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = AsynchronousCollector(ColourTask(length=3), num_envs=3, seed=0)
    assert len(collector.collect(Continuous(say_red), 5, timeout=0.0)) == 3
    ticks = iter(range(10**6))
    monkeypatch.setattr("trl_gtr.rollouts.collector.time.monotonic", lambda: float(next(ticks)))
    rollout = collector.collect(Continuous(say_red), 100, timeout=20.0)
    assert 3 <= len(rollout) < 300
    steps = len(rollout) // 3
    assert [(t.step, t.env_index) for t in rollout.transitions] == [(s, e) for s in range(steps) for e in range(3)]


def test_an_error_in_one_environment_ends_all_and_surfaces() -> None:
    class Failing(Continuous):
        def respond(self, prompt: str, image: np.ndarray, seed: int) -> Generation:
            if image is first:
                raise FloatingPointError("generation produced NaN logits")
            return super().respond(prompt, image, seed)

    collector = AsynchronousCollector(ColourTask(length=3), num_envs=3, seed=0)
    first = collector.images[0]
    with pytest.raises(FloatingPointError, match="NaN logits"):
        collector.collect(Failing(say_red), 50)
    for thread in [each for each in threading.enumerate() if each.name == "environments"]:
        thread.join(timeout=5)  # they would wait for the first environment to catch up
        assert not thread.is_alive()


def test_engines_and_settings_that_do_not_fit_are_refused(tmp_path: Any) -> None:
    collector = AsynchronousCollector(ColourTask(length=3), num_envs=2, seed=0)

    class InBatches(Engine):
        def generate(self, prompts: Any, images: Any, greedy: bool = False) -> list[Generation]:
            return say_red(prompts, images)

    with pytest.raises(ValueError, match="InBatches generates in batches"):
        collector.collect(InBatches(), 2)
    with pytest.raises(NotImplementedError, match="generates in batches"):
        InBatches().respond("", np.zeros((1, 1, 3), np.uint8), 0)

    def trainer(**settings: Any) -> GTRTrainer:
        return GTRTrainer("no/model", quiet_config(tmp_path, **settings), ColourTask(), ExpertCorrector())

    with pytest.raises(ValueError, match="`asynchronous` needs engine='vllm'"):
        trainer(asynchronous=True)
    with pytest.raises(ValueError, match="leave one of them out"):
        trainer(asynchronous=True, overlap=True)
    groups: dict[str, Any] = {"advantage_estimator": "rloo", "group_size": 2, "format_reward": 0.0}
    args = quiet_config(tmp_path, asynchronous=True, engine="vllm", **groups)
    with pytest.raises(ValueError, match="`asynchronous` doesn't work with groups"):
        make_collector(ColourTask(), None, args, teaches=lambda group: True)
    assert isinstance(
        make_collector(ColourTask(), None, quiet_config(tmp_path, asynchronous=True)), AsynchronousCollector
    )
