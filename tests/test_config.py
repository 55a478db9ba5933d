"""GTRConfig: defaults of the paper, refused fields, contradictions."""

import dataclasses

import pytest
from transformers import HfArgumentParser

from trl_gtr.config import REFUSED_FIELDS, GTRConfig
from trl_gtr.ppo_base import PPOConfig


def make(**kwargs):
    return GTRConfig(**{"output_dir": "unused", "use_cpu": True, "report_to": "none", **kwargs})


def test_defaults_are_those_of_the_method():
    args = make()
    assert (args.gamma, args.lam, args.cliprange, args.vf_coef, args.kl_coef) == (0.9, 0.95, 0.1, 0.5, 0.0)
    assert args.num_ppo_epochs == 4
    assert args.temperature == 0.2
    assert args.thought_prob_coef == 0.5
    assert args.format_reward == 5.0
    assert args.cliprange_value is None
    assert args.max_completion_length == 256
    assert args.update_schedule == "joint"
    assert args.cloning_weight == "share"
    assert not args.clone_right_actions
    assert not args.clone_right_thoughts
    assert args.value_head_sizes == [1024, 512]


def test_cpu_runs_in_float32_unless_asked_otherwise():
    assert make().bf16 is False
    assert make(bf16=True).bf16 is True


INHERITED = {field.name for field in dataclasses.fields(PPOConfig)}


@pytest.mark.parametrize("name", sorted(INHERITED.intersection(REFUSED_FIELDS)))
def test_a_field_without_effect_is_refused(name):
    given = {"stop_token": "eos", "whiten_rewards": True, "reward_model_path": "x", "sft_model_path": "x"}.get(name, 7)
    with pytest.raises(ValueError, match=f"does not use `{name}`"):
        make(**{name: given})


def test_every_refused_field_is_really_inherited():
    assert set(REFUSED_FIELDS) - INHERITED <= {"world_size"}  # a field under TRL 1.12 only


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"num_envs": 0}, "`num_envs` must be at least 1"),
        ({"gamma": 1.5}, "`gamma` must lie in"),
        ({"temperature": 0.0}, "`temperature` must be positive"),
        ({"cliprange": 0.0}, "`cliprange` must lie in"),
        ({"dual_clip": 1.0}, "`dual_clip` must be greater than 1"),
        ({"ppo_coef": 0.0, "thought_cloning_coef": 0.0}, "nothing would be learned"),
        ({"thought_cloning_coef": -1.0}, "must not be negative"),
        ({"num_envs": 3, "rollout_steps": 5, "per_device_train_batch_size": 4}, "no multiple of the mini-batch"),
        ({"clone_full_response": True, "clone_right_actions": True}, "turn `clone_right_actions` off"),
        ({"cloning_learning_rate": 1e-4}, "needs `update_schedule='separate'`"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "needs `kl_estimator='k3'`"),
        ({"thought_cloning_coef": 0.0, "clone_right_thoughts": True}, "need `thought_cloning_coef` > 0"),
        ({"update_schedule": "both"}, "must be one of"),
        ({"invalid_action": "ignore"}, "must be one of"),
        ({"cloning_weight": "all"}, "must be one of"),
        ({"min_advantage_std": 0.0}, "must be positive"),
        ({"reward_scale": 0.0}, "must be positive"),
        ({"target_kl": -1.0}, "must be positive"),
        ({"feature_cache_gb": -1.0}, "`feature_cache_gb` must be a number of GiB"),
        ({"feature_cache_gb": float("inf")}, "`feature_cache_gb` must be a number of GiB"),
        ({"feature_cache_gb": float("nan")}, "`feature_cache_gb` must be a number of GiB"),
    ],
)
def test_contradictions_say_what_to_change(bad, message):
    with pytest.raises(ValueError, match=message):
        make(**bad)


def test_updates_cover_all_environment_steps():
    args = make(total_env_steps=1000, num_envs=8, rollout_steps=16, per_device_train_batch_size=8)
    assert args.num_updates == 8  # 7 × 128 = 896 < 1000 ≤ 1024


def test_rl4vlm_preset():
    args = GTRConfig.rl4vlm(output_dir="unused", use_cpu=True, report_to="none", gamma=0.8)
    assert (args.thought_cloning_coef, args.format_reward, args.gamma) == (0.0, 0.0, 0.8)


def test_every_own_field_has_a_help_text_and_the_command_line_knows_it():
    own = [f for f in dataclasses.fields(GTRConfig) if f.name in GTRConfig.__annotations__]
    assert all(f.metadata.get("help") for f in own)
    (args,) = HfArgumentParser(GTRConfig).parse_args_into_dataclasses(
        ["--output_dir", "unused", "--use_cpu", "--thought_prob_coef", "0.2", "--value_head_sizes", "16", "8"]
    )
    assert args.thought_prob_coef == 0.2
    assert args.value_head_sizes == [16, 8]
    HfArgumentParser(GTRConfig).format_help()


def test_fsdp_is_refused_however_it_is_asked_for(monkeypatch):
    with pytest.raises(ValueError, match="FSDP is not supported"):
        make(fsdp="full_shard")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP is not supported"):
        make()


def test_a_rollout_has_a_deadline_only_where_others_wait():
    assert make().rollout_deadline == float("inf")
    assert make(rollout_timeout=5.0).rollout_deadline == 5.0
    with pytest.raises(ValueError, match="`rollout_timeout` must be positive"):
        make(rollout_timeout=0.0)


def test_a_resumed_run_may_be_longer_and_log_otherwise_but_not_learn_otherwise():
    settings = make().resume_settings()
    changed = make(total_env_steps=99, logging_steps=7, rollout_timeout=3.0, feature_cache_gb=0.5)
    assert changed.resume_settings() == settings
    assert make(learning_rate=0.1).resume_settings() != settings
    assert make(seed=1).resume_settings() != settings
