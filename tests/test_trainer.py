"""GTRTrainer on the toy world: what is right before, during and after an update."""

import errno
import json
import logging
import math
import os
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch
from paths import DOCS
from peft import LoraConfig
from toy import COLOURS, BareColourTask, ColourEnv, ColourTask, build_toy_model, quiet_config, teach_format
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_gtr import PPOTrainer
from trl_gtr.correctors import BudgetExhausted, Corrector, ExpertCorrector
from trl_gtr.engines.transformers import TransformersEngine
from trl_gtr.guides.base import Guide
from trl_gtr.guides.labels import FLAWS
from trl_gtr.learning import losses, update
from trl_gtr.learning.advantages import AdvantageEstimator, Advantages
from trl_gtr.policy.loading import lora_target_modules
from trl_gtr.policy.network import PolicyWithValue
from trl_gtr.runs.callbacks import ThoughtCollapseCallback
from trl_gtr.trainer import GTRTrainer
from trl_gtr.types import Correction

# Depend on the machine, not on the run.
UNSTEADY = ("time/", "speed/", "memory/", "corrector/latency")


@pytest.fixture
def make_trainer(toy_checkpoint, tmp_path):
    def make(task=None, corrector="expert", model=None, trainer_kwargs=None, **overrides):
        config = quiet_config(
            **{"output_dir": tmp_path / "run", "num_ppo_epochs": 2, "learning_rate": 1e-3, **overrides}
        )
        if corrector == "expert":
            corrector = ExpertCorrector() if config.thought_cloning_coef > 0 else None
        return GTRTrainer(model or toy_checkpoint, config, task or ColourTask(), corrector, **(trainer_kwargs or {}))

    return make


def test_a_task_needs_no_more_than_seven_members(make_trainer):
    """PPO, the defaults for all else, and no word about whether thoughts are true."""
    trainer = make_trainer(BareColourTask(), thought_cloning_coef=0.0, eval_episodes=2)
    before = parameters(trainer.trained)
    trainer.train()
    assert changed(before, trainer.trained)
    log = trainer.state.log_history[-1]
    assert {"thoughts/distinct_4", "episode/success", "episode/success_solvable"} <= set(log)
    assert "eval_success" in trainer.evaluate().metrics("eval")
    named = {name for entry in trainer.state.log_history for name in entry}
    assert not [name for name in named if "true" in name or "reading" in name]


def test_a_task_without_a_judge_learns_from_its_expert(make_trainer):
    class Unjudged(BareColourTask):
        expert = ColourTask.expert

    trainer = make_trainer(Unjudged())
    trainer.train()
    log = trainer.state.log_history[-1]
    assert log["corrector/corrected"] > 0
    assert "thoughts/true" not in log


class Alike:
    """Has the members, and is neither a task nor a corrector."""

    name, format = ColourTask.name, ColourTask.format


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": Alike()}, "Alike is not a Task: subclass trl_gtr.Task"),
        ({"corrector": Alike()}, "Alike is not a Corrector: subclass trl_gtr.Corrector"),
        ({"trainer_kwargs": {"eval_task": Alike()}}, "Alike is not a Task: subclass trl_gtr.Task"),
        ({"corrector": ExpertCorrector}, "ExpertCorrector is a class: pass an instance"),
        ({"task": ColourTask}, r"ColourTask is a class: pass an instance, ColourTask\(\.\.\.\)"),
        ({"task": "points24"}, r"'points24' is a string: pass a task, make_task\('points24'\)"),
        ({"task": ColourEnv()}, "ColourEnv is an environment: subclass trl_gtr.Task and return the environment from"),
        ({"task": ColourEnv}, "ColourEnv is an environment: subclass trl_gtr.Task"),
        ({"task": gym.wrappers.TimeLimit(ColourEnv(), 3)}, "ColourEnv is an environment"),
        ({"trainer_kwargs": {"guide": ExpertCorrector()}, "corrector": None}, "pass it as `corrector`"),
    ],
)
def test_only_tasks_and_correctors_are_taken(make_trainer, given, message):
    with pytest.raises(TypeError, match=message):
        make_trainer(**given)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            TrainingArguments("unused", use_cpu=True),
            r"`args` is a TrainingArguments: write GTRConfig\(\.\.\.\) instead",
        ),
        (ColourTask(), "`args` is a ColourTask: pass it as `task`"),
        ({"learning_rate": 1e-5}, "`args` must be a GTRConfig, not dict"),
    ],
)
def test_only_a_config_is_taken(args, message):
    with pytest.raises(TypeError, match=message):
        GTRTrainer("tiny", args, ColourTask(), ExpertCorrector())


def test_correctors_by_name(toy_checkpoint, tmp_path):
    def make(corrector, **settings):
        return GTRTrainer(toy_checkpoint, quiet_config(tmp_path, **settings), ColourTask(), corrector)

    assert isinstance(make("expert").corrector, ExpertCorrector)
    with pytest.raises(ValueError, match=r"not 'exprt'; did you mean 'expert'\?"):
        make("exprt")
    with pytest.raises(ValueError, match="needs a `corrector`"):
        make("none")
    assert make("none", thought_cloning_coef=0.0).corrector is None


def steady(log_history):
    return [{k: v for k, v in entry.items() if not k.startswith(UNSTEADY)} for entry in log_history]


