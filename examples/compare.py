"""GTR against its parts, from one start, over several seeds: a table, a figure and the raw numbers.

    python examples/compare.py --script examples/points24.py --seeds 0 1 2 3 4
    python examples/compare.py --script examples/gym_cards.py --arms gtr ppo -- --task ezpoints --total_env_steps 5120

What stands behind `--` goes to every run. A run that is complete is not made again, so a study can be stopped, taken
up later, or widened by more seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MASKED = {"clone_right_actions": False, "clone_right_thoughts": False}
PPO_ONLY = {"thought_cloning_coef": 0, **MASKED}
ARMS: dict[str, dict] = {
    "gtr": {},
    "gtr_paper": {"update_schedule": "joint", "cloning_weight": "share", "cloning_learning_rate": 0, **MASKED},
    "ppo": PPO_ONLY,
    "cloning": {"ppo_coef": 0},
    "rl4vlm": {**PPO_ONLY, "format_reward": 0, "cut": False},
}
CURVES = {
    "episode/success": "success (sampled)",
    "thoughts/true": "true thoughts",
    "thoughts/reading": "cards read right",
    "thoughts/distinct_4": "distinct 4-grams",
}


def run(args: argparse.Namespace, arm: str, seed: int) -> dict:
    """One run as a process of its own; its log history."""
    folder = args.output / arm / f"seed{seed}"
    state = folder / "trainer_state.json"
    if not state.is_file():
        settings = {**ARMS[arm], "seed": seed, "output_dir": folder, "overwrite": True, "disable_tqdm": True}
        command = [sys.executable, args.script, *args.options]
        command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return {"arm": arm, "seed": seed, "log": json.loads(state.read_text())["log_history"]}


def curve(result: dict, name: str) -> list[float]:
    return [entry[name] for entry in result["log"] if name in entry]


def ends(result: dict) -> dict[str, float]:
    """The evaluations before and after: `start_*` and `end_*`."""
    return {k: v for entry in result["log"] for k, v in entry.items() if k.startswith(("start_", "end_"))}


def interval(values: list[float]) -> str:
    """Mean and 95 % interval over seeds (Student's t)."""
    quantiles = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
    half = (
        quantiles.get(len(values), 2.0) * np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    )
    return f"{np.mean(values):.3f} ± {half:.3f}"


def show(results: list[dict], args: argparse.Namespace) -> None:
    names = sorted({k for r in results for k in ends(r) if k.endswith(("_success", "_true_thoughts"))}, reverse=True)
    table = Table(
        "arm", "seeds", *names, "largest fall", title=f"{Path(args.script).stem}: mean over seeds, 95 % interval"
    )
    figure, axes = plt.subplots(1, len(CURVES), figsize=(4 * len(CURVES), 3.2), constrained_layout=True)
    for arm in args.arms:
        mine = [r for r in results if r["arm"] == arm]
        falls = [max([0.0, *(-np.diff(curve(r, "episode/success")))]) for r in mine]
        cells = [interval([ends(r)[name] for r in mine]) for name in names]
        table.add_row(arm, str(len(mine)), *cells, f"{max(falls):.2f}")
        for axis, name in zip(axes, CURVES, strict=True):
            length = min(len(curve(r, name)) for r in mine)
            values, updates = np.array([curve(r, name)[:length] for r in mine]), np.arange(1, length + 1)
            (line,) = axis.plot(updates, values.mean(0), label=arm)
            axis.fill_between(updates, values.min(0), values.max(0), alpha=0.2, color=line.get_color(), linewidth=0)
    for axis, title in zip(axes, CURVES.values(), strict=True):
        axis.set(title=title, xlabel="update")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(args.output / "compare.png", dpi=120)
    Console(width=200).print(table)
    (args.output / "compare.json").write_text(json.dumps(results))
    print(f"Figure and raw numbers are in {args.output}. Bands are the range over seeds.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", default="examples/points24.py", help="the training script")
    parser.add_argument("--arms", nargs="+", default=["gtr", "ppo", "cloning", "rl4vlm"], choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=Path("runs/compare"))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; give each OMP_NUM_THREADS=1 then")
    parser.add_argument("options", nargs="*", help="for every run, behind --")
    args = parser.parse_args()
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(run, args, arm, seed) for seed in args.seeds for arm in args.arms]
        show([job.result() for job in runs], args)


if __name__ == "__main__":
    main()
