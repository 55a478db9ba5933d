"""The embedded model: its words, its folder, and whether the shipped weights do what the docs say."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from toy import quiet_config
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

from trl_gtr import GTRTrainer, make_task, tiny_llava
from trl_gtr.engines.transformers import TransformersEngine
from trl_gtr.environments.alfworld.generator import SPLITS, bundled_games, split_of
from trl_gtr.evaluation.agents import PolicyAgent
from trl_gtr.evaluation.evaluate import evaluate_agent
from trl_gtr.policy.loading import load_policy
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.policy.spans import SpanFinder
from trl_gtr.tasks.alfworld.prompt import write_thought
from trl_gtr.tiny_llava import CARD_GAMES as GAMES, practice_games
from trl_gtr.tiny_llava.model import build_tokenizer

TOKENIZER = build_tokenizer(tiny_llava.VARIANTS["tiny"].pieces())
ALFWORLD_TOKENIZER = build_tokenizer(tiny_llava.VARIANTS["tiny-alfworld"].pieces())
GRID_TOKENIZER = build_tokenizer(tiny_llava.VARIANTS["tiny-grids"].pieces())
MINIGRID_TOKENIZER = build_tokenizer(tiny_llava.VARIANTS["tiny-minigrid"].pieces())


def states(name: str, episodes: int = 12) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """A task, its expert's response and the info, along the expert's way."""
    task = make_task(name)
    env = task.make_env(evaluation=True)
    for seed in range(episodes):
        _, info = env.reset(seed=seed)
        ended = False
        while not ended and (response := task.expert(info)) is not None:
            yield task, response, info
            _, _, terminated, truncated, info = env.step(task.to_env_action(response, info))
            ended = terminated or truncated


# --- words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GAMES)
def test_prompts_and_responses_come_back_exactly(name: str) -> None:
    for task, response, info in states(name):
        for text in (task.prompt(None, info), response.text):
            assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("name", GAMES)
def test_only_what_varies_is_spelled(name: str) -> None:
    """If a task changes its words and the vocabulary does not follow, letters turn up here."""
    for task, response, info in states(name):
        prompt = TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(task.prompt(None, info)))
        assert len(prompt) <= 2 + len(info.get("Formula", ()))
        tokens = TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(response.text))
        assert not [token for token in tokens if re.fullmatch("[B-IL-PR-Za-z]", token)], tokens
        assert len(tokens) <= 50


ALFWORLD_INFO = {
    "task": "find two mug and put them in coffeetable",
    "previous_actions": ["go to desk 12", "take mug 2 from desk 12", "heat mug 2 with microwave 1"],
    "admissible_commands": [
        "go to bed 1",
        "move mug 2 to desk 12",
        "open drawer 1",
        "examine desk 12",
        "help",
        "look",
    ],
    "subgoal": ["put", "mug", "coffeetable"],
    "goal": {"object": "mug", "receptacle": "coffeetable", "toggle": ""},
    "view": {"here": [["desk 12", "", ["mug 1", "cd 1", "pen 1", "pencil 2", "book 1"]]], "holding": "mug 2"},
}


@pytest.mark.parametrize("states", [[], [["mug 2", ["hot", "clean"]]]])
def test_alfworld_is_told_in_whole_words(states: list[Any]) -> None:
    task = make_task("alfworld")
    info = {**ALFWORLD_INFO, "view": {**ALFWORLD_INFO["view"], "states": states}}
    response = task.format.render({"thoughts": write_thought(info, "go to bed 1")}, "go to bed 1")
    for text, most in ((task.prompt(None, info), 44), (response, 40)):
        ids = ALFWORLD_TOKENIZER.encode(text)
        assert ALFWORLD_TOKENIZER.decode(ids) == text
        spelled = [token for token in ALFWORLD_TOKENIZER.convert_ids_to_tokens(ids) if len(token) == 1]
        assert not spelled
        assert len(ids) <= most
    spans = SpanFinder(ALFWORLD_TOKENIZER)
    ids = ALFWORLD_TOKENIZER.encode(response)
    start = spans.action_start(ids, task.format.parse(response).action_span)
    assert spans.text(ids[start:]) == '"action": "go to bed 1"}'


@pytest.mark.parametrize(
    "lake", [["SFFF", "FFFF", "FFFF", "FFFG"], ["SHFF", "FHFF", "FFFF", "HFFG"], ["SFHF", "HFFH", "HFFH", "HHFG"]]
)
def test_frozen_lake_is_told_in_whole_words(lake: list[str]) -> None:
    task = make_task("frozen_lake")
    info = {"map": lake, "observation": 0}
    response = task.expert({**info, "observation": 10})
    assert response is not None
    for text, most in ((task.prompt(None, info), 1), (response.text, 16 + 2 * "".join(lake).count("H"))):
        ids = GRID_TOKENIZER.encode(text)
        assert GRID_TOKENIZER.decode(ids) == text
        assert not [token for token in GRID_TOKENIZER.convert_ids_to_tokens(ids) if len(token) == 1]
        assert len(ids) <= most
    assert len(GRID_TOKENIZER.encode(make_task("frozen_lake", thoughts=False).prompt(None, info))) == 1
    spans, ids = SpanFinder(GRID_TOKENIZER), GRID_TOKENIZER.encode(response.text)
    assert spans.text(ids[spans.action_start(ids, response.action_span) :]).startswith('"action": "')


@pytest.mark.parametrize("view", ["partial", "full"])
@pytest.mark.parametrize("carrying", ["nothing", "yellow key"])
@pytest.mark.parametrize(
    ("mission", "objects", "plan", "expert"),
    [
        ("go to the red ball", [[4, 7, "red ball"]], "go to the red ball", 2),
        ("pick up a grey box", [], "find the grey box", 1),
        ("get to the green goal square", [[1, 2, "goal"], [5, 5, "open blue door"]], "step onto the goal", 2),
        ("open the purple door", [[3, 3, "locked purple door"]], "open the locked purple door", 5),
    ],
)
def test_minigrid_is_told_in_whole_words(
    view: str, carrying: str, mission: str, objects: list[Any], plan: str, expert: int
) -> None:
    task = make_task("minigrid", view=view)
    info = {"mission": mission, "carrying": carrying, "player": [7, 4], "facing": "up", "ahead": "wall"}
    info |= {"objects": objects, "plan": plan, "expert": expert}
    response = task.expert(info)
    assert response is not None
    for text, most in ((task.prompt(None, info), 9), (response.text, 20 + 6 * len(objects))):
        ids = MINIGRID_TOKENIZER.encode(text)
        assert MINIGRID_TOKENIZER.decode(ids) == text
        assert not [token for token in MINIGRID_TOKENIZER.convert_ids_to_tokens(ids) if len(token) == 1]
        assert len(ids) <= most
    spans, ids = SpanFinder(MINIGRID_TOKENIZER), MINIGRID_TOKENIZER.encode(response.text)
    assert spans.text(ids[spans.action_start(ids, response.action_span) :]).startswith('"action": "')


def test_each_task_has_at_most_one_embedded_model() -> None:
    known = [task for variant in tiny_llava.VARIANTS.values() for task in variant.tasks]
    assert len(known) == len(set(known))
    expected = {
        "blackjack": "tiny",
        "alfworld": "tiny-alfworld",
        "frozen_lake": "tiny-grids",
        "minigrid": "tiny-minigrid",
        "sokoban": None,
    }
    assert {task: tiny_llava.for_task(task) for task in expected} == expected


def test_alfworld_practice_is_in_no_split_and_no_unseen_room() -> None:
    seeds = {int(name.rpartition("/")[2]) for name in practice_games.alfworld_practice()}
    bundled = {seed for split in SPLITS for _, seed in bundled_games(split)}
    assert not seeds & bundled
    assert all(split_of(seed) != "valid_unseen" for seed in seeds)


def test_action_only_prompts_are_short_too() -> None:
    for name in GAMES:
        prompt = make_task(name, thoughts=False).prompt(None, {"Formula": ["10", "+"]})
        assert len(TOKENIZER.encode(prompt)) <= 4


@pytest.mark.parametrize("name", GAMES)
def test_the_action_begins_with_a_token_of_its_own(name: str) -> None:
    spans = SpanFinder(TOKENIZER)
    for _, response, _ in states(name, episodes=3):
        ids = TOKENIZER.encode(response.text)
        start = spans.action_start(ids, response.action_span)
        assert spans.text(ids) == response.text
        assert spans.text(ids[start:]) == response.text[response.action_span[0] :]


@settings(deadline=None, max_examples=60)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    special = ("<pad>", "</s>", "<image>", "<user>", "<assistant>")
    text = text.encode("utf-8", "ignore").decode()
    if not any(token in text for token in special):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_chat_template() -> None:
    _, processor = tiny_llava.build()
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}
    assert processor.apply_chat_template([user], add_generation_prompt=True) == "<user><image>Hi<assistant>"
    talk = [user, {"role": "assistant", "content": "Ho"}]
    assert processor.apply_chat_template(talk) == "<user><image>Hi<assistant>Ho</s>"


# --- the model ----------------------------------------------------------------------------------------------------


def test_build_depends_on_its_seed_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    (first, _), (again, _), (other, _) = (tiny_llava.build(seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)  # the program's own random numbers are left alone
    assert isinstance(first, LlavaForConditionalGeneration)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert 0.9e6 < sum(parameter.numel() for parameter in first.parameters()) < 3e6


def test_save_keeps_half_precision_and_loads_as_float32(tmp_path: Path) -> None:
    model, processor = tiny_llava.build(3, hidden_size=32, layers=1, vision_hidden_size=32, vision_layers=1)
    tiny_llava.save(model, processor, tmp_path)
    loaded, _ = load_policy(tmp_path)
    assert loaded.dtype == torch.float32
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.half().float()), name


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    return load_policy("tiny")


@pytest.mark.parametrize("name", tiny_llava.VARIANTS)
def test_shipped_folder_is_small_and_ordinary(caplog: pytest.LogCaptureFixture, name: str) -> None:
    folder = tiny_llava.path(name)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2.5e6
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        model = AutoModelForImageTextToText.from_pretrained(folder)
        AutoProcessor.from_pretrained(folder)
    assert not caplog.records
    assert isinstance(model, LlavaForConditionalGeneration)
    assert model.dtype == torch.float32


def test_shipped_tokenizer_is_the_one_that_the_tasks_make(shipped: tuple[Any, Any]) -> None:
    """Fails when a task's words have changed since the weights were made: make them anew, see docs/tiny_llava.md."""
    assert shipped[1].tokenizer.get_vocab() == TOKENIZER.get_vocab()
    processor = AutoProcessor.from_pretrained(tiny_llava.path("tiny-alfworld"))
    assert processor.tokenizer.get_vocab() == ALFWORLD_TOKENIZER.get_vocab()
    processor = AutoProcessor.from_pretrained(tiny_llava.path("tiny-grids"))
    assert processor.tokenizer.get_vocab() == GRID_TOKENIZER.get_vocab()
    processor = AutoProcessor.from_pretrained(tiny_llava.path("tiny-minigrid"))
    assert processor.tokenizer.get_vocab() == MINIGRID_TOKENIZER.get_vocab()


