"""Transitions and rollouts written by hand, for tests that need no environment and no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trl_gtr.types import Response, Rollout, Transition

IMAGE = np.zeros((28, 28, 3), np.uint8)
PROMPT = "Which colour?"


def transition(env: int = 0, step: int = 0, reward: float = 0.0, tokens: int = 3, **fields: Any) -> Transition:
    """A step that goes on and was legal, unless `fields` say otherwise."""
    ends = {"terminated": False, "truncated": False, "bootstrap": False, "legal": True, **fields}
    final = {"final_image": IMAGE, "final_prompt": PROMPT} if ends["bootstrap"] else {}
    return Transition(
        **{
            "env_index": env,
            "step": step,
            "image": IMAGE,
            "prompt": PROMPT,
            "response": Response(""),
            "response_ids": np.arange(tokens) + 5,
            "reward": reward,
            "info": {"colour": "red"},
            **(final | ends),
        }
    )


def rollout(rewards: Sequence[Sequence[float]], **fields: Any) -> Rollout:
    """Rewards by step and environment; `fields` are those of every transition."""
    steps = [transition(e, s, reward, **fields) for s, row in enumerate(rewards) for e, reward in enumerate(row)]
    envs = len(rewards[0])
    return Rollout(steps, [None] * len(steps), [IMAGE] * envs, [PROMPT] * envs)
