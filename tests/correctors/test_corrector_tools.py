"""The tool loop of Points24 and the checks of its answers, over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from chat_server import ChatServer, calls_tool, completion, says, status
from corrector_cases import CANARY, points_answer, points_request

from trl_gtr.correctors import OpenAICorrector

pytest.importorskip("openai")

TOOL = "find_all_correct_formulas"
HAND = {"card1": "4", "card2": "6", "card3": "A", "card4": "A"}
MISREAD = points_request(read=("4", "6", "A", "7"))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made: list[OpenAICorrector] = []

    def build(server: ChatServer, **options: Any) -> OpenAICorrector:
        made.append(OpenAICorrector("test-model", base_url=server.url, api_key="sk-tool-tests", **options))
        return made[-1]

    yield build
    for corrector in made:
        corrector.close()


def test_tool_is_offered_called_and_its_answer_returned(make: Any) -> None:
    with ChatServer(calls_tool(TOOL, HAND), says(points_answer())) as server:
        answer = make(server).correct([MISREAD])[0]
        first, second = (seen.body for seen in server.seen)
    assert answer.verdict == "corrected"
    assert answer.thought["cards"] == ["4", "6", "A", "A"]
    assert (answer.target, answer.action, answer.usage.calls) == ("4*6*1*1", "*", 2)
    assert first["tools"][0]["function"]["name"] == TOOL
    asked, told = second["messages"][-2:]
    assert asked["tool_calls"][0]["id"] == told["tool_call_id"] == "call_0"
    assert told["role"] == "tool"
    formulas = told["content"].split(", ")
    assert len(formulas) > 3
    assert all(sorted(re.findall("[0-9]+", formula)) == ["1", "1", "4", "6"] for formula in formulas)
    assert CANARY not in server.seen[1].text


def test_repair_is_bound_to_the_schema(make: Any) -> None:
    with ChatServer(says("4*6*1*1 it is"), says(points_answer())) as server:
        assert make(server).correct([MISREAD])[0].verdict == "corrected"
        first, repair = (seen.body for seen in server.seen)
    assert ("response_format" in first, "tool_choice" in first) == (False, False)
    assert repair["response_format"]["type"] == "json_schema"
    assert repair["tool_choice"] == "none"


def test_hostile_calls_are_not_repeated_in_full(make: Any) -> None:
    """Spaces that JSON allows, a long name and long words: what the history repeats is paid for."""
    padded = json.dumps(HAND) + " " * 200_000

    def hostile(handler: Any, seen: Any) -> None:
        call = {"id": "i" * 100_000, "type": "function", "function": {"name": "n" * 100_000, "arguments": padded}}
        handler.send(200, completion("w" * 100_000, finish="tool_calls", tool_calls=[call]))

    with ChatServer(hostile, says(points_answer())) as server:
        corrector = make(server)
        assert corrector.correct([MISREAD])[0].verdict == "corrected"
        asked, told = server.seen[1].body["messages"][-2:]
        assert len(server.seen[1].text) - len(server.seen[0].text) < 8_000
    assert asked["tool_calls"][0]["function"]["arguments"] == "{}"
    assert asked["tool_calls"][0]["id"] == told["tool_call_id"]


HOSTILE = {
    "code": {**HAND, "card1": "__import__('os').system('touch /tmp/pwned')"},
    "numbers out of range": {**HAND, "card1": 10**30},
    "missing": {"card1": "4"},
    "unknown": {**HAND, "card5": "4"},
    "nested": {**HAND, "card1": {"card1": ["4"]}},
    "null": None,
    "no object": "[1, 2, 3]",
    "no JSON": "{card1: 4",
    "huge": json.dumps({**HAND, "card1": "9" * 5000}),
    "twice": '{"card1": "4", "card1": "5", "card2": "6", "card3": "A", "card4": "A"}',
}


@pytest.mark.parametrize("arguments", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_arguments_get_an_error_and_the_talk_goes_on(make: Any, arguments: Any) -> None:
    with ChatServer(calls_tool(TOOL, arguments), says(points_answer())) as server:
        answer = make(server).correct([MISREAD])[0]
        asked, told = server.seen[1].body["messages"][-2:]
    assert answer.verdict == "corrected"
    assert told["content"].startswith("error: ")
    assert len(told["content"]) < 300
    json.loads(asked["tool_calls"][0]["function"]["arguments"])  # servers read the history again


def test_unknown_tool_gets_an_error(make: Any) -> None:
    with ChatServer(calls_tool("shell", {"command": "ls"}), says(points_answer())) as server:
        assert make(server).correct([MISREAD])[0].verdict == "corrected"
        assert server.seen[1].body["messages"][-1]["content"] == f"error: there is no such tool; the tools are {TOOL}"


def test_endless_tool_calls_end(make: Any) -> None:
    with ChatServer(calls_tool(TOOL, HAND)) as server:
        corrector = make(server, max_tool_rounds=2)
        answer = corrector.correct([MISREAD])[0]
        assert len(server.seen) == 3
        assert [seen.body.get("tool_choice", "auto") for seen in server.seen] == ["auto", "auto", "none"]
        # A schema would keep servers with constrained decoding from ever writing a call.
        assert ["response_format" in seen.body for seen in server.seen] == [False, False, True]
        assert all("tools" in seen.body for seen in server.seen)  # they explain the calls in the history
    assert answer.failure == "unusable"
    assert "without end" in answer.reason
    assert corrector.metrics()["corrector/failed_unusable"] == 1


def test_too_many_calls_at_once(make: Any) -> None:
    with ChatServer(calls_tool(TOOL, HAND, count=50)) as server:
        assert make(server).correct([MISREAD])[0].failure == "unusable"
        assert len(server.seen) == 1


def test_server_without_tools_is_told_of_them_in_words(make: Any) -> None:
    def old_server(handler: Any, seen: Any) -> None:
        if "tools" in seen.body:
            status(400, "this model does not support tools")(handler, seen)
        elif len(seen.body["messages"]) == 2:
            says({"tool": TOOL, "arguments": HAND})(handler, seen)
        else:
            says(points_answer())(handler, seen)

    with ChatServer(old_server) as server:
        answer = make(server).correct([MISREAD])[0]
        bodies = [seen.body for seen in server.seen]
    assert answer.verdict == "corrected"
    assert [len(body["messages"]) for body in bodies] == [2, 2, 4]
    assert f"{TOOL}: " in bodies[1]["messages"][0]["content"]
    assert bodies[1]["response_format"]["type"] == "json_object"  # a schema would forbid the call
    assert bodies[2]["messages"][-1]["content"].startswith("The tool found: ")


def test_no_solution(make: Any) -> None:
    hopeless = points_answer(possible_solution="NO", target=None, correction=None, right_action=None)
    with ChatServer(says(hopeless)) as server:
        answer = make(server).correct([points_request(("A", "A", "A", "A"), "", aim="1*1*1*1", symbol="1")])[0]
    assert (answer.verdict, answer.thought, answer.action) == ("unsolvable", None, None)


UNUSABLE = {
    "target with a card that it didn't read": points_answer(target="4*6*2-0"),
    "target that isn't 24": points_answer(target="4*6+1*1"),
    "target that doesn't extend the formula": points_answer(target="6*4*1*1"),
    "another formula than the prompted one": points_answer(formula="6", target="6*4*1*1"),
    "five cards": points_answer(("4", "6", "A", "A", "A")),
    "no such rank": points_answer(("4", "6", "A", "joker")),
    "target is not what the thought aims at": points_answer(target="4*6*1/1", aim="4*6*1*1"),
    "action is not the next symbol": points_answer(action="+"),
    "no solution, but a correction": points_answer(possible_solution="NO"),
    "right, but no solution": points_answer(possible_solution="NO", correction=None) | {"evaluation": "YES"},
    "substring of the enum": points_answer(possible_solution="NONE", correction=None),
}


@pytest.mark.parametrize("content", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_unusable_answers(make: Any, content: Any) -> None:
    with ChatServer(says(content)) as server:
        answer = make(server).correct([MISREAD])[0]
        assert len(server.seen) == 2
    assert answer.failure == "unusable"


def test_its_own_reading_counts_not_the_true_one(make: Any) -> None:
    """The corrector reads 3 8 A A from a table of 4 6 A A: consistent in itself, so only an audit can object."""
    request = points_request(formula="", aim="4*6", symbol="4", action="4")
    misread = points_answer(("3", "8", "A", "A"), "", "3*8*1*1", action="3")
    with ChatServer(says(misread)) as server:
        assert make(server).correct([request])[0].verdict == "corrected"
