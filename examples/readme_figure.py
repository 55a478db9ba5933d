"""The README's figure: GTR against PPO alone over seeds, and what the two agents think in similar states.

    python examples/readme_figure.py runs/compare/points24 --gtr gtr --ppo ppo --output docs/readme.png

Reads the output folder of `compare.py`: `compare.json` for the curves, and the episodes of one run per arm for the
thoughts. For each run it shows the most repeated untrue thought in its last updates (the most repeated one if all are
true) and a state in which it occurred.
"""

from __future__ import annotations

import argparse
import io
import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image

from trl_gtr.evaluation.comparison_figures import draw_band
from trl_gtr.report.runs import read_runs

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CURVES = {"episode/success": "success", "thoughts/true": "true thoughts"}
COLOURS = {"GTR": "#0b5cb8", "PPO only": "#c2410c"}


def draw_curve(axis: Any, runs: list[dict[str, Any]], arms: dict[str, str], metric: str, title: str) -> None:
    for words, arm in arms.items():
        mine = [run for run in runs if run["arm"] == arm]
        if not mine:
            raise SystemExit(f"compare.json has no run of {arm}: set --gtr and --ppo to arms that it has.")
        draw_band(axis, mine, metric, words, COLOURS[words])
    axis.set(xlabel="update", ylim=(0, 1.02))
    axis.set_title(title, loc="left", fontweight="bold")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def is_true(row: dict[str, Any]) -> bool:
    return all(part["right"] for part in row["judgement"])


def telling_step(folder: Path) -> tuple[dict[str, Any], str]:
    """A representative late step, and how often its thought was said."""
    rows = read_runs([folder])[0].rows
    if not rows:
        raise SystemExit(f"{folder} has no logged episodes: train with `episode_log_rate` above 0.")
    last = sorted({row["update"] for row in rows})[-3:]
    late = [row for row in rows if row["update"] in last]
    candidates = [row for row in late if not is_true(row)] or late
    text, count = Counter(row["thought_text"] for row in candidates).most_common(1)[0]
    step = next(row for row in candidates if row["thought_text"] == text)
    share = sum(map(is_true, late)) / len(late)
    return step, f"said {count} × in {len(late)} late steps, of which {share:.0%} are true"


def draw_thought(axis: Any, words: str, folder: Path) -> None:
    step, said = telling_step(folder)
    axis.imshow(Image.open(io.BytesIO(step["image"]["bytes"])), aspect="equal", extent=(0, 1, 0, 1))
    axis.set(xlim=(0, 2.9), ylim=(0, 1))
    axis.axis("off")
    axis.text(1.08, 0.97, words, color=COLOURS[words], fontsize=13, fontweight="bold", va="top")
    axis.text(1.08, 0.80, textwrap.fill(f"“{step['thought_text']}”", 38), fontsize=10, va="top")
    parts = "   ".join(f"{part['part']} {'✓' if part['right'] else '✗'}" for part in step["judgement"])
    axis.text(1.08, 0.34, f"{parts}\naction: {step['action']}", fontsize=9, color="#545d68", va="top")
    axis.text(1.08, -0.01, said, fontsize=8, color="#545d68", va="bottom")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output of compare.py")
    parser.add_argument("--gtr", default="gtr", help="name of the GTR arm")
    parser.add_argument("--ppo", default="ppo", help="name of the PPO-only arm")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run whose thoughts are shown")
    parser.add_argument("--output", type=Path, default=Path("docs/readme.png"))
    args = parser.parse_args()
    runs = json.loads((args.folder / "compare.json").read_text("utf-8"))
    arms = {"GTR": args.gtr, "PPO only": args.ppo}
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.2), layout="constrained", height_ratios=(3, 2.4))
    for axis, (metric, title) in zip(axes[0], CURVES.items(), strict=True):
        draw_curve(axis, runs, arms, metric, title)
    axes[0][0].legend(frameon=False)
    for axis, (words, arm) in zip(axes[1], arms.items(), strict=True):
        draw_thought(axis, words, args.folder / arm / f"seed{args.seed}")
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
