"""Workers that are processes of this machine, each at the other end of a pipe. POSIX only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from .worker_base import Worker, WorkerLost

_BOOT = "import sys; sys.path[:] = {path!r}; from trl_gtr.rollouts.worker_process import main; main({fd})"


class ProcessWorker(Worker):
    """A fresh process that imports neither the training script nor torch, and exits when its parent does.

    Args:
        make_env: Creates the environment, pickled with cloudpickle.
        folder: The process's working folder; this process's by default.
    """

    def __init__(self, make_env: bytes, folder: str | None = None) -> None:
        super().__init__()
        ours, theirs = socket.socketpair()
        with theirs:
            boot = _BOOT.format(path=[entry or os.getcwd() for entry in sys.path], fd=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # signals to the run's group must not reach us: it needs us to save
                cwd=folder,
            )
        self.connection = Connection(ours.detach())
        self.send("make", make_env)

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, request: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(request)

    def fetch(self, timeout: float | None) -> bytes:
        try:
            if not self.connection.poll(timeout):
                raise WorkerLost(f"no answer within {timeout} s")
            return self.connection.recv_bytes()
        except (EOFError, OSError) as error:  # OSError: died mid-message
            raise WorkerLost(f"the process has ended{self._exit_code()}") from error

    def _exit_code(self) -> str:
        try:
            return f" with exit code {self._process.wait(timeout=5)}"
        except subprocess.TimeoutExpired:
            return ""

    def kill(self) -> None:
        # It started a session, so it leads a process group. PermissionError: on macOS, if the group has just ended.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._killed = True

    def release(self) -> None:
        self.connection.close()

    def stop(self, patience: float = 0.0) -> None:
        self.release()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience)
        self.kill()
        self._process.wait()
