"""Comparing runs: each log summarised in a few numbers, with means and intervals over seeds.

A run is `{"arm": name, "seed": int, "log": log_history}`, with `log_history` as in `trainer_state.json`. In a study of
several tasks it also has a `"task"`, and one evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

Run = Mapping[str, Any]

LAST_UPDATES = 3
"""A curve's final value is the mean over this many updates."""

CURVES = {
    "episode/success": "success (sampled)",
    "thoughts/true": "true thoughts",
    "thoughts/reading": "read right",
    "thoughts/distinct_4": "distinct 4-grams",
}
"""Curves to draw, by their name in the log."""

SAMPLED = {
    "episode/success": "sampled success",
    "thoughts/true": "sampled true thoughts",
    "thoughts/identical_across_states": "identical across states",
    "thoughts/self_bleu": "self-BLEU",
    "policy/entropy": "entropy",
    "thoughts/length_words": "words a thought",
}
"""Table columns for metrics sampled in training."""

COST: Mapping[str, tuple[str, Callable[[np.ndarray], float]]] = {
    "speed/steps_per_second": ("steps/s", np.mean),
    "memory/cpu_gb": ("peak GB", np.max),
}
"""Table columns for what a run costs: their names, and how an update's values become one."""

MEASURES = ("teacher_true_thoughts", "teacher_success", "true_thoughts", "success")
"""What evaluations measure, of the policy and of a merged teacher; the longer names first."""

GUIDED = "_guided"
"""Suffix of the arm that adds guidance to another."""

BASELINE = "ppo"
"""The arm that those with a merged teacher are compared with."""

LINEAR = {"turbo_sft": "linear_sft", "turbo_kl": "linear_kl"}
"""Arms that merge by TIES, with the arm that takes a mean instead and is otherwise the same."""

_STUDENT_T = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 15: 2.14, 20: 2.09}


def curve(run: Run, name: str) -> np.ndarray:
    """The values of a logged metric, update by update."""
    return np.array([entry[name] for entry in run["log"] if name in entry])


def compact(run: Run) -> dict[str, Any]:
    """The run with only what tables and figures show, so that a whole study is a small file.

    An evaluation in the course of training gets the `env_steps` of the update before it: its own entry has none.
    """
    shown = {*CURVES, *SAMPLED, *COST, "response/valid", "env_steps"}

    def keep(name: str) -> bool:
        return name in shown or name.startswith("teacher/") or _is_evaluation(name)

    log, env_steps = [], 0
    for entry in run["log"]:
        env_steps = entry.get("env_steps", env_steps)
        kept = {name: _rounded(value) for name, value in entry.items() if keep(name)}
        during = {name: _rounded(value) for name, value in entry.items() if _is_evaluation(name, ("eval_",))}
        if during:
            kept |= {"step": entry["step"], "env_steps": env_steps, **during}
        if kept:
            log.append(kept)
    return {**run, "log": log}


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def summary(run: Run) -> dict[str, float]:
    """A run in numbers: evaluations before and after training, and metrics sampled at the end of training."""
    evaluated = {name: value for entry in run["log"] for name, value in entry.items()}
    names = sorted(filter(_is_evaluation, evaluated), key=lambda name: (name.endswith("true_thoughts"), name))
    one_evaluation = "task" in run and len({_evaluation_set(name) for name in names}) == 1
    row = {_column(name, one_evaluation): evaluated[name] for name in names}
    for name, words in SAMPLED.items():
        if (value := final(run, name)) is not None:
            row[words] = value
    return row


def final(run: Run, name: str) -> float | None:
    """A curve's final value; `None` if it was never logged."""
    values = curve(run, name)
    return float(values[-LAST_UPDATES:].mean()) if len(values) else None


def _is_evaluation(name: str, moments: tuple[str, ...] = ("start_", "end_")) -> bool:
    return name.startswith(moments) and name.endswith(MEASURES)


def _column(name: str, one_evaluation: bool) -> str:
    """`end_pool_success` → "end pool success", or "end success" if there is only one evaluation.

    That of a merged teacher stays apart: "end teacher success".
    """
    when, _, rest = name.partition("_")
    return f"{when} {_measure(name) if one_evaluation else rest}".replace("_", " ")


def _measure(name: str) -> str:
    return next(each for each in MEASURES if name.endswith(each))


def _evaluation_set(name: str) -> str:
    """`end_pool_success` → "pool"; empty if it has no name."""
    return name.partition("_")[2].removesuffix(_measure(name))


def costs(runs: Sequence[Run]) -> dict[str, str]:
    """What the runs of an arm cost, as the mean over seeds."""
    cells = {}
    for name, (words, of_updates) in COST.items():
        if values := [of_updates(logged) for run in runs if len(logged := curve(run, name))]:
            cells[words] = f"{np.mean(values):.3g}"
    return cells


def largest_fall(run: Run) -> float:
    """The largest drop in sampled success from one update to the next."""
    return float(max([0.0, *(-np.diff(curve(run, "episode/success")))]))


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval over seeds (Student's t); fewer than three values are listed as they are."""
    if len(values) < 3:
        return ", ".join(f"{value:z.3f}" for value in values)
    half = _STUDENT_T[max(n for n in _STUDENT_T if n <= len(values))] * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):z.3f} ± {half:.3f}"


