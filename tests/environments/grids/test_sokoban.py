"""Sokoban: rules, rooms and the solver, against rooms worked out by hand and a plain breadth-first search."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from trl_gtr.environments import SokobanEnv
from trl_gtr.environments.cards.canvas import Picture
from trl_gtr.environments.grids.sokoban_rooms import MOVES, make_room, read_room
from trl_gtr.environments.grids.sokoban_solver import best_moves, push_distances, solve
from trl_gtr.environments.grids.sokoban_tiles import draw_room, tile

ONE_PUSH = ["#####", "#@$.#", "#   #", "#   #", "#####"]
AROUND = ["######", "#    #", "# $. #", "# @  #", "#    #", "######"]  # left, up, right: walk around, then push
CORNER = ["#####", "#$  #", "# @ #", "#  .#", "#####"]
TWO = ["######", "#@ $.#", "#  $.#", "#    #", "#    #", "######"]


def play(lines: list[str], *moves: str) -> list[str]:
    room = read_room(lines)
    for move in moves:
        room = room.moved(MOVES.index(move))
    return room.text()


def shortest(lines: list[str]) -> int | None:
    """Breadth first over the letters themselves: slow, and written without the code under test."""
    seen, level, depth = {tuple(lines)}, [tuple(lines)], 0
    while level:
        if any(not any("$" in line for line in lines) for lines in level):
            return depth
        following = {after for lines in level for after in letters_after(lines)} - seen
        seen |= following
        level, depth = sorted(following), depth + 1
    return None


def letters_after(lines: tuple[str, ...]) -> list[tuple[str, ...]]:
    cells = {(r, c): sign for r, line in enumerate(lines) for c, sign in enumerate(line)}
    ((r, c),) = [at for at, sign in cells.items() if sign in "@+"]
    results = []
    for dr, dc in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        after, one, two = dict(cells), (r + dr, c + dc), (r + 2 * dr, c + 2 * dc)
        if cells[one] in "$*" and cells[two] in " .":
            after[two] = {" ": "$", ".": "*"}[cells[two]]
        elif cells[one] not in " .":
            continue
        after[one] = {" ": "@", "$": "@", ".": "+", "*": "+"}[cells[one]]
        after[r, c] = {"@": " ", "+": "."}[cells[r, c]]
        results.append(tuple("".join(after[r, c] for c in range(len(lines[0]))) for r in range(len(lines))))
    return results


# -- rules ------------------------------------------------------------------------------------------------------------


def test_walk_push_and_bump() -> None:
    assert play(ONE_PUSH, "right") == ["#####", "# @*#", "#   #", "#   #", "#####"]
    assert play(ONE_PUSH, "right", "right") == play(ONE_PUSH, "right")  # the box is at the wall
    assert play(ONE_PUSH, "up") == ONE_PUSH
    assert play(ONE_PUSH, "down") == ["#####", "# $.#", "#@  #", "#   #", "#####"]
    on_target = play(["#####", "#@. #", "# $ #", "#   #", "#####"], "right")
    assert on_target == ["#####", "# + #", "# $ #", "#   #", "#####"]
    assert play(on_target, "left") == ["#####", "#@. #", "# $ #", "#   #", "#####"]


def test_two_boxes_in_a_row_dont_move() -> None:
    row = ["######", "#@$$ #", "#    #", "#.  .#", "######"]
    assert play(row, "right") == row


def test_rewards() -> None:
    env = SokobanEnv()
    env.reset(options={"room": TWO})
    rewards = []
    for move in ("right", "right", "left", "left", "down", "right", "right"):
        _, reward, terminated, truncated, info = env.step(MOVES.index(move))
        rewards.append(round(reward, 6))
    assert rewards == [-0.1, 0.9, -0.1, -0.1, -0.1, -0.1, 10.9]
    assert (terminated, truncated) == (True, False)
    assert info == {"Room": ["######", "#   *#", "#  @*#", "#    #", "#    #", "######"]}
    env.reset(options={"room": ["######", "#@*. #", "# $  #", "#    #", "######"]})
    _, reward, *_ = env.step(MOVES.index("right"))
    assert reward == pytest.approx(-0.1)  # one off, one on
    with pytest.raises(ValueError, match="no such action"):
        env.step(4)


def test_an_episode_has_an_end() -> None:
    env = SokobanEnv(max_steps=2)
    env.reset(seed=0, options={"room": CORNER})
    assert env.step(0)[3] is False
    assert env.step(1)[3] is True
    with pytest.raises(ValueError, match="episode is over"):
        env.step(0)


# -- solver -----------------------------------------------------------------------------------------------------------


def test_solutions_by_hand() -> None:
    assert [MOVES[move] for move in solve(read_room(ONE_PUSH)) or ()] == ["right"]
    assert [MOVES[move] for move in solve(read_room(AROUND)) or ()] == ["left", "up", "right"]
    assert best_moves(read_room(AROUND)) == ("left",)
    assert len(solve(read_room(TWO)) or ()) == 5
    assert solve(read_room(CORNER)) is None
    assert best_moves(read_room(CORNER)) == ()
    assert solve(read_room(["#####", "#@* #", "#   #", "#   #", "#####"])) == ()


def test_two_ways_are_equally_good() -> None:
    room = ["######", "#@   #", "#  $ #", "#    #", "#  . #", "######"]
    assert sorted(best_moves(read_room(room))) == ["right"]
    room = ["######", "#    #", "#@ $ #", "#  . #", "#    #", "######"]
    assert set(best_moves(read_room(room))) == {"up", "right"}


def test_dead_squares_are_corners_and_walls_without_a_target() -> None:
    room = read_room(["#####", "#@  #", "# $ #", "#  .#", "#####"])
    inner = {(r, c): r * 5 + c for r in (1, 2, 3) for c in (1, 2, 3)}
    alive = {(3, 3), (3, 2), (2, 3), (2, 2)}  # a box at the upper or left wall never leaves it
    (from_target,) = push_distances(room.plan)
    assert set(from_target) == {inner[at] for at in alive}


@pytest.mark.parametrize("boxes", [1, 2])
def test_the_solver_is_exact(boxes: int) -> None:
    rng = np.random.default_rng(boxes)
    unsolvable = 0
    for _ in range(40):
        room = make_room(rng, 6, 6, boxes, (2 * boxes, 12))
        for _ in range(4):  # wander, also into dead ends
            room = room.moved(int(rng.integers(4)))
        found, expected = solve(room), shortest(room.text())
        assert (None if found is None else len(found)) == expected
        unsolvable += expected is None
        for move in found or ():
            room = room.moved(move)
        assert room.solved == (expected is not None)
    assert unsolvable  # both kinds were seen


# -- rooms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "boxes", "pushes"), [((6, 6), 1, (1, 8)), ((6, 6), 2, (3, 8)), ((7, 8), 3, (4, 9))])
def test_rooms_are_solvable_with_the_pushes_asked_for(
    size: tuple[int, int], boxes: int, pushes: tuple[int, int]
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        room = make_room(rng, *size, boxes, pushes)
        assert read_room(room.text()) == room
        assert len(room.boxes) == len(room.plan.targets) == boxes
        assert not room.boxes & room.plan.targets
        moves = solve(room)
        assert moves is not None
        pushed = 0
        for move in moves:
            after = room.moved(move)
            pushed += after.boxes != room.boxes
            room = after
        assert pushed >= pushes[0]


def test_the_seed_decides_the_room() -> None:
    env = SokobanEnv()
    rooms = ["".join(env.reset(seed=seed)[1]["Room"]) for seed in range(30)]
    assert rooms == ["".join(env.reset(seed=seed)[1]["Room"]) for seed in range(30)]
    assert len(set(rooms)) > 25
    assert {room.count("$") for room in rooms} == {1, 2}


def test_no_room_like_that() -> None:
    with pytest.raises(ValueError, match="ask for fewer pushes"):
        SokobanEnv(size=5, boxes=1, pushes=40).reset(seed=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 4}, "size must be an integer from 5 to 8"),
        ({"size": (6, 6, 6)}, "or a pair of them"),
        ({"boxes": 4}, "boxes must be"),
        ({"boxes": (2, 1)}, "the fewest and the most"),
        ({"pushes": 0}, "pushes must be"),
        ({"walls": 1.0}, "walls must be"),
        ({"max_steps": 0}, "max_steps must be"),
        ({"render_mode": "ansi"}, "render_mode"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SokobanEnv(**options)


@pytest.mark.parametrize(
    ("room", "words"),
    [
        ("#####", "list of lines"),
        (["#####", "#@$.#", "#####"], "5 to 8 rows"),
        ([*ONE_PUSH[:4], "## ##"], "walls all around"),
        ([*ONE_PUSH[:3], "#  @#", "#####"], "not 2 players"),
        ([*ONE_PUSH[:3], "#  $#", "#####"], "2 boxes and 1 targets"),
        ([*ONE_PUSH[:3], "#  x#", "#####"], "equal length, made of"),
        ([*ONE_PUSH[:3], "#   ", "#####"], "equal length"),
        ([], "equal length"),
        (["#####", "#@* #", "#   #", "#   #", "#####"], "solved already"),
    ],
)
def test_rooms_are_checked(room: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SokobanEnv().reset(options={"room": room})


# -- environment ------------------------------------------------------------------------------------------------------


def test_gymnasium_approves() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make("trl_gtr/Sokoban-v0", render_mode="rgb_array").unwrapped, skip_render_check=True)


def test_it_can_be_pickled_in_mid_episode() -> None:
    env = SokobanEnv(size=(5, 7), boxes=1)
    env.reset(seed=3)
    env.step(0)
    twin = pickle.loads(pickle.dumps(env))
    for action in (1, 2, 3, 0, 1):
        (picture, *rest), (other, *others) = env.step(action), twin.step(action)
        assert rest == others
        assert np.array_equal(picture, other)


def square(picture: Picture, row: int, column: int, side: int = 50) -> Picture:
    return picture[row * side : (row + 1) * side, column * side : (column + 1) * side]


def test_the_picture_shows_the_room() -> None:
    lines = ["######", "#  . #", "# $* #", "# +  #", "#   $#", "######"]
    picture = draw_room(lines)
    for row, line in enumerate(lines):
        for column, sign in enumerate(line):
            assert np.array_equal(square(picture, row, column), tile(sign, 50))
    kinds = [tile(sign, 36).tobytes() for sign in "# .$*@+"]
    assert len(set(kinds)) == 7
    moved = draw_room(play(lines, "right"))
    assert np.array_equal(square(moved, 3, 2), tile(".", 50))  # nothing is left behind
    assert draw_room(["#######"] * 5).shape == (300, 300, 3)
