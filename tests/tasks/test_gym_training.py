"""A run on a plain gymnasium environment: train, resume, evaluate, report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from launched import steady
from toy import COLOURS, quiet_config

from trl_gtr import ExpertCorrector, Field, GTRTrainer, GymTask, ThoughtFormat
from trl_gtr.scripts.train import train_and_report

# The toy model only knows colours, so the four moves are named after them.
DOWN, RIGHT = list(COLOURS)[1:3]
PATH = {0: DOWN, 4: DOWN, 8: RIGHT, 9: DOWN, 13: RIGHT, 14: RIGHT}


def expert(info: Mapping[str, Any]) -> tuple[dict[str, str], str] | None:
    move = PATH.get(info["observation"])
    return ({"thoughts": f"it is {move}"}, move) if move else None


def make_trainer(model: str, folder: Path, **settings: Any) -> GTRTrainer:
    task = GymTask(
        "FrozenLake-v1",
        actions=list(COLOURS),
        env_kwargs={"is_slippery": False, "max_episode_steps": 6},
        format=ThoughtFormat([Field("thoughts", "text", "what you see")]),
        expert=expert,
    )
    saved = {"save_strategy": "steps", "save_steps": 1, "eval_episodes": 2, "overwrite": False}
    return GTRTrainer(model, quiet_config(folder, **saved, **settings), task, ExpertCorrector())


def test_a_run_on_a_plain_environment(toy_checkpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    whole = make_trainer(toy_checkpoint, tmp_path / "whole")
    assert whole.train().global_step == 2
    assert whole.state.log_history[-1]["buffer/size"] > 0
    whole.close()

    checkpoint = tmp_path / "whole" / "checkpoint-1"
    resumed = make_trainer(toy_checkpoint, tmp_path / "resumed", resume_from_checkpoint=str(checkpoint))
    (report,) = train_and_report(resumed, {"lake": resumed.task}).values()
    assert resumed.state.global_step == 2
    assert steady(resumed.state.log_history)[:2] == steady(whole.state.log_history)[:2]
    assert (report.task, report.complete, len(report.episodes)) == ("gym:FrozenLake-v1", True, 2)
    page = (tmp_path / "resumed" / "report.html").read_text("utf-8")
    assert "gym:FrozenLake-v1" in page
