"""What a paid corrector may spend, and what it has spent."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...types import Usage

PRICES: Mapping[str, tuple[float, float]] = {
    # USD per million tokens of the prompt and of the answer, OpenAI's list prices. Override with `prices=`.
    "gpt-4o-2024-05-13": (5.00, 15.00),
    "gpt-4o": (2.50, 10.00),
    "gpt-4o-mini": (0.15, 0.60),
    "gpt-4.1": (2.00, 8.00),
    "gpt-4.1-mini": (0.40, 1.60),
    "gpt-4.1-nano": (0.10, 0.40),
    "gpt-5": (1.25, 10.00),
    "gpt-5-mini": (0.25, 2.00),
    "o4-mini": (1.10, 4.40),
}

BYTES_PER_TOKEN = 3
"""Fewer than in most texts, so that tokens are overestimated rather than underestimated."""


def picture_tokens(model: str) -> int:
    """What a picture of up to 512 × 512 pixels may cost: gpt-4o-mini counts 2833 + 5667, others below 1500."""
    return 8500 if "4o-mini" in model else 1500


def price_of(model: str) -> tuple[float, float] | None:
    """The listed price of a model, with or without its date (`gpt-4o-2024-08-06`); `None` if it isn't listed."""
    return PRICES.get(model) or PRICES.get(re.sub(r"-\d{4}-\d{2}-\d{2}$", "", model))


@dataclass(frozen=True)
class Limits:
    """The most that a whole run may use; `None` is no limit."""

    calls: int | None = None
    tokens: int | None = None
    usd: float | None = None

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if limit is not None and not limit > 0:
                raise ValueError(f"max_{name} must be positive, not {limit}; leave it out for no limit")

    def per_process(self) -> Limits:
        """This process's even part of the limits. Every process of a distributed run has a corrector of its own."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        return Limits(
            None if self.calls is None else max(1, self.calls // world),
            None if self.tokens is None else max(1, self.tokens // world),
            None if self.usd is None else self.usd / world,
        )


class Budget:
    """Counts usage and reserves before each call what that call may cost, so that calls in flight together can't
    exceed the limits. Thread-safe."""

    def __init__(self, limits: Limits, prices: tuple[float, float] | None):
        self.limits, self.prices = limits, prices
        self.spent = Usage()
        self._reserved: list[Usage] = []
        self._lock = threading.Lock()

    def cost(self, prompt_tokens: int, completion_tokens: int) -> Usage:
        """One call with that many tokens."""
        prompt_price, completion_price = self.prices or (0.0, 0.0)
        usd = (prompt_tokens * prompt_price + completion_tokens * completion_price) / 1e6
        return Usage(1, prompt_tokens, completion_tokens, usd)

    def reserve(self, estimate: Usage, alone: bool = False) -> bool | None:
        """`True`: reserved, `settle` it later. `None`: not while other calls are in flight. `False`: spent.

        With `alone` never beside another call, where tokens or dollars are limited.
        """
        with self._lock:
            if alone and self._reserved and (self.limits.tokens or self.limits.usd):
                return None
            if self._fits(sum(self._reserved, self.spent) + estimate):
                self._reserved.append(estimate)
                return True
            return None if self._reserved else False

    def settle(self, estimate: Usage, actual: Usage) -> None:
        """Replace a reservation by what the call really cost."""
        with self._lock:
            self._reserved.remove(estimate)
            self.spent = self.spent + actual

    def _fits(self, usage: Usage) -> bool:
        limits = self.limits
        return (
            (limits.calls is None or usage.calls <= limits.calls)
            and (limits.tokens is None or usage.prompt_tokens + usage.completion_tokens <= limits.tokens)
            and (limits.usd is None or usage.usd <= limits.usd)
        )

    def metrics(self) -> dict[str, float]:
        spent, limits = self.spent, self.limits
        tokens = spent.prompt_tokens + spent.completion_tokens
        values: dict[str, float] = {"calls": spent.calls, "tokens": tokens}
        if self.prices is not None:
            values["usd_spent"] = spent.usd
        if limits.calls is not None:
            values["calls_remaining"] = max(0, limits.calls - spent.calls)
        if limits.tokens is not None:
            values["tokens_remaining"] = max(0, limits.tokens - tokens)
        if limits.usd is not None:
            values["usd_remaining"] = max(0.0, limits.usd - spent.usd)
        return {f"corrector/{name}": float(value) for name, value in values.items()}

    def state_dict(self) -> dict[str, float]:
        return asdict(self.spent)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.spent = Usage(
            int(state["calls"]), int(state["prompt_tokens"]), int(state["completion_tokens"]), float(state["usd"])
        )


class CallSizes:
    """What a call may cost, by its words and by what the server has counted so far.

    Args:
        max_length: Tokens of an answer, as the server is told.
        picture_tokens: What a picture may cost, before the server has counted one.
    """

    def __init__(self, budget: Budget, max_length: int, picture_tokens: int):
        self.budget, self.max_length, self.picture_tokens = budget, max_length, picture_tokens
        self._largest_prompt = self._largest_excess = self._largest_answer = 0

    def estimate(self, body: Mapping[str, Any]) -> Usage:
        """At least what the call will cost: its words, and beside them the picture as the server has counted it so
        far; never less than the largest prompt seen. Nor is the answer taken for shorter than the longest seen: some
        servers ignore the length limit."""
        beside = max(self.picture_tokens, self._largest_excess)
        prompt = max(words(body) + beside, int(1.25 * self._largest_prompt))
        return self.budget.cost(prompt, max(self.max_length, int(1.25 * self._largest_answer)))

    def counted(self, body: Mapping[str, Any], prompt_tokens: int, completion_tokens: int) -> Usage:
        """What a call has cost by the server's count, from which the next estimates learn."""
        self._largest_prompt = max(self._largest_prompt, prompt_tokens)
        self._largest_excess = max(self._largest_excess, prompt_tokens - words(body))
        self._largest_answer = max(self._largest_answer, completion_tokens)
        return self.budget.cost(prompt_tokens, completion_tokens)

    def uncounted(self, estimate: Usage, received: int, *, learn: bool = True) -> Usage:
        """What a call has cost whose tokens the server didn't count: its estimate, or more if so many bytes came.

        Args:
            learn: The next estimates learn from it; not from what is no answer of a model.
        """
        answer = max(estimate.completion_tokens, received // BYTES_PER_TOKEN)
        if learn and answer > estimate.completion_tokens:
            self._largest_answer = max(self._largest_answer, answer)
        return self.budget.cost(estimate.prompt_tokens, answer)

    def state_dict(self) -> dict[str, int]:
        return {"prompt": self._largest_prompt, "excess": self._largest_excess, "answer": self._largest_answer}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """What was learned earlier; nothing by an empty state."""
        prompt, excess, answer = (int(state.get(name, 0)) for name in ("prompt", "excess", "answer"))
        self._largest_prompt, self._largest_excess, self._largest_answer = prompt, excess, answer


def words(value: Any) -> int:
    """Tokens of a request's words, schema and tools; pictures don't count."""

    def size(value: Any) -> int:
        if isinstance(value, str):
            return 0 if value.startswith("data:") else len(value.encode("utf-8", "replace")) + 2
        if isinstance(value, Mapping):
            return sum(size(key) + size(entry) for key, entry in value.items())
        return sum(map(size, value)) if isinstance(value, list | tuple) else 4

    return size(value) // BYTES_PER_TOKEN
