"""FrozenLake with a new map for every episode."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

MIN_SIZE, MAX_SIZE = 2, 8
SPLITS = ("all", "train", "unseen")
UNSEEN_SHARE = 4
"""One in this many maps is kept for evaluation."""
_MAX_DRAWS = 1000


class FrozenLakeMapsEnv(FrozenLakeEnv):
    """Walk over the ice from the upper left corner to the goal, around the holes. gymnasium's game on changing maps.

    ## Description
    Every episode has a new map on which the goal can be reached. On slippery ice, a move goes sideways instead with
    probability ⅓ to each side.

    ## Observation
    `Discrete(size²)`: the square, counted row by row. The picture comes from `render()`.

    ## Actions
    `Discrete(4)`: 0 left, 1 down, 2 right, 3 up. At the edge, nothing moves.

    ## Rewards
    +1 at the goal, otherwise 0.

    ## Episode end
    Terminated at the goal and in a hole. Truncated after 100 steps.

    ## Information
    `map`: its lines, of `S` start, `F` frozen, `H` hole, `G` goal. `prob`: the probability of the last outcome.

    ## Arguments
    - `size=4`: rows and columns of random maps, 2 to 8.
    - `frozen=0.8`: share of squares that are not holes.
    - `map=None`: play only this map, a list of lines.
    - `split="all"`: which random maps to play: `"train"`, `"unseen"` (a quarter of all maps, for evaluation; no map is
      in both) or all.
    - `is_slippery=False`: whether moves can go sideways.
    - `render_mode=None`: or `"rgb_array"`, `"human"`, `"ansi"`.

    `reset(options={"map": ["SF", "HG"]})` sets the map; its size can't change.
    """

    actions = ("left", "down", "right", "up")

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.8,
        map: Sequence[str] | None = None,
        split: str = "all",
        is_slippery: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or not MIN_SIZE <= size <= MAX_SIZE:
            raise ValueError(f"size must be an integer from {MIN_SIZE} to {MAX_SIZE}, not {size!r}")
        if not 0 < frozen <= 1:
            raise ValueError(f"frozen must be a share above 0 and up to 1, not {frozen!r}")
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        self.size, self.frozen, self.split, self.is_slippery = size, frozen, split, is_slippery
        self.map = None if map is None else _checked(map)
        first = self.map or ["S" + "F" * (size - 1), *["F" * size] * (size - 2), "F" * (size - 1) + "G"]
        self._lines = first
        super().__init__(render_mode=render_mode, desc=first, is_slippery=is_slippery)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        if options and set(options) != {"map"}:
            raise ValueError(f"reset options must be a dict with only the key 'map', not {options!r}")
        lines = _checked(options["map"]) if options else self.map or self._random_map()
        if (len(lines), len(lines[0])) != (self.nrow, self.ncol):
            raise ValueError(f"the map must have {self.nrow} rows and {self.ncol} columns, not {lines!r}")
        self._lines = lines
        laid = FrozenLakeEnv(desc=lines, is_slippery=self.is_slippery)  # the map's transitions
        self.desc, self.P, self.initial_state_distrib = laid.desc, laid.P, laid.initial_state_distrib
        observation, info = super().reset()
        return observation, self._with_map(info)

    def step(self, a: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(int(a))
        return observation, float(reward), terminated, truncated, self._with_map(info)

    def _random_map(self) -> list[str]:
        for _ in range(_MAX_DRAWS):
            lines = generate_random_map(self.size, self.frozen, seed=int(self.np_random.integers(2**31)))
            if self.split in ("all", split_of(lines)):
                return lines
        raise ValueError(
            f"no map of size {self.size} with frozen={self.frozen} found in the split {self.split!r}: choose a larger "
            'size, a smaller share of frozen squares, or split="all"'
        )

    def _with_map(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "map": list(self._lines)}


def split_of(lines: Sequence[str]) -> str:
    """The split a map belongs to, by its checksum: always the same for the same map."""
    return "train" if zlib.crc32("/".join(lines).encode()) % UNSEEN_SHARE else "unseen"


def _checked(lines: Any) -> list[str]:
    if isinstance(lines, str) or not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"a map is a list of lines, not {lines!r}")
    letters = "".join(lines)
    if {len(line) for line in lines} != {len(lines[0]) if lines else 0} or not set(letters) <= set("SFHG"):
        raise ValueError(f"a map has lines of equal length, made of S, F, H and G, not {list(lines)!r}")
    if letters.count("S") != 1 or letters.count("G") != 1:
        raise ValueError(f"a map needs one S and one G, not {list(lines)!r}")
    return list(lines)
