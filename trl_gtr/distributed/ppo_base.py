"""Selects the PPO trainer to extend: TRL's if the installed TRL has one, otherwise ours with the same interface.

TRL removed `trl.experimental.ppo` in 1.13. Both modules export the same four names, so the rest of the library needn't
know which TRL is installed.
"""

from __future__ import annotations

import importlib.util
import warnings


def trl_has_ppo() -> bool:
    """Whether the installed TRL still ships `trl.experimental.ppo`."""
    with warnings.catch_warnings():
        # TRL warns that its experimental API may change. This file handles that, so users needn't see the warning.
        warnings.filterwarnings("ignore", message=".*trl.experimental.*")
        return importlib.util.find_spec("trl.experimental.ppo") is not None


if trl_has_ppo():
    from .ppo_trl import OnlineTrainerState, PPOBase, PPOConfig, PPOTrainer
else:
    from .ppo_own import OnlineTrainerState, PPOBase, PPOConfig, PPOTrainer

__all__ = ["OnlineTrainerState", "PPOBase", "PPOConfig", "PPOTrainer", "trl_has_ppo"]
