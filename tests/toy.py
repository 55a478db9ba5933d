"""A toy world for the trainer's tests: name the colour that is shown. The prompt never changes; only the image tells.

With it come a LLaVA of 60,000 parameters whose responses are valid but random, and a task for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from vlms import character_tokenizer, chat_template, component

from trl_gtr.config import GTRConfig
from trl_gtr.responses.format import Field, ThoughtFormat
from trl_gtr.tasks.base import Task
from trl_gtr.types import Response, Transition

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "yellow": (220, 220, 30)}
PROMPT = "Which colour?"
SIZE = 28


def quiet_config(output_dir: Any, **settings: Any) -> GTRConfig:
    """Small, on the CPU, nothing printed, nothing saved, any folder taken; `settings` go before all that."""
    return GTRConfig(
        **{
            "output_dir": str(output_dir),
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "overwrite": True,
            "gradient_checkpointing": False,
            "num_envs": 4,
            "rollout_steps": 4,
            "total_env_steps": 32,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 8,
            "num_ppo_epochs": 1,
            "temperature": 1.0,
            "max_completion_length": 12,
            "value_head_sizes": [16],
            **settings,
        }
    )


class ColourEnv(gym.Env):
    """Shows a colour for `length` steps; +1 for naming it, −1 otherwise."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, length: int = 2, blank: bool = False, terminates: bool = True) -> None:
        self.length, self.blank, self.terminates = length, blank, terminates
        self.observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(len(COLOURS))

    def _show(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.colour = str(self.np_random.choice(list(COLOURS)))
        shown = (128, 128, 128) if self.blank else COLOURS[self.colour]
        noise = self.np_random.integers(-20, 20, (SIZE, SIZE, 3))
        return (np.array(shown) + noise).clip(0, 255).astype(np.uint8), {"colour": self.colour}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._show()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = 1.0 if list(COLOURS)[int(action)] == self.colour else -1.0
        self.steps += 1
        ended = self.steps >= self.length
        observation, info = self._show()
        return observation, reward, ended and self.terminates, ended and not self.terminates, info


class BareColourTask(Task):
    """`{"thoughts": "it is red", "action": "red"}`, with nothing but what a task needs."""

    name = "colours"
    format = ThoughtFormat([Field("thoughts", "text", "what you see")])

    def __init__(self, **env_kwargs: Any) -> None:
        self.env_kwargs = env_kwargs

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        return ColourEnv(**self.env_kwargs)

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        return PROMPT

    def legal_actions(self, info: Mapping[str, Any]) -> Sequence[str]:
        return list(COLOURS)

    def to_env_action(self, response: Response, info: Mapping[str, Any]) -> int | None:
        return list(COLOURS).index(response.action) if response.action in COLOURS else None

    def success(self, transitions: Sequence[Transition]) -> bool:
        return all(step.reward > 0 for step in transitions)


class ColourTask(BareColourTask):
    """With a judge and an expert."""

    reading_parts = ("colour",)

    def judge(self, response: Response, info: Mapping[str, Any]) -> dict[str, bool]:
        return {"colour": response.fields.get("thoughts") == f"it is {info['colour']}"}

    def expert(self, info: Mapping[str, Any], hint: Response | None = None) -> Response:
        return self.format.parse(self.format.render({"thoughts": f"it is {info['colour']}"}, info["colour"]))


class GuessEnv(ColourEnv):
    """Ends when the colour is named, or after `length` steps. The picture doesn't change."""

    def _show(self) -> tuple[np.ndarray, dict[str, Any]]:
        if self.steps == 0:
            self.shown = super()._show()
        return self.shown

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        right = list(COLOURS)[int(action)] == self.colour
        self.steps += 1
        return self.shown[0], float(right), right, self.steps >= self.length and not right, self.shown[1]


class GuessTask(ColourTask):
    """Episodes of different lengths, of which only the last step may be rewarded."""

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        return GuessEnv(**self.env_kwargs)

    def success(self, transitions: Sequence[Transition]) -> bool:
        return transitions[-1].terminated


class RecallEnv(ColourEnv):
    """Shows a colour only at the start and is grey from then on; +1 for naming, in any later step, what was shown one
    step before the grey. Who doesn't remember can only guess."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = 0

    def _show(self) -> tuple[np.ndarray, dict[str, Any]]:
        if self.steps == 0:
            return super()._show()
        return np.full((SIZE, SIZE, 3), 128, np.uint8), {"colour": self.colour}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        first = self.steps == 0
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, 0.0 if first else reward, terminated, truncated, info


class RecallTask(ColourTask):
    """Name the colour that was shown one step ago."""

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        return RecallEnv(**self.env_kwargs)

    def success(self, transitions: Sequence[Transition]) -> bool:
        return transitions[-1].reward > 0


def remembering(task: Task, turns: int, images: int) -> Any:
    """The task, with this much of the past in its prompts."""
    task.history_turns, task.history_images = turns, images
    return task


def nearest_colour(image: np.ndarray) -> str:
    """The colour that a picture shows."""
    mean = image.reshape(-1, 3).mean(0)
    return min(COLOURS, key=lambda colour: np.abs(np.array(COLOURS[colour]) - mean).sum())


def build_toy_model(seed: int = 0) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """A LLaVA that hardly has layers, over characters and the fragments of a response."""
    torch.manual_seed(seed)
    tokenizer = character_tokenizer(['{"thoughts": "it is ', '", "action": "', '"}', PROMPT, *COLOURS])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<|user|>", "<|assistant|>", "<|end|>"]})
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=14,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_token,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    processor = LlavaProcessor(
        image_processor=component(
            "CLIPImageProcessor",
            size={"height": SIZE, "width": SIZE},
            do_center_crop=False,
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=chat_template("<image>"),
    )
    return LlavaForConditionalGeneration(config), processor


def teach_format(model: LlavaForConditionalGeneration, processor: LlavaProcessor, steps: int = 60) -> None:
    """Supervised on random answers: the format is learned, and that the colour matters is not."""
    from trl_gtr.policy.network import PolicyWithValue, ValueHead
    from trl_gtr.policy.scoring import VLMPolicy

    policy = VLMPolicy(model, processor, temperature=1.0)
    module = PolicyWithValue(model, ValueHead(model.config.get_text_config().hidden_size, [8]))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rng, task = np.random.default_rng(0), ColourTask()
    for _ in range(steps):
        images = [rng.integers(0, 255, (1, 1, 3)).repeat(SIZE, 0).repeat(SIZE, 1).astype(np.uint8) for _ in range(32)]
        said = rng.choice(list(COLOURS), (32, 2))
        texts = [task.format.render({"thoughts": f"it is {thought}"}, str(action)) for thought, action in said]
        ids = [policy.encode_response(text) for text in texts]
        logprobs, mask = policy.score_tokens(module, [PROMPT] * 32, images, ids)
        loss = -logprobs[mask].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong(response: Response) -> Response:
    """The same thought with another colour's action."""
    other = next(colour for colour in COLOURS if colour != response.action)
    return replace(response, action=other)
