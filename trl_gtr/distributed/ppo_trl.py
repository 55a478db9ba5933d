"""TRL 1.12's PPO trainer (the last one), with stubs for what only its own training loop needs.

To drop TRL 1.12, delete this file, the branch in `ppo_base.py` that imports it and `_TRL_PPO` in `scripts/options.py`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .ppo_own import environment_from

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*trl.experimental.*")
    from trl.experimental.ppo import PPOConfig, PPOTrainer
    from trl.experimental.ppo.ppo_trainer import OnlineTrainerState

__all__ = ["OnlineTrainerState", "PPOBase", "PPOConfig", "PPOTrainer"]


class _ValueStandIn(nn.Module):
    """Placeholder value model while the parent wraps it; replaced by the real module right away."""

    base_model_prefix = "trunk"

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Identity()


class _FrozenStandIn(nn.Module):
    """Placeholder reward model and, without a KL penalty, reference model: one frozen number."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.unused = nn.Parameter(torch.zeros(1), requires_grad=False)


class _SizedDataset(torch.utils.data.Dataset):
    """Placeholder train dataset; the data come from the environments."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class PPOBase(PPOTrainer):
    """`PPOTrainer` with the interface of `ppo_own.PPOTrainer`: no reward model, no dataset, a custom module."""

    # The parent never calls `Trainer.__init__`, but its methods need these attributes.
    is_distributed_loading_by_transformers = False
    is_fsdp_xla_v1_enabled = False
    label_names: list[str] = []  # noqa: RUF012

    def __init__(
        self,
        args: Any,
        model: PreTrainedModel,
        processing_class: Any,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
    ) -> None:
        eos = model.generation_config.eos_token_id
        with environment_from(args):
            super().__init__(
                args=args,
                processing_class=processing_class,
                model=model,
                # With kl_coef, the parent creates the reference (a copy, or the model with its adapter disabled).
                ref_model=None if args.kl_coef > 0 else _FrozenStandIn(model.config),
                reward_model=_FrozenStandIn(model.config),
                train_dataset=_SizedDataset(args.per_device_train_batch_size * args.gradient_accumulation_steps),
                value_model=_ValueStandIn(),
                data_collator=list,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
            )
        if args.kl_coef == 0:
            self.ref_model = None
        model.generation_config.eos_token_id = eos  # the parent overwrites it with its stop token
        args.total_episodes = None

    def make_module(self, policy: Any, args: Any) -> nn.Module:
        """Build the module to train: the policy, or a module that contains it."""
        raise NotImplementedError

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Called by the parent before `accelerator.prepare`, the only chance to insert our module."""
        self.model = self.make_module(self.policy_model, self.args)
        super().create_optimizer_and_scheduler(num_training_steps=self.args.num_updates)
