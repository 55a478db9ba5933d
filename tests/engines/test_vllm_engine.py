"""The vLLM engine without vLLM: what it asks for, when it sends weights, and what it refuses."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from toy import ColourTask, quiet_config
from vlms import some_images, some_prompts

from trl_gtr import ExpertCorrector, GTRTrainer
from trl_gtr.engines.base import EngineLost, EngineRefused
from trl_gtr.engines.choice import EngineMaker, check_engine
from trl_gtr.engines.vllm import VLLMEngine
from trl_gtr.engines.vllm_requests import Backend, Request, Sampled, Weights, check_sampled, collapse_image_tokens
from trl_gtr.engines.vllm_serve import server_command
from trl_gtr.engines.vllm_worker import WORKER_EXTENSION, Checksums, norm_sums, plain_config, renamed
from trl_gtr.guides.merged_teacher import MergedTeacher
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.types import Prompt, Turn


class FakeBackend(Backend):
    """Answers with one text token and EOS, and keeps what it was asked."""

    def __init__(self, policy: VLMPolicy, image_token: int, image_tokens: int) -> None:
        self.policy, self.image_token, self.image_tokens = policy, image_token, image_tokens
        self.versions: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.requests: list[Request] = []
        self.closed = False

    def load(self, weights: Weights, version: str) -> None:
        self.weights = {name: weight.clone() for name, weight in weights()}
        self.versions.append(version)

    def sample(self, requests: Sequence[Request], version: str) -> list[Sampled]:
        assert version == self.versions[-1]
        self.requests = list(requests)
        ids = [70, self.policy.eos_token_ids[0]]
        return [Sampled(self.expand(each.ids), ids, [-1.0, -2.0]) for each in requests]

    def sample_one(self, request: Request, version: str) -> Sampled:
        return self.sample([request], version)[0]

    def expand(self, ids: list[int]) -> list[int]:
        return [t for token in ids for t in [token] * (self.image_tokens if token == self.image_token else 1)]

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def model_and_processor(tiny_vlm: Any) -> Any:
    return tiny_vlm()


@pytest.fixture
def engine(model_and_processor: Any) -> VLLMEngine:
    model, processor = model_and_processor
    policy = VLMPolicy(model, processor, temperature=0.7, repetition_penalty=1.1, max_completion_length=9)
    token = model.config.image_token_id
    encoded = policy.encoder.encode(some_prompts(1), some_images(1))["input_ids"][0]
    return VLLMEngine(policy, model, FakeBackend(policy, token, int((encoded == token).sum())))


def test_a_run_of_image_tokens_becomes_one() -> None:
    assert collapse_image_tokens([1, 9, 9, 9, 2, 3, 3, 9, 9], 9, 2) == [1, 9, 2, 3, 3, 9]
    assert collapse_image_tokens([9, 9], 9, 1) == [9]
    assert collapse_image_tokens([1, 9, 9, 9, 9, 2, 9, 9], 9, 3) == [1, 9, 9, 2, 9]  # two side by side


def test_requests_describe_the_scored_distribution(engine: VLLMEngine) -> None:
    backend: Any = engine.backend
    with engine.ready():
        generations = engine.generate(some_prompts(3), some_images(3))
        asked = backend.requests
        likeliest = engine.generate(some_prompts(3), some_images(3), greedy=True)
    assert [each.logprobs for each in likeliest] == [None] * 3
    assert [g.ids.tolist() for g in generations] == [[70, engine.policy.eos_token_ids[0]]] * 3
    assert generations[0].logprobs.tolist() == [-1.0, -2.0]
    for request, image in zip(asked, some_images(3), strict=True):
        assert request.ids.count(engine.image_token) == 1
        assert len(request.pictures) == 1
        assert np.array_equal(request.pictures[0], image)
        sampling = request.sampling
        assert sampling["temperature"] == 0.7
        assert sampling["repetition_penalty"] == 1.1
        assert sampling["max_tokens"] == 9
        assert sampling["stop_token_ids"] == engine.policy.eos_token_ids
        allowed = torch.ones_like(engine.policy.suppressed)
        allowed[sampling["allowed_token_ids"]] = False
        assert torch.equal(allowed, engine.policy.suppressed)
    assert {each.sampling["temperature"] for each in backend.requests} == {0.0}


def test_earlier_turns_bring_their_pictures(engine: VLLMEngine) -> None:
    first, second = some_images(2)
    prompt = Prompt("and now?", [Turn("what is this?", "a card", first)])
    with engine.ready():
        engine.generate([prompt], [second])
    [request] = engine.backend.requests  # type: ignore[attr-defined]
    assert request.ids.count(engine.image_token) == 2
    assert [np.array_equal(*pair) for pair in zip(request.pictures, (first, second), strict=True)] == [True, True]


def test_a_request_of_its_own_has_the_given_seed(engine: VLLMEngine) -> None:
    [prompt], [image] = some_prompts(1), some_images(1)
    with pytest.raises(RuntimeError, match="generate only within"):
        engine.respond(prompt, image, 5)
    with engine.ready():
        generation = engine.respond(prompt, image, 5)
    assert generation.logprobs is not None
    assert generation.logprobs.tolist() == [-1.0, -2.0]
    assert isinstance(engine.backend, FakeBackend)
    assert engine.backend.requests[0].sampling["seed"] == 5


def test_seeds_come_from_torchs_generator(engine: VLLMEngine) -> None:
    def seeds(greedy: bool = False) -> list[int | None]:
        engine.generate(some_prompts(4), some_images(4), greedy)
        return [each.sampling["seed"] for each in engine.backend.requests]  # type: ignore[attr-defined]

    with engine.ready():
        torch.manual_seed(3)
        first, second = seeds(), seeds()
        torch.manual_seed(3)
        assert seeds() == first
        assert len({*first, *second}) == 8
        before = torch.get_rng_state()
        assert seeds(greedy=True) == [None] * 4
        assert torch.equal(torch.get_rng_state(), before)


def test_changed_weights_are_sent_before_anything_is_sampled(engine: VLLMEngine) -> None:
    backend: Any = engine.backend
    for _ in range(2):
        with engine.ready():
            pass
    assert len(backend.versions) == 1  # nothing has changed since
    weight = engine.model.get_input_embeddings().weight
    with torch.no_grad():
        weight += 1
    with engine.ready():
        assert len(set(backend.versions)) == 2
    assert any(torch.equal(weight, each) for each in backend.weights.values())
    engine.sync(engine.model)
    assert len(set(backend.versions)) == 3
    engine.close()
    assert backend.closed


def test_two_engines_share_one_vllm_and_each_gets_its_own_weights(engine: VLLMEngine) -> None:
    other = copy.deepcopy(engine.model)
    teacher = VLLMEngine(engine.policy, other, engine.backend, temperature=0.2, top_k=5)
    backend, name = engine.backend, "model.language_model.norm.weight"
    assert isinstance(backend, FakeBackend)
    with torch.no_grad():
        other.get_parameter(name).add_(1.0)
    for turn in (engine, teacher, engine, teacher):
        with turn.ready():
            turn.generate(some_prompts(1), some_images(1))
        assert torch.equal(backend.weights[name], turn.model.get_parameter(name))
    assert (backend.requests[0].sampling["temperature"], backend.requests[0].sampling["top_k"]) == (0.2, 5)
    with teacher.ready():
        pass
    assert len(backend.versions) == 4  # nobody else had it in between


def test_all_processes_name_their_versions_alike(engine: VLLMEngine, tmp_path: Path) -> None:
    everybody: Any = SimpleNamespace(world_size=2, rank=1, gather=lambda own: ["first", own])
    args = quiet_config(tmp_path, engine="vllm")
    make = EngineMaker(args, engine.policy, Accelerator(cpu=True), everybody)
    make._backend = engine.backend
    made = make(engine.model)
    assert isinstance(made, VLLMEngine)
    assert made.version == "first-0"


def test_another_prompt_than_the_scored_one_is_refused(engine: VLLMEngine) -> None:
    engine.backend.image_tokens *= 2  # type: ignore[attr-defined]
    [prompt], [image] = some_prompts(1), some_images(1)
    message = "expands this model's images in another way"
    with engine.ready():
        for ask in (lambda: engine.generate([prompt], [image]), lambda: engine.respond(prompt, image, 1)):
            with pytest.raises(EngineLost, match=message):  # the run is saved
                ask()
        with pytest.raises(EngineRefused, match=message):
            engine.check(prompt, image)
    assert isinstance(engine.backend, FakeBackend)
    assert engine.backend.requests[0].sampling["max_tokens"] == 1
    with pytest.raises(FloatingPointError, match="NaN"):
        check_sampled([[1]], [Sampled([1], [5], [float("nan")])])


def test_towers_are_named_as_in_vllm() -> None:
    weights = {name: torch.zeros(1) for name in ("model.vision_tower.embeddings.x", "lm_head.weight")}
    old = ["vision_tower.vision_model.embeddings.x", "language_model.lm_head.weight"]
    assert [name for name, _ in renamed(weights.items(), old)] == [
        "model.vision_tower.vision_model.embeddings.x",
        "lm_head.weight",
    ]
    assert [name for name, _ in renamed(weights.items(), ["vision_tower.embeddings.x"])] == list(weights)


def test_weights_that_did_not_arrive_are_noticed() -> None:
    sent = {"a.norm.weight": torch.ones(3), "b.norm.weight": torch.zeros(3), "c.weight": torch.ones(2, 2)}
    sums = Checksums()
    assert dict(sums.watch(sent.items())) == sent
    in_use = {"x.norm.weight": torch.ones(3, dtype=torch.bfloat16), "y.weight": torch.zeros(2, 2)}
    assert sums.unknown(norm_sums(in_use.items())) == []
    in_use["x.norm.weight"] = torch.full((3,), 2.0)
    assert sums.unknown(norm_sums(in_use.items())) == ["x.norm.weight"]


def test_configs_are_compared_by_what_weights_depend_on(tiny_vlm: Any) -> None:
    first, second = (plain_config(tiny_vlm(family)[0].config) for family in ("llava", "llava_next"))
    assert first["model_type"] == "llava"
    assert first["text_config.hidden_size"] == 32
    assert first != second


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_tensor_parallel_size": 2}, "needs GPUs"),
        ({"vllm_enable_sleep_mode": True}, "needs a GPU"),
        ({"vllm_mode": "server", "vllm_sync": "nccl"}, "vllm_sync='nccl' needs a GPU"),
        ({"vllm_mode": "server", "vllm_sync": "gloo", "vllm_sync_dir": "/x"}, "leave one of them out"),
        ({"asynchronous": True, "ray_envs_per_actor": 2}, "leave `ray_envs_per_actor` at 1"),
        ({"temperature": 2.5}, "no `temperature` above 2"),
        ({"vllm_mode": "server", "vllm_tensor_parallel_size": 2}, "its own option .--tensor-parallel-size"),
        ({"vllm_mode": "server", "vllm_enable_sleep_mode": True}, "`vllm_enable_sleep_mode` is for a colocated"),
        ({"vllm_mode": "server", "vllm_gpu_memory_utilization": 0.5}, "its own option .--gpu-memory-utilization"),
        ({"vllm_mode": "server", "vllm_max_model_length": 512}, "its own option .--max-model-len"),
    ],
)
def test_settings_that_cannot_work_here_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=message):
        check_engine(quiet_config(tmp_path, engine="vllm", **settings))


def test_a_teachers_temperature_has_the_same_bound(tmp_path: Path) -> None:
    hot = MergedTeacher("sft", temperature=2.5)
    hot.check_settings(quiet_config(tmp_path))
    with pytest.raises(ValueError, match=r"no `temperature` above 2, got 2\.5"):
        hot.check_settings(quiet_config(tmp_path, engine="vllm"))


def test_processes_do_not_give_up_before_a_lost_server_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_gtr.engines.choice.PartialState", lambda: SimpleNamespace(num_processes=2))
    args = quiet_config(tmp_path, engine="vllm", vllm_mode="server", rollout_timeout=900.0, vllm_server_timeout=300.0)
    with pytest.raises(
        ValueError, match=r"three times `vllm_server_timeout` \(300\) must add up to less than `ddp_timeout`"
    ):
        check_engine(args)


def test_a_missing_vllm_is_told_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "trl-gtr\[vllm\]"'):
        GTRTrainer("no-such-model", quiet_config(tmp_path, engine="vllm"), ColourTask(), ExpertCorrector())


def test_a_missing_server_is_told_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # a server needs no vLLM here
    settings = {"engine": "vllm", "vllm_mode": "server", "vllm_server_timeout": 0.01}
    for url, message in {"http://127.0.0.1:9": "no vLLM server at", "localhost:9": "must start with http"}.items():
        with pytest.raises((ConnectionError, ValueError), match=message):
            GTRTrainer("no-such-model", quiet_config(tmp_path, vllm_base_url=url, **settings), ColourTask())


def test_a_family_that_vllm_does_not_know_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, args = ["LlavaForConditionalGeneration"], quiet_config(tmp_path, engine="vllm")
    vllm = SimpleNamespace(ModelRegistry=SimpleNamespace(get_supported_archs=lambda: known))
    monkeypatch.setattr("trl_gtr.engines.vllm_colocated._import_vllm", lambda: vllm)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("trl_gtr.trainer.load_or_take", lambda *_: pytest.fail("it was loaded"))
    check_engine(args, "tiny")
    known[:] = ["Qwen2VLForConditionalGeneration"]
    with pytest.raises(ValueError, match=r"vLLM has no LlavaForConditionalGeneration. Use engine='transformers'"):
        GTRTrainer("tiny", args, ColourTask())


def test_the_servers_command_ends_with_the_users_options() -> None:
    command = server_command(["--model", "mine", "--dtype", "bfloat16"])
    assert command[-4:] == ["--model", "mine", "--dtype", "bfloat16"]
    assert WORKER_EXTENSION in command
