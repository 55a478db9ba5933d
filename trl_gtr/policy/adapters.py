"""Adapters: their base model, saving them, and a frozen copy of the initial adapter as the reference.

A saved adapter stores only the name of its base model. If that name doesn't lead to the weights the adapter was
trained on (another adapter was merged into them, or the model was built in this program), the base weights are saved
once in the run's folder, and the adapter refers to that copy.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from ..storage.files import atomic_write, sync
from .loading import SAVED_BASE, is_quantized, unwrap_adapter

logger = logging.getLogger(__name__)

REFERENCE = "gtr_reference"
"""Name of the adapter with the initial weights of a run; it is never saved."""
_OTHER_ADAPTER_WEIGHTS = ("modules_to_save.", "trainable_tokens_")  # in the names of an adapter's other weights
_MAX_LISTED = 5  # weight names listed in an error
_INITIALIZATION = ("init_lora_weights", "init_weights")  # its names in different adapter types


# --- what can be trained ---------------------------------------------------------------------------------------------


def check_start(model: Any, peft_config: PeftConfig | None, with_reference: bool) -> None:
    """The checks of [`check_trainable`] that are possible when the model may be given by name only."""
    if not isinstance(model, str | os.PathLike):
        check_trainable(model, peft_config, with_reference)
    elif peft_config is not None:
        check_config(peft_config, with_reference)


def check_trainable(model: Any, peft_config: PeftConfig | None, with_reference: bool) -> None:
    """Raise a `ValueError` with a fix if this model can't be trained, or saved afterwards."""
    given = isinstance(model, PeftModel)
    if given and peft_config is not None:
        raise ValueError(
            "This model already has an adapter, and `peft_config` asks for another. Leave out `peft_config` to train "
            "the existing adapter, or merge it first: `model = model.merge_and_unload()`."
        )
    if unwrap_adapter(model)._hf_peft_config_loaded:
        raise ValueError(
            "This model was loaded from an adapter's folder by transformers, which doesn't save it correctly once the "
            "rest is trained. Load it with `load_policy(folder)`, or with `PeftModel.from_pretrained(base, folder, "
            "is_trainable=True)`."
        )
    if given and len(model.active_adapters) != 1:
        raise ValueError(
            f"Several adapters are active at once ({', '.join(model.active_adapters)}), but only one is trained and "
            "saved. Choose it with `model.set_adapter(name)`, or merge the others."
        )
    if peft_config is None and not any(weight.requires_grad for weight in model.parameters()):
        remedy = (
            "Load the adapter with `PeftModel.from_pretrained(base, folder, is_trainable=True)`."
            if given
            else "Call `model.requires_grad_(True)`, or pass a `peft_config`."
        )
        raise ValueError(f"None of the model's weights is trainable. {remedy}")
    config = model.active_peft_config if given else peft_config
    if config is not None:
        check_config(config, with_reference)
    if given and (names := _trained_but_not_saved(model)):
        listed = ", ".join(names[:_MAX_LISTED]) + (
            f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        )
        raise ValueError(
            "These weights of the base model are trainable but would not be saved with the adapter: "
            f"{listed}. Freeze them, or name their modules in `modules_to_save`."
        )


def check_config(config: PeftConfig, with_reference: bool) -> None:
    """Reject unsupported adapter types."""
    if config.is_prompt_learning:
        raise ValueError(f"{config.peft_type} adds tokens before the prompt, which scoring doesn't support. Use LoRA.")
    if with_reference and config.to_dict().get("bias", "none") != "none":
        raise ValueError(
            "`kl_coef` needs an adapter with bias='none': biases belong to the base model, so training them would "
            "change the reference."
        )


def _trained_but_not_saved(model: PeftModel) -> list[str]:
    """Names of trainable weights that are neither part of the adapter nor saved with it (as biases may be)."""
    saved = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    trainable = (name for name, weight in _base_weights(model) if weight.requires_grad)
    return [name for name in trainable if f"base_model.model.{name}" not in saved]


# --- the base model --------------------------------------------------------------------------------------------------


def ensure_named_base(model: Any, peft_config: PeftConfig | None, processor: Any, output_dir: str | Path) -> None:
    """Make sure that the base model's name leads to its weights; if not, save them in `output_dir`.

    Called before training. Only the main process writes.

    Args:
        model: The model to train, with or without an adapter.
        peft_config: Config of the adapter about to be added.
        processor: Saved with the model.
        output_dir: The run's output folder.
    """
    if isinstance(model, PeftModel):
        peft_config = model.active_peft_config
    if peft_config is None:
        return
    base = unwrap_adapter(model)
    # Under ZeRO-3 no process holds full weights, and quantized weights differ from the files: `load_policy` refuses
    # to merge into either.
    if PartialState().is_main_process and not is_quantized(base) and not is_deepspeed_zero3_enabled():
        weights = [(name, weight.detach()) for name, weight in _base_weights(model)]
        if not _is_stored(weights, base.name_or_path, peft_config.revision):
            folder = Path(output_dir).absolute() / f"{SAVED_BASE}{_fingerprint(weights)}"
            if not folder.is_dir():
                _save_base(model, processor, folder)
            base.name_or_path = base.config.name_or_path = str(folder)
            peft_config.revision = None
            if isinstance(model, PeftModel):
                _use_default_initialization(peft_config)  # the base weights already reflect the special initialization
    peft_config.base_model_name_or_path = base.name_or_path


