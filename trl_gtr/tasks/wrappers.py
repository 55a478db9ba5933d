"""What `make_env` puts around a card game: an end for hopeless episodes, a pool of hands, infos that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import gymnasium as gym

from .points.rules import PointsRules

_SUITS = "HSDC"


class CutHopeless(gym.Wrapper):
    """Ends episodes that can't be won any more, and marks ends that have no future for the advantages.

    - *Dead end*: no completion of the formula reaches the target. The step pays -1 if it earned 0 itself.
    - *Unsolvable deal*: no formula at all. Ended after the first step and not punished: no action was at fault.

    Both set `truncated`, `info["cut"]` and `info["bootstrap"] = False`; a reward just earned is never overwritten.
    `cut=False` switches them off. An over-long formula, which the game itself truncates, always gets the mark: the
    state shows the limit, so its value must not be bootstrapped. Infos are handed out as copies.
    """

    def __init__(self, env: gym.Env, rules: PointsRules, *, cut: bool = True) -> None:
        super().__init__(env)
        self.rules = rules
        self.cut = cut
        self._elements = 0
        self._solvable_deal = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._elements = len(info["Formula"])
        self._solvable_deal = not self.cut or self.rules.reachable(info, from_start=True)
        return observation, _copied(info)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        info = _copied(info)
        over_long = self._elements > self.rules.max_elements
        self._elements = len(info["Formula"])
        if terminated:
            return observation, reward, terminated, truncated, info
        if truncated:
            if over_long:
                info["bootstrap"] = False
        elif self.cut and not self._solvable_deal:
            truncated = True
            info |= {"cut": "unsolvable deal", "bootstrap": False}
        elif self.cut and not self.rules.reachable(info):
            truncated = True
            info |= {"cut": "dead end", "bootstrap": False}
            reward = -1.0 if reward == 0 else reward
        return observation, reward, terminated, truncated, info


class InfoCopies(gym.Wrapper):
    """Hands out infos whose lists stay as they are."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, _copied(info)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, _copied(info)


class HandPool(gym.Wrapper):
    """Deals from a fixed list of hands, chosen with the environment's own seeded generator.

    A card is a name ("H4": suit and rank, the ten is T) or a rank alone ("4", "10", "K"), which gets a new suit with
    every deal. `reset(options={"hand": 3})` deals the fourth of the list; `{"cards": …}` still sets any hand.
    """

    def __init__(self, env: gym.Env, hands: Sequence[Sequence[str]]) -> None:
        super().__init__(env)
        self.hands = [list(hand) for hand in hands]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options and "cards" in options:
            return self.env.reset(seed=seed, options=options)
        if seed is not None:
            self.env.reset(seed=seed)  # seeds the generator that chooses the hand
        generator = self.env.unwrapped.np_random
        others = dict(options or {})
        place = others.pop("hand", None)
        if place is None:
            place = int(generator.integers(len(self.hands)))
        elif not 0 <= place < len(self.hands):
            raise ValueError(f"There is no hand {place!r}: the {len(self.hands)} hands are numbered from 0.")
        hand = [self._card(card, generator) for card in self.hands[place]]
        observation, info = self.env.reset(options={**others, "cards": hand})
        if list(info["Cards"]) != hand:
            raise ValueError(
                f"The environment deals {list(info['Cards'])} where {hand} was asked for. hands=… needs the games of "
                "trl_gtr.environments; the original gym_cards can't be told what to deal."
            )
        return observation, info

    @staticmethod
    def _card(card: str, generator: Any) -> str:
        if card[0] in _SUITS and len(card) == 2:
            return card
        return _SUITS[int(generator.integers(4))] + ("T" if card == "10" else card)


def _copied(info: Mapping[str, Any]) -> dict[str, Any]:
    """The original games hand out their live lists, which the next step changes."""
    return {key: list(value) if isinstance(value, list) else value for key, value in info.items()}
