"""Paid correctors in whole runs: a real trainer on the toy world, a real HTTP server beside it."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_server import ChatServer, hangs, says
from corrector_cases import SECRET
from paths import TESTS
from toy import ColourTask, quiet_config
from transformers import TrainerCallback

from trl_gtr.config import GTRConfig
from trl_gtr.correctors import CachedCorrector, Corrector, ExpertCorrector, OpenAICorrector
from trl_gtr.correctors.base import failed
from trl_gtr.trainer import GTRTrainer
from trl_gtr.types import Correction

pytest.importorskip("openai")

RED = {"evaluation": "NO", "correction": {"thoughts": "it is red"}, "right_action": "red"}


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def settings(folder: Path, **overrides: Any) -> GTRConfig:
    return quiet_config(folder, **{"save_strategy": "steps", "total_env_steps": 48, **overrides})


def openai(server: ChatServer, **options: Any) -> OpenAICorrector:
    return OpenAICorrector("test-model", base_url=server.url, api_key=SECRET, **options)


def test_rerun_with_a_cache_makes_no_call_and_is_the_same_run(toy_checkpoint: str, tmp_path: Path) -> None:
    calls, weights, histories = [], [], []
    with ChatServer(says(RED)) as server:
        for run in ("first", "second"):
            corrector = CachedCorrector(openai(server), tmp_path / "cache")
            trainer = GTRTrainer(toy_checkpoint, settings(tmp_path / run), ColourTask(), corrector)
            trainer.train()
            calls.append(len(server.seen))
            weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.trained.parameters()]))
            names = ("loss/", "policy/", "episode/", "buffer/", "value/")
            histories.append([{k: v for k, v in e.items() if k.startswith(names)} for e in trainer.state.log_history])
            corrector.close()
    assert calls[0] == calls[1] > 16
    assert histories[0] == histories[1]
    assert len(histories[0]) == 3
    assert torch.equal(*weights)
    assert trainer.state.log_history[-1]["buffer/size"] > 0


def test_spent_budget_stops_the_run_and_a_resume_of_it(toy_checkpoint: str, tmp_path: Path) -> None:
    """Sixteen steps an update: 20 calls end in the second one, and no third is trained without labels."""
    with ChatServer(says({"evaluation": "YES", "correction": None, "right_action": None})) as server:
        trainer = GTRTrainer(toy_checkpoint, settings(tmp_path), ColourTask(), openai(server, max_calls=20))
        trainer.train()
        assert trainer.state.global_step == 2
        assert len(server.seen) == 20
        assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()
        resumed = GTRTrainer(toy_checkpoint, settings(tmp_path), ColourTask(), openai(server, max_calls=20))
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 2
        assert len(server.seen) == 20
        richer = GTRTrainer(toy_checkpoint, settings(tmp_path), ColourTask(), openai(server, max_calls=200))
        richer.train(resume_from_checkpoint=True)
        assert richer.state.global_step == 3
        assert len(server.seen) > 20
        for run in (trainer, resumed, richer):
            run.corrector.close()


class Failures(TrainerCallback):
    """What the rollouts of a run say of its failures, counted by hand."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()

    def on_step_end(self, args: Any, state: Any, control: Any, rollout: Any = None, **kwargs: Any) -> None:
        self.kinds.update(c.failure for c in rollout.corrections if c is not None and c.verdict == "failed")

    def logged(self, trainer: GTRTrainer) -> dict[str, float]:
        prefix = "corrector/failed_"
        last = trainer.state.log_history[-1]
        return {name.removeprefix(prefix): value for name, value in last.items() if name.startswith(prefix)}


class Unlucky(Corrector):
    """Says nothing of itself. A quarter of its calls fails each of four ways; one of them never comes back."""

    def __init__(self) -> None:
        self.calls, self.released = itertools.count(), threading.Event()

    def correct(self, requests: Any) -> list[Correction]:
        turn = next(self.calls) % 4
        if turn == 0:
            self.released.wait(60)
        if turn == 1:
            return [failed("refused") for _ in requests]
        if turn == 2:
            return [Correction("failed", reason="no idea") for _ in requests]
        return ExpertCorrector().correct(requests)


