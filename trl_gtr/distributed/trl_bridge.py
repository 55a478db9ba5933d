"""Connects the PPO trainer from `ppo_base` to a policy and value head with a shared trunk.

[`PPOBridge`] builds the trained module and its optimizer, and saves the policy as an ordinary `from_pretrained`
folder, also under DDP and DeepSpeed.
`tests/distributed/test_trl_bridge.py` tests the assumptions made here about TRL and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from transformers import PreTrainedModel, Trainer
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState

from ..policy import adapters, weights
from ..policy.network import PolicyWithValue, ValueHead
from .ppo_base import OnlineTrainerState, PPOBase


class TrainedModule(PolicyWithValue):
    """Policy and optional value head as one module, so that DDP and DeepSpeed see one forward with all parameters.

    Replaces TRL's `PolicyAndValueWrapper`, which runs a second trunk for the value.
    """

    policy: Any
    value_head: ValueHead | None

    def __init__(self, policy: Any, value_head: ValueHead | None, detach_value: bool) -> None:
        super().__init__(policy, value_head, detach_value)
        self.config = policy.config  # read by DeepSpeed and huggingface_hub

    # TRL would turn checkpointing off for generation and on again afterwards, adding hooks each time. A model in eval
    # mode doesn't checkpoint anyway, so report that there is nothing to turn off.
    is_gradient_checkpointing = False


class PPOBridge(PPOBase):
    """A PPO trainer for a module with a shared trunk. Subclasses implement `train`."""

    _whole_model: Any = None
    model: Any
    control: Any
    ref_model: Any
    lr_scheduler: Any

    def __init__(
        self, args: Any, model: PreTrainedModel, value_head: ValueHead | None, processing_class: Any, **kwargs: Any
    ):
        self._value_head = value_head
        # Disabling a new adapter gives the starting policy, unless it was passed in or doesn't start at the base.
        fresh = kwargs.get("peft_config")
        self._copies_start = args.kl_coef > 0 and not (fresh is not None and adapters.starts_at_base(fresh))
        super().__init__(args, model, processing_class, **kwargs)
        self.model_wrapped = self.model
        if self.is_deepspeed_enabled:
            self.deepspeed = self.model

    def make_module(self, policy: Any, args: Any) -> TrainedModule:
        if self.is_peft_model and self._copies_start:
            adapters.add_reference(policy)
        silence_dropout(policy)
        if args.gradient_checkpointing:
            # Non-reentrant, since frozen layers (LoRA) would otherwise stop the gradient.
            kwargs = {"use_reentrant": False, **(args.gradient_checkpointing_kwargs or {})}
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        return TrainedModule(policy, self._value_head, detach_value=not args.value_gradient_to_trunk)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None:  # DeepSpeed clips gradients itself; nothing else sets the norm
            plugin.deepspeed_config["gradient_clipping"] = self.args.max_grad_norm
        else:
            # Skip DDP's wrapper: `Processes` averages the gradients, and DDP's buckets, as large as all gradients,
            # would go unused. Evaluation mode does only the rest: device and mixed precision.
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        given = self.lr_scheduler
        if given is not None:
            _check_scheduler(given, self.optimizer)
        super().create_optimizer_and_scheduler(num_training_steps)
        if given is not None and self._value_head is not None:
            self.lr_scheduler = ScheduleWithValueHead(given)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The parent's optimizer, with a separate learning rate for the value head."""
        given, rate = self.optimizer, self.args.value_learning_rate
        head = [] if self._value_head is None else list(self._value_head.parameters())
        if given is not None:  # created by the user, without the value head
            _check_optimizer(given, self.policy_model)
            if head:
                given.add_param_group({"params": head, **({"lr": rate} if rate is not None else {})})
            return given
        optimizer = super().create_optimizer(model)
        if rate is not None:
            _split_group(optimizer, set(head), rate)
        # DeepSpeed drops empty groups, such as that of an adapter's biases; the schedule would still count them.
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    @property
    def trained(self) -> TrainedModule:
        """Our module, without DeepSpeed's wrapper."""
        return self.accelerator.unwrap_model(self.model if self._whole_model is None else self._whole_model)

    @contextmanager
    def _policy_as_model(self) -> Iterator[None]:
        """Make `self.model` the bare policy, for the parent to save and describe."""
        if self._whole_model is not None:  # pushing to the Hub while saving saves again
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
        """The module to call in training: DeepSpeed's engine or our module (see `Processes`)."""
        return self.model if self.is_deepspeed_enabled else self.trained

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or adapter) as an ordinary `from_pretrained` folder, plus the value head."""
        output_dir, value_head = output_dir or self.args.output_dir, self.value_head_state()
        if self.is_deepspeed_enabled:
            self._save_gathered(output_dir, _internal_call)
        else:
            with self._policy_as_model():
                # Bypass TRL's override, which looks for the policy on the wrapper and fails under DDP.
                Trainer.save_model(self, output_dir, _internal_call)
        if self.args.should_save and value_head is not None:
            weights.save_value_head(output_dir, value_head)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if not self.is_peft_model:
            super()._save(output_dir, state_dict)
            return
        # The parent would save every adapter, and put any not named "default" where loaders don't look.
        output_dir = output_dir or self.args.output_dir
        adapters.save_adapter(self.model, output_dir, state_dict)
        self.processing_class.save_pretrained(output_dir)
        torch.save(self.args, Path(output_dir, TRAINING_ARGS_NAME))

    def _save_gathered(self, output_dir: str, _internal_call: bool) -> None:
        """The parents would save the engine's whole module, or expect its settings on the policy."""
        state = _below("policy", self.accelerator.get_state_dict(self.model))
        if self.args.should_save:
            with self._policy_as_model():
                self._save(output_dir, state_dict=state)
                if self.args.push_to_hub and not _internal_call:
                    self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def value_head_state(self) -> dict[str, torch.Tensor] | None:
        """`None` without a value head. Call on all processes, since ZeRO-3 shards it."""
        head = self.trained.value_head
        if head is None:
            return None
        if self.is_deepspeed_enabled:
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(head.parameters())):
                return {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
        return head.state_dict()

    def load_checkpoint(self, checkpoint: str) -> None:
        """Load what `_save_checkpoint` wrote, except random states: weights, optimizer, schedule, counters."""
        if self.is_deepspeed_enabled:
            deepspeed_load_checkpoint(self.model_wrapped, checkpoint, load_module_strict=not self.is_peft_model)
        else:
            weights.load_policy_weights(checkpoint, self.trained.policy)
            if self.trained.value_head is not None:
                weights.load_value_head(checkpoint, self.trained.value_head)
        self._load_optimizer_and_scheduler(checkpoint)
        self._load_scaler(checkpoint)
        if isinstance(self.lr_scheduler, LambdaLR):
            # Use this run's schedule, which differs from the saved one if the run was extended.
            for group, base, factor in zip(
                self.optimizer.param_groups, self.lr_scheduler.base_lrs, self.lr_scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * factor(self.lr_scheduler.last_epoch)
            self.lr_scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        self._load_trainer_state(checkpoint)

    def _load_trainer_state(self, checkpoint: str) -> None:
        """Load counters, log history and callback states, as saved by `Trainer`."""
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
        for callback in self.callback_handler.callbacks:  # including those added after construction
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
        # TRL's PPO trainer first draws the model card, which is only needed here if it is pushed with the checkpoint.
        save = super()._save_checkpoint if self.args.push_to_hub else partial(Trainer._save_checkpoint, self)
        save(model, trial)

    @contextmanager
    def null_ref_context(self) -> Iterator[None]:
        """Activate the starting policy of a LoRA run: the adapter disabled, or as it was at the start."""
        with adapters.reference_active(self.trained.policy):
            yield

    @contextmanager
    def reference_network(self) -> Iterator[nn.Module]:
        """The starting policy as a network: the adapter disabled, or the parent's copy."""
        if self.is_peft_model:
            with self.null_ref_context():
                yield self.network
            return
        with self.accelerator.autocast():  # the trained model is wrapped in it, the reference isn't
            yield PolicyWithValue(self.ref_model, None)


def _below(prefix: str, state: Any) -> dict[str, torch.Tensor]:
    """The part of a state dict under `prefix`; empty on processes without one."""
    return {
        name.removeprefix(f"{prefix}."): value
        for name, value in (state or {}).items()
        if name.startswith(f"{prefix}.")
    }


def silence_dropout(model: nn.Module) -> None:
    """Turn off all dropout: old and new log-probs must come from the same distribution.

    Covers `Dropout` modules (LoRA's too) and the float attributes that attention layers pass to `F.dropout`.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_p", "activation_dropout", "hidden_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


class ScheduleWithValueHead:
    """Wraps a scheduler created before the value head's parameter group was appended to its optimizer.

    The scheduler still sees only its original groups; the head's learning rate follows that of the first.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler
        head = scheduler.optimizer.param_groups[-1]
        head["initial_lr"] = head["lr"]
        self._follow()

    def _follow(self) -> None:
        first, head = self.scheduler.optimizer.param_groups[0], self.scheduler.optimizer.param_groups[-1]
        if first["initial_lr"]:
            head["lr"] = head["initial_lr"] * (first["lr"] / first["initial_lr"])

    def step(self) -> None:
        groups = self.scheduler.optimizer.param_groups
        head = groups.pop()
        try:
            self.scheduler.step()
        finally:
            groups.append(head)
        self._follow()

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.scheduler.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


def _check_optimizer(optimizer: torch.optim.Optimizer, policy: nn.Module) -> None:
    trained = {weight for weight in policy.parameters() if weight.requires_grad}
    if not any(weight in trained for group in optimizer.param_groups for weight in group["params"]):
        raise ValueError(
            "The given optimizer holds none of the weights that are trained. Create it from `model.parameters()` of "
            "the model you pass; to train an adapter, call `get_peft_model` first and leave out `peft_config`."
        )


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau needs a metric, which is not available here: use another scheduler.")
    if scheduler.optimizer is not optimizer:
        raise ValueError("The given scheduler belongs to another optimizer: pass both as `optimizers`.")


def _split_group(optimizer: torch.optim.Optimizer, parameters: set[nn.Parameter], lr: float) -> None:
    """Move `parameters` into separate groups with learning rate `lr`, keeping other settings."""
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if p in parameters]
        if moved:
            group["params"] = [p for p in group["params"] if p not in parameters]
            settings = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
            optimizer.add_param_group({"params": moved, "lr": lr, **settings})