def parameters(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def changed(before, module):
    return {name for name, parameter in module.named_parameters() if not torch.equal(before[name], parameter)}


# --- what it is ------------------------------------------------------------------------------------------------------


def test_it_is_a_ppo_trainer_and_says_so_on_its_card(make_trainer, tmp_path):
    trainer = make_trainer()
    assert isinstance(trainer, PPOTrainer)
    trainer.create_model_card(model_name="toy")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "Guided Thought Reinforcement" in card
    assert "2503.08525" in card


def test_a_checkpoint_takes_no_time_for_the_card(make_trainer, tmp_path):
    make_trainer(save_strategy="steps", save_steps=1).train()
    assert list((tmp_path / "run").glob("checkpoint-*"))
    assert not (tmp_path / "run" / "README.md").exists()


def test_a_saved_policy_answers_as_the_trained_one(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.train()
    images = [np.full((28, 28, 3), colour, np.uint8) for colour in COLOURS.values()]
    prompts = ["Which colour?"] * 4
    trained = trainer.engine.generate(prompts, images, greedy=True)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    AutoProcessor.from_pretrained(tmp_path / "saved")
    again = TransformersEngine(trainer.policy, loaded).generate(prompts, images, greedy=True)
    assert [g.text for g in trained] == [g.text for g in again]
    assert (tmp_path / "saved" / "value_head.safetensors").is_file()


# --- what must be right ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["joint", "separate"])
def test_ratios_are_one_before_the_first_step_of_every_update(make_trainer, schedule):
    trainer = make_trainer(update_schedule=schedule, total_env_steps=64)
    trainer.train()
    deviations = [entry["policy/ratio_start_max_dev"] for entry in trainer.state.log_history]
    assert len(deviations) == 4
    assert max(deviations) < 1e-3
    # and the update does move the policy: the check above is not one of a frozen model
    assert all(entry["policy/approx_kl"] > 1e-6 for entry in trainer.state.log_history)


def test_lora_dropout_makes_no_noise(make_trainer, toy_checkpoint):
    names = lora_target_modules(AutoModelForImageTextToText.from_pretrained(toy_checkpoint))
    lora = LoraConfig(r=4, lora_dropout=0.5, target_modules=names)
    trainer = make_trainer(trainer_kwargs={"peft_config": lora}, total_env_steps=48)
    trainer.train()
    # In the first update LoRA's B is zero and dropout could not be seen; it can in the others.
    assert all(entry["policy/ratio_start_max_dev"] < 1e-3 for entry in trainer.state.log_history)
    assert len(trainer.state.log_history) == 3


def test_runs_depend_on_the_seed_alone(make_trainer):
    runs = []
    for seed in (1, 1, 2):
        trainer = make_trainer(seed=seed)
        trainer.train()
        runs.append(steady(trainer.state.log_history))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_evaluation_does_not_change_what_is_learned(make_trainer):
    plain = make_trainer()
    plain.train()
    evaluating = make_trainer(eval_strategy="steps", eval_steps=1, eval_episodes=4, eval_greedy=False)
    evaluating.train()
    trained = [entry for entry in evaluating.state.log_history if "eval_success" not in entry]
    assert len(trained) < len(evaluating.state.log_history)
    assert steady(trained) == steady(plain.state.log_history)


@pytest.mark.parametrize("schedule", ["joint", "separate"])
def test_a_mini_batch_in_pieces_gives_the_same_step(make_trainer, schedule):
    """8 × 1 accumulates to the gradient of 1 × 8."""
    after = []
    for sizes in ({"per_device_train_batch_size": 8}, {"per_device_train_batch_size": 1, "mini_batch_size": 8}):
        model = build_toy_model()[0]
        processor = build_toy_model()[1]
        teach_format(model, processor, steps=10)
        trainer = make_trainer(
            model=model,
            trainer_kwargs={
                "processing_class": processor,
                "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None),
            },
            **sizes,
            num_envs=8,
            rollout_steps=1,
            total_env_steps=8,
            num_ppo_epochs=1,
            cloning_steps=1,
            max_grad_norm=0.0,
            update_schedule=schedule,
            value_gradient_to_trunk=True,
        )
        # A buffer of one lesson: what is drawn does not depend on the size of the draws.
        trainer.guide.buffer.sample = lambda n, sample=trainer.guide.buffer.sample: sample(1) * n
        assert trainer.args.mini_batch_size == 8  # PPOTrainer's constructor writes it too
        trainer.train()
        after.append(parameters(trainer.trained.policy))
    difference = max(float((after[0][name] - after[1][name]).abs().max()) for name in after[0])
    assert difference < 2e-6


def test_gradients_are_clipped(make_trainer):
    model, processor = build_toy_model()
    before = parameters(model)
    trainer = make_trainer(
        model=model,
        trainer_kwargs={
            "processing_class": processor,
            "optimizers": (torch.optim.SGD(model.parameters(), lr=1.0), None),
        },
        max_grad_norm=1e-3,
        total_env_steps=16,
        per_device_train_batch_size=16,
        num_ppo_epochs=1,
    )
    trainer.train()
    after = parameters(trainer.trained.policy)
    moved = math.sqrt(sum(float((after[name] - before[name]).square().sum()) for name in before))
    assert trainer.state.log_history[0]["optim/grad_norm"] > 1e-2
    assert moved <= 1e-3 * 1.001


def test_gradient_checkpointing_is_on_when_asked_and_changes_nothing(make_trainer, monkeypatch):
    calls = []
    real = GradientCheckpointingLayer.__call__

    def counting(layer, *args, **kwargs):
        if layer.gradient_checkpointing and layer.training:
            calls.append(layer)
        return real(layer, *args, **kwargs)

    monkeypatch.setattr(GradientCheckpointingLayer, "__call__", counting)
    results, counts = [], []
    for asked in (False, True):
        calls.clear()
        # One step: behind it Adam would blow rounding up.
        trainer = make_trainer(
            gradient_checkpointing=asked, total_env_steps=16, per_device_train_batch_size=16, num_ppo_epochs=1
        )
        trainer.train()
        results.append([trainer.state.log_history[0][name] for name in ("loss/total", "optim/grad_norm")])
        counts.append(len(calls))
    assert counts[0] == 0
    assert counts[1] > 0
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_bf16_scores_rollout_and_update_alike_and_sums_in_float32(make_trainer):
    trainer = make_trainer(bf16=True)
    assert trainer.accelerator.mixed_precision == "bf16"
    seen = set()
    head = trainer.trained.policy.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    trainer.train()
    assert seen == {torch.bfloat16}  # generation, scoring and update
    assert next(trainer.trained.policy.parameters()).dtype == torch.float32
    last = trainer.state.log_history[-1]
    assert math.isfinite(last["loss/total"])
    assert last["policy/ratio_start_max_dev"] < 0.05


def test_under_one_shape_ratios_start_at_exactly_one_in_bf16(make_trainer):
    """Each mini-batch's rows are others than those that were scored together before."""
    trainer = make_trainer(
        bf16=True,
        one_batch_shape=True,
        total_env_steps=64,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=5,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        kl_coef=0.1,
    )
    trainer.train()
    assert [entry["policy/ratio_start_max_dev"] for entry in trainer.state.log_history] == [0.0] * 4
    assert all(entry["policy/approx_kl"] > 0 for entry in trainer.state.log_history)


def test_the_feature_caches_size_is_a_setting(make_trainer):
    assert make_trainer().policy.encoder.cache_bytes == 2 * 2**30
    assert make_trainer(feature_cache_gb=0.5).policy.encoder.cache_bytes == 2**29


def test_a_start_ratio_that_is_off_is_reported(make_trainer, caplog):
    trainer = make_trainer(total_env_steps=16, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    score = trainer.make_experience.score

    def shifted(*args):
        scores = score(*args)
        scores.logprob.add_(0.2)
        return scores

    trainer.make_experience.score = shifted
    with caplog.at_level(logging.WARNING, logger="trl_gtr.learning.update"):
        trainer.train()
    warnings = [record.message for record in caplog.records if "ratio is off 1 by 0.18" in record.message]
    assert len(warnings) == 1  # of all micro-batches together
    assert "float32" not in warnings[0]
    assert trainer.state.log_history[-1]["policy/ratio_start_max_dev"] == pytest.approx(1 - math.exp(-0.2), abs=1e-3)


# --- terms that are off ----------------------------------------------------------------------------------------------


def moments(trainer, module):
    """Names of the parameters for which the optimizer holds momentum."""
    state = trainer.optimizer.state
    return {name for name, parameter in module.named_parameters() if state.get(parameter)}


def test_ppo_only_needs_no_corrector_and_clones_nothing(make_trainer):
    trainer = make_trainer(thought_cloning_coef=0.0)
    trainer.train()
    last = trainer.state.log_history[-1]
    assert "loss/cloning" not in last
    assert "corrector/corrected" not in last
    assert trainer.guide.buffer is None
    assert last["buffer/size"] == 0
    assert last["loss/policy"] != 0


def test_cloning_only_leaves_the_value_head_alone(make_trainer):
    trainer = make_trainer(ppo_coef=0.0)
    before = parameters(trainer.trained.value_head)
    trainer.train()
    assert not changed(before, trainer.trained.value_head)
    assert not moments(trainer, trainer.trained.value_head)
    assert moments(trainer, trainer.trained.policy)
    assert "loss/policy" not in trainer.state.log_history[-1]


def test_a_value_warm_up_leaves_the_policy_alone(make_trainer):
    """The policy term is dropped, not multiplied by zero: Adam must gather no momentum for the trunk."""
    trainer = make_trainer(thought_cloning_coef=0.0, value_warmup_updates=2)
    before = parameters(trainer.trained.policy)
    trainer.train()
    assert not changed(before, trainer.trained.policy)
    assert not moments(trainer, trainer.trained.policy)
    assert moments(trainer, trainer.trained.value_head)


def test_the_value_loss_stays_out_of_the_trunk_unless_asked_in(make_trainer):
    for asked in (False, True):
        trainer = make_trainer(
            thought_cloning_coef=0.0, value_warmup_updates=2, value_gradient_to_trunk=asked, weight_decay=0.0
        )
        # The head's last layer starts at zero and lets no gradient through in the first step.
        before = parameters(trainer.trained.policy)
        trainer.train()
        assert bool(changed(before, trainer.trained.policy)) is asked


def test_without_corrections_cloning_takes_no_step(make_trainer):
    class SilentCorrector(Corrector):
        def correct(self, requests):
            return [Correction("failed", failure="timeout") for _ in requests]

    trainer = make_trainer(corrector=SilentCorrector(), ppo_coef=0.0)
    before = parameters(trainer.trained)
    trainer.train()
    assert not changed(before, trainer.trained)
    assert trainer.state.log_history[-1]["corrector/failed"] == 1.0


# --- other estimators and guides ------------------------------------------------------------------------------------


class OwnReward(AdvantageEstimator):
    """Critic-free: a step is worth its reward; environment 0 is left out."""

    def __call__(self, rollout, values):
        assert values is None
        steps = rollout.transitions
        kept = torch.tensor([step.env_index != 0 for step in steps])
        rewards = torch.tensor([step.reward for step in steps])
        return Advantages(rewards, kept=kept, metrics={"groups/dead": [float(not k) for k in kept]})


def test_without_values_there_is_no_value_head(make_trainer, tmp_path, monkeypatch):
    def refuse(*args):
        raise AssertionError("states are valued although nobody needs it")

    monkeypatch.setattr("trl_gtr.policy.scoring.VLMPolicy.values", refuse)
    trainer = make_trainer(
        trainer_kwargs={"advantage_estimator": OwnReward()}, kl_coef=0.1, cliprange_value=0.2, episode_log_rate=1.0
    )
    assert trainer.trained.value_head is None
    before = parameters(trainer.trained.policy)
    seen = []
    trainer.updater.objective = lambda new, old, advantages, real=trainer.updater.objective: (
        seen.append((new.value, old.value, len(old))) or real(new, old, advantages)
    )
    trainer.train()
    assert changed(before, trainer.trained.policy)
    assert {value for new, old, _ in seen for value in (new, old)} == {None}
    # Two updates of two epochs; the steps of environment 0 are dropped.
    assert sum(size for *_, size in seen) == 2 * 2 * 12
    for entry in trainer.state.log_history:
        assert not [name for name in entry if name.startswith("value/") or name == "loss/value"]
        assert entry["policy/ratio_start_max_dev"] < 1e-3
        assert entry["groups/dead"] == 0.25
        assert entry["loss/policy"] != 0
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    assert not (tmp_path / "saved" / "value_head.safetensors").exists()


def test_a_critic_free_run_is_not_resumed_with_a_critic(make_trainer, tmp_path):
    make_trainer(save_strategy="steps", save_steps=1, trainer_kwargs={"advantage_estimator": OwnReward()}).train()
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-1")
    with pytest.raises(ValueError, match="estimator was 'OwnReward' and is 'GAE'"):
        make_trainer(save_strategy="steps").train(resume_from_checkpoint=str(checkpoint))


def test_a_critic_free_run_resumes_to_the_same_curve(make_trainer, tmp_path):
    def trainer(folder):
        return make_trainer(
            output_dir=str(tmp_path / folder),
            save_strategy="steps",
            save_steps=1,
            trainer_kwargs={"advantage_estimator": OwnReward()},
        )

    whole, resumed = trainer("whole"), trainer("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert not list((tmp_path / "whole").rglob("value_head*"))
    assert steady(resumed.state.log_history) == steady(whole.state.log_history)
    final, again = parameters(whole.trained), parameters(resumed.trained)
    assert all(torch.equal(final[name], again[name]) for name in final)


def test_a_critic_free_run_takes_a_users_optimizer(make_trainer):
    model, processor = build_toy_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    trainer = make_trainer(
        model=model,
        trainer_kwargs={
            "processing_class": processor,
            "optimizers": (optimizer, scheduler),
            "advantage_estimator": OwnReward(),
        },
    )
    trainer.train()
    assert len(trainer.optimizer.param_groups) == 1


class Shaping(Guide):
    """Adds to the advantages what it is told to; counts what it is asked."""

    def __init__(self, amount):
        self.amount, self.calls = amount, []

    def attach(self, run):
        self.calls.append("attach")
        self.run = run

    def labels(self, rollout, update, means):
        self.calls.append("labels")
        return 0

    def shaping(self, rollout, scores, means):
        self.calls.append("shaping")
        again = self.run.score(rollout.transitions, PolicyWithValue(self.run.model, None))
        assert torch.allclose(again.token_logprobs, scores.token_logprobs, atol=1e-5)
        return torch.full((len(rollout),), self.amount)

    def after_update(self, model, means):
        self.calls.append("after_update")

    def metrics(self):
        return {"guide/calls": float(len(self.calls))}


def test_a_custom_guide_shapes_advantages(make_trainer):
    advantages = []
    for amount in (0.0, 10.0):
        guide = Shaping(amount)
        trainer = make_trainer(
            corrector=None,
            trainer_kwargs={"guide": guide, "advantage_estimator": OwnReward()},
            total_env_steps=16,
        )
        learn = trainer.updater.update

        def watch(experience, *args, learn=learn):
            advantages.append(experience.advantages)
            learn(experience, *args)

        trainer.updater.update = watch
        trainer.train()
        assert guide.calls == ["attach", "labels", "shaping", "after_update"]
        assert trainer.state.log_history[0]["guide/calls"] == 4.0
        assert trainer.state.log_history[0]["loss/cloning_coef"] == 0.0
    assert torch.allclose(advantages[1], advantages[0] + 10)


# --- labels ----------------------------------------------------------------------------------------------------------


def stored_texts(trainer):
    return [
        trainer.policy.spans.text(sample.target_ids[: sample.num_labels]) for sample in trainer.guide.buffer.sample(64)
    ]


def test_labels_are_the_corrected_thought_and_never_the_action(make_trainer):
    trainer = make_trainer()
    trainer.train()
    texts = stored_texts(trainer)
    assert texts
    allowed = {'{"thoughts": "it is ' + colour + '", ' for colour in COLOURS}
    # The toy vocabulary has one token for `", "action": "`: it straddles the boundary, so it belongs to the action.
    assert set(texts) <= {text.removesuffix('", ') for text in allowed}


def test_right_actions_are_labels_only_where_the_agents_own_is_right(make_trainer):
    trainer = make_trainer(clone="thoughts_and_right_actions", total_env_steps=64)
    trainer.train()
    with_action = [text for text in stored_texts(trainer) if "action" in text]
    without = [text for text in stored_texts(trainer) if "action" not in text]
    assert with_action
    assert without
    for text in with_action:
        response = json.loads(text)
        assert response["thoughts"] == f"it is {response['action']}"


def test_cloning_the_full_response_takes_the_correctors_action(make_trainer):
    trainer = make_trainer(clone="corrected_responses")
    trainer.train()
    for text in stored_texts(trainer):
        response = json.loads(text)
        assert response["thoughts"] == f"it is {response['action']}"


def test_corrections_stay_across_updates(make_trainer):
    trainer = make_trainer(total_env_steps=48)
    trainer.train()
    updates = {sample.update for sample in trainer.guide.buffer.sample(256)}
    assert updates == {0, 1, 2}
    sizes = [entry["buffer/size"] for entry in trainer.state.log_history]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True])
def test_the_reference_is_the_starting_policy(make_trainer, toy_checkpoint, adapter):
    start = AutoModelForImageTextToText.from_pretrained(toy_checkpoint)
    peft = {"peft_config": LoraConfig(r=4, target_modules=lora_target_modules(start))} if adapter else {}
    trainer = make_trainer(kl_coef=0.1, learning_rate=1e-2, trainer_kwargs=peft)
    trainer.train()
    scorer = trainer.updater.scorer
    steps = trainer._collect()[0].transitions
    with trainer.reference_network() as network:
        reference = scorer.score_all(steps, network).token_logprobs
    now = scorer.score_all(steps).token_logprobs
    expected = scorer.score_all(steps, PolicyWithValue(start, None)).token_logprobs
    assert torch.allclose(reference, expected, atol=1e-5)
    assert not torch.allclose(reference, now, atol=1e-2)


def test_a_kl_penalty_holds_the_policy_back(make_trainer):
    drifts = []
    for coef in (1e-6, 30.0):
        trainer = make_trainer(kl_coef=coef, thought_cloning_coef=0.0, total_env_steps=96, seed=4, max_grad_norm=0.0)
        trainer.train()
        drifts.append([entry["loss/kl"] for entry in trainer.state.log_history])
    free, held = drifts
    assert all(kl >= 0 for kl in free + held)
    assert free[0] < max(free)  # it starts at the reference and leaves it
    assert sum(held[1:]) < sum(free[1:]) / 4


def test_target_kl_ends_an_update_early(make_trainer):
    trainer = make_trainer(target_kl=1e-7, num_ppo_epochs=4, thought_cloning_coef=0.0)
    trainer.train()
    # The first mini-batch of an update has KL 0; the second one sees the step and stops.
    assert all(entry["policy/epochs"] == 1 for entry in trainer.state.log_history)


def test_the_format_reward_is_no_part_of_the_returns(make_trainer):
    returns = []
    for bonus in (0.0, 100.0):
        trainer = make_trainer(format_reward=bonus, total_env_steps=16, thought_cloning_coef=0.0)
        trainer.train()
        returns.append(trainer.state.log_history[0]["value/return"])
    assert returns[0] == returns[1]


def test_a_corrector_is_needed_for_cloning(make_trainer):
    with pytest.raises(ValueError, match="needs a `corrector`"):
        make_trainer(corrector=None)


def test_errors_of_a_corrector_surface(make_trainer):
    class BrokenCorrector(Corrector):
        def correct(self, requests):
            raise RuntimeError("broken on purpose")

    with pytest.raises(RuntimeError, match="broken on purpose"):
        make_trainer(corrector=BrokenCorrector()).train()


def test_a_spent_budget_stops_the_run_with_a_checkpoint(make_trainer, tmp_path):
    class Spendthrift(ExpertCorrector):
        calls = 0

        def correct(self, requests):
            self.calls += 1
            if self.calls > 6:  # in the second update
                raise BudgetExhausted("nothing left")
            return super().correct(requests)

    trainer = make_trainer(corrector=Spendthrift(), total_env_steps=64, save_strategy="steps", save_steps=100)
    trainer.train()
    # The update in which it ran out is finished with what was paid for.
    assert trainer.state.global_step == 2
    assert 0 < trainer.state.log_history[1]["corrector/failed"] < 1
    assert (tmp_path / "run" / "checkpoint-2" / "value_head.safetensors").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_abandons_the_rollout_and_leaves_the_state_before_it(make_trainer, tmp_path, number):
    class Interrupting(ExpertCorrector):
        calls, closed = 0, False

        def correct(self, requests):
            self.calls += 1
            if self.calls == 6:  # in the second of four steps of the second update
                os.kill(os.getpid(), number)
            return super().correct(requests)

        def close(self):
            self.closed = True

    def trainer(corrector, **overrides):
        task = ColourTask(length=3)  # episodes that reach over the end of a rollout
        return make_trainer(task, corrector, total_env_steps=48, save_strategy="steps", save_steps=100, **overrides)

    whole = trainer(ExpertCorrector(), output_dir=str(tmp_path / "whole"))
    whole.train()
    corrector = Interrupting()
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        trainer(corrector, allow_changed_config=True).train()
    assert stopped.value.code == 128 + number
    assert corrector.closed
    assert signal.getsignal(number) is before
    resumed = trainer(ExpertCorrector(), allow_changed_config=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert steady(resumed.state.log_history) == steady(whole.state.log_history)


def test_log_completions_shows_steps_and_reads_no_markup(make_trainer, capsys):
    make_trainer(log_completions=True, total_env_steps=16).train()
    shown = capsys.readouterr().out
    assert "Sampled steps" in shown
    assert "correction" in shown


def test_settings_reach_the_place_where_they_matter(make_trainer, monkeypatch):
    seen = {}
    policy_loss, value_loss = losses.policy_loss, losses.value_loss

    def watch_policy(logprob, old, advantages, *clip):
        seen["policy"] = clip
        return policy_loss(logprob, old, advantages, *clip)

    def watch_value(values, returns, old_values, cliprange_value):
        seen["value"] = cliprange_value
        return value_loss(values, returns, old_values, cliprange_value)

    monkeypatch.setattr(losses, "policy_loss", watch_policy)
    monkeypatch.setattr(update, "value_loss", watch_value)
    trainer = make_trainer(
        cliprange=0.3,
        cliprange_high=0.35,
        dual_clip=7.0,
        cliprange_value=0.4,
        invalid_action="penalty",
        value_learning_rate=0.5,
    )
    assert trainer.collector.rules.penalize
    head = {id(p) for p in trainer.trained.value_head.parameters()}
    rates = {group["lr"] for group in trainer.optimizer.param_groups for p in group["params"] if id(p) in head}
    assert rates == {0.5}
    trainer.train()
    assert seen == {"policy": (0.3, 7.0, 0.35), "value": 0.4}


def test_the_cloning_phase_has_its_own_learning_rate(make_trainer):
    trainer = make_trainer(update_schedule="separate", cloning_learning_rate=5e-3, lr_scheduler_type="constant")
    rates = []
    term = trainer.updater._cloning_term

    def watch(*args):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        return term(*args)

    trainer.updater._cloning_term = watch
    trainer.train()
    assert rates == pytest.approx([5e-3] * len(rates))
    assert rates
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


class Spelling(Corrector):
    """A corrector that answers with a fixed thought."""

    def __init__(self, thought):
        self.thought = thought

    def correct(self, requests):
        return [Correction("corrected", thought={"thoughts": self.thought}, action="red") for _ in requests]


def test_special_tokens_in_a_corrected_thought_are_text(make_trainer):
    trainer = make_trainer(corrector=Spelling("<image></s>"), max_completion_length=8)
    trainer.train()
    assert trainer.state.log_history[-1]["labels/special_tokens"] == 0.0
    special = {*trainer.policy.eos_token_ids, *trainer.processing_class.tokenizer.all_special_ids}
    samples = list(trainer.guide.buffer.samples())
    assert samples
    assert all(not special & set(sample.target_ids[:-1].tolist()) for sample in samples)
    assert {trainer.policy.spans.text(s.target_ids[: s.num_labels]) for s in samples} == {'{"thoughts": "<image></s>'}


def test_a_label_that_no_ids_can_encode_is_discarded_and_counted(make_trainer):
    """The toy vocabulary has no é, and an unknown character is a special token."""
    trainer = make_trainer(corrector=Spelling("rosé"))
    trainer.train()
    assert len(trainer.guide.buffer) == 0
    entry = trainer.state.log_history[-1]
    assert {flaw for flaw in FLAWS if entry[f"labels/{flaw}"]} == {"special_tokens"}
    assert entry["labels/special_tokens"] == 1.0


def test_a_run_can_be_made_longer(make_trainer, tmp_path):
    make_trainer(save_strategy="steps", total_env_steps=32).train()
    longer = make_trainer(save_strategy="steps", total_env_steps=80)
    longer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert longer.state.global_step == 5
    # the linear schedule of five updates, not of two
    assert [entry["lr"] for entry in longer.state.log_history[2:]] == pytest.approx([6e-4, 4e-4, 2e-4])


def test_a_collapse_callback_added_later_is_saved_and_restored(make_trainer, tmp_path):
    trainer = make_trainer(save_strategy="steps", total_env_steps=32, save_steps=1)
    callback = ThoughtCollapseCallback(patience=100)
    trainer.add_callback(callback)
    trainer.train()
    again = ThoughtCollapseCallback(patience=100)
    resumed = make_trainer(total_env_steps=32, trainer_kwargs={"callbacks": [again]})
    resumed.load_checkpoint(str(tmp_path / "run" / "checkpoint-2"))
    assert again.first_distinct == callback.first_distinct is not None


def test_a_collapse_stop_leaves_a_checkpoint(make_trainer, tmp_path):
    alarm = ThoughtCollapseCallback(max_top=0.0, patience=1, stop=True)
    trainer = make_trainer(
        save_strategy="steps", save_steps=100, total_env_steps=64, trainer_kwargs={"callbacks": [alarm]}
    )
    trainer.train()
    assert trainer.state.global_step == 1
    assert (tmp_path / "run" / "checkpoint-1").is_dir()


def test_pushing_saves_within_saving(make_trainer, tmp_path):
    """With `push_to_hub` Trainer's save_model pushes, and pushing saves: the policy must be there both times."""
    trainer = make_trainer()
    whole = trainer.model
    with trainer._policy_as_model():
        trainer.save_model(str(tmp_path / "saved"))
        assert trainer.model is trainer.trained.policy
    assert trainer.model is whole
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    assert (tmp_path / "saved" / "value_head.safetensors").is_file()


def test_a_users_optimizer_gets_the_value_head_too(make_trainer):
    model, processor = build_toy_model()
    trainer = make_trainer(
        model=model,
        trainer_kwargs={
            "processing_class": processor,
            "optimizers": (torch.optim.Adam(model.parameters(), lr=1e-3), None),
        },
        thought_cloning_coef=0.0,
    )
    before = parameters(trainer.trained.value_head)
    trainer.train()
    assert changed(before, trainer.trained.value_head)


def test_losses_that_are_not_finite_are_skipped_and_end_the_run_with_a_checkpoint(make_trainer, tmp_path):
    class NotANumber(ColourTask):
        reward_scale = float("nan")

    trainer = make_trainer(task=NotANumber(), max_skipped_steps=6, total_env_steps=64, save_strategy="steps")
    before = parameters(trainer.trained)
    with pytest.raises(
        FloatingPointError, match=r"6 optimizer steps in a row.*advantages \(process 0\) is not finite"
    ):
        trainer.train()
    assert not changed(before, trainer.trained)
    # Four steps an update: the second one is not finished, but counted and saved.
    assert [entry["optim/skipped_steps"] for entry in trainer.state.log_history] == [4, 2]
    assert (tmp_path / "run" / "checkpoint-2" / "trainer_state.json").is_file()
    saved = torch.load(tmp_path / "run" / "checkpoint-2" / "updater.pt", weights_only=True)
    assert saved["skipped_in_a_row"] == 0  # or a resumed run would end at once


def test_a_single_bad_gradient_costs_a_single_step(make_trainer, caplog):
    trainer = make_trainer(max_skipped_steps=2)
    weight = trainer.trained.policy.get_output_embeddings().weight
    passes = iter(range(1000))
    weight.register_hook(lambda gradient: gradient * math.nan if next(passes) == 3 else gradient)
    trainer.train()
    assert [entry["optim/skipped_steps"] for entry in trainer.state.log_history] == [1, 0]
    assert "the gradient of policy.lm_head.weight is not finite" in caplog.text
    assert all(torch.isfinite(p).all() for p in trainer.trained.parameters())


def test_a_half_precision_checkpoint_is_trained_in_float32(make_trainer, toy_checkpoint, tmp_path):
    AutoModelForImageTextToText.from_pretrained(toy_checkpoint, dtype=torch.float16).save_pretrained(tmp_path / "half")
    AutoProcessor.from_pretrained(toy_checkpoint).save_pretrained(tmp_path / "half")
    trainer = make_trainer(model=str(tmp_path / "half"))
    assert {p.dtype for p in trainer.trained.policy.parameters()} == {torch.float32}


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True])
def test_a_resumed_run_is_the_same_run(make_trainer, toy_checkpoint, tmp_path, adapter):
    def trainer(folder):
        names = lora_target_modules(AutoModelForImageTextToText.from_pretrained(toy_checkpoint))
        peft = {"peft_config": LoraConfig(r=4, target_modules=names)} if adapter else {}
        return make_trainer(
            output_dir=str(tmp_path / folder),
            save_strategy="steps",
            save_steps=2,
            total_env_steps=64,
            update_schedule="joint" if adapter else "separate",
            cloning_learning_rate=0.0 if adapter else 2e-3,
            trainer_kwargs=peft,
            task=ColourTask(length=3),  # episodes that reach over the end of a rollout
        )

    whole = trainer("whole")
    whole.train()
    resumed = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert steady(resumed.state.log_history) == steady(whole.state.log_history)
    final, again = parameters(whole.trained), parameters(resumed.trained)
    assert all(torch.equal(final[name], again[name]) for name in final)


def test_the_phases_have_moments_of_their_own(make_trainer):
    trainer = make_trainer(update_schedule="separate", cloning_steps=3, total_env_steps=32)
    trainer.train()
    weight = trainer.trained.policy.get_output_embeddings().weight
    ppo_moments, cloning_moments = trainer.optimizer.state[weight], trainer.updater._moments[weight]
    # Two updates: of 2 epochs with 2 mini-batches, and of 3 cloning steps.
    assert (int(ppo_moments["step"]), int(cloning_moments["step"])) == (8, 6)
    assert not torch.equal(ppo_moments["exp_avg"], cloning_moments["exp_avg"])
    head = next(trainer.trained.value_head.parameters())
    assert head not in trainer.updater._moments  # which cloning has nothing to do with


def test_the_number_of_labels_limits_a_cloning_phase(make_trainer):
    trainer = make_trainer(update_schedule="separate", cloning_steps=100, cloning_epochs=0.5, total_env_steps=32)
    trainer.train()
    moments = trainer.updater._moments[trainer.trained.policy.get_output_embeddings().weight]
    labels = [entry["buffer/size"] for entry in trainer.state.log_history]
    assert int(moments["step"]) == sum(math.ceil(0.5 * each / trainer.args.mini_batch_size) for each in labels)
    with pytest.raises(ValueError, match="needs `update_schedule='separate'`"):
        make_trainer(cloning_epochs=1)


def test_resume_true_takes_the_newest_and_says_if_there_is_none(make_trainer):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        make_trainer(overwrite=False).train(resume_from_checkpoint=True)
    first = make_trainer(save_strategy="steps", save_steps=1, total_env_steps=32)
    first.train()
    second = make_trainer(save_strategy="steps", save_steps=1, total_env_steps=32)
    assert second.train(resume_from_checkpoint=True).global_step == 2


def test_a_folder_that_is_not_a_checkpoint_is_refused(make_trainer, toy_checkpoint):
    with pytest.raises(ValueError, match="not a checkpoint of this trainer"):
        make_trainer().train(resume_from_checkpoint=toy_checkpoint)


def test_a_foreign_or_damaged_checkpoint_is_refused_with_what_differs(make_trainer, tmp_path):
    make_trainer(save_strategy="steps", total_env_steps=16).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"

    class OtherTask(ColourTask):
        name = "shapes"

    def refusal(task=None, **overrides):
        with pytest.raises(ValueError, match="checkpoint-1 is") as refused:
            make_trainer(task, **overrides).train(resume_from_checkpoint=str(checkpoint))
        return str(refused.value)

    assert "is from a run on 'colours', not 'shapes'" in refusal(OtherTask())
    assert "gamma was 0.9 and is 0.5; per_device_train_batch_size was 8 and is 4" in refusal(
        gamma=0.5, per_device_train_batch_size=4
    )
    assert "task.env_kwargs was {} and is {'length': 5}" in refusal(ColourTask(length=5))
    make_trainer(gamma=0.5, allow_changed_config=True).train(resume_from_checkpoint=str(checkpoint))
    contents = checkpoint / "manifest.json"
    alone = contents.read_text()
    contents.write_text(alone.replace('"processes": 1', '"processes": 2'))
    assert "from a run with 2 processes, not 1" in refusal(allow_changed_config=True)
    older = json.loads(alone)
    del older["settings"]["gamma"]  # from a version without this setting
    contents.write_text(json.dumps(older))
    assert "gamma was 0.9 and is 0.5" in refusal(gamma=0.5)
    make_trainer().train(resume_from_checkpoint=str(checkpoint))
    contents.write_text(alone)
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "damaged: the contents of model.safetensors have changed" in refusal()
    weights.write_bytes(whole[:1000])
    assert "damaged: model.safetensors has 1000 bytes, not" in refusal()
    weights.unlink()
    assert "damaged: model.safetensors is missing" in refusal()
    contents.write_text(alone[:100])
    assert "damaged: manifest.json can't be read" in refusal()


def test_an_adapter_is_resumed_with_its_own_settings_only(make_trainer, toy_checkpoint, tmp_path):
    model = AutoModelForImageTextToText.from_pretrained(toy_checkpoint)

    def make(alpha):
        lora = LoraConfig(r=2, lora_alpha=alpha, target_modules=lora_target_modules(model))
        return make_trainer(save_strategy="steps", total_env_steps=16, trainer_kwargs={"peft_config": lora})

    make(4).train()
    with pytest.raises(ValueError, match=r"adapter.lora_alpha was 4 and is 8"):
        make(8).train(resume_from_checkpoint=True)
    assert make(4).train(resume_from_checkpoint=True).global_step == 1


def test_logits_that_are_not_finite_end_the_run_with_a_checkpoint(make_trainer, tmp_path):
    trainer = make_trainer(save_strategy="steps", save_steps=10)
    finish = trainer._finish_update

    def break_it(*args):
        finish(*args)
        with torch.no_grad():
            trainer.trained.policy.get_output_embeddings().weight[0, 0] = math.nan

    trainer._finish_update = break_it
    with pytest.raises(FloatingPointError, match=r"generation produced NaN logits \(process 0\)"):
        trainer.train()
    assert (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").is_file()


def test_a_stop_is_saved_next_to_an_older_run(make_trainer, tmp_path):
    """That there is a checkpoint of this number doesn't mean that it is ours."""

    class Spent(Corrector):
        exhausted = False

        def correct(self, requests):
            self.exhausted = True
            return [Correction("right")] * len(requests)

    make_trainer(save_strategy="steps", total_env_steps=16).train()
    older = (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").stat().st_mtime_ns
    make_trainer(corrector=Spent(), save_strategy="steps", save_steps=10, learning_rate=1e-2).train()
    assert (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").stat().st_mtime_ns > older


class ListedColours(ColourTask):
    """Three deals that can be asked for by number."""

    def starts(self):
        return [{"deal": place} for place in range(3)]

    def describe_start(self, info):
        return {"colour": info["colour"], "source": "colours"}


def test_all_starts_are_evaluated_once(make_trainer):
    trainer = make_trainer(task=ListedColours(), eval_episodes="all")
    report = trainer.evaluate()
    assert report.complete
    assert report.metrics("eval")["eval_episodes"] == 3
    assert [set(episode.start) for episode in report.episodes] == [{"colour", "source"}] * 3
    assert len(trainer.evaluate(episodes=4).episodes) == 4
    assert len(trainer.evaluate(ColourTask(), episodes=2).episodes) == 2
    with pytest.raises(ValueError, match="say how many episodes"):
        trainer.evaluate(ColourTask())


def test_all_of_random_deals_is_refused_before_training(make_trainer):
    with pytest.raises(ValueError, match="say how many episodes"):
        make_trainer(eval_episodes="all", eval_strategy="steps", eval_steps=1)


def test_an_evaluation_ends_on_a_stop_signal(make_trainer):
    trainer = make_trainer(eval_episodes=50)
    trainer.signals.received = 15
    before = len(trainer.state.log_history)
    assert not trainer.evaluate().complete
    assert len(trainer.state.log_history) == before  # half of one is in no log


@pytest.mark.parametrize(
    "failing", ["torch.save", "safetensors.torch.save_file", "trl_gtr.runs.manifest.Manifest.listing"]
)
def test_a_full_disk_leaves_the_old_checkpoint_as_it_was(make_trainer, tmp_path, monkeypatch, failing):
    run = tmp_path / "run"
    trainer = make_trainer(save_strategy="steps", save_steps=1, save_total_limit=1, total_env_steps=48)
    finish = trainer._finish_update

    def fill_the_disk(*args):
        if trainer.state.global_step == 1:

            def no_space(*args, **kwargs):
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(failing, no_space)
            monkeypatch.setattr("trl_gtr.policy.weights.save_file", no_space)
        finish(*args)

    trainer._finish_update = fill_the_disk
    with pytest.raises(OSError, match=r"checkpoint-2 could not be written .*No space left.* fix this and resume"):
        trainer.train()
    monkeypatch.undo()
    assert [path.name for path in run.glob("*checkpoint*")] == ["checkpoint-1"]
    again = make_trainer(save_strategy="steps", save_steps=1, save_total_limit=1, total_env_steps=48)
    assert again.train(resume_from_checkpoint=True).global_step == 3
    assert [path.name for path in run.glob("*checkpoint*")] == ["checkpoint-3"]


def test_metrics_are_documented(make_trainer):
    page = DOCS / "metrics.md"
    trainer = make_trainer(kl_coef=0.1, eval_strategy="steps", eval_steps=1, eval_episodes=4, total_env_steps=16)
    trainer.train()
    documented = page.read_text()
    logged = {name for entry in trainer.state.log_history for name in entry} - {"step", "epoch"}
    missing = sorted(name for name in logged if f"`{name}`" not in documented and "true_colour" not in name)
    assert not missing
