"""The bundled games, and where games are found."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from alfworld_cases import REAL_GAMES, needs_alfworld, needs_real_games, real_game, save_game, without_data

from trl_gtr.environments.alfworld import TASK_TYPES, find_games
from trl_gtr.environments.alfworld.generator import SEEDS, SPLITS, bundled_games, layout_of, make_game, split_of
from trl_gtr.environments.alfworld.installed import import_package
from trl_gtr.environments.alfworld.rooms import ROOM_KINDS

BUNDLED = [game for split in SPLITS for game in bundled_games(split)]


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_data(monkeypatch, tmp_path)


def test_bundled_games_by_split() -> None:
    counts = {split: Counter(task_type for task_type, _ in bundled_games(split)) for split in SPLITS}
    assert {split: set(counts[split].values()) for split in SPLITS} == {
        "train": {40},
        "valid_seen": {8},
        "valid_unseen": {12},
    }
    assert all(set(counts[split]) == set(TASK_TYPES) for split in SPLITS)
    assert len(BUNDLED) == len(set(BUNDLED)) == 360


def test_unseen_games_have_layouts_of_their_own() -> None:
    layouts = {split: {layout_of(*game) for game in bundled_games(split)} for split in SPLITS}
    assert not layouts["train"] & layouts["valid_unseen"]
    assert layouts["valid_seen"] <= layouts["train"]
    for kind in ROOM_KINDS:
        rooms = {layout.receptacles for found in layouts.values() for layout in found if layout.kind == kind}
        assert len(rooms) == 10, kind
    assert split_of(SEEDS + 8) == "valid_unseen"


def make_rooms(hash_seed: str) -> str:
    code = (
        "from trl_gtr.environments.alfworld.generator import *; import hashlib; "
        "print(hashlib.sha256(repr([layout_of(t, s) for t in TASK_TYPES for s in range(SEEDS)]).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_layouts_do_not_depend_on_the_process() -> None:
    assert make_rooms("1") == make_rooms("2")


class TestPlayed:
    """What needs the installed package."""

    pytestmark = needs_alfworld

    def test_games_are_a_pure_function_and_distinct(self) -> None:
        problems = [make_game(*game)["pddl_problem"] for game in BUNDLED]
        assert len({problem.split("\n", 1)[1] for problem in problems}) == 360  # without the game's name
        make_game.cache_clear()
        assert [make_game(*game)["pddl_problem"] for game in BUNDLED[::40]] == problems[::40]

    def test_games_stay_what_they_were(self) -> None:
        """Results on the bundled games can only be compared while the games are the same."""
        digest = hashlib.sha256()
        for game in BUNDLED:
            made = make_game(*game)
            digest.update((made["pddl_problem"] + made["grammar"]).encode())
        assert digest.hexdigest()[:16] == "c46852d9117f9649"

    def test_unknown_type(self) -> None:
        with pytest.raises(ValueError, match="the six are pick_and_place_simple"):
            make_game("pick_and_run", 0)

    @pytest.mark.parametrize("task_type", TASK_TYPES)
    def test_the_goal_is_read_from_the_game(self, task_type: str) -> None:
        from trl_gtr.environments.alfworld.goals import read_goal

        game = make_game(task_type, 4)
        goal = read_goal(game["pddl_problem"])
        assert goal.task_type == task_type
        assert f" {goal.object} " in game["grammar"].split("Your task is to: ")[1].split('"')[0] + " "

    @pytest.mark.parametrize(("task_type", "seed"), [(task_type, 9 * i) for i, task_type in enumerate(TASK_TYPES)])
    def test_fast_downward_wins(self, task_type: str, seed: int) -> None:
        win(task_type, seed)

    @pytest.mark.slow
    def test_fast_downward_wins_every_bundled_game(self) -> None:
        for task_type, seed in BUNDLED:
            win(task_type, seed)


def win(task_type: str, seed: int) -> None:
    """Fast Downward's plan wins, and our planner's is as short, counted in commands, or shorter."""
    from trl_gtr.environments.alfworld.engine import TextEngine
    from trl_gtr.environments.alfworld.goals import read_goal
    from trl_gtr.environments.alfworld.planner import plan
    from trl_gtr.environments.alfworld.world import WorldReader

    game = make_game(task_type, seed)
    engine = TextEngine()
    engine.load(game)
    assert not engine.reset().won
    commands = engine.plan()
    own = plan(WorldReader(engine.state, engine.entities).read(), read_goal(game["pddl_problem"])).commands
    assert 1 < len(own) <= len(commands) < 50
    for way in (commands, own):
        state = engine.reset()
        for command in way:
            assert command in state.admissible_commands
            state = engine.step(command)
        assert state.won
    engine.close()


def names(**options: object) -> list[str]:
    return [game.name for game in find_games(**options)]  # type: ignore[arg-type]


def test_bundled_games_without_data() -> None:
    assert names() == names(games="bundled")
    assert len(names(split="valid_unseen")) == 72
    found = find_games(task_types=["look_at_obj_in_light"])
    assert {game.task_type for game in found} == {"look_at_obj_in_light"}
    assert len(found) == 40


def test_named_games() -> None:
    assert names(games=["bundled:pick_and_place_simple/7"]) == ["bundled:pick_and_place_simple/7"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "split must be one of train"),
        ({"task_types": ["cook"]}, "there is no cook"),
        ({"games": "all"}, "games must be 'auto'"),
        ({"games": "data"}, "alfworld-download"),
        ({"games": ["/nowhere/game.tw-pddl"]}, "there is no game at"),
        ({"games": ["bundled:pick_and_place_simple/7"], "task_types": ["look_at_obj_in_light"]}, "Remove a filter"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        names(**options)


@pytest.mark.alfworld
@pytest.mark.skipif(needs_alfworld[1].args[0], reason=needs_alfworld[1].kwargs["reason"])
def test_data_is_found_though_it_is_set_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert names()[0].startswith("bundled:")
    folder = tmp_path / "data" / "json_2.1.1" / "train"
    path = save_game(folder, "pick_and_place_simple", 3)
    sliced = folder / "pick_and_place_simple-AppleSliced-None-Desk-3" / "trial_1"
    movable = folder / "pick_and_place_with_movable_recep-Pen-Mug-Desk-3" / "trial_1"
    unsolvable = folder / "pick_and_place_simple-Pen-None-Desk-3" / "trial_1"
    for place in (sliced, movable, unsolvable):
        place.mkdir(parents=True)
        game = {**json.loads(path.read_text()), "solvable": place is not unsolvable}
        (place / "game.tw-pddl").write_text(json.dumps(game))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "data"))
    assert names() == names(games="data") == [str(path)]
    assert names(games="bundled")[0].startswith("bundled:")
    with pytest.raises(ValueError, match=r"has no folder json_2\.1\.1/valid_seen"):
        names(split="valid_seen")


def test_a_wrong_folder_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "typo"))
    with pytest.raises(ValueError, match=r"ALFWORLD_DATA is .*typo"):
        names()


@needs_real_games
def test_real_games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(REAL_GAMES))
    assert [len(names(split=split)) for split in SPLITS] == [12, 6, 6]
    assert Counter(game.task_type for game in find_games()) == dict.fromkeys(TASK_TYPES, 2)
    path = real_game("pick_and_place_simple-Mug")
    assert names(games=[path]) == names(games=[path.parent.parent]) == [str(path.resolve())]


def test_a_script_of_the_same_name_does_not_hide_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As examples/alfworld.py would, which stands first in the path of every script beside it."""
    (tmp_path / "alfworld.py").write_text("raise RuntimeError('the script')")
    (tmp_path / "site" / "alfworld").mkdir(parents=True)
    (tmp_path / "site" / "alfworld" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site"), *sys.path])
    monkeypatch.delitem(sys.modules, "alfworld", raising=False)
    before = list(sys.path)
    import_package()
    assert sys.modules["alfworld"].__path__ == [str(tmp_path / "site" / "alfworld")]
    assert sys.path == before
    monkeypatch.delitem(sys.modules, "alfworld")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError):
        import_package()
