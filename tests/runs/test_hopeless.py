"""Runs from which nothing can be learned: how they are recognised, what is said, and that they stop."""

from __future__ import annotations

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
from trl_gtr.runs.hopeless import HopelessRunCallback
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


def log(callback: HopelessRunCallback, *logs: dict[str, float], moves: bool = True) -> None:
    state = TrainerState(is_world_process_zero=True)
    callback.on_train_begin(None, state, TrainerControl())
    for update, entry in enumerate(logs, 1):
        state.global_step = update
        if moves:
            nn.init.normal_(callback.model.weight)
        callback.on_log(None, state, TrainerControl(), logs=entry)


@pytest.mark.parametrize(
    ("sign", "moves", "words"),
    [
        ({"response/valid": 0.0}, True, "0% of the responses have the task's format"),
        ({"response/legal": 0.01}, True, "1% of the responses have a legal action"),
        ({"optim/grad_norm": 0.0}, False, "No gradient flows"),
        ({"groups/dead": 1.0}, False, "In every group all episodes have the same return"),
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


def test_warn_never_stops(caplog: pytest.LogCaptureFixture) -> None:
    callback = make(on_hopeless="warn")
    log(callback, *[GOOD | {"response/valid": 0.0}] * 3)
    assert not callback.why_stop
    assert len(caplog.records) == 1
    assert "stops" not in caplog.text


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


def test_a_run_that_is_over_anyway_ends_as_usual(untrained: str, tmp_path: Path) -> None:
    trainer = GTRTrainer(untrained, quiet_config(tmp_path / "run"), ColourTask(), ExpertCorrector())
    trainer.train()
    assert trainer.hopeless.why_stop


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
