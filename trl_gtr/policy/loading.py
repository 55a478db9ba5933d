"""Loading Hugging Face vision-language models, checking that they can act as an agent, and finding the token ids and
layers that matter here."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, GenerationMixin
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import get_last_checkpoint

from .. import tiny_llava
from ..types import chat_messages
from .llava_checkpoints import refuse_original

_NEEDED = (
    "GTR needs a vision-language model that `AutoModelForImageTextToText` can load (LLaVA, LLaVA-NeXT, Qwen-VL, "
    "Idefics3, SmolVLM, …)."
)
_ADAPTER = "adapter_config.json"
SAVED_BASE = "base_model-"
"""Folder name prefix for a base model saved with its run (see `adapters.py`)."""


def load_policy(
    model_name_or_path: str | os.PathLike[str],
    *,
    revision: str = "main",
    trust_remote_code: bool = False,
    **model_kwargs: Any,
) -> tuple[Any, Any]:
    """Load and check a model and its processor. `model_kwargs` (`dtype`, `quantization_config`, …) go to the model.

    Defaults to float32, like TRL: many checkpoints are stored in float16, in which training overflows. The names
    `"tiny"` (card games), `"tiny-alfworld"`, `"tiny-grids"` (FrozenLake) and `"tiny-minigrid"` refer to the models
    that ship with this package (`trl_gtr.tiny_llava`). For an adapter's folder, loads the base model with the adapter
    merged in.
    """
    if model_name_or_path in tiny_llava.VARIANTS:
        model_name_or_path = tiny_llava.path(str(model_name_or_path))
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    check_source(model_name_or_path, **source)
    if (Path(model_name_or_path) / _ADAPTER).is_file():
        return _merged(model_name_or_path, trust_remote_code=trust_remote_code, **model_kwargs)
    processor = load_processor(model_name_or_path, **source)
    model_kwargs.setdefault("dtype", torch.float32)
    model = AutoModelForImageTextToText.from_pretrained(model_name_or_path, **source, **model_kwargs)
    check_processor(model, processor)
    return model, processor


def load_processor(model_name_or_path: str | os.PathLike[str], **source: Any) -> Any:
    """Load a model's processor. `source` is its `revision` and `trust_remote_code`."""
    try:
        return AutoProcessor.from_pretrained(model_name_or_path, **source)
    except (ImportError, ValueError) as error:  # transformers raises either
        if "torchvision" not in str(error).lower():
            raise
        raise ImportError(
            f"The processor of {model_name_or_path} needs torchvision. Install the build that matches your torch: "
            "`pip install torchvision`, or for a CPU build of torch "
            "`pip install torchvision --index-url https://download.pytorch.org/whl/cpu`. "
            "LLaVA, LLaVA-NeXT and Idefics3 work without it."
        ) from error


def base_model_name(model_name_or_path: str | os.PathLike[str], revision: str = "main") -> tuple[str, str]:
    """Name and revision of the model; for an adapter's folder, those of its base model."""
    folder = Path(model_name_or_path)
    if not (folder / _ADAPTER).is_file():
        return os.fspath(model_name_or_path), revision
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    return _base_of(folder, config), config.revision or "main"


def architectures_of(model_name_or_path: str | os.PathLike[str]) -> list[str]:
    """The model classes that a checkpoint's config names, without its weights; for an adapter, its base model's."""
    known = model_name_or_path in tiny_llava.VARIANTS
    name, revision = base_model_name(tiny_llava.path(str(model_name_or_path)) if known else model_name_or_path)
    check_source(name, revision=revision)
    return AutoConfig.from_pretrained(name, revision=revision).architectures or []


def load_or_take(model: Any, processor: Any, model_kwargs: Any) -> tuple[Any, Any]:
    """Load a model given by name, or take it as it is; check it and its processor.

    Args:
        model: The model, or the name or folder to load it from.
        processor: Its processor; `None` loads the model's own.
        model_kwargs: Used if the model is loaded by name.
    """
    if isinstance(model, str | os.PathLike):
        model, loaded = load_policy(model, **(model_kwargs or {}))
        processor = processor or loaded
    elif processor is None:
        if not model.config._name_or_path:
            raise ValueError("This model was built here and has no name: pass its processor as `processing_class`.")
        processor = AutoProcessor.from_pretrained(model.config._name_or_path)
    check_processor(model, processor)
    return model, processor


