"""Does it learn? On the toy world the right action is shown in the image only; the prompt never changes.

GTR and PPO must learn to read it, nobody can learn it from blank images, and a sign flipped in either loss must show.
"""

import numpy as np
import pytest
from toy import ColourTask, quiet_config

from trl_gtr import load_policy, make_task
from trl_gtr.correctors import ExpertCorrector
from trl_gtr.learning import losses, update
from trl_gtr.scripts import train as launch
from trl_gtr.scripts.settings import CONFIGS
from trl_gtr.trainer import GTRTrainer

GTR = {"learning_rate": 2e-3}
PPO = {"learning_rate": 1e-3, "thought_cloning_coef": 0.0}


def learn(checkpoint, tmp_path, method, updates, blank=False):
    args = quiet_config(
        tmp_path,
        num_envs=64,
        rollout_steps=2,
        total_env_steps=128 * updates,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=64,
        num_ppo_epochs=3,
        lr_scheduler_type="constant",
        max_completion_length=8,
        value_head_sizes=[32],
        format_reward=0.5,
        logging_steps=updates,
        eval_episodes=128,
        **method,
    )
    corrector = ExpertCorrector() if args.thought_cloning_coef else None
    trainer = GTRTrainer(checkpoint, args, ColourTask(length=1, blank=blank), corrector)
    trainer.train()
    return trainer.evaluate().metrics()


def test_gtr_learns_to_see_and_to_say_it(toy_checkpoint, tmp_path):
    result = learn(toy_checkpoint, tmp_path, GTR, updates=20)
    assert result["success"] > 0.9
    assert result["true_thoughts"] > 0.9


def test_ppo_alone_learns_to_see(toy_checkpoint, tmp_path):
    assert learn(toy_checkpoint, tmp_path, PPO, updates=50)["success"] > 0.9


@pytest.mark.parametrize("method", [GTR, PPO], ids=["gtr", "ppo"])
def test_blank_images_teach_nothing(toy_checkpoint, tmp_path, method):
    # Chance is 1/4; five standard deviations of 128 episodes above it.
    assert learn(toy_checkpoint, tmp_path, method, updates=15, blank=True)["success"] < 0.45


@pytest.mark.slow
def test_a_flipped_policy_loss_shows(toy_checkpoint, tmp_path, monkeypatch):
    real = losses.policy_loss

    def flipped(logprob, old_logprob, advantages, *args):
        return real(logprob, old_logprob, -advantages, *args)

    monkeypatch.setattr(losses, "policy_loss", flipped)
    assert learn(toy_checkpoint, tmp_path, GTR, updates=20)["success"] < 0.5


def test_a_flipped_cloning_loss_shows(toy_checkpoint, tmp_path, monkeypatch):
    real = update.cloning_loss
    monkeypatch.setattr(update, "cloning_loss", lambda *args: -real(*args))
    assert learn(toy_checkpoint, tmp_path, GTR, updates=10)["true_thoughts"] < 0.5


@pytest.mark.slow
def test_a_short_run_from_the_shipped_start_makes_more_thoughts_true(tmp_path):
    """Mean of three seeds: two updates of half the default run's size, the same deals before and after."""
    config = CONFIGS / "gym_cards_tiny.yaml"
    gains = []
    for seed in range(3):
        options = {"task": "ezpoints", "rollout_steps": 4, "total_env_steps": 512, "num_ppo_epochs": 1}
        options |= {"cloning_steps": 8, "eval_episodes": 24, "seed": seed}
        options |= {"output_dir": tmp_path / str(seed), "disable_tqdm": True}
        script, args, *_ = launch.parse(config, [f"--{name}={value}" for name, value in options.items()])
        model, processor = load_policy("tiny")
        trainer = GTRTrainer(model, args, make_task(script.task), ExpertCorrector(), processor)
        before = trainer.evaluate().metrics()["true_thoughts"]
        trainer.train()
        gains.append(trainer.evaluate().metrics()["true_thoughts"] - before)
    assert np.mean(gains) > 0.1, gains
