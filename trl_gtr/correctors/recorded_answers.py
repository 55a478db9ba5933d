"""Reads an answer from a file, validating it like a new one: the file may be damaged or come from someone else, and
its answer becomes a label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_args

from ..types import Correction, CorrectionRequest, Usage, Verdict
from .answers import check_thought


def read(values: Any, request: CorrectionRequest) -> Correction:
    """Build a correction from JSON values; raises a `ValueError` if they aren't a valid one for this request."""
    if isinstance(values, Mapping):  # version 0.1 lacks two keys; its failures count as "other"
        values = {"failure": None, "fallback": False, **values}
    _check_keys(values, Correction, "it")
    _check_keys(values["usage"], Usage, "its usage")
    for name, value in {**values["usage"], "latency": values["latency"]}.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < 1e15:
            raise ValueError(f"{name} is not a valid amount: {value!r:.50}")
    for name in ("action", "target", "reason"):
        if not isinstance(values[name], str | None):
            raise ValueError(f"{name} is not a string")
    if not isinstance(values["source"], str):
        raise ValueError("source is not a string")
    if not isinstance(values["fallback"], bool):
        raise ValueError("fallback is neither true nor false")
    _check_label(values, request)
    return Correction(**{**values, "usage": Usage(**values["usage"])})


def _check_keys(values: Any, kind: type, what: str) -> None:
    names = {field.name for field in fields(kind)}
    if not isinstance(values, Mapping) or set(values) != names:
        raise ValueError(f"{what} must have exactly the keys {', '.join(sorted(names))}")


def _check_label(values: Mapping[str, Any], request: CorrectionRequest) -> None:
    """Check the training label: the thought must fit the task's format, and the action must be legal in this step."""
    task, verdict, thought, action = request.task, values["verdict"], values["thought"], values["action"]
    if verdict not in get_args(Verdict):
        raise ValueError(f"unknown verdict: {verdict!r:.50}")
    if (verdict == "corrected") != (thought is not None):
        raise ValueError("verdict 'corrected' needs a thought, and other verdicts must have none")
    if thought is not None and not isinstance(thought, Mapping):
        raise ValueError("its thought is not an object")
    if thought is not None:
        check_thought(thought, task)
    if action is None or (verdict == "right" and action == request.response.action):
        return
    if task.to_env_action(replace(request.response, action=action, error=None), request.info) is None:
        raise ValueError(f"not a legal action: {action!r:.50}")