def _merged(folder: str | os.PathLike[str], **options: Any) -> tuple[Any, Any]:
    """The adapter's base model with the adapter merged in, and the base model's processor."""
    from peft import PeftConfig, PeftModel

    merging = (
        "Merge it once, without quantization and on one process: "
        f"`model, processor = load_policy({os.fspath(folder)!r})`, then `model.save_pretrained(new_folder)` and "
        "`processor.save_pretrained(new_folder)`. Load that folder."
    )
    if is_deepspeed_zero3_enabled():
        raise ValueError(f"The adapter in {folder} can't be merged under ZeRO-3, which shards the weights. {merging}")
    quantized = f"The adapter in {folder} can't be merged into quantized weights, which would round it. {merging}"
    if options.get("quantization_config") is not None:
        raise ValueError(quantized)
    config = PeftConfig.from_pretrained(str(folder))
    model, processor = load_policy(_base_of(Path(folder), config), revision=config.revision or "main", **options)
    if is_quantized(model):
        raise ValueError(quantized)
    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload(), processor


def _base_of(folder: Path, config: Any) -> str:
    """Name or folder of an adapter's base model. One saved with its run may have been moved with it."""
    name = config.base_model_name_or_path
    if not name:
        raise ValueError(f"The adapter in {folder} doesn't name its base model: set it in {_ADAPTER}.")
    if not Path(name).name.startswith(SAVED_BASE):
        return name
    places = (Path(name), folder.absolute() / Path(name).name, folder.absolute().parent / Path(name).name)
    found = next((str(place) for place in places if place.is_dir()), None)
    if found is None:
        raise ValueError(
            f"The adapter in {folder} was trained on {Path(name).name}, which is neither in {Path(name).parent} nor "
            "next to the adapter: move it there."
        )
    return found


def tied_weights(model: nn.Module) -> set[int]:
    """`id`s of the parameters that several layers share."""
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    return {weight for weight, count in uses.items() if count > 1}


def is_quantized(model: Any) -> bool:
    """Whether the weights are quantized."""
    return getattr(model.config, "quantization_config", None) is not None


def check_source(model_name_or_path: str | os.PathLike[str], **source: Any) -> None:
    """Raise a `ValueError` with a fix unless this names a vision-language model; reads only its config."""
    name, folder = os.fspath(model_name_or_path), Path(model_name_or_path)
    refuse_original(folder)
    if folder.is_dir():
        if (folder / _ADAPTER).is_file():
            return  # an adapter; its own config names the model
        if not (folder / "config.json").is_file():
            newest = get_last_checkpoint(folder)
            remedy = (
                f"Its newest checkpoint is {newest}." if newest else "Give the folder that `save_pretrained` wrote."
            )
            raise ValueError(f"{name} is not a model's folder: it has no config.json. {remedy}")
    elif folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"There is no folder {name}. Give a model's folder, a model on the Hub, or `tiny`.")
    try:
        config = AutoConfig.from_pretrained(name, **source)
    except OSError as error:
        raise ValueError(
            f"There is no folder {name}, and no model of that name was found on the Hub. Check the spelling and the "
            "connection, log in with `hf auth login` if it is gated, or use `tiny`, the embedded model."
        ) from error
    own_code = "AutoModelForImageTextToText" in (getattr(config, "auto_map", None) or {})
    if type(config) not in AutoModelForImageTextToText._model_mapping and not own_code:
        raise ValueError(f"{name} ({config.model_type}) is not a vision-language model: {_NEEDED}")


def check_processor(model: Any, processor: Any) -> None:
    """Raise a `ValueError` with a fix if this pair can't look at an image and answer."""
    model = unwrap_adapter(model)
    name = type(model).__name__
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise ValueError(
            f"{type(processor).__name__} does not process images and text. Pass the model's full processor, "
            "`AutoProcessor.from_pretrained(...)`, not its tokenizer or image processor alone."
        )
    token_id = image_token_id(model)
    if token_id is None:
        raise ValueError(f"{name} can't take images, since its config has no image token: {_NEEDED}")
    if token_id >= (size := model.config.get_text_config().vocab_size):
        raise ValueError(
            f"The image token's id {token_id} is outside {name}'s vocabulary of {size}. Call "
            "`model.resize_token_embeddings(len(processor.tokenizer))` and save the model."
        )
    if getattr(processor, "patch_size", 0) is None:
        raise ValueError(
            "The processor does not know how many tokens an image takes. Set "
            "`processor.patch_size = model.config.vision_config.patch_size` and "
            "`processor.vision_feature_select_strategy = model.config.vision_feature_select_strategy` and save it."
        )
    _check_chat_template(processor, token_id)


def _check_chat_template(processor: Any, token_id: int) -> None:
    if not getattr(processor, "chat_template", None):
        raise ValueError(
            f"{type(processor).__name__} has no chat template, so it is unclear how to prompt this model. Use an "
            "instruction-tuned checkpoint, or set `processor.chat_template` to the template it was trained with."
        )
    remedy = (
        "Set `processor.chat_template` to a template that writes the image token for content parts of type 'image'."
    )
    text = chat(processor, "?")
    if text == chat(processor, "?", images=0):
        raise ValueError(f"The chat template leaves out the image. {remedy}")
    image = Image.new("RGB", (64, 64))
    try:
        ids = processor(text=[text], images=[[image]], return_tensors="pt")["input_ids"]
    except ValueError as error:
        raise ValueError(
            f"The processor rejects the output of its own chat template for an image. {remedy}"
        ) from error
    if not (ids == token_id).any():
        raise ValueError(f"A templated prompt has no image token (id {token_id} in the model's config). {remedy}")


