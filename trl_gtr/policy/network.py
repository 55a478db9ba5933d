"""The network: a vision-language model and, if it is to learn values, a value head on the same trunk.

One forward pass gives the logits of the response and the value of the state. The network can be wrapped (DDP,
DeepSpeed) and unwrapped; what it is asked and how its answers are read is `scoring`'s business.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from .loading import unwrap_adapter


class ValueHead(nn.Module):
    """An MLP from the trunk's last hidden state to the value of the state: `(B, hidden) → (B,)`.

    It stays in float32 beside a bf16 trunk. The last layer starts at zero: before anything is learned every value is
    0, and the first value loss does not shake the trunk.
    """

    def __init__(self, hidden_size: int, sizes: Sequence[int] = (1024, 512)):
        super().__init__()
        widths = [hidden_size, *sizes]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        last = nn.Linear(widths[-1], 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return self.layers(hidden.to(next(self.parameters()).dtype)).squeeze(-1).float()


class PolicyWithValue(nn.Module):
    """A VLM and a value head on the same trunk; with `value_head=None` the VLM alone, and no values."""

    def __init__(self, policy: nn.Module, value_head: nn.Module | None, detach_value: bool = False):
        super().__init__()
        self.policy = policy
        self.value_head = value_head
        self.detach_value = detach_value

    def forward(
        self, inputs: dict[str, torch.Tensor], response_length: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return policy_and_value_forward(
            self.policy, self.value_head, inputs, response_length, detach_value=self.detach_value
        )


def policy_and_value_forward(
    policy: Any,
    value_head: nn.Module | None,
    inputs: dict[str, torch.Tensor],
    response_length: int,
    detach_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One forward pass over `[prompt | response]`.

    Args:
        value_head: `None` if no values are wanted.
        inputs: the model's arguments; every row's response (padding included) fills the last `response_length` places.
        response_length: 0 to get nothing but values.
        detach_value: keep the value loss from reaching the trunk.

    Returns:
        Logits `(B, response_length, V)`, each predicting the response token of its place, and values `(B,)` of the
        state that the last prompt token has seen, or `None`.
    """
    kept = response_length + 1  # from the last prompt token on
    base = unwrap_adapter(policy)
    arguments: dict[str, Any] = {**inputs, "use_cache": False}
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        arguments["logits_to_keep"] = kept
    if value_head is None:
        return policy(**arguments).logits[:, -kept:-1], None
    output, states = _forward_with_states(policy, base, arguments)
    state = states[:, -kept]
    return output.logits[:, -kept:-1], value_head(state.detach() if detach_value else state)


def _forward_with_states(policy: Any, base: Any, arguments: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """The model's output, and the trunk's last-layer states `(B, length, hidden)`."""
    head = base.get_output_embeddings()
    if head is None:
        output = policy(**arguments, output_hidden_states=True)
        return output, output.hidden_states[-1]
    # What enters the LM head is the trunk's last-layer state. A hook takes it from the model's own forward pass: no
    # second pass, no hidden states of the other layers kept, and whatever the family does to its logits is done.
    states: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    try:
        output = policy(**arguments)
    finally:
        hook.remove()
    return output, states[-1]
