"""The `Corrector` seam: who judges the agent's thoughts and writes better ones.

Any object with a `correct` method is a corrector. These further members are used where they exist:

| member | what for |
|---|---|
| `identity: str` | names model and settings, never a key; cached answers belong to it |
| `check(task)` | raises a `ValueError` that says what is wrong, before training starts and anything is spent |
| `metrics() -> dict[str, float]` | logged every update |
| `state_dict()`, `load_state_dict(state)` | plain JSON values that a resumed run continues from |
| `exhausted: bool` | the budget is spent and the run should stop, with a checkpoint |
| `close()` | corrections under way come back as failed at once, and so does what is asked from now on … |
| `reopen()` | … until this is called, as every rollout does when it starts |
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np

from ..responses.safe_text import printable
from ..types import Correction, CorrectionRequest, Usage

FailureKind = Literal[
    "timeout",  # the server didn't answer in time
    "late",  # given up when the rollout waited no longer
    "connection",  # none, or lost
    "server",  # HTTP 429 or 5xx to the end
    "rejected",  # another HTTP 4xx
    "unavailable",  # not asked: the server has failed many times in a row and is left alone for a while
    "refused",  # by the model
    "unusable",  # the answer fails the checks, and so does its repair
    "untrue",  # thrown away by `verify_with_truth`
    "budget",  # nothing left to spend
    "cancelled",  # the run ended
]
"""Why there is no label."""
FAILURE_KINDS: tuple[str, ...] = get_args(FailureKind)


FALLBACK = "fallback: "
"""How the source of an answer starts that another corrector gave after the budget was spent."""


class BudgetExhausted(RuntimeError):
    """The corrector's budget is spent and its owner wants the run to stop; the trainer saves and ends cleanly."""


@runtime_checkable
class Corrector(Protocol):
    """Judges a batch of steps, one answer per request, in order.

    Called off the main thread and from several threads at once, one call per vector step; the limit on requests in
    flight lives in here. What goes wrong with one request is that request's `failed` correction, never an exception:
    only `BudgetExhausted` may be raised, and what ends the run because no request could ever succeed (a rejected key).

    A rollout waits for its corrections only so long. Then it cancels its requests (`request.cancellation`), and a
    corrector that heeds that returns at once: what it has, and `failed("late")` for the rest. What comes later is
    thrown away.
    """

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]: ...


def failed(
    kind: FailureKind, detail: str = "", *, usage: Usage | None = None, latency: float = 0.0, source: str = ""
) -> Correction:
    """A correction that failed; its reason starts with `kind`, so that failures can be counted by cause."""
    reason = f"{kind}: {printable(detail)}" if detail else kind  # it is logged, and a server may have written it
    return Correction("failed", reason=reason, usage=usage or Usage(), latency=latency, source=source)


def failure_kind(correction: Correction) -> str | None:
    """The kind of a failed correction (`"other"` for a foreign corrector's own reasons); `None` if it didn't fail."""
    if correction.verdict != "failed":
        return None
    kind = (correction.reason or "").partition(":")[0]
    return kind if kind in FAILURE_KINDS else "other"


def request_digest(request: CorrectionRequest) -> str:
    """Content address of what a corrector may see: picture, words, thought, action, public state and rubric.

    Hidden truth (`request.info`) is not part of it.
    """
    image = np.ascontiguousarray(request.image)
    response = request.response
    words = [
        request.task.name,
        _plain(getattr(request.task, "rubric", None)),
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


class CorrectorWrapper:
    """A corrector around another: passes the optional members on."""

    def __init__(self, corrector: Corrector):
        self.corrector = corrector

    @property
    def identity(self) -> str:
        return identity_of(self.corrector)

    @property
    def exhausted(self) -> bool:
        return getattr(self.corrector, "exhausted", False)

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        return self.corrector.correct(requests)

    def check(self, task: Any) -> None:
        self._pass_on("check", task)

    def metrics(self) -> dict[str, float]:
        return self._pass_on("metrics") or {}

    def state_dict(self) -> dict[str, Any]:
        return self._pass_on("state_dict") or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._pass_on("load_state_dict", state)

    def close(self) -> None:
        self._pass_on("close")

    def reopen(self) -> None:
        self._pass_on("reopen")

    def _pass_on(self, name: str, *arguments: Any) -> Any:
        method = getattr(self.corrector, name, None)
        return None if method is None else method(*arguments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.corrector!r})"


def identity_of(corrector: Corrector) -> str:
    """What a corrector calls itself, else the name of its class."""
    return getattr(corrector, "identity", None) or type(corrector).__name__
