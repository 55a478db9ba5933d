"""The vLLM engine with vLLM itself, always in other processes: vLLM changes the one it is in."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from trl_gtr import GTRConfig, GTRTrainer, make_task, tiny_llava
from trl_gtr.engines.vllm_server import VLLMServer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
TESTS = ROOT / "tests"
CPU_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
TWO_PROCESSES = ROOT / "examples" / "accelerate_configs" / "cpu_2proc.yaml"
EXACT = 1e-4


def environment() -> dict[str, str]:
    folders = [str(TESTS / "vllm_stub"), str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | CPU_SETTINGS | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def measure(kind: str, folder: Path, *options: str) -> Any:
    """What vllm_checks.py finds."""
    two = ["-m", "accelerate.commands.launch", "--config_file", str(TWO_PROCESSES)]
    launch = two if kind == "two_processes" else []
    command = [sys.executable, *launch, str(TESTS / "vllm_checks.py"), kind, str(folder / "found.json"), *options]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return measure("exactness", tmp_path_factory.mktemp("exactness"))


class TestColocated:
    def test_samples_from_the_scored_distribution(self, found: Any) -> None:
        assert len(found["mismatch"]) == 4
        assert max(found["mismatch"].values()) < EXACT

    def test_greedy_responses_are_those_of_transformers(self, found: Any) -> None:
        assert found["greedy equal"] == found["greedy asked"] == 16

    def test_tokens_come_as_often_as_they_should(self, found: Any) -> None:
        drawn, expected = found["frequencies"]["drawn"], found["frequencies"]["expected"]
        total = sum(expected)
        for count, mean in zip(drawn, expected, strict=True):
            assert mean > 50
            assert abs(count - mean) < 4 * (mean * (1 - mean / total)) ** 0.5
        assert found["frequencies"]["others"] == 0

    def test_every_part_of_the_model_is_synced(self, found: Any) -> None:
        assert min(found["stale"].values()) > 100 * EXACT
        assert {*found["stale"]} < {*found["synced"]}
        assert max(found["synced"].values()) < EXACT

    def test_seeds_make_responses_repeatable(self, found: Any) -> None:
        assert found["same seed, same ids"]
        assert found["other seed, other ids"]
        assert found["start leaves torch's generator alone"]

    def test_requests_of_their_own_are_as_exact(self, found: Any) -> None:
        assert found["one by one"] < EXACT
        assert found["one by one, same ids"] == 16

    def test_runs_are_exact_and_repeatable(self, tmp_path: Path) -> None:
        runs = measure("runs", tmp_path)
        assert repeatable(runs["whole"]) == repeatable(runs["resumed"])
        for log in runs.values():
            assert [each["sampler/max_difference"] < EXACT for each in log if "loss/total" in each] == [True] * 3
            assert sum("eval_success" in each for each in log) == 1

    def test_a_sampler_with_old_weights_ends_the_run(self, tmp_path: Path) -> None:
        assert "above `vllm_max_mismatch` (0.05)" in measure("stale", tmp_path)["error"]

    def test_each_process_has_its_own(self, tmp_path: Path) -> None:
        found = measure("two_processes", tmp_path)
        assert found["processes"] == 2
        assert max(sampler_differences(found["log"])) < EXACT


def repeatable(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A log without what depends on the clock."""
    clocks = ("time/", "speed/", "memory/", "corrector/latency")
    return [{name: value for name, value in each.items() if not name.startswith(clocks)} for each in log]


class Server:
    """vLLM's own server with the embedded model."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log, self.process = log, None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = {"--model": tiny_llava.path(), "--port": self.port, "--dtype": "float32", "--max-num-seqs": 16}
        words = [str(word) for option in options.items() for word in option]
        with self.log.open("a") as log:
            self.process: Any = subprocess.Popen(
                [sys.executable, "-m", "trl_gtr.engines.vllm_serve", *words],
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server") / "server.log")
    yield running
    running.kill()


def sampler_differences(log: list[dict[str, Any]]) -> list[float]:
    return [each["sampler/max_difference"] for each in log if "loss/total" in each]


def test_two_processes_share_a_server(server: Server, tmp_path: Path) -> None:
    found = measure("two_processes", tmp_path, server.url)
    assert found["processes"] == 2
    differences = sampler_differences(found["log"])
    assert len(differences) == 3
    assert max(differences) < 5 * EXACT  # its image processor may resize in another way than the learner's


def test_weights_reach_a_server_through_a_file(server: Server, tmp_path: Path) -> None:
    differences = sampler_differences(run_with(server, tmp_path, vllm_sync="file"))
    assert len(differences) == 3
    assert max(differences) < 5 * EXACT


def test_a_run_survives_the_death_of_its_server(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed while the second rollout waits for responses, and gets its weights again over the network."""
    ask, asked = VLLMServer._ask, itertools.count(1)

    def kill_it_then_ask(backend: VLLMServer, request: Any) -> Any:
        if next(asked) == 12:
            server.kill()
            server.start()
        return ask(backend, request)

    monkeypatch.setattr(VLLMServer, "_ask", kill_it_then_ask)
    differences = sampler_differences(run_with(server, tmp_path, vllm_sync="gloo", vllm_group_port=0))
    assert len(differences) == 3
    assert max(differences) < 5 * EXACT
    assert "waiting for it" in caplog.text


def run_with(server: Server, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Three updates and an evaluation with this server; their log."""
    args = GTRConfig(
        str(folder / "run"),
        engine="vllm",
        vllm_mode="server",
        vllm_base_url=server.url,
        vllm_server_timeout=600.0,
        num_envs=8,
        rollout_steps=1,
        total_env_steps=24,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        num_ppo_epochs=1,
        max_completion_length=48,
        eval_episodes=2,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    trainer = GTRTrainer("tiny", args, make_task("ezpoints"), "expert")
    trainer.train()
    trainer.evaluate()
    trainer.close()
    return trainer.state.log_history
