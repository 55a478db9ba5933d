"""A folder with all of LLaVA-1.6-Mistral-7B but its weights, and plans by the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from vlms import byte_level_tokenizer, chat_template, component

from trl_gtr.cli import main

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def llava_7b_config(image_token_id: int = 32000) -> Any:
    """The checkpoint's own sizes."""
    return transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            image_size=336,
            patch_size=14,
            projection_dim=768,
        ),
        text_config=transformers.MistralConfig(
            vocab_size=32064,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            sliding_window=None,
        ),
        image_token_index=image_token_id,
        image_grid_pinpoints=PINPOINTS,
        tie_word_embeddings=False,
        architectures=["LlavaNextForConditionalGeneration"],
    )


def save_llava_7b(folder: Path, tokenizer: Any = None, template: str | None = None) -> None:
    """Config and processor; the vocabulary is a small one if none is given."""
    tokenizer = tokenizer or byte_level_tokenizer(["<image>"])
    llava_7b_config(tokenizer.convert_tokens_to_ids("<image>")).save_pretrained(folder)
    transformers.LlavaNextProcessor(
        component(
            "LlavaNextImageProcessor",
            size={"shortest_edge": 336},
            crop_size={"height": 336, "width": 336},
            image_grid_pinpoints=PINPOINTS,
        ),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template or chat_template("<image>\n"),
    ).save_pretrained(folder)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `trl-gtr plan … --json` prints."""
    capsys.readouterr()
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)
