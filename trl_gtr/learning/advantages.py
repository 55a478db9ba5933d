"""Advantage estimators, and the pure functions they are built from.

Notation: T rollout steps, N environments. One sample is one *environment step*, however many tokens its response has.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..config import GTRConfig
from ..distributed.presets import GAE_FIELDS, VALUE_FIELDS
from ..tasks.base import Task
from ..tasks.contract import Contract
from ..types import Rollout, Transition
from .group_advantages import Norm, episode_returns, gigpo, grpo, rloo
from .losses import same_shape

GROUP_FIELDS = ("group_size", "group_norm", "step_advantage_coef", "refill_groups")
"""Settings without effect in a run without groups."""
EQUAL = 1e-9
"""Returns of a group that differ by less are equal."""


class Values(NamedTuple):
    """The value head's predictions for one rollout, for estimators that need them."""

    own: Tensor
    """(steps,): values of each step's own observation."""
    final: Tensor
    """(steps,): values of the true last observation where `Transition.bootstrap` is set; 0 elsewhere."""
    last: Tensor
    """(environments,): values of the observation after the rollout."""


@dataclass(frozen=True)
class Advantages:
    """An estimator's results for one process's rollout, in rollout order."""

    advantages: Tensor
    """(steps,)."""
    returns: Tensor | None = None
    """(steps,): targets for the value head; `None` without one."""
    kept: Tensor | None = None
    """(steps,), bool: the steps to learn from; `None` keeps all."""
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Values to log; each name's mean is taken over all processes."""


class AdvantageEstimator(Contract):
    """Computes advantages from rewards and, if needed, values.

    The estimator decides how to use a format reward: as an ordinary reward, or as a bonus for its own step.
    """

    needs_values = False
    """Whether a value head is created, trained and used."""
    needs_groups = False
    """Whether it compares whole episodes that start in the same state."""

    @abstractmethod
    def __call__(self, rollout: Rollout, values: Values | None) -> Advantages:
        """Advantages of one process's rollout; `values` is `None` unless the estimator `needs_values`."""

    def normalize(self, advantages: Tensor, gather: Callable[[Any], list[Any]]) -> Tensor:
        """Normalise advantages for the loss, after a guide has shaped them; does nothing by default.

        Args:
            advantages: (steps,).
            gather: Collects a value from every process.
        """
        return advantages

    def teaches(self, group: Sequence[Sequence[Transition]]) -> bool:
        """Whether a group of whole episodes has anything to learn from. If not, it may be replaced by another."""
        return True

    def check(self, args: GTRConfig) -> None:
        """Raise a `ValueError` that says what to change if the settings don't suit the estimator."""
        name = type(self).__name__
        if not self.needs_values and args.value_warmup_updates > 0:
            raise ValueError(
                f"{name} trains no value head, so there is nothing to warm up: leave `value_warmup_updates` out."
            )
        if self.needs_groups and args.group_size < 2:
            raise ValueError(f"{name} compares the episodes of a group: set `group_size` to 2 or more.")
        if not self.needs_groups:
            _refuse(args, GROUP_FIELDS, f"is for groups, but {name} doesn't compare any")


@dataclass(frozen=True)
class GAE(AdvantageEstimator):
    """Generalized advantage estimation over environment steps, with a value head (GTR, RL4VLM).

    Args:
        gamma, lam: Discount γ and λ.
        reward_scale: Rewards and the format reward are multiplied by this.
        format_reward: Bonus for a valid response, added to its own step's advantage.
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
            # A truncation visible in the state (a cut, an over-long formula) is an ordinary end.
            terminated=grid([(t.terminated or t.truncated) and not t.bootstrap for t in steps]),
            truncated=grid([t.bootstrap for t in steps]),
            final_values=values.final.view(shape),
            last_values=values.last,
            gamma=self.gamma,
            lam=self.lam,
        )
        # After GAE and not in the returns: a bonus for every valid response must not reward long episodes.
        legal = _numbers([t.legal for t in steps], values.own)
        return Advantages(advantages.flatten() + self.format_reward * self.reward_scale * legal, returns.flatten())

    def normalize(self, advantages: Tensor, gather: Callable[[Any], list[Any]]) -> Tensor:
        """Over all processes' steps together."""
        return normalize_advantages(advantages, sum(gather(advantage_moments(advantages).cpu())), self.min_std)


