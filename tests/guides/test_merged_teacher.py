"""GTR-Turbo on the toy world: what the teacher is, what it teaches, and what a checkpoint keeps of it."""

import copy
import math
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from toy import ColourTask, quiet_config

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.correctors.base import BudgetExhausted, failed
from trl_gtr.distributed.means import Means
from trl_gtr.engines.base import EngineLost
from trl_gtr.guides.merged_teacher import MAX_KL, MergedTeacher, thought_kl
from trl_gtr.guides.teacher_model import check_mergeable
from trl_gtr.learning.losses import policy_loss
from trl_gtr.policy.loading import load_policy
from trl_gtr.policy.network import PolicyWithValue
from trl_gtr.policy.scores import Scores
from trl_gtr.trainer import GTRTrainer
from trl_gtr.types import Generation

UNSTEADY = ("time/", "speed/", "memory/", "teacher/merge_seconds")


def steady(log):
    return [{name: value for name, value in entry.items() if not name.startswith(UNSTEADY)} for entry in log]


def logits(model, trainer):
    """On a fixed picture and prompt."""
    image = np.full((28, 28, 3), 90, np.uint8)
    inputs = trainer.policy.encoder.encode(["Which colour?"], [image])
    with torch.no_grad():
        return model(**inputs).logits


def play(trainer):
    with trainer.engine.ready():
        return trainer.collector.collect(trainer.engine, 4)


# --- the teacher -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True])
def test_the_first_teacher_is_the_start_and_later_ones_follow(make_trainer, lora):
    trainer = make_trainer(MergedTeacher("kl", merge="linear", weighting="sma", merge_every=2), lora)
    start, teachers = logits(trainer.trained.policy, trainer), []
    assert torch.allclose(logits(trainer.guide.teacher, trainer), start, atol=1e-5)
    real = trainer.guide.after_update

    def after_update(model, means):
        real(model, means)
        teachers.append(logits(trainer.guide.teacher, trainer))

    trainer.guide.after_update = after_update
    trainer.train()
    assert torch.allclose(teachers[0], start, atol=1e-5)  # nothing is merged in the first update
    assert not torch.allclose(teachers[1], start, atol=1e-5)
    assert torch.equal(teachers[2], teachers[1])
    assert not torch.equal(teachers[3], teachers[1])  # not frozen after the first merge
    assert not torch.allclose(teachers[3], logits(trainer.trained.policy, trainer), atol=1e-5)


def test_the_teacher_of_adapters_is_the_merge_of_the_products_before_the_acting_one(make_trainer):
    trainer = make_trainer(MergedTeacher("kl", merge="linear", weighting="sma"), lora=True, total_env_steps=24)
    layers = [m for name, m in trainer.trained.policy.named_modules() if name.endswith("self_attn.q_proj")]
    deltas = [[layer.get_delta_weight("default").detach().clone() for layer in layers]]
    real = trainer.guide.after_update

    def after_update(model, means):
        deltas.append([layer.get_delta_weight("default").detach().clone() for layer in layers])
        real(model, means)

    trainer.guide.after_update = after_update
    trainer.train()
    taught = [m for name, m in trainer.guide.teacher.named_modules() if name.endswith("self_attn.q_proj")]
    for place, (layer, dense) in enumerate(zip(layers, taught, strict=True)):
        mean = torch.stack([each[place] for each in deltas[:-1]]).mean(0)
        assert torch.allclose(dense.weight, layer.get_base_layer().weight + mean, atol=1e-6)


def test_weights_that_are_not_merged_are_shared(make_trainer):
    trainer = make_trainer(lora=True)
    base = {id(weight) for weight in trainer.trained.policy.parameters()}
    own = [name for name, weight in trainer.guide.teacher.named_parameters() if id(weight) not in base]
    assert own
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in own)


@pytest.mark.parametrize("lora", [False, True])
def test_the_policy_checkpoints_its_layers_and_the_teacher_does_not(make_trainer, lora):
    trainer = make_trainer(MergedTeacher("sft"), lora, gradient_checkpointing=True, total_env_steps=8)
    trainer.train()
    assert not trainer.guide.teacher.is_gradient_checkpointing
    assert trainer.trained.policy.is_gradient_checkpointing