def test_tiny_is_a_name_for_the_shipped_model(shipped: tuple[Any, Any]) -> None:
    model, _ = load_policy("tiny")
    assert torch.equal(model.lm_head.weight, shipped[0].lm_head.weight)


GREEDY = [row for row in tiny_llava.figures() if row["mode"] == "greedy"]


@pytest.mark.parametrize("stated", GREEDY, ids=lambda row: f"{row['task']}-{row['starts']}")
def test_shipped_weights_do_what_is_stated(shipped: tuple[Any, Any], stated: dict[str, Any]) -> None:
    """On other deals than those that were counted: the 95 % intervals of both must meet."""
    if stated["task"] == "minigrid":
        pytest.importorskip("minigrid", reason='needs the extra: pip install "trl-gtr[minigrid]"')
    name = tiny_llava.for_task(stated["task"])
    assert name is not None
    model, processor = shipped if name == "tiny" else load_policy(name)
    policy = VLMPolicy(model, processor, max_completion_length=96, temperature=1.0)
    agent = PolicyAgent(TransformersEngine(policy, model))
    task = make_task(stated["task"], **stated["options"])
    episodes = 96 if stated["task"] in ("points24", "ezpoints") and stated["starts"] != "unseen" else 24
    measured = evaluate_agent(agent, task, episodes, seed=77, num_envs=32).metrics()
    assert measured["success_high"] > stated["success_low"]
    assert measured["success_low"] < stated["success_high"]
    assert measured["valid"] > stated["valid"] - 0.1  # steps of an episode fail together: no interval for so few


def test_shipped_model_reads_unseen_hands(shipped: tuple[Any, Any]) -> None:
    model, processor = shipped
    policy = VLMPolicy(model, processor, max_completion_length=96, temperature=1.0)
    task = make_task("points24", hands="unseen")
    dealt = [task.make_env().reset(seed=seed) for seed in range(64)]
    prompts = [task.prompt(image, info) for image, info in dealt]
    answers = TransformersEngine(policy, model).generate(prompts, [image for image, _ in dealt], greedy=True)
    read = [
        task.judge(task.format.parse(answer.text), info)["cards"]
        for answer, (_, info) in zip(answers, dealt, strict=True)
    ]
    assert np.mean(read) > 0.7


def test_a_trainer_takes_the_name(tmp_path: Path) -> None:
    args = quiet_config(
        tmp_path, num_envs=2, rollout_steps=4, total_env_steps=8, thought_cloning_coef=0.0, max_completion_length=48
    )
    trainer = GTRTrainer("tiny", args, task=make_task("ezpoints"))
    trainer.train()
    assert trainer.state.global_step == 1