def _base_weights(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and weights that don't belong to an adapter."""
    of_adapters = (model.base_model.prefix, *_OTHER_ADAPTER_WEIGHTS) if isinstance(model, PeftModel) else ()
    for name, weight in unwrap_adapter(model).named_parameters():
        if not any(part in name for part in of_adapters):
            yield name, weight


def _is_stored(weights: list[tuple[str, torch.Tensor]], name: str, revision: str | None) -> bool:
    """Whether the files under that name hold these weights.

    Compares shapes and the first and last rows, which merging an adapter changes: a few megabytes even for a large
    model. Names are not compared, since files and modules may use different ones.
    """
    dtypes = {weight.dtype for _, weight in weights}
    stored = set()
    for file in _stored_files(name, revision):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                sample = _sample(tensors.get_slice(key), tuple(tensors.get_slice(key).get_shape()))
                stored |= {_digest(*sample, dtype) for dtype in dtypes}
    return bool(stored) and all(_digest(*_sample(w, w.shape), w.dtype) in stored for _, w in weights)


def _stored_files(name: str, revision: str | None) -> list[Path]:
    """The weight files that loading a model by this name would use."""
    folder = Path(name)
    if not name or not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):  # not a valid name, or not cached
            return []
    return sorted(folder.glob("*.safetensors"))


def _sample(tensor: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], torch.Tensor]:
    """Shape and first and last rows of a tensor or file slice; the whole of a vector."""
    if len(shape) < 2:
        return tuple(shape), tensor[...]
    return tuple(shape), torch.cat([tensor[:1], tensor[shape[0] - 1 :]])


def _digest(shape: tuple[int, ...], sample: torch.Tensor, dtype: torch.dtype) -> bytes:
    numbers = sample.to(dtype).cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{shape} {dtype} ".encode() + numbers.tobytes()).digest()


def _fingerprint(weights: list[tuple[str, torch.Tensor]]) -> str:
    whole = hashlib.sha256()
    for name, weight in weights:
        whole.update(name.encode() + _digest(*_sample(weight, weight.shape), weight.dtype))
    return whole.hexdigest()[:12]


def _save_base(model: Any, processor: Any, folder: Path) -> None:
    logger.warning(
        "The base model's weights could not be found under the name %r, so they are saved to %s. The adapter can't be "
        "loaded without that folder.",
        unwrap_adapter(model).name_or_path,
        folder,
    )
    base = copy.deepcopy(model).unload() if isinstance(model, PeftModel) else model
    with atomic_write(folder) as unfinished:
        base.save_pretrained(unfinished)
        processor.save_pretrained(unfinished)
        for path in (*unfinished.rglob("*"), unfinished):
            sync(path)


# --- saving ----------------------------------------------------------------------------------------------------------


def save_adapter(model: PeftModel, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
    """Save only the active adapter, directly in `folder`: peft puts adapters not named "default" in a subfolder, where
    loaders don't look."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        model.save_pretrained(scratch, selected_adapters=[model.active_adapter], state_dict=state_dict)
        for file in [path for path in Path(scratch).rglob("*") if path.is_file()]:
            file.replace(Path(folder) / file.name)


# --- the reference ---------------------------------------------------------------------------------------------------


def starts_at_base(config: PeftConfig) -> bool:
    """Whether a new adapter of this type leaves the model's output unchanged."""
    return all(config.to_dict().get(name, True) in (True, "gaussian") for name in _INITIALIZATION)


def _use_default_initialization(config: PeftConfig) -> None:
    """Keep creating this adapter from changing the base model; the adapter's weights are loaded afterwards."""
    for name in _INITIALIZATION:
        if name in config.to_dict():
            setattr(config, name, True)


def add_reference(model: PeftModel) -> None:
    """Add a frozen copy of the active adapter, for [`reference_active`]."""
    config = copy.deepcopy(model.active_peft_config)
    _use_default_initialization(config)
    config.inference_mode = True
    start = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    with _keep_requires_grad(model):
        model.add_adapter(REFERENCE, config)
        set_peft_model_state_dict(model, start, adapter_name=REFERENCE)


@contextmanager
def reference_active(model: PeftModel) -> Iterator[None]:
    """Use the model as it was at the start: with the frozen copy, or with no adapter if there is none."""
    trained = model.active_adapter
    with _keep_requires_grad(model):
        if REFERENCE not in model.peft_config:
            with model.disable_adapter():
                yield
            return
        model.set_adapter(REFERENCE, inference_mode=True)
        try:
            yield
        finally:
            model.set_adapter(trained)


@contextmanager
def _keep_requires_grad(model: nn.Module) -> Iterator[None]:
    """Restore `requires_grad`, since peft makes all of an adapter trainable on activation. Freezes new weights."""
    before = {name: weight.requires_grad for name, weight in model.named_parameters()}
    try:
        yield
    finally:
        for name, weight in model.named_parameters():
            weight.requires_grad_(before.get(name, False))
