"""Data for supervised fine-tuning: expert play, LLaVA-format files and a run's corrections, all in one format.

Every row has `images` and `messages`: the user's turn with image and prompt, and the assistant's turn with the right
response, after the earlier turns of a task that shows them. `prompt_and_completion` converts it to the columns with
which TRL's `SFTTrainer` trains on the last response only.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage

from ..policy.special_text import SpecialText
from ..tasks.base import Task
from ..tasks.memory import Memory
from ..types import all_pictures, chat_messages
from .buffer import CorrectionBuffer

Row = dict[str, Any]

_PART = {"type": Value("string"), "text": Value("string")}
_MESSAGES = List({"role": Value("string"), "content": List(_PART)})
FEATURES = Features({"images": List(Image()), "messages": _MESSAGES})
_IMAGE_TAG = "<image>"


def make_sft_dataset(
    task: Task, n: int, seed: int = 0, *, exploration: float = 0.15, image_size: int | None = None
) -> Dataset:
    """`n` states of a task with the expert's responses.

    The expert plays, but some of its actions are replaced by random ones, so that the data also shows how to recover
    from a wrong step. States without a right answer (an unsolvable deal, a dead end) are left out. Earlier turns, if
    the task shows them, hold the responses that were played.

    Args:
        task: The task to play; it must have an `expert`.
        n: Number of rows.
        seed: The same seed gives the same rows.
        exploration: Share of steps that take a random legal action.
        image_size: Store images at this width and height instead of the game's own. A model that scales them down to
            this size anyway sees the same, and training is faster.
    """
    if n < 1:
        raise ValueError(f"An SFT dataset needs at least one row, got n={n}.")
    if not 0 <= exploration < 1:
        raise ValueError(f"exploration must be at least 0 and less than 1, got {exploration}.")
    states = _expert_states(task, np.random.default_rng(seed), exploration)
    return _dataset(sft_row(*row, image_size=image_size) for row in islice(states, n))


def _expert_states(task: Task, rng: np.random.Generator, exploration: float) -> Iterator[tuple[np.ndarray, str, str]]:
    """Endless stream of image, prompt and the expert's response."""
    env, memory = task.make_env(evaluation=True), Memory(task)
    deals_without_answer = 0
    while True:
        observation, info = env.reset(seed=int(rng.integers(2**31)))
        ended, steps = False, 0
        memory.clear()
        while not ended and (response := task.expert(info)) is not None:
            yield observation, memory.prompt(observation, info), response.text
            if rng.random() < exploration:
                legal = task.legal_actions(info)
                random_action = legal[int(rng.integers(len(legal)))]
                response = task.format.parse(task.format.render(response.fields, random_action))
            action = task.to_env_action(response, info)
            memory.add(np.array(observation), info, response.text)
            observation, _, terminated, truncated, info = env.step(action)
            ended, steps = terminated or truncated, steps + 1
        deals_without_answer = 0 if steps else deals_without_answer + 1
        if deals_without_answer > 1000:
            raise ValueError(
                f"The expert of task {task.name!r} had no answer in 1000 deals, so no data can be generated."
            )


def sft_row(image: Any, prompt: str, response: str, image_size: int | None = None) -> Row:
    """One row, with the turns before the prompt, if it has any.

    Args:
        image: uint8 (height, width, 3), or anything that the `Image` feature of `datasets` accepts.
        image_size: Scale arrays to this width and height.
    """
    images = all_pictures(prompt, image)
    messages = chat_messages(prompt, [{"type": "image", "text": None}] * len(images))
    messages.append({"role": "assistant", "content": [{"type": "text", "text": response}]})
    stored = [_png(_scaled(each, image_size)) if isinstance(each, np.ndarray) else each for each in images]
    return {"images": stored, "messages": messages}


def prompt_and_completion(dataset: Dataset, processor: Any = None) -> Dataset:
    """Split off the last message as `completion`, so that `SFTTrainer` trains on the completion only.

    (Its `assistant_only_loss` doesn't support vision data yet.) Given the `processor` of the model to train, text that
    spells one of its special tokens is broken up ("< image>"), or it would be encoded as that token.
    """
    messages = dataset["messages"]
    if processor is not None:
        plain = SpecialText(processor).broken_up
        messages = [[_with_text(message, plain) for message in conversation] for conversation in messages]
    columns = {
        "prompt": [conversation[:-1] for conversation in messages],
        "completion": [conversation[-1:] for conversation in messages],
    }
    dataset = dataset.remove_columns("messages")
    for name, values in columns.items():
        dataset = dataset.add_column(name, values, feature=_MESSAGES)
    return dataset


