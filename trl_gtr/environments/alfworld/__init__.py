"""ALFWorld: household tasks as a gymnasium environment, `trl_gtr/ALFWorld-v0`.

Importing this package needs only numpy and Pillow; playing needs `pip install "trl-gtr[alfworld]"`.
`python -m trl_gtr.environments.alfworld --check` reports what is installed and what is missing.
"""

from __future__ import annotations

from .commands import project
from .env import ALFWorldEnv
from .games import Game, find_games
from .goals import TASK_TYPES

__all__ = ["TASK_TYPES", "ALFWorldEnv", "Game", "find_games", "project"]