# --- SFT -------------------------------------------------------------------------------------------------------------


class Scripted:
    """An engine that answers from a script, over and over."""

    def __init__(self, policy, texts):
        self.policy, self.texts, self.asked = policy, texts, []

    def ready(self):
        return torch.no_grad()

    def generate(self, prompts, images, greedy=False):
        self.asked.append(len(prompts))
        ids = [self.policy.encode_response(self.texts[i % len(self.texts)]) for i in range(len(prompts))]
        return [Generation(each, self.policy.spans.text(each)) for each in ids]


def test_the_teachers_thought_is_cloned_with_the_agents_action_masked(make_trainer):
    trainer = make_trainer()
    rollout, guide, spans = play(trainer), trainer.guide, trainer.policy.spans
    guide.writer = Scripted(trainer.policy, ['{"thoughts": "it is blue", "action": "green"}'])
    means = Means()
    taught = guide.labels(rollout, 0, means)
    valid = [step for step in rollout.transitions if step.response.valid]
    assert taught == len(valid) == len(guide.buffer)
    assert means.reduce()["teacher/parsed"] == 1.0
    for step, sample in zip(valid, guide.buffer.samples(), strict=True):
        assert spans.text(sample.target_ids[: sample.num_labels]) == '{"thoughts": "it is blue'
        own = spans.action_start(step.response_ids, step.response.action_span)
        assert np.array_equal(sample.target_ids[sample.num_labels :], step.response_ids[own:])


def test_a_teacher_that_does_not_parse_is_asked_again_and_then_given_up(make_trainer):
    trainer = make_trainer(MergedTeacher("sft", tries=3))
    rollout, means = play(trainer), Means()
    valid = sum(step.response.valid for step in rollout.transitions)
    engine = trainer.guide.writer = Scripted(trainer.policy, ['{"thoughts": "it is'])
    assert trainer.guide.labels(rollout, 0, means) == 0
    assert sum(engine.asked) == 3 * valid
    assert means.reduce()["teacher/parsed"] == means.reduce()["teacher/valid"] == 0.0
    assert len(trainer.guide.buffer) == 0


def test_tries_do_not_hide_how_much_of_what_the_teacher_writes_is_invalid(make_trainer):
    """It is valid at every second place of a batch: once it is asked for one step alone, it always is."""
    trainer = make_trainer(MergedTeacher("sft", tries=9))
    rollout, means = play(trainer), Means()
    valid = sum(step.response.valid for step in rollout.transitions)
    texts = ['{"thoughts": "it is a", "action": "red"}', '{"thoughts": "it is']
    engine = trainer.guide.writer = Scripted(trainer.policy, texts)
    assert trainer.guide.labels(rollout, 0, means) == valid
    assert sum(engine.asked) > valid
    logged = means.reduce()
    assert logged["teacher/parsed"] == 1.0
    assert logged["teacher/valid"] == pytest.approx(valid / sum(engine.asked))


def test_the_teacher_samples_what_the_policy_may_sample(make_trainer):
    """Its thoughts come from the policy's own engine and code: no suppressed ids, nothing encoded again."""
    trainer = make_trainer(MergedTeacher("sft", temperature=1.0, top_k=0))
    rollout = play(trainer)
    trainer.guide.labels(rollout, 0, Means())
    ids = np.concatenate([sample.target_ids[: sample.num_labels] for sample in trainer.guide.buffer.samples()])
    assert not trainer.policy.suppressed[ids].any()
    assert trainer.guide.writer.policy is trainer.policy


def test_the_teacher_is_evaluated_like_the_policy_and_closed_with_the_trainer(make_trainer, monkeypatch):
    trainer = make_trainer(MergedTeacher("sft", temperature=0.2, top_k=5))
    guide, engine = trainer.guide, trainer.engine
    assert (guide.engine.temperature, guide.engine.top_k) == (engine.temperature, engine.top_k)
    assert (guide.writer.temperature, guide.writer.top_k) == (0.2, 5)
    closed = []
    for each in (guide.engine, guide.writer):
        monkeypatch.setattr(each, "close", partial(closed.append, each))
    trainer.close()
    assert closed == [guide.engine, guide.writer]


