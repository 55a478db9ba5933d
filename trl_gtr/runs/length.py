"""How long a run lasts, and how fast its learning-rate schedule goes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import GTRConfig


@dataclass(frozen=True)
class RunLength:
    """The length of a run. Rollouts of whole episodes vary in size, so such a run ends by environment steps.

    Args:
        args: The settings.
        varies: Whether rollouts vary in size.
    """

    args: GTRConfig
    varies: bool

    def updates(self, done: int, env_steps: int) -> int:
        """Updates in the whole run, after `done` updates with `env_steps` steps; expects more of the same."""
        if not self.varies or not env_steps:
            return self.args.num_updates
        return done + math.ceil(max(0, self.args.total_env_steps - env_steps) / env_steps * done)

    def schedule_steps(self, before: int, after: int) -> int:
        """Steps of the schedule in an update, given the environment steps before and after it."""
        if not self.varies:
            return 1
        updates, total = self.args.num_updates, self.args.total_env_steps
        return updates * min(after, total) // total - updates * min(before, total) // total
