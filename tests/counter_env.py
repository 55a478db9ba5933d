"""A small environment and its task for the workers' tests, in a module of its own: workers import nothing else of the
tests."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from trl_gtr.responses.format import ThoughtFormat
from trl_gtr.tasks.base import Task
from trl_gtr.types import Response, Transition


class Counter(gym.Env):
    """Counts to a random number. Action "die" kills the process, "hang" never comes back, "raise" raises."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 100, (2,), np.int64)
        self.action_space = gym.spaces.Text(8)

    def _observe(self) -> tuple[np.ndarray, dict[str, Any]]:
        info = {"target": self.target, "names": ["a", "b"][: self.count], "inner": {"count": self.count}}
        return np.array([self.count, self.target]), info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.target = 0, int(self.np_random.integers(2, 5))
        return self._observe()

    def step(self, action: str) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "hang":
            time.sleep(600)
        if action == "raise":
            raise RuntimeError("raised on purpose")
        self.count += 1
        observation, info = self._observe()
        return observation, float(self.count), self.count >= self.target, False, info


def make() -> gym.Env:
    return Counter()


class CutCounter(Counter):
    """Episodes that would count beyond 2 are truncated there."""

    def step(self, action: str) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, self.count >= 2 and not terminated, info


class Housed(Counter):
    """Starts a process of its own, as a simulator would be, and ends it when it is closed. Both are told in a file."""

    def __init__(self, log: str) -> None:
        super().__init__()
        self.log, self.house = log, None

    def tell(self, text: str) -> None:
        with open(self.log, "a") as file:
            file.write(f"{text}\n")

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        if self.house is None:
            self.house = subprocess.Popen(["sleep", "600"])
            self.tell(f"started {self.house.pid}")
        return super().reset(**options)

    def close(self) -> None:
        if self.house is not None:
            self.house.kill()
            self.house.wait()
            self.tell(f"closed {self.house.pid}")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "house": None}


class Meeting(CutCounter):
    """Is created only where others are being created at the same time.

    Args:
        folder: Where they leave word.
        size: How many have to meet.
    """

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__()
        (folder / str(os.getpid())).touch()
        end = time.monotonic() + 30
        while len(list(folder.iterdir())) < size:
            if time.monotonic() > end:
                raise RuntimeError("nobody came")
            time.sleep(0.05)


class CounterTask(Task):
    """`{"action": "go"}`, in this process or in others."""

    name = "counter"
    format = ThoughtFormat(())

    def __init__(self, vectorization: str = "processes") -> None:
        self.vectorization = vectorization

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        return Counter()

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        return f"{info['inner']['count']} of {info['target']}"

    def legal_actions(self, info: Mapping[str, Any]) -> Sequence[str]:
        return ["go", "go!"]

    def to_env_action(self, response: Response, info: Mapping[str, Any]) -> str | None:
        return response.action

    def success(self, transitions: Sequence[Transition]) -> bool:
        return transitions[-1].terminated

    def metrics(self, transitions: Sequence[Transition]) -> dict[str, float]:
        return {f"success_{transitions[0].info['target']}": float(self.success(transitions))}


class CutCounterTask(CounterTask):
    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        return CutCounter()


class MeetingTask(CounterTask):
    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        return Meeting(self.folder, self.size)
