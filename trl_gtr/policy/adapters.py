"""Adapters: the model under one, saving one, and the reference that is the adapter as it was at the start.

All that a saved adapter keeps of the model under it is a name. Where that name doesn't lead to the weights that the
adapter was trained on (another adapter was merged into them, or the model was built in this program), they are saved
beside the run, once, and the adapter names that folder.
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
"""Name of the adapter that holds the start of a run; it is never saved."""
_BESIDE_THE_TUNER = ("modules_to_save.", "trainable_tokens_")  # parts of the names of an adapter's further weights
_LISTED = 5  # names of weights in an error
_INITIALISATION = ("init_lora_weights", "init_weights")  # what the kinds of adapters call it


# --- what can be trained ---------------------------------------------------------------------------------------------


def check_start(model: Any, peft_config: PeftConfig | None, with_reference: bool) -> None:
    """As much of [`check_trainable`] as can be known of a model that may be given by name only."""
    if not isinstance(model, str | os.PathLike):
        check_trainable(model, peft_config, with_reference)
    elif peft_config is not None:
        check_config(peft_config, with_reference)


def check_trainable(model: Any, peft_config: PeftConfig | None, with_reference: bool) -> None:
    """Raise a `ValueError` that names the remedy if training this model, or saving it afterwards, would go wrong."""
    given = isinstance(model, PeftModel)
    if given and peft_config is not None:
        raise ValueError(
            "This model has an adapter already, and `peft_config` asks for another. Leave `peft_config` out to train "
            "the adapter that is there, or merge it first: `model = model.merge_and_unload()`."
        )
    if unwrap_adapter(model)._hf_peft_config_loaded:
        raise ValueError(
            "This model was loaded from an adapter's folder by transformers, which saves it wrongly once the rest is "
            "trained. Load it with `load_policy(folder)`, or with `PeftModel.from_pretrained(base, folder, "
            "is_trainable=True)`."
        )
    if given and len(model.active_adapters) != 1:
        raise ValueError(
            f"Several adapters are active at once ({', '.join(model.active_adapters)}), and one is trained and saved. "
            "Choose it with `model.set_adapter(name)`, or merge the others."
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
        listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        raise ValueError(
            "These weights of the model under the adapter are trainable, but an adapter's folder doesn't hold them: "
            f"{listed}. Freeze them, or name their modules in `modules_to_save`."
        )


def check_config(config: PeftConfig, with_reference: bool) -> None:
    """Refuse kinds of adapters that an agent can't have."""
    if config.is_prompt_learning:
        raise ValueError(f"{config.peft_type} puts tokens before the prompt, which scoring can't follow. Use LoRA.")
    if with_reference and config.to_dict().get("bias", "none") != "none":
        raise ValueError(
            "`kl_coef` needs an adapter with bias='none': biases belong to the model under it, so that the reference "
            "would change with them."
        )


def _trained_but_not_saved(model: PeftModel) -> list[str]:
    """Names of trainable weights that are neither the adapter's own nor saved with it (as biases may be)."""
    saved = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    trainable = (name for name, weight in _base_weights(model) if weight.requires_grad)
    return [name for name in trainable if f"base_model.model.{name}" not in saved]


# --- the model under an adapter --------------------------------------------------------------------------------------


def ensure_named_base(model: Any, peft_config: PeftConfig | None, processor: Any, output_dir: str | Path) -> None:
    """Make sure that the name of the model under an adapter leads to its weights; save them in `output_dir` if not.

    Called before training. The main process writes.

    Args:
        model: What is trained, with an adapter or without one.
        peft_config: Of the adapter that it is about to get.
        processor: Saved with the model.
        output_dir: Of the run.
    """
    if isinstance(model, PeftModel):
        peft_config = model.active_peft_config
    if peft_config is None:
        return
    base = unwrap_adapter(model)
    # Under ZeRO-3 no process holds a whole weight, and quantized weights aren't those of the files: `load_policy`
    # refuses to merge into either.
    if PartialState().is_main_process and not is_quantized(base) and not is_deepspeed_zero3_enabled():
        weights = [(name, weight.detach()) for name, weight in _base_weights(model)]
        if not _is_stored(weights, base.name_or_path, peft_config.revision):
            folder = Path(output_dir).absolute() / f"{SAVED_BASE}{_fingerprint(weights)}"
            if not folder.is_dir():
                _save_base(model, processor, folder)
            base.name_or_path = base.config.name_or_path = str(folder)
            peft_config.revision = None
            if isinstance(model, PeftModel):
                _initialise_plainly(peft_config)  # what its kind takes out of the base is out already
    peft_config.base_model_name_or_path = base.name_or_path


