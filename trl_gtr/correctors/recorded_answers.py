"""Reads an answer from a file, and believes no more of it than of a new one: a file may be damaged or written by
somebody else, and its answer becomes a label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_args

from ..types import Correction, CorrectionRequest, Usage, Verdict
from .answers import check_thought


def read(values: Any, request: CorrectionRequest) -> Correction:
    """The correction that these JSON values are; a `ValueError` that says why they are none for this request."""
    if isinstance(values, Mapping):  # those of version 0.1 lack two keys; a failure of theirs counts as "other"
        values = {"failure": None, "fallback": False, **values}
    _check_keys(values, Correction, "it")
    _check_keys(values["usage"], Usage, "its usage")
    for name, value in {**values["usage"], "latency": values["latency"]}.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < 1e15:
            raise ValueError(f"{name} is no amount: {value!r:.50}")
    for name in ("action", "target", "reason"):
        if not isinstance(values[name], str | None):
            raise ValueError(f"{name} is no text")
    if not isinstance(values["source"], str):
        raise ValueError("source is no text")
    if not isinstance(values["fallback"], bool):
        raise ValueError("fallback is neither true nor false")
    _check_label(values, request)
    return Correction(**{**values, "usage": Usage(**values["usage"])})


def _check_keys(values: Any, kind: type, what: str) -> None:
    names = {field.name for field in fields(kind)}
    if not isinstance(values, Mapping) or set(values) != names:
        raise ValueError(f"{what} must have exactly the keys {', '.join(sorted(names))}")


def _check_label(values: Mapping[str, Any], request: CorrectionRequest) -> None:
    """What may be learned from: a thought in the task's format, and an action that is legal in this step."""
    task, verdict, thought, action = request.task, values["verdict"], values["thought"], values["action"]
    if verdict not in get_args(Verdict):
        raise ValueError(f"no such verdict: {verdict!r:.50}")
    if (verdict == "corrected") != (thought is not None):
        raise ValueError("a thought belongs to a correction, and to nothing else")
    if thought is not None and not isinstance(thought, Mapping):
        raise ValueError("its thought is no object")
    if thought is not None:
        check_thought(thought, task)
    if action is None or (verdict == "right" and action == request.response.action):
        return
    if task.to_env_action(replace(request.response, action=action, error=None), request.info) is None:
        raise ValueError(f"no legal action: {action!r:.50}")
