"""What a step is worth: advantage estimators, and the pure functions that they are made of.

Letters: T rollout steps, N environments. One sample is one *environment step*, however many tokens its response has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import GTRConfig
from ..tasks.base import Task
from ..types import Rollout
from .losses import same_shape


class Values(NamedTuple):
    """The value head's answers about one rollout, for an estimator that needs them."""

    own: Tensor
    """(steps,): of each step's own observation."""
    final: Tensor
    """(steps,): of the true last observation where `Transition.bootstrap` asks for it; 0 elsewhere."""
    last: Tensor
    """(environments,): of the observation after the rollout."""


@dataclass(frozen=True)
class Advantages:
    """What an estimator says about the steps of one process's rollout, in the rollout's order."""

    advantages: Tensor
    """(steps,)."""
    returns: Tensor | None = None
    """(steps,): targets of the value head; `None` where there is none to train."""
    kept: Tensor | None = None
    """(steps,), bool: the steps to learn from; `None` keeps all."""
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """What to log: the mean of each name's numbers, over all processes."""


class AdvantageEstimator(ABC):
    """From rewards, and values if it needs them, to advantages.

    A format reward is the estimator's business: whether it is a reward like any other or a bonus of its own step.
    """

    needs_values = False
    """Whether a value head is made, trained and asked."""
    needs_groups = False
    """Whether it compares whole episodes that begin in the same state."""

    @abstractmethod
    def __call__(self, rollout: Rollout, values: Values | None) -> Advantages:
        """Advantages of one process's rollout; `values` is `None` unless the estimator `needs_values`."""

    def normalize(self, advantages: Tensor, gather: Callable[[Any], list[Any]]) -> Tensor:
        """Advantages as the loss takes them, after a guide has shaped them; by default as they are.

        Args:
            advantages: (steps,).
            gather: Gives every process's value for one's own.
        """
        return advantages

    def check(self, args: GTRConfig) -> None:
        """Raise a `ValueError` that says what to change if these settings don't fit the estimator."""
        if not self.needs_values and args.value_warmup_updates > 0:
            raise ValueError(
                f"{type(self).__name__} trains no value head, so that there is nothing to warm up: leave "
                "`value_warmup_updates` out."
            )


@dataclass(frozen=True)
class GAE(AdvantageEstimator):
    """Generalized advantage estimation over environment steps, with a value head (GTR, RL4VLM).

    Args:
        gamma, lam: Discount γ and λ.
        reward_scale: Rewards and the format reward are multiplied by this.
        format_reward: Bonus of a valid response, added to its own step's advantage.
        min_std: Floor of the divisor in [`normalize_advantages`].
    """

    gamma: float
    lam: float
    reward_scale: float
    format_reward: float
    min_std: float
    needs_values = True

    @classmethod
    def from_config(cls, args: GTRConfig, reward_scale: float) -> GAE:
        return cls(args.gamma, args.lam, reward_scale, args.format_reward, args.min_advantage_std)

    def __call__(self, rollout: Rollout, values: Values | None) -> Advantages:
        if values is None:
            raise ValueError("GAE needs values: score the rollout with a value head.")
        steps, shape = rollout.transitions, (-1, len(rollout.last_images))

        def grid(flags: Sequence[bool]) -> Tensor:
            return torch.tensor(flags, device=values.own.device).view(shape)

        advantages, returns = gae(
            rewards=_numbers([t.reward for t in steps], values.own).view(shape) * self.reward_scale,
            values=values.own.view(shape),
            # A truncation that the state shows (a cut, an over-long formula) is an end like any other.
            terminated=grid([(t.terminated or t.truncated) and not t.bootstrap for t in steps]),
            truncated=grid([t.bootstrap for t in steps]),
            final_values=values.final.view(shape),
            last_values=values.last,
            gamma=self.gamma,
            lam=self.lam,
        )
        # After GAE and not in the returns: a bonus for every valid response must not pay for long episodes.
        legal = _numbers([t.legal for t in steps], values.own)
        return Advantages(advantages.flatten() + self.format_reward * self.reward_scale * legal, returns.flatten())

    def normalize(self, advantages: Tensor, gather: Callable[[Any], list[Any]]) -> Tensor:
        """Over all processes' steps together."""
        return normalize_advantages(advantages, sum(gather(advantage_moments(advantages).cpu())), self.min_std)


