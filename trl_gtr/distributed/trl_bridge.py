"""Where the PPO trainer that `ppo_base` chose meets a policy and a value head on one shared trunk.

[`PPOBridge`] makes the one module that is trained, and its optimizer; it saves the policy as an ordinary
`from_pretrained` folder, under DDP and DeepSpeed too.
`tests/distributed/test_trl_bridge.py` holds the contract with TRL and transformers that these lines rely on.
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
    """Policy and value head (or none) as one module, so that DDP and DeepSpeed see one forward with all parameters.

    It takes the place of TRL's `PolicyAndValueWrapper`, which runs a second trunk for the value.
    """

    policy: Any
    value_head: ValueHead | None

    def __init__(self, policy: Any, value_head: ValueHead | None, detach_value: bool) -> None:
        super().__init__(policy, value_head, detach_value)
        self.config = policy.config  # read by DeepSpeed's and the hub's code

    # TRL would turn checkpointing off around generation and on again behind it, each time with hooks of its own. A
    # model in evaluation mode doesn't checkpoint anyway: tell it that there is nothing to turn off.
    is_gradient_checkpointing = False


class PPOBridge(PPOBase):
    """A PPO trainer over one module with a shared trunk. Its `train` is left to the subclass."""

    _whole_model: Any = None
    model: Any
    control: Any
    ref_model: Any
    lr_scheduler: Any

    def __init__(
        self, args: Any, model: PreTrainedModel, value_head: ValueHead | None, processing_class: Any, **kwargs: Any
    ):
        self._value_head = value_head
        # A fresh adapter that is off is the start of the run; one that was given, or begins elsewhere, is not.
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
            # Non-reentrant: otherwise the policy's frozen parts (LoRA) cut the gradient.
            kwargs = {"use_reentrant": False, **(args.gradient_checkpointing_kwargs or {})}
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        return TrainedModule(policy, self._value_head, detach_value=not args.value_gradient_to_trunk)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None:  # it clips by itself; nobody else tells it how much
            plugin.deepspeed_config["gradient_clipping"] = self.args.max_grad_norm
        else:
            # Without DDP's wrapper: gradients are averaged by `Processes`, and its buckets, as large as all gradients,
            # would lie there unused. What `prepare` does for evaluation is the rest: device and mixed precision.
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        given = self.lr_scheduler
        if given is not None:
            _check_scheduler(given, self.optimizer)
        super().create_optimizer_and_scheduler(num_training_steps)
        if given is not None and self._value_head is not None:
            self.lr_scheduler = ScheduleWithValueHead(given)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The parent's optimizer, with the value head's parameters in a group of their own learning rate."""
        given, rate = self.optimizer, self.args.value_learning_rate
        head = [] if self._value_head is None else list(self._value_head.parameters())
        if given is not None:  # made by the user, who has no value head to put into it
            _check_optimizer(given, self.policy_model)
            if head:
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
        """Policy (or adapter) as an ordinary `from_pretrained` folder, with the value head beside it."""
        output_dir, value_head = output_dir or self.args.output_dir, self.value_head_state()
        if self.is_deepspeed_enabled:
            self._save_gathered(output_dir, _internal_call)
        else:
            with self._policy_as_model():
                # Past TRL's own version, which looks for the policy on the wrapper and misses it under DDP.
                Trainer.save_model(self, output_dir, _internal_call)
        if self.args.should_save and value_head is not None:
            weights.save_value_head(output_dir, value_head)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if not self.is_peft_model:
            super()._save(output_dir, state_dict)
            return
        # The parent would save every adapter, and one that isn't named "default" where no loader finds it.
        output_dir = output_dir or self.args.output_dir
        adapters.save_adapter(self.model, output_dir, state_dict)
        self.processing_class.save_pretrained(output_dir)
        torch.save(self.args, Path(output_dir, TRAINING_ARGS_NAME))

    def _save_gathered(self, output_dir: str, _internal_call: bool) -> None:
        """The parents would save the engine's whole module, or look for the engine's settings on the policy."""
        state = _below("policy", self.accelerator.get_state_dict(self.model))
        if self.args.should_save:
            with self._policy_as_model():
                self._save(output_dir, state_dict=state)
                if self.args.push_to_hub and not _internal_call:
                    self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def value_head_state(self) -> dict[str, torch.Tensor] | None:
        """`None` without a value head. To be asked on all processes; under ZeRO-3 each holds a part."""
        head = self.trained.value_head
        if head is None:
            return None
        if self.is_deepspeed_enabled:
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(head.parameters())):
                return {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
        return head.state_dict()

    def load_checkpoint(self, checkpoint: str) -> None:
        """What `_save_checkpoint` wrote except the random states: weights, optimizer, schedule, counters."""
        if self.is_deepspeed_enabled:
            deepspeed_load_checkpoint(self.model_wrapped, checkpoint, load_module_strict=not self.is_peft_model)
        else:
            weights.load_policy_weights(checkpoint, self.trained.policy)
            if self.trained.value_head is not None:
                weights.load_value_head(checkpoint, self.trained.value_head)
        self._load_optimizer_and_scheduler(checkpoint)
        self._load_scaler(checkpoint)
        if isinstance(self.lr_scheduler, LambdaLR):
            # This run's schedule, which is another one if the run was made longer.
            for group, base, factor in zip(
                self.optimizer.param_groups, self.lr_scheduler.base_lrs, self.lr_scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * factor(self.lr_scheduler.last_epoch)
            self.lr_scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        self._load_trainer_state(checkpoint)

    def _load_trainer_state(self, checkpoint: str) -> None:
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

    @contextmanager
    def null_ref_context(self) -> Iterator[None]:
        """The starting policy of a LoRA run: the same model with its adapter off, or as it was."""
        with adapters.reference_active(self.trained.policy):
            yield

    @contextmanager
    def reference_network(self) -> Iterator[nn.Module]:
        """The starting policy as a network: the adapter off, or the copy that the parent made."""
        if self.is_peft_model:
            with self.null_ref_context():
                yield self.network
            return
        with self.accelerator.autocast():  # the trained model is wrapped in it, the reference isn't
            yield PolicyWithValue(self.ref_model, None)


def _below(prefix: str, state: Any) -> dict[str, torch.Tensor]:
    """The part of a state dict under `prefix`; nothing on the processes that hold none."""
    return {
        name.removeprefix(f"{prefix}."): value
        for name, value in (state or {}).items()
        if name.startswith(f"{prefix}.")
    }


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


class ScheduleWithValueHead:
    """A scheduler that was made before the value head's group joined its optimizer, as the last one.

    The scheduler goes on to see the groups that it was made for; the head's learning rate follows that of the first.
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
            "The given optimizer holds none of the weights that are trained. Make it from `model.parameters()` of the "
            "very model that you pass; for an adapter make that with `get_peft_model` first, and leave `peft_config` "
            "out."
        )


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau waits for a measure that nobody hands it here: use another scheduler.")
    if scheduler.optimizer is not optimizer:
        raise ValueError("The given scheduler is of another optimizer: pass the two as `optimizers`.")


def _split_group(optimizer: torch.optim.Optimizer, parameters: set[nn.Parameter], lr: float) -> None:
    """Move `parameters` into groups of their own with learning rate `lr`, other settings kept."""
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if p in parameters]
        if moved:
            group["params"] = [p for p in group["params"] if p not in parameters]
            settings = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
            optimizer.add_param_group({"params": moved, "lr": lr, **settings})
