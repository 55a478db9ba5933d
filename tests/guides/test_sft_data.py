"""SFT data: from expert play, from LLaVA-format files, from a run's corrections; and through TRL's SFTTrainer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, load_from_disk
from PIL import Image
from toy import quiet_config

from trl_gtr import ExpertCorrector, GTRTrainer, make_task, tiny_llava
from trl_gtr.guides.buffer import CorrectionBuffer
from trl_gtr.guides.sft_data import (
    corrections_dataset,
    make_sft_dataset,
    prompt_and_completion,
    read_llava_json,
    sft_row,
)


def response(row: dict[str, Any]) -> str:
    return row["messages"][1]["content"][0]["text"]


def test_rows_have_image_prompt_and_a_true_response() -> None:
    task = make_task("number_line")
    data = make_sft_dataset(task, 20, seed=1)
    assert len(data) == 20
    assert data.column_names == ["images", "messages"]
    for row in data:
        (image,) = row["images"]
        assert image.size == (300, 300)
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert [part["type"] for part in user["content"]] == ["image", "text"]
        assert user["content"][1]["text"].startswith("You are walking along a number line")
        answer = json.loads(response(row))
        up = answer["target number"] > answer["current number"]
        assert answer["action"] == ("+" if up else "-")


def test_the_picture_is_the_one_that_the_response_is_about() -> None:
    task = make_task("number_line")
    for row in make_sft_dataset(task, 12, seed=2):
        answer = json.loads(response(row))
        wish = {"target": answer["target number"], "current": answer["current number"]}
        picture, _ = task.make_env().reset(options=wish)
        assert np.array_equal(np.asarray(row["images"][0]), picture)


def test_rows_of_a_task_that_shows_earlier_turns() -> None:
    """Each row goes on with the chat of the row before it, with the responses that were played."""
    plain, past = make_task("number_line"), make_task("number_line", history_turns=2, history_images=1)
    rows, expected = list(make_sft_dataset(past, 30, seed=1, image_size=60)), make_sft_dataset(plain, 30, seed=1)
    for before, row, alone in zip([None, *rows], rows, expected, strict=False):
        assert row["messages"][-2:] == alone["messages"]  # the same states and answers
        assert {image.size for image in row["images"]} == {(60, 60)}
        kinds = [[part["type"] for part in message["content"]] for message in row["messages"]]
        assert sum(kind.count("image") for kind in kinds) == len(row["images"]) <= 2
        assert kinds[-2] == ["image", "text"]
        if before is not None and len(row["messages"]) > 2:
            assert row["images"][0] == before["images"][-1]
            assert kinds[-4] == ["image", "text"]
            assert row["messages"][-3]["role"] == "assistant"
            same = row["messages"][-3] == before["messages"][-1]
            assert same or json.loads(row["messages"][-3]["content"][0]["text"])["action"] in ("+", "-")
    lengths = [len(row["messages"]) for row in rows]
    assert set(lengths) == {2, 4, 6}
    data = prompt_and_completion(make_sft_dataset(past, 4, seed=1))
    assert [len(row["prompt"]) for row in data] == [length - 1 for length in lengths[:4]]
    assert all(len(row["completion"]) == 1 for row in data)


def test_same_seed_same_rows_other_seed_other_rows() -> None:
    task = make_task("ezpoints")
    first, again, other = (make_sft_dataset(task, 15, seed=seed) for seed in (3, 3, 4))
    assert [response(row) for row in first] == [response(row) for row in again]
    assert [response(row) for row in first] != [response(row) for row in other]


def test_exploration_shows_states_off_the_experts_path() -> None:
    task = make_task("points24", env_kwargs={"solvable_only": True})

    def spaces(exploration: float) -> int:
        data = make_sft_dataset(task, 80, seed=0, exploration=exploration)
        prompts = [row["messages"][0]["content"][1]["text"] for row in data]
        formulas = [prompt.split('Formula so far: "')[1].split('"\n')[0] for prompt in prompts]
        return sum(" " in formula for formula in formulas)

    assert spaces(0.0) == 0  # the expert never plays a number that isn't there
    assert spaces(0.4) > 3


def test_image_size_is_what_the_processor_would_make_of_the_picture() -> None:
    task = make_task("blackjack")
    _, processor = tiny_llava.build()
    large, small = (make_sft_dataset(task, 3, seed=5, image_size=size)[:]["images"] for size in (None, 96))
    assert small[0][0].size == (96, 96)
    pixels = [processor.image_processor(images=[row[0] for row in rows])["pixel_values"] for rows in (large, small)]
    np.testing.assert_allclose(pixels[0], pixels[1], atol=1e-6)


def test_save_and_load(tmp_path: Path) -> None:
    data = make_sft_dataset(make_task("blackjack"), 4)
    data.save_to_disk(tmp_path / "data")
    loaded = load_from_disk(tmp_path / "data")
    assert [row["messages"] for row in loaded] == [row["messages"] for row in data]
    assert all(
        np.array_equal(np.asarray(a["images"][0]), np.asarray(b["images"][0]))
        for a, b in zip(data, loaded, strict=True)
    )


def test_prompt_and_completion_part_the_messages() -> None:
    data = make_sft_dataset(make_task("blackjack"), 3)
    parted = prompt_and_completion(data)
    assert set(parted.column_names) == {"images", "prompt", "completion"}
    for row, whole in zip(parted, data, strict=True):
        assert row["prompt"] + row["completion"] == whole["messages"]
        assert [message["role"] for message in row["completion"]] == ["assistant"]


@pytest.mark.parametrize(("n", "exploration"), [(0, 0.1), (5, 1.0), (5, -0.1)])
def test_invalid_sizes_are_refused(n: int, exploration: float) -> None:
    with pytest.raises(ValueError, match=r"row|exploration"):
        make_sft_dataset(make_task("blackjack"), n, exploration=exploration)


def test_a_task_without_answers_is_refused() -> None:
    task = make_task("points24", hands=[["A", "A", "A", "A"]])  # makes no 24
    with pytest.raises(ValueError, match="no answer in 1000 deals"):
        make_sft_dataset(task, 1)


# --- LLaVA format -------------------------------------------------------------------------------------------------


def entry(**changes: Any) -> dict[str, Any]:
    turns = [
        {"from": "human", "value": "<image>\nWhich cards?"},
        {"from": "gpt", "value": '{"cards": ["4"], "action": "4"}'},
    ]
    return {"id": "7", "image": "a/0.png", "conversations": turns, **changes}


def write(folder: Path, *entries: Any) -> Path:
    (folder / "a").mkdir(exist_ok=True)
    Image.new("RGB", (20, 10), (1, 2, 3)).save(folder / "a" / "0.png")
    (folder / "data.json").write_text(json.dumps(list(entries)))
    return folder / "data.json"


def test_llava_json_becomes_the_same_form(tmp_path: Path) -> None:
    data = read_llava_json(write(tmp_path, entry(), entry()), tmp_path)
    assert len(data) == 2
    assert data.features == make_sft_dataset(make_task("blackjack"), 1).features
    row = data[0]
    assert row["images"][0].size == (20, 10)
    assert np.asarray(row["images"][0])[0, 0].tolist() == [1, 2, 3]
    assert row["messages"] == [
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "Which cards?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": '{"cards": ["4"], "action": "4"}'}]},
    ]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (entry(image="b/1.png"), r"Entry 1 \(id '7'\): there is no image 'b/1.png'"),
        (entry(image="../secret.png"), "is outside"),
        (entry(image=None), '"image" must be the name'),
        (entry(conversations=[]), '"conversations" must be a list'),
        (entry(conversations=entry()["conversations"][:1]), 'must end with a turn from "gpt"'),
        (entry(conversations=entry()["conversations"][::-1]), "turn 0 must be from \"human\", not from 'gpt'"),
        (
            entry(conversations=[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]),
            "expected one <image> tag .* got 0",
        ),
        (entry(conversations=[{"from": "human", "value": "<image>"}, {"from": "gpt", "value": " "}]), "no text"),
        ("text", "Entry 1"),
    ],
)
def test_a_bad_llava_entry_is_named(tmp_path: Path, bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_llava_json(write(tmp_path, entry(), bad), tmp_path)


def test_a_file_without_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_llava_json(tmp_path / "x.json", tmp_path)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match="at least one entry"):
        read_llava_json(tmp_path / "x.json", tmp_path)


# --- corrections --------------------------------------------------------------------------------------------------


def test_corrections_come_out_as_they_went_in() -> None:
    _, processor = tiny_llava.build()
    tokenizer = processor.tokenizer
    buffer = CorrectionBuffer(10, seed=0)
    picture = np.full((30, 40, 3), 9, np.uint8)
    text = '{"thoughts": "My total is 16 and the dealer shows 10, so I hit.", "action": "hit"}'
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    buffer.add("the prompt", picture, ids, num_labels=5)
    buffer.add("cut", picture, ids[:5], num_labels=5)  # nobody knew the action
    (row,) = corrections_dataset(buffer, processor)
    assert response(row) == text
    assert row["messages"][0]["content"][1]["text"] == "the prompt"
    assert np.array_equal(np.asarray(row["images"][0]), picture)


def test_special_tokens_that_are_spelt_out_stay_text() -> None:
    """`SFTTrainer` would take them for the tokens, and an image too many for an error."""
    _, processor = tiny_llava.build()
    tokenizer = copy.deepcopy(processor.tokenizer)
    buffer = CorrectionBuffer(10, seed=0)
    text = '{"thoughts": "an <image> and </s>", "action": "hit"}'
    ids = [*tokenizer.encode(text, split_special_tokens=True), tokenizer.eos_token_id]
    buffer.add("What does <image> show?", np.zeros((30, 40, 3), np.uint8), ids, num_labels=5)
    data = corrections_dataset(buffer, processor)
    spelt = Dataset.from_list(
        [sft_row(np.zeros((30, 40, 3), np.uint8), "What does <image> show?", text)], features=data.features
    )
    for rows in (prompt_and_completion(data), prompt_and_completion(spelt, processor)):
        (row,) = rows
        assert row["prompt"][0]["content"][0]["type"] == "image"
        assert row["prompt"][0]["content"][1]["text"] == "What does < image> show?"
        said = row["completion"][0]["content"][0]["text"]
        assert said == text.replace("<image>", "< image>").replace("</s>", "< /s>")
        assert not set(tokenizer.encode(said)) & set(tokenizer.all_special_ids)


def test_no_corrections_yet() -> None:
    _, processor = tiny_llava.build()
    with pytest.raises(ValueError, match="no corrections yet"):
        corrections_dataset(CorrectionBuffer(1, seed=0), processor)


def test_a_runs_corrections_are_whole_and_right_responses(tmp_path: Path) -> None:
    args = quiet_config(tmp_path, rollout_steps=2, total_env_steps=8, clone="thoughts", max_completion_length=64)
    task = make_task("blackjack")
    trainer = GTRTrainer("tiny", args, task=task, corrector=ExpertCorrector())
    trainer.train()
    data = trainer.corrections_dataset()
    assert len(data) == len(trainer.guide.buffer) > 0
    for row in data:
        parsed = task.format.parse(response(row))
        assert parsed.valid
        assert parsed.action in ("stand", "hit")
        assert row["messages"][0]["content"][1]["text"].startswith("You are playing blackjack.")


# --- through the trainer ------------------------------------------------------------------------------------------


def test_two_steps_of_sft_learn_the_response_alone(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    model, processor = tiny_llava.build(hidden_size=32, layers=1, vision_hidden_size=32, vision_layers=1)
    data = prompt_and_completion(make_sft_dataset(make_task("ezpoints"), 8))
    args = SFTConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, use_cpu=True, bf16=False, max_length=None,
        gradient_checkpointing=False, learning_rate=1e-2, warmup_steps=0, report_to=[], logging_steps=1,
        disable_tqdm=True, save_strategy="no", lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=processor)
    batch = trainer.data_collator([data[0], data[1]])
    for ids, labels, row in zip(batch["input_ids"], batch["labels"], data, strict=False):
        learned = processor.tokenizer.decode(ids[labels != -100])
        assert learned == row["completion"][0]["content"][0]["text"] + "</s>"
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert not (model.lm_head.weight == before).all()
