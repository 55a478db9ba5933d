"""A LLaVA small enough for a laptop: transformers' own classes with a small config."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

INITIALIZER_RANGE = 0.08
"""The usual 0.02 suits wide layers; in these narrow ones, activations would be too small to learn quickly."""
SPECIAL = {
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "image_token": "<image>",
    "user_token": "<user>",
    "assistant_token": "<assistant>",
}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<' + message['role'] + '>' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- '<image>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{{- '</s>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<assistant>' -}}
{%- endif -%}"""


def build_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the tasks' fixed parts as added tokens; decoding is lossless for every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL.values(), *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL.values()])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    named = {name: token for name, token in SPECIAL.items() if name in ("pad_token", "eos_token")}
    extra = {name: token for name, token in SPECIAL.items() if name not in named}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **named,
        extra_special_tokens=extra,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def build_processor(pieces: Sequence[str], image_size: int, patch_size: int) -> LlavaProcessor:
    size = {"height": image_size, "width": image_size}
    image_processor = CLIPImageProcessorPil(
        size=size, crop_size=size, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=build_tokenizer(pieces),
        patch_size=patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token, which "default" drops
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    processor: LlavaProcessor,
    *,
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 3,
    vision_hidden_size: int = 96,
    vision_layers: int = 2,
) -> LlavaForConditionalGeneration:
    tokenizer, patch_size = processor.tokenizer, processor.patch_size
    image_size = processor.image_processor.size["height"]
    vision = CLIPVisionConfig(
        hidden_size=vision_hidden_size,
        intermediate_size=2 * vision_hidden_size,
        num_hidden_layers=vision_layers,
        num_attention_heads=4,
        image_size=image_size,
        patch_size=patch_size,
        projection_dim=vision_hidden_size,
    )
    text = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(image_size // patch_size) ** 2,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