def chat(processor: Any, prompt: str, images: int = 1) -> str:
    """Text of a conversation with this many images and `prompt`, ready for the assistant's turn.

    The turns before a [`Prompt`] come first, with their own of the images.
    """
    messages = chat_messages(prompt, [{"type": "image"}] * images)
    return processor.apply_chat_template(messages, add_generation_prompt=True)


def unwrap_adapter(model: Any) -> Any:
    """The Hugging Face model inside a peft model, with adapters in place and active; any other model unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def lora_target_modules(model: nn.Module) -> list[str]:
    """Every linear layer except the LM head, vision tower and projector included, for peft's `LoraConfig`.

    Full names: a suffix such as `proj` or `0` would also catch convolutions and whole blocks.
    """
    base = unwrap_adapter(model)
    head = base.get_output_embeddings()
    # MultiheadAttention uses its output layer's weight without calling the layer, so an adapter there has no effect
    unseen = {id(m.out_proj) for m in base.modules() if isinstance(m, nn.MultiheadAttention)}
    return [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and module is not head and id(module) not in unseen
    ]


def positions_follow_mask(model: Any) -> bool:
    """Whether a token's position is its index among its row's unpadded tokens, so the attention mask determines it.

    Not for M-RoPE (Qwen-VL, GLM-V, …), where image tokens lie on a grid: such a family overrides the method that
    numbers tokens in `generate`, or its config splits the rotation into sections. Non-rotary positions may start at a
    number other than 0. In all these cases the model computes the positions.
    """
    base = unwrap_adapter(model)
    own_numbers = type(base)._prepare_position_ids_for_generation
    rope = base.config.get_text_config().to_dict().get("rope_parameters")
    return (
        own_numbers is GenerationMixin._prepare_position_ids_for_generation
        and "position_ids" in inspect.signature(base.forward).parameters
        and bool(rope)
        and "mrope_section" not in str(rope)
    )


def image_token_id(model: Any) -> int | None:
    """Id of the image placeholder in the prompt; `None` for a model that takes no images."""
    config = unwrap_adapter(model).config
    found = getattr(config, "image_token_id", None)
    return found if found is not None else getattr(config, "image_token_index", None)


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Ids that end a response: the tokenizer's EOS and those in the checkpoint's generation_config."""
    config = getattr(unwrap_adapter(model), "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    named = [] if named is None else [named] if isinstance(named, int) else list(named)
    ids = list(dict.fromkeys(i for i in [tokenizer.eos_token_id, *named] if i is not None))
    if not ids:
        raise ValueError(
            "Neither the tokenizer nor the model's generation_config has an EOS token, so a response could never end. "
            "Set tokenizer.eos_token."
        )
    return ids


def pad_token_id(model: Any, tokenizer: Any, eos_ids: Sequence[int]) -> int:
    """The tokenizer's pad token, else the generation_config's, else EOS (attention masks tell them apart)."""
    config = getattr(unwrap_adapter(model), "generation_config", None)
    candidates = (tokenizer.pad_token_id, getattr(config, "pad_token_id", None), eos_ids[0])
    return next(candidate for candidate in candidates if candidate is not None)


def special_texts(processor: Any) -> list[str]:
    """Texts of special tokens and image placeholders, longest first."""
    tokenizer = processor.tokenizer
    texts = {*tokenizer.all_special_tokens, *(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special)}
    for name in ("image_token", "video_token"):
        if isinstance(placeholder := getattr(processor, name, None), str):
            texts.add(placeholder)
    return sorted(texts, key=len, reverse=True)


def suppressed_tokens(model: Any, processor: Any, eos_ids: Sequence[int]) -> torch.Tensor:
    """`(V,)`, bool: ids that must never be sampled.

    Special tokens other than EOS, image and video placeholders (a sampled `<image>` would break the next forward
    pass), and ids without a token (vocabularies are padded to round sizes).
    """
    config = unwrap_adapter(model).config
    tokenizer = processor.tokenizer
    size = config.get_text_config().vocab_size
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    for owner in (config, processor):
        for name in ("image_token_id", "image_token_index", "video_token_id", "video_token_index"):
            if isinstance(placeholder := getattr(owner, name, None), int):
                special.add(placeholder)
    allowed = (set(tokenizer.get_vocab().values()) - special | set(eos_ids)) & set(range(size))
    suppressed = torch.ones(size, dtype=torch.bool)
    suppressed[sorted(allowed)] = False
    return suppressed
