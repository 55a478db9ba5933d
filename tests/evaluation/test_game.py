"""A game step by step: the deals of an evaluation, and verdicts of judge and expert."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from toy import COLOURS, PROMPT, BareColourTask, ColourTask

from trl_gtr import ExpertAgent, evaluate_agent, make_task
from trl_gtr.evaluation.game import Game, readable, written_response


@pytest.fixture
def game() -> Iterator[Game]:
    made = Game(ColourTask(length=1))
    yield made
    made.close()


def said(colour: str, action: str) -> str:
    return ColourTask.format.render({"thoughts": f"it is {colour}"}, action)


def test_verdicts(game: Game) -> None:
    colour = game.episode.info["colour"]
    other = next(each for each in COLOURS if each != colour)
    step = game.step(said(other, colour))
    assert step.judgement == {"colour": False}
    assert step.correction is not None
    assert (step.correction.verdict, step.correction.thought) == ("corrected", {"thoughts": f"it is {colour}"})
    assert game.ended
    assert game.succeeded  # the action was right
    assert (game.won, game.played) == (1, 1)
    game.deal()
    colour = game.episode.info["colour"]
    step = game.step(said(colour, next(each for each in COLOURS if each != colour)))
    assert step.judgement == {"colour": True}
    assert step.correction is not None
    assert (step.correction.verdict, step.correction.action) == ("right", colour)
    assert not game.succeeded
    assert (game.won, game.played) == (1, 2)


def test_without_judge_and_expert() -> None:
    game = Game(BareColourTask(length=1))
    step = game.step(said("red", "red"))
    assert (dict(step.judgement), step.correction, game.hint()) == ({}, None, None)


def test_the_same_deals_as_an_evaluation() -> None:
    task = make_task("points24", hands="pool")
    starts = [episode.start for episode in evaluate_agent(ExpertAgent(task), task, 3, seed=5).episodes]
    game, seen = Game(task, seed=5), []
    for _ in range(3):
        seen.append(task.describe_start(game.episode.info))
        while not game.ended:
            game.step(game.hint() or "")
        game.deal()
    assert seen == starts
    assert (game.won, game.played) == (3, 3)


def test_what_is_legal(game: Game) -> None:
    assert game.is_legal(said("red", "blue"))
    assert not game.is_legal(said("red", "pink"))
    assert not game.is_legal("red")
    step = game.step("red")
    assert not step.transition.legal
    assert step.transition.substitute in COLOURS


def test_rules_leave_json_out() -> None:
    game = Game(make_task("number_line"))
    assert "JSON" in game.prompt
    assert game.rules.endswith("Allowed actions: -, +")
    assert Game(ColourTask()).rules == PROMPT


def test_typed_thoughts() -> None:
    points, line = make_task("points24").format, make_task("number_line").format
    text = written_response(points, {"cards": "4, 9 A  K", "thoughts": " I aim "}, "+")
    assert text == '{"cards": ["4", "9", "A", "K"], "formula": "", "thoughts": "I aim", "action": "+"}'
    assert line.parse(written_response(line, {"current number": "3"}, "+")).fields["current number"] == 3
    with pytest.raises(ValueError, match='"current number" must be a number'):
        written_response(line, {"current number": "three"}, "+")
    assert readable(["4", "9"]) == "4 9"
    assert readable(3) == "3"
