"""A plan against a real run of the embedded model: bytes of real tensors, tokens of a real rollout."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from planning_cases import planned
from torch.autograd.graph import saved_tensors_hooks
from toy import quiet_config
from transformers import TrainerCallback

from trl_gtr import ExpertCorrector, GTRTrainer, make_task
from trl_gtr.policy.loading import load_policy, lora_target_modules

TOLERANCE = 0.1
SETTINGS = {
    "num_envs": 8,
    "rollout_steps": 16,  # whole episodes: the formula in the prompt grows step by step
    "total_env_steps": 128,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 32,
    "max_completion_length": 64,
    "temperature": 0.5,
    "num_ppo_epochs": 2,
    "value_head_sizes": [128],
    "cloning_steps": 3,
    "clone": "thoughts",
}


def words(**settings):
    """The same settings on the command line."""
    given = {"model_name_or_path": "tiny", "hands": "pool", "use_cpu": True, "gradient_checkpointing": False}
    return [
        word
        for name, value in (given | SETTINGS | settings).items()
        for word in (f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)]))
    ]


class KeepsRollout(TrainerCallback):
    def on_step_end(self, args, state, control, rollout=None, **kwargs):
        self.rollout = rollout


def run(tmp_path, *, lora=False, **settings):
    """One update; what was seen of it."""
    model, processor = load_policy("tiny")
    peft_config = LoraConfig(r=8, target_modules=lora_target_modules(model)) if lora else None
    args = quiet_config(tmp_path, **{**SETTINGS, **settings})
    keeper, passed, gradients = KeepsRollout(), Counter(), []
    trainer = GTRTrainer(
        model=model,
        args=args,
        task=make_task("points24", hands="pool"),
        corrector=ExpertCorrector(),
        processing_class=processor,
        peft_config=peft_config,
        callbacks=[keeper],
    )
    inner = trainer.policy._with_responses

    def counted(module, prompts, images, responses, shape=None):
        if torch.is_grad_enabled():
            lengths = trainer.policy.encoder.lengths(prompts, images)
            passed.update(samples=len(prompts), tokens=sum(lengths) + sum(map(len, responses)))
        return inner(module, prompts, images, responses, shape)

    trainer.policy._with_responses = counted

    def look(*_):
        passed.update(optimizer_steps=1)
        gradients.append(sum(p.grad.nbytes for p in trainer.trained.parameters() if p.grad is not None))

    trainer.optimizer.optimizer.register_step_pre_hook(look)
    trainer.train()
    return SimpleNamespace(trainer=trainer, rollout=keeper.rollout, passed=Counter(passed), gradients=max(gradients))


def kept_bytes(trainer, batch):
    """What autograd keeps of a micro-batch of PPO, weights aside."""
    weights = {weight.untyped_storage()._cdata for weight in trainer.trained.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    starts = [trainer.policy.spans.action_start(t.response_ids, t.response.action_span) for t in batch]
    with saved_tensors_hooks(keep, lambda tensor: tensor), trainer.accelerator.autocast():
        trainer.policy.score(
            trainer.network,
            [t.prompt for t in batch],
            [t.image for t in batch],
            [t.response_ids for t in batch],
            starts,
            trainer.args.thought_prob_coef,
        )
    return sum(storage.nbytes() for storage in kept.values())


def adam_bytes(trainer):
    states = [*trainer.optimizer.state.values(), *trainer.updater._moments.values()]
    return sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq") if state)


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """The plain run, with cloning as a phase of its own."""
    return run(tmp_path_factory.mktemp("separate"), update_schedule="separate")


def test_activations(separate, capsys):
    check_activations(separate, capsys, {})


def test_weights_gradients_and_moments(separate, capsys):
    real = separate
    plan = planned(capsys, *words(update_schedule="separate"))
    memory, policy = plan["memory"], real.trainer.trained.policy
    assert plan["model"]["parameters"]["value"] == sum(weight.numel() for weight in policy.parameters())
    assert memory["weights"]["value"] == sum(weight.nbytes for weight in policy.parameters())
    assert memory["gradients"]["value"] == pytest.approx(real.gradients, rel=TOLERANCE)
    assert memory["adam"]["value"] == pytest.approx(adam_bytes(real.trainer), rel=TOLERANCE)
    assert plan["an_update"]["optimizer_steps"]["value"] == real.passed["optimizer_steps"]


def test_tokens(separate, capsys):
    check_tokens(separate, planned(capsys, *words(update_schedule="separate")))


def test_tokens_of_joint_steps(tmp_path, capsys):
    real = run(tmp_path, update_schedule="joint", num_ppo_epochs=1)
    check_tokens(real, planned(capsys, *words(update_schedule="joint", num_ppo_epochs=1)))


def check_tokens(real, plan):
    steps, encoder = real.rollout.transitions, real.trainer.policy.encoder
    prompts = encoder.lengths([t.prompt for t in steps], [t.image for t in steps])
    generated = sum(len(t.response_ids) for t in steps)
    assert plan["tokens"]["prompt"]["value"] == pytest.approx(np.mean(prompts), rel=TOLERANCE)
    assert plan["tokens"]["response"]["value"] == pytest.approx(generated / len(steps), rel=TOLERANCE)
    update = plan["an_update"]
    assert update["environment_steps"]["value"] == len(steps)
    assert update["generated_tokens"]["value"] == pytest.approx(generated, rel=TOLERANCE)
    assert update["trained_tokens"]["value"] == pytest.approx(real.passed["tokens"], rel=TOLERANCE)


@pytest.mark.slow
def test_activations_of_an_adapter_in_bfloat16(tmp_path, capsys):
    """Autocast's copies count too: they are more than the tensors that they are copies of."""
    settings = {"bf16": True, "num_ppo_epochs": 1, "cloning_steps": 1, "update_schedule": "separate"}
    real = run(tmp_path, lora=True, **settings)
    plan = check_activations(real, capsys, {"use_peft": True, "lora_r": 8, **settings})
    adapter = [weight for weight in real.trainer.trained.policy.parameters() if weight.requires_grad]
    assert plan["memory"]["adapters"]["value"] == sum(weight.nbytes for weight in adapter)


