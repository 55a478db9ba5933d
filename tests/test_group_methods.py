"""The group methods end to end on the toy world: they learn without a value head, resume exactly, and drop what
teaches nothing."""

import pytest
from launched import steady
from toy import ColourTask, quiet_config

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.learning import losses
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


def learn(checkpoint, folder, method, updates, **settings):
    trainer = group_trainer(
        checkpoint,
        folder,
        method,
        ColourTask(length=1),
        group_size=8,
        num_envs=128,
        rollout_steps=1,
        total_env_steps=128 * updates,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=128,
        num_ppo_epochs=3,
        lr_scheduler_type="constant",
        max_completion_length=8,
        logging_steps=updates,
        eval_episodes=128,
        **settings,
    )
    trainer.train()
    return trainer.evaluate().metrics()["success"]


@pytest.mark.parametrize(("method", "ratio_level"), [("grpo", "token"), ("rloo", "response"), ("gigpo", "response")])
def test_each_estimator_learns_to_see(toy_checkpoint, tmp_path, method, ratio_level):
    assert learn(toy_checkpoint, tmp_path, method, updates=40, ratio_level=ratio_level) > 0.9


@pytest.mark.parametrize("method", ["grpo", "rloo", "gigpo"])
def test_a_flipped_sign_shows(toy_checkpoint, tmp_path, monkeypatch, method):
    real = losses.policy_loss
    monkeypatch.setattr(
        losses, "policy_loss", lambda now, then, advantages, *clip: real(now, then, -advantages, *clip)
    )
    assert learn(toy_checkpoint, tmp_path, method, updates=10) < 0.45  # chance is 1/4


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


@pytest.mark.parametrize("method", ["grpo", "gigpo"])
def test_a_resumed_run_is_the_same_run(toy_checkpoint, tmp_path, method):
    settings = {"save_strategy": "steps", "save_steps": 1, "refill_groups": 2}
    whole = group_trainer(toy_checkpoint, tmp_path / "run", method, **settings)
    whole.train()
    resumed = group_trainer(toy_checkpoint, tmp_path / "run", method, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert steady(resumed.state.log_history) == steady(whole.state.log_history)
    assert all((a == b).all() for a, b in zip(whole.trained.parameters(), resumed.trained.parameters(), strict=True))


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
    assert "No group has episodes with different returns" in caplog.text
    assert all((a == b).all() for a, b in zip(before, trainer.trained.parameters(), strict=True))


def test_a_time_out_shorter_than_an_episode_says_what_to_change(toy_checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"No group of episodes ended within `rollout_timeout` \(1e-06 s\).*Raise it"):
        group_trainer(toy_checkpoint, tmp_path, rollout_timeout=1e-6).train()
