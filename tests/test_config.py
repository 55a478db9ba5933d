"""GTRConfig: defaults of the paper, refused fields, contradictions."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
from transformers import HfArgumentParser

from trl_gtr.config import GTRConfig, field_rules, refused_fields
from trl_gtr.distributed import field_rules as field_rules_module
from trl_gtr.distributed.ppo_base import PPOConfig


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
    assert args.clone == "corrected_thoughts"
    assert args.value_head_sizes == [1024, 512]


def test_cpu_runs_in_float32_unless_asked_otherwise():
    assert make().bf16 is False
    assert make(bf16=True).bf16 is True


INHERITED = {field.name for field in dataclasses.fields(PPOConfig)}


GIVEN = {"stop_token": "eos", "reward_model_path": "x", "sft_model_path": "x", "torch_compile_mode": "default"}


@pytest.mark.parametrize("name", sorted(refused_fields()))
def test_a_field_without_effect_is_refused(name):
    default = GTRConfig.__dataclass_fields__[name].default
    given = not default if isinstance(default, bool) else GIVEN.get(name, 7)
    with pytest.raises(ValueError, match=f"does not use `{name}`"):
        make(**{name: given})


def test_what_replaced_the_booleans_of_version_0_1_is_named():
    with pytest.raises(ValueError, match=r"`clone_right_actions`\. Set clone='thoughts_and_right_actions' instead"):
        make(clone_right_actions=False)
    with pytest.raises(ValueError, match="Set clone='thoughts' instead"):
        make(clone_right_thoughts=True)
    with pytest.raises(ValueError, match="Set clone='corrected_responses', or 'responses' to include right thoughts"):
        make(clone_full_response=True)


def test_rules_are_for_fields_that_exist():
    assert set(field_rules()) <= set(GTRConfig.__dataclass_fields__)
    assert set(refused_fields()) - INHERITED == {"clone_right_actions", "clone_right_thoughts", "clone_full_response"}
    # `world_size` is a field under TRL 1.12 only; whatever else is misspelt here would rule nothing
    assert set(field_rules_module.INHERITED) - INHERITED <= {"world_size"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"num_envs": 0}, "`num_envs` must be at least 1"),
        ({"gamma": 1.5}, "`gamma` must be at least 0 and at most 1, got 1.5"),
        ({"temperature": 0.0}, "`temperature` must be greater than 0, got 0.0. PPO needs sampled actions"),
        ({"cliprange": 0.0}, "`cliprange` must be greater than 0 and less than 1"),
        ({"dual_clip": 1.0}, "`dual_clip` must be greater than 1 or None"),
        ({"ppo_coef": 0.0, "thought_cloning_coef": 0.0}, "nothing would be learned"),
        ({"thought_cloning_coef": -1.0}, "must be at least 0, got -1.0"),
        ({"num_envs": 3, "rollout_steps": 5, "per_device_train_batch_size": 4}, "not a multiple of the mini-batch"),
        ({"cloning_learning_rate": 1e-4}, "needs `update_schedule='separate'`"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "needs `kl_estimator='k3'`"),
        ({"clone": "everything"}, "`clone` must be one of"),
        ({"save_strategy": "epoch"}, "`save_strategy` must be one of .* There are no epochs here"),
        ({"gamma": float("nan")}, "`gamma` must be at least 0"),
        ({"update_schedule": "both"}, "must be one of"),
        ({"invalid_action": "ignore"}, "must be one of"),
        ({"cloning_weight": "all"}, "must be one of"),
        ({"min_advantage_std": 0.0}, "must be greater than 0, got 0.0"),
        ({"advantage_estimator": "ppo"}, "`advantage_estimator` must be one of"),
        ({"ratio_level": "word"}, "`ratio_level` must be one of"),
        ({"group_size": 0}, "`group_size` must be at least 1"),
        ({"cliprange": 0.2, "cliprange_high": 0.1}, "`cliprange_high` = 0.1 must be at least `cliprange` = 0.2"),
        ({"reward_scale": 0.0}, "must be greater than 0 or None"),
        ({"target_kl": -1.0}, "must be greater than 0 or None"),
        ({"feature_cache_gb": -1.0}, "`feature_cache_gb` must be at least 0 and less than inf"),
        ({"feature_cache_gb": float("inf")}, "`feature_cache_gb` must be at least 0 and less than inf"),
        ({"feature_cache_gb": float("nan")}, "`feature_cache_gb` must be at least 0 and less than inf"),
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


QUIET = {"output_dir": "unused", "use_cpu": True, "report_to": "none"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gtr", {"advantage_estimator": "gae", "ratio_level": "response", "thought_cloning_coef": 1.0, "gamma": 0.9}),
        ("rl4vlm", {"advantage_estimator": "gae", "ratio_level": "response", "thought_cloning_coef": 0.0}),
        ("vl_dac", {"advantage_estimator": "gae", "ratio_level": "token", "gamma": 0.99, "kl_coef": 0.04}),
        ("grpo", {"advantage_estimator": "grpo", "group_size": 8, "num_envs": 128, "learning_rate": 1e-6}),
        ("rloo", {"advantage_estimator": "rloo", "group_size": 8, "kl_coef": 0.01, "ratio_level": "token"}),
        ("gigpo", {"advantage_estimator": "gigpo", "gamma": 0.95, "step_advantage_coef": 1.0}),
    ],
)
def test_presets_are_one_line_and_can_be_changed(name, expected):
    preset = getattr(GTRConfig, name)
    args = preset(**QUIET)
    assert {field: getattr(args, field) for field in expected} == expected
    assert preset(**QUIET, learning_rate=0.5, thought_cloning_coef=2.0).learning_rate == 0.5


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="There is no preset 'ppo2': choose one of gtr, rl4vlm"):
        GTRConfig.preset("ppo2")


@pytest.mark.parametrize(
    ("processes", "sizes", "message"),
    [
        (1, {"num_envs": 10}, r"`num_envs` = 10 must be a multiple of group_size × processes = 4 × 1.*= 8, for"),
        (
            2,
            {"num_envs": 12},
            r"group_size × processes = 4 × 2, because a group is played by one process",
        ),
    ],
)
def test_groups_must_fill_the_environments(monkeypatch, processes, sizes, message):
    monkeypatch.setattr("trl_gtr.config.PartialState", lambda **_: SimpleNamespace(num_processes=processes))
    with pytest.raises(ValueError, match=message):
        make(advantage_estimator="grpo", group_size=4, **sizes)
    make(advantage_estimator="grpo", group_size=4, num_envs=8)


def test_episodes_of_groups_have_any_length():
    args = make(advantage_estimator="grpo", group_size=4, num_envs=8, rollout_steps=3, per_device_train_batch_size=16)
    assert args.mini_batch_size == 16  # 24 is no multiple of it


def test_a_copy_of_a_fields_metadata_has_no_rule():
    """However it is made: releases of transformers differ."""
    metadata = GTRConfig.__dataclass_fields__["learning_rate"].metadata
    for copied in (
        metadata.copy(),
        dict(metadata),
        {**metadata},
        dict(metadata.items()),
        {k: metadata[k] for k in metadata},
    ):
        assert set(copied) == {"help"}
    assert metadata["rule"].resume == "same"


def test_every_own_field_has_a_help_text_and_the_command_line_knows_it():
    own = [f for f in dataclasses.fields(GTRConfig) if "rule" in f.metadata]
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
    with pytest.raises(ValueError, match="`rollout_timeout` must be greater than 0"):
        make(rollout_timeout=0.0)


def test_a_resumed_run_may_change_length_and_logging_but_not_learning():
    settings = make().resume_settings()
    changed = make(total_env_steps=99, logging_steps=7, rollout_timeout=3.0, feature_cache_gb=0.5)
    assert changed.resume_settings() == settings
    assert make(learning_rate=0.1).resume_settings() != settings
    assert make(seed=1).resume_settings() != settings
    assert make(clone="thoughts").resume_settings() != settings
    assert not settings.keys() & refused_fields().keys()


# --- the mini-batch --------------------------------------------------------------------------------------------------


@pytest.fixture
def processes(monkeypatch):
    """Makes a configuration believe that so many processes were launched."""

    def launch(count):
        monkeypatch.setattr("trl_gtr.config.PartialState", lambda **_: SimpleNamespace(num_processes=count))

    return launch


@pytest.mark.parametrize(("count", "accumulation"), [(1, 64), (2, 32), (4, 16), (8, 8), (64, 1)])
def test_a_mini_batch_is_the_same_on_any_number_of_processes(processes, count, accumulation):
    processes(count)
    args = make(num_envs=64, rollout_steps=16, per_device_train_batch_size=2, mini_batch_size=128)
    assert args.gradient_accumulation_steps == accumulation


def test_without_a_mini_batch_the_accumulation_steps_count_as_given():
    assert make().gradient_accumulation_steps == 1
    assert make(gradient_accumulation_steps=4).gradient_accumulation_steps == 4
    # Both may be given where they agree, as when a finished configuration is copied.
    both = make(per_device_train_batch_size=2, mini_batch_size=128, gradient_accumulation_steps=64)
    assert both.gradient_accumulation_steps == 64


@pytest.mark.parametrize(
    ("count", "sizes", "message"),
    [
        # 16 × 64 = 1024 steps in batches of 24: no number of them divides the rollout.
        (
            1,
            {"per_device_train_batch_size": 24},
            "is not a multiple of per_device_train_batch_size.*No mini-batch fits",
        ),
        (4, {"per_device_train_batch_size": 64}, r"= 64 × 4 = 256\. A `mini_batch_size` of 256, 512, 1024 would fit"),
        (1, {"mini_batch_size": 96}, r"not a multiple of the mini-batch.*of 16, 32, 64, 128 would fit"),
        (1, {"gradient_accumulation_steps": 1}, "needs 16 accumulation steps of 8 .*_accumulation_steps` = 1"),
        (1, {"gradient_accumulation_steps": 32}, "`gradient_accumulation_steps` = 32 was given. Leave it out"),
        (64, {}, "`num_envs` = 64 with `rollout_steps` = 16 collects just as many steps"),
        (1, {"mini_batch_size": 0}, "`mini_batch_size` must be at least 1"),
        (1, {"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at least 1"),
        (1, {"per_device_train_batch_size": 0}, "`per_device_train_batch_size` must be at least 1"),
    ],
)
def test_a_mini_batch_that_does_not_divide_names_sizes_that_would(processes, count, sizes, message):
    processes(count)
    with pytest.raises(ValueError, match=message):
        make(**{"num_envs": 16, "rollout_steps": 64, "mini_batch_size": 128, **sizes})


@pytest.mark.parametrize(("size", "warns"), [(1024, True), (512, False)])
def test_a_mini_batch_of_the_whole_rollout_warns(caplog, size, warns):
    make(num_envs=16, rollout_steps=64, mini_batch_size=size)
    assert ("each PPO epoch takes a single optimizer step" in caplog.text) == warns


def test_a_resumed_run_keeps_its_mini_batch():
    settings = make(mini_batch_size=128).resume_settings()
    assert make(gradient_accumulation_steps=16).resume_settings() == settings
    assert make(mini_batch_size=64).resume_settings() != settings


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("num_env", "did you mean `num_envs`?"),
        ("thougt_cloning_coef", "did you mean `thought_cloning_coef`?"),
        ("learning_rat", "did you mean `learning_rate`?"),
        ("xyzzy", "docs/configuration.md lists its fields."),
    ],
)
def test_misspelt_fields(field, hint):
    with pytest.raises(TypeError) as refused:
        make(**{field: 1})
    assert str(refused.value) == f"GTRConfig has no field `{field}`: {hint}"


def test_the_signature_still_shows_the_fields():
    assert {"output_dir", "num_envs"} <= set(inspect.signature(GTRConfig).parameters)
