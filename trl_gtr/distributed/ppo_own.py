"""PPO trainer and config on top of TRL's base classes, for TRL 1.13 and newer, which have none.

The interface is the part of TRL 1.12's `PPOTrainer` that this library uses. Unlike TRL's, it calls
`transformers.Trainer`'s constructor, so everything `Trainer` relies on is there.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from accelerate import Accelerator
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_callback import ExportableState
from trl.models.utils import prepare_deepspeed
from trl.trainer.base_config import _BaseConfig
from trl.trainer.base_trainer import _BaseTrainer

RANK_SEED_STRIDE = 100_003
"""Seed offset between ranks; the same as in TRL 1.12."""


@dataclass
class OnlineTrainerState(TrainerState):
    """`TrainerState` that also counts episodes."""

    episode: int = 0


@dataclass
class PPOConfig(_BaseConfig):
    """The fields of TRL 1.12's `PPOConfig`. `GTRConfig` overrides the defaults of those that it uses."""

    learning_rate: float = field(default=3e-6, metadata={"help": "Learning rate of AdamW."})
    num_ppo_epochs: int = field(default=4, metadata={"help": "Passes over each rollout."})
    temperature: float = field(default=0.7, metadata={"help": "Sampling temperature."})
    kl_coef: float = field(default=0.05, metadata={"help": "Weight of the KL penalty to the starting policy."})
    kl_estimator: Literal["k1", "k3"] = field(default="k1", metadata={"help": "Estimator of that KL."})
    cliprange: float = field(default=0.2, metadata={"help": "Clip range of the probability ratio."})
    cliprange_value: float = field(default=0.2, metadata={"help": "Clip range of the value."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    gamma: float = field(default=1.0, metadata={"help": "Discount."})
    lam: float = field(default=0.95, metadata={"help": "λ of GAE."})
    ds3_gather_for_generation: bool = field(
        default=True, metadata={"help": "ZeRO-3: gather the policy's weights to generate."}
    )
    model_adapter_name: str | None = field(default=None, metadata={"help": "Name of the trained adapter."})

    # Unused here. They exist so that a TRL 1.12 config gets the same error on every version. (Its
    # `world_size` doesn't: a field of that name would hide the property of `TrainingArguments`.)
    dataset_num_proc: int | None = None
    num_mini_batches: int = 1
    total_episodes: int | None = None
    local_rollout_forward_batch_size: int = 64
    num_sample_generations: int = 10
    response_length: int = 53
    stop_token: Literal["eos"] | None = None
    stop_token_id: int | None = None
    missing_eos_penalty: float | None = None
    sft_model_path: str = "EleutherAI/pythia-160m"
    reward_model_path: str = "EleutherAI/pythia-160m"
    ref_adapter_name: str | None = None
    whiten_rewards: bool = False
    num_total_batches: int | None = None
    micro_batch_size: int | None = None
    local_batch_size: int | None = None
    batch_size: int | None = None
    local_mini_batch_size: int | None = None
    mini_batch_size: int | None = None


class PPOTrainer(_BaseTrainer):
    """Trains the module built by [`PPOTrainer.make_module`]; subclasses provide the training loop.

    Args:
        args: The hyper-parameters.
        model: The policy.
        processing_class: Its processor.
        callbacks: Additional `TrainerCallback`s.
        optimizers: Optimizer and scheduler, created from `args` by default.
        peft_config: Train an adapter instead of the model.
    """

    _tag_names = ["trl", "ppo"]  # noqa: RUF012
    _name = "PPO"
    model: Any
    optimizer: Any

    def __init__(
        self,
        args: Any,
        model: PreTrainedModel,
        processing_class: Any,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
    ) -> None:
        self.policy_model: Any = model if peft_config is None else get_peft_model(model, peft_config)
        self.is_peft_model = isinstance(self.policy_model, PeftModel)
        self.ref_model = self.make_reference(args)
        config = self.policy_model.config
        use_cache = getattr(config, "use_cache", None)
        with environment_from(args):
            super().__init__(
                model=self.make_module(self.policy_model, args),
                args=args,
                eval_dataset=[],  # evaluation plays episodes, but `eval_strategy` requires a dataset
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
            )
        # Undo `Trainer`'s change to the model's config, which would be saved.
        if use_cache is None:
            del config.use_cache
        else:
            config.use_cache = use_cache
        self.state = OnlineTrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=[
                each for each in (*self.callback_handler.callbacks, self.control) if isinstance(each, ExportableState)
            ],
        )
        self._prepare()

    def make_module(self, policy: Any, args: Any) -> nn.Module:
        """Build the module to train: the policy, or a module that contains it."""
        raise NotImplementedError

    def make_reference(self, args: Any) -> Any:
        """A frozen copy of the starting policy, if the KL penalty needs one; adapters don't."""
        if args.kl_coef == 0 or self.is_peft_model:
            return None
        if is_deepspeed_zero3_enabled():
            raise ValueError("`kl_coef` needs a copy of the full model, which ZeRO-3 shards: train an adapter.")
        return copy.deepcopy(self.policy_model).eval().requires_grad_(False)

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator whose `backward` divides by the accumulation steps, as `Trainer`'s loop would."""
        self.accelerator = Accelerator(
            gradient_accumulation_steps=self.args.gradient_accumulation_steps,
            mixed_precision=self.args.mixed_precision,
        )
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = getattr(self.accelerator.state, "deepspeed_plugin", None) is not None
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def _prepare(self) -> None:
        """Create optimizer and scheduler, and wrap the module as the launcher requires."""
        args = self.args
        self.create_optimizer_and_scheduler(num_training_steps=args.num_updates)
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None:  # DeepSpeed would get it from a dataloader, but there is none
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
        torch.manual_seed(args.seed)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        torch.manual_seed(args.seed + self.accelerator.process_index * RANK_SEED_STRIDE)
        self.callback_handler.optimizer = self.optimizer
        self.callback_handler.lr_scheduler = self.lr_scheduler
        if self.ref_model is not None:
            self.ref_model = (
                prepare_deepspeed(self.ref_model, self.accelerator)
                if self.is_deepspeed_enabled
                else self.ref_model.to(self.accelerator.device)
            )


PPOBase = PPOTrainer


@contextmanager
def environment_from(args: Any) -> Iterator[None]:
    """Set environment variables from `args`, since `Accelerator` prefers them over its arguments."""
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
