"""Environments in a Ray cluster of simulated nodes: the rollouts of workers on one machine, and as hard to kill."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_env import Counter, CounterTask, Housed, make
from function_engine import FunctionEngine
from paths import TESTS
from toy import quiet_config
from worker_cases import Careless, gone, needs_ray, played, same, says, told

from trl_gtr import ExpertCorrector, GTRTrainer, RolloutCollector, make_task
from trl_gtr.distributed.means import Means
from trl_gtr.evaluation.evaluate import evaluate_agent
from trl_gtr.rollouts.group_collector import GroupCollector
from trl_gtr.rollouts.overlapped_collector import OverlappedCollector
from trl_gtr.rollouts.ray_workers import RayWorkers, connect
from trl_gtr.rollouts.vector_envs import Vectorization, unpack_infos
from trl_gtr.rollouts.worker_base import WorkerRefused
from trl_gtr.rollouts.workers import WorkerVectorEnv
from trl_gtr.runs.rollout_metrics import count_rollout
from trl_gtr.storage.plain_data import decode, encode
from trl_gtr.types import Generation

pytestmark = needs_ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes(120)
    connect(cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def pairs(cluster: Any) -> RayWorkers:
    """Two environments in an actor."""
    return RayWorkers(cluster.address, envs_per_actor=2)


def on_ray(cluster: Any, envs_per_actor: int = 1) -> Vectorization:
    return Vectorization("ray", cluster.address, envs_per_actor)


def node_of(worker: Any) -> str:
    import ray

    return ray.get(
        worker.host.actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=30
    )


def losses(said: Any) -> list[int]:
    """The environments whose loss was warned of; Ray may warn of other things."""
    found = (re.match(r"The worker of environment (\d+) is replaced", str(each.message)) for each in said)
    return [int(match[1]) for match in found if match]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't happen"
        time.sleep(0.1)


def is_lost(worker: Any) -> bool:
    import ray

    try:
        node_of(worker)
    except ray.exceptions.RayError:
        return True
    return False


def test_actors_are_spread_over_the_nodes_and_end_when_they_are_closed(cluster: Any) -> None:
    envs = WorkerVectorEnv(make, 4, start_worker=RayWorkers(cluster.address, envs_per_actor=2))
    hosts = [worker.host for worker in envs.workers]  # type: ignore[attr-defined]
    assert [hosts.index(host) for host in hosts] == [0, 0, 2, 2]
    assert len({node_of(worker) for worker in envs.workers}) == 2
    workers = list(envs.workers)
    envs.close()
    wait_until(lambda: all(map(is_lost, workers)))


@pytest.mark.parametrize("kind", [RolloutCollector, OverlappedCollector, GroupCollector])
def test_every_collector_plays_the_same_everywhere(cluster: Any, kind: Any) -> None:
    options = {"num_envs": 4, "seed": 1} | ({"group_size": 2} if kind is GroupCollector else {})
    rollouts = []
    for vectorization in (Vectorization("local"), Vectorization("workers"), on_ray(cluster, 3)):
        with closing(kind(CounterTask(), vectorization=vectorization, **options)) as collector:
            rollouts.append([collector.collect(FunctionEngine(says()), 4) for _ in range(2)])
    here, workers, ray = ([played(rollout) for rollout in each] for each in rollouts)
    assert here == workers == ray
    assert len({repr(each) for each in here}) == 2
    assert [each[0].in_workers for each in rollouts] == [False, True, True]


def test_a_lost_worker_costs_one_episode_and_its_neighbours_none(pairs: RayWorkers) -> None:
    envs = WorkerVectorEnv(make, 2, step_timeout=8.0, start_worker=pairs)
    try:
        envs.reset(seed=0)
        for lost, (action, reason) in enumerate((("die", "code -9"), ("hang", "no answer"), ("raise", "on purpose"))):
            before = envs.step(["go", "go"])[0]
            assert envs.lost_episodes == lost
            with pytest.warns(UserWarning, match=reason) as said:
                observations, rewards, terminated, truncated, infos = envs.step([action, "go"])
            assert losses(said) == [0]
            assert (rewards[0], terminated[0], truncated[0], truncated[1]) == (0.0, False, True, False)
            assert rewards[1] > 0
            final = unpack_infos(infos, 2)[0]["final_info"]
            assert final["worker_lost"]
            assert infos["final_obs"][0].tolist() == before[0].tolist() == [1, final["target"]]
            assert observations[0][0] == 0  # a new episode has begun
        assert envs.lost_episodes == 3
    finally:
        envs.close()


def test_a_lost_actor_costs_the_episodes_of_all_its_environments(pairs: RayWorkers) -> None:
    import ray

    envs = WorkerVectorEnv(make, 4, start_worker=pairs)
    try:
        envs.reset(seed=0)
        envs.step(["go"] * 4)
        ray.kill(envs.workers[0].host.actor)  # type: ignore[attr-defined]
        wait_until(lambda: is_lost(envs.workers[0]))
        with pytest.warns(UserWarning, match="Ray actor or node is lost") as said:
            _, rewards, _, truncated, _ = envs.step(["go"] * 4)
        assert losses(said) == [0, 1]
        assert truncated.tolist() == [True, True, False, False]
        assert (rewards > 0).tolist() == [False, False, True, True]
        assert envs.step(["go"] * 4)[1][0] == 1.0
        assert envs.lost_episodes == 2
    finally:
        envs.close()


class KillsAt:
    """Says "go"; before its n-th answer something is killed."""

    def __init__(self, call: int, kill: Callable[[], None]) -> None:
        self.left, self.kill = call, kill

    def __call__(self, prompts: list[str], images: list[Any]) -> list[Generation]:
        self.left -= 1
        if self.left == 0:
            self.kill()
        return says()(prompts, images)


def test_a_node_killed_in_mid_rollout_costs_its_episodes_and_no_more(cluster: Any) -> None:
    """The same rollout as on one machine where the same workers are killed in the same step."""
    node, task = cluster.add_node(num_cpus=2), CounterTask("sync")
    cluster.wait_for_nodes(120)
    with closing(RolloutCollector(task, num_envs=6, seed=3, vectorization=on_ray(cluster, 2))) as collector:
        workers = list(collector.parts[0].envs.workers)  # type: ignore[union-attr]
        there = [i for i, worker in enumerate(workers) if node_of(worker) == node.node_id]
        assert len(there) == 2

        def kill_node() -> None:
            cluster.remove_node(node, allow_graceful=False)
            wait_until(lambda: all(is_lost(workers[i]) for i in there))

        with pytest.warns(UserWarning, match="Ray actor or node is lost") as said:
            rollout = collector.collect(FunctionEngine(KillsAt(3, kill_node)), 8)
        assert set(losses(said)) == set(there)
        assert collector.parts[0].envs.lost_episodes == len(there)  # type: ignore[union-attr]
        assert not any(map(is_lost, collector.parts[0].envs.workers))  # type: ignore[union-attr]
    with closing(RolloutCollector(task, num_envs=6, seed=3, vectorization=Vectorization("workers"))) as collector:
        processes = list(collector.parts[0].envs.workers)  # type: ignore[union-attr]

        def kill_workers() -> None:
            for i in there:
                os.kill(processes[i].pid, signal.SIGKILL)

        with pytest.warns(UserWarning, match="its episode is lost"):
            expected = collector.collect(FunctionEngine(KillsAt(3, kill_workers)), 8)
    assert played(rollout) == played(expected)
    means = Means()
    count_rollout(rollout, task, means)
    assert means.reduce()["episode/worker_lost"] == pytest.approx(len(there) / len(rollout.episodes))


def test_a_state_goes_from_any_vectorization_to_any_other(cluster: Any) -> None:
    engine = FunctionEngine(says())
    kinds = (Vectorization("local"), Vectorization("workers"), on_ray(cluster, 2))
    with ExitStack() as stack:
        collectors = [
            stack.enter_context(closing(RolloutCollector(CounterTask(), num_envs=2, seed=1, vectorization=kind)))
            for kind in kinds
        ]
        for collector in collectors:
            collector.collect(engine, 3)
        states = [decode(json.loads(json.dumps(encode(collector.state_dict())))) for collector in collectors]
        expected = played(collectors[0].collect(engine, 5))
        for collector in collectors:
            for state in states:
                collector.load_state_dict(state)
                assert played(collector.collect(engine, 5)) == expected


def test_an_evaluation_is_the_same_on_ray(cluster: Any) -> None:
    here = evaluate_agent(Careless("go", 0), CounterTask("sync"), 4, num_envs=2)
    with pytest.warns(UserWarning, match="Restarting episode"):
        there = evaluate_agent(
            Careless("die", 2), CounterTask("sync"), 4, num_envs=2, vectorization=on_ray(cluster, 2)
        )
    assert here == there


def test_a_run_continues_on_ray_where_workers_left_it(cluster: Any, tmp_path: Path) -> None:
    """Bit for bit as if it had never moved. An evaluation is part of it."""

    def trainer(name: str, **settings: Any) -> GTRTrainer:
        args = quiet_config(
            tmp_path / name,
            max_completion_length=64,
            save_strategy="steps",
            save_steps=1,
            eval_episodes=3,
            lr_scheduler_type="constant",
            **settings,
        )
        return GTRTrainer("tiny", args, make_task("number_line"), ExpertCorrector())

    def log_of(run: GTRTrainer) -> dict[str, float]:
        unsteady = ("time/", "speed/", "memory/", "corrector/latency")
        log = next(log for log in reversed(run.state.log_history) if "loss/total" in log)
        return {name: value for name, value in log.items() if not name.startswith(unsteady)}

    unbroken = trainer("unbroken")
    unbroken.train()
    expected = log_of(unbroken)
    first = trainer("moved", vectorization="workers", total_env_steps=16)
    first.train()
    first.close()
    second = trainer("moved", vectorization="ray", ray_address=cluster.address, overwrite=False)
    second.train(resume_from_checkpoint=True)
    assert second.evaluate().episodes == unbroken.evaluate().episodes
    second.close()
    assert log_of(second) == expected | {"episode/worker_lost": 0.0}


def test_large_answers_come_whole(pairs: RayWorkers) -> None:
    """In several pieces, once their size is known; the arrays can be written to, as anywhere."""

    def make_large() -> Counter:
        env = Counter()
        env.picture = np.random.default_rng(0).integers(0, 256, 500_000, np.uint8)  # type: ignore[attr-defined]
        return env

    envs = WorkerVectorEnv(make_large, 1, start_worker=pairs)
    try:
        for _ in range(3):
            (picture,) = envs.call("picture")
            assert same(picture, np.random.default_rng(0).integers(0, 256, 500_000, np.uint8))
            picture[0] = 0
    finally:
        envs.close()


def test_another_cluster_is_not_taken_for_the_one_asked_for(cluster: Any) -> None:
    connect(cluster.address)
    connect("auto")
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ValueError, match=r"connected to Ray at .*call `ray\.shutdown\(\)` first"),
    ):
        connect(f"127.0.0.1:{other.getsockname()[1]}")


def test_all_addresses_of_this_machine_are_the_same(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after "auto", where only Ray's own address is known."""
    monkeypatch.setattr("trl_gtr.rollouts.ray_workers._joined", None)
    port = cluster.address.rpartition(":")[2]
    connect(f"localhost:{port}")
    connect(f"{socket.gethostname()}:{port}")
    monkeypatch.setattr("trl_gtr.rollouts.ray_workers.check_address", lambda address: None)
    with pytest.raises(ValueError, match="connected to Ray at"):
        connect(f"192.0.2.1:{port}")  # of nobody


