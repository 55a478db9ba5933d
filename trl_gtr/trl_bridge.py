"""The only file that knows `trl.experimental.ppo`: where its trainer meets an environment and a shared trunk.

TRL's `PPOTrainer` wants a reward model, a sized dataset and a value model with a trunk of its own. [`PPOBridge`] gives
it stand-ins for those, puts one module with policy and value head in their place before anything is prepared, and
mends what breaks in the parent: bf16 that isn't switched on, gradient checkpointing that does nothing, saving under
DDP and DeepSpeed. `tests/test_trl_bridge.py` holds the contract that these lines rely on.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*trl.experimental.*")
    from trl.experimental.ppo import PPOConfig, PPOTrainer
    from trl.experimental.ppo.ppo_trainer import OnlineTrainerState
from trl.models.utils import unwrap_model_for_generation

from .policy import PolicyWithValue, ValueHead

__all__ = [
    "OnlineTrainerState",
    "PPOBridge",
    "PPOConfig",
    "PPOTrainer",
    "TrainedModule",
    "unwrap_model_for_generation",
]


class TrainedModule(PolicyWithValue):
    """Policy and value head as one module, so that DDP and DeepSpeed see one forward with all parameters in it.

    It takes the place of TRL's `PolicyAndValueWrapper`, which runs a second trunk for the value.
    """

    policy: Any

    def __init__(self, policy: Any, value_head: ValueHead, detach_value: bool) -> None:
        super().__init__(policy, value_head, detach_value)
        self.config = policy.config  # read by DeepSpeed's and the hub's code

    # TRL would turn checkpointing off around generation and on again behind it, each time with hooks of its own. A
    # model in evaluation mode doesn't checkpoint anyway: tell it that there is nothing to turn off.
    is_gradient_checkpointing = False


class _ValueStandIn(nn.Module):
    """Passes for a value model while the parent wraps it; the real head takes its place at once."""

    base_model_prefix = "trunk"

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Identity()


class _FrozenStandIn(nn.Module):
    """Passes for the reward model and, where no KL is asked for, the reference model: one frozen number."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.unused = nn.Parameter(torch.zeros(1), requires_grad=False)