def _base_weights(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and weight of everything that isn't an adapter's."""
    of_adapters = (model.base_model.prefix, *_BESIDE_THE_TUNER) if isinstance(model, PeftModel) else ()
    for name, weight in unwrap_adapter(model).named_parameters():
        if not any(part in name for part in of_adapters):
            yield name, weight


def _is_stored(weights: list[tuple[str, torch.Tensor]], name: str, revision: str | None) -> bool:
    """Whether the files of that name hold these weights.

    They are told by their shapes and by their first and last rows, which merging an adapter changes: a few megabytes
    of a model of gigabytes. By no names, for a file's may differ from the module's.
    """
    dtypes = {weight.dtype for _, weight in weights}
    stored = set()
    for file in _stored_files(name, revision):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (it is no mapping)
                sample = _sample(tensors.get_slice(key), tuple(tensors.get_slice(key).get_shape()))
                stored |= {_digest(*sample, dtype) for dtype in dtypes}
    return bool(stored) and all(_digest(*_sample(w, w.shape), w.dtype) in stored for _, w in weights)


def _stored_files(name: str, revision: str | None) -> list[Path]:
    """Files of the weights that loading a model of this name would take."""
    folder = Path(name)
    if not name or not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):  # the name of nothing, or of something elsewhere
            return []
    return sorted(folder.glob("*.safetensors"))


def _sample(tensor: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], torch.Tensor]:
    """Shape, and first and last row, of a tensor or of one in a file; all of a vector."""
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
        "The weights under the adapter could not be found under the name %r, so they are saved to %s. The adapter "
        "can't be loaded without that folder.",
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
    """The active adapter and no other, right in `folder`: peft puts any that isn't named "default" a level below,
    where no loader looks."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        model.save_pretrained(scratch, selected_adapters=[model.active_adapter], state_dict=state_dict)
        for file in [path for path in Path(scratch).rglob("*") if path.is_file()]:
            file.replace(Path(folder) / file.name)


# --- the reference ---------------------------------------------------------------------------------------------------


def starts_at_base(config: PeftConfig) -> bool:
    """Whether a fresh adapter of this kind changes nothing before it is trained."""
    return all(config.to_dict().get(name, True) in (True, "gaussian") for name in _INITIALISATION)


def _initialise_plainly(config: PeftConfig) -> None:
    """So that making an adapter of this kind leaves the model under it alone; its weights are put in afterwards."""
    for name in _INITIALISATION:
        if name in config.to_dict():
            setattr(config, name, True)


def add_reference(model: PeftModel) -> None:
    """A frozen copy of the active adapter, for [`reference_active`]."""
    config = copy.deepcopy(model.active_peft_config)
    _initialise_plainly(config)
    config.inference_mode = True
    start = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    with _requires_grad_kept(model):
        model.add_adapter(REFERENCE, config)
        set_peft_model_state_dict(model, start, adapter_name=REFERENCE)


@contextmanager
def reference_active(model: PeftModel) -> Iterator[None]:
    """Inside, the model is what it was at the start: with the frozen copy, or with no adapter if there is none."""
    trained = model.active_adapter
    with _requires_grad_kept(model):
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
def _requires_grad_kept(model: nn.Module) -> Iterator[None]:
    """Peft makes the whole of an adapter trainable when it is switched on. What is new inside is frozen."""
    before = {name: weight.requires_grad for name, weight in model.named_parameters()}
    try:
        yield
    finally:
        for name, weight in model.named_parameters():
            weight.requires_grad_(before.get(name, False))
