"""The group methods end to end on the toy world: they learn without a value head, resume exactly, and drop what
teaches nothing."""

import itertools
import json

import numpy as np
import pytest
from launched import steady
from toy import ColourTask, GuessTask, quiet_config

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.trainer import GTRTrainer

VALUE_HEAD = [1024, 512]  # the default: a group method takes no other


def group_trainer(checkpoint, folder, method="grpo", task=None, corrector=None, **settings):
    usual = {
        "advantage_estimator": method,
        "group_size": 2,
        "value_head_sizes": VALUE_HEAD,
        "rollout_steps": 3,
        "total_env_steps": 36,
        "per_device_train_batch_size": 4,
        "thought_cloning_coef": 0.0 if corrector is None else 1.0,
        "format_reward": 0.0,
        "learning_rate": 1e-3,
    }
    args = quiet_config(folder, **{**usual, **settings})
    return GTRTrainer(checkpoint, args, task or ColourTask(length=3), corrector)


def test_a_group_method_learns_to_see(toy_checkpoint, tmp_path):
    """The others, and flipped signs: tests/learning/test_bandit.py."""
    trainer = group_trainer(
        toy_checkpoint,
        tmp_path,
        "gigpo",
        ColourTask(length=1),
        group_size=8,
        num_envs=64,
        rollout_steps=1,
        total_env_steps=64 * 20,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=128,
        num_ppo_epochs=3,
        lr_scheduler_type="constant",
        learning_rate=2e-3,
        max_completion_length=8,
        logging_steps=20,
        eval_episodes=128,
    )
    trainer.train()
    assert trainer.evaluate().metrics()["success"] > 0.6  # chance is 1/4


def test_nothing_is_left_of_the_value_head(toy_checkpoint, tmp_path):
    trainer = group_trainer(toy_checkpoint, tmp_path, corrector=ExpertCorrector(), save_strategy="steps", save_steps=1)
    trainer.train()
    assert trainer.trained.value_head is None
    assert not list(tmp_path.rglob("value_head*"))
    logged = {name for entry in trainer.state.log_history for name in entry}
    assert not {name for name in logged if name.startswith("value/")} | ({"loss/value"} & logged)
    assert {"groups/dead", "groups/cut", "loss/cloning"} <= logged
    starts = [entry["policy/ratio_start_max_dev"] for entry in trainer.state.log_history if "loss/policy" in entry]
    assert starts
    assert max(starts) < 1e-5


class NothingToWin(ColourTask):
    def make_env(self, *, evaluation=False):
        env = super().make_env()
        step = env.step
        env.step = lambda action: (*(result := step(action))[:1], 0.0, *result[2:])
        return env


def test_dead_groups_leave_the_policy_alone(toy_checkpoint, tmp_path, caplog):
    trainer = group_trainer(toy_checkpoint, tmp_path, task=NothingToWin(length=2), total_env_steps=12)
    before = [p.detach().clone() for p in trainer.trained.parameters()]
    trainer.train()
    assert trainer.state.log_history[0]["groups/dead"] == 1
    assert "No whole group has different returns" in caplog.text
    assert all((a == b).all() for a, b in zip(before, trainer.trained.parameters(), strict=True))


def test_a_time_out_shorter_than_an_episode_says_what_to_change(toy_checkpoint, tmp_path):
    trainer = group_trainer(toy_checkpoint, tmp_path)
    trainer.args.rollout_timeout = 1e-6
    with pytest.raises(ValueError, match=r"No group of episodes ended within `rollout_timeout` \(1e-06 s\).*Raise it"):
        trainer.train()


def test_a_time_out_shorter_than_an_episode_is_an_error_before_the_model_is_loaded(tmp_path, monkeypatch):
    now = itertools.count()  # every look at the clock is a second later
    monkeypatch.setattr("trl_gtr.rollouts.group_collector.time.monotonic", lambda: float(next(now)))
    with pytest.raises(
        ValueError, match=r"A group of episodes takes longer than `rollout_timeout` \(2\.5 s\).*Raise it"
    ):
        group_trainer("no/model", tmp_path, rollout_timeout=2.5)  # an episode has three steps
    with pytest.raises(ValueError, match="There is no folder no/model"):
        group_trainer("no/model", tmp_path, rollout_timeout=9.0)


