"""The plan of LLaVA-1.6-Mistral-7B against closed forms, and what the command says about mistakes."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from paths import EXAMPLES
from planning_cases import planned, save_llava_7b
from rich.console import Console
from trl import ModelConfig

from trl_gtr import make_task
from trl_gtr.cli import main
from trl_gtr.correctors import CorrectorArguments
from trl_gtr.correctors.openai.budget import price_of
from trl_gtr.planning.cards import CARDS, card_named
from trl_gtr.planning.estimate import GIB, Estimate
from trl_gtr.planning.memory import RESERVE, Sharding, memory, memory_section
from trl_gtr.planning.money import corrector_section
from trl_gtr.planning.observations import observe
from trl_gtr.planning.plan import Plan, model_section
from trl_gtr.planning.skeleton import build_skeleton
from trl_gtr.planning.trace import Pass, trace
from trl_gtr.planning.work import Passes, PlannedConfig, Speed, Work, run_section, update_section
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.scripts.plan import print_plan

# By hand: q, k, v, o and the MLP's three; CLIP's four and two; the projector's two.
MISTRAL = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
CLIP = 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096)
ADAPTER = 393_871_360
HEAD = 4096 * 1024 + 1024 + 1024 * 512 + 512 + 512 + 1
RESPONSE = 256
CARD = {"available": 80 * GIB, "on_cpu": False}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """The paper's run on eight processes, its model traced once."""
    folder = tmp_path_factory.mktemp("llava")
    save_llava_7b(folder)
    args = PlannedConfig(
        output_dir=str(folder / "run"),
        processes=8,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=8,
        mini_batch_size=128,
        bf16=True,
    )
    model_args = ModelConfig(model_name_or_path=str(folder), dtype="bfloat16", use_peft=True, lora_r=128)
    skeleton = build_skeleton(model_args, args.value_head_sizes, detach_value=False)
    policy = VLMPolicy(skeleton.module.policy, skeleton.processor, max_completion_length=RESPONSE, temperature=1.0)
    seen = observe(make_task("points24"), policy, skeleton.module.policy, 4)
    longest = trace(skeleton.module, policy, *seen.rows(1), RESPONSE, bf16=True)
    return SimpleNamespace(args=args, skeleton=skeleton, seen=seen, passes=Passes(1, longest, RESPONSE, longest))


def values(found: list[Estimate]) -> dict[str, float | str]:
    return {each.name: each.value for each in found}


def test_parameters(llava):
    found = values(model_section(llava.skeleton))
    norms_and_embeddings = 2 * 32064 * 4096 + 65 * 4096
    clip_rest = 24 * (4 * 1024 + 4096 + 1024 + 4 * 1024) + 3 * 14 * 14 * 1024 + 577 * 1024 + 1024 + 4 * 1024
    projector, newline = 1024 * 4096 + 4096 + 4096 * 4096 + 4096, 4096
    assert found["parameters"] == MISTRAL + CLIP + norms_and_embeddings + clip_rest + projector + newline
    assert found["trained parameters"] == ADAPTER
    assert found["LoRA targets"] == 32 * 7 + 24 * 6 + 2
    assert found["value head"] == HEAD


def test_tokens_of_a_square_picture(llava):
    # 336 × 336 as a whole, and again in a grid of 336 × 672 without its margins: 24 × 24 patches, 24 line ends.
    assert llava.seen.image_tokens == 576 + 576 + 24
    assert llava.seen.picture_bytes == pytest.approx(3 * 3 * 336 * 336 * 4, rel=1e-4)  # three tiles


def test_flops(llava):
    """Two for each weight and token, and attention; a backward pass costs no more where weights are frozen."""
    tokens, patches = max(llava.seen.prompt_tokens) + RESPONSE, 3 * 577
    lora_mistral, lora_clip = (
        128 * 32 * (2 * 8192 + 2 * 5120 + 3 * 18432),
        128 * 24 * (4 * 2048 + 2 * 5120),
    )
    language = 2 * tokens * (MISTRAL + lora_mistral) + 32 * 4 * tokens**2 * 4096
    vision = 2 * patches * (CLIP + lora_clip) + 24 * 4 * 3 * 577**2 * 1024
    projector = 2 * 3 * 576 * (1024 * 4096 + 4096 * 4096)
    head = 2 * (RESPONSE + 1) * 4096 * 32064
    traced = llava.passes.longest
    assert traced.flops == pytest.approx(language + vision + projector + head, rel=0.01)
    assert traced.flops < traced.backward_flops < 1.15 * traced.flops
    assert traced.recomputed_flops == pytest.approx(language + vision, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "acting", "learning", "words"),
    [
        ({}, 0.3 * 80 * GIB, 0.3 * 80 * GIB, "30% of the card"),
        ({"vllm_gpu_memory_utilization": 0.5}, 0.5 * 80 * GIB, 0.5 * 80 * GIB, "50% of the card"),
        ({"vllm_enable_sleep_mode": True}, 0.3 * 80 * GIB, 0, "30% of the card"),
        ({"vllm_mode": "server"}, 0, 0, "where the server runs"),
    ],
)
def test_vllm_takes_its_share_of_the_card(llava, settings, acting, learning, words):
    """In place of the KV cache of transformers."""

    def planned_with(**engine):
        args = replace(llava.args, bf16=True, **engine)
        return memory(llava.skeleton, Work(args, clones=True), llava.seen, llava.passes, Sharding(), **CARD)

    ours, theirs = planned_with(engine="vllm", **settings), planned_with()
    cache = values(theirs.acting)["KV cache"]
    assert ours.peak_acting - theirs.peak_acting == pytest.approx(acting - cache)
    assert ours.peak_learning - theirs.peak_learning == pytest.approx(learning)
    said = [each.how for each in (*ours.lasting, *ours.acting) if each.name.startswith("vLLM")]
    assert len(said) == 1
    assert words in said[0]