class _SizedDataset(torch.utils.data.Dataset):
    """Passes for the train dataset. The environments are the data."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class PPOBridge(PPOTrainer):
    """`PPOTrainer` over one module with a shared trunk and no dataset. Its `train` is left to the subclass."""

    # The parent never runs `Trainer.__init__`; these are what its methods read from there.
    is_distributed_loading_by_transformers = False
    is_fsdp_xla_v1_enabled = False
    label_names: list[str] = []  # noqa: RUF012
    _whole_model: Any = None
    model: Any
    control: Any
    ref_model: Any

    def __init__(self, args: Any, model: PreTrainedModel, value_head: ValueHead, processing_class: Any, **kwargs: Any):
        self._value_head = value_head
        eos = model.generation_config.eos_token_id
        mini_batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        with _environment_from(args):
            super().__init__(
                args=args,
                processing_class=processing_class,
                model=model,
                # With kl_coef the parent makes the reference (a copy, or the model with its adapter off).
                ref_model=None if args.kl_coef > 0 else _FrozenStandIn(model.config),
                reward_model=_FrozenStandIn(model.config),
                train_dataset=_SizedDataset(mini_batch),
                value_model=_ValueStandIn(),
                data_collator=list,
                **kwargs,
            )
        if args.kl_coef == 0:
            self.ref_model = None
        model.generation_config.eos_token_id = eos  # the parent overwrites it with its stop token
        args.total_episodes = None
        args.num_total_batches = args.num_updates
        self.model_wrapped = self.model
        if self.is_deepspeed_enabled:
            self.deepspeed = self.model

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Called by the parent before `accelerator.prepare`: the one moment to put our module in."""
        silence_dropout(self.policy_model)
        self.value_model = self._value_head
        self.model = TrainedModule(
            self.policy_model, self._value_head, detach_value=not self.args.value_gradient_to_trunk
        )
        if self.args.gradient_checkpointing:
            # Non-reentrant: otherwise the policy's frozen parts (LoRA) cut the gradient.
            kwargs = {"use_reentrant": False, **(self.args.gradient_checkpointing_kwargs or {})}
            self.policy_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None:  # it clips by itself; the parent doesn't tell it how much
            plugin.deepspeed_config["gradient_clipping"] = self.args.max_grad_norm
        else:
            # Without DDP's wrapper: gradients are averaged by `Processes`, and its buckets, as large as all gradients,
            # would lie there unused. What `prepare` does for evaluation is the rest: device and mixed precision.
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        super().create_optimizer_and_scheduler(num_training_steps=self.args.num_updates)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The parent's optimizer, with the value head's parameters in a group of their own learning rate."""
        given, head = self.optimizer, list(self._value_head.parameters())
        rate = self.args.value_learning_rate
        if given is not None:  # made by the user, who has no value head to put into it
            given.add_param_group({"params": head, **({"lr": rate} if rate is not None else {})})
            return given
        optimizer = super().create_optimizer(model)
        if rate is not None:
            _split_group(optimizer, set(head), rate)
        return optimizer

    @property
    def trained(self) -> TrainedModule:
        """Our module, out of what DeepSpeed wrapped around it."""
        return self.accelerator.unwrap_model(self.model if self._whole_model is None else self._whole_model)

    @contextmanager
    def _policy_as_model(self) -> Iterator[None]:
        """The parent saves and describes `self.model`: show it the bare policy."""
        if self._whole_model is not None:  # pushing to the hub, while saving, saves once more
            yield
            return
        policy = self.trained.policy
        self._whole_model, self.model = self.model, policy
        try:
            yield
        finally:
            self.model, self._whole_model = self._whole_model, None

    @property
    def network(self) -> Any:
        """What is called to learn: DeepSpeed's engine, or our module (see `Processes`)."""
        return self.model if self.is_deepspeed_enabled else self.trained

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Policy (or adapter) as an ordinary `from_pretrained` folder."""
        output_dir = output_dir or self.args.output_dir
        if self.is_deepspeed_enabled:
            self._save_gathered(output_dir, _internal_call)
            return
        with self._policy_as_model():
            # Past PPOTrainer's own version, which looks for the policy on the wrapper and misses it under DDP.
            super(PPOTrainer, self).save_model(output_dir, _internal_call)

    def _save_gathered(self, output_dir: str, _internal_call: bool) -> None:
        """The parents would save the engine's whole module, or look for the engine's settings on the policy."""
        state = _below("policy", self.accelerator.get_state_dict(self.model))
        if self.args.should_save:
            with self._policy_as_model():
                self._save(output_dir, state_dict=state)
                if self.args.push_to_hub and not _internal_call:
                    self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def value_head_state(self) -> dict[str, torch.Tensor]:
        """To be asked on all processes; under ZeRO-3 each holds a part."""
        if self.is_deepspeed_enabled:
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(self.trained.value_head.parameters())):
                return {name: tensor.detach().clone() for name, tensor in self.trained.value_head.state_dict().items()}
        return self.trained.value_head.state_dict()

    def load_deepspeed_checkpoint(self, checkpoint: str) -> None:
        """Weights and optimizer as DeepSpeed saved them, each process its part."""
        from transformers.integrations.deepspeed import deepspeed_load_checkpoint

        deepspeed_load_checkpoint(self.model_wrapped, checkpoint, load_module_strict=not self.is_peft_model)

    def load_trainer_state(self, checkpoint: str) -> None:
        """Counters, log history and the states of callbacks, as `Trainer` wrote them."""
        state = OnlineTrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
        state.is_local_process_zero = self.is_local_process_zero()
        state.is_world_process_zero = self.is_world_process_zero()
        self.state = state
        for callback in self.callback_handler.callbacks:
            saved = state.stateful_callbacks.get(type(callback).__name__)
            if isinstance(callback, ExportableState) and isinstance(saved, dict):
                for name, value in saved["attributes"].items():
                    setattr(callback, name, value)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        for callback in self.callback_handler.callbacks:  # those that were added after the trainer was made too
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
        super()._save_checkpoint(model, trial)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        with self._policy_as_model():
            super().create_model_card(*args, **kwargs)

    @contextmanager
    def null_ref_context(self) -> Iterator[None]:
        """The starting policy of a LoRA run: the same model with its adapter off."""
        with self.trained.policy.disable_adapter():
            yield


def _below(prefix: str, state: Any) -> dict[str, torch.Tensor]:
    """The part of a state dict under `prefix`; nothing on the processes that hold none."""
    return {
        name.removeprefix(f"{prefix}."): value
        for name, value in (state or {}).items()
        if name.startswith(f"{prefix}.")
    }


@contextmanager
def _environment_from(args: Any) -> Iterator[None]:
    """The parent builds its Accelerator from the environment; say there what `args` ask for, not the launcher."""
    wanted = {
        "ACCELERATE_MIXED_PRECISION": args.mixed_precision,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(args.gradient_accumulation_steps),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def silence_dropout(model: nn.Module) -> None:
    """Turn off every dropout, the functional ones too: old and new log-probs must come from one distribution.

    `Dropout` modules (LoRA's are such) and the float attributes that attention layers hand to `F.dropout`.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_p", "activation_dropout", "hidden_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _split_group(optimizer: torch.optim.Optimizer, parameters: set[nn.Parameter], lr: float) -> None:
    """Move `parameters` into groups of their own with learning rate `lr`, other settings kept."""
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if p in parameters]
        if moved:
            group["params"] = [p for p in group["params"] if p not in parameters]
            settings = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
            optimizer.add_param_group({"params": moved, "lr": lr, **settings})
