"""What the ALFWorld tests share: when to skip, the official environment, and a game on disk."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from paths import SHARED

needs_alfworld = [
    pytest.mark.alfworld,
    pytest.mark.skipif(
        importlib.util.find_spec("alfworld") is None, reason='needs the extra: pip install "trl-gtr[alfworld]"'
    ),
]

REAL_GAMES = SHARED / "alfworld_games"
needs_real_games = pytest.mark.skipif(not REAL_GAMES.is_dir(), reason="needs the folder of real ALFWorld games")


def real_game(name: str) -> Path:
    """The file of a real game, by the beginning of its folder's name."""
    return next((REAL_GAMES / "json_2.1.1").glob(f"*/{name}*/*/game.tw-pddl"))


def save_game(folder: Path, task_type: str, seed: int) -> Path:
    """A bundled game as ALFWorld's own data look on disk."""
    from trl_gtr.environments.alfworld.generator import make_game

    place = folder / f"{task_type}-Thing-None-Place-{seed}" / f"trial_{seed}"
    place.mkdir(parents=True)
    (place / "traj_data.json").write_text(json.dumps({"task_type": task_type}))
    (place / "game.tw-pddl").write_text(json.dumps(make_game(task_type, seed)))
    return place / "game.tw-pddl"


def official_env(folder: Path, steps: int = 1000) -> Any:
    """alfworld's own `AlfredTWEnv` over the games in a folder, one at a time."""
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    config = {
        "dataset": {"data_path": str(folder), "num_train_games": -1},
        "env": {
            "goal_desc_human_anns_prob": 0.0,
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "expert_type": "handcoded",
        },
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": steps}},
    }
    return AlfredTWEnv(config, train_eval="train").init_env(batch_size=1)


def without_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep whatever this machine has of ALFWorld's data out of a test."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("alfworld.info")  # sets the variable to its default, once
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setattr("trl_gtr.environments.alfworld.games.DEFAULT_DATA", str(tmp_path / "none"))


COMMANDS = [
    *("examine countertop 1", "examine mug 1", "go to cabinet 1", "go to cabinet 10", "go to cabinet 2"),
    *("go to drawer 1", "go to drawer 10", "go to microwave 1", "help", "inventory", "look"),
    *("take mug 1 from countertop 1", "take plate 2 from countertop 1"),
]
INFO: dict[str, Any] = {
    "task": "heat some mug and put it in cabinet",
    "task_type": "pick_heat_then_place_in_recep",
    "goal": {"object": "mug", "receptacle": "cabinet", "toggle": ""},
    "observation_text": "On the countertop 1, you see a mug 1, and a plate 2.",
    "admissible_commands": COMMANDS,
    "won": False,
    "goal_condition_success_rate": 0.0,
    "previous_actions": ["go to drawer 1", "go to countertop 1"],
    "legal": True,
    "view": {
        "room": ["cabinet 1", "cabinet 2", "cabinet 10", "countertop 1", "drawer 1", "drawer 10", "microwave 1"],
        "here": [["countertop 1", "", ["mug 1", "plate 2"]]],
        "holding": "",
        "states": [],
    },
    "extra.gamefile": "bundled:x/1",
    "extra.expert_plan": ["take mug 1 from countertop 1", "go to microwave 1"],
    "subgoal": ["take", "mug", ""],
}
RIGHT = "I see mug 1 and plate 2. My hand is empty. My sub-goal is to take the mug, so I take mug 1 from countertop 1."