def test_every_failure_is_counted_exactly_once_whoever_makes_it(toy_checkpoint: str, tmp_path: Path) -> None:
    corrector, failures = Unlucky(), Failures()
    config = settings(tmp_path, correction_timeout=0.1)
    trainer = GTRTrainer(toy_checkpoint, config, ColourTask(), corrector, callbacks=[failures])
    try:
        trainer.train()
    finally:
        corrector.released.set()
    logged = failures.logged(trainer)
    assert logged == dict(failures.kinds)
    assert set(logged) == {"late", "refused", "other"}
    assert min(logged.values()) >= 3
    # A resumed run goes on counting.
    more = GTRTrainer(toy_checkpoint, settings(tmp_path, total_env_steps=64), ColourTask(), ExpertCorrector())
    more.args.allow_changed_config = True
    more.train(resume_from_checkpoint=True)
    assert more.state.global_step == 4
    assert failures.logged(more) == logged


def test_failures_of_corrector_and_collector_are_added_up(toy_checkpoint: str, tmp_path: Path) -> None:
    """Four vector steps of four: the budget ends in the second, where the corrector turns two requests down; to the
    other vector steps it only raises."""
    failures = Failures()
    with ChatServer(says(RED)) as server:
        corrector = openai(server, max_calls=6, concurrency=1)
        trainer = GTRTrainer(toy_checkpoint, settings(tmp_path), ColourTask(), corrector, callbacks=[failures])
        generate = trainer.engine.generate

        def after_the_answers(*args: Any) -> Any:
            """Each vector step is answered before the next is asked for, so that the last ones find nothing left."""
            until = time.monotonic() + 20
            while trainer.collector.pool._running:
                assert time.monotonic() < until
                time.sleep(0.001)
            return generate(*args)

        trainer.engine.generate = after_the_answers
        trainer.train()
        corrector.close()
    assert failures.kinds["budget"] > corrector.metrics()["corrector/failed_budget"] > 0
    assert failures.logged(trainer) == {"budget": failures.kinds["budget"]}


def test_any_error_ends_what_is_under_way_and_the_trainer_can_go_on(toy_checkpoint: str, tmp_path: Path) -> None:
    with ChatServer(*[says(RED)] * 4, hangs) as server:
        corrector = openai(server, timeout=100.0, deadline=100.0)
        trainer = GTRTrainer(toy_checkpoint, settings(tmp_path), ColourTask(), corrector)
        generate, calls = trainer.engine.generate, itertools.count()

        def broken(*args: Any) -> Any:
            if next(calls) < 3:
                return generate(*args)
            server.wait_for(lambda: len(server.seen) > 4 and server.in_flight > 0)
            raise RuntimeError("broken on purpose")

        trainer.engine.generate = broken
        with pytest.raises(RuntimeError, match="broken on purpose"):
            trainer.train()
        until = time.monotonic() + 10
        while any(thread.name.startswith("corrector_") for thread in threading.enumerate()):
            assert time.monotonic() < until, "threads of the interrupted rollout go on waiting"
            time.sleep(0.01)
        trainer.engine.generate = generate
        server.steps = (says(RED),)
        trainer.train()
        assert trainer.state.global_step == 3
        assert trainer.state.log_history[-1]["corrector/failed"] < 1
        corrector.close()


def test_exhausted_corrector_of_any_kind_stops_the_run_before_it_plays(toy_checkpoint: str, tmp_path: Path) -> None:
    class Spent(ExpertCorrector):
        exhausted = True

    trainer = GTRTrainer(toy_checkpoint, settings(tmp_path), ColourTask(), Spent())
    trainer.train()
    assert trainer.state.global_step == 0


TRAIN = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from test_corrector_run import GTRTrainer, ColourTask, OpenAICorrector, settings
corrector = OpenAICorrector("test-model", base_url={url!r}, timeout=100.0, deadline=100.0)
trainer = GTRTrainer({model!r}, settings(Path({folder!r})), ColourTask(), corrector)
trainer.train()
"""


def test_ctrl_c_leaves_a_checkpoint_at_once_and_the_key_nowhere(
    toy_checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of its own gets a real SIGINT while it waits for a server that hangs in the second update."""
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    tests = [str(TESTS), str(TESTS / "correctors")]
    with ChatServer(*[says(RED)] * 20, hangs, key=SECRET) as server:
        code = TRAIN.format(tests=tests, url=server.url, model=toy_checkpoint, folder=str(tmp_path))
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        server.wait_for(lambda: server.in_flight > 0 and len(server.seen) > 20, seconds=120)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
        assert time.monotonic() - started < 30
        sent = len(server.seen)
    assert process.returncode == 128 + signal.SIGINT
    assert b"SIGINT received. Resume from" in printed
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert (checkpoint / "trainer_state.json").is_file()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (checkpoint / "gtr_state_0.json") in files
    leaking = [path.name for path in files if SECRET.encode() in path.read_bytes()]
    assert leaking == []
    assert SECRET.encode() not in printed
    assert sent <= 32
