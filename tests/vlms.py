"""Tiny random vision-language models of the supported families, saved and loaded like real checkpoints.

The weights are drawn wide, so that the image, every prompt token and every position matter to the logits: a mistake in
padding, positions or image features shows.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerFast, processing_utils
from transformers.utils import PushToHubMixin, is_num2words_available, is_torchvision_available

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]

# Work without torchvision
PLAIN_FAMILIES = ["llava", "llava_next", "idefics3"]
# Their processors hold a video processor, which needs torchvision
VIDEO_FAMILIES = ["qwen2_5_vl", "qwen3_vl", "llava_onevision", "smolvlm"]
FAMILIES = [*PLAIN_FAMILIES, *VIDEO_FAMILIES]

CORPUS = [
    '{"cards": ["2", "K"], "thoughts": "the sum is 12, so I stand", "action": "stand"}',
    "You are playing a card game. What is your action? Answer in JSON.",
]


def chat_template(image: str) -> str:
    return (
        "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}"
        "{% if part.type == 'image' %}" + image + "{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def byte_level_tokenizer(special: list[str] = [], vocab_size: int = 400) -> PreTrainedTokenizerFast:  # noqa: B006
    """Byte-level BPE, as GPT-2's and Qwen's; ids 0, 1, 2 are padding, BOS and EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", *special],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def character_tokenizer(fragments: list[str] = []) -> PreTrainedTokenizerFast:  # noqa: B006
    """One token per printable ASCII character, and each of `fragments` as one added token."""
    characters = [c for c in string.printable if c.isprintable() or c == "\n"]
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<s>", "</s>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens(fragments)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def round_vocabulary(tokenizer: Any) -> int:
    """As real checkpoints have it: a few more rows than tokens."""
    return (len(tokenizer) + 31) // 32 * 32


def component(name: str, **options: Any) -> Any:
    """An image processor, the one on Pillow where torchvision is missing."""
    try:
        return getattr(transformers, name)(**options)
    except ImportError:
        return getattr(transformers, name + "Pil")(**options)


class NoVideo(PushToHubMixin):
    """Stands in for a video processor where torchvision is missing. We show still images only."""

    model_input_names = ()
    num_frames = fps = 1  # SmolVLM asks, also where there is no video
    _auto_class = None

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> NoVideo:
        return cls()

    def to_dict(self) -> dict[str, Any]:
        return {}


def video_processor(family: str) -> Any:
    return getattr(transformers, f"{family}VideoProcessor")() if is_torchvision_available() else NoVideo()


def llava() -> tuple[Any, Any]:
    tokenizer = byte_level_tokenizer(["<image>"])
    return llava_over(tokenizer, vocab_size=round_vocabulary(tokenizer))


