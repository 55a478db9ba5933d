"""The vLLM engine with vLLM itself, always in other processes: vLLM changes the one it is in."""

from __future__ import annotations

import importlib.util
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
from transformers import TrainerCallback

from trl_gtr import GTRConfig, GTRTrainer, make_task, tiny_llava

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
TESTS = ROOT / "tests"
CPU_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
EXACT = 1e-4


def environment() -> dict[str, str]:
    folders = [str(TESTS / "vllm_stub"), str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | CPU_SETTINGS | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def measure(kind: str, folder: Path) -> Any:
    """What vllm_checks.py finds."""
    command = [sys.executable, str(TESTS / "vllm_checks.py"), kind, str(folder / "found.json")]
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

    def test_two_runs_with_the_same_seed_are_the_same(self, tmp_path: Path) -> None:
        runs = measure("runs", tmp_path)
        logs = [
            [{k: v for k, v in each.items() if not k.startswith(("time/", "speed/", "memory/"))} for each in log]
            for log in runs.values()
        ]
        for log in logs:
            for each in log:
                each.pop("corrector/latency", None)
        assert logs[0] == logs[1]
        assert logs[0][-1]["mismatch"] < EXACT
        assert sum("eval_success" in each for each in logs[0]) == 1


class Server:
    """vLLM's own server with the embedded model."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log, self.process = log, None
        self.start()

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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path / "server.log")
    yield running
    running.kill()


class Restart(TrainerCallback):
    """Kills the server after the first update and starts it again."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.server.kill()
            self.server.start()


def test_a_run_survives_the_death_of_its_server(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_checks import mismatch

    args = GTRConfig(
        str(tmp_path / "run"),
        engine="vllm",
        vllm_mode="server",
        vllm_base_url=f"http://127.0.0.1:{server.port}",
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
    )
    trainer = GTRTrainer("tiny", args, make_task("ezpoints"), "expert", callbacks=[Restart(server)])
    differences, real = [], trainer.engine.generate

    def watched(prompts: Any, images: Any, greedy: bool = False) -> Any:
        generations = real(prompts, images, greedy)
        if not greedy:
            differences.append(mismatch(trainer.policy, trainer.trained.policy, prompts, images, generations))
        return generations

    trainer.engine.generate = watched  # type: ignore[method-assign]
    trainer.train()
    trainer.evaluate()
    trainer.close()
    assert trainer.state.global_step == 3
    assert len(differences) == 3
    assert max(differences) < 5 * EXACT  # its image processor may resize in another way than the learner's
    assert "waiting for it" in caplog.text