@dataclass(frozen=True)
class GroupRelative(AdvantageEstimator):
    """Compares whole episodes that start in the same state; critic-free (GRPO, RLOO, GiGPO).

    A format reward is an ordinary reward of its step. Groups that teach nothing are left out of the loss: those whose
    returns are all equal, and those with an episode that was cut short or lost.

    Args:
        method: Which comparison, see `group_advantages`.
        group_size: Episodes per group.
        reward_scale: Rewards and the format reward are multiplied by this.
        format_reward: Reward for a valid response.
        norm: Whether to divide by the spread of the returns; not for RLOO.
        gamma, step_coef: γ and ω of GiGPO.
    """

    method: Literal["grpo", "rloo", "gigpo"]
    group_size: int
    reward_scale: float
    format_reward: float
    norm: Norm
    gamma: float
    step_coef: float
    needs_groups = True

    @classmethod
    def from_config(cls, args: GTRConfig, reward_scale: float) -> GroupRelative:
        method: Any = args.advantage_estimator
        norm: Any = args.group_norm
        if norm == "published":
            norm = "std" if method == "grpo" else "mean"
        sizes = args.group_size, reward_scale, args.format_reward
        return cls(method, *sizes, norm, args.gamma, args.step_advantage_coef)

    def check(self, args: GTRConfig) -> None:
        super().check(args)
        _refuse(args, VALUE_FIELDS, f"is for a value head, but {self.method!r} trains none")
        _refuse(args, GAE_FIELDS, f"is for 'gae', but the run uses {self.method!r}")
        if self.method != "gigpo":
            _refuse(args, ("gamma",), f"is for 'gae' and 'gigpo': {self.method!r} doesn't discount")
            _refuse(args, ("step_advantage_coef",), f"is for 'gigpo', but the run uses {self.method!r}")
        if self.method == "rloo":
            _refuse(args, ("group_norm",), "is for 'grpo' and 'gigpo': 'rloo' never divides")

    def __call__(self, rollout: Rollout, values: Values | None) -> Advantages:
        steps = rollout.transitions
        advantages, kept = torch.zeros(len(steps)), torch.zeros(len(steps), dtype=torch.bool)
        metrics: dict[str, list[float]] = defaultdict(list)
        lanes: set[int] = set()
        for group in in_groups(steps, self.group_size):
            lane = steps[group[0][0]].env_index // self.group_size
            metrics["groups/refilled"].append(lane in lanes)
            lanes.add(lane)
            episodes = [[steps[i] for i in episode] for episode in group]
            whole = len(group) == self.group_size and all(_is_whole(episode) for episode in episodes)
            metrics["groups/cut"].append(not whole)
            if not whole:
                continue
            teaches = self.teaches(episodes)
            metrics["groups/dead"].append(not teaches)
            if teaches:
                chosen = [i for episode in group for i in episode]
                advantages[chosen] = torch.cat(self._compare(episodes)).float()
                kept[chosen] = True
        return Advantages(advantages, kept=kept, metrics=metrics)

    def teaches(self, group: Sequence[Sequence[Transition]]) -> bool:
        """Whether all episodes are whole and their returns differ."""
        if not all(_is_whole(episode) for episode in group):
            return False
        returns = episode_returns(self._rewards(group))
        return not bool(returns.max() - returns.min() <= EQUAL)  # NaN is no equality: the update must see it

    def _compare(self, group: Sequence[Sequence[Transition]]) -> list[Tensor]:
        rewards = self._rewards(group)
        if self.method == "grpo":
            return grpo(rewards, self.norm)
        if self.method == "rloo":
            return rloo(rewards)
        states = [[_state(step) for step in episode] for episode in group]
        return gigpo(rewards, states, self.gamma, self.step_coef, self.norm)

    def _rewards(self, group: Sequence[Sequence[Transition]]) -> list[Tensor]:
        earned = [[step.reward + self.format_reward * step.legal for step in episode] for episode in group]
        return [torch.tensor(rewards, dtype=torch.float64) * self.reward_scale for rewards in earned]


