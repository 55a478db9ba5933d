"""Watch each task's expert play: `python examples/demo.py [--episodes 50] [--output runs/demo.png]`.

The expert plays like a language agent: it gets a prompt, answers in text, and the text is parsed into an action. Its
score is that of an agent with perfect thoughts.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from trl_gtr import Task, Transition, make_task

GAMES = ("points24", "ezpoints", "number_line", "blackjack")
FRAME, CAPTION, PAPER = 200, 44, "gainsboro"  # side of a frame and height of its caption, in pixels
NO_MODEL = {"env_index": 0, "response_ids": np.zeros(0, np.int64), "bootstrap": False}


def play(task: Task, seed: int) -> tuple[list[Transition], bool]:
    """Play one episode with the expert; also returns whether the deal was winnable."""
    env = task.make_env(evaluation=True)
    image, info = env.reset(seed=seed)
    solvable, steps, over = task.solvable(info), [], False
    while not over:
        prompt, expert = task.prompt(image, info), task.expert(info)
        if expert is None:  # no longer winnable: the expert passes
            break
        response = task.format.parse(expert.text)
        action = task.to_env_action(response, info)
        if action is None:
            raise ValueError(f"The {task.name} expert wrote an illegal response: {expert.text}")
        before = {"step": len(steps), "image": image, "prompt": prompt, "response": response, "info": info}
        image, reward, terminated, truncated, info = env.step(action)
        over = terminated or truncated
        after = {"reward": float(reward), "terminated": terminated, "truncated": truncated, "legal": True}
        steps.append(Transition(**NO_MODEL, **before, **after, final_info=info if over else None))
    return steps, solvable


def strip(name: str, episode: list[Transition]) -> Image.Image:
    """The episode's frames in a row, each with the action taken there and its reward."""
    sheet = Image.new("RGB", (FRAME * len(episode), FRAME + CAPTION), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=15)
    draw.text((4, FRAME), name, "dimgray", font)
    for column, step in enumerate(episode):
        frame = Image.fromarray(step.image).resize((FRAME - 4, FRAME - 4), Image.Resampling.LANCZOS)
        sheet.paste(frame, (column * FRAME, 0))
        words = f"{step.response.action}    reward {step.reward:+.0f}" if step.reward else step.response.action
        draw.text((column * FRAME + 4, FRAME + 18), words, "black", font)
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch each task's expert play.")
    parser.add_argument("--episodes", type=int, default=50, help="episodes per game")
    parser.add_argument("--output", type=Path, default=Path("runs/demo.png"), help="picture of one episode per game")
    args = parser.parse_args()

    console = Console()
    table = Table("game", "episodes", "success", "on solvable deals", "mean return", "steps/s")
    strips = []
    for name in GAMES:
        task = make_task(name)
        start = time.perf_counter()
        episodes = [play(task, seed) for seed in range(args.episodes)]
        seconds = time.perf_counter() - start
        won = [task.success(steps) for steps, _ in episodes]
        mean_return = sum(step.reward for steps, _ in episodes for step in steps) / args.episodes
        solvable = sum(solvable for _, solvable in episodes)
        rate = sum(len(steps) for steps, _ in episodes) / seconds
        cells = [f"{np.mean(won):.0%}", f"{sum(won)} of {solvable}", f"{mean_return:.2f}", f"{rate:.0f}"]
        table.add_row(name, str(args.episodes), *cells)

        victories = [steps for (steps, _), success in zip(episodes, won, strict=True) if success]
        if not victories:
            raise SystemExit(f"The expert has won no episode of {name}: increase --episodes.")
        shown = min(victories, key=lambda steps: abs(len(steps) - 8))  # long enough to be interesting
        strips.append(strip(name, shown))
        if name == GAMES[0]:
            console.print(Panel(shown[0].prompt, title=f"{name}: the prompt that goes with the image"))
            console.print(Panel(shown[0].response.text, title="the expert's response"))
    console.print(table)

    sheet = Image.new("RGB", (max(image.width for image in strips), sum(image.height for image in strips)), PAPER)
    for row, image in enumerate(strips):
        sheet.paste(image, (0, row * (FRAME + CAPTION)))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(args.output)
    console.print(f"One episode per game: {args.output}")


if __name__ == "__main__":
    main()
