"""Spending limits and actual spending of a paid corrector."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...types import Usage

PRICES: Mapping[str, tuple[float, float]] = {
    # OpenAI's list prices in USD per million prompt tokens and per million answer tokens. Override with `prices=`.
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
"""Lower than for most text, so that tokens are overestimated rather than underestimated."""


def picture_tokens(model: str) -> int:
    """Upper bound for an image of up to 512 × 512 pixels: gpt-4o-mini counts 2833 + 5667, others below 1500."""
    return 8500 if "4o-mini" in model else 1500


def price_of(model: str) -> tuple[float, float] | None:
    """List price of a model, with or without a date suffix (`gpt-4o-2024-08-06`); `None` if it isn't listed."""
    return PRICES.get(model) or PRICES.get(re.sub(r"-\d{4}-\d{2}-\d{2}$", "", model))


@dataclass(frozen=True)
class Limits:
    """Limits for a whole run; `None` means no limit."""

    calls: int | None = None
    tokens: int | None = None
    usd: float | None = None

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if limit is not None and not limit > 0:
                raise ValueError(f"max_{name} must be positive, not {limit}; leave it out for no limit")

    def per_process(self) -> Limits:
        """This process's equal share of the limits. Every process of a distributed run has its own corrector."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        return Limits(
            None if self.calls is None else max(1, self.calls // world),
            None if self.tokens is None else max(1, self.tokens // world),
            None if self.usd is None else self.usd / world,
        )


class Budget:
    """Counts usage and reserves each call's maximum cost in advance, so that concurrent calls can't exceed the limits.
    Thread-safe."""

    def __init__(self, limits: Limits, prices: tuple[float, float] | None):
        self.limits, self.prices = limits, prices
        self.spent = Usage()
        self._reserved: list[Usage] = []
        self._lock = threading.Lock()

    def cost(self, prompt_tokens: int, completion_tokens: int) -> Usage:
        """Usage of one call with that many tokens."""
        prompt_price, completion_price = self.prices or (0.0, 0.0)
        usd = (prompt_tokens * prompt_price + completion_tokens * completion_price) / 1e6
        return Usage(1, prompt_tokens, completion_tokens, usd)

    def reserve(self, estimate: Usage, alone: bool = False) -> bool | None:
        """`True` if reserved (`settle` it later), `None` if it must wait for calls in flight, `False` if spent.

        With `alone`, never reserve alongside another call if tokens or dollars are limited.
        """
        with self._lock:
            if alone and self._reserved and (self.limits.tokens or self.limits.usd):
                return None
            if self._fits(sum(self._reserved, self.spent) + estimate):
                self._reserved.append(estimate)
                return True
            return None if self._reserved else False

    def settle(self, estimate: Usage, actual: Usage) -> None:
        """Replace a reservation with the actual cost."""
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
    """Estimates what a call may cost from its text and from the server's token counts so far.

    Args:
        max_length: Maximum tokens per answer, as requested from the server.
        picture_tokens: Assumed tokens per image, until the server has counted one.
    """

    def __init__(self, budget: Budget, max_length: int, picture_tokens: int):
        self.budget, self.max_length, self.picture_tokens = budget, max_length, picture_tokens
        self._largest_prompt = self._largest_excess = self._largest_answer = 0

    def estimate(self, body: Mapping[str, Any]) -> Usage:
        """Estimate the call's cost from above: its text plus its images as counted by the server so far, and no less
        than the largest prompt seen. The answer is assumed no shorter than the longest seen, since some servers ignore
        the length limit."""
        images = max(pictures(body), 1) * max(self.picture_tokens, self._largest_excess)
        prompt = max(words(body) + images, int(1.25 * self._largest_prompt))
        return self.budget.cost(prompt, max(self.max_length, int(1.25 * self._largest_answer)))

    def counted(self, body: Mapping[str, Any], prompt_tokens: int, completion_tokens: int) -> Usage:
        """Cost of a call by the server's count; later estimates learn from it."""
        self._largest_prompt = max(self._largest_prompt, prompt_tokens)
        excess = -(-(prompt_tokens - words(body)) // max(pictures(body), 1))  # of each image, rounded up
        self._largest_excess = max(self._largest_excess, excess)
        self._largest_answer = max(self._largest_answer, completion_tokens)
        return self.budget.cost(prompt_tokens, completion_tokens)

    def uncounted(self, estimate: Usage, received: int, *, learn: bool = True) -> Usage:
        """Cost of a call whose tokens the server didn't count: the estimate, or more if the answer was longer.

        Args:
            learn: Whether later estimates learn from it; `False` if it isn't a model's answer.
        """
        answer = max(estimate.completion_tokens, received // BYTES_PER_TOKEN)
        if learn and answer > estimate.completion_tokens:
            self._largest_answer = max(self._largest_answer, answer)
        return self.budget.cost(estimate.prompt_tokens, answer)

    def state_dict(self) -> dict[str, int]:
        return {"prompt": self._largest_prompt, "excess": self._largest_excess, "answer": self._largest_answer}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what was learned earlier; an empty state resets it."""
        prompt, excess, answer = (int(state.get(name, 0)) for name in ("prompt", "excess", "answer"))
        self._largest_prompt, self._largest_excess, self._largest_answer = prompt, excess, answer


def pictures(value: Any) -> int:
    """Number of images in a request."""
    if isinstance(value, str):
        return int(value.startswith("data:"))
    if isinstance(value, Mapping):
        return sum(map(pictures, value.values()))
    return sum(map(pictures, value)) if isinstance(value, list | tuple) else 0


def words(value: Any) -> int:
    """Estimated tokens of a request's text, schema and tools, without images."""

    def size(value: Any) -> int:
        if isinstance(value, str):
            return 0 if value.startswith("data:") else len(value.encode("utf-8", "replace")) + 2
        if isinstance(value, Mapping):
            return sum(size(key) + size(entry) for key, entry in value.items())
        return sum(map(size, value)) if isinstance(value, list | tuple) else 4

    return size(value) // BYTES_PER_TOKEN