def test_memory_without_deepspeed(llava):
    work = Work(llava.args, clones=True)
    found = memory(llava.skeleton, work, llava.seen, llava.passes, Sharding(), **CARD)
    parts = values([*found.lasting, *found.acting, *found.learning])
    base = values(model_section(llava.skeleton))["parameters"]
    assert parts["weights"] == 2 * base
    assert parts["adapters"] == 4 * ADAPTER
    assert parts["Adam"] == 8 * (ADAPTER + HEAD)
    assert parts["gradients"] == 4 * (ADAPTER + HEAD)
    tokens = max(llava.seen.prompt_tokens) + RESPONSE
    assert parts["KV cache"] == 2 * 32 * 8 * 128 * 2 * 8 * tokens
    # Each layer keeps its input, in bfloat16, of PPO's pass and of cloning's; the paper's step is joint.
    kept = 2 * (33 * tokens * 4096 * 2 + 24 * 3 * 577 * 1024 * 2 + RESPONSE * 32064 * 4)
    again = llava.passes.longest.largest_layer
    assert parts["activations checkpointed"] == pytest.approx(kept + again, rel=0.1)
    assert (
        found.peak_acting == sum(parts[n] for n in ("weights", "adapters", "value head", "Adam", "KV cache")) + RESERVE
    )
    for available, verdict in ((80 * GIB, "fits"), (16 * GIB, "too large")):
        assert values(memory_section(found, available, "here"))["verdict"] == verdict


@pytest.mark.parametrize(("stage", "weights", "gradients"), [(2, 1, 8), (3, 8, 8)])
def test_deepspeed_divides(llava, stage, weights, gradients):
    sharding = Sharding.read(EXAMPLES / f"accelerate_configs/zero{stage}.yaml")
    assert (sharding.stage, sharding.processes) == (stage, 2)
    found = memory(llava.skeleton, Work(llava.args, True), llava.seen, llava.passes, sharding, **CARD)
    parts, trained = values([*found.lasting, *found.acting, *found.learning]), ADAPTER + HEAD
    base = values(model_section(llava.skeleton))["parameters"]
    assert parts["weights"] == 2 * base / weights
    assert parts["Adam"] == 12 * trained / 8
    assert parts["gradients"] == 2 * trained / gradients
    assert parts.get("gathered weights", 0) == (2 * (base + trained) if stage == 3 else 0)


def test_a_merged_teacher_has_its_own_copy_of_the_adapted_layers(llava):
    language = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    vision = 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096) + 1024 * 4096 + 4096 * 4096
    for teacher, generated, scored in (("sft", 2048, 1024 + 16), ("kl", 1024, 2048 + 16)):
        work = Work(llava.args, clones=teacher == "sft", teacher=teacher)
        found = memory(llava.skeleton, work, llava.seen, llava.passes, Sharding(), **CARD)
        assert values(found.lasting)["merged teacher"] == 2 * (language + vision)
        assert (work.generated_samples, work.scored_samples) == (generated, scored)


def test_an_update_and_the_hours(llava):
    work = Work(llava.args, clones=True)
    update = values(update_section(work, llava.seen))
    assert (update["environment steps"], update["mini-batch"], update["accumulation steps"]) == (1024, 128, 8)
    assert update["optimizer steps"] == 4 * 8
    speed = Speed(CARDS["A100-80"], "A100-80", True, 0.5, 0.5)
    run, faster = (
        values(run_section(work, llava.seen, llava.passes, llava.skeleton, each))
        for each in (speed, Speed(CARDS["A100-80"], "A100-80", True, 1.0, 1.0))
    )
    assert run["updates"] == 15
    assert run["learning"] == pytest.approx(15 * 8192 * run["training pass"] / 8 / 156e12 / 3600)
    assert run["hours"] == pytest.approx(2 * faster["hours"])
    assert run["hours"] == pytest.approx(run["collecting"] + run["scoring"] + run["learning"])
    assert "hours" in values(run_section(work, llava.seen, llava.passes, llava.skeleton, None))


