"""Presets on the command line and in files, and what a group method refuses before a model is loaded."""

from __future__ import annotations

import gymnasium as gym
import pytest
import yaml
from paths import EXAMPLES
from toy import ColourEnv, ColourTask

from trl_gtr.config import GTRConfig
from trl_gtr.distributed.presets import PRESETS
from trl_gtr.scripts import train as script
from trl_gtr.scripts.launch import check_words
from trl_gtr.scripts.settings import with_defaults

CPU = ["--use_cpu", "--bf16", "false", "--report_to", "none"]
STUDY = yaml.safe_load((EXAMPLES / "configs/studies/algorithms.yaml").read_text())


def settings_of(*words: str) -> GTRConfig:
    return script.parse(argv=with_defaults([*words, *CPU], "ezpoints"))[1]


@pytest.mark.parametrize("name", PRESETS)
def test_a_file_with_a_preset_has_its_values(name: str) -> None:
    file = EXAMPLES / "configs" / f"{name}.yaml"
    content = yaml.safe_load(file.read_text())
    assert content["preset"] == name
    assert set(content) & set(PRESETS[name]) <= {"total_env_steps"}
    args = settings_of("--config", str(file))
    expected = {**PRESETS[name], **{key: content[key] for key in content if key in PRESETS[name]}}
    assert {key: getattr(args, key) for key in expected} == expected


def test_the_file_overrides_the_preset_and_the_command_line_the_file(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: gigpo\nnum_envs: 32\ncliprange: 0.3\n")
    args = settings_of("--config", str(file), "--cliprange", "0.4")
    assert (args.advantage_estimator, args.gamma, args.num_envs, args.cliprange) == ("gigpo", 0.95, 32, 0.4)
    assert settings_of("--config", str(file), "--preset", "rloo").advantage_estimator == "rloo"


def test_the_shipped_settings_suit_a_group_method_too() -> None:
    """Those of the value head are left out."""
    args = settings_of("--task", "ezpoints", "--preset", "grpo")
    assert (args.advantage_estimator, args.group_size, args.num_envs) == ("grpo", 8, 64)
    assert args.value_head_sizes == GTRConfig.grpo(output_dir="unused", use_cpu=True).value_head_sizes
    script.check_method(args, ColourTask())
    assert settings_of("--task", "ezpoints").value_head_sizes == [128]


@pytest.mark.parametrize("arm", STUDY["arms"])
def test_every_arm_of_the_study_is_understood(arm: str) -> None:
    words = [f"--{name}={value}" for name, value in {**STUDY["options"], **STUDY["arms"][arm]}.items()]
    args = settings_of("--task", "ezpoints", *words)
    script.check_method(args, ColourTask())
    assert (args.thought_cloning_coef > 0) == arm.endswith("_guided")
    assert (args.total_env_steps, args.format_reward) == (3072, 0)
    assert args.advantage_estimator == (arm.split("_")[0] if arm[0] in "gr" else "gae")


def test_an_unknown_preset_is_an_error_that_names_the_others() -> None:
    with pytest.raises(ValueError, match="There is no preset 'ppo2': choose one of gtr, rl4vlm"):
        check_words(["--preset", "ppo2"])


def test_a_preset_shows_in_the_help(capsys) -> None:
    with pytest.raises(SystemExit):
        check_words(["--task", "ezpoints", "--preset", "gigpo", "--help"])
    shown = capsys.readouterr().out
    assert "--advantage_estimator" in shown
    assert "[gigpo]" in shown
    assert "[0.95]" in shown


class Restless(ColourTask):
    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        class Unseeded(ColourEnv):
            def reset(self, *, seed=None, options=None):
                return super().reset(seed=None)

        return Unseeded()


@pytest.mark.parametrize(
    ("words", "task", "error"),
    [
        (["--vf_coef", "0.1"], ColourTask(), "`vf_coef` is for a value head, but 'grpo' trains none"),
        (["--group_size", "1"], ColourTask(), "set `group_size` to 2 or more"),
        (["--group_size", "6"], ColourTask(), "`num_envs` = 64 must be a multiple of group_size"),
        ([], Restless(), r"start differently although they are reset with the same seed \(.* differs\)"),
        (["--overlap", "true"], ColourTask(), "`overlap` doesn't work with groups"),
        (["--rollout_timeout", "1e-9"], ColourTask(), "A group of episodes takes longer than `rollout_timeout`"),
    ],
)
def test_what_a_group_method_cannot_do_is_said_before_loading(words, task, error) -> None:
    with pytest.raises(ValueError, match=error):
        script.check_method(settings_of("--task", "ezpoints", "--preset", "grpo", *words), task)
