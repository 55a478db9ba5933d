"""The code that runs in a worker process: one environment, and a loop that answers requests."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

import cloudpickle
import gymnasium as gym

from .replay import Replayable

CLOSING_TIME = 8.0
"""Seconds an environment gets to close, which may involve shutting down a simulator."""


class Served:
    """The environment and the requests it answers."""

    def __init__(self) -> None:
        self.env: gym.Env | Any = None
        self._closing = threading.Lock()

    def make(self, make_env: bytes) -> dict[str, Any]:
        self.env = cloudpickle.loads(make_env)()
        return {
            "spec": self.env.spec,
            "render_mode": self.env.render_mode,
            "metadata": dict(self.env.metadata),
            "action_space": self.env.action_space,
            "observation_space": self.env.observation_space,
        }

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self.env.step(action)

    def step_on(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any], tuple[Any, dict[str, Any]] | None]:
        """Step with autoreset. After an episode's end: the next one's start, and the final observation and info."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        ending = None
        if terminated or truncated:
            ending = observation, info
            observation, info = self.env.reset()
        return observation, float(reward), bool(terminated), bool(truncated), info, ending

    def call(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        found = self.env.get_wrapper_attr(name)
        return found(*arguments, **named) if callable(found) else found

    def get_state(self) -> Any:
        return cast(Replayable, self.env).get_state()

    def set_state(self, state: Any, exact: bool) -> tuple[Any, dict[str, Any]]:
        return cast(Replayable, self.env).set_state(state, exact)

    def close(self) -> None:
        """Thread-safe: a second caller waits for the first."""
        with self._closing:
            env, self.env = self.env, None
            if env is not None:
                env.close()


def main(fd: int) -> None:
    """Answer requests until the connection closes, which it does when the parent ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles these
        signal.signal(number, signal.SIG_IGN)
    served = Served()
    threading.Thread(target=_end_with, args=(os.getppid(), served), daemon=True).start()
    connection = Connection(fd)
    while True:
        try:
            name, arguments = cloudpickle.loads(connection.recv_bytes())
            connection.send_bytes(cloudpickle.dumps(_answer(getattr(served, name), arguments)))
        except (EOFError, ConnectionError):
            _end(served)


def _answer(method: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """The result, or the error with its traceback for the parent to handle."""
    try:
        return "result", method(*arguments)
    except (ValueError, OSError, ImportError) as error:
        if method.__name__ in ("make", "get_state", "set_state"):  # their messages are clear enough
            return "refusal", str(error)
        return "error", traceback.format_exc()
    except Exception:
        return "error", traceback.format_exc()


def _end_with(parent: int, served: Served) -> None:
    """Exit once the parent has exited, even during a step that never returns."""
    while os.getppid() == parent:
        time.sleep(1.0)
    _end(served)


def _end(served: Served) -> NoReturn:
    """Close the environment and exit; if closing hangs or fails, kill everything it started."""
    by_force = threading.Timer(CLOSING_TIME, _end_group)
    by_force.daemon = True
    by_force.start()
    try:
        served.close()
    except Exception:
        traceback.print_exc()
        _end_group()
    os._exit(0)


def _end_group() -> None:
    """Kill the worker and its environment's processes: its own session makes them one process group."""
    os.killpg(0, signal.SIGKILL)
