"""The seam: what an engine is asked, when, and by whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from function_engine import FunctionEngine
from torch import nn
from toy import ColourTask, quiet_config

from trl_gtr import Engine, ExpertCorrector, GTRTrainer, PolicyAgent, TransformersEngine, evaluate_agent
from trl_gtr.engines.base import EngineLost
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.types import Generation


class Watched(Engine):
    """Passes everything on, and remembers what was asked of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: list[str] = []
        self.weights: list[torch.Tensor] = []

    def generate(self, prompts: Sequence[str], images: Sequence[np.ndarray], greedy: bool = False) -> list[Generation]:
        self.events.append("greedy" if greedy else "sample")
        return self.engine.generate(prompts, images, greedy)

    @contextmanager
    def ready(self) -> Iterator[None]:
        self.events.append("ready")
        with self.engine.ready():
            yield
        self.events.append("done")

    def check(self, prompt: str, image: np.ndarray) -> None:
        self.events.append("check")
        assert prompt
        assert image.size

    def sync(self, policy: nn.Module) -> None:
        self.events.append("sync")
        self.weights.append(torch.cat([weight.detach().flatten() for weight in policy.parameters()]))

    def close(self) -> None:
        self.events.append("close")


def test_an_engine_needs_nothing_but_generate() -> None:
    engine = FunctionEngine(lambda prompts, images: [])
    with engine.ready():
        assert engine.generate([], []) == []
    engine.sync(nn.Identity())
    engine.close()
    with pytest.raises(TypeError, match="generate"):
        Engine()  # type: ignore[abstract]


def test_a_run_generates_through_its_engine_and_tells_it_of_new_weights(toy_checkpoint: str, tmp_path: Path) -> None:
    args = quiet_config(tmp_path, eval_strategy="steps", eval_steps=1, eval_episodes=2)
    trainer = GTRTrainer(toy_checkpoint, args, ColourTask(length=1), ExpertCorrector())
    trainer.engine = watched = Watched(trainer.engine)
    trainer.train()
    trainer.close()
    rollout, evaluation = ["ready", *["sample"] * 4, "done"], ["ready", "greedy", "done"]
    check = ["ready", "check", "done"]
    assert watched.events == ["sync", *check, *([*rollout, "sync", *evaluation] * 2), "close"]
    start, first, second = watched.weights
    assert not torch.equal(start, first)
    assert not torch.equal(first, second)
    assert torch.equal(second, torch.cat([w.detach().flatten() for w in trainer.trained.policy.parameters()]))


class Refusing(Watched):
    def check(self, prompt: str, image: np.ndarray) -> None:
        raise ValueError("other tokens")


@pytest.mark.parametrize("begin", [GTRTrainer.train, GTRTrainer.evaluate])
def test_an_engine_that_reads_otherwise_is_refused_before_anything_is_played(
    begin: Any, toy_checkpoint: str, tmp_path: Path
) -> None:
    trainer = GTRTrainer(toy_checkpoint, quiet_config(tmp_path), ColourTask(length=1), ExpertCorrector())
    trainer.engine = refusing = Refusing(trainer.engine)
    with pytest.raises(ValueError, match="other tokens"):
        begin(trainer)
    assert not {"sample", "greedy"} & {*refusing.events}


def test_another_engine_plays_without_a_word_to_the_trainer(toy_checkpoint: str, tmp_path: Path) -> None:
    """One that always names red: what it says is scored, learned from and evaluated."""
    task = ColourTask(length=1)
    text = task.format.render({"thoughts": "it is red"}, "red")
    trainer = GTRTrainer(toy_checkpoint, quiet_config(tmp_path, eval_episodes=8), task, ExpertCorrector())
    ids = trainer.policy.encode_response(text)
    trainer.engine = FunctionEngine(lambda prompts, images: [Generation(ids, text) for _ in prompts])
    trainer.train()
    assert trainer.state.log_history[-1]["response/valid"] == 1
    assert trainer.evaluate().metrics("eval")["eval_legal"] == 1


@pytest.mark.parametrize("greedy", [True, False])
def test_an_agent_asks_as_it_was_told(greedy: bool) -> None:
    watched = Watched(FunctionEngine(lambda prompts, images: [Generation(np.zeros(1, np.int64), "") for _ in prompts]))
    evaluate_agent(PolicyAgent(watched, greedy), ColourTask(length=1), 1)
    assert watched.events == ["greedy" if greedy else "sample"]


def test_the_samplers_log_probs_end_where_the_response_ends(tiny_vlm: Any) -> None:
    policy = VLMPolicy(*tiny_vlm(), temperature=1.0)
    end = policy.eos_token_ids[0]
    sampled, logprobs = np.array([70, 71, end, 72]), np.arange(4, dtype=np.float32)
    generation = policy.read_generation(sampled, logprobs)
    assert generation.ids.tolist() == [70, 71, end]
    assert generation.logprobs is not None
    assert generation.logprobs.tolist() == [0, 1, 2]
    assert policy.read_generation(sampled[:2]).logprobs is None


def test_the_engine_finds_the_model_inside_the_network(toy_checkpoint: str, tmp_path: Path) -> None:
    trainer = GTRTrainer(toy_checkpoint, quiet_config(tmp_path), ColourTask(), ExpertCorrector())
    assert isinstance(trainer.engine, TransformersEngine)
    assert trainer.engine.model is trainer.trained.policy


class Lost(Watched):
    """Is lost after the first update.

    Args:
        when: "sync", when it should take the new weights, or "greedy" and "nan", in the evaluation that follows.
    """

    def __init__(self, engine: Engine, when: str) -> None:
        super().__init__(engine)
        self.when = when

    def generate(self, prompts: Sequence[str], images: Sequence[np.ndarray], greedy: bool = False) -> list[Generation]:
        if greedy and self.when == "greedy":
            raise EngineLost("the server is gone")
        if greedy and self.when == "nan":
            raise FloatingPointError("the server is gone mad")
        return super().generate(prompts, images, greedy)

    def sync(self, policy: nn.Module) -> None:
        super().sync(policy)
        if self.when == "sync" and self.events.count("sync") == 2:
            raise EngineLost("the server is gone")


def test_an_engine_that_another_process_has_lost_ends_the_update_here_too(
    toy_checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = GTRTrainer(toy_checkpoint, quiet_config(tmp_path), ColourTask(length=1), ExpertCorrector())
    assert trainer._sync() is None
    lost = EngineLost("the other process's")
    monkeypatch.setattr(trainer.processes, "gather", lambda own: [own, lost])
    assert trainer._sync() is lost


@pytest.mark.parametrize("when", ["sync", "greedy", "nan"])
def test_a_lost_engine_costs_nothing_that_was_learned(when: str, toy_checkpoint: str, tmp_path: Path) -> None:
    def make(folder: str) -> GTRTrainer:
        settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_episodes": 2}
        args = quiet_config(tmp_path / folder, save_strategy="steps", save_steps=100, **settings)
        return GTRTrainer(toy_checkpoint, args, ColourTask(length=1), ExpertCorrector())

    def learned(trainer: GTRTrainer) -> torch.Tensor:
        return torch.cat([weight.detach().flatten() for weight in trainer.trained.policy.parameters()])

    whole = make("whole")
    whole.train()
    cut = make("cut")
    cut.engine = Lost(cut.engine, when)
    with pytest.raises((EngineLost, FloatingPointError), match="the server is gone"):
        cut.train()
    assert cut.state.global_step == 1
    assert (tmp_path / "cut" / "checkpoint-1").is_dir()
    resumed = make("cut")
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(learned(resumed), learned(whole))
