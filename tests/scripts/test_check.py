"""`trl-gtr check`: every extra for users is looked at."""

from __future__ import annotations

import importlib.metadata
import tomllib

import pytest
from paths import ROOT

from trl_gtr.scripts import check

FOR_DEVELOPERS = {"test", "docs", "dev"}


def test_every_extra_for_users_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    declared = [f'{each}; extra == "{extra}"' for extra, packages in extras.items() for each in packages]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=2", *declared])
    found = check._requirements()
    assert [each.name for each in found[""]] == ["torch"]
    own_checks = {"alfworld", "vllm"}  # vLLM's builds have different names, and the engine looks for the module
    assert set(found) == {"", *extras} - FOR_DEVELOPERS - own_checks
    assert [each.name for each in found["minigrid"]] == ["minigrid"]