def llava_over(tokenizer: Any, **text: int) -> tuple[Any, Any]:
    """A LLaVA with this tokenizer; `text` replaces sizes of its language model."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=56, patch_size=14),
        text_config=transformers.LlamaConfig(**{**TEXT, **text}),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    processor = transformers.LlavaProcessor(
        component("CLIPImageProcessor", size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template("<image>\n"),
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def llava_next() -> tuple[Any, Any]:
    tokenizer = byte_level_tokenizer(["<image>"])
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=56, patch_size=14),
        text_config=transformers.MistralConfig(
            **TEXT, vocab_size=round_vocabulary(tokenizer), sliding_window=None, tie_word_embeddings=False
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
        tie_word_embeddings=False,
    )
    processor = transformers.LlavaNextProcessor(
        component(
            "LlavaNextImageProcessor",
            size={"shortest_edge": 56},
            crop_size={"height": 56, "width": 56},
            image_grid_pinpoints=PINPOINTS,
        ),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template("<image>\n"),
    )
    return transformers.LlavaNextForConditionalGeneration(config), processor


def idefics3(family: str = "Idefics3") -> tuple[Any, Any]:
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer = byte_level_tokenizer(
        ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    )
    config = getattr(transformers, f"{family}Config")(
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=round_vocabulary(tokenizer)),
        vision_config={**VISION, "image_size": 56, "patch_size": 14},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    image_processor = component(
        f"{family}ImageProcessor", size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
    )
    parts = [image_processor, tokenizer]
    if family == "SmolVLM":
        parts.append(video_processor("SmolVLM"))
    processor = getattr(transformers, f"{family}Processor")(
        *parts, image_seq_len=4, chat_template=chat_template("<image>")
    )
    return getattr(transformers, f"{family}ForConditionalGeneration")(config), processor


def smolvlm() -> tuple[Any, Any]:
    return idefics3("SmolVLM")


def llava_onevision() -> tuple[Any, Any]:
    tokenizer = byte_level_tokenizer(["<image>", "<video>"])
    pinpoints = [[56, 56], [56, 112], [112, 56], [112, 112]]
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION, image_size=56, patch_size=14, vision_use_head=False),
        text_config=transformers.Qwen2Config(**TEXT, vocab_size=round_vocabulary(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    processor = transformers.LlavaOnevisionProcessor(
        component("LlavaOnevisionImageProcessor", size={"height": 56, "width": 56}, image_grid_pinpoints=pinpoints),
        tokenizer,
        video_processor("LlavaOnevision"),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=chat_template("<image>\n"),
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config), processor


def qwen_vl(family: str, video_family: str, patch_size: int, text: dict, vision: dict) -> tuple[Any, Any]:
    tokens = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = byte_level_tokenizer(tokens)
    start, end, image, video = tokenizer.convert_tokens_to_ids(tokens)
    sizes = {"patch_size": patch_size, "temporal_patch_size": 2, "spatial_merge_size": 2}
    config = getattr(transformers, f"{family}Config")(
        text_config={**TEXT, "vocab_size": round_vocabulary(tokenizer), **text},
        vision_config={"depth": 2, "out_hidden_size": 32, "num_heads": 4, **VISION, **sizes, **vision},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    processor = getattr(transformers, f"{family}Processor")(
        component(
            "Qwen2VLImageProcessor",
            patch_size=patch_size,
            temporal_patch_size=2,
            merge_size=2,
            size={"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28},
        ),
        tokenizer,
        video_processor(video_family),
        chat_template=chat_template("<|vision_start|><|image_pad|><|vision_end|>"),
    )
    return getattr(transformers, f"{family}ForConditionalGeneration")(config), processor


def qwen2_5_vl() -> tuple[Any, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    return qwen_vl(
        "Qwen2_5_VL", "Qwen2VL", 14, {"rope_parameters": rope}, {"window_size": 56, "fullatt_block_indexes": [1]}
    )


def qwen3_vl() -> tuple[Any, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0, "mrope_interleaved": True}
    return qwen_vl(
        "Qwen3VL",
        "Qwen3VL",
        16,
        {"rope_parameters": rope, "head_dim": 8},
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    )


BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": llava,
    "llava_next": llava_next,
    "idefics3": idefics3,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "llava_onevision": llava_onevision,
    "smolvlm": smolvlm,
}


@contextmanager
def video_stub() -> Iterator[None]:
    """Let processors that also know videos be built, saved and loaded where torchvision (or SmolVLM's num2words) is
    missing. Nothing that an image passes through is replaced."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_torchvision_available():
            patch.setattr(processing_utils.transformers_module, "VideoProcessorMixin", NoVideo, raising=False)
            patch.setattr("transformers.models.auto.video_processing_auto.AutoVideoProcessor", NoVideo)
        if not is_num2words_available():
            patch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
        yield


def save_family(name: str, directory: Path, seed: int = 0) -> None:
    """Write a checkpoint of random weights with its processor."""
    torch.manual_seed(seed)
    with video_stub():
        model, processor = BUILDERS[name]()
        processor.save_pretrained(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.15)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    model.save_pretrained(directory)


def load_family(directory: Path) -> tuple[Any, Any]:
    with video_stub():
        return AutoModelForImageTextToText.from_pretrained(directory), AutoProcessor.from_pretrained(directory)


def some_images(number: int, seed: int = 0) -> list[np.ndarray]:
    """Noise of different sizes and shapes, uint8 (height, width, 3)."""
    rng = np.random.default_rng(seed)
    sizes = [(60, 80), (80, 60), (120, 50), (50, 120), (33, 77), (64, 64), (100, 100), (56, 170)]
    return [rng.integers(0, 256, (*sizes[i % len(sizes)], 3), dtype=np.uint8) for i in range(number)]


def some_prompts(number: int) -> list[str]:
    """Prompts of different lengths."""
    return [f"Card {i}. " + "What is your action? " * (i * 3 % 5) for i in range(number)]
