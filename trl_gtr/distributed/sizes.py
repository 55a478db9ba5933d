"""How the sizes of an update must divide each other, with suggestions where they don't."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)


def require(condition: bool, message: str) -> None:
    """Raise a `ValueError` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def episode_count(given: int | str | None, name: str) -> int | Literal["all"]:
    """A number of episodes, or "all"; both may be strings from the command line."""
    if given == "all":
        return "all"
    try:
        count = int(given or 0)
    except ValueError:
        raise ValueError(f"{name} must be a number or 'all', got {given!r}.") from None
    require(count >= 1, f"{name} must be at least 1, or 'all', got {given}.")
    return count


@dataclass(frozen=True)
class Sizes:
    """The sizes of one update.

    Args:
        num_envs, rollout_steps: Environments over all processes, and steps of each.
        per_device: Samples per forward pass of one process.
        processes: Number of processes.
        group_size: Environments of a group; 1 without groups. Episodes of a group are as long as they are, so that a
            rollout needs no particular size.
    """

    num_envs: int
    rollout_steps: int
    per_device: int
    processes: int
    group_size: int = 1

    @property
    def batch(self) -> int:
        """Samples per forward pass over all processes."""
        return self.per_device * self.processes

    @property
    def rollout(self) -> int:
        return self.num_envs * self.rollout_steps

    def mini_batch(self, given: int | None, accumulation_steps: int | None) -> int:
        """The mini-batch size over all processes: as given, or from the accumulation steps."""
        size = given or self.batch * (accumulation_steps or 1)
        self._check_environments()
        require(
            size % self.batch == 0,
            f"`mini_batch_size` = {size} is not a multiple of per_device_train_batch_size × processes = "
            f"{self.per_device} × {self.processes} = {self.batch}. {self._sizes_that_fit(size)}",
        )
        require(
            self.group_size > 1 or self.rollout % size == 0,
            f"An update has num_envs × rollout_steps = {self.rollout} steps, which is not a multiple of the "
            f"mini-batch size over all processes, {size}. {self._sizes_that_fit(size)}",
        )
        require(
            accumulation_steps in (None, size // self.batch),
            f"`mini_batch_size` = {size} needs {size // self.batch} accumulation steps of {self.per_device} on each "
            f"of {self.processes} processes, but `gradient_accumulation_steps` = {accumulation_steps} was given. "
            "Leave it out: it is derived from the mini-batch size.",
        )
        if size == self.rollout:
            logger.warning(
                "The mini-batch is the whole rollout of %d steps, so each PPO epoch takes a single optimizer step. "
                "Set a smaller `mini_batch_size` (paper: 128), or collect more steps per update.",
                size,
            )
        return size

    def _check_environments(self) -> None:
        require(
            self.num_envs % self.processes == 0,
            f"`num_envs` = {self.num_envs} must be a multiple of the number of processes, {self.processes}."
            + self._other_shape(),
        )
        unit = self.group_size * self.processes
        fitting = max(unit, round(self.num_envs / unit) * unit)
        require(
            self.num_envs % unit == 0,
            f"`num_envs` = {self.num_envs} must be a multiple of group_size × processes = {self.group_size} × "
            f"{self.processes}, because a group is played by one process. Set `num_envs` = {fitting}, for example.",
        )

    def _other_shape(self) -> str:
        """Suggest collecting the same number of steps with one environment per process."""
        if self.rollout % self.processes:
            return ""
        steps = self.rollout // self.processes
        return f" `num_envs` = {self.processes} with `rollout_steps` = {steps} collects just as many steps."

    def _sizes_that_fit(self, wanted: int) -> str:
        """Suggest the nearest mini-batch sizes that divide a rollout and are multiples of the batch."""
        sizes = [size for size in range(self.batch, self.rollout + 1, self.batch) if self.rollout % size == 0]
        if not sizes:
            return "No mini-batch fits: change `per_device_train_batch_size`, `num_envs` or `rollout_steps`."
        nearest = sorted(sorted(sizes, key=lambda size: abs(size - wanted))[:4])
        return f"A `mini_batch_size` of {', '.join(map(str, nearest))} would fit; or change the other sizes."
