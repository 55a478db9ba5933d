"""Converts checkpoints of the original LLaVA code to transformers' LLaVA and LLaVA-NeXT.

The original saves a `LlavaMistralForCausalLM` or `LlavaLlamaForCausalLM` with the same weights but different weight
names, a different config, and an image token outside the vocabulary. `examples/convert_llava.py` is the command-line
script.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    LlavaProcessor,
    MistralConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

ARCHITECTURES = {"LlavaMistralForCausalLM": MistralConfig, "LlavaLlamaForCausalLM": LlamaConfig}
# Original checkpoints name their vision tower but don't include its config.
_CLIP_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
VISION_TOWERS = {
    "openai/clip-vit-large-patch14-336": {**_CLIP_LARGE, "image_size": 336, "patch_size": 14, "projection_dim": 768},
    "openai/clip-vit-large-patch14": {**_CLIP_LARGE, "image_size": 224, "patch_size": 14, "projection_dim": 768},
}
# Order matters: the first matching prefix is used.
PREFIXES = {
    "model.vision_tower.vision_tower.vision_model.": "model.vision_tower.",
    "model.vision_tower.vision_tower.": "model.vision_tower.",
    "model.mm_projector.0.": "model.multi_modal_projector.linear_1.",
    "model.mm_projector.2.": "model.multi_modal_projector.linear_2.",
    "model.image_newline": "model.image_newline",
    "model.": "model.language_model.",
    "lm_head.": "lm_head.",
}
IMAGE_TOKEN = "<image>"
_PARTS = (
    "{%- for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor -%}"
    "{%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor -%}"
)
_VICUNA_SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions."
)
# LLaVA's conversation formats by name, as chat templates for one or more turns.
CHAT_TEMPLATES = {
    "mistral": "{{ bos_token }}{%- for message in messages %}{% if message['role'] == 'assistant' %}{{ ' ' }}"
    + _PARTS
    + "{{ eos_token }}{% else %}{{ '[INST] ' }}"
    + _PARTS
    + "{{ ' [/INST]' }}{% endif %}{% endfor -%}",
    "vicuna": f'{{{{ bos_token }}}}{{{{ "{_VICUNA_SYSTEM} " }}}}'
    "{%- for message in messages %}{% if message['role'] == 'assistant' %}{{ ' ASSISTANT: ' }}"
    + _PARTS
    + "{{ eos_token }}{% else %}{{ 'USER: ' }}"
    + _PARTS
    + "{% endif %}{% endfor -%}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif -%}",
}


def is_original(config: Mapping[str, Any]) -> bool:
    """Whether this config was written by the original LLaVA code."""
    return bool(set(config.get("architectures") or ()) & set(ARCHITECTURES)) or "mm_vision_tower" in config


def refuse_original(folder: str | os.PathLike[str]) -> None:
    """Raise a `ValueError` with a fix if `folder` holds an original LLaVA checkpoint."""
    file = Path(folder) / "config.json"
    if file.is_file() and is_original(json.loads(file.read_text(encoding="utf-8"))):
        raise ValueError(
            f"{folder} is a checkpoint of the original LLaVA code, which transformers can't load. Convert it first: "
            f"python examples/convert_llava.py --source {folder} --output {folder}-hf"
        )


def convert_name(name: str) -> str:
    """Convert a weight's name to transformers' name."""
    for old, new in PREFIXES.items():
        if name.startswith(old):
            return new + name[len(old) :]
    raise ValueError(f"{name} is not a weight of a LLaVA model; is this a full checkpoint, not an adapter?")


def convert_state_dict(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename all weights to transformers' names. Buffers that are computed, not learned, are left out."""
    computed = ("rotary_emb.inv_freq", "position_ids")
    return {convert_name(name): weight for name, weight in weights.items() if not name.endswith(computed)}