def _with_text(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    parts = [{**part, "text": None if part["text"] is None else change(part["text"])} for part in message["content"]]
    return {**message, "content": parts}


def corrections_dataset(buffer: CorrectionBuffer, processor: Any) -> Dataset:
    """A run's corrected responses so far, ready for `SFTTrainer`.

    Thoughts without a known action are left out, because they are not complete responses. Text that spells a special
    token is broken up ("< image>"), or `SFTTrainer` would encode it as that token.
    """
    tokenizer, plain = processor.tokenizer, SpecialText(processor).broken_up
    rows = [
        sft_row(sample.image, sample.prompt, tokenizer.decode(sample.target_ids, skip_special_tokens=True))
        for sample in buffer.samples()
        if sample.target_ids[-1] == tokenizer.eos_token_id
    ]
    for row in rows:
        row["messages"] = [_with_text(message, plain) for message in row["messages"]]
    if not rows:
        raise ValueError("There are no corrections yet: train first, with a corrector.")
    return _dataset(rows)


def read_llava_json(json_path: str | os.PathLike[str], image_folder: str | os.PathLike[str]) -> Dataset:
    """Read a dataset in LLaVA's SFT format, as in RL4VLM's data release.

    The file is a list of `{"id", "image", "conversations": [{"from": "human", "value": "<image>\\n..."}, {"from":
    "gpt", "value": ...}]}`; `image` is a path inside `image_folder`. Every entry is checked: a `ValueError` names the
    first invalid one and says what is wrong.
    """
    try:
        entries = json.loads(Path(json_path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{json_path} is not valid JSON: {error}.") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{json_path} must contain a list of conversations with at least one entry.")
    return _dataset([_llava_row(entry, index, Path(image_folder)) for index, entry in enumerate(entries)])


def _llava_row(entry: Any, index: int, folder: Path) -> Row:
    name = f"Entry {index}" + (f" (id {entry['id']!r})" if isinstance(entry, Mapping) and "id" in entry else "")
    if not isinstance(entry, Mapping) or not isinstance(entry.get("image"), str):
        raise ValueError(f'{name}: "image" must be the name of an image file.')
    image = (folder / entry["image"]).resolve()
    if not image.is_relative_to(folder.resolve()):
        raise ValueError(f"{name}: the image {entry['image']!r} is outside {folder}.")
    if not image.is_file():
        raise ValueError(f"{name}: there is no image {entry['image']!r} in {folder}.")
    turns = entry.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f'{name}: "conversations" must be a list of turns.')
    messages = [_llava_message(turn, place, name) for place, turn in enumerate(turns)]
    if len(messages) % 2:
        raise ValueError(f'{name}: the conversation must end with a turn from "gpt".')
    pictures = sum(part["type"] == "image" for message in messages for part in message["content"])
    if pictures != 1:
        raise ValueError(f"{name}: expected one {_IMAGE_TAG} tag in the human's turns, got {pictures}.")
    return {"images": [str(image)], "messages": messages}


def _llava_message(turn: Any, place: int, name: str) -> dict[str, Any]:
    expected = ("human", "gpt")[place % 2]
    if not isinstance(turn, Mapping) or turn.get("from") != expected:
        role = turn.get("from") if isinstance(turn, Mapping) else turn
        raise ValueError(f'{name}: turn {place} must be from "{expected}", not from {role!r}.')
    text = turn.get("value")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{name}: turn {place} has no text in "value".')
    if expected == "gpt":
        return {"role": "assistant", "content": [{"type": "text", "text": text}]}
    content: list[dict[str, str | None]] = [{"type": "image", "text": None}] * text.count(_IMAGE_TAG)
    content.append({"type": "text", "text": text.replace(_IMAGE_TAG, "").strip()})
    return {"role": "user", "content": content}


def _dataset(rows: Iterable[Row]) -> Dataset:
    return Dataset.from_list(list(rows), features=FEATURES)


def _scaled(image: np.ndarray, size: int | None) -> np.ndarray:
    """Scale the image like the image processors of CLIP and LLaVA."""
    if size is None:
        return image
    return np.asarray(PILImage.fromarray(image).resize((size, size), PILImage.Resampling.BICUBIC))


def _png(image: np.ndarray) -> dict[str, Any]:
    """Lossless; game images are flat enough for the fastest compression level."""
    file = io.BytesIO()
    PILImage.fromarray(image).save(file, "PNG", compress_level=1)
    return {"bytes": file.getvalue(), "path": None}