def test_trying_the_time_out_changes_nothing(toy_checkpoint, tmp_path):
    def images(folder, **settings):
        trainer = group_trainer(toy_checkpoint, tmp_path / folder, **settings)
        return [step.image for step in trainer._collect()[0].transitions]

    limited, unlimited = images("limited", rollout_timeout=600.0), images("unlimited")
    assert len(limited) == len(unlimited) > 0
    assert all(map(np.array_equal, limited, unlimited))


def test_a_run_ends_when_all_its_steps_are_played_and_a_resumed_one_is_the_same(toy_checkpoint, tmp_path):
    """Episodes are shorter than expected, so there are more updates; the schedule ends with the run."""
    settings = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear", "refill_groups": 1}
    settings |= {"task": GuessTask(length=3), "rollout_steps": 8, "total_env_steps": 32}
    whole = group_trainer(toy_checkpoint, tmp_path / "run", "gigpo", **settings)
    assert whole.args.num_updates == 1
    whole.train()
    *before, last = [entry["env_steps"] for entry in whole.state.log_history]
    assert before
    assert max(before) < 32 <= last
    assert whole.state.global_step == whole.state.max_steps == len(before) + 1
    card = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (card["state"], card["updates"]) == ("finished", len(before) + 1)
    resumed = group_trainer(toy_checkpoint, tmp_path / "run", "gigpo", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert steady(resumed.state.log_history) == steady(whole.state.log_history)
    assert all((a == b).all() for a, b in zip(whole.trained.parameters(), resumed.trained.parameters(), strict=True))


def test_thoughts_are_taught_while_all_groups_are_dead(toy_checkpoint, tmp_path):
    trainer = group_trainer(
        toy_checkpoint, tmp_path, task=NothingToWin(length=2), corrector=ExpertCorrector(), total_env_steps=8
    )
    before = [p.detach().clone() for p in trainer.trained.parameters()]
    trainer.train()
    assert trainer.state.log_history[0]["groups/dead"] == 1
    assert trainer.state.log_history[0]["loss/cloning"] > 0
    assert not all((a == b).all() for a, b in zip(before, trainer.trained.parameters(), strict=True))


def test_dead_groups_cost_no_cloning(toy_checkpoint, tmp_path, monkeypatch):
    """In the joint schedule, where each step of PPO clones too: what PPO has no use for is made up for."""
    settings = {"num_envs": 8, "total_env_steps": 48, "num_ppo_epochs": 2}
    settings["per_device_train_batch_size"] = 6  # the steps of one group, so that any number of them divides evenly
    trainer = group_trainer(toy_checkpoint, tmp_path, corrector=ExpertCorrector(), **settings)
    cloned = []
    term = trainer.updater._cloning_term
    monkeypatch.setattr(trainer.updater, "_cloning_term", lambda *given: cloned.append(1) or term(*given))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss/policy" in entry]
    assert any(0 < entry["groups/dead"] < 1 for entry in logs)
    steps = np.diff([0, *(entry["env_steps"] for entry in logs)])
    assert len(cloned) == sum(2 * played // 6 for played in steps)


def test_an_update_that_went_far_enough_clones_no_further(toy_checkpoint, tmp_path, monkeypatch):
    trainer = group_trainer(
        toy_checkpoint, tmp_path, corrector=ExpertCorrector(), num_envs=8, total_env_steps=48, target_kl=1e-12
    )
    alone, ended = [], []
    epoch = trainer.updater._epoch
    monkeypatch.setattr(trainer.updater, "_clone", lambda experience, *_: alone.append(experience.learned.any()))
    monkeypatch.setattr(
        trainer.updater, "_epoch", lambda *given, **how: ended.append(epoch(*given, **how)) or ended[-1]
    )
    trainer.train()
    shares = [entry["groups/dead"] for entry in trainer.state.log_history if "groups/dead" in entry]
    cut_short = [share for share, whole in zip(shares, ended, strict=True) if not whole]
    assert any(0 < share < 1 for share in cut_short)  # so there would have been something to make up for
    assert not any(alone)


def test_a_reward_that_is_not_a_number_is_no_dead_group(toy_checkpoint, tmp_path):
    class NotANumber(ColourTask):
        reward_scale = float("nan")

    trainer = group_trainer(toy_checkpoint, tmp_path, task=NotANumber(length=3), max_skipped_steps=3)
    with pytest.raises(FloatingPointError, match=r"3 optimizer steps in a row.*advantages .* not finite"):
        trainer.train()