def convert_config(config: Mapping[str, Any], vision: CLIPVisionConfig, *, tiled: bool) -> LlavaConfig:
    """Build the config for `LlavaForConditionalGeneration`, or `LlavaNextForConditionalGeneration` if `tiled`."""
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"Can't convert a {architecture}; supported: {', '.join(ARCHITECTURES)}.")
    projector = config.get("mm_projector_type", "linear")
    if projector != "mlp2x_gelu":
        raise ValueError(
            f"Can't convert a projector of type {projector!r}: transformers' LLaVA supports only 'mlp2x_gelu'."
        )
    own = ("mm_", "image_", "tune_mm", "freeze_mm", "unfreeze_mm", "use_mm", "tokenizer_", "vision_tower")
    left_out = {"architectures", "model_type", "transformers_version", "_name_or_path"}
    text = {key: value for key, value in config.items() if not key.startswith(own) and key not in left_out}
    more = {"image_grid_pinpoints": config["image_grid_pinpoints"]} if tiled else {}
    return (LlavaNextConfig if tiled else LlavaConfig)(
        vision_config=vision,
        text_config=ARCHITECTURES[architecture](**text),
        vision_feature_layer=config.get("mm_vision_select_layer", -2),
        vision_feature_select_strategy="full" if config.get("mm_vision_select_feature") == "cls_patch" else "default",
        image_seq_length=(vision.image_size // vision.patch_size) ** 2,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        **more,
    )


def convert_checkpoint(
    source: str | os.PathLike[str],
    *,
    vision_tower: str | None = None,
    chat_format: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, Any]:
    """Build a transformers model and processor from an original checkpoint.

    Args:
        source: The folder: `config.json`, tokenizer, and weights as `.safetensors` or `.bin`.
        vision_tower: Name or folder of the vision tower, if its weights are not in the checkpoint (LLaVA-1.5) or the
            config names an unknown one.
        chat_format: `"mistral"` or `"vicuna"`, the conversation format it was trained with; by default that of its
            language model's family.
        dtype: Dtype of the converted weights.
    """
    config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    if not is_original(config):
        raise ValueError(f"{source} is not a checkpoint of the original LLaVA code; load it directly.")
    weights = convert_state_dict({name: tensor.to(dtype) for name, tensor in _read_weights(Path(source))})
    tower = vision_tower or config["mm_vision_tower"]
    if not any(name.startswith("model.vision_tower.") for name in weights):
        loaded = CLIPVisionModel.from_pretrained(tower, dtype=dtype).state_dict()
        weights |= {"model.vision_tower." + name.removeprefix("vision_model."): w for name, w in loaded.items()}
    tiled = "model.image_newline" in weights
    new_config = convert_config(config, _vision_config(tower), tiled=tiled)
    processor = _processor(source, config, new_config, chat_format)
    _make_room_for_image_token(new_config, weights, processor.tokenizer)
    with torch.device("meta"):
        model = (LlavaNextForConditionalGeneration if tiled else LlavaForConditionalGeneration)(new_config)
    if new_config.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights["model.language_model.embed_tokens.weight"])
    model.load_state_dict(weights, strict=True, assign=True)
    # computed buffers are still empty on "meta"; reloading the saved model fills them
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    return model, processor


def _read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ValueError(f"There are no weights in {folder}: neither *.safetensors nor pytorch_model*.bin.")
    for file in files:
        load = load_file if file.suffix == ".safetensors" else _load_pickle
        yield from load(file).items()


def _load_pickle(file: Path) -> dict[str, torch.Tensor]:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _vision_config(tower: str) -> CLIPVisionConfig:
    if tower in VISION_TOWERS:
        return CLIPVisionConfig(**VISION_TOWERS[tower])
    config = AutoConfig.from_pretrained(tower)
    return getattr(config, "vision_config", config)


def _processor(source: Any, config: Mapping[str, Any], new_config: Any, chat_format: str | None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(source, config=new_config.text_config, padding_side="left")
    tokenizer.add_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)], special_tokens=True)
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    chat_format = chat_format or ("mistral" if new_config.text_config.model_type == "mistral" else "vicuna")
    if chat_format not in CHAT_TEMPLATES:
        raise ValueError(f"There is no chat format {chat_format!r}; choose one of {', '.join(CHAT_TEMPLATES)}.")
    side = new_config.vision_config.image_size
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    common = {
        "tokenizer": tokenizer,
        "patch_size": new_config.vision_config.patch_size,
        "vision_feature_select_strategy": new_config.vision_feature_select_strategy,
        "num_additional_image_tokens": 1,
        "chat_template": CHAT_TEMPLATES[chat_format],
    }
    if isinstance(new_config, LlavaNextConfig):
        images = LlavaNextImageProcessorPil(image_grid_pinpoints=new_config.image_grid_pinpoints, **sizes)
        return LlavaNextProcessor(image_processor=images, **common)
    if config.get("image_aspect_ratio") == "pad":
        return LlavaProcessor(image_processor=LlavaImageProcessorPil(do_pad=True, **sizes), **common)
    return LlavaProcessor(image_processor=CLIPImageProcessorPil(**sizes), **common)


def _make_room_for_image_token(config: Any, weights: dict[str, torch.Tensor], tokenizer: Any) -> None:
    """Add embedding rows for `<image>`, which the original lacks. They are the mean of the others and never used."""
    size = max(-(-len(tokenizer) // 64) * 64, config.text_config.vocab_size)
    for name in ("model.language_model.embed_tokens.weight", "lm_head.weight"):
        if name in weights and (missing := size - len(weights[name])) > 0:
            mean = weights[name].float().mean(0, keepdim=True).to(weights[name].dtype)
            weights[name] = torch.cat([weights[name], mean.expand(missing, -1)])
    config.text_config.vocab_size = size
    config.text_config.pad_token_id = tokenizer.pad_token_id
    config.image_token_index = config.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
