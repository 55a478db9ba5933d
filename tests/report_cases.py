"""Run folders made by hand, for the tests of the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from trl_gtr.runs.episode_log import SCHEMA, write_shard

HOSTILE = (
    "<script>window.hacked = 1</script></script><img src=x onerror='window.hacked = 2'>"
    '"></p><svg onload=window.hacked=3>{{ 7 * 7 }} &lt;b&gt; \u2028 \ufffd \x00 \u202eabc'
)
LONG = "x" * 100_000


def row(update, env=0, episode=0, step=0, **changes):
    """A logged step of a hand of three cards."""
    rng = np.random.default_rng([update, env, episode, step])
    thought = '{"cards": ["3", "8"], "thoughts": "I aim at 3*8=24.", '
    return (
        dict.fromkeys(SCHEMA)
        | {
            "update": update,
            "env_index": env,
            "episode": episode,
            "step": step,
            "image": np.kron(rng.integers(0, 255, (3, 3, 3)), np.ones((20, 20, 1))).astype(np.uint8),
            "prompt": "Make 24.",
            "response": thought + '"action": "*"}',
            "thought": thought,
            "thought_text": "I aim at 3*8=24.",
            "action": "*",
            "valid": True,
            "legal": True,
            "verdict": "right",
            "judgement": [{"part": "cards", "right": True}, {"part": "aim", "right": True}],
            "reward": 0.0,
            "value": 0.25,
            "return": 0.5,
            "advantage": -0.5,
            "ended": False,
            "tokens": [thought, '"action": "', '*"}', ""],
            "token_logprobs": [-1.5, -0.01, -0.2, 0.0],
            "action_start": 1,
        }
        | changes
    )


def corrected(update, **changes):
    return row(
        update,
        verdict="corrected",
        corrected_thought='{"cards": ["3", "9"], "thoughts": "I aim at 3+9+12=24.", ',
        corrected_action="+",
        judgement=[{"part": "cards", "right": False}, {"part": "aim", "right": True}],
        **changes,
    )


def episode(update, env, success, **last):
    """Two steps: a corrected one, and one that ends it."""
    where = {"env": env, "episode": 2 * update}
    end = {"ended": True, "success": success, "reward": 10.0 if success else -1.0, **last}
    return [corrected(update, **where, step=0, success=success), row(update, **where, step=1, **end)]


def write_run(folder: Path, updates: int = 4, rows=None, offset: float = 0.0, card: bool = True) -> Path:
    """A folder as training leaves it: metrics, card, and for each update an episode won and one lost."""
    folder.mkdir(parents=True)
    log = [{"start_pool_success": 0.25, "start_pool_success_low": 0.1, "start_pool_success_high": 0.5, "step": 0}]
    for n in range(1, updates + 1):
        log.append(
            {
                "step": n,
                "episode/success": 0.1 * n + offset,
                "episode/return": float(n),
                "thoughts/true": 0.5,
                "thoughts/true_cards": 0.75,
                "thoughts/distinct_4": 0.4,
                "loss/value": float("nan"),
                "time/generate": 3.0,
                "time/update": 1.0,
                "corrector/usd_spent": 0.02 * n,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    if card:
        about = {
            "task": "points24",
            "model": "tiny",
            "started": "2025-01-01T00:00:00+00:00",
            "updated": "2025-01-01T01:05:00+00:00",
            "state": "finished",
            "seconds": 3900.0,
            "updates": updates,
            "command": "examples/points24.py --seed 3",
            "config": {"learning_rate": 3e-5, "thought_prob_coef": 0.5, "gamma": 0.9},
            "changed": ["learning_rate"],
            "versions": {"trl": "1.12.0"},
            "hardware": {"cpu_cores": 2, "gpus": []},
            "warnings": [{"update": 2, "message": "Thoughts are collapsing " + HOSTILE, "count": 3}],
        }
        (folder / "run.json").write_text(json.dumps(about))
    for n in range(1, updates + 1):
        shard = folder / "episodes" / f"update-{n:06d}-process-0.parquet"
        write_shard(shard, (rows or default_rows)(n))
    return folder


def default_rows(update):
    return episode(update, 0, True) + episode(update, 1, False, legal=False, action="banana", substitute="+")


def hostile_rows(update):
    """Everything that a model writes is an attack or very long."""
    words = dict.fromkeys(("prompt", "response", "thought", "thought_text", "action", "error", "reason"), HOSTILE)
    steps = [
        row(update, **words, valid=False, legal=False, verdict="failed"),
        corrected(update, **words) | {"corrected_thought": HOSTILE + " more"},
        row(update, thought=LONG, thought_text=LONG, prompt=LONG, action=LONG, tokens=[LONG] * 4),
        row(update, tokens=[HOSTILE] * 4, judgement=[{"part": HOSTILE, "right": True}]),
    ]
    return [step | {"episode": 4 * update, "step": n} for n, step in enumerate(steps)]