def choose_estimator(given: AdvantageEstimator | None, args: GTRConfig, task: Task) -> AdvantageEstimator:
    """The estimator that was given, or GAE with these settings; checked."""
    estimator = given or GAE.from_config(args, args.reward_scale or float(task.reward_scale))
    estimator.check(args)
    if estimator.needs_groups:
        raise ValueError(
            f"{type(estimator).__name__} compares episodes that begin in the same state, and the collector doesn't "
            "play such groups. Use an estimator that needs none, such as GAE."
        )
    return estimator


def _numbers(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    last_values: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over environment steps (Schulman et al., 2016).

    `δ_t = r_t + γ V(o_{t+1}) − V(o_t)` and `Â_t = δ_t + γλ Â_{t+1}`, where an episode's end cuts the recursion:

    - `terminated`: nothing follows, the target is the reward alone.
    - `truncated`: the episode stopped but the state does not show why, so the value of its true final observation
      stands for what would have followed. A truncation that the state does show (a formula that is too long, an
      episode cut by the task; `info["bootstrap"] = False`) is passed as `terminated`.
    - Otherwise the next step's value follows, and `last_values` after the last step.

    Args:
        rewards: (T, N) reward of each step.
        values: (T, N) value of each step's own observation.
        terminated: (T, N) bool. Wins where both flags are set.
        truncated: (T, N) bool.
        final_values: (T, N) value of the last observation of a truncated episode; read nowhere else.
        last_values: (N,) value of the observation after the rollout; not read where its last step ended an episode.
        gamma: discount γ.
        lam: λ of GAE.

    Returns:
        advantages (T, N) and returns (T, N), the value function's targets `Â_t + V(o_t)`.
    """
    _check_rollout(rewards, values, terminated, truncated, final_values, last_values)
    next_values = torch.cat([values[1:], last_values[None]])
    # `where`, not a product with a mask: the values that are not read may be NaN.
    next_values = torch.where(truncated, final_values, next_values)
    next_values = torch.where(terminated, torch.zeros_like(values), next_values)
    deltas = rewards + gamma * next_values - values

    goes_on = ~(terminated | truncated)
    advantages = torch.zeros_like(deltas)
    following = torch.zeros_like(last_values)
    for t in reversed(range(len(rewards))):
        following = deltas[t] + torch.where(goes_on[t], gamma * lam * following, 0.0)
        advantages[t] = following
    return advantages, advantages + values


def advantage_moments(advantages: Tensor) -> Tensor:
    """Count, sum and sum of squares of `advantages` (any shape), as float64 of shape (3,).

    Summed over the ranks they give the exact moments of all ranks' rollout, for [`normalize_advantages`].
    """
    # Apple's GPUs don't know float64; everywhere else the sums stay where the ranks can reduce them.
    wide = (advantages.detach().cpu() if advantages.device.type == "mps" else advantages.detach()).double()
    return torch.stack([wide.new_tensor(wide.numel()), wide.sum(), wide.square().sum()])


def normalize_advantages(advantages: Tensor, moments: Tensor, min_std: float) -> Tensor:
    """`(Â − mean) / max(std, min_std)`, same shape as `advantages`.

    The floor keeps a rollout in which nearly every episode went the same way from being blown up into noise.

    Args:
        advantages: any shape.
        moments: (3,) the [`advantage_moments`] summed over all ranks.
        min_std: floor of the divisor, in units of the scaled rewards.
    """
    if min_std <= 0:
        raise ValueError(f"`min_std` must be positive, got {min_std}.")
    count, total, squares = moments.tolist()
    mean = total / count
    std = max(squares / count - mean**2, 0.0) ** 0.5
    return (advantages - mean) / max(std, min_std)


def _check_rollout(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    last_values: Tensor,
) -> None:
    same_shape(rewards=rewards, values=values, terminated=terminated, truncated=truncated, final_values=final_values)
    if rewards.ndim != 2 or last_values.shape != rewards.shape[1:]:
        raise ValueError(
            "gae takes rewards of shape (T, N) and last_values of shape (N,), "
            f"got {tuple(rewards.shape)} and {tuple(last_values.shape)}."
        )
    if terminated.dtype != torch.bool or truncated.dtype != torch.bool:
        raise ValueError("`terminated` and `truncated` must be bool tensors: convert them with `.bool()`.")
