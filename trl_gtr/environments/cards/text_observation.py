"""The games as text, for baselines without vision."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from ..grids.in_words import grid_in_words
from .blackjack import total, usable_ace
from .cards import in_words

MAX_LENGTH = 1000


class TextObservation(gym.Wrapper[str, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Replaces the image of a card game or a grid world with sentences that say what it shows.

    The grid worlds are Sokoban, FrozenLake, Taxi, CliffWalking and MiniGrid's levels. The dealer's hidden card in
    Blackjack stays hidden. Walls of a MiniGrid level are left out, except in front of the agent. `info` is unchanged.

    >>> import gymnasium as gym, trl_gtr.environments
    >>> env = TextObservation(gym.make("gym_cards/NumberLine-v0"))
    >>> env.reset(options={"target": 3, "current": 0})[0]
    'The target is 3. The current position is 0.'
    """

    def __init__(self, env: gym.Env) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.observation_space = spaces.Text(MAX_LENGTH, charset=string.ascii_letters + string.digits + " .,:+-*/()")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._sentence(observation, info), info

    def step(self, action: Any) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._sentence(observation, info), reward, terminated, truncated, info

    def _sentence(self, observation: Any, info: Mapping[str, Any]) -> str:
        state = info.get("observation", observation)  # the game's own, if the observation is its rendered picture
        return grid_in_words(self.env.unwrapped, state, info) or sentence(info)


def sentence(info: Mapping[str, Any]) -> str:
    """What the player may see of a state, from the info of a card game or a MiniGrid level."""
    if "Formula" in info:
        formula = "".join(map(str, info["Formula"]))
        return f"The cards are {_list(info['Cards'])}. " + (
            f"The formula so far is {formula}." if formula else "The formula is still empty."
        )
    if "Target" in info:
        return f"The target is {info['Target']}. The current position is {info['Current']}."
    if "Dealer Card" in info:
        _, face, suit = info["Dealer Card"][0]
        hand = info["Player Card"]
        points = f"{'soft ' if usable_ace(hand) else ''}{total(hand)}"
        held = _list([suit + face for _, face, suit in hand])
        return f"The dealer shows the {in_words(suit + face)}. You hold {held}: {points} points."
    if "mission" in info:
        return _level(info)
    raise ValueError(
        "TextObservation only supports the four card games, Sokoban, FrozenLake, Taxi, CliffWalking and MiniGrid; "
        f"this info has the keys {sorted(info)}"
    )


def _level(info: Mapping[str, Any]) -> str:
    row, column = info["player"]
    seen = ", ".join(f"{name} at {row},{column}" for row, column, name in info["objects"]) or "nothing else"
    return (
        f"Your mission: {info['mission']}. You carry: {info['carrying']}. You are at {row},{column}, facing "
        f"{info['facing']}. In front of you: {info['ahead']}. You see: {seen}."
    )


def _list(cards: list[str]) -> str:
    """ "the ace of spades, the 4 of hearts and the 10 of clubs" """
    named = [f"the {in_words(card)}" for card in cards]
    return ", ".join(named[:-1]) + " and " + named[-1]
