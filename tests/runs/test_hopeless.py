"""Runs from which nothing can be learned: how they are recognised, what is said, and that they stop."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from toy import ColourTask, build_toy_model, quiet_config
from transformers import TrainerControl, TrainerState

from trl_gtr import make_task, tiny_llava
from trl_gtr.correctors import Corrector, ExpertCorrector
from trl_gtr.correctors.base import failed
from trl_gtr.runs.hopeless import HopelessRunCallback, fingerprint
from trl_gtr.runs.stopping import HopelessRun
from trl_gtr.trainer import GTRTrainer
from trl_gtr.types import Correction, Rollout

GOOD = {"response/valid": 0.9, "response/legal": 0.8, "optim/grad_norm": 1.0, "lr": 1e-4, "episode/success": 0.1}


class Model(nn.Linear):
    name_or_path = "some/model"

    def __init__(self) -> None:
        super().__init__(2, 2)


def make(model: Any = None, task: Any = None, **settings: Any) -> HopelessRunCallback:
    defaults = {"on_hopeless": "stop", "ppo_coef": 1.0, "value_warmup_updates": 0}
    return HopelessRunCallback(SimpleNamespace(**defaults | settings), task or make_task("points24"), model or Model())


def log(callback: HopelessRunCallback, *logs: dict[str, float], moves: bool = True, updates: int = 100) -> None:
    state = TrainerState(is_world_process_zero=True, max_steps=updates)
    callback.on_train_begin(None, state, TrainerControl())
    for update, entry in enumerate(logs, 1):
        state.global_step = update
        if moves:
            nn.init.normal_(callback.model.weight)
        callback.on_log(None, state, TrainerControl(), logs=entry)
    if len(logs) == updates:
        callback.on_train_end(None, state, TrainerControl())


@pytest.mark.parametrize(
    ("sign", "moves", "words"),
    [
        ({"response/valid": 0.0}, True, "0% of the responses have the task's format"),
        ({"response/legal": 0.01}, True, "1% of the responses have a legal action"),
        ({"optim/grad_norm": 0.0}, False, "No gradient flows"),
        ({"groups/dead": 1.0}, False, "In every whole group all episodes have the same return"),
        ({}, False, "The policy's weights did not change"),
        ({"corrector/failed": 1.0}, True, "100% of the corrections failed"),
    ],
)
def test_each_sign_warns_once_and_stops_with_the_second(
    sign: dict[str, float], moves: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    callback = make()
    log(callback, GOOD | sign, moves=moves)
    assert words in caplog.text
    assert not callback.why_stop
    log(callback, GOOD | sign, moves=moves)
    assert callback.why_stop
    assert len(caplog.records) == 1


def test_a_corrector_that_is_not_needed_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    callback = make()
    callback.needs_corrector = False
    log(callback, *[GOOD | {"corrector/failed": 1.0}] * 3)
    assert not callback.why_stop
    assert not caplog.records


def test_warn_never_stops(caplog: pytest.LogCaptureFixture) -> None:
    callback = make(on_hopeless="warn")
    log(callback, *[GOOD | {"response/valid": 0.0}] * 3)
    assert not callback.why_stop
    assert len(caplog.records) == 1
    assert "stops" not in caplog.text


@pytest.mark.parametrize("on_hopeless", ["stop", "warn"])
def test_a_run_that_ends_hopeless_says_so(on_hopeless: str, caplog: pytest.LogCaptureFixture) -> None:
    bad = GOOD | {"response/valid": 0.0}
    log(make(on_hopeless=on_hopeless), bad, bad, updates=2)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "Update 1",
        "Nothing was learned in the last updates",
    ]
    assert "0% of the responses have the task's format" in caplog.messages[1]
    assert ("The run stops if the next" in caplog.messages[0]) == (on_hopeless == "stop")


def test_the_last_update_promises_no_stop(caplog: pytest.LogCaptureFixture) -> None:
    log(make(), GOOD | {"corrector/failed": 1.0}, updates=1)
    (message,) = caplog.messages
    assert "100% of the corrections failed" in message
    assert "stops" not in message


@pytest.mark.parametrize(
    ("logs", "settings"),
    [
        ([GOOD | {"lr": 0.0}] * 2, {}),  # the first update of a warm-up
        ([GOOD] * 2, {"value_warmup_updates": 2}),
        ([GOOD | {"episode/success": 1.0}] * 2, {}),  # nothing left to learn
        ([{"eval_success": 0.0}] * 2, {}),
    ],
)
def test_weights_that_need_not_move(
    logs: list[dict[str, float]], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    callback = make(**settings)
    log(callback, *logs, moves=False)
    assert not callback.why_stop
    assert not caplog.records


def test_after_the_warm_up_weights_must_move() -> None:
    callback = make(value_warmup_updates=1)
    log(callback, GOOD, GOOD, GOOD, moves=False)
    assert callback.why_stop


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_change_of_one_weight_is_seen(dtype: torch.dtype) -> None:
    model = nn.Linear(100, 100).to(dtype)
    before = fingerprint(model)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.weight[7, 7] = torch.nextafter(model.weight[7, 7], torch.tensor(9.0, dtype=dtype))
    assert fingerprint(model) != before


def test_a_policy_that_has_learned_is_left_to_the_collapse_alarm(caplog: pytest.LogCaptureFixture) -> None:
    callback = make()
    log(callback, GOOD, *[GOOD | {"response/valid": 0.0}] * 3)
    assert not callback.why_stop
    assert not caplog.records
    log(callback, *[GOOD | {"corrector/failed": 1.0}] * 2)
    assert callback.why_stop  # a corrector that breaks down is noticed at any time


def test_the_remedy_fits_the_model_and_the_task(caplog: pytest.LogCaptureFixture) -> None:
    invalid = GOOD | {"response/valid": 0.0}
    log(make(), invalid)
    assert "examples/sft.py --model_name_or_path some/model --tasks points24=10000" in caplog.text
    caplog.clear()
    embedded = Model()
    embedded.name_or_path = str(tiny_llava.path("tiny-alfworld"))
    log(make(embedded), invalid)
    assert "`tiny-alfworld` doesn't know this task: use --model_name_or_path tiny." in caplog.text
    caplog.clear()
    log(make(task=ColourTask()), invalid)
    assert "--tasks toy:ColourTask=10000" in caplog.text
    caplog.clear()
    log(make(task=make_task("gym:trl_gtr/FrozenLake-v0", goal="Reach it.", expert="operator:itemgetter")), invalid)
    assert "--tasks gym:trl_gtr/FrozenLake-v0=10000" in caplog.text
    caplog.clear()
    log(make(task=make_task("gym:trl_gtr/FrozenLake-v0", goal="Reach it.")), invalid)
    assert "fine-tune it on demonstrations first" in caplog.text
    assert "sft.py" not in caplog.text


def test_the_most_common_failure_is_named(caplog: pytest.LogCaptureFixture) -> None:
    callback = make()
    corrections: list[Correction | None] = [None, failed("refused"), *[failed("unavailable", "no such model")] * 2]
    callback.on_step_end(None, TrainerState(), TrainerControl(), rollout=Rollout([], corrections, [], []))
    log(callback, GOOD | {"corrector/failed": 1.0})
    assert "most often with: no such model." in caplog.text


# --- in a run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def untrained(tmp_path: Path) -> str:
    """A model that doesn't know the format."""
    model, processor = build_toy_model()
    model.save_pretrained(tmp_path / "untrained")
    processor.save_pretrained(tmp_path / "untrained")
    return str(tmp_path / "untrained")


