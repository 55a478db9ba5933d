"""Shortest solutions of Sokoban rooms: A* over single moves, without squares that a box can never leave."""

from __future__ import annotations

import heapq
from functools import lru_cache

from .sokoban_rooms import MOVES, Plan, Room

_FAR = 1 << 30


@lru_cache(maxsize=1024)
def push_distances(plan: Plan) -> tuple[dict[int, int], ...]:
    """For each target, in order, the pushes that a lone box needs to it from each square.

    A square in none of them is dead: a box there can never be brought to a target.
    """
    return tuple(_pull_away(plan, target) for target in sorted(plan.targets))


def _pull_away(plan: Plan, target: int) -> dict[int, int]:
    """Breadth first from the target: a box can be pulled to a square if the player has room behind it."""
    found, waiting = {target: 0}, [target]
    for square in waiting:
        for step in plan.steps:
            next_square, player = square + step, square + 2 * step
            if next_square in plan.floor and player in plan.floor and next_square not in found:
                found[next_square] = found[square] + 1
                waiting.append(next_square)
    return found


@lru_cache(maxsize=8192)
def solve(room: Room) -> tuple[int, ...] | None:
    """The moves of a shortest solution, or `None` if the room can't be solved. The same room gives the same moves."""
    nearest = _nearest(room.plan)
    estimate = sum(nearest.get(box, _FAR) for box in room.boxes)
    if estimate >= _FAR:
        return None
    start = (room.player, room.boxes)
    came_from: dict[tuple[int, frozenset[int]], tuple[tuple[int, frozenset[int]], int] | None] = {start: None}
    cost = {start: 0}
    waiting = [(estimate, 0, 0, start)]
    count = 0
    while waiting:
        _, undone, _, state = heapq.heappop(waiting)
        done = -undone  # of equal estimates, the longest path first: it is closest to a solution
        if done > cost[state]:
            continue
        if state[1] == room.plan.targets:
            return _path(came_from, state)
        for move, (player, boxes) in _successors(room.plan, state, nearest):
            after = (player, boxes)
            if done + 1 < cost.get(after, _FAR):
                cost[after] = done + 1
                came_from[after] = (state, move)
                count += 1
                left = sum(nearest[box] for box in boxes)
                heapq.heappush(waiting, (done + 1 + left, -(done + 1), count, after))
    return None


def _successors(
    plan: Plan, state: tuple[int, frozenset[int]], alive: dict[int, int]
) -> list[tuple[int, tuple[int, frozenset[int]]]]:
    """What each effective move leads to, without pushes onto dead squares."""
    player, boxes = state
    found = []
    for move, step in enumerate(plan.steps):
        ahead = player + step
        if ahead not in plan.floor:
            continue
        if ahead not in boxes:
            found.append((move, (ahead, boxes)))
        elif ahead + step in alive and ahead + step not in boxes:
            found.append((move, (ahead, boxes - {ahead} | {ahead + step})))
    return found


@lru_cache(maxsize=1024)
def _nearest(plan: Plan) -> dict[int, int]:
    """Pushes from each live square to the nearest target: never more than the moves that are left for this box."""
    nearest: dict[int, int] = {}
    for distances in push_distances(plan):
        for square, pushes in distances.items():
            nearest[square] = min(pushes, nearest.get(square, _FAR))
    return nearest


def _path(came_from: dict, state: tuple[int, frozenset[int]]) -> tuple[int, ...]:
    moves = []
    while (step := came_from[state]) is not None:
        state, move = step
        moves.append(move)
    return tuple(reversed(moves))


def best_moves(room: Room) -> tuple[str, ...]:
    """Every move that starts a shortest solution, the solver's own first; empty in a dead end or a solved room."""
    plan = solve(room)
    if not plan:
        return ()
    equal = [move for move in range(len(MOVES)) if move != plan[0] and _moves_left(room.moved(move)) == len(plan) - 1]
    return tuple(MOVES[move] for move in (plan[0], *equal))


def _moves_left(room: Room) -> int | None:
    plan = solve(room)
    return None if plan is None else len(plan)
