"""The games as gymnasium environments; needs only numpy and Pillow, not torch.

Importing this package registers `gym_cards/Points24-v0`, `gym_cards/EZPoints-v0`, `gym_cards/NumberLine-v0` and
`gym_cards/Blackjack-v0`, unless the original `gym_cards` already did; `trl_gtr/Sokoban-v0`;
`trl_gtr/FrozenLake-v0`; and `trl_gtr/ALFWorld-v0`, which requires `pip install "trl-gtr[alfworld]"`.
"""

from __future__ import annotations

import gymnasium as gym

from .cards.blackjack import BlackjackEnv
from .cards.ezpoints import EZPointsEnv
from .cards.number_line import NumberLineEnv
from .cards.points24 import Points24Env
from .cards.text_observation import TextObservation
from .grids.sokoban import SokobanEnv

__all__ = ["BlackjackEnv", "EZPointsEnv", "NumberLineEnv", "Points24Env", "SokobanEnv", "TextObservation"]

_ENTRY_POINTS = {
    "gym_cards/Points24-v0": "trl_gtr.environments.cards.points24:Points24Env",
    "gym_cards/EZPoints-v0": "trl_gtr.environments.cards.ezpoints:EZPointsEnv",
    "gym_cards/NumberLine-v0": "trl_gtr.environments.cards.number_line:NumberLineEnv",
    "gym_cards/Blackjack-v0": "trl_gtr.environments.cards.blackjack:BlackjackEnv",
    "trl_gtr/Sokoban-v0": "trl_gtr.environments.grids.sokoban:SokobanEnv",
}

for _id, _entry_point in _ENTRY_POINTS.items():
    if _id not in gym.registry:
        gym.register(_id, entry_point=_entry_point, max_episode_steps=300)

if "trl_gtr/ALFWorld-v0" not in gym.registry:
    gym.register("trl_gtr/ALFWorld-v0", entry_point="trl_gtr.environments.alfworld:ALFWorldEnv", max_episode_steps=50)

if "trl_gtr/FrozenLake-v0" not in gym.registry:
    _LAKE = "trl_gtr.environments.grids.frozen_lake:FrozenLakeMapsEnv"
    gym.register("trl_gtr/FrozenLake-v0", entry_point=_LAKE, max_episode_steps=100)
