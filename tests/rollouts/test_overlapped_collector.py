"""OverlappedCollector: the rollouts of lock-step, with environments and images in the background."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from counter_env import CutCounterTask
from example_scripts import example
from function_engine import FunctionEngine
from toy import ColourEnv, ColourTask, quiet_config

from trl_gtr import Engine, ExpertCorrector, GTRTrainer, RolloutCollector, TransformersEngine, load_policy
from trl_gtr.correctors import Corrector
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.rollouts.all_ranks import make_collector
from trl_gtr.rollouts.overlapped_collector import OverlappedCollector
from trl_gtr.storage.plain_data import fingerprint
from trl_gtr.types import Correction, CorrectionRequest, Generation, Rollout

RED = '{"thoughts": "it is red", "action": "red"}'


class Echo(Corrector):
    """Says in its reason what it was asked."""

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        return [Correction("right", reason=f"{request.prompt} {request.info}") for request in requests]


def count_or_mumble(prompts: list[str], images: list[np.ndarray]) -> list[Generation]:
    """Decided by each prompt alone; what is unreadable plays at random."""
    texts = ["…" if prompt.startswith("1") else '{"action": "go"}' for prompt in prompts]
    return [Generation(np.arange(len(text)), text) for text in texts]


def say_red(prompts: list[str], images: list[np.ndarray]) -> list[Generation]:
    return [Generation(np.arange(3), RED) for _ in prompts]


def contents(rollout: Rollout) -> list[Any]:
    """All that a rollout holds, to the last bit, but the times."""
    steps = [fingerprint(step) for step in rollout.transitions]
    episodes = [[fingerprint(step) for step in episode] for episode in rollout.episodes]
    last = fingerprint(rollout.last_images), rollout.last_prompts
    return [steps, rollout.corrections, episodes, last, rollout.stop_reason]


def in_background() -> int:
    return sum(thread.name == "environments" for thread in threading.enumerate())


@pytest.mark.parametrize("where", ["sync", "processes"])
def test_the_same_rollouts_as_in_lock_step(where: str) -> None:
    """Three environments, so that the halves differ; with truncations, resets, random actions and corrections."""
    task, engine = CutCounterTask(where), FunctionEngine(count_or_mumble)
    lock_step, overlapped = (
        kind(task, Echo(), num_envs=3, first_index=6, seed=1) for kind in (RolloutCollector, OverlappedCollector)
    )
    with closing(lock_step), closing(overlapped):
        for _ in range(3):
            expected, found = lock_step.collect(engine, 5), overlapped.collect(engine, 5)
            assert contents(found) == contents(expected)
            assert fingerprint(overlapped.state_dict()) == fingerprint(lock_step.state_dict())
        steps = expected.transitions
        assert {step.bootstrap for step in steps} == {step.terminated for step in steps} == {True, False}
        assert any(step.substitute for step in steps)
        assert [len(part.places) for part in overlapped.parts] == [2, 1]


class Greedy(Engine):
    """Never samples, and notes in which threads images are processed."""

    def __init__(self, checkpoint: str) -> None:
        model, processor = load_policy(checkpoint)
        policy = VLMPolicy(model, processor, temperature=1.0, max_completion_length=12)
        self.engine, self.threads = TransformersEngine(policy, model), []
        process = policy.encoder._process

        def watched(prompts: list[str], images: list[np.ndarray]) -> Any:
            self.threads.append((threading.current_thread().name, len(images)))
            return process(prompts, images)

        policy.encoder._process = watched  # type: ignore[method-assign]

    def prepare(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> None:
        self.engine.prepare(prompts, images)

    def generate(self, prompts: Sequence[str], images: Sequence[np.ndarray], greedy: bool = False) -> list[Generation]:
        return self.engine.generate(prompts, images, greedy=True)


def test_a_model_answers_the_same_and_its_images_are_processed_ahead(toy_checkpoint: str) -> None:
    rollouts, threads = [], []
    for kind in (RolloutCollector, OverlappedCollector):
        engine = Greedy(toy_checkpoint)
        collector = kind(ColourTask(length=2, terminates=False), Echo(), num_envs=4, seed=0)
        rollouts.append([contents(collector.collect(engine, 3)) for _ in range(2)])
        threads.append(engine.threads)
    assert rollouts[0] == rollouts[1]
    assert threads[0] == [("MainThread", 4)] * 6
    # only the first images of all have to be waited for; those of the last step are there already
    assert [thread for thread in threads[1] if thread[0] == "MainThread"] == [("MainThread", 2)] * 2
    assert sum(count for _, count in threads[1]) == 4 * 7


class Meeting(FunctionEngine):
    """Generates for a half once the other half's new observations have been prepared."""

    def __init__(self) -> None:
        super().__init__(say_red)
        self.calls, self.seen = 0, threading.Semaphore(0)

    def generate(self, prompts: Sequence[str], images: Sequence[np.ndarray], greedy: bool = False) -> list[Generation]:
        assert self.calls == 0 or self.seen.acquire(timeout=20)
        self.calls += 1
        return super().generate(prompts, images)

    def prepare(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.seen.release()


def test_one_half_steps_while_the_other_generates() -> None:
    """In lock-step the second `generate` would wait for ever."""
    engine = Meeting()
    assert len(OverlappedCollector(ColourTask(), num_envs=4, seed=0).collect(engine, 3)) == 12
    assert engine.calls == 6


class FragileTask(ColourTask):
    """The environment with this index fails in this step."""

    def __init__(self, index: int, step: int) -> None:
        super().__init__(length=100)
        self.index, self.step, self.made = index, step, itertools.count()

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        fails = next(self.made) == self.index
        step = self.step

        class Fragile(ColourEnv):
            def step(self, action: int) -> Any:
                if fails and self.steps == step:
                    raise RuntimeError("broken on purpose")
                return super().step(action)

        return Fragile(length=100)


@pytest.mark.parametrize(("index", "step"), [(0, 0), (3, 1), (3, 2)])
def test_an_error_in_the_background_surfaces(index: int, step: int) -> None:
    collector = OverlappedCollector(FragileTask(index, step), num_envs=4, seed=0)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        collector.collect(FunctionEngine(say_red), 3)


def test_nothing_goes_on_after_an_error() -> None:
    """Generation fails while the first half is in mid-step: the environments have come to rest when it surfaces."""
    begun, go_on, steps = threading.Event(), threading.Event(), []

    class Slow(ColourEnv):
        def step(self, action: int) -> Any:
            begun.set()
            assert go_on.wait(timeout=20)
            steps.append(action)
            return super().step(action)

    class SlowTask(ColourTask):
        def make_env(self, *, evaluation: bool = False) -> gym.Env:
            return Slow()

    calls = itertools.count()

    def fail_second(prompts: list[str], images: list[np.ndarray]) -> list[Generation]:
        if next(calls) == 1:
            assert begun.wait(timeout=20)
            threading.Timer(0.1, go_on.set).start()
            raise FloatingPointError("NaN logits")
        return say_red(prompts, images)

    collector = OverlappedCollector(SlowTask(), num_envs=4, seed=0)
    state = collector.state_dict()
    with pytest.raises(FloatingPointError, match="NaN logits"):
        collector.collect(FunctionEngine(fail_second), 3)
    assert len(steps) == 2
    collector.rewind(state)
    assert len(collector.collect(FunctionEngine(say_red), 3)) == 12


def test_out_of_time_or_stopped_it_ends_after_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, engine = OverlappedCollector(ColourTask(length=3), num_envs=3, seed=0), FunctionEngine(say_red)
    looks = itertools.count()
    stopped = collector.collect(engine, 50, stopped=lambda: next(looks) >= 2)
    assert [(t.step, t.env_index) for t in stopped.transitions] == [(s, e) for s in range(2) for e in range(3)]
    assert len(collector.collect(engine, 2, timeout=0.0)) == 3  # one step, even where there is no time at all
    now = itertools.count()  # every look at the clock is a second later
    monkeypatch.setattr("trl_gtr.rollouts.collector.time.monotonic", lambda: float(next(now)))
    rollout = collector.collect(engine, 100, timeout=4.0)
    assert len(rollout) / 3 in range(2, 6)
    assert fingerprint(rollout.last_images) == fingerprint(collector.images)
    assert [part.envs.envs[0].unwrapped.steps for part in collector.parts] == [(3 + len(rollout) // 3) % 3] * 2


def test_a_run_that_is_stopped_and_resumed_is_the_same_run(toy_checkpoint: str, tmp_path: Path) -> None:
    class Interrupting(ExpertCorrector):
        calls = 0

        def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
            self.calls += 1
            if self.calls == 12:  # in the second of four steps of the second update
                os.kill(os.getpid(), signal.SIGTERM)
            return super().correct(requests)

    def trainer(folder: str, corrector: Corrector) -> GTRTrainer:
        settings: dict[str, Any] = {"total_env_steps": 48, "save_strategy": "steps", "save_steps": 100}
        settings |= {"overlap": True, "allow_changed_config": True, "learning_rate": 1e-3}
        args = quiet_config(tmp_path / folder, **settings)
        return GTRTrainer(toy_checkpoint, args, ColourTask(length=3), corrector)

    whole = trainer("whole", ExpertCorrector())
    whole.train()
    with pytest.raises(SystemExit):
        trainer("stopped", Interrupting()).train()
    assert in_background() == 0
    resumed = trainer("stopped", ExpertCorrector())
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-1"))
    assert isinstance(whole.collector, OverlappedCollector)
    for one, other in zip(whole.trained.parameters(), resumed.trained.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_can_not_overlap_is_refused(tmp_path: Path) -> None:
    for settings, teaches, reason in [
        ({}, lambda group: True, "doesn't work with groups"),
        ({"num_envs": 1, "per_device_train_batch_size": 4}, None, "at least 2 environments"),
    ]:
        with pytest.raises(ValueError, match=reason):
            make_collector(ColourTask(), None, quiet_config(tmp_path, overlap=True, **settings), teaches)


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example("benchmarks/overlap").main(["--envs", "2", "--milliseconds", "0", "1", "--steps", "1", "--rounds", "1"])
    assert "lock-step / overlapped" in capsys.readouterr().out
