"""Workers in a Ray cluster: the processes of `ProcessWorker`, started by actors on the cluster's nodes.

An actor keeps one worker process for each of its environments and hands on what the run and the process say to each
other. A crash or a hang therefore ends as it does on one machine, and costs no other environment. If an actor or its
node is lost, so are the episodes of all its environments. Needs `pip install "trl-gtr[ray]"`.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import threading
from collections import deque
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import cloudpickle

from .process_workers import ProcessWorker
from .worker_base import PATIENCE, Worker, WorkerLost, WorkerRefused

logger = logging.getLogger(__name__)

INSTALL = 'Environments in Ray actors need a package that is not installed: pip install "trl-gtr[ray]"'
PIECE = 90_000
"""Bytes. Ray sends a result below 100 KiB directly, and takes milliseconds longer for one that isn't."""
GRACE = 2.0
"""Seconds to fetch an answer that is ready."""
_REACH = 10.0
"""Seconds to hear from an actor that is alive."""
_CONNECTION_TIMEOUT = 5.0
_turns = itertools.count(os.getpid())
"""Which node is next. The processes of a run begin at different ones."""
_joined: tuple[str | None, str] | None = None
"""With which address this process has joined a cluster, and that cluster's own."""


class Host:
    """The actor: starts worker processes on its node, and hands on requests and answers as bytes.

    Each place has one request at a time; the requests of different places run in threads of their own.
    """

    def __init__(self) -> None:
        self._workers: dict[int, ProcessWorker] = {}

    def start(self, place: int, make_env: bytes, folder: str, expected: str) -> bytes:
        """Start a worker process in the run's own folder, if this node has it. Its answer to `make`.

        Args:
            expected: The run's version of trl-gtr.
        """
        if (found := version("trl-gtr")) != expected:
            advice = f"has trl-gtr {found}, the run has {expected}: install the same version on every node."
            return cloudpickle.dumps(("refusal", f"Node {socket.gethostname()} {advice}"))
        self._workers[place] = ProcessWorker(make_env, folder if os.path.isdir(folder) else None)
        return self._fetch(place)

    def ask(self, place: int, request: bytes, pieces: int) -> bytes | list[bytes]:
        """The answer, cut into pieces if there is to be more than one."""
        self._workers[place].post(request)
        answer = self._fetch(place)
        if pieces == 1:
            return answer
        size = -(-len(answer) // pieces)
        return [answer[i * size : (i + 1) * size] for i in range(pieces)]

    def _fetch(self, place: int) -> bytes:
        try:
            return self._workers[place].fetch(None)  # the run knows how long to wait
        except WorkerLost as loss:
            return cloudpickle.dumps(("lost", str(loss)))

    def stop(self, place: int, patience: float) -> None:
        worker = self._workers.pop(place, None)
        if worker is not None:
            worker.stop(patience)


class RayWorker(Worker):
    """A worker process somewhere in the cluster.

    Args:
        host: Its actor.
        place: Its place there.
        make_env: Creates the environment, pickled with cloudpickle.
    """

    def __init__(self, host: HostHandle, place: int, make_env: bytes) -> None:
        super().__init__()
        self.host, self.place = host, place
        self._pieces = 1
        self._waiting: deque[bytes] = deque()
        self._closing: Any = None
        # One request at a time: threads of an actor keep no order.
        self._answer: Any = host.actor.start.remote(place, make_env, os.getcwd(), version("trl-gtr"))

    def post(self, request: bytes) -> None:
        self._waiting.append(request)
        self._go_on()

    def _go_on(self) -> None:
        if self._answer is None and self._waiting:
            ask = self.host.actor.ask.options(num_returns=self._pieces)
            self._answer = ask.remote(self.place, self._waiting.popleft(), self._pieces)

    def fetch(self, timeout: float | None) -> bytes:
        import ray

        try:
            pieces = ray.get(self._answer, timeout=None if timeout is None else max(timeout, GRACE))
        except ray.exceptions.GetTimeoutError as error:
            raise WorkerLost(f"no answer within {timeout} s") from error
        except ray.exceptions.RayError as error:
            if "No module named" in str(error):
                raise WorkerRefused(
                    f"A node of the Ray cluster can't run environments ({_last_line(error)}): install trl-gtr "
                    "and what the task needs on every node, in the version that the run has."
                ) from error
            raise WorkerLost(f"its Ray actor or node is lost: {_last_line(error)}") from error
        answer = pieces if isinstance(pieces, bytes) else b"".join(pieces)
        self._answer, self._pieces = None, 1 + len(answer) // PIECE  # the next answer is about as large
        self._go_on()
        return answer

    def kill(self) -> None:
        self._killed = True
        self._close(0.0)

    def release(self) -> None:
        self._close(PATIENCE)

    def stop(self, patience: float = 0.0) -> None:
        import ray

        self._close(patience)
        if not ray.is_initialized():
            return  # it has ended, and all actors with it
        reachable = True
        try:
            ray.get(self._closing, timeout=patience + _REACH)
        except ray.exceptions.GetTimeoutError:
            self.host.retire()  # an actor that hangs, or a process that is slow to end: its neighbours go on
        except ray.exceptions.RayTaskError as error:  # the actor lives, and so do its neighbours
            logger.warning("A worker in a Ray actor could not be stopped: %s", _last_line(error))
            self.host.retire()
        except ray.exceptions.RayError:
            reachable = False
        self.host.leave(self.place, reachable)

    def _close(self, patience: float) -> None:
        import ray

        if self._closing is None and ray.is_initialized():
            self._closing = self.host.actor.stop.remote(self.place, patience)


class HostHandle:
    """An actor and its places. Each is taken once at most, and the actor is killed when the last one is left.

    A worker that is replaced because it leaks memory therefore gets a fresh actor before long.
    """

    def __init__(self, actor: Any, places: int) -> None:
        self.actor = actor
        self._free, self._taken = list(reversed(range(places))), set[int]()
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """A place, or `None` if there is none left."""
        with self._lock:
            if not self._free:
                return None
            place = self._free.pop()
            self._taken.add(place)
            return place

    def retire(self) -> None:
        """Take no further environments."""
        with self._lock:
            self._free = []

    def leave(self, place: int, reachable: bool) -> None:
        """Give up a place, or the whole actor if it isn't `reachable`."""
        import ray

        with self._lock:
            self._taken.discard(place)
            if reachable and self._taken:
                return
            self._free = []
        with suppress(ray.exceptions.RayError):  # it is dead already
            ray.kill(self.actor)


class RayWorkers:
    """Starts workers in actors that are spread over the nodes. Thread-safe.

    Args:
        address: Of a running cluster, or "auto" for the one that this machine is part of. `None` starts its own
            Ray instance on this machine, which ends with the run.
        envs_per_actor: Environments of an actor, each in its own process. They are lost together if their actor is.
    """

    def __init__(self, address: str | None = None, envs_per_actor: int = 1) -> None:
        connect(address)
        self.envs_per_actor = envs_per_actor
        self._host = self._new_host()
        self._lock = threading.Lock()

    def __call__(self, make_env: bytes) -> RayWorker:
        with self._lock:
            if (place := self._host.take()) is None:
                self._host = self._new_host()
                place = self._host.take()
            assert place is not None
            return RayWorker(self._host, place, make_env)

    def _new_host(self) -> HostHandle:
        import ray

        variables = {
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            # Ray would kill the workers but not what their environments have started. They end by themselves.
            "RAY_kill_child_processes_on_worker_exit": "0",
        }
        options = {
            "max_concurrency": 2 * self.envs_per_actor,  # each may have to be stopped in the middle of a request
            "scheduling_strategy": _next_node(),
            "runtime_env": {"env_vars": variables},
        }
        return HostHandle(ray.remote(Host).options(**options).remote(), self.envs_per_actor)


def _next_node() -> Any:
    """Take turns among the nodes. Ray's own "SPREAD" draws lots if actors hold no CPU, and ours hold none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
    if not nodes:
        raise ValueError("No node of the Ray cluster has a CPU for environments: start one without `--num-cpus 0`.")
    return NodeAffinitySchedulingStrategy(nodes[next(_turns) % len(nodes)], soft=True)  # elsewhere if it is lost


def connect(address: str | None) -> None:
    """Connect this process to Ray unless it is; raises at once, with a remedy, if that isn't possible."""
    if find_spec("ray") is None:
        raise ImportError(INSTALL)
    import ray

    global _joined
    if ray.is_initialized():
        _check_connected(address)
        return
    if address is None:
        ray.init(address="local", include_dashboard=False, logging_level="warning")
        return
    check_address(address)
    try:
        ray.init(address=address, logging_level="warning")
        _joined = address, ray.get_runtime_context().gcs_address
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise ValueError(
            f"Can't connect to Ray at {address!r}: {_last_line(error)} Run `ray start --head` on one machine and `ray "
            "start --address=HOST:6379` on the others, this one included, and set ray_address='auto'."
        ) from error


def _check_connected(address: str | None) -> None:
    """Raise if this process, which is connected already, is so to another cluster."""
    import ray

    connected = ray.get_runtime_context().gcs_address
    if address in (None, "auto") or (address, connected) == _joined:
        return
    check_address(address)
    if _numeric(address) != _numeric(connected):
        raise ValueError(
            f"This process is connected to Ray at {connected}, not at {address}: call `ray.shutdown()` first, or "
            "leave `ray_address` out."
        )


def check_address(address: str) -> None:
    """Raise if nothing listens there: Ray itself would try for a minute, and then end the process."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ValueError(
            f"`ray_address` must be 'auto' or HOST:PORT, not {address!r}. Ray Client (ray://) is not supported: run "
            "`ray start --address=HOST:6379` on this machine, so that it joins the cluster, and set it to 'auto'."
        )
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECTION_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"No Ray cluster answers at {address} ({error}): check `ray_address`, and that `ray start --head` was run "
            "there."
        ) from error


def _numeric(address: str) -> tuple[str, str]:
    """Host, as a number, and port. All addresses of this machine are the same host."""
    host, _, port = address.rpartition(":")
    family, *_, found = socket.getaddrinfo(host, None)[0]
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((found[0], 0))  # which works for its own addresses alone
    except OSError:
        return str(found[0]), port
    return "this machine", port


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()
