"""The fast engine says word for word what ALFWorld's own environment says."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alfworld_cases import REAL_GAMES, needs_alfworld, needs_real_games, official_env, real_game, save_game

pytestmark = needs_alfworld


def compare(folder: Path, steps: int, seed: int = 0) -> int:
    """Play one game in both, with commands chosen at random among the admissible ones; count the steps."""
    from trl_gtr.environments.alfworld.engine import TextEngine
    from trl_gtr.environments.alfworld.goals import goal_conditions, read_goal
    from trl_gtr.environments.alfworld.planner import plan
    from trl_gtr.environments.alfworld.world import WorldReader

    official = official_env(folder)
    texts, infos = official.reset()
    game = json.loads(Path(infos["extra.gamefile"][0]).read_text())
    engine = TextEngine()
    engine.load(game)
    state = engine.reset()
    reader, goal = WorldReader(engine.state, engine.entities), read_goal(game["pddl_problem"])
    rng = random.Random(seed)
    for step in range(steps):
        assert state.feedback == texts[0]
        assert state.admissible_commands == infos["admissible_commands"][0]
        assert state.won == infos["won"][0]
        met, conditions = goal_conditions(reader.read(), goal)
        assert (met == conditions) == state.won
        if state.won:
            return step
        ways = plan(reader.read(), goal).commands
        # Half of the commands lead to the goal, so that things are taken, treated and put; one makes no sense.
        command = rng.choice(ways[:1] or ["look"]) if rng.random() < 0.5 else rng.choice(state.admissible_commands)
        command = "fly to the moon" if step == 3 else command
        texts, _, _, infos = official.step([command])
        state = engine.step(command)
    return steps


@pytest.mark.parametrize(("task_type", "seed"), [("pick_heat_then_place_in_recep", 3), ("look_at_obj_in_light", 7)])
def test_bundled_games_are_played_as_by_the_official_environment(tmp_path: Path, task_type: str, seed: int) -> None:
    save_game(tmp_path, task_type, seed)
    assert compare(tmp_path, steps=15) > 3


@needs_real_games
def test_a_real_game_is_played_as_by_the_official_environment(tmp_path: Path) -> None:
    source = real_game("look_at_obj_in_light-CD").parent.parent
    shutil.copytree(source, tmp_path / source.name)
    assert compare(tmp_path, steps=12) > 3


@pytest.mark.slow
@needs_real_games
def test_all_real_games_are_played_as_by_the_official_environment(tmp_path: Path) -> None:
    for number, path in enumerate(sorted(REAL_GAMES.glob("*/*/*/*/game.tw-pddl"))):
        folder = tmp_path / str(number)
        shutil.copytree(path.parent.parent, folder / path.parent.parent.name)
        assert compare(folder, steps=20, seed=number) > 2


def test_a_second_game_starts_afresh() -> None:
    """The engine keeps a library with global state: nothing of one game may reach into the next."""
    from trl_gtr.environments.alfworld.engine import TextEngine
    from trl_gtr.environments.alfworld.generator import make_game

    engine = TextEngine()
    engine.load(make_game("pick_and_place_simple", 0))
    first = engine.reset()
    for command in ("go to fridge 1", "open fridge 1"):
        engine.step(command)
    engine.load(make_game("pick_and_place_simple", 1))
    other = engine.reset()
    engine.load(make_game("pick_and_place_simple", 0))
    assert other.feedback != first.feedback
    assert engine.reset() == first


def test_argv_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_gtr.environments.alfworld import engine
    from trl_gtr.environments.alfworld.generator import make_game

    argv = ["train.py", "--learning_rate", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    engine._TRANSLATIONS.clear()
    game = engine.TextEngine()
    game.load(make_game("pick_and_place_simple", 2))
    game.reset()
    assert sys.argv is argv
    assert argv == ["train.py", "--learning_rate", "1"]


def test_only_the_last_translations_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_gtr.environments.alfworld import engine
    from trl_gtr.environments.alfworld.generator import make_game

    monkeypatch.setattr(engine, "KEPT_TRANSLATIONS", 2)
    engine._TRANSLATIONS.clear()
    for seed in range(3):
        game = make_game("pick_and_place_simple", seed)
        engine.translate(game["pddl_domain"], game["pddl_problem"])
    kept = [problem for _, problem in engine._TRANSLATIONS]
    assert kept == [make_game("pick_and_place_simple", seed)["pddl_problem"] for seed in (1, 2)]


def expression(text: str) -> Any:
    from textworld.generator.game import EntityInfo
    from textworld.logic import Placeholder, Variable

    from trl_gtr.environments.alfworld.grammar import Context, evaluate, parse_expression

    mug = EntityInfo("mug_bar_1", "object")
    mug.name, mug.indefinite = "mug 1", "a"
    bound = {Placeholder("o", "object"): Variable("mug_bar_1", "object")}
    return evaluate(parse_expression(text), Context(None, {"mug_bar_1": mug}, bound))


def test_expressions_of_the_grammar() -> None:
    assert expression("o.indefinite + ' ' + o.name") == "a mug 1"
    assert expression("o.noun or o.name") == "mug 1"
    assert str(expression("o")) == "mug 1"


@pytest.mark.parametrize("text", ["__import__('os')", "o.__class__", "o.name * 9", "[o for o in o]", "(lambda: 1)()"])
def test_a_game_file_runs_no_code(text: str) -> None:
    with pytest.raises(ValueError, match="not supported"):
        expression(text)


def test_closed_engines_leave_the_process_in_order() -> None:
    """Closed engines must not take the process down when it ends, nor disturb those that follow."""
    script = (
        "from trl_gtr.environments.alfworld import ALFWorldEnv\n"
        "envs = [ALFWorldEnv(games=['bundled:pick_and_place_simple/1']) for _ in range(2)]\n"
        "for env in envs:\n"
        "    env.reset(seed=0)\n"
        "    env.close()\n"
        "third = ALFWorldEnv(games=['bundled:pick_and_place_simple/2'])\n"
        "_, info = third.reset(seed=0)\n"
        "while not info['won']:\n"
        "    _, _, _, _, info = third.step(info['extra.expert_plan'][0])\n"
        "third.close()\n"
        "print('won')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "won\n"), done.stderr


def test_facts_of_earlier_games_are_forgotten() -> None:
    """TextWorld keeps every fact that it has ever made; their names differ from game to game."""
    from mementos.core import _memento_cache

    from trl_gtr.environments.alfworld.engine import TextEngine
    from trl_gtr.environments.alfworld.generator import make_game

    engine, other = TextEngine(), TextEngine()
    other.load(make_game("look_at_obj_in_light", 1))
    before = other.reset()
    sizes = []
    for seed in range(8):
        game = make_game("pick_and_place_simple", 1)
        engine.load({**game, "pddl_problem": game["pddl_problem"].replace("_bar_", f"_bar_{seed}_bar_")})
        engine.reset()
        sizes.append(len(_memento_cache))
    assert max(sizes[1:]) < 1.2 * min(sizes[1:]), sizes
    # Who is in the middle of a game doesn't notice.
    assert other.step("look").admissible_commands == before.admissible_commands
    goes = next(command for command in before.admissible_commands if command.startswith("go to"))
    assert goes not in other.step(goes).admissible_commands
