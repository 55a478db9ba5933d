"""The model card that a trained agent carries: it says what is true, and what it shows to run runs."""

import contextlib
import io
import re
import sys
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig
from PIL import Image
from toy import ColourTask, quiet_config

from trl_gtr import ExpertCorrector, GTRTrainer, load_policy, lora_target_modules, make_task
from trl_gtr.runs.model_card import TrainedAgent, model_card

PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module", params=["whole", "adapter"])
def trained(request, tmp_path_factory):
    """A short run of the shipped model: its folder and its log."""
    folder = tmp_path_factory.mktemp("runs") / "ezpoints-agent"
    args = quiet_config(folder, eval_episodes=4, max_completion_length=64)
    model, processor = load_policy("tiny")
    lora = LoraConfig(r=2, target_modules=lora_target_modules(model)) if request.param == "adapter" else None
    task = make_task("ezpoints")
    trainer = GTRTrainer(model, args, task, ExpertCorrector(), processor, peft_config=lora)
    trainer.evaluate(metric_key_prefix="start")
    trainer.train()
    trainer.save_model()
    trainer.evaluate(metric_key_prefix="end")
    trainer.create_model_card()
    return request.param, folder, {name: value for entry in trainer.state.log_history for name, value in entry.items()}


def test_the_card_says_what_the_agent_is_and_how_well_it_plays(trained):
    kind, folder, log = trained
    text = (folder / "README.md").read_text("utf-8")
    for wrong in ("[None]", "of None", "license", "time machine", "text-generation", str(folder.parent.parent)):
        assert wrong not in text.replace(str(folder), "")
    assert "`tiny`, the million-parameter model that ships with trl-gtr" in text
    assert "for the task **ezpoints**" in text
    assert text.count("An adapter that turns") == (kind == "adapter")
    after = f"{log['end_success']:.0%} [{log['end_success_low']:.0%}, {log['end_success_high']:.0%}]"
    (row,) = re.findall(r"\| all \|.*", text)
    assert row.split(" | ")[2] == after
    assert "corrector: expert; corrected" in text
    assert "cost: no paid calls" in text
    assert "wei2025gtr" in text
    assert "![Learning curves](curves.png)" in text
    assert Image.open(folder / "curves.png").width > 1000


def test_its_metadata_is_what_the_hub_reads(trained):
    _, folder, log = trained
    data = ModelCard.load(folder / "README.md").data
    assert (data.library_name, data.pipeline_tag, data.license) == ("trl-gtr", "image-text-to-text", None)
    assert data.base_model is None  # the shipped model isn't on the hub
    assert {"trl-gtr", "gtr", "ezpoints"} <= set(data.tags)
    assert data.model_name == "ezpoints-agent"
    success, thoughts = data.eval_results
    assert (success.dataset_name, success.metric_type) == ("ezpoints", "success")
    assert success.metric_value == round(log["end_success"], 4)
    assert f"95 % interval {log['end_success_low']:.3f}" in success.metric_name
    assert thoughts.metric_value == round(log["end_true_thoughts"], 4)


def test_what_it_shows_runs_as_shown(trained):
    _, folder, _ = trained
    (snippet,) = PYTHON.findall((folder / "README.md").read_text("utf-8"))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(snippet, "card", "exec"), {"__name__": "card"})
    assert '"cards"' in output.getvalue()
    assert re.search(r"^action: \S+$", output.getvalue(), re.MULTILINE)


def agent(tmp_path, **changes):
    about = {
        "name": "colours",
        "hub_model_id": None,
        "base_model": "",
        "is_adapter": False,
        "task": ColourTask(),
        "corrector": None,
        "guide": "",
        "args": quiet_config(tmp_path / "run"),
        "log": [],
        "paper": GTRTrainer._paper,
    }
    return TrainedAgent(**about | changes)


def test_a_base_model_of_the_hub_is_linked_and_a_folder_is_not_told(tmp_path):
    card = model_card(agent(tmp_path, base_model="org/model", is_adapter=True, hub_model_id="me/agent"))
    assert (card.data.base_model, card.data.base_model_relation) == ("org/model", "adapter")
    assert "[org/model](https://huggingface.co/org/model)" in card.text
    assert "load_policy(snapshot_download('me/agent'))" in card.text
    private = model_card(agent(tmp_path, base_model="/home/somebody/models/start"))
    assert "`start`" in private.text
    assert "somebody" not in private.text
    assert private.data.base_model is None


def test_a_task_with_options_is_made_with_them(tmp_path):
    lake = make_task(
        "gym:trl_gtr/FrozenLake-v0", goal="Reach it.", env_kwargs={"size": 3}, expert="operator:itemgetter"
    )
    for task in (lake, make_task("minigrid", view="full"), make_task("frozen_lake", split="train")):
        (snippet,) = PYTHON.findall(model_card(agent(tmp_path, task=task)).text)
        (line,) = re.findall(r"^task = (.*)$", snippet, re.MULTILINE)
        again = eval(line, {"make_task": make_task})
        assert type(again) is type(task)
        assert again.options == task.options
        assert again.prompt(None, {"mission": "go", "carrying": "nothing"}).startswith("You are")
    assert "size" in model_card(agent(tmp_path, task=lake)).text


def test_a_run_that_was_neither_evaluated_nor_corrected_has_a_card_too(tmp_path):
    card = model_card(agent(tmp_path))
    assert "It was not evaluated." in card.text
    assert "corrector: none (PPO alone)" in card.text
    assert "a model built from scratch" in card.text
    assert "from toy import ColourTask" in card.text
    assert card.data.eval_results is None


def test_a_task_of_a_script_is_imported_from_it(tmp_path, monkeypatch):
    lamp = type("LampTask", (ColourTask,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__="/home/somebody/lamp.py", __spec__=None))
    text = model_card(agent(tmp_path, task=lamp())).text
    assert "from lamp import LampTask" in text
    assert "somebody" not in text


def test_a_guide_without_a_corrector_is_told(tmp_path):
    text = model_card(agent(tmp_path, guide="GTR-Turbo (kl)")).text
    assert "- guide: GTR-Turbo (kl)\n- corrector: none\n" in text


def test_a_teachers_evaluation_is_not_the_agents(tmp_path):
    log = [{"step": 1, "end_pool_success": 0.25, "end_pool_teacher_success": 0.75, "end_teacher_true_thoughts": 0.5}]
    card = model_card(agent(tmp_path, log=log))
    assert [(result.dataset_split, result.metric_value) for result in card.data.eval_results] == [("pool", 0.25)]
    assert "75%" not in card.text


def test_the_corrector_and_its_cost_are_told(tmp_path):
    log = [
        {"step": 1, "corrector/corrected": 0.5, "corrector/calls": 10.0, "corrector/usd_spent": 0.1},
        {"step": 2, "corrector/corrected": 0.1, "corrector/calls": 2000.0, "corrector/usd_spent": 1.234},
    ]
    text = model_card(agent(tmp_path, corrector="gpt-x", log=log)).text
    assert (
        "- corrector: gpt-x; corrected 50% of thoughts in the first update, 10% in the last; "
        "cost: 2,000 calls, 1.23 US dollars"
    ) in text
