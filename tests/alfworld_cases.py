"""What the ALFWorld tests share: when to skip, the official environment, and a game on disk."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

needs_alfworld = [
    pytest.mark.alfworld,
    pytest.mark.skipif(
        importlib.util.find_spec("alfworld") is None, reason='needs the extra: pip install "trl-gtr[alfworld]"'
    ),
]

REAL_GAMES = Path(__file__).parents[2] / "shared" / "alfworld_games"
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
