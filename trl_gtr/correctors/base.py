"""The `Corrector` seam: who judges the agent's thoughts and writes better ones."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..responses.safe_text import printable
from ..tasks.base import Task
from ..tasks.contract import Contract
from ..types import Correction, CorrectionRequest, FailureKind, Usage


class BudgetExhausted(RuntimeError):
    """The corrector's budget is spent and its owner wants the run to stop; the trainer saves and ends cleanly."""


class Corrector(Contract):
    """Judges a batch of steps. A subclass defines `correct`; all else has a default that does nothing.

    `correct` is called off the main thread and from several threads at once, one call per vector step; the limit on
    requests in flight lives in here. What goes wrong with one request is that request's `failed` correction, never an
    exception: only `BudgetExhausted` may be raised, and what ends the run because no request could ever succeed (a
    rejected key).

    A rollout waits for its corrections only so long. Then it cancels its requests (`request.cancellation`), and a
    corrector that heeds that returns at once: what it has, and `failed("late")` for the rest. What comes later is
    thrown away.
    """

    _identity: str | None = None

    @property
    def identity(self) -> str:
        """Names model and settings, never a key; cached answers belong to it. Assign your own: by default it is the
        name of the class."""
        return self._identity or type(self).__name__

    @identity.setter
    def identity(self, identity: str) -> None:
        self._identity = identity

    @property
    def exhausted(self) -> bool:
        """The budget is spent and the run should stop, with a checkpoint."""
        return False

    @abstractmethod
    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        """One answer per request, in order."""

    def check(self, task: Task) -> None:
        """Raises a `ValueError` that says what is wrong, before training starts and anything is spent."""

    def metrics(self) -> dict[str, float]:
        """Logged every update, by their full names (`corrector/...`)."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values that a resumed run continues from."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of an earlier run, which may have had another corrector."""

    def close(self) -> None:
        """Corrections under way come back as failed at once, and so does what is asked from now on …"""

    def reopen(self) -> None:
        """… until this is called, as every rollout does when it starts."""


def failed(
    kind: FailureKind, detail: str = "", *, usage: Usage | None = None, latency: float = 0.0, source: str = ""
) -> Correction:
    """A correction that failed, and why."""
    reason = printable(detail) or None  # it is logged, and a server may have written it
    return Correction("failed", reason=reason, usage=usage or Usage(), latency=latency, source=source, failure=kind)


def request_digest(request: CorrectionRequest) -> str:
    """Content address of what a corrector may see: picture, words, thought, action, public state and rubric.

    Hidden truth (`request.info`) is not part of it.
    """
    image = np.ascontiguousarray(request.image)
    response = request.response
    words = [
        request.task.name,
        _plain(request.task.rubric),
        request.prompt,
        response.thought,
        response.action,
        _plain(request.public_state),
        [str(image.dtype), list(image.shape)],
    ]
    digest = hashlib.sha256(json.dumps(words, sort_keys=True, ensure_ascii=True).encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """JSON values with the same meaning: tuples, arrays and numpy numbers count as the lists and numbers they hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        # Pairs, not an object: the order of a rubric's questions is part of what the corrector reads.
        return [[str(key), _plain(entry)] for key, entry in value.items()]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"the public state and rubric of a task hold plain values only (numbers, texts, lists, mappings), "
        f"not {type(value).__name__}"
    )


class CorrectorWrapper(Corrector):
    """A corrector around another: passes everything on."""

    def __init__(self, corrector: Corrector):
        self.corrector = Corrector.ensure(corrector)
        self.identity = corrector.identity

    @property
    def exhausted(self) -> bool:
        return self.corrector.exhausted

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        return self.corrector.correct(requests)

    def check(self, task: Task) -> None:
        self.corrector.check(task)

    def metrics(self) -> dict[str, float]:
        return self.corrector.metrics()

    def state_dict(self) -> dict[str, Any]:
        return self.corrector.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:  # empty where the earlier run's corrector had none
            self.corrector.load_state_dict(state)

    def close(self) -> None:
        self.corrector.close()

    def reopen(self) -> None:
        self.corrector.reopen()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.corrector!r})"