def test_a_stop_that_fails_costs_no_neighbour(pairs: RayWorkers, caplog: pytest.LogCaptureFixture) -> None:
    envs = WorkerVectorEnv(make, 2, start_worker=pairs)
    try:
        envs.reset(seed=0)
        worker: Any = envs.workers[0]
        worker._closing = worker.host.actor.stop.remote(worker.place, "no number")  # raises in the actor
        worker.stop()
        assert "could not be stopped" in caplog.text
        envs.workers[1].send("step_on", "go")
        assert envs.workers[1].answer(60.0)[1] > 0
    finally:
        envs.close()


def test_a_neighbour_that_is_slow_to_end_costs_nothing(pairs: RayWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_gtr.rollouts.ray_workers._REACH", 0.0)
    envs = WorkerVectorEnv(make, 2, start_worker=pairs)
    try:
        envs.reset(seed=0)
        with pytest.warns(UserWarning, match="its episode is lost") as said:
            envs.step(["die", "go"])
        rewards = envs.step(["go", "go"])[1]
        assert (set(losses(said)), envs.lost_episodes, rewards.tolist()) == ({0}, 1, [1.0, 2.0])
    finally:
        envs.close()


def test_an_environment_that_cannot_be_created_is_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ValueError("there is no such game")

    with pytest.raises(WorkerRefused, match=r"^there is no such game$"):
        WorkerVectorEnv(broken, 1, start_worker=RayWorkers(cluster.address))
    monkeypatch.setattr("trl_gtr.rollouts.ray_workers.version", lambda name: "0.0")
    with pytest.raises(WorkerRefused, match=r"the run has 0\.0: install the same version on every node"):
        WorkerVectorEnv(make, 1, start_worker=RayWorkers(cluster.address))


def test_workers_load_no_torch_and_keep_the_folder(pairs: RayWorkers, tmp_path: Path, monkeypatch: Any) -> None:
    def observed() -> Counter:
        env = Counter()
        env.seen = "torch" in sys.modules, os.getcwd()  # type: ignore[attr-defined]
        return env

    monkeypatch.chdir(tmp_path)
    envs = WorkerVectorEnv(observed, 1, start_worker=pairs)
    try:
        assert envs.call("seen") == ((False, str(tmp_path)),)
    finally:
        envs.close()


def test_what_an_environment_has_started_ends_with_it(pairs: RayWorkers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    envs = WorkerVectorEnv(lambda: Housed(str(log)), 2, step_timeout=3.0, start_worker=pairs)
    try:
        envs.reset(seed=0)
        first, second = told(log, "started")
        with pytest.warns(UserWarning, match="its episode is lost"):
            envs.step(["hang", "die"])
        assert gone([first, second])
    finally:
        envs.close()
    assert len(told(log, "closed")) == 2  # the replacements: closed in peace


def test_nothing_is_left_of_a_killed_run(tmp_path: Path) -> None:
    """Neither a Ray of its own, nor workers, nor what their environments have started.

    Not checked: two agents of Ray, which end by themselves when a minute has passed.
    """
    log, script = tmp_path / "log", tmp_path / "run.py"
    script.write_text(
        f"import sys, time; sys.path.insert(0, {str(TESTS)!r})\n"
        "from counter_env import Housed\n"
        "from trl_gtr.rollouts.ray_workers import RayWorkers\n"
        "from trl_gtr.rollouts.workers import WorkerVectorEnv\n"
        f"envs = WorkerVectorEnv(lambda: Housed({str(log)!r}), 2, start_worker=RayWorkers())\n"
        "envs.reset(seed=0)\n"
        "import psutil\n"
        "started = psutil.Process().children(recursive=True)\n"
        "print(*(each.pid for each in started if not each.name().endswith('Agent')), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    started = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(started) > 2  # Ray's own processes, actors, workers
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(told(log, "started")) == 2
    assert gone([*told(log, "started"), *started], 60.0)
