"""Runs inside vLLM's workers: takes the learner's weights and remembers which version they are.

vLLM imports this module (`worker_extension_cls`), also in a server whose environment has none of this package's other
dependencies. So it imports only torch, safetensors and vLLM.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open

from .vllm_stream import WeightStream, connect

WORKER_EXTENSION = f"{__name__}.WeightReceiver"
_TOWER, _OLD_TOWER = "vision_tower.", "vision_tower.vision_model."


class WeightReceiver:
    """Methods that vLLM adds to its worker class, for `collective_rpc`."""

    gtr_version = ""
    """Of the weights in use; empty until the first have arrived, and while new ones are being loaded."""
    gtr_process = uuid.uuid4().hex
    """Differs after a restart."""
    gtr_loads = 0
    """Times that weights were taken into use: if it is the same before and after, none were in between."""
    gtr_sender = ""
    """The learner's process that is sending weights."""

    gtr_stream: WeightStream | None = None
    """From the learner that sent weights last."""

    model_runner: Any
    rank: int

    def gtr_state(self) -> dict[str, Any]:
        """Which weights are in use."""
        return {"version": self.gtr_version, "loads": self.gtr_loads, "process": self.gtr_process}

    def gtr_config(self) -> dict[str, Any]:
        """The config of the model that is served, to compare with the learner's, and the number of its copies."""
        copies = self.model_runner.vllm_config.parallel_config.data_parallel_size
        return plain_config(self.model_runner.model_config.hf_config) | {"data_parallel_size": copies}

    def gtr_claim(self, sender: str, version: str, force: bool) -> dict[str, Any]:
        """Let one process send weights at a time. Until `gtr_use`, there is no version.

        Args:
            sender: Who wants to send.
            version: What it wants to send; if that is in use already, it needn't.
            force: Send even if another has begun, such as a run that is no more.
        """
        granted = force or (self.gtr_sender in ("", sender) and self.gtr_version != version)
        if granted:
            self.gtr_sender, self.gtr_version = sender, ""
        stream = "" if self.gtr_stream is None else self.gtr_stream.name
        return {"granted": granted, "process": self.gtr_process, "stream": stream}

    def gtr_release(self, sender: str) -> None:
        """Let another process send, since this one can't."""
        if self.gtr_sender == sender:
            self.gtr_sender = ""

    def gtr_use(self, version: str, sender: str = "") -> dict[str, Any]:
        """Sample with the weights that were loaded. Returns the state."""
        if self.gtr_sender != sender:
            raise RuntimeError("another process has begun to send weights")
        self.gtr_sender, self.gtr_version, self.gtr_loads = "", version, self.gtr_loads + 1
        return self.gtr_state()

    def gtr_load_file(self, path: str) -> None:
        """Load weights from a safetensors file."""
        with safe_open(path, "pt") as tensors:
            self.gtr_load((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118

    def gtr_receive(self, place: str) -> None:
        """Load weights that the learner streams.

        Args:
            place: Where it does so, as JSON.
        """
        told = json.loads(place)
        host, port = told.pop("host"), told.pop("port")
        if self.gtr_stream is None or self.gtr_stream.name != told["name"]:
            device = torch.device("cuda", torch.cuda.current_device()) if told["backend"] == "nccl" else None
            store = connect(host, port, told["timeout"])
            self.gtr_stream = WeightStream(store, rank=1 + self.rank, device=device, **told)
        try:
            self.gtr_load(self.gtr_stream.receive())
        except BaseException:
            self.gtr_stream.abort()  # so that the learner doesn't wait for this member
            self.gtr_stream = None
            raise

    def gtr_load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load all weights, named as in the learner's model."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        model = self.model_runner.get_model()
        own = dict(model.named_parameters())
        self.gtr_version, sent = "", Checksums()
        self.model_runner.reload_weights(weights_iterator=renamed(sent.watch(weights), own))
        for module in model.modules():
            if isinstance(module, ParallelLMHead):  # on a CPU a tied head has a packed copy of the embeddings
                module.quant_method.process_weights_after_loading(module)
        if wrong := sent.unknown(norm_sums(model.named_parameters())):
            raise RuntimeError(
                f"vLLM did not take over all new weights: {', '.join(wrong[:3])} differ from the learner's."
            )

    def gtr_sums(self) -> dict[str, list[str]]:
        """Checksums of weights in use, see `norm_sums`."""
        return norm_sums(self.model_runner.get_model().named_parameters())


class Checksums:
    """Of the norm layers' weights, which vLLM neither splits nor joins nor packs: those in use must be those sent."""

    def __init__(self) -> None:
        self._sent: list[torch.Tensor] = []

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights themselves, remembering those of the norm layers."""
        for name, weight in weights:
            if _is_norm(name, weight):
                self._sent.append(weight)
            yield name, weight

    def unknown(self, in_use: Mapping[str, Sequence[str]]) -> list[str]:
        """The layers in use whose weights are none of those. (An engine may leave out layers.)

        Args:
            in_use: What `norm_sums` returns.
        """
        dtypes = {dtype for dtype, _ in in_use.values()}
        known = {(dtype, _checksum(weight, getattr(torch, dtype))) for weight in self._sent for dtype in dtypes}
        return [name for name, (dtype, digest) in in_use.items() if (dtype, digest) not in known]


def norm_sums(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[str]]:
    """Dtype and checksum of each norm layer's weight, by name."""
    norms = {name: weight for name, weight in weights if _is_norm(name, weight)}
    return {
        name: [str(weight.dtype).removeprefix("torch."), _checksum(weight, weight.dtype)]
        for name, weight in norms.items()
    }


def _is_norm(name: str, weight: torch.Tensor) -> bool:
    return weight.dim() == 1 and "norm" in name.lower() and name.endswith(".weight")


def _checksum(weight: torch.Tensor, dtype: torch.dtype) -> str:
    data = weight.detach().to("cpu", dtype).contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


def renamed(weights: Iterable[tuple[str, torch.Tensor]], own: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Transformers 5 dropped the level `vision_model` from CLIP's and SigLIP's towers; vLLM's models have it.

    Args:
        own: Names of vLLM's parameters.
    """
    has_level = any(_OLD_TOWER in name for name in own)
    for name, weight in weights:
        lacks_level = has_level and _TOWER in name and _OLD_TOWER not in name
        yield name.replace(_TOWER, _OLD_TOWER, 1) if lacks_level else name, weight


_SAME = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "image_size",
    "patch_size",
    "image_token_id",
    "image_token_index",
    "tie_word_embeddings",
)
_SAME_IF_TOLD = ("rms_norm_eps", "hidden_act", "vision_feature_layer", "vision_feature_select_strategy")
_ROPE = ("rope_theta", "rope_type", "factor", "partial_rotary_factor")


def plain_config(config: Any) -> dict[str, Any]:
    """The settings of a transformers config that two models must share to be the same with the same weights."""

    def shared(values: dict[str, Any], prefix: str) -> dict[str, Any]:
        found = {name: values[name] for name in (*_SAME, *_SAME_IF_TOLD) if values.get(name) is not None}
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}  # as newer and older releases call it
        found |= {f"rope.{name}": (values | rope)[name] for name in _ROPE if (values | rope).get(name) is not None}
        found = {f"{prefix}{name}": value for name, value in found.items()}
        for name, inner in values.items():
            if isinstance(inner, dict) and name.endswith("_config"):
                found |= shared(inner, f"{prefix}{name}.")
        return found

    return shared(config.to_dict(), "")


def differing(served: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Where two such configs differ. What determines shapes must be in both; releases may leave out other defaults."""
    shapes = {name for name in ours if name.rpartition(".")[2] in _SAME}
    compared = [name for name in ours if name in shapes or name in served]
    return [f"{name}: {served.get(name)!r}, not {ours[name]!r}" for name in compared if served.get(name) != ours[name]]