def test_dollars(llava):
    work = Work(llava.args, clones=True)
    found = values(corrector_section(work, llava.seen, CorrectorArguments(corrector="openai")))
    price, answer_price = price_of("gpt-4o")
    one = (found["prompt tokens"] * price + found["answer tokens"] * answer_price) / 1e6
    assert found["corrections"] == 15 * 1024
    assert found["dollars"] == pytest.approx(15 * 1024 * one)
    assert found["dollars with tools"] == pytest.approx(4 * found["dollars"])
    unlisted = CorrectorArguments(corrector="openai", corrector_model="mine")
    assert values(corrector_section(work, llava.seen, unlisted))["dollars"] == "unknown"
    for free in ("expert", "recorded", "none", "local"):
        assert values(corrector_section(work, llava.seen, CorrectorArguments(corrector=free)))["dollars"] == 0


def test_between_two_traced_lengths():
    passes = Passes(2, Pass(400.0, 800.0, 0, 0, 0, 200.0), 11, Pass(200.0, 0.0, 0, 0, 0, 0.0))
    assert passes.flops(1) == 100
    assert passes.flops(6) == 150
    assert passes.training_flops(6, checkpointing=False) == 450
    assert passes.training_flops(6, checkpointing=True) == 525


def test_the_table_fits_into_a_terminal(llava):
    work = Work(llava.args, clones=True)
    found = memory(llava.skeleton, work, llava.seen, llava.passes, Sharding(), **CARD)
    sections = {"model": model_section(llava.skeleton), "memory": memory_section(found, 16 * GIB, "of a small card")}
    console = Console(width=80, file=io.StringIO())
    print_plan(Plan("a plan", sections), console)
    text = console.file.getvalue()
    assert "…" not in text
    for words in ("393,871,360", "14.09 GiB", "too large", "traced"):
        assert words in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", str(EXAMPLES / "configs/points24_llava.yaml")], "no model of that name was found on the Hub"),
        (["--model_name_or_path", "tiny", "--card", "A1000"], "Unknown card 'A1000'"),
        (["--model_name_or_path", "tiny", "--utilisation", "0"], "--utilisation must be in"),
        (["--model_name_or_path", "tiny", "--processes", "3"], "must be a multiple of the number of processes, 3"),
        (["--model_name_or_path", "tiny", "--load_in_4bit", "true"], "quantized"),
        (["--model_name_or_path", "tiny", "--proceses", "3"], "did you mean `processes`?"),
        (["--model_name_or_path", "tiny", "--config_file", "missing.yaml"], "can't be read"),
        ([], "Which model?"),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("distributed_type: FSDP", "FSDP is not supported"),
        ("distributed_type: DEEPSPEED", "zero_stage"),
        ("a: 1", "distributed_type"),
        ("{", "not valid YAML"),
    ],
)
def test_other_files_are_not_taken_for_accelerates(tmp_path, content, message):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        Sharding.read(file)


def test_cards_by_name():
    assert card_named("h100") is CARDS["H100"]
    assert all(card.bf16_flops > card.fp32_flops for card in CARDS.values())


def test_processes_come_from_the_launchers_file(capsys):
    plan = planned(
        capsys,
        *("--model_name_or_path", "tiny", "--num_envs", "8", "--rollout_steps", "4", "--max_completion_length", "16"),
        *("--config_file", str(EXAMPLES / "accelerate_configs/zero2.yaml")),
    )
    assert plan["title"].endswith("2 processes")
    assert "over 2 processes" in plan["memory"]["adam"]["how"]
    assert all(each["how"] for name, section in plan.items() if name != "title" for each in section.values())


def test_a_group_method_plans_no_value_head(capsys):
    sizes = ("--model_name_or_path", "tiny", "--task", "ezpoints", "--num_envs", "8", "--rollout_steps", "4")
    short = ("--max_completion_length", "16", "--total_env_steps", "64", "--use_cpu", "--mini_batch_size", "16")
    shared = (*sizes, *short, "--kl_coef", "0", "--num_ppo_epochs", "1", "--thought_cloning_coef", "0")
    ppo = planned(capsys, *shared)
    group = planned(capsys, *shared, "--preset", "grpo", "--group_size", "4", "--refill_groups", "2")
    head = 128 * 1024 + 1024 + 1024 * 512 + 512 + 512 + 1  # by hand, as for LLaVA
    assert ppo["model"]["value_head"]["value"] == head
    assert group["model"]["value_head"]["value"] == 0
    assert "value_head" not in group["memory"]
    assert ppo["memory"]["adam"]["value"] - group["memory"]["adam"]["value"] == 2 * 4 * head
    assert group["an_update"]["most_steps"]["value"] == 8 * 7 * 3  # EZPoints ends after seven steps
    assert "most_steps" not in ppo["an_update"]
    # Scored once each, without the eight values that close a rollout of PPO.
    for plan, scored in ((ppo, 32 + 8), (group, 32)):
        run, updates = plan["the_run"], 2
        forward, training = run["forward_pass"]["value"], run["training_pass"]["value"]
        assert run["all_passes"]["value"] == pytest.approx(updates * ((32 + scored) * forward + 32 * training))
