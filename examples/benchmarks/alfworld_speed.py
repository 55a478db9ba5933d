"""How much faster is the text engine than ALFWorld's own `AlfredTWEnv`, on the same games with the same commands?

    python examples/benchmarks/alfworld_speed.py                                # bundled games
    python examples/benchmarks/alfworld_speed.py --games $ALFWORLD_DATA/json_2.1.1/valid_seen
    python examples/benchmarks/alfworld_speed.py --memory 240                   # of one process over so many games

Both play the same games with the same commands, one after the other in this process; every text, list of commands and
`won` is compared. `environment` is the whole gymnasium environment, with the picture and the expert's plan.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_gtr.environments.alfworld import TASK_TYPES, ALFWorldEnv
from trl_gtr.environments.alfworld.drawing import draw_scene
from trl_gtr.environments.alfworld.engine import TextEngine
from trl_gtr.environments.alfworld.generator import make_game


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=Path, help="a folder of game.tw-pddl files; default: six bundled games")
    parser.add_argument("--limit", type=int, default=6, help="games to play")
    parser.add_argument("--steps", type=int, default=20, help="steps in each game")
    parser.add_argument("--memory", type=int, help="instead: the memory of a process that plays so many bundled games")
    options = parser.parse_args()
    if options.memory:
        measure_memory(options.memory)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.games or save_bundled(Path(scratch))
        files = sorted(folder.rglob("game.tw-pddl"))[: options.limit]
        views: list[Any] = []
        times = {"official": [0.0, 0.0], "engine": [0.0, 0.0], "environment": [0.0, 0.0]}
        for number, file in enumerate(files):
            commands, texts = play_official(file, options.steps, number, times["official"])
            play_engine(file, commands, texts, times["engine"])
            views += play_environment(file, commands, times["environment"])
    episodes, steps = len(files), len(files) * options.steps
    print(f"{episodes} games, {steps} steps; the same texts, commands and results")
    for name, (start, stepping) in times.items():
        ratios = [official / own for official, own in zip(times["official"], (start, stepping), strict=True)]
        whole = sum(times["official"]) / (start + stepping)
        print(
            f"{name:12s} {start / episodes:6.2f} s to start a game ({ratios[0]:.1f}×), "
            f"{steps / stepping:7.1f} steps/s ({ratios[1]:.1f}×), whole episodes {whole:.1f}×"
        )
    drawing = sorted(seconds(draw_scene, view) for view in views)
    print(f"one picture: median {1000 * drawing[len(drawing) // 2]:.2f} ms, longest {1000 * drawing[-1]:.2f} ms")


def seconds(call: Callable[..., Any], *arguments: Any) -> float:
    times = [0.0]
    timed(times, 0, call, *arguments)
    return times[0]


def timed(times: list[float], place: int, call: Callable[..., Any], *arguments: Any) -> Any:
    start = time.perf_counter()
    result = call(*arguments)
    times[place] += time.perf_counter() - start
    return result


def play_official(file: Path, steps: int, seed: int, times: list[float]) -> tuple[list[str], list[Any]]:
    """Random admissible commands in `AlfredTWEnv`; what it said, for the others to be compared with."""
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    config = {
        "dataset": {"data_path": str(file.parent.parent), "num_train_games": -1},
        "env": {
            "goal_desc_human_anns_prob": 0.0,
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "expert_type": "handcoded",
        },
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 10**6}},
    }
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        env = AlfredTWEnv(config).init_env(batch_size=1)
    rng = random.Random(seed)
    texts, infos = timed(times, 0, env.reset)
    said, commands = [(texts[0], infos["admissible_commands"][0], infos["won"][0])], []
    for _ in range(steps):
        commands.append(rng.choice(infos["admissible_commands"][0]))
        texts, _, _, infos = timed(times, 1, env.step, commands[-1:])
        said.append((texts[0], infos["admissible_commands"][0], infos["won"][0]))
    env.close()
    return commands, said


def play_engine(file: Path, commands: list[str], said: list[Any], times: list[float]) -> None:
    engine = TextEngine()

    def begin() -> Any:
        engine.load(json.loads(file.read_text()))
        return engine.reset()

    states = [timed(times, 0, begin)]
    states += [timed(times, 1, engine.step, command) for command in commands]
    for state, official in zip(states, said, strict=True):
        if (state.feedback, state.admissible_commands, state.won) != official:
            raise SystemExit(f"{file}: the engines differ:\n{state}\n{official}")


def play_environment(file: Path, commands: list[str], times: list[float]) -> list[Any]:
    """What was seen, for the time of a picture."""
    from trl_gtr.environments.alfworld import engine

    engine._TRANSLATIONS.clear()  # the engine has just played this game; a fair start translates it again
    env = ALFWorldEnv(games=[file])
    views = [timed(times, 0, env.reset)[1]["view"]]
    for command in commands:
        *_, terminated, _, info = timed(times, 1, env.step, command)
        views.append(info["view"])
        if terminated:
            break
    return views


def measure_memory(games: int) -> None:
    env = ALFWorldEnv(games="bundled")
    for number in range(games + 1):
        _, info = env.reset(seed=number)
        terminated = False
        while not terminated:
            *_, terminated, _, info = env.step(info["extra.expert_plan"][0])
        if number in (0, games // 2, games):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            print(f"after {number or 1} games: {pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MB")


def save_bundled(folder: Path) -> Path:
    """One game of each task type in the layout of ALFWorld's data."""
    for task_type in TASK_TYPES:
        place = folder / f"{task_type}-Thing-None-Place-0" / "trial_0"
        place.mkdir(parents=True)
        (place / "traj_data.json").write_text(json.dumps({"task_type": task_type}))
        (place / "game.tw-pddl").write_text(json.dumps(make_game(task_type, 0)))
    return folder


if __name__ == "__main__":
    main()
