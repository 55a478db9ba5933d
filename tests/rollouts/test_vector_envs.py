"""Where environments run: as the task says, or as the settings do; and a Ray cluster that can't be used."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from counter_env import CounterTask
from function_engine import FunctionEngine
from toy import ColourTask, quiet_config
from worker_cases import played, says

from trl_gtr import ExpertCorrector, GTRTrainer, RolloutCollector
from trl_gtr.evaluation.evaluate import evaluate_agent
from trl_gtr.rollouts import ray_workers
from trl_gtr.rollouts.playing import PlayingRules
from trl_gtr.rollouts.process_workers import ProcessWorker
from trl_gtr.rollouts.ray_workers import connect
from trl_gtr.rollouts.replay import LocalVectorEnv
from trl_gtr.rollouts.vector_envs import Vectorization, make_vector_env
from trl_gtr.rollouts.workers import WorkerVectorEnv
from trl_gtr.scripts.train import train


@pytest.mark.parametrize(
    ("kind", "task_says", "expected"),
    [
        ("auto", "sync", LocalVectorEnv),
        ("auto", "processes", WorkerVectorEnv),
        ("local", "processes", LocalVectorEnv),
        ("workers", "sync", WorkerVectorEnv),
    ],
)
def test_the_settings_go_before_the_task(kind: Any, task_says: str, expected: type) -> None:
    with closing(make_vector_env(PlayingRules(CounterTask(task_says)), 1, vectorization=Vectorization(kind))) as envs:
        assert type(envs) is expected


def test_a_state_goes_from_this_process_to_workers_and_back() -> None:
    def collector(kind: Any, seed: int = 1) -> Any:
        return closing(RolloutCollector(CounterTask(), num_envs=2, seed=seed, vectorization=Vectorization(kind)))

    engine = FunctionEngine(says())
    with collector("local") as here, collector("workers") as there:
        for each in (here, there):
            each.collect(engine, 3)
        states = here.state_dict(), there.state_dict()
        expected = here.collect(engine, 5)
        assert not expected.in_workers
        there.load_state_dict(states[0])
        assert played(there.collect(engine, 5)) == played(expected)
        here.load_state_dict(states[1])
        assert played(here.collect(engine, 5)) == played(expected)
        there.parts[0].envs.workers[1].kill()
        lost = there.state_dict()
        with pytest.raises(ValueError, match=r"A worker was lost.*continue with vectorization='workers'"):
            here.load_state_dict(lost)


def test_an_evaluation_runs_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Counted(ProcessWorker):
        def __init__(self, make_env: bytes) -> None:
            super().__init__(make_env)
            started.append(self.pid)

    monkeypatch.setattr("trl_gtr.rollouts.vector_envs.ProcessWorker", Counted)

    class Goes:
        def respond(self, prompts: list[str], images: list[Any], infos: Any) -> list[str]:
            return ['{"action": "go"}' for _ in prompts]

    task = CounterTask("sync")
    here = evaluate_agent(Goes(), task, 2)  # type: ignore[arg-type]
    assert not started
    assert here == evaluate_agent(Goes(), task, 2, vectorization=Vectorization("workers"))  # type: ignore[arg-type]
    assert len(started) == 2


# -- Ray that can't be used ------------------------------------------------------------------------------------------


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.usefixtures("without_ray")
def test_missing_ray_is_told_before_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = quiet_config(tmp_path, vectorization="ray")
    with pytest.raises(ImportError, match=r'pip install "trl-gtr\[ray\]"'):
        GTRTrainer("there/is-no-such-model", args, ColourTask(), ExpertCorrector())
    words = ["--vectorization", "ray", "--output_dir", str(tmp_path / "run"), "--use_cpu"]
    with pytest.raises(SystemExit):
        train([*words, "--model_name_or_path", "there/is-no-such-model"], task="number_line")
    assert 'pip install "trl-gtr[ray]"' in capsys.readouterr().err


def test_several_processes_share_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = quiet_config(tmp_path, vectorization="ray")
    monkeypatch.setattr("trl_gtr.rollouts.vector_envs.PartialState", lambda: type("State", (), {"num_processes": 2}))
    with pytest.raises(ValueError, match=r"run `ray start --head` and set ray_address='auto'"):
        Vectorization.from_settings(args)


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("127.0.0.1:1", "No Ray cluster answers at .* that `ray start --head` was run there"),
        ("127.0.0.1:99999", "No Ray cluster answers"),
        ("ray://127.0.0.1:10001", "Ray Client .* is not supported: run `ray start --address"),
        ("here", "must be 'auto' or HOST:PORT, not 'here'"),
    ],
)
def test_an_address_that_leads_nowhere_is_told_at_once(address: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        ray_workers.check_address(address)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='needs the extra: pip install "trl-gtr[ray]"')
def test_no_cluster_on_this_machine_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"Can't connect to Ray at 'auto'.*`ray start --head`"):
        connect("auto")


@pytest.mark.parametrize("settings", [{"vectorization": "rays"}, {"ray_envs_per_actor": 0}])
def test_settings_out_of_range_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(settings))}` must be"):
        quiet_config(tmp_path, **settings)