def test_the_teacher_does_not_change_what_the_agent_samples(make_trainer):
    trainer = make_trainer()
    rollout = play(trainer)
    before = torch.get_rng_state()
    trainer.guide.labels(rollout, 0, Means())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_corrector_goes_first_and_the_teacher_fills_in(make_trainer):
    trainer = make_trainer(MergedTeacher("sft", corrector=ExpertCorrector()))
    rollout, guide, spans = play(trainer), trainer.guide, trainer.policy.spans
    guide.writer = Scripted(trainer.policy, ['{"thoughts": "it is a", "action": "red"}'])
    valid = [i for i, step in enumerate(rollout.transitions) if step.response.valid]
    silent = valid[::2]
    for i in silent:
        rollout.corrections[i] = failed("timeout")
    corrected = sum(c is not None and c.verdict == "corrected" for c in rollout.corrections)
    assert guide.labels(rollout, 0, Means()) == corrected + len(silent)
    texts = [spans.text(sample.target_ids[: sample.num_labels]) for sample in guide.buffer.samples()]
    assert sum(text == '{"thoughts": "it is a' for text in texts) == len(silent)
    assert guide.metrics()["corrector/failed_timeout"] == len(silent)


def test_the_run_goes_on_without_the_corrector(make_trainer, caplog):
    class Spent(ExpertCorrector):
        exhausted = True

        def correct(self, requests):
            raise BudgetExhausted("the budget is spent")

    trainer = make_trainer(MergedTeacher("sft", corrector=Spent()), total_env_steps=24)
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.state.log_history[-1]["corrector/failed"] == 1
    assert len(trainer.guide.buffer) > 0
    (warning,) = [record.getMessage() for record in caplog.records if "budget" in record.getMessage()]
    assert warning == "Update 1: the budget is spent. The run goes on with its other teacher alone."


# --- KL --------------------------------------------------------------------------------------------------------------


def scores(token_logprobs, action_start, mask=None):
    tokens = torch.as_tensor(token_logprobs)
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    zeros = torch.zeros(len(tokens))
    return Scores(zeros, zeros, zeros, tokens, mask, torch.tensor(action_start))


def test_the_kl_is_the_mean_over_thought_tokens_each_bounded():
    policy = scores([[-1.0, -1.0, -1.0, -1.0], [-0.5, -0.5, -0.5, 0.0]], [3, 1])
    teacher = scores([[-2.0, -0.5, -99.0, -50.0], [-1.5, -9.0, -9.0, 0.0]], [3, 1])
    assert thought_kl(policy, teacher).tolist() == pytest.approx([(1.0 + 0.0 + MAX_KL) / 3, 1.0])
    assert thought_kl(scores([[-1.0]], [0]), scores([[-2.0]], [0])).tolist() == [0.0]


def test_the_penalty_moves_the_policy_down_its_gradient():
    """PPO's gradient with −β K as the advantage, over all tokens, against autograd's of the expected penalty."""
    torch.manual_seed(0)
    theta, teacher = torch.randn(6, requires_grad=True), torch.randn(6).log_softmax(0)
    logprobs, beta = theta.log_softmax(0), 0.7
    old = logprobs.detach()
    kl = thought_kl(scores(old[:, None], [1] * 6), scores(teacher[:, None], [1] * 6))
    losses, _ = policy_loss(logprobs, old, -beta * kl, cliprange=0.1, dual_clip=None)
    (ours,) = torch.autograd.grad((old.exp() * losses).sum(), theta, retain_graph=True)
    expected = beta * (logprobs.exp() * (old - teacher).clamp(0, MAX_KL)).sum()
    (exact,) = torch.autograd.grad(expected, theta, retain_graph=True)
    assert torch.allclose(ours, exact, atol=1e-6)
    # Without the lower bound it is the gradient of the KL itself.
    losses, _ = policy_loss(logprobs, old, -(old - teacher), cliprange=0.1, dual_clip=None)
    (unbounded,) = torch.autograd.grad((old.exp() * losses).sum(), theta, retain_graph=True)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), theta)
    assert torch.allclose(unbounded, exact, atol=1e-6)


