"""Environments in worker processes: like gymnasium's own vector environment, and hard to kill."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from counter_env import Counter, CounterTask, Housed, make
from function_engine import make_collector
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from paths import TESTS
from worker_cases import Careless, gone, played, running, same, says, told

from trl_gtr.distributed.means import Means
from trl_gtr.evaluation.evaluate import evaluate_agent
from trl_gtr.rollouts.process_workers import ProcessWorker
from trl_gtr.rollouts.vector_envs import unpack_infos
from trl_gtr.rollouts.worker_base import WorkerLost, WorkerRefused
from trl_gtr.rollouts.workers import WorkerVectorEnv
from trl_gtr.runs.rollout_metrics import count_rollout
from trl_gtr.storage.plain_data import decode, encode


@pytest.mark.parametrize("recycle_after", [None, 2])
def test_like_a_sync_vector_env(recycle_after: int | None) -> None:
    """Resets, steps and infos are those of gymnasium, also where workers are replaced by new ones every 2 episodes."""
    reference = SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    envs = WorkerVectorEnv(make, 2, recycle_after=recycle_after)
    try:
        assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        assert (envs.single_action_space, envs.observation_space) == (
            reference.single_action_space,
            reference.observation_space,
        )
        pids = {worker.pid for worker in envs.workers}
        for one, other in zip(reference.reset(seed=[3, 7]), envs.reset(seed=[3, 7]), strict=True):
            assert same(one, other)
        ends = 0
        for _ in range(12):
            expected, found = reference.step(["go"] * 2), envs.step(["go"] * 2)
            assert all(same(one, other) for one, other in zip(expected, found, strict=True))
            ends += int(found[2].sum())
        assert ends >= 6
        assert envs.lost_episodes == 0
        assert (pids == {worker.pid for worker in envs.workers}) == (recycle_after is None)
        assert envs.call("count") == reference.call("count")
    finally:
        envs.close()


def test_a_lost_worker_costs_one_episode() -> None:
    envs = WorkerVectorEnv(make, 2, step_timeout=3.0)
    try:
        envs.reset(seed=0)
        for lost, (action, reason) in enumerate((("die", "code -9"), ("hang", "no answer"), ("raise", "on purpose"))):
            before = envs.step(["go", "go"])[0]
            assert envs.lost_episodes == lost
            with pytest.warns(UserWarning, match=reason):
                observations, rewards, terminated, truncated, infos = envs.step([action, "go"])
            assert (rewards[0], terminated[0], truncated[0], truncated[1]) == (0.0, False, True, False)
            assert rewards[1] > 0
            final = unpack_infos(infos, 2)[0]["final_info"]
            assert final["worker_lost"]
            assert final["inner"] == {"count": 1}  # the last that was known
            assert infos["final_obs"][0].tolist() == before[0].tolist() == [1, final["target"]]
            assert observations[0][0] == 0  # a new episode has begun
            assert "worker_lost" not in infos
        assert envs.lost_episodes == 3
        with pytest.raises(RuntimeError, match="lost 3 times"):
            fail_often(envs)
    finally:
        envs.close()


def fail_often(envs: WorkerVectorEnv) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            envs.step(["raise", "go"])


def test_a_replacement_that_fails_to_start_changes_no_later_episode() -> None:
    """How often a new worker must be started is chance, on a cluster above all."""
    steady, unlucky = episodes_after_losses(failing_starts=()), episodes_after_losses(failing_starts=(2,))
    assert steady == unlucky
    assert len(set(steady)) > 1


def episodes_after_losses(failing_starts: tuple[int, ...]) -> list[int]:
    """The targets of four episodes that follow a loss. Some starts of workers, by number, end in a crash."""
    started = itertools.count()

    def start(make_env: bytes) -> ProcessWorker:
        worker = ProcessWorker(make_env)
        if next(started) in failing_starts:
            worker.kill()
        return worker

    envs, targets = WorkerVectorEnv(make, 1, start_worker=start), []
    try:
        envs.reset(seed=0)
        for _ in range(4):
            with pytest.warns(UserWarning, match="its episode is lost"):
                targets.append(int(envs.step(["die"])[0][0][1]))
            envs.step(["go"])
    finally:
        envs.close()
    return targets


def test_groups_begin_whatever_happens_to_workers_between_episodes() -> None:
    """One is lost while nobody plays, its replacement fails to start; another is due to be recycled, and fails too."""
    started = itertools.count()

    def start(make_env: bytes) -> ProcessWorker:
        worker = ProcessWorker(make_env)
        if next(started) in (2, 3):
            worker.kill()
        return worker

    envs = WorkerVectorEnv(make, 2, recycle_after=1, start_worker=start)
    try:
        expected = envs.reset(seed=[5, 5])[0].tolist()
        envs.workers[0].kill()
        envs.workers[1].episodes = 1
        with pytest.warns(UserWarning, match="The worker of environment . is replaced: ") as said:
            found = envs.reset_some({0: 5, 1: 5})
        assert len([each for each in said if "is replaced" in str(each.message)]) == 3
        assert [observation.tolist() for observation, _ in found.values()] == expected
        assert envs.lost_episodes == 0
    finally:
        envs.close()


def test_lost_workers_are_all_started_before_one_is_waited_for() -> None:
    """A lost node may take dozens with it."""
    events: list[str] = []

    class Recorded(ProcessWorker):
        def __init__(self, make_env: bytes) -> None:
            events.append("start")
            super().__init__(make_env)

        def answer(self, timeout: float | None) -> Any:
            events.append("answer")
            return super().answer(timeout)

    envs = WorkerVectorEnv(make, 3, recycle_after=None, start_worker=Recorded)
    try:
        envs.reset(seed=0)
        for step in (lambda: envs.step(["go"] * 3), lambda: envs.step_some(dict.fromkeys(range(3), "go"))):
            for worker in envs.workers:
                worker.kill()
            events.clear()
            with pytest.warns(UserWarning, match="its episode is lost"):
                step()
            assert events == ["answer"] * 3 + ["start"] * 3 + ["answer"] * 6
            envs.step(["go"] * 3)
    finally:
        envs.close()


@pytest.mark.filterwarnings("ignore:The worker of environment 0 is replaced")
@pytest.mark.parametrize("recycled", [True, False])
def test_a_node_that_cannot_run_environments_is_told(recycled: bool) -> None:
    """Whether the worker there was to replace a lost one, or one that is due to be recycled."""
    started = itertools.count()

    class Refused(ProcessWorker):
        def answer(self, timeout: float | None) -> Any:
            raise WorkerRefused("install trl-gtr on every node")

    def start(make_env: bytes) -> ProcessWorker:
        return (ProcessWorker, Refused)[next(started)](make_env)

    envs = WorkerVectorEnv(make, 1, recycle_after=1, start_worker=start)
    try:
        envs.reset(seed=0)
        if recycled:
            envs.workers[0].episodes = 1
        else:
            envs.workers[0].kill()
        with pytest.raises(WorkerRefused, match="install trl-gtr on every node"):
            envs.reset_some({0: 5})
    finally:
        envs.close()


def test_an_environment_that_cannot_be_created_raises() -> None:
    def broken() -> gym.Env:
        raise ValueError("there is no such game")

    with pytest.raises(WorkerLost, match="there is no such game"):
        WorkerVectorEnv(broken, 2)


def test_states_are_saved_and_restored() -> None:
    envs, others = WorkerVectorEnv(make, 2), WorkerVectorEnv(make, 2)
    try:
        envs.reset(seed=5)
        envs.step(["go", "go"])
        others.reset(seed=9)
        others.set_states(decode(json.loads(json.dumps(encode(envs.get_states())))))
        for _ in range(6):
            assert all(
                same(one, other) for one, other in zip(envs.step(["go"] * 2), others.step(["go"] * 2), strict=True)
            )
        with pytest.raises(ValueError, match="1 states for 2 environments"):
            others.set_states(envs.get_states()[:1])
    finally:
        envs.close()
        others.close()


def test_a_worker_lost_between_steps_costs_one_episode_here_and_where_its_state_goes() -> None:
    envs, others = WorkerVectorEnv(make, 2), WorkerVectorEnv(make, 2)
    try:
        envs.reset(seed=5)
        others.reset(seed=9)
        before = envs.step(["go", "go"])[0]
        envs.workers[0].kill()
        states = decode(json.loads(json.dumps(encode(envs.get_states()))))
        os.kill(others.workers[1].pid, signal.SIGKILL)
        others.set_states(states)  # and a worker that is lost there is replaced
        for each in (envs, others):
            with pytest.warns(UserWarning, match="environment 0 is replaced"):
                observations, _, _, truncated, infos = each.step(["go", "go"])
            assert truncated.tolist() == [True, False]
            assert infos["final_obs"][0].tolist() == before[0].tolist()
            assert observations[1][0] == 2
        # The new episode is the same one too.
        assert all(map(same, envs.step(["go", "go"]), others.step(["go", "go"])))
    finally:
        envs.close()
        others.close()


class Forgetful(Counter):
    """Can't be pickled, and counts episodes: another copy can't know how many there were."""

    episodes = 0

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("not me")

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.episodes += 1
        observation, info = super().reset(**kwargs)
        return observation, {**info, "episodes": self.episodes}


@pytest.mark.slow
@pytest.mark.parametrize("pickled", [False, True])
def test_environments_that_can_not_be_restored_are_kept(pickled: bool) -> None:
    def make_forgetful() -> gym.Env:
        return Forgetful()

    envs = WorkerVectorEnv(make_forgetful, 1, recycle_after=2, pickle_environments=pickled)
    try:
        envs.reset(seed=0)
        pid = envs.workers[0].pid
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(12):
                envs.step(["go"])
        assert ["no longer recycled" in str(each.message) for each in said] == [True]
        assert ("not me" if pickled else "gave a different start") in str(said[0].message)
        assert (envs.workers[0].pid, envs.lost_episodes) == (pid, 0)
    finally:
        envs.close()


def test_a_failed_replay_is_a_one_line_error() -> None:
    envs = WorkerVectorEnv(make, 1)
    try:
        envs.reset(seed=0)
        (state,) = envs.get_states()
        state["environment"]["outcome"]["info"] = "another"
        with pytest.raises(ValueError, match=r"the episode of <Counter.*gave a different info"):
            envs.set_states([state])
        envs.set_states([state], exact=False)
        assert envs.step(["go"])[0].tolist()[0][0] == 1
    finally:
        envs.close()


def test_signals_to_the_run_leave_its_workers_alone() -> None:
    envs = WorkerVectorEnv(make, 1)
    try:
        envs.reset(seed=0)
        pid = envs.workers[0].pid
        assert os.getpgid(pid) != os.getpgid(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        envs.step(["go"])
        assert (envs.workers[0].pid, envs.lost_episodes) == (pid, 0)
    finally:
        envs.close()


def test_workers_end_when_they_are_closed() -> None:
    envs = WorkerVectorEnv(make, 2)
    pids = [worker.pid for worker in envs.workers]
    assert all(map(running, pids))
    envs.close()
    assert gone(pids, 1.0)


@pytest.mark.parametrize("action", ["go", "hang"])
def test_workers_end_when_their_parent_is_killed(tmp_path: Path, action: str) -> None:
    """Also in the middle of a step that never comes back. The script has no `if __name__ == "__main__"`: no worker
    imports it."""
    script = tmp_path / "run.py"
    tests = TESTS
    script.write_text(
        f"import sys; sys.path.insert(0, {str(tests)!r})\n"
        "from counter_env import make\n"
        "from trl_gtr.rollouts.workers import WorkerVectorEnv\n"
        "envs = WorkerVectorEnv(make, 2)\n"
        "envs.reset(seed=0)\n"
        "print(*(worker.pid for worker in envs.workers), flush=True)\n"
        f"envs.step(['{action}', '{action}'])\n"
        "import time; time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pids)


def test_an_environment_is_closed_with_its_worker(tmp_path: Path) -> None:
    log = tmp_path / "log"
    envs = WorkerVectorEnv(lambda: Housed(str(log)), 2, pickle_environments=True)
    try:
        envs.reset(seed=0)
        envs.set_states(envs.get_states())  # takes the place of the old ones
        assert sorted(told(log, "closed")) == sorted(told(log, "started"))
        envs.reset(seed=0)
    finally:
        envs.close()
    assert len(told(log, "started")) == 4
    assert sorted(told(log, "closed")) == sorted(told(log, "started"))


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("action", ["go", "hang"])
def test_what_an_environment_has_started_ends_when_the_run_is_killed(
    tmp_path: Path, action: str, ending: signal.Signals
) -> None:
    log = tmp_path / "log"
    script = (
        f"import sys, time; sys.path.insert(0, {str(TESTS)!r})\n"
        "from counter_env import Housed\n"
        "from trl_gtr.rollouts.workers import WorkerVectorEnv\n"
        f"envs = WorkerVectorEnv(lambda: Housed({str(log)!r}), 2)\n"
        "envs.reset(seed=0)\n"
        "print('ready', flush=True)\n"
        f"envs.step(['{action}', '{action}'])\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(ending)
    assert len(told(log, "started")) == 2
    assert gone(told(log, "started"), 20.0)


@pytest.mark.parametrize(("action", "reason"), [("hang", "no answer"), ("die", "code -9")])
def test_what_a_lost_environment_has_started_ends_with_it(tmp_path: Path, action: str, reason: str) -> None:
    log = tmp_path / "log"
    envs = WorkerVectorEnv(lambda: Housed(str(log)), 1, step_timeout=3.0)
    try:
        envs.reset(seed=0)
        with pytest.warns(UserWarning, match=reason):
            envs.step([action])
        assert gone(told(log, "started")[:1])
    finally:
        envs.close()


def test_a_hanging_close_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_gtr.rollouts.workers.PATIENCE", 1.0)

    class Stubborn(Counter):
        def close(self) -> None:
            time.sleep(600)

    envs = WorkerVectorEnv(Stubborn, 1)
    pids = [worker.pid for worker in envs.workers]
    envs.close()
    assert gone(pids, 1.0)


def test_workers_do_not_load_torch() -> None:
    def loaded() -> gym.Env:
        env = Counter()
        env.torch = "torch" in sys.modules  # type: ignore[attr-defined]
        return env

    envs = WorkerVectorEnv(loaded, 1)
    try:
        assert envs.call("torch") == (False,)
    finally:
        envs.close()


@pytest.mark.parametrize("arguments", [(0, {}), (1, {"recycle_after": 0})])
def test_invalid_arguments_are_refused(arguments: tuple[int, dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        WorkerVectorEnv(make, arguments[0], **arguments[1])


# -- in a run --------------------------------------------------------------------------------------------------------


def test_a_collector_plays_the_same_in_processes() -> None:
    """Up to a checkpoint and on from it; the wrapper under which an unreadable response costs a step goes along."""
    here = make_collector(CounterTask("sync"), says(), num_envs=2, seed=1)
    task = CounterTask()
    there, later = (
        make_collector(task, says(), num_envs=2, seed=seed, invalid_action="penalty")  # type: ignore[arg-type]
        for seed in (1, 2)
    )
    try:
        assert played(here.collect(5)) == played(there.collect(5))
        later.load_state_dict(there.state_dict())
        expected = here.collect(5)
        assert played(expected) == played(later.collect(5))
        assert len(expected.episodes) > 2
    finally:
        there.close()
        later.close()


def test_a_lost_episode_is_counted_and_no_failure() -> None:
    task = CounterTask()
    collector = make_collector(task, says(), num_envs=2)  # type: ignore[arg-type]
    try:
        collector.collect(1)
        os.kill(collector.parts[0].envs.workers[0].pid, signal.SIGKILL)  # type: ignore[union-attr]
        with pytest.warns(UserWarning, match="its episode is lost"):
            rollout = collector.collect(6)
    finally:
        collector.close()
    lost = next(t for t in rollout.transitions if t.env_index == 0)
    assert (lost.reward, lost.truncated, lost.bootstrap) == (0.0, True, True)
    means = Means()
    count_rollout(rollout, task, means)
    metrics = means.reduce()
    assert metrics["episode/worker_lost"] == pytest.approx(1 / len(rollout.episodes))
    assert metrics["episode/success"] == 1.0


def test_an_evaluation_is_the_same_in_processes() -> None:
    """Also where workers are lost: their episodes are played again."""
    reports = [
        evaluate_agent(Careless("raise", times), CounterTask(where), 4, num_envs=2)  # type: ignore[arg-type]
        for where, times in (("sync", 0), ("processes", 0))
    ]
    with pytest.warns(UserWarning, match="Restarting episode"):
        reports.append(evaluate_agent(Careless("die", 2), CounterTask(), 4, num_envs=2))  # type: ignore[arg-type]
    assert reports[0] == reports[1] == reports[2]
    by_target = reports[0].extra()
    assert by_target
    assert set(by_target) <= {"success_2", "success_3", "success_4"}
    assert reports[0].metrics()[next(iter(by_target))] == 1.0


def test_an_evaluation_that_loses_every_worker_ends() -> None:
    with pytest.warns(UserWarning, match="Restarting episode"), pytest.raises(WorkerLost, match="on purpose"):
        evaluate_agent(Careless("raise", 99), CounterTask(), 1)  # type: ignore[arg-type]


def test_a_missing_dependency_is_a_value_error() -> None:
    class Lacking(CounterTask):
        def make_env(self, *, evaluation: bool = False) -> gym.Env:
            raise ImportError("pip install something")

    with pytest.raises(ValueError, match=r"^pip install something$"):
        make_collector(Lacking(), says(), num_envs=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^pip install something$"):
        evaluate_agent(Careless("go", 0), Lacking(), 1)  # type: ignore[arg-type]
