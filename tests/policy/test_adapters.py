"""Adapters: what is saved is the agent that was trained, and the reference is the agent that it began as."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from toy import COLOURS, PROMPT, ColourTask, build_toy_model, quiet_config
from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.policy.adapters import ensure_named_base
from trl_gtr.policy.loading import chat, load_policy, lora_target_modules
from trl_gtr.trainer import GTRTrainer


def lora(model, **settings):
    return LoraConfig(**{"r": 4, "target_modules": lora_target_modules(model), **settings})


@pytest.fixture(scope="module")
def adapter(toy_checkpoint, tmp_path_factory):
    """Folder of an agent as supervised learning with LoRA leaves it: far from its base."""
    folder = tmp_path_factory.mktemp("adapter")
    model, processor = load_policy(toy_checkpoint)
    torch.manual_seed(1)
    get_peft_model(model, lora(model, init_lora_weights=False)).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make_trainer(toy_checkpoint, tmp_path):
    def make(model, peft_config=None, optimizers=(None, None), task=None, **overrides):
        settings = {"output_dir": tmp_path / "run", "learning_rate": 1e-3, "num_ppo_epochs": 2, **overrides}
        return GTRTrainer(
            model,
            quiet_config(**settings),
            task or ColourTask(),
            ExpertCorrector(),
            processing_class=AutoProcessor.from_pretrained(toy_checkpoint),
            peft_config=peft_config,
            optimizers=optimizers,
        )

    return make


@torch.no_grad()
def logits(model, processor):
    images = [[np.full((28, 28, 3), colour, np.uint8)] for colour in COLOURS.values()]
    return model.eval()(**processor(text=[chat(processor, PROMPT)] * 4, images=images, return_tensors="pt")).logits


def deviation(trainer, folder):
    """Of the agent in `folder` from the trained one."""
    trained = logits(trainer.trained.policy, trainer.processing_class)
    return float((logits(*load_policy(folder)) - trained).abs().max())


# --- the start of a run, by how the model is given: (model, peft_config) ---------------------------------------------


def whole_model(base, adapter):
    return base, None


def fresh_adapter(base, adapter):
    return base, lora(load_policy(base)[0])


def fresh_adapter_on_an_adapters_folder(base, adapter):
    return adapter, lora(load_policy(base)[0])


def fresh_adapter_on_a_loaded_adapter(base, adapter):
    model, _ = load_policy(adapter)
    return model, lora(model)


def fresh_adapter_on_a_model_merged_by_hand(base, adapter):
    model = PeftModel.from_pretrained(load_policy(base)[0], adapter).merge_and_unload()
    return model, lora(model)


def fresh_adapter_on_a_model_built_here(base, adapter):
    model, _ = build_toy_model(seed=7)
    return model, lora(model)


def given_adapter(base, adapter):
    return PeftModel.from_pretrained(load_policy(base)[0], adapter, is_trainable=True), None


def given_adapter_of_another_name(base, adapter):
    model = load_policy(base)[0]
    return PeftModel.from_pretrained(model, adapter, adapter_name="agent", is_trainable=True), None


def given_adapter_beside_another(base, adapter):
    model = get_peft_model(load_policy(base)[0], lora(load_policy(base)[0], init_lora_weights=False))
    model.load_adapter(adapter, "agent", is_trainable=True)
    model.set_adapter("agent")
    return model, None


def given_adapter_on_a_merged_one(base, adapter):
    model, _ = load_policy(adapter)
    return get_peft_model(model, lora(model, init_lora_weights=False)), None


def given_adapter_that_has_changed_its_base(base, adapter):
    """PiSSA takes the adapter's part out of the base's weights."""
    model, _ = load_policy(adapter)
    return get_peft_model(model, lora(model, init_lora_weights="pissa")), None


def fresh_adapter_that_changes_its_base(base, adapter):
    return adapter, lora(load_policy(base)[0], init_lora_weights="pissa")


def fresh_adapter_with_a_head_of_its_own(base, adapter):
    return adapter, lora(load_policy(base)[0], modules_to_save=["lm_head"])


STARTS = [
    whole_model,
    fresh_adapter,
    fresh_adapter_on_an_adapters_folder,
    fresh_adapter_on_a_loaded_adapter,
    fresh_adapter_on_a_model_merged_by_hand,
    fresh_adapter_on_a_model_built_here,
    fresh_adapter_that_changes_its_base,
    fresh_adapter_with_a_head_of_its_own,
    given_adapter,
    given_adapter_of_another_name,
    given_adapter_beside_another,
    given_adapter_on_a_merged_one,
    given_adapter_that_has_changed_its_base,
]


# --- saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS)
def test_what_is_saved_is_what_was_trained(make_trainer, toy_checkpoint, adapter, tmp_path, start):
    trainer = make_trainer(*start(toy_checkpoint, adapter), save_strategy="steps", total_env_steps=16, kl_coef=0.1)
    before = logits(trainer.trained.policy, trainer.processing_class)
    trainer.train()
    assert (logits(trainer.trained.policy, trainer.processing_class) - before).abs().max() > 0.01
    trainer.save_model()
    trainer.save_model(str(tmp_path / "elsewhere"))
    for folder in ("run", "run/checkpoint-1", "elsewhere"):
        assert deviation(trainer, tmp_path / folder) < 1e-4, folder
        if not (tmp_path / folder / "config.json").is_file():  # peft's own way
            named = json.loads((tmp_path / folder / "adapter_config.json").read_text())["base_model_name_or_path"]
            base = AutoModelForImageTextToText.from_pretrained(named)
            loaded = PeftModel.from_pretrained(base, str(tmp_path / folder))
            trained = logits(trainer.trained.policy, trainer.processing_class)
            assert (logits(loaded, trainer.processing_class) - trained).abs().max() < 1e-4, folder
        assert not [path for path in (tmp_path / folder).rglob("*") if "reference" in path.name]


@pytest.mark.parametrize(
    "start", [fresh_adapter_on_an_adapters_folder, given_adapter_of_another_name, given_adapter_on_a_merged_one]
)
def test_a_run_on_an_adapter_is_resumed_as_it_was(make_trainer, toy_checkpoint, adapter, tmp_path, start):
    def trainer(folder):
        torch.manual_seed(3)
        given = start(toy_checkpoint, adapter)
        saving = {"save_strategy": "steps", "save_steps": 2, "total_env_steps": 64, "kl_coef": 0.1}
        options = {"task": ColourTask(length=3), "on_hopeless": "warn"}  # adapters drawn at random
        return make_trainer(*given, output_dir=tmp_path / folder, **saving, **options)

    whole, resumed = trainer("whole"), trainer("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    final, again = whole.trained.state_dict(), resumed.trained.state_dict()
    assert all(torch.equal(final[name], again[name]) for name in final)
    assert [e["loss/kl"] for e in whole.state.log_history] == [e["loss/kl"] for e in resumed.state.log_history]
    assert deviation(resumed, tmp_path / "resumed" / "checkpoint-4") < 1e-4


def bases(folder):
    return sorted(path.name for path in folder.glob("*base_model*"))


def test_the_base_is_saved_only_where_its_name_does_not_lead_to_it(
    make_trainer, toy_checkpoint, adapter, tmp_path, caplog
):
    for start in (whole_model, fresh_adapter, given_adapter, given_adapter_of_another_name):
        make_trainer(*start(toy_checkpoint, adapter))
    assert bases(tmp_path / "run") == []
    assert "could not be found" not in caplog.text
    for _ in range(2):  # a resumed run finds the one of the first
        make_trainer(*fresh_adapter_on_an_adapters_folder(toy_checkpoint, adapter))
        (saved,) = bases(tmp_path / "run")
        (tmp_path / "run" / saved / "mark").touch()
    assert (tmp_path / "run" / saved / "mark").is_file()
    told = (
        f"could not be found under the name {toy_checkpoint!r}, so they are saved to {tmp_path / 'run' / saved}. The"
    )
    assert caplog.text.count(told) == 1
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name.startswith(".")]
    # Another base doesn't take its place: earlier checkpoints of this folder need theirs.
    make_trainer(*fresh_adapter_on_a_model_built_here(toy_checkpoint, adapter))
    assert len(bases(tmp_path / "run")) == 2


def test_a_base_in_half_precision_is_known_by_its_name(make_trainer, toy_checkpoint, tmp_path):
    half = tmp_path / "half"
    AutoModelForImageTextToText.from_pretrained(toy_checkpoint, dtype=torch.float16).save_pretrained(half)
    AutoProcessor.from_pretrained(toy_checkpoint).save_pretrained(half)
    for dtype in (torch.float32, torch.float16):
        model, processor = load_policy(half, dtype=dtype)
        ensure_named_base(model, lora(model), processor, tmp_path / "run")
    assert bases(tmp_path / "run") == []


def test_a_run_that_was_moved_finds_its_base(make_trainer, toy_checkpoint, adapter, tmp_path):
    given = fresh_adapter_on_an_adapters_folder(toy_checkpoint, adapter)
    trainer = make_trainer(*given, save_strategy="steps", total_env_steps=16)
    trainer.train()
    trainer.save_model()
    shutil.move(tmp_path / "run", tmp_path / "moved")
    for folder in ("moved", "moved/checkpoint-1"):
        assert deviation(trainer, tmp_path / folder) < 1e-4
    shutil.rmtree(tmp_path / "moved" / bases(tmp_path / "moved")[0])
    with pytest.raises(
        ValueError, match=r"adapter.*base_model-\w+, which is neither .* nor next to the adapter: move it there"
    ):
        load_policy(tmp_path / "moved")


def test_an_adapter_is_not_merged_into_quantized_weights(adapter):
    with pytest.raises(ValueError, match=r"can't be merged into quantized weights.*save_pretrained"):
        load_policy(adapter, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


# --- the reference ---------------------------------------------------------------------------------------------------


def random_adapter(base, adapter):
    return base, lora(load_policy(base)[0], init_lora_weights=False)


@pytest.mark.parametrize("start", [*STARTS, random_adapter])
def test_the_kl_before_the_first_step_is_zero(make_trainer, toy_checkpoint, adapter, start):
    # One optimizer step in each update: the first one's KL is that of the start.
    one_step = {"num_ppo_epochs": 1, "per_device_train_batch_size": 16, "total_env_steps": 32}
    trainer = make_trainer(*start(toy_checkpoint, adapter), kl_coef=0.1, learning_rate=1e-2, **one_step)
    trainable = {name for name, weight in trainer.trained.named_parameters() if weight.requires_grad}
    trainer.train()
    first, second = (entry["loss/kl"] for entry in trainer.state.log_history)
    assert first < 1e-6
    assert second > 1e-5
    assert trainable == {name for name, weight in trainer.trained.named_parameters() if weight.requires_grad}


def test_a_reference_is_held_only_where_a_kl_is_asked_for(make_trainer, toy_checkpoint, adapter):
    trainer = make_trainer(*given_adapter(toy_checkpoint, adapter))
    assert list(trainer.trained.policy.peft_config) == ["default"]
    trainer = make_trainer(*fresh_adapter(toy_checkpoint, adapter), kl_coef=0.1)
    assert list(trainer.trained.policy.peft_config) == ["default"]  # off, it is the start


def test_a_reference_is_not_counted_among_the_agents_weights(make_trainer, toy_checkpoint, adapter, tmp_path):
    counts = []
    for kl_coef in (0.0, 0.1):
        trainer = make_trainer(*given_adapter(toy_checkpoint, adapter), kl_coef=kl_coef, total_env_steps=16)
        trainer.train()
        counts.append(json.loads((tmp_path / "run" / "run.json").read_text())["parameters"])
    assert counts[0] == counts[1] > 0


def test_weights_that_were_frozen_by_hand_stay_frozen(make_trainer, toy_checkpoint, adapter):
    model, _ = given_adapter(toy_checkpoint, adapter)
    for name, weight in model.named_parameters():
        if "lora_A" in name:
            weight.requires_grad_(False)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters() if "lora_A" in name}
    trainer = make_trainer(model, kl_coef=0.1)
    trainer.train()
    after = dict(trainer.trained.policy.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


# --- what can't be trained -------------------------------------------------------------------------------------------


class NoEnvironment(ColourTask):
    """For what is refused before an environment is made."""

    def make_env(self, *, evaluation=False):
        raise AssertionError("an environment was made")


def refusal(make_trainer, *given, **overrides):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (each caller looks at the message)
        make_trainer(*given, task=NoEnvironment(), **overrides)
    return str(refused.value)


def test_a_policy_with_nothing_to_train_is_refused(make_trainer, toy_checkpoint, adapter):
    model, _ = load_policy(toy_checkpoint)
    frozen = PeftModel.from_pretrained(model, adapter)
    assert "is_trainable=True" in refusal(make_trainer, frozen)
    model, _ = load_policy(toy_checkpoint)
    model.requires_grad_(False)
    assert "model.requires_grad_(True)" in refusal(make_trainer, model)
    make_trainer(model, lora(model))  # whose adapter is trained


def test_adapters_that_could_not_be_saved_are_refused(make_trainer, toy_checkpoint, adapter):
    model, _ = given_adapter(toy_checkpoint, adapter)
    assert "merge_and_unload" in refusal(make_trainer, model, lora(load_policy(toy_checkpoint)[0]))
    model.load_adapter(adapter, "second", is_trainable=True)
    model.base_model.set_adapter(["default", "second"])
    assert "active at once (default, second)" in refusal(make_trainer, model)
    inside = AutoModelForImageTextToText.from_pretrained(adapter)
    assert "load_policy" in refusal(make_trainer, inside)
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert "LoRA" in refusal(make_trainer, load_policy(toy_checkpoint)[0], prompt)


def test_trainable_weights_that_an_adapter_does_not_hold_are_refused(make_trainer, toy_checkpoint, adapter):
    model, _ = given_adapter(toy_checkpoint, adapter)
    projector = model.get_base_model().model.multi_modal_projector
    projector.linear_1.base_layer.weight.requires_grad_(True)
    message = refusal(make_trainer, model)
    assert (
        "not be saved with the adapter: model.multi_modal_projector.linear_1.base_layer.weight. Freeze them" in message
    )
    assert "modules_to_save" in message
    projector.requires_grad_(True)
    model.get_base_model().model.language_model.requires_grad_(True)
    assert "more" in refusal(make_trainer, model)  # not hundreds of names


@pytest.mark.parametrize("settings", [{"modules_to_save": ["multi_modal_projector"]}, {"bias": "all"}])
def test_weights_that_an_adapter_holds_beside_its_own_are_trained_and_saved(
    make_trainer, toy_checkpoint, tmp_path, settings
):
    base, _ = load_policy(toy_checkpoint)
    model = get_peft_model(base, lora(base, **settings))
    trainer = make_trainer(model)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    assert deviation(trainer, tmp_path / "saved") < 1e-5


def test_biases_that_the_reference_would_share_are_refused(make_trainer, toy_checkpoint):
    config = lora(load_policy(toy_checkpoint)[0], bias="all")
    assert "bias='none'" in refusal(make_trainer, toy_checkpoint, config, kl_coef=0.1)
    make_trainer(toy_checkpoint, config)


# --- a given optimizer -----------------------------------------------------------------------------------------------


def halving(step):
    return 0.5**step


def optimizer_of(model, lr=1e-3):
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW([{"params": weights[:4], "lr": lr / 10}, {"params": weights[4:]}], lr=lr)


@pytest.mark.parametrize("value_learning_rate", [None, 4e-3])
def test_a_given_optimizer_and_scheduler_train_and_resume(make_trainer, toy_checkpoint, tmp_path, value_learning_rate):
    def trainer(folder):
        model, _ = load_policy(toy_checkpoint)
        optimizer = optimizer_of(model)
        given = optimizer, LambdaLR(optimizer, [halving, lambda step: 1.0])
        saving = {"save_strategy": "steps", "save_steps": 1, "total_env_steps": 32}
        rate = {"value_learning_rate": value_learning_rate}
        return make_trainer(model, optimizers=given, output_dir=tmp_path / folder, **saving, **rate)

    whole = trainer("whole")
    head = {name: weight.detach().clone() for name, weight in whole.trained.value_head.named_parameters()}
    whole.train()
    assert whole.state.global_step == 2
    # The head follows the schedule of the first group, at the optimizer's own rate or the one that was asked for.
    rates = [group["lr"] for group in whole.optimizer.param_groups]
    assert rates == pytest.approx([0.25e-4, 1e-3, 0.25 * (value_learning_rate or 1e-3)])
    assert any(not torch.equal(head[name], weight) for name, weight in whole.trained.value_head.named_parameters())
    resumed = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert [group["lr"] for group in resumed.optimizer.param_groups] == rates
    final, again = whole.trained.state_dict(), resumed.trained.state_dict()
    assert all(torch.equal(final[name], again[name]) for name in final)


def test_a_warm_up_counts_for_the_head_too(make_trainer, toy_checkpoint):
    model, _ = load_policy(toy_checkpoint)
    optimizer = optimizer_of(model)
    make_trainer(model, optimizers=(optimizer, LambdaLR(optimizer, lambda step: step / 10)))
    assert [group["lr"] for group in optimizer.param_groups] == [0, 0, 0]


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, 4),
        lambda optimizer: OneCycleLR(optimizer, 1e-3, total_steps=4),
        lambda optimizer: SequentialLR(optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 2)], [1]),
    ],
    ids=["cosine", "one cycle", "sequential"],
)
def test_any_scheduler_that_needs_no_measure_works(make_trainer, toy_checkpoint, make_scheduler):
    model, _ = load_policy(toy_checkpoint)
    optimizer = optimizer_of(model)
    trainer = make_trainer(model, optimizers=(optimizer, make_scheduler(optimizer)))
    head = {name: weight.detach().clone() for name, weight in trainer.trained.value_head.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(not torch.equal(head[name], weight) for name, weight in trainer.trained.value_head.named_parameters())


def test_optimizers_that_could_not_train_are_refused(make_trainer, toy_checkpoint):
    model, _ = load_policy(toy_checkpoint)
    optimizer = optimizer_of(model)
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        make_trainer(model, optimizers=(optimizer, ReduceLROnPlateau(optimizer)))
    with pytest.raises(ValueError, match="holds none of the weights"):
        make_trainer(toy_checkpoint, optimizers=(optimizer_of(model), None))
    with pytest.raises(ValueError, match=r"holds none of the weights.*get_peft_model"):
        make_trainer(model, lora(model), optimizers=(optimizer_of(model), None))
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        make_trainer(model, optimizers=(optimizer_of(model), LambdaLR(optimizer_of(model), halving)))


def test_no_parameter_group_of_an_adapter_is_empty(make_trainer, toy_checkpoint):
    """DeepSpeed would drop it, and the schedule would no longer fit."""
    model, _ = load_policy(toy_checkpoint)
    trainer = make_trainer(model, peft_config=lora(model), value_learning_rate=1e-3)
    groups = trainer.optimizer.param_groups
    assert all(group["params"] for group in groups)
    trained = sum(weight.requires_grad for weight in trainer.trained.parameters())
    assert sum(len(group["params"]) for group in groups) == trained
