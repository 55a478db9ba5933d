"""alfworld's `ThorEnv` with what a long run needs: no wait without an end, and no Unity that outlives this process.

ai2thor 2.1.0 waits for ever for the frames of a Unity that has crashed or hangs, leaves Unity running when its Python
process is killed, and can wait for ever when it stops. Imports ai2thor: import this module only where it is needed.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import Any

from alfworld.env.thor_env import ThorEnv

START_TIMEOUT = 250.0
ANSWER_TIMEOUT = 100.0
"""Seconds that Unity may take to start, and for an action. Both are less than `WorkerVectorEnv` waits for a worker."""
STOP_TIMEOUT = 5.0

# Runs in Unity's process before Unity: 1 is PR_SET_PDEATHSIG, 9 SIGKILL. The parent may have ended before that.
_TIED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class SimulatorLost(RuntimeError):
    """Unity has ended or answers no more."""


class Simulator(ThorEnv):
    """Raises `SimulatorLost` where `ThorEnv` would wait for ever, and keeps it in `lost`, for alfworld's controllers
    swallow every error of a step. Once lost, there is nothing to do but to `stop` it and make another."""

    def __init__(self, **options: Any) -> None:
        self.lost: SimulatorLost | None = None
        self.patience = START_TIMEOUT
        self.ended = ""
        """Why Unity runs no more."""
        super().__init__(**options)

    def start(self, *arguments: Any, **options: Any) -> Any:
        self.request_queue = _Frames(self)
        self.patience = START_TIMEOUT
        try:
            event = super().start(*arguments, **options)
        except BaseException:
            self.stop()
            raise
        self.patience = ANSWER_TIMEOUT
        return event

    def stop(self) -> None:
        with suppress(ProcessLookupError):  # it may end by itself at this moment
            self.stop_unity()  # first of all: nothing that follows may leave it running
        if self.server is not None:
            server = self.server.wsgi_server
            closing = threading.Thread(target=server.shutdown, daemon=True)
            closing.start()
            deadline = time.monotonic() + STOP_TIMEOUT
            while closing.is_alive() and time.monotonic() < deadline:
                with suppress(Full):
                    self.response_queue.put_nowait({})  # the server may be waiting for an action
                closing.join(0.05)
            server.server_close()
        self.stop_container()
        self.unlock_release()

    def unity_command(self, *arguments: Any, **options: Any) -> list[str]:
        command = super().unity_command(*arguments, **options)
        if sys.platform != "linux":
            return command
        return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]

    def _start_unity_thread(self, *arguments: Any) -> None:
        """Runs in a thread, to Unity's end."""
        try:
            super()._start_unity_thread(*arguments)
            self.ended = "Unity has ended"
        except Exception as error:  # `_Frames` raises it where somebody waits
            code = re.search(r"exited with (-?\d+)$", str(error))
            self.ended = f"Unity has ended with exit code {code[1]}" if code else f"Unity can't start: {error}"

    def lose(self, reason: str) -> SimulatorLost:
        self.lost = self.lost or SimulatorLost(f"{reason}. Reset the environment, which starts THOR anew.")
        return self.lost


class _Frames(Queue[Any]):
    """Where ai2thor waits for Unity's frames: `queue_get` catches `Empty`, and no other error, and tries again."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(maxsize=1)
        self._simulator = simulator

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        simulator = self._simulator
        if simulator.lost:
            raise simulator.lost
        deadline = time.monotonic() + simulator.patience
        while True:
            ended = simulator.ended  # before looking: a frame may be there that came just before the end
            try:
                return super().get(timeout=0.5)
            except Empty:
                if ended:
                    raise simulator.lose(ended) from None
                if time.monotonic() > deadline:
                    raise simulator.lose(f"Unity gave no answer within {simulator.patience:g} s") from None
