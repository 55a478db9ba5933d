"""What a user can get wrong before training: each is one line that names the remedy, and exit status 2."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from alfworld_cases import needs_alfworld
from example_scripts import example
from paths import EXAMPLES
from toy import ColourTask
from transformers import LlamaConfig, LlamaForCausalLM
from trl import ModelConfig
from vlms import TEXT, byte_level_tokenizer

from trl_gtr import make_task, tiny_llava
from trl_gtr.policy.loading import load_policy
from trl_gtr.runs import output_folder
from trl_gtr.runs.manifest import MANIFEST_FILE, Manifest, saved_task
from trl_gtr.scripts import arguments as command_line, train as launch
from trl_gtr.scripts.settings import CONFIGS as SHIPPED

CONFIGS = EXAMPLES / "configs"
TRAINING_CONFIGS = sorted([*SHIPPED.glob("*.yaml"), *CONFIGS.glob("[!s]*.yaml")])


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs an example in this process; gives the one line of its error."""

    def run(name: str, *argv: Any) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, argv)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            example(name).main()
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    return run


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded before the error was found")

    monkeypatch.setattr("trl_gtr.policy.loading.AutoModelForImageTextToText.from_pretrained", refuse)


@pytest.fixture
def text_only(tmp_path: Path) -> Path:
    """A language model's folder."""
    tokenizer = byte_level_tokenizer()
    LlamaForCausalLM(LlamaConfig(**TEXT, vocab_size=len(tokenizer))).save_pretrained(tmp_path / "text_only")
    tokenizer.save_pretrained(tmp_path / "text_only")
    return tmp_path / "text_only"


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "argv", "message"),
    [
        ("points24", ["--learning_rat", "1"], "Unknown option `learning_rat` on the command line: did you"),
        ("points24", ["--total_env_step=5"], "did you mean `total_env_steps`?"),
        ("points24", ["--xyzzy", "5"], "`--help` lists the options"),
        ("points24", ["--num_envs", "many"], "argument --num_envs/--num-envs: invalid int value: 'many'"),
        ("points24", ["--config", "nowhere.yaml"], "nowhere.yaml can't be read: No such file"),
        ("points24", ["--config"], "--config needs a value"),
        ("points24", ["--gamma", "2"], "`gamma` must be at least 0 and at most 1"),
        ("points24", ["--max_steps", "7"], "Set total_env_steps instead"),
        ("points24", ["stray"], "stray"),
        ("points24", ["--task", "point24"], "did you mean 'points24'?"),
        ("points24", ["--task_options", '{"a": 1}'], "has no option a. Its options: env_kwargs, hands, cut, thoughts"),
        ("points24", ["--hand", "pool"], "Unknown option `hand` on the command line: did you mean `hands`?"),
        ("points24", ["--eval_tasks", "[1]"], "eval_tasks must be a dictionary of options"),
        ("gym_cards", ["--eval_hands", "pool"], "Unknown option `eval_hands`"),
        ("alfworld", ["--hands", "pool"], "Unknown option `hands`"),
        ("points24", ["--hands", "many"], "There are no hands 'many': choose all, pool, unseen, solvable"),
        ("points24", ["--task", "nowhere:Task"], "There is no module 'nowhere': run from the folder that holds it"),
        ("points24", ["--task", "trl_gtr.tasks:make_tas"], "did you mean trl_gtr.tasks:make_task?"),
        ("points24", ["--task", "my_tasks/lamp.py:Lamp"], "not its file: my_tasks.lamp:Lamp"),
        ("points24", ["--cut", "[1"], "[1 is not valid YAML"),
        ("gym_cards", ["--task", "ezpoint"], "There is no task 'ezpoint'; did you mean 'ezpoints'?"),
        ("gym_cards", ["--task", "ezpoints", "--hands", "pool"], "only Points24 has named sets of hands"),
        ("gym_cards", ["--corrector", "wizard"], "invalid choice: 'wizard'"),
        ("alfworld", ["--task_options", '{"history": 4'], "task_options is not a JSON object"),
        ("alfworld", ["--task_options", "[4]"], "task_options must be a dictionary of options"),
        ("alfworld", ["--task_options", '{"histori": 4}'], "Task 'alfworld' has no option histori"),
        ("alfworld", ["--task_options", '{"env_kwargs": {"task_types": ["cook"]}}'], "there is no cook; the six are"),
        ("gym_cards", ["--model_init_kwargs", '{"dtype": '], "model_init_kwargs is not a JSON object"),
        ("gym_cards", ["--model_init_kwargs", "bfloat16"], "model_init_kwargs is not a JSON object"),
        ("gym_cards", ["--model_init_kwargs", '["bfloat16"]'], "model_init_kwargs must be a dictionary of options"),
        ("evaluate", ["--task", "alfworld", "--split", "unseen"], "split must be one of train, valid_seen"),
        ("evaluate", ["--task", "points24", "--split", "train"], "Unknown option `split`"),
        ("evaluate", ["--task", "blackjak"], "did you mean 'blackjack'?"),
        ("evaluate", ["--agent", "expert"], "did you mean `agents`?"),
        ("evaluate", ["--batch_size", "0"], "--batch_size must be at least 1"),
        ("evaluate", ["--episodes", "-3"], "--episodes must be at least 1"),
        ("evaluate", ["--episodes", "many"], "--episodes must be a number or 'all', got 'many'"),
        ("evaluate", ["--episodes", "all"], "Task 'points24' deals at random"),
        ("points24", ["--eval_episodes", "some"], "`eval_episodes` must be a number or 'all'"),
        ("points24", ["--eval_episodes", "0"], "`eval_episodes` must be at least 1"),
        ("evaluate", ["--output", "nowhere/x.json"], "the folder does not exist"),
        ("evaluate", ["--dtype", "foo"], "choose one of float32"),
        ("evaluate", ["--agents", "openai:gpt-4o"], "set OPENAI_API_KEY"),
        ("sft", ["--output_dir", "x", "--tasks", "ezpoints=1", "--model_name_or_path", "build", "--use_peft"],
         "leave out --use_peft"),
        ("convert_llava", ["--source", "x", "--output", "y", "--dtype", "foo"], "--dtype must be one of bfloat16"),
        ("sft", ["--output_dir", "x"], "either --tasks points24=1000 or --llava_json FILE"),
        ("sft", ["--output_dir", "x", "--tasks", "points24"], "write task=rows"),
        ("sft", ["--output_dir", "x", "--tasks", "nowhere:Task=3"], "There is no module 'nowhere'"),
        ("audit_corrector", ["--task", "nowhere:Task"], "There is no module 'nowhere'"),
        ("evaluate", ["--task", "nowhere:Task"], "There is no module 'nowhere'"),
        ("sft", ["--output_dir", "x", "--tasks", "pionts24=3"], "did you mean 'points24'?"),
        ("convert_llava", ["--source", "nowhere", "--output", "x"], "no config.json in nowhere"),
        ("audit_corrector", ["--corrector", "none"], "can't be audited"),
        ("audit_corrector", ["--state", "3"], "did you mean `states`?"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_one_line(
    fails: Any, no_training: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, argv: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert message in fails(name, *argv)
    assert not list(tmp_path.iterdir()), "nothing may be left behind"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_env: 8", "Unknown option `num_env` in {file}: did you mean `num_envs`?"),
        ("- num_envs", "{file} must contain options as `name: value`"),
        ("num_envs: [8", "{file} is not valid YAML"),
        ("num_envs: eight", "invalid int value: 'eight'"),
    ],
)
def test_a_wrong_configuration_file_is_one_line(
    fails: Any, no_training: None, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert message.format(file=file) in fails("gym_cards", f"--config={file}", "--output_dir", tmp_path / "run")


@pytest.mark.parametrize("name", [pytest.param("alfworld_tiny", marks=needs_alfworld), "alfworld_llava"])
def test_options_of_alfworld_come_from_the_file(name: str) -> None:
    file = next(path for path in TRAINING_CONFIGS if path.stem == name)
    script, args, model_args, *_ = launch.parse(file, ["--use_cpu", "--bf16", "false"])
    task, evaluations = launch.make_tasks(script) if name == "alfworld_tiny" else (script.make_task(), {})
    if evaluations:
        splits = {split: each.evaluation_split for split, each in evaluations.items()}
        assert splits == {"train": "train", "valid_unseen": "valid_unseen"}
    tiny = name == "alfworld_tiny"
    expected = {"task_types": ["pick_and_place_simple"], "expert": "explorer"}
    assert task.env_kwargs == (expected if tiny else {"backend": "thor", "reward_style": "rl4vlm"})
    assert (model_args.model_name_or_path in tiny_llava.VARIANTS) == tiny
    assert args.thought_prob_coef == 0.2


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("task: blackjack\nnum_envs: 4\nlearning_rate: 2e-4\noutput_dir: here\n")
    argv = ["--config", str(file), "--num-envs", "8", "--overwrite"]
    script, args, model_args, *_ = launch.parse(SHIPPED / "points24_tiny.yaml", argv)
    assert (script.task, args.overwrite, args.num_envs, args.learning_rate) == ("blackjack", True, 8, 2e-4)
    assert model_args.model_name_or_path is None  # of the default file nothing is left


@pytest.mark.parametrize("installed", [True, False])
def test_tensorboard_is_written_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(launch, "is_tensorboard_available", lambda: installed)
    file = CONFIGS / "points24_llava.yaml"
    cpu = ["--bf16", "false", "--use_cpu"]
    assert launch.parse(file, cpu)[1].report_to == (["tensorboard"] if installed else [])
    assert launch.parse(file, [*cpu, "--report_to", "none"])[1].report_to == []


@pytest.mark.parametrize("config", [*TRAINING_CONFIGS, *CONFIGS.glob("sft*.yaml")], ids=lambda path: path.stem)
def test_every_configuration_is_understood(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = ["--use_cpu", "--bf16", "false"]
    if config.stem.startswith("sft"):
        from trl import ModelConfig, SFTConfig

        types = (example("sft").DataArguments, SFTConfig, ModelConfig)
        data, args, _ = command_line.parse_arguments(types, ["--config", str(config), *cpu])
        assert data.tasks
    else:
        _, args, *_ = launch.parse(config, cpu)
        assert args.num_updates >= 1
    assert args.output_dir.startswith("runs/")


# --- the paper's mini-batch, however many processes there are -------------------------------------------------------

CPU = ["--use_cpu", "--bf16", "false"]


def launched(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Makes a configuration believe that so many processes were launched."""
    monkeypatch.setattr("trl_gtr.config.PartialState", lambda **_: SimpleNamespace(num_processes=count))


def mini_batch(args: Any, processes: int) -> int:
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * processes


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("config", TRAINING_CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_runs_on_several_processes(
    config: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, processes)
    argv = [*CPU, "--per_device_train_batch_size", "4"] if "llava" not in config.stem else CPU
    args = launch.parse(config, argv)[1]
    if "llava" in config.stem:
        assert mini_batch(args, processes) == 128
    assert args.num_envs * args.rollout_steps % mini_batch(args, processes) == 0


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("task", ["number_line", "blackjack"])
def test_shorter_rollouts_keep_the_mini_batch(task: str, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, processes)
    argv = [*CPU, "--task", task, "--rollout_steps", "32"]
    assert mini_batch(launch.parse(CONFIGS / "gym_cards_llava.yaml", argv)[1], processes) == 128


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("accelerate_configs/*.yaml")), ids=lambda path: path.stem)
def test_the_command_that_a_launcher_file_prints_has_the_papers_mini_batch(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = file.read_text()
    printed = " ".join(re.findall(r"^#  +(.*?)\\?$", text, re.MULTILINE))
    command = shlex.split(printed[printed.index("accelerate launch") :])
    processes = int(yaml.safe_load(text)["num_processes"])
    if "--num_processes" in command:
        processes = int(command[command.index("--num_processes") + 1])
    launched(monkeypatch, processes)
    if "--config" not in command:
        return  # the embedded model
    place = command.index("--config")
    args = launch.parse(EXAMPLES.parent / command[place + 1], [*CPU, *command[place + 2 :]])[1]
    assert mini_batch(args, processes) == 128


@pytest.mark.parametrize("name", ["points24", "evaluate", "sft", "convert_llava", "audit_corrector"])
def test_help_begins_with_what_the_script_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = example(name)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert script.__doc__.strip() in shown
    assert "--num_mini_batches" not in shown  # a setting that GTR refuses


# --- folders ------------------------------------------------------------------------------------------------------


def gtr_args(output_dir: Path, *argv: str) -> Any:
    return launch.parse(SHIPPED / "gym_cards_tiny.yaml", ["--output_dir", str(output_dir), *argv])[1]


def test_two_runs_are_not_mixed_in_one_folder(fails: Any, no_training: None, tmp_path: Path) -> None:
    old, foreign = tmp_path / "checkpoint-3", tmp_path / "checkpoint-mine"
    for folder in (old, foreign):
        folder.mkdir()
    assert "resume" not in fails("gym_cards", "--output_dir", tmp_path)  # there is nothing to resume
    (old / MANIFEST_FILE).touch()
    line = fails("gym_cards", "--output_dir", tmp_path)
    assert "contains an earlier run" in line
    assert "--overwrite" in line
    assert "--resume_from_checkpoint true" in line
    launch.check_output_dir(gtr_args(tmp_path, "--overwrite"), make_task("ezpoints"))
    assert old.is_dir()  # until training begins: what fails before mustn't cost the earlier run
    output_folder.remove_earlier_run(tmp_path)
    assert list(tmp_path.iterdir()) == [foreign]  # only what a run writes is removed
    old.mkdir()
    with pytest.raises(
        ValueError, match="checkpoint-3 is not a checkpoint of this trainer, so it won't be overwritten"
    ):
        launch.check_output_dir(gtr_args(tmp_path, "--overwrite"), make_task("ezpoints"))


def test_a_folder_that_cannot_be_made(fails: Any, no_training: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Can't create the output folder" in fails("gym_cards", "--output_dir", tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(fails: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "run (Permission denied)" in fails("gym_cards", "--output_dir", tmp_path / "run")
    assert "No permission to write" in fails("gym_cards", "--output_dir", tmp_path)


def test_no_permission_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, also where the tests are run by root."""
    monkeypatch.setattr(launch.os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"No permission to write into .*: set --output_dir"):
        launch.check_output_dir(gtr_args(tmp_path), make_task("ezpoints"))


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """What a finished run on EZPoints leaves behind, as far as it is looked at before a model is loaded."""
    folder = tmp_path / "ezpoints_run" / "checkpoint-1"
    folder.mkdir(parents=True)
    Manifest("ezpoints", {}, {}, {}, files={}).write(folder)
    (folder / "config.json").write_text((tiny_llava.path() / "config.json").read_text())
    return folder


def test_a_checkpoint_of_another_task_is_not_resumed(fails: Any, no_training: None, agent: Path) -> None:
    line = fails("points24", "--output_dir", agent.parent, "--resume_from_checkpoint", "true")
    assert f"{agent} is from a run on 'ezpoints', not 'points24': resume it on 'ezpoints', or start a new run" in line
    args = gtr_args(agent.parent, "--resume_from_checkpoint", str(agent))
    launch.check_output_dir(args, make_task("ezpoints"))
    assert saved_task(agent) == "ezpoints"


def test_nothing_to_resume(fails: Any, no_training: None, tmp_path: Path) -> None:
    line = fails("points24", "--output_dir", tmp_path, "--resume_from_checkpoint", "true")
    assert "holds no checkpoint-* folder" in line
    line = fails("points24", "--output_dir", tmp_path / "new", "--resume_from_checkpoint", tiny_llava.path())
    assert "is not a checkpoint of this trainer" in line


def test_an_agent_of_another_task_is_not_evaluated_by_accident(fails: Any, no_training: None, agent: Path) -> None:
    line = fails("evaluate", "--task", "points24", "--agents", agent)
    assert f"{agent} was trained on ezpoints: set --task to that, or --any_task" in line


def test_an_agent_is_not_evaluated_without_its_memory_by_accident(fails: Any, no_training: None, agent: Path) -> None:
    line = fails("evaluate", "--task", "ezpoints", "--agents", agent, "--history_turns", "1")
    assert f"{agent} was trained with 0 earlier turns in its prompts, 0 of them with pictures: set" in line
    Manifest("ezpoints", {"history_turns": 2, "history_images": 1}, {}, {}, files={}).write(agent)
    line = fails("evaluate", "--task", "ezpoints", "--agents", agent)
    assert "set --history_turns 2 --history_images 1, or --any_task to play anyway." in line
    line = fails("evaluate", "--task", "ezpoints", "--agents", agent, "--history_images", "1")
    assert "Set history_turns to at least 1." in line


def test_where_nothing_was_recorded_every_task_is_allowed() -> None:
    assert saved_task(tiny_llava.path()) is None
    assert saved_task("tiny") is None


# --- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "runs/a/b"])
def test_a_missing_folder(fails: Any, tmp_path: Path, name: str) -> None:
    line = fails("gym_cards", "--model_name_or_path", name, "--output_dir", tmp_path / "run")
    assert f"There is no folder {name}. Give a model's folder, a model on the Hub, or `tiny`." in line


def test_a_name_that_the_hub_does_not_give(fails: Any, tmp_path: Path) -> None:
    line = fails("gym_cards", "--model_name_or_path", "nobody/nothing", "--output_dir", tmp_path / "run")
    assert "There is no folder nobody/nothing, and no model of that name was found on the Hub" in line
    line = fails("evaluate", "--agents", "nobody/nothing")
    assert "or use `tiny`" in line


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json\. Give the folder that `save_pretrained` wrote"):
        load_policy(tmp_path)
    (tmp_path / "checkpoint-12").mkdir()
    with pytest.raises(ValueError, match=r"newest checkpoint is .*checkpoint-12"):
        load_policy(tmp_path)


def test_a_model_that_cannot_see(fails: Any, no_training: None, text_only: Path, tmp_path: Path) -> None:
    line = fails("gym_cards", "--model_name_or_path", text_only, "--output_dir", tmp_path / "run")
    assert f"{text_only} (llama) is not a vision-language model: GTR needs a vision-language model" in line
    with pytest.raises(ValueError, match="is not a vision-language model"):
        load_policy(text_only)


def test_an_original_llava_names_the_script(fails: Any, no_training: None, tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_text(json.dumps({"architectures": ["LlavaMistralForCausalLM"]}))
    line = fails("gym_cards", "--model_name_or_path", original, "--output_dir", tmp_path / "run")
    assert f"python examples/convert_llava.py --source {original}" in line


def test_a_custom_task_needs_no_more_than_a_name(tmp_path: Path) -> None:
    launch.check_output_dir(gtr_args(tmp_path), ColourTask())


# --- arguments of from_pretrained ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["command line", "file"])
def test_model_init_kwargs_reach_the_model(tmp_path: Path, place: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: tiny\nuse_cpu: true\noutput_dir: run\n")
    argv = ["--config", str(file), "--report_to", "none"]
    if place == "file":
        file.write_text(file.read_text() + "model_init_kwargs:\n  dtype: bfloat16\n  attn_implementation: eager\n")
    else:
        argv += ["--model_init_kwargs", '{"dtype": "bfloat16", "attn_implementation": "eager"}']
    _, args, model_args, *_ = launch.parse(file, argv)
    assert args.model_init_kwargs == {"dtype": "bfloat16", "attn_implementation": "eager"}
    model, _, _ = launch.load_model(model_args, args.model_init_kwargs)
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


def test_an_unknown_model_init_kwarg_is_one_line(fails: Any, tmp_path: Path) -> None:
    argv = ["--model_init_kwargs", '{"d_type": "bfloat16"}', "--output_dir", str(tmp_path / "run")]
    assert "`model_init_kwargs`" in fails("gym_cards", *argv)
    assert "d_type" in fails("gym_cards", *argv)
    argv = ["--tasks", "ezpoints=1", "--model_name_or_path", "tiny", "--use_cpu", *argv]
    assert "d_type" in fails("sft", *argv)


def test_the_revision_of_a_base_is_kept_with_its_adapter() -> None:
    model_args = ModelConfig(model_name_or_path="tiny", use_peft=True)
    assert launch.load_model(model_args)[2].revision is None
    assert launch.load_model(model_args, {"revision": "v2"})[2].revision == "v2"
    model_args.model_revision = "v1"
    assert launch.load_model(model_args)[2].revision == "v1"
