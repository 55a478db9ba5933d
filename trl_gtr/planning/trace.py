"""One micro-batch through the run's own code, without weights, numbers or time: what autograd keeps and what it costs.

Weights are fake tensors, which have a shape and a type and nothing else; inputs are real, so that the model finds its
image tokens and tiles. Whatever touches a weight becomes fake. So the trace sees the very operations of the run:
adapters, autocast's copies, the family's own way with images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from transformers.modeling_layers import GradientCheckpointingLayer

from ..policy.network import PolicyWithValue
from ..policy.scoring import VLMPolicy

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Torch's own registry leaves it out."""
_ATTENTION_BACKWARD = 2.5
"""Of attention's forward pass: its backward pass makes five products instead of two."""


@dataclass(frozen=True)
class Pass:
    """What one micro-batch costs."""

    flops: float
    """Of the forward pass: matrix products, convolutions and attention (without the half that a causal mask saves)."""
    backward_flops: float
    """A product for each factor that needs a gradient; frozen weights need none."""
    saved: int
    """Bytes that autograd keeps for the backward pass, weights aside."""
    saved_with_checkpointing: int
    """The same where each layer keeps its input only …"""
    largest_layer: int
    """… and one layer at a time is computed again, which keeps this much."""
    recomputed_flops: float
    """The forward pass of all such layers."""


def trace(
    module: PolicyWithValue,
    policy: VLMPolicy,
    prompts: Sequence[str],
    images: Sequence[np.ndarray],
    response_tokens: int,
    bf16: bool,
) -> Pass:
    """Score responses of so many tokens to these prompts, as a PPO micro-batch does.

    Args:
        module: On the meta device. It is left as it was.
        bf16: Autocast, as in the run.
    """
    ids = np.full(response_tokens, policy.encode_response("0")[0])
    module.eval()  # no dropout, as in the run
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_weights(module, mode), ExitStack() as stack:
        counter = _Counter(module)
        stack.enter_context(mode)
        stack.enter_context(counter)
        stack.enter_context(counter.layers(module))
        stack.enter_context(saved_tensors_hooks(counter.keep, lambda tensor: tensor))
        stack.enter_context(torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext())
        policy.score(module, prompts, images, [ids] * len(prompts), [0] * len(prompts), 1.0)
    return counter.result()


class _Counter(TorchDispatchMode):
    """Counts products as they are dispatched, and computes what is known without any weight."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.flops = self.backward_flops = self.recomputed_flops = 0.0
        self.largest_layer = 0
        self._weights = {weight.untyped_storage()._cdata for weight in module.parameters()}
        # Storages by address, and held, so that no other gets the same one.
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._kept_with_checkpointing: dict[int, torch.UntypedStorage] = {}
        self._open: list[
            tuple[int, float]
        ] = []  # of each layer that is under way: what was kept and counted before it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet is _CPU_ATTENTION:
            self._count(packet.__name__, sdpa_flop_count(*(tensor.shape for tensor in args[:3])), tensors)
        elif packet in flop_registry:
            self._count(packet.__name__, flop_registry[packet](*args, **kwargs, out_val=out), tensors)
        return out

    def _count(self, name: str, flops: float, tensors: Sequence[torch.Tensor]) -> None:
        factors: float = sum(tensor.requires_grad for tensor in tensors)
        if "attention" in name:
            factors = _ATTENTION_BACKWARD if factors else 0
        elif name in ("addmm", "baddbmm"):
            factors -= tensors[0].requires_grad  # the bias is added, not multiplied
        elif name == "convolution":
            factors = min(factors, 2)  # input and weight; here too the bias is added
        self.flops += flops
        self.backward_flops += factors * flops

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """For `saved_tensors_hooks`."""
        self._add(tensor, self._kept)
        if not self._open:
            self._add(tensor, self._kept_with_checkpointing)
        return tensor

    def _add(self, tensor: torch.Tensor, place: dict[int, torch.UntypedStorage]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:
            place[storage._cdata] = storage

    @contextmanager
    def layers(self, module: nn.Module) -> Iterator[None]:
        """Find out what the layers that gradient checkpointing wraps keep and cost."""
        layers = [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]
        handles = [each.register_forward_pre_hook(self._enter, with_kwargs=True) for each in layers]
        handles += [each.register_forward_hook(self._leave) for each in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._open:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._add(leaf, self._kept_with_checkpointing)
        self._open.append((_size(self._kept), self.flops))

    def _leave(self, *_: Any) -> None:
        kept, flops = self._open.pop()
        if not self._open:
            self.largest_layer = max(self.largest_layer, _size(self._kept) - kept)
            self.recomputed_flops += self.flops - flops

    def result(self) -> Pass:
        return Pass(
            self.flops,
            self.backward_flops,
            _size(self._kept),
            _size(self._kept_with_checkpointing),
            self.largest_layer,
            self.recomputed_flops,
        )


def _size(storages: dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())


@contextmanager
def _fake_weights(module: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Parameters and buffers as fake tensors that believe to be on the CPU, where autocast knows them."""
    fakes: dict[int, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str]] = [
        (place, name) for each in module.modules() for place in (each._parameters, each._buffers) for name in place
    ]
    originals = [place[name] for place, name in places]
    for (place, name), tensor in zip(places, originals, strict=True):
        if tensor is None:
            continue
        if id(tensor) not in fakes:  # tied weights stay tied
            with mode:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                parameter = isinstance(tensor, nn.Parameter)
                fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if parameter else fake
        place[name] = fakes[id(tensor)]
    try:
        yield
    finally:
        for (place, name), tensor in zip(places, originals, strict=True):
            place[name] = tensor
