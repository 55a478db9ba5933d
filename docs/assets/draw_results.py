"""Draws the figures of "Results" from the studies' numbers in `results/`: `python docs/assets/draw_results.py`."""

import json
from pathlib import Path

from trl_gtr.evaluation.comparison_figures import draw_guidance

ASSETS = Path(__file__).parent
FIGURES = {"algorithms": draw_guidance}


def main() -> None:
    for study, draw in FIGURES.items():
        draw(json.loads((ASSETS / "results" / f"{study}.json").read_text("utf-8")), ASSETS / f"results_{study}.png")


if __name__ == "__main__":
    main()
