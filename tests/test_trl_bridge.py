"""The contract with trl.experimental.ppo and transformers.Trainer that trl_bridge.py relies on."""

import inspect

import pytest
import torch
from torch import nn
from trl.experimental.ppo import PPOConfig, PPOTrainer
from vlms import save_family

from trl_gtr.trl_bridge import PPOBridge, _split_group, silence_dropout

SOURCE = inspect.getsource(PPOTrainer.__init__)


def test_the_constructor_still_takes_what_we_hand_it():
    parameters = inspect.signature(PPOTrainer.__init__).parameters
    assert list(parameters)[1:8] == [
        "args",
        "processing_class",
        "model",
        "ref_model",
        "reward_model",
        "train_dataset",
        "value_model",
    ]
    assert {"data_collator", "optimizers", "callbacks", "peft_config"} <= set(parameters)


def test_the_optimizer_is_made_before_anything_is_prepared():
    """Our module takes its place in create_optimizer_and_scheduler: it must come first."""
    assert SOURCE.index("self.create_optimizer_and_scheduler(") < SOURCE.index("accelerator.prepare(")


def test_the_parent_builds_its_accelerator_from_the_environment_alone():
    assert "Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)" in SOURCE


def test_the_parent_never_runs_the_constructor_of_trainer():
    """If it starts to, the class attributes that stand in for it can go."""
    assert "super().__init__" not in SOURCE


@pytest.mark.parametrize(
    "name",
    [
        "_save_checkpoint",
        "_load_optimizer_and_scheduler",
        "_load_rng_state",
        "_load_callback_state",
        "create_optimizer",
        "create_optimizer_and_scheduler",
        "create_model_card",
        "save_model",
        "log",
        "add_callback",
        "remove_callback",
    ],
)
def test_the_methods_we_call_exist(name):
    assert callable(getattr(PPOTrainer, name))


def test_config_fields_that_we_override_exist():
    fields = PPOConfig.__dataclass_fields__
    for name in ("gamma", "lam", "cliprange", "cliprange_value", "vf_coef", "kl_coef", "kl_estimator", "temperature"):
        assert name in fields


def test_silence_dropout_finds_modules_and_floats():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_dropout = 0.3
            self.dropout = nn.Dropout(0.2)
            self.scale = 0.5

    module = nn.Sequential(Attention(), nn.Dropout(0.1))
    silence_dropout(module)
    assert module[0].attention_dropout == 0.0
    assert module[0].dropout.p == 0.0
    assert module[1].p == 0.0
    assert module[0].scale == 0.5


def test_silence_dropout_makes_a_training_model_exact(tmp_path):
    """Every kind of dropout that a LLaVA's config can ask for."""
    from transformers import AutoModelForImageTextToText

    save_family("llava_next", tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    for module in model.modules():
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.5)
    ids = torch.randint(10, 100, (2, 12))
    model.train()
    noisy = [model(input_ids=ids).logits for _ in range(2)]
    assert not torch.equal(*noisy)
    silence_dropout(model)
    exact = [model(input_ids=ids).logits for _ in range(2)]
    assert torch.equal(*exact)


def test_the_value_head_has_a_learning_rate_of_its_own():
    trunk, head = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(
        [{"params": [trunk.weight, head.weight], "weight_decay": 0.1}, {"params": [trunk.bias, head.bias]}], lr=1e-5
    )
    _split_group(optimizer, set(head.parameters()), lr=1e-3)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert rates == {id(trunk.weight): 1e-5, id(trunk.bias): 1e-5, id(head.weight): 1e-3, id(head.bias): 1e-3}
    assert decays[id(head.weight)] == 0.1


def test_stand_ins_are_class_attributes_of_the_bridge_only():
    assert not hasattr(PPOTrainer, "is_distributed_loading_by_transformers")
    assert PPOBridge.is_distributed_loading_by_transformers is False