@pytest.mark.parametrize("lora", [False, True])
def test_the_penalty_is_zero_while_the_teacher_is_the_policy(make_trainer, lora):
    """It would not be if the teacher saw no picture, other ids, or logits of another position."""
    trainer = make_trainer(MergedTeacher("kl", kl_beta=3.0), lora)
    rollout, means = play(trainer), Means()
    response = replace(rollout.transitions[0].response, error="not an object")
    rollout.transitions[0] = replace(rollout.transitions[0], response=response)
    acted = trainer.make_experience.scorer.score_all(rollout.transitions)
    shaping = trainer.guide.shaping(rollout, acted, means)
    valid = torch.tensor([step.response.valid for step in rollout.transitions])
    assert valid.sum() >= 4
    assert (shaping[~valid] == -3.0 * MAX_KL).all()
    assert shaping[valid].abs().max() < 1e-4
    assert means.reduce()["teacher/kl"] < 1e-4
    with torch.no_grad():
        for weight in trainer.guide.teacher.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    moved = trainer.guide.shaping(rollout, acted, Means())
    teacher = trainer.make_experience.scorer.score_all(
        rollout.transitions, PolicyWithValue(trainer.guide.teacher, None)
    )
    assert moved[valid].tolist() == pytest.approx((-3.0 * thought_kl(acted, teacher))[valid].tolist())
    assert moved[valid].min() < -0.01


def test_the_penalty_is_in_reward_units(make_trainer):
    trainer = make_trainer(MergedTeacher("kl"), reward_scale=0.1)
    rollout = play(trainer)
    broken = replace(rollout.transitions[0], response=replace(rollout.transitions[0].response, error="no"))
    rollout.transitions[0] = broken
    acted = trainer.make_experience.scorer.score_all(rollout.transitions)
    assert float(trainer.guide.shaping(rollout, acted, Means())[0]) == pytest.approx(-0.1 * MAX_KL)


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "lora"), [("sft", True), ("kl", False)])
def test_a_killed_run_resumes_to_the_same_curve(make_trainer, tmp_path, variant, lora):
    settings = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    settings |= {"eval_episodes": 2}

    def trainer(name):
        return make_trainer(MergedTeacher(variant, merge_every=2, ema_alpha=0.7), lora, name, **settings)

    whole = trainer("whole")
    whole.train()
    log = whole.state.log_history
    assert "eval_teacher_success" in log[2]
    assert {"teacher/distance", "teacher/travelled", "teacher/merge_seconds", "time/guide"} <= set(log[1])
    assert ("teacher/parsed" if variant == "sft" else "teacher/kl") in log[0]
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert list((checkpoint / "guide_files").iterdir())
    shutil.rmtree(tmp_path / "whole" / "teacher")  # the checkpoint has all that it takes
    resumed = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert steady(resumed.state.log_history) == steady(log)
    for one, two in zip(whole.trained.parameters(), resumed.trained.parameters(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(whole.guide.teacher.parameters(), resumed.guide.teacher.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("update", [0, 1])
@pytest.mark.parametrize("fault", [EngineLost("the server is gone"), FloatingPointError("NaN logits")], ids=repr)
def test_a_teacher_that_can_not_write_leaves_nothing_behind(make_trainer, tmp_path, monkeypatch, update, fault):
    """The abandoned rollout is played again: its policy must join the past once, and its labels be cloned once."""

    def trainer(name):
        guide = MergedTeacher("sft", merge="linear", weighting="sma")  # every policy counts
        return make_trainer(guide, True, name, save_strategy="steps", save_steps=100)

    whole = trainer("whole")
    whole.train()
    cut = trainer("cut")
    generate = cut.guide.writer.generate

    def lose(*args, **kwargs):
        if cut.state.global_step == update:
            raise fault
        return generate(*args, **kwargs)

    raise_first, told = cut.processes.raise_first, []
    monkeypatch.setattr(cut.processes, "raise_first", lambda found: (told.append(found), raise_first(found)))
    monkeypatch.setattr(cut.guide.writer, "generate", lose)
    with pytest.raises(type(fault), match=str(fault)):
        cut.train()
    assert [each for each in told if each is not None] == [fault]  # every process learns of it, so none waits
    assert (tmp_path / "cut" / f"checkpoint-{update}").is_dir()
    resumed = trainer("cut")
    resumed.train(resume_from_checkpoint=True)
    assert steady(resumed.state.log_history) == steady(whole.state.log_history)
    for one, two in zip(whole.guide.teacher.parameters(), resumed.guide.teacher.parameters(), strict=True):
        assert torch.equal(one, two)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"variant": "ppo"}, "`variant` must be 'sft' or 'kl', got 'ppo'"),
        ({"merge_every": 0}, "`merge_every` must be a whole number, at least 1, got 0"),
        ({"merge_every": 1.5}, r"`merge_every` must be a whole number, at least 1, got 1\.5"),
        ({"ties_density": 1.1}, r"`ties_density` must be above 0 and at most 1, got 1\.1"),
        ({"tries": 0}, "`tries` must be a whole number, at least 1"),
        ({"tries": 2.0}, "`tries` must be a whole number"),
        ({"top_k": -1}, "`top_k` must be a whole number, at least 0, got -1"),
        ({"temperature": 0.0}, "`temperature` above 0"),
        ({"temperature": math.nan}, "both finite, got 1.0 and nan"),
        ({"temperature": math.inf}, "both finite"),
        ({"kl_beta": math.nan}, "both finite, got nan"),
        ({"kl_beta": math.inf}, "both finite"),
    ],
)
def test_impossible_settings_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        MergedTeacher(**settings)