def check_activations(real, capsys, settings):
    steps, encoder = real.rollout.transitions, real.trainer.policy.encoder
    order = np.argsort(encoder.lengths([t.prompt for t in steps], [t.image for t in steps]))
    batch = [steps[i] for i in order[-SETTINGS["per_device_train_batch_size"] :]]  # a plan counts with the longest
    longest = max(len(t.response_ids) for t in batch)
    everything, policy = kept_bytes(real.trainer, batch), real.trainer.trained.policy
    policy.train()
    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed = kept_bytes(real.trainer, batch)
    policy.gradient_checkpointing_disable()
    # Only now: another config resets accelerate's state.
    plan = planned(capsys, *words(**{"update_schedule": "separate", "max_completion_length": longest} | settings))
    assert plan["memory"]["activations_all_kept"]["value"] == pytest.approx(everything, rel=TOLERANCE)
    # A layer that is computed again comes on top.
    assert checkpointed < plan["not_in_that_memory"]["activations_checkpointed"]["value"] < everything
    return plan


def test_the_key_value_cache(capsys):
    """Against the cache that `generate` filled."""
    plan = planned(capsys, *words())
    model, _ = load_policy("tiny")
    rows, tokens = 5, 12
    ids = torch.randint(10, 100, (rows, tokens))
    cache = model(input_ids=ids, use_cache=True).past_key_values
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    planned_tokens = 32 * (plan["tokens"]["longest_prompt"]["value"] + 64)
    assert plan["memory"]["kv_cache"]["value"] == real * planned_tokens // (rows * tokens)


def test_a_joint_step_keeps_both_passes(capsys):
    joint, separate = (
        planned(capsys, *words(update_schedule=schedule))["memory"]["activations_all_kept"]["value"]
        for schedule in ("joint", "separate")
    )
    assert joint == 2 * separate
