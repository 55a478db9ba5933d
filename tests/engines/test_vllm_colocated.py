"""A vLLM in the learner's process, without vLLM: what it is given, when it sleeps, and what ends a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy import quiet_config
from vlms import some_images, some_prompts

from trl_gtr.engines import vllm_colocated
from trl_gtr.engines.base import EngineLost
from trl_gtr.engines.vllm import VLLMEngine
from trl_gtr.engines.vllm_colocated import ColocatedVLLM
from trl_gtr.policy.scoring import VLMPolicy

PROMPTS, IMAGES = some_prompts(2), some_images(2)


class FakeLLM:
    """Keeps count of its memory, and like vLLM fails if memory is mapped twice or used while it sleeps."""

    expand: Any = staticmethod(list)

    def __init__(self, model: str, **_: Any) -> None:
        self.config = json.loads((Path(model) / "config.json").read_text())
        self.mapped = {"weights", "kv_cache"}
        self.version, self.cached = "", 0
        self.finish_reason, self.room = "stop", 10**6
        self.calls: list[str] = []
        shutdown = SimpleNamespace(shutdown=lambda: None)
        resets = {"reset_mm_cache": lambda: None, "reset_encoder_cache": lambda: None}
        self.llm_engine = SimpleNamespace(engine_core=shutdown, **resets)

    def sleep(self, level: int) -> None:
        self.calls.append("sleep")
        self.mapped = set()

    def wake_up(self, tags: list[str] | None = None) -> None:
        for tag in tags or ["weights", "kv_cache"]:
            assert tag not in self.mapped, f"{tag} are mapped already"
            self.calls.append(tag)
            self.mapped.add(tag)

    def reset_prefix_cache(self) -> bool:
        self.cached = 0
        return True

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "gtr_load":
            assert "weights" in self.mapped
            list(args[0])
        if method == "gtr_use":
            [self.version] = args
        return [{"version": self.version}]

    def generate(self, prompts: list[Any], parameters: list[Any], use_tqdm: bool) -> list[Any]:
        assert self.mapped == {"weights", "kv_cache"}
        self.cached += len(prompts)
        return [self.answer(prompt["prompt_token_ids"]) for prompt in prompts]

    def answer(self, ids: list[int]) -> Any:
        if len(ids) > self.room:
            raise ValueError("The prompt is longer than the maximum model length")
        output = SimpleNamespace(
            finish_reason=self.finish_reason, token_ids=[70], logprobs=[{70: SimpleNamespace(logprob=-1.0)}]
        )
        return SimpleNamespace(outputs=[output], prompt_token_ids=self.expand(ids))


@pytest.fixture
def engine(tiny_vlm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMEngine]:
    model, processor = tiny_vlm()
    model.config.architectures = None  # as of a model that was built in code
    policy = VLMPolicy(model, processor, temperature=1.0, max_completion_length=8)
    token = model.config.image_token_id
    count = int((policy.encoder.encode(PROMPTS[:1], IMAGES[:1])["input_ids"] == token).sum())
    known = SimpleNamespace(get_supported_archs=lambda: ["LlavaForConditionalGeneration"])
    fake: Any = SimpleNamespace(LLM=FakeLLM, SamplingParams=dict, ModelRegistry=known)
    monkeypatch.setattr(vllm_colocated, "_import_vllm", lambda: fake)
    monkeypatch.setattr(
        FakeLLM, "expand", lambda _, ids: [t for each in ids for t in [each] * (count if each == token else 1)]
    )
    args = quiet_config(tmp_path, engine="vllm", vllm_enable_sleep_mode=True)
    made = VLLMEngine(policy, model, ColocatedVLLM(model, processor, args, 8))
    yield made
    made.backend._batch.close()  # type: ignore[attr-defined]


def vllm_of(engine: VLLMEngine) -> FakeLLM:
    llm: FakeLLM = engine.backend.llm  # type: ignore[attr-defined]
    return llm


def test_memory_is_woken_once_in_every_round(engine: VLLMEngine) -> None:
    for _ in range(2):
        engine.sync(engine.model)
        with engine.ready():
            engine.generate(PROMPTS, IMAGES)
    with engine.ready():  # an evaluation, without a sync before it
        engine.generate(PROMPTS, IMAGES)
    engine.sync(engine.model)
    engine.sync(engine.model)  # nothing in between
    both = ["weights", "kv_cache", "sleep"]
    assert vllm_of(engine).calls == ["sleep", *both, *both, "weights"]


def test_a_rollout_starts_with_empty_caches(engine: VLLMEngine) -> None:
    """What an evaluation has cached would change the last digits of log-probs, and a resumed run lacks it."""
    engine.sync(engine.model)
    with engine.ready():
        engine.generate(PROMPTS, IMAGES)
        assert vllm_of(engine).cached == 2
    with engine.ready():
        assert vllm_of(engine).cached == 0


def test_the_saved_config_names_the_models_class(engine: VLLMEngine) -> None:
    assert vllm_of(engine).config["architectures"] == ["LlavaForConditionalGeneration"]
    assert engine.model.config.architectures is None  # the learner's own stays as it was


def test_an_observation_that_is_expanded_otherwise_is_refused_at_the_start(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with engine.ready():
        engine.check(PROMPTS[0], IMAGES[0])
        assert torch.equal(torch.get_rng_state(), before)
        monkeypatch.setattr(FakeLLM, "expand", lambda _, ids: [*ids, 0])
        with pytest.raises(ValueError, match="expands this model's images in another way"):
            engine.check(PROMPTS[0], IMAGES[0])
        with pytest.raises(EngineLost, match="expands this model's images in another way"):  # the run is saved
            engine.generate(PROMPTS, IMAGES)


def test_what_goes_wrong_in_mid_run_is_something_to_save_for(engine: VLLMEngine) -> None:
    llm = vllm_of(engine)
    with engine.ready():
        llm.finish_reason = "abort"
        with pytest.raises(EngineLost, match="'abort'"):
            engine.generate(PROMPTS, IMAGES)
        llm.finish_reason, llm.room = "stop", 2
        with pytest.raises(EngineLost, match="longer than the maximum model length"):
            engine.generate(PROMPTS, IMAGES)
        llm.version = "older"
        with pytest.raises(EngineLost, match="other weights"):
            engine.generate(PROMPTS, IMAGES)
