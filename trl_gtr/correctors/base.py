"""The `Corrector` interface: judging the agent's thoughts and writing better ones."""

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
from ..types import Correction, CorrectionRequest, FailureKind, Usage, turns_before


class BudgetExhausted(RuntimeError):
    """The corrector's budget is spent and the run should stop; the trainer saves a checkpoint and ends cleanly."""


class Corrector(Contract):
    """Judges a batch of steps. A subclass defines `correct`; everything else defaults to doing nothing.

    `correct` is called off the main thread and from several threads at once, one call per vector step; the corrector
    itself limits the requests in flight. If one request goes wrong, return a `failed` correction for it instead of
    raising. The only exceptions to raise are `BudgetExhausted` and errors that should end the run because no request
    could ever succeed (a rejected key).

    A rollout waits only so long for its corrections, then cancels its requests (`request.cancellation`). A corrector
    that supports this returns at once, with what it has and `failed("late")` for the rest. Late answers are dropped.
    """

    _identity: str | None = None

    @property
    def identity(self) -> str:
        """Names the model and its settings, never an API key. Cached answers are stored under it. Defaults to the
        class name; assign your own."""
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
        """Return one answer per request, in order."""

    def check(self, task: Task) -> None:
        """Raise a `ValueError` that says what is wrong. Called before training starts and anything is spent."""

    def metrics(self) -> dict[str, float]:
        """Metrics to log every update, by full name (`corrector/...`)."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run, as plain JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the `state_dict()` of an earlier run, which may have used a different corrector."""

    def close(self) -> None:
        """Fail pending corrections at once, and any new ones until `reopen`."""

    def reopen(self) -> None:
        """Accept requests again after `close`. Every rollout calls this when it starts."""


def failed(
    kind: FailureKind, detail: str = "", *, usage: Usage | None = None, latency: float = 0.0, source: str = ""
) -> Correction:
    """Build a failed correction."""
    reason = printable(detail) or None  # it is logged, and may come from a server
    return Correction("failed", reason=reason, usage=usage or Usage(), latency=latency, source=source, failure=kind)


def request_digest(request: CorrectionRequest) -> str:
    """Hash of everything a corrector may see: image, prompt, earlier turns, thought, action, public state and rubric.

    The hidden truth (`request.info`) is not included.
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
    turns = turns_before(request.prompt)
    words += [[turn.prompt, turn.response, None if turn.image is None else list(turn.image.shape)] for turn in turns]
    digest = hashlib.sha256(json.dumps(words, sort_keys=True, ensure_ascii=True).encode())
    for picture in (image, *(turn.image for turn in turns if turn.image is not None)):
        digest.update(picture.tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Convert to plain JSON values: tuples and arrays become lists, NumPy scalars become numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        # Pairs, not an object, because the order of a rubric's questions matters.
        return [[str(key), _plain(entry)] for key, entry in value.items()]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"a task's public state and rubric must hold only plain values (numbers, strings, lists, mappings), "
        f"not {type(value).__name__}"
    )


class CorrectorWrapper(Corrector):
    """Wraps another corrector and forwards everything to it."""

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
        if state:  # empty if the earlier run's corrector had none
            self.corrector.load_state_dict(state)

    def close(self) -> None:
        self.corrector.close()

    def reopen(self) -> None:
        self.corrector.reopen()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.corrector!r})"
