"""Published settings of each method: `GTRConfig.grpo()`, `GTRConfig.vl_dac()` and so on.

Values are those of the cited source unless a comment says otherwise; what isn't listed is `GTRConfig`'s default. Group
methods and VL-DAC come without guidance: add it with `thought_cloning_coef=1.0` and a corrector.
"""

from __future__ import annotations

from typing import Any

VALUE_FIELDS = (
    "vf_coef",
    "cliprange_value",
    "value_head_sizes",
    "value_learning_rate",
    "value_gradient_to_trunk",
    "value_warmup_updates",
)
"""Settings without effect in a run without a value head."""
GAE_FIELDS = ("lam", "min_advantage_std")
"""Further settings that only GAE has a use for."""

_RL4VLM: dict[str, Any] = {
    "total_env_steps": 15_000,
    "num_envs": 16,
    "rollout_steps": 64,  # 1024 steps per update
    "mini_batch_size": 128,
    "learning_rate": 1e-5,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 1e-9},
    "num_ppo_epochs": 4,
    "cliprange": 0.1,
    "gamma": 0.9,
    "lam": 0.95,
    "vf_coef": 0.5,
    "value_gradient_to_trunk": True,
    "value_learning_rate": None,
    "max_grad_norm": 0.01,
    "temperature": 0.2,
    "max_completion_length": 256,
    "thought_prob_coef": 0.5,
}
"""github.com/RL4VLM/RL4VLM: VLM_PPO/scripts/run_ezp.sh. Its entropy coefficient of 0.01 never enters its loss. It
clips values at 0.1 and has no dual clip; both are `GTRConfig`'s here: no clipped values, `dual_clip` 3."""

_VERL_AGENT: dict[str, Any] = {
    "group_size": 8,
    "num_envs": 128,  # 16 groups
    "rollout_steps": 8,  # EZPoints' step limit there
    "mini_batch_size": 128,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "num_ppo_epochs": 1,
    "ratio_level": "token",
    "thought_prob_coef": 1.0,
    "cliprange": 0.2,
    "max_grad_norm": 1.0,
    "kl_coef": 0.01,
    "temperature": 1.0,
    "max_completion_length": 512,
    "format_reward": 0.0,  # there a penalty of 0.1 for an invalid action; here the task's own penalty
    "thought_cloning_coef": 0.0,
}
"""verl-agent's script for GiGPO on EZPoints, as a fork keeps it (github.com/vanzll/verl-agent:
examples/gigpo_trainer/run_ezpoints.sh), used for all group methods. The script leaves out schedule, epochs, clip
range, gradient clipping and temperature."""

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2503.08525: RL4VLM with a corrector and a format reward.
    "gtr": {**_RL4VLM, "thought_cloning_coef": 1.0, "format_reward": 5.0},
    # arXiv 2405.10292. Use it with a task created with `cut=False`.
    "rl4vlm": {**_RL4VLM, "thought_cloning_coef": 0.0, "format_reward": 0.0},
    # arXiv 2505.23678; github.com/corl-team/VL-DAC, configs/gymcards_qwen2vl.yaml and a2c_ppo_acktr/trainer.py. Its
    # entropy coefficient of 0.01 never enters its loss. It clips values and has no dual clip, as RL4VLM, and its
    # mini-batch is 2 steps a process: those are `GTRConfig`'s here.
    "vl_dac": {
        "advantage_estimator": "gae",
        "ratio_level": "token",
        "thought_prob_coef": 1.0,
        "cliprange": 0.1,
        "gamma": 0.99,
        "lam": 0.95,
        "kl_coef": 0.04,
        "temperature": 0.2,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-8},
        "num_ppo_epochs": 4,
        "max_grad_norm": 0.01,
        "max_completion_length": 128,
        "num_envs": 16,
        "rollout_steps": 16,  # 256 steps per update
        "vf_coef": 1.0,  # there 0.5 of an error without our factor 1/2
        "value_gradient_to_trunk": False,
        "value_learning_rate": None,
        "value_warmup_updates": 2,
        "format_reward": 0.0,
        "thought_cloning_coef": 0.0,
    },
    # arXiv 2402.03300
    "grpo": {"advantage_estimator": "grpo", **_VERL_AGENT},
    # arXiv 2402.14740
    "rloo": {"advantage_estimator": "rloo", **_VERL_AGENT},
    # arXiv 2505.10978
    "gigpo": {"advantage_estimator": "gigpo", "gamma": 0.95, **_VERL_AGENT},
}
