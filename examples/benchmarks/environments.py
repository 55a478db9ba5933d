"""Steps a second of each game, the share that goes into drawing, and the time of the dead-end test.

    python examples/benchmarks/environments.py [--steps 5000]

Random play on one core, resets and observations included. Times are CPU times, so that other programs on the machine
don't count.
"""

import argparse
import random
import statistics
import time

import gymnasium as gym
from rich.console import Console
from rich.table import Table

import trl_gtr.environments  # noqa: F401  (registers the games)
from trl_gtr.environments.cards.arithmetic import next_tokens

GAMES = [
    *(f"gym_cards/{name}-v0" for name in ("Points24", "EZPoints", "NumberLine", "Blackjack")),
    "trl_gtr/Sokoban-v0",
]


def play(env: gym.Env, steps: int) -> float:
    """Seconds for `steps` random steps."""
    start = time.process_time()
    for _ in range(steps):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    return time.process_time() - start


def measure_game(name: str, steps: int) -> tuple[float, float]:
    """(steps a second, share of the time spent drawing)."""
    env = gym.make(name)
    env.reset(seed=0)
    env.action_space.seed(0)
    play(env, 500)  # draws cards and tiles
    whole = play(env, steps)
    drawing = 0.0
    picture = env.unwrapped.picture

    def timed_picture():
        nonlocal drawing
        start = time.process_time()
        result = picture()
        drawing += time.process_time() - start
        return result

    env.unwrapped.picture = timed_picture
    whole_timed = play(env, steps)
    return steps / whole, drawing / whole_timed


def measure_dead_ends(hands: int) -> list[float]:
    """Seconds of each `next_tokens` call along random play."""
    rng = random.Random(0)
    times = []
    for _ in range(hands):
        hand = [min(rng.randint(1, 13), 10) for _ in range(4)]
        left, formula = list(hand), []
        while True:
            start = time.process_time()
            next_tokens(formula, hand)
            times.append(time.process_time() - start)
            wants_number = not formula or formula[-1] in "+-*/("
            if wants_number:
                token = rng.choice([*map(str, left), "("])
            else:
                token = rng.choice([*"+-*/", *(")" if formula.count("(") > formula.count(")") else "")])
            if not left or len(formula) > 20:
                break
            if token.isdecimal():
                left.remove(int(token))
            formula.append(token)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000, help="steps a game")
    arguments = parser.parse_args()

    table = Table(title="Games, one core")
    for column in ("game", "steps/s", "drawing"):
        table.add_column(column, justify="left" if column == "game" else "right")
    for name in GAMES:
        rate, drawing = measure_game(name, arguments.steps)
        table.add_row(name, f"{rate:,.0f}", f"{drawing:.0%}")
    times = sorted(measure_dead_ends(300))
    console = Console()
    console.print(table)
    console.print(
        f"dead-end test, {len(times)} calls along random play: median {statistics.median(times) * 1e3:.2f} ms, "
        f"99 % under {times[int(0.99 * len(times))] * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