def in_groups(steps: Sequence[Transition], group_size: int) -> list[list[list[int]]]:
    """Indices of the steps by group and episode. Environments 0 to G - 1 play a group, the next G another."""
    found: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, step in enumerate(steps):
        found[step.env_index // group_size, step.episode][step.env_index].append(i)
    return [list(group.values()) for group in found.values()]


def _is_whole(episode: Sequence[Transition]) -> bool:
    last = episode[-1]
    return (last.terminated or last.truncated) and not (last.final_info or {}).get("worker_lost", False)


def _state(step: Transition) -> tuple[str, tuple[int, ...], bytes]:
    """Equal for steps with the same prompt and image. Earlier turns of the chat are not compared."""
    return str(step.prompt), step.image.shape, hashlib.blake2b(step.image.tobytes()).digest()


def _refuse(args: GTRConfig, names: Sequence[str], reason: str) -> None:
    """Raise if one of the settings is not its default."""
    for name in names:
        known = GTRConfig.__dataclass_fields__[name]
        usual = known.default if known.default_factory is MISSING else known.default_factory()
        if getattr(args, name) != usual:
            raise ValueError(f"`{name}` {reason}: leave `{name}` out, or the preset that sets it.")


def choose_estimator(given: AdvantageEstimator | None, args: GTRConfig, task: Task) -> AdvantageEstimator:
    """The given estimator, or the one that the settings name; validated."""
    kind = GAE if args.advantage_estimator == "gae" else GroupRelative
    estimator = given or kind.from_config(args, args.reward_scale or float(task.reward_scale))
    AdvantageEstimator.ensure(estimator).check(args)
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

    `δ_t = r_t + γ V(o_{t+1}) − V(o_t)` and `Â_t = δ_t + γλ Â_{t+1}`, where the end of an episode stops the recursion:

    - `terminated`: nothing follows; the target is the reward alone.
    - `truncated`: the episode stopped but the state does not show why, so the value of its true final observation
      stands for what would have followed. A truncation visible in the state (a formula that is too long, an
      episode cut by the task; `info["bootstrap"] = False`) is passed as `terminated`.
    - Otherwise the next step's value follows, and `last_values` after the last step.

    Args:
        rewards: (T, N) reward of each step.
        values: (T, N) value of each step's own observation.
        terminated: (T, N) bool. Takes precedence if both flags are set.
        truncated: (T, N) bool.
        final_values: (T, N) value of the last observation of a truncated episode; ignored elsewhere.
        last_values: (N,) value of the observation after the rollout; ignored where the last step ended an episode.
        gamma: discount γ.
        lam: λ of GAE.

    Returns:
        advantages (T, N) and returns (T, N), the value function's targets `Â_t + V(o_t)`.
    """
    _check_rollout(rewards, values, terminated, truncated, final_values, last_values)
    next_values = torch.cat([values[1:], last_values[None]])
    # `where`, not a product with a mask: ignored values may be NaN.
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

    Summed over ranks, they give the exact moments of the whole rollout, for [`normalize_advantages`].
    """
    # Apple GPUs don't support float64; elsewhere the sums stay on the device, where ranks can reduce them.
    wide = (advantages.detach().cpu() if advantages.device.type == "mps" else advantages.detach()).double()
    return torch.stack([wide.new_tensor(wide.numel()), wide.sum(), wide.square().sum()])


def normalize_advantages(advantages: Tensor, moments: Tensor, min_std: float) -> Tensor:
    """`(Â − mean) / max(std, min_std)`, same shape as `advantages`.

    The floor avoids amplifying noise when nearly all episodes went the same way.

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
