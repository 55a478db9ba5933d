"""The contract with TRL and transformers.Trainer that ppo_trl.py, ppo_own.py and trl_bridge.py rely on."""

import dataclasses
import inspect
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from toy import ColourTask, quiet_config
from vlms import save_family

import trl_gtr
from trl_gtr.distributed import ppo_own
from trl_gtr.distributed.ppo_base import PPOBase, PPOConfig, PPOTrainer, trl_has_ppo
from trl_gtr.distributed.trl_bridge import PPOBridge, _split_group, silence_dropout

SOURCE = inspect.getsource(PPOTrainer.__init__)
only_with_trl_ppo = pytest.mark.skipif(not trl_has_ppo(), reason="this TRL ships no PPO trainer")


def test_the_trainer_is_trls_own_where_trl_has_one():
    assert issubclass(trl_gtr.GTRTrainer, trl_gtr.PPOTrainer)
    assert trl_gtr.PPOTrainer is PPOTrainer
    module = "trl.experimental.ppo.ppo_trainer" if trl_has_ppo() else "trl_gtr.distributed.ppo_own"
    assert PPOTrainer.__module__ == module
    assert issubclass(trl_gtr.GTRConfig, PPOConfig)


def test_both_bases_have_the_same_interface():
    wanted = list(inspect.signature(ppo_own.PPOBase.__init__).parameters)
    assert list(inspect.signature(PPOBase.__init__).parameters) == wanted


def test_both_configs_have_the_same_fields_and_defaults():
    """A configuration means the same under every TRL, and what is refused is refused with the same words."""
    own = {f.name: f.default for f in dataclasses.fields(ppo_own.PPOConfig)}
    theirs = {f.name: f.default for f in dataclasses.fields(PPOConfig) if f.name != "world_size"}
    assert own == theirs


def test_the_import_is_silent():
    """TRL's warning about its experimental API is ours to deal with, not the user's."""
    code = "import warnings; warnings.simplefilter('always'); import trl_gtr; trl_gtr.GTRTrainer"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0
    assert "experimental" not in run.stderr


@only_with_trl_ppo
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


@only_with_trl_ppo
def test_the_optimizer_is_made_before_anything_is_prepared():
    """Our module takes its place in create_optimizer_and_scheduler: it must come first."""
    assert SOURCE.index("self.create_optimizer_and_scheduler(") < SOURCE.index("accelerator.prepare(")


@only_with_trl_ppo
def test_the_parent_builds_its_accelerator_from_the_environment_alone():
    assert "Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)" in SOURCE


@only_with_trl_ppo
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
        "push_to_hub",
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


@only_with_trl_ppo
def test_what_the_parent_forgets_is_made_up_for_below_it_only():
    assert not hasattr(PPOTrainer, "is_distributed_loading_by_transformers")
    assert PPOBridge.is_distributed_loading_by_transformers is False


def test_the_environment_does_not_decide_the_accumulation(monkeypatch, toy_checkpoint, tmp_path):
    """`accelerate launch` may have set the variable; the settings of the run are those that count."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    args = quiet_config(tmp_path, per_device_train_batch_size=2, mini_batch_size=4)
    trainer = trl_gtr.GTRTrainer(toy_checkpoint, args, ColourTask(), trl_gtr.ExpertCorrector())
    assert trainer.accelerator.gradient_accumulation_steps == 2
    assert os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "1"