def test_a_variant_without_its_loss_is_refused(make_trainer):
    with pytest.raises(ValueError, match="set `thought_cloning_coef` above 0, or variant='kl'"):
        make_trainer(MergedTeacher("sft"), thought_cloning_coef=0.0)
    with pytest.raises(ValueError, match="set `ppo_coef` above 0, or variant='sft'"):
        make_trainer(MergedTeacher("kl"), ppo_coef=0.0)


def test_a_group_method_refuses_the_kl_before_anything_is_loaded(tmp_path):
    settings = {"advantage_estimator": "grpo", "group_size": 2, "rollout_steps": 3, "format_reward": 0.0}
    settings["value_head_sizes"] = [1024, 512]  # the default: a group method takes no other
    args = quiet_config(tmp_path, **settings)
    with pytest.raises(ValueError, match="relative to the group: the term would not be centred"):
        GTRTrainer("no/such-model", args, ColourTask(length=3), guide=MergedTeacher("kl"))


def test_a_quantized_base_is_refused(toy_checkpoint, tmp_path):
    model, processor = load_policy(toy_checkpoint)
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ValueError, match="this model's are quantized: load it without quantization"):
        GTRTrainer(
            model, quiet_config(tmp_path), ColourTask(), processing_class=processor, guide=MergedTeacher(),
            peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
        )  # fmt: skip


@pytest.mark.parametrize("option", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "lora_only"}])
def test_adapters_that_are_more_than_a_product_are_refused(toy_checkpoint, tmp_path, option):
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "fc1"], **option)
    with pytest.raises(ValueError, match="needs an adapter that is plain LoRA on linear layers"):
        GTRTrainer(toy_checkpoint, quiet_config(tmp_path), ColourTask(), guide=MergedTeacher(), peft_config=lora)


def test_an_adapter_on_tied_embeddings_is_refused(toy_checkpoint):
    model, _ = load_policy(toy_checkpoint)
    lora = LoraConfig(r=2, target_modules=["lm_head", "q_proj"])
    model.lm_head.weight = nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    check_mergeable(get_peft_model(copy.deepcopy(model), lora))
    model.lm_head.weight = model.get_input_embeddings().weight
    with pytest.raises(ValueError, match=r"tied weight \(\S*lm_head\)"):
        check_mergeable(get_peft_model(model, lora))


def test_a_teacher_belongs_to_a_run():
    with pytest.raises(RuntimeError, match="not attached to a run"):
        MergedTeacher().labels(None, 0, Means())


def test_sharded_weights_are_refused(make_trainer):
    run = make_trainer().guide._run.run
    sharded = SimpleNamespace(zero3=True)
    with pytest.raises(ValueError, match="needs whole weights, which ZeRO-3 shards: use ZeRO-2"):
        MergedTeacher().attach(replace(run, processes=sharded))
