"""`trl-gtr play`: in a terminal with typed lines, and on a page through its server."""

from __future__ import annotations

import io
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from toy import ColourTask

from trl_gtr import ExpertAgent, make_task
from trl_gtr.cli import main
from trl_gtr.evaluation.agents import NoAnswer
from trl_gtr.evaluation.game import Game
from trl_gtr.scripts.play_page import PAGE, PageGame, make_server
from trl_gtr.scripts.play_terminal import TerminalGame, half_blocks


def typed(task: Any, lines: list[str], episodes: int = 1) -> tuple[str, list[str]]:
    """What a person sees who types these lines, and what they were asked."""
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    asked: list[str] = []
    left = iter(lines)

    def ask(prompt: str) -> str:
        asked.append(prompt)
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    TerminalGame(Game(task), None, console, ask).play(episodes)
    return console.export_text(), asked


def test_a_person_plays() -> None:
    """NumberLine, seed 0, goes from 0 to 4."""
    right = "0 is below 4, so I go up with +"
    lines = ["0", "4", right, "+", "1", "", "1 is above 4, so I go down with -", "-", "", "", "", "", "q"]
    shown, asked = typed(make_task("number_line"), lines)
    assert "JSON" not in shown
    assert "judge: true   current ✓  target ✓  direction ✓" in shown
    assert "judge: untrue   current ✓  target ✓  direction ✗" in shown
    assert "expert: current number: 1; target number: 4; thoughts: " in shown
    assert asked[:5] == ["current number> ", "target number> ", "thoughts> ", "action> ", "current number [0]> "]
    assert shown.rstrip().endswith("0 of 0 deals won")


def test_a_person_wins_without_thoughts() -> None:
    shown, asked = typed(make_task("number_line"), ["", "+"] * 4)
    assert asked == ["current number> ", "action> "] * 4
    assert "judge" not in shown
    assert shown.rstrip().endswith("Deal 1: won\n1 of 1 deals won")


def test_slips_are_asked_again() -> None:
    shown, _ = typed(make_task("number_line"), ["?", "zero", "4", "up", "+", "0", "", "", "up", "q"])
    assert '{"current number": 0, "target number": 4' in shown  # the hint
    assert '"current number" must be a number Try again.' in shown
    assert "'up' is not legal here. Legal: -, +" in shown


@pytest.mark.parametrize("pause", [False, True])
def test_an_agent_plays(pause: bool) -> None:
    task, asked = make_task("ezpoints"), []
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    ask = lambda prompt: asked.append(prompt) or ("q" if len(asked) == 3 else "")  # noqa: E731
    TerminalGame(Game(task), ExpertAgent(task), console, ask, pause).play(2)
    shown = console.export_text()
    assert "cards: 10 2" in shown
    assert ("2 of 2 deals won" if not pause else "0 of 0 deals won") in shown
    assert len(asked) == (3 if pause else 0)


def test_control_characters_are_escaped() -> None:
    class Rude:
        def respond(self, prompts: Any, images: Any, infos: Any) -> list[str]:
            return [ColourTask.format.render({"thoughts": "\x1b[2Jgone"}, "red")]

    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    TerminalGame(Game(ColourTask()), Rude(), console, pause=False).play(1)
    assert "\\x1b[2Jgone" in console.export_text()


def test_half_blocks() -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    image[:2] = 255
    text = half_blocks(image, 4)
    assert text.plain == "▀▀▀▀\n▀▀▀▀\n"
    first, last = text.spans[0].style, text.spans[-1].style
    assert first.color.triplet == first.bgcolor.triplet == (255, 255, 255)  # type: ignore[union-attr]
    assert last.color.triplet == (0, 0, 0)  # type: ignore[union-attr]


# -- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture
def address() -> Iterator[str]:
    server, url = make_server(PageGame(Game(make_task("number_line")), None))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield url
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(url: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        content = answer.read()
    return json.loads(content) if answer.headers["Content-Type"] == "application/json" else content


def test_a_game_on_the_page(address: str) -> None:
    assert fetch(address) == PAGE.read_bytes()
    state = fetch(address + "state")
    assert state["image"].startswith("data:image/")
    assert (state["actions"], [field["key"] for field in state["fields"]]) == (
        ["-", "+"],
        ["current number", "target number", "thoughts"],
    )
    assert fetch(address + "hint", {})["hint"].startswith('{"current number": 0')
    assert fetch(address + "step", {"action": "up"})["error"] == "This action is not legal here."
    assert "must be a number" in fetch(address + "step", {"thought": {"target number": "x"}, "action": "+"})["error"]
    thought = {"current number": "0", "target number": "3", "thoughts": "so I go up with +"}
    (step,) = fetch(address + "step", {"thought": thought, "action": "+"})["steps"]
    assert step["verdict"][0] == "judge: untrue   current ✓  target ✗  direction ✓"
    for _ in range(3):
        state = fetch(address + "step", {"action": "+"})
    assert (state["ended"], state["succeeded"], state["score"]) == (True, True, "1 of 1 deals won")
    assert state["steps"][-1]["verdict"] == []  # there was no thought
    assert state["actions"] == []
    state = fetch(address + "deal", {})
    assert (state["ended"], state["steps"]) == (False, [])


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("../", None, {}, 404),
        ("../wrong/state", None, {}, 404),
        ("state", None, {"Host": "evil.example"}, 404),
        ("format", {}, {}, 404),
        ("step", [], {}, 400),
        ("step", {"thought": "x"}, {}, 400),
        ("step", {"action": "x" * 100_000}, {}, 404),
    ],
)
def test_what_the_server_refuses(address: str, path: str, body: Any, headers: dict[str, str], status: int) -> None:
    base = address if not path.startswith("../") else address.rsplit("/", 2)[0] + "/"
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetch(base + path.removeprefix("../"), body, **headers)
    assert refused.value.code == status


def test_an_agent_on_the_page() -> None:
    task = make_task("ezpoints")
    page = PageGame(Game(task), ExpertAgent(task))
    state = page.state()
    assert (state["person"], state["fields"], state["actions"]) == (False, [], [])
    while not state["ended"]:
        state = page.act("step", {})
    assert state["succeeded"]
    assert all(step["true"] for step in state["steps"])
    assert page.act("step", {}) == state  # over is over


# -- the command -----------------------------------------------------------------------------------------------------


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["play", "--task", "ezpoints", "--agent", "expert", "--episodes", "2"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("2 of 2 deals won")
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    assert main(["play", "--task", "ezpoints"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("0 of 0 deals won")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "pionts24"], "did you mean 'points24'?"),
        (["--agents", "expert"], "did you mean `agent`?"),
        (["--episodes", "0"], "--episodes must be at least 1, not 0."),
        (["--temperature", "-1"], "--temperature must not be negative"),
        (["--agent", "openai:gpt-4o"], "set OPENAI_API_KEY"),
    ],
)
def test_mistakes(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(["play", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_silent_server_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Silent:
        def respond(self, *args: Any) -> list[str]:
            raise NoAnswer("some-model gave no answer")

    monkeypatch.setattr("trl_gtr.scripts.playing.load_agent", lambda *args, **kwargs: Silent())
    with pytest.raises(SystemExit):
        main(["play", "--task", "ezpoints", "--agent", "openai:some-model"])
    assert capsys.readouterr().err == "error: some-model gave no answer\n"
