"""What runs in a worker of `WorkerVectorEnv`: one environment, and a loop that answers requests."""

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
"""Seconds that an environment has to close, which may mean to end a simulator."""


class Served:
    """The environment and the requests that it answers."""

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
        """The step's result; after an episode's end the next one's start, with the end behind it."""
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
        """Whoever comes second waits for the first."""
        with self._closing:
            env, self.env = self.env, None
            if env is not None:
                env.close()


def main(fd: int) -> None:
    """Answer requests until the connection closes, which it does when the parent ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the parent, whose end is ours
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
    """The result, or the error with its traceback: the parent decides what an error means."""
    try:
        return "result", method(*arguments)
    except (ValueError, OSError, ImportError) as error:
        if method.__name__ in ("make", "get_state", "set_state"):  # these say themselves what is wrong
            return "refusal", str(error)
        return "error", traceback.format_exc()
    except Exception:
        return "error", traceback.format_exc()


def _end_with(parent: int, served: Served) -> None:
    """End when the parent has ended, also in the middle of a step that never comes back."""
    while os.getppid() == parent:
        time.sleep(1.0)
    _end(served)


def _end(served: Served) -> NoReturn:
    """Close the environment, and end with all that it has started, also if closing hangs or fails."""
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
    """The worker began a session of its own, so its process group is itself and what its environment has started."""
    os.killpg(0, signal.SIGKILL)
