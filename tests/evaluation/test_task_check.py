"""`check_task`: a sound task has no findings, and each fault is found, under the member to look at."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from toy import COLOURS, BareColourTask, ColourEnv, ColourTask

from trl_gtr import Field, Response, ThoughtFormat, check_task, make_task
from trl_gtr.cli import main

WRONG_EXPERT = {"red": "green", "green": "blue", "blue": "yellow", "yellow": "red"}


class Unseeded(ColourEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=None)


class Grey(ColourEnv):
    def _show(self) -> Any:
        observation, info = super()._show()
        return observation[..., 0], info


class Endless(ColourEnv):
    def __init__(self) -> None:
        super().__init__(length=10**9)


class OneStep(ColourEnv):
    def __init__(self) -> None:
        super().__init__(length=1)


class Rich(ColourEnv):
    def step(self, action: int) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, 10 * reward, *rest


def concluding(thought: Any) -> str:
    return "red"


def loses(self: Any, info: Any, hint: Any = None) -> Response:
    return self.format.respond({"thoughts": f"it is {info['colour']}"}, WRONG_EXPERT[info["colour"]])


def solvable(self: Any, info: Any) -> bool:
    return info["won"]


def needs_a_whole_hint(self: Any, info: Any, hint: Any = None) -> Response:
    return ColourTask.expert(self, info if hint is None else hint.fields["thoughts"])


def unpicklable(self: Any) -> None:
    self.env_kwargs, self.lock = {}, threading.Lock()


def changed(**members: Any) -> ColourTask:
    """The toy task with other members."""
    return type("Changed", (ColourTask,), members)()


def env_of(kind: type[gym.Env]) -> Any:
    return {"make_env": lambda self, *, evaluation=False: kind()}


def found(task: Any, **options: Any) -> list[str]:
    return [str(finding) for finding in check_task(task, **options)]


@pytest.mark.parametrize("name", ["points24", "ezpoints", "number_line"])
def test_shipped_tasks_are_ready(name: str) -> None:
    assert found(make_task(name), episodes=3) == []


def test_luck_is_doubtful_only() -> None:
    (line,) = found(make_task("blackjack"))
    assert line.startswith("doubtful: expert: wins")
    assert line.endswith("fine only if the game involves luck")


def test_what_is_missing() -> None:
    assert found(ColourTask()) == []
    assert [(f.severity, f.member) for f in check_task(BareColourTask())] == [
        ("missing", "expert"),
        ("missing", "judge"),
    ]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (env_of(Unseeded), "wrong: make_env: not reproducible"),
        (env_of(Grey), "wrong: make_env: observations must be images, uint8 (height, width, 3), not uint8, (28, 28)"),
        (env_of(Endless), "doubtful: make_env: episodes don't end within 300 steps"),
        (env_of(Rich), "doubtful: reward_scale: rewards reach ±10: set it to 0.1"),
        (env_of(dict), "wrong: make_env: returns a dict, not a gymnasium environment"),
        ({"make_env": lambda self: ColourEnv()}, "wrong: make_env: raises TypeError"),
        ({"prompt": lambda self, o, i: f"Is it {i['colour']}?"}, "doubtful: prompt: changes with info['colour'], but"),
        ({"prompt": lambda self, o, i: i["color"]}, "wrong: prompt: raises KeyError: 'color'"),
        ({"prompt": lambda self, o, i: None}, "wrong: prompt: must be a non-empty string, not None"),
        ({"earlier_prompt": lambda self, o, i: 7}, "wrong: earlier_prompt: must be a non-empty string, not 7"),
        ({"earlier_prompt": lambda self, o, i: i["color"]}, "wrong: earlier_prompt: raises KeyError: 'color'"),
        ({"public_state": lambda self, i: {"of": object()}}, "wrong: public_state: raises ValueError: a task's"),
        ({"legal_actions": lambda self, i: []}, "wrong: legal_actions: must return at least one action"),
        ({"legal_actions": lambda self, i: [*COLOURS, "pink"]}, "wrong: to_env_action: returns None for 'pink'"),
        (
            {"to_env_action": lambda self, r, i: list(COLOURS).index(r.action) + 3 if r.action in COLOURS else None},
            "wrong: to_env_action: returns 4 for 'green', which is not in Discrete(4)",
        ),
        (
            {"to_env_action": lambda self, r, i: list(COLOURS).index(r.action)},
            "wrong: to_env_action: raises ValueError: 'no such action' is not in list",
        ),
        ({"to_env_action": lambda self, r, i: 0}, "wrong: to_env_action: returns 0 for the action 'no such action'"),
        ({"success": lambda self, steps: steps[-1].reward}, "wrong: success: returns"),
        ({"metrics": lambda self, steps: {"x": steps[99]}}, "wrong: metrics: raises IndexError"),
        ({"solvable": solvable}, "wrong: solvable: raises KeyError while playing: 'won'"),
        ({"starts": lambda self: []}, "wrong: starts: lists no starts"),
        ({"expert": lambda self, i, hint=None: None}, "wrong: expert: has no answer in a state that `solvable` says"),
        (
            {"expert": lambda self, i, hint=None: Response("red", {"thoughts": "it is red"}, "red")},
            "wrong: expert: `format.parse` doesn't read its text back (there is no JSON object in the text)",
        ),
        (
            {"expert": lambda self, i, hint=None: self.format.respond({"thoughts": "x"}, "pink")},
            "wrong: expert: its action 'pink' is not legal",
        ),
        (
            {"expert": loses, **env_of(OneStep)},
            "wrong: expert: wins 0 of 16 episodes, fewer than random play",
        ),
        (
            {"format": ThoughtFormat([Field("thoughts")], conclusion=concluding)},
            "wrong: expert: its thought concludes another action than",
        ),
        (
            {"expert": needs_a_whole_hint},
            "wrong: expert: raises KeyError with a hint that lacks every field: 'thoughts'",
        ),
        ({"judge": lambda self, r, i: {"colour": 1}}, "wrong: judge: must map each part to True or False"),
        ({"judge": lambda self, r, i: {"colour": True}}, "wrong: judge: calls an empty response true"),
        ({"judge": lambda self, r, i: {"colour": False}}, "wrong: judge: calls the expert's own thought untrue"),
        (
            {"judge": lambda self, r, i: {"colour" if r.valid else "error": r.valid}},
            "wrong: judge: must return the same keys for every response, not ['error'] and ['colour']",
        ),
        ({"reading_parts": ("color",)}, "wrong: reading_parts: ['color'] are not keys of `judge`: ['colour']"),
        ({"__init__": unpicklable}, "wrong: __init__: the task can't be pickled"),
    ],
)  # fmt: skip
def test_faults(members: dict[str, Any], expected: str) -> None:
    task = changed(**members)
    lines = found(task, episodes=16 if "fewer than random" in expected else 3)
    assert [line for line in lines if line.startswith(expected)], lines


def test_every_fault_is_in_one_list() -> None:
    task = changed(prompt=lambda self, o, i: "", judge=lambda self, r, i: {"colour": False}, reading_parts=("color",))
    assert {finding.member for finding in check_task(task, 2)} == {"prompt", "judge", "reading_parts"}


def test_hidden_state_may_be_told_if_it_is_public() -> None:
    task = changed(prompt=lambda self, o, i: i["colour"], public_state=lambda self, i: {"colour": i["colour"]})
    assert found(task) == []


def test_what_is_checked() -> None:
    with pytest.raises(TypeError, match=r"pass a task, make_task\('points24'\)"):
        check_task("points24")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`episodes` must be at least 1"):
        check_task(ColourTask(), 0)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--task", "toy:ColourTask", "--episodes", "2"]) == 0
    assert capsys.readouterr().out == "toy:ColourTask: ready for training\n"
    assert main(["check", "--task", "evaluation.test_task_check:Faulty"]) == 1
    out = capsys.readouterr().out
    assert "wrong: make_env: not reproducible" in out
    assert out.endswith("evaluation.test_task_check:Faulty: 1 to fix\n")


def test_the_command_has_no_default_task(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  --task ")]
    assert line.endswith("without one, this machine is checked")
    file = tmp_path / "settings.yaml"
    file.write_text("task: toy:ColourTask\nepisodes: 2\n")
    assert main(["check", "--config", str(file)]) == 0
    assert capsys.readouterr().out == "toy:ColourTask: ready for training\n"


class Faulty(ColourTask):
    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        return Unseeded()