def test_an_untrained_model_stops_after_two_updates_with_a_checkpoint(
    untrained: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = quiet_config(tmp_path / "run", total_env_steps=64, save_strategy="steps")
    trainer = GTRTrainer(untrained, config, ColourTask(), ExpertCorrector())
    with caplog.at_level(logging.WARNING), pytest.raises(HopelessRun, match=r"have the task's format.*sft\.py"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    config = quiet_config(tmp_path / "run", total_env_steps=64, on_hopeless="warn")
    trainer = GTRTrainer(untrained, config, ColourTask(), ExpertCorrector())
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


def test_a_resumed_run_counts_on(untrained: str, tmp_path: Path) -> None:
    def trainer(steps: int) -> GTRTrainer:
        config = quiet_config(tmp_path / "run", total_env_steps=steps, save_strategy="steps", save_steps=1)
        return GTRTrainer(untrained, config, ColourTask(), ExpertCorrector())

    trainer(16).train()  # one update
    resumed = trainer(64)
    with pytest.raises(HopelessRun):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


def test_a_resumed_callback_knows_that_the_policy_learns() -> None:
    before, after = make(), make()
    log(before, GOOD)
    for name, value in before.state()["attributes"].items():
        setattr(after, name, value)
    log(after, *[GOOD | {"response/valid": 0.0}] * 2)
    assert not after.why_stop


def test_a_run_that_is_over_anyway_ends_with_a_warning(untrained: str, tmp_path: Path) -> None:
    trainer = GTRTrainer(untrained, quiet_config(tmp_path / "run"), ColourTask(), ExpertCorrector())
    trainer.train()
    assert trainer.hopeless.why_stop
    card = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert card["state"] == "finished"
    assert card["warnings"][-1]["message"].startswith("Nothing was learned in the last updates: 0%")


class Broken(Corrector):
    def correct(self, requests: Any) -> list[Correction]:
        return [failed("unavailable", "the server has no model of this name") for _ in requests]


def test_a_corrector_that_always_fails_stops_the_run(toy_checkpoint: str, tmp_path: Path) -> None:
    trainer = GTRTrainer(toy_checkpoint, quiet_config(tmp_path / "run", total_env_steps=64), ColourTask(), Broken())
    with pytest.raises(HopelessRun, match="100% of the corrections failed, most often with: the server has no model"):
        trainer.train()


def test_steps_too_small_for_bfloat16(toy_checkpoint: str, tmp_path: Path) -> None:
    """The usual cause of weights that don't move: a step is rounded away."""
    config = quiet_config(
        tmp_path / "run",
        total_env_steps=64,
        learning_rate=1e-9,
        thought_cloning_coef=0.0,
        model_init_kwargs={"dtype": "bfloat16"},
    )
    trainer = GTRTrainer(toy_checkpoint, config, ColourTask())
    assert {p.dtype for p in trainer.trained.policy.parameters()} == {torch.bfloat16}
    with pytest.raises(HopelessRun, match="weights did not change"):
        trainer.train()