def by(key: str, runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by "arm" or "task"."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.get(key, ""), []).append(run)
    return found


def arm_row(arm: str, runs: Sequence[Run]) -> dict[str, str]:
    """One arm's table row: evaluations as start → end with the end's interval, then metrics sampled at the end.

    The largest fall is the largest drop in sampled success between updates, over all seeds; the smallest gain is the
    smallest improvement in the first evaluation's success from start to end, over all seeds.
    """
    rows = [summary(run) for run in runs]
    cells = {"arm": arm, "seeds": str(len(runs))}
    gains = None
    for name in rows[0]:
        values = [row[name] for row in rows if name in row]
        if name.startswith("start "):
            continue
        if name.startswith("end "):
            words = name.removeprefix("end ")
            starts = [row.get(f"start {words}", math.nan) for row in rows]
            cells[words] = f"{np.mean(starts):.2f} → {interval(values)}"
            if gains is None and words.endswith("success"):
                gains = [end - start for start, end in zip(starts, values, strict=True)]
        else:
            cells[name] = interval(values)
    cells["largest fall"] = f"{max(map(largest_fall, runs)):.2f}"
    if gains is not None:
        cells["smallest gain"] = f"{min(gains):+.2f}"
    return cells | costs(runs)


def comparison_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """A row for each arm of each task, all with the same columns: only some arms have a teacher to evaluate."""
    rows: list[dict[str, str]] = []
    for task, of_task in by("task", runs).items():
        named = {"task": task} if task else {}
        rows += [named | arm_row(arm, mine) for arm, mine in by("arm", of_task).items()]
    names = dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row)
    return [{name: row.get(name, "") for name in names} for row in rows]


def comparison_table(runs: Sequence[Run], title: str) -> Table:
    """One row per arm, or per task and arm."""
    rows = comparison_rows(runs)
    table = Table(*rows[0], title=f"{title}: mean and 95 % interval over seeds")
    for row in rows:
        table.add_row(*row.values())
    return table


def comparison_markdown(runs: Sequence[Run]) -> str:
    """The same table as Markdown."""
    return _markdown(comparison_rows(runs))


def guidance_markdown(runs: Sequence[Run]) -> str:
    """One row per task and method: success and true thoughts alone and guided, and what guidance adds on each seed."""
    rows = []
    for task, of_task in by("task", runs).items():
        arms = by("arm", of_task)
        for method in methods(of_task):
            row = {"task": task, "method": method}
            for name in ("success", "true thoughts"):
                alone, guided = (ends(arms.get(arm, []), name) for arm in (method, method + GUIDED))
                row[f"{name}: alone"] = interval(list(alone.values()))
                row[f"{name}: guided"] = interval(list(guided.values()))
                row[f"{name}: added"] = interval(differences(guided, alone))
            rows.append(row)
    return _markdown(rows)


def cost_markdown(runs: Sequence[Run]) -> str:
    """One row per method: what it costs alone and guided."""
    arms, rows = by("arm", runs), []
    for method in methods(runs):
        found = {how: costs(arms.get(arm, [])) for how, arm in (("alone", method), ("guided", method + GUIDED))}
        cells = {f"{name}: {how}": of.get(name, "") for name, _ in COST.values() for how, of in found.items()}
        rows.append({"method": method} | cells)
    return _markdown(rows)


def teacher_markdown(runs: Sequence[Run]) -> str:
    """One row per task and arm of a study with merged teachers, as far as it has been run.

    Success and true thoughts are those of the last evaluation; entropy and valid responses are sampled while training.
    Differences are taken on the same seeds: the teacher from its own policy at the end, the arm from `BASELINE`, and
    an arm with TIES from its counterpart in `LINEAR`.
    """
    rows = []
    for task, of_task in by("task", runs).items():
        arms = by("arm", of_task)
        reached = {arm: ends(mine, "success") for arm, mine in arms.items()}
        for arm, mine in arms.items():
            taught, baseline = ends(mine, "teacher success"), {} if arm == BASELINE else reached.get(BASELINE, {})
            row = {"task": task, "arm": arm, "seeds": str(len(reached[arm]))}
            row["success"] = interval(list(reached[arm].values()))
            row["true thoughts"] = interval(list(ends(mine, "true thoughts").values()))
            row["entropy"] = _first_to_last(mine, "policy/entropy")
            row["valid responses"] = interval(_finals(mine, "response/valid"))
            row["teacher − policy"] = interval(differences(taught, reached[arm]))
            row[f"success − {BASELINE}"] = interval(differences(reached[arm], baseline))
            row["TIES − linear"] = interval(differences(reached[arm], reached.get(LINEAR.get(arm, ""), {})))
            rows.append(row)
    return _markdown(rows)


def methods(runs: Sequence[Run]) -> list[str]:
    """The arms, with and without guidance as one."""
    return list(dict.fromkeys(arm.removesuffix(GUIDED) for arm in by("arm", runs)))


def ends(runs: Sequence[Run], name: str) -> dict[int, float]:
    """What the runs of an arm measured at their end, by seed; those that have not ended are left out."""
    found = {run["seed"]: summary(run) for run in runs}
    return {seed: row[f"end {name}"] for seed, row in found.items() if f"end {name}" in row}


def differences(of: Mapping[int, float], to: Mapping[int, float]) -> list[float]:
    """`of` − `to`, on the seeds that both have."""
    return [value - to[seed] for seed, value in of.items() if seed in to]


def _finals(runs: Sequence[Run], name: str) -> list[float]:
    return [value for run in runs if (value := final(run, name)) is not None]


def _first_to_last(runs: Sequence[Run], name: str) -> str:
    """A curve's mean first value, and the interval of its final one."""
    firsts = [float(values[0]) for run in runs if len(values := curve(run, name))]
    return f"{np.mean(firsts):.3f} → {interval(_finals(runs, name))}" if firsts else ""


def _markdown(rows: Sequence[Mapping[str, str]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
