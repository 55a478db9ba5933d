"""Run in a process of its own, since vLLM changes the one it is in: `python vllm_checks.py exactness OUT.json`.

Measures and writes numbers; tests/engines/test_vllm_real.py judges them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from trl_gtr import GTRConfig, GTRTrainer, TransformersEngine, load_policy, lora_target_modules, make_task
from trl_gtr.engines.vllm import VLLMEngine
from trl_gtr.engines.vllm_colocated import ColocatedVLLM
from trl_gtr.learning.mismatch import SamplerMismatch
from trl_gtr.policy.network import PolicyWithValue
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.types import Prompt, Turn

BATCH = 16
PARTS = {
    "layers": "language_model.layers",
    "vision tower": "vision_tower",
    "projector": "multi_modal_projector",
    "embeddings": "embed_tokens",
    "everything": "",
}


def observations(count: int = BATCH) -> tuple[list[str], list[np.ndarray]]:
    """First observations of EZPoints games."""
    task = make_task("ezpoints")
    env = task.make_env()
    prompts, images = [], []
    for seed in range(count):
        image, info = env.reset(seed=seed)
        prompts.append(task.prompt(image, info))
        images.append(np.array(image))
    env.close()
    return prompts, images


def mismatch(policy: VLMPolicy, model: Any, prompts: Any, images: Any, generations: Any) -> float:
    """Largest difference between the sampler's log-probs and the learner's."""
    ids = [each.ids for each in generations]
    with torch.no_grad():
        scores = policy.score(PolicyWithValue(model, None), prompts, images, ids, [0] * len(ids), 1.0)
    return max(
        float(np.abs(row[: len(each.ids)].numpy() - each.logprobs).max())
        for row, each in zip(scores.token_logprobs, generations, strict=True)
    )


def exactness() -> dict[str, Any]:
    found: dict[str, Any] = {}
    model, processor = load_policy("tiny")
    prompts, images = observations()
    torch.manual_seed(0)
    before, start = torch.get_rng_state(), time.perf_counter()
    backend = ColocatedVLLM(model, processor, GTRConfig(output_dir="unused", use_cpu=True, report_to="none"), 256)
    found["start seconds"] = time.perf_counter() - start
    found["start leaves torch's generator alone"] = torch.equal(before, torch.get_rng_state())

    def make(learner: Any = model, **settings: Any) -> VLLMEngine:
        policy = VLMPolicy(model, processor, **{"temperature": 1.0, "max_completion_length": 24} | settings)
        return VLLMEngine(policy, learner, backend)

    def sampled(engine: VLLMEngine, sync: bool = True) -> float:
        if sync:
            engine.sync(engine.model)
        return mismatch(engine.policy, engine.model, prompts, images, engine.generate(prompts, images))

    settings = {
        "T 1": {},
        "T 0.5": {"temperature": 0.5},
        "penalty 1.2": {"repetition_penalty": 1.2, "temperature": 0.2},
    }
    found["mismatch"] = {name: sampled(make(**each)) for name, each in settings.items()}
    engine = make()
    engine.sync(model)
    turns = [
        Prompt(prompt, [Turn("What is this?", "cards", image)]) for prompt, image in zip(prompts, images, strict=True)
    ]
    answers = engine.generate(turns, images)
    found["mismatch"]["earlier turns"] = mismatch(engine.policy, model, turns, images, answers)
    found |= repeatability(engine, prompts, images) | greedy(engine, prompts, images)
    found |= one_by_one(engine, prompts, images)
    found["frequencies"] = frequencies(make(max_completion_length=1), prompts[0], images[0])
    found["synced"], found["stale"] = {}, {}
    engine.sync(model)
    for part, inside in PARTS.items():
        perturb(model, inside)
        found["stale"][part] = sampled(engine, sync=False)
        found["synced"][part] = sampled(engine)
    perturb(model, "")
    with engine.ready():  # notices by itself
        found["synced"]["without a call of sync"] = sampled(engine, sync=False)
    base = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    lora = make(with_adapter(model))
    backend.load(base.items, lora.version)
    backend.loaded = lora.version
    found["stale"]["LoRA"] = sampled(lora, sync=False)
    found["synced"]["LoRA"] = sampled(lora)
    engine.close()
    return found


def with_adapter(model: Any) -> Any:
    config = LoraConfig(r=4, target_modules=lora_target_modules(model), init_lora_weights=False, lora_alpha=1)
    return get_peft_model(model, config)


def perturb(model: Any, inside: str) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if inside in name:
                weight.add_(0.05 * weight.abs().mean() * torch.randn_like(weight))


def repeatability(engine: VLLMEngine, prompts: Any, images: Any) -> dict[str, Any]:
    engine.sync(engine.model)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append([each.ids.tolist() for each in engine.generate(prompts, images)])
    return {"same seed, same ids": runs[0] == runs[1], "other seed, other ids": runs[0] != runs[2]}


def one_by_one(engine: VLLMEngine, prompts: Any, images: Any) -> dict[str, Any]:
    """Requests of their own, from many threads, twice in different orders."""
    seeds = list(range(len(prompts)))
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(engine.respond, prompts, images, seeds))
        backwards = list(pool.map(engine.respond, prompts[::-1], images[::-1], seeds[::-1]))[::-1]
    return {
        "one by one": mismatch(engine.policy, engine.model, prompts, images, answers),
        "one by one, same ids": sum(a.ids.tolist() == b.ids.tolist() for a, b in zip(answers, backwards, strict=True)),
    }


def greedy(engine: VLLMEngine, prompts: Any, images: Any) -> dict[str, Any]:
    ours = engine.generate(prompts, images, greedy=True)
    theirs = TransformersEngine(engine.policy, engine.model).generate(prompts, images, greedy=True)
    equal = sum(a.ids.tolist() == b.ids.tolist() for a, b in zip(ours, theirs, strict=True))
    return {"greedy equal": equal, "greedy asked": len(prompts)}


def frequencies(engine: VLLMEngine, prompt: str, image: np.ndarray, count: int = 2048) -> dict[str, Any]:
    """How often each of four tokens came first, and how often it should have."""
    policy, model = engine.policy, engine.model
    policy.temperature = 2.0  # the highest that vLLM allows
    allowed = torch.nonzero(~policy.suppressed).flatten().tolist()
    likely = sorted(allowed, key=lambda token: -logprob(engine, prompt, image, token))
    tokens = likely[1:5]  # the first is nearly certain
    policy.suppressed[:] = True
    policy.suppressed[tokens] = False
    engine = VLLMEngine(policy, model, engine.backend)
    engine.sync(model)
    torch.manual_seed(0)
    drawn = [int(each.ids[0]) for _ in range(count // 256) for each in engine.generate([prompt] * 256, [image] * 256)]
    return {
        "drawn": [drawn.count(token) for token in tokens],
        "expected": [count * float(np.exp(logprob(engine, prompt, image, token))) for token in tokens],
        "others": sum(token not in tokens for token in drawn),
    }


def logprob(engine: VLLMEngine, prompt: str, image: np.ndarray, token: int) -> float:
    """The learner's, of a token at the start of a response."""
    network = PolicyWithValue(engine.model, None)
    with torch.no_grad():
        scores = engine.policy.score(network, [prompt], [image], [np.array([token])], [0], 1.0)
    return float(scores.token_logprobs[0, 0])


class StopAfter(TrainerCallback):
    """Ends a run after so many updates, with a checkpoint."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == self.updates


def run(folder: str, stop_after: int | None = None, resume: bool = False, **settings: Any) -> list[dict[str, Any]]:
    """A short GTR run on EZPoints with the embedded model; its log."""
    sizes = {"num_envs": 8, "rollout_steps": 2, "total_env_steps": 48, "per_device_train_batch_size": 8}
    given = {"engine": "vllm", "learning_rate": 1e-3, "num_ppo_epochs": 1, "eval_episodes": 4, "eval_steps": 3}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = GTRConfig(
        folder, **sizes | given | quiet | {"eval_strategy": "steps", "max_completion_length": 48} | settings
    )
    callbacks = [] if stop_after is None else [StopAfter(stop_after)]
    trainer = GTRTrainer("tiny", args, make_task("ezpoints"), "expert", callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    trainer.close()
    return trainer.state.log_history


def runs() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = {"whole": run(f"{folder}/whole")}
        run(f"{folder}/resumed", stop_after=2)
        found["resumed"] = run(f"{folder}/resumed", resume=True)
        return found | {"asynchronous": run(f"{folder}/asynchronous", asynchronous=True)}


def stale() -> dict[str, Any]:
    """What ends a run whose engine never gets the weights of an update, with the default limit."""
    first = VLLMEngine.sync

    def sync_once(engine: VLLMEngine, policy: Any) -> None:
        if engine._syncs == 0:
            first(engine, policy)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(VLLMEngine, "sync", sync_once),
        mock.patch.object(VLLMEngine, "_weights_state", return_value=0),  # which would make it sync by itself
    ):
        try:
            return {"error": "", "log": run(folder)}
        except SamplerMismatch as error:
            return {"error": str(error)}


def two_processes(*server: str) -> dict[str, Any]:
    """One of two processes, each with its own vLLM or both with this server."""
    with tempfile.TemporaryDirectory() as folder:
        PartialState(cpu=True)
        [place] = broadcast_object_list([folder])
        options = (
            {"vllm_mode": "server", "vllm_base_url": server[0], "vllm_sync": "gloo", "vllm_group_port": 0}
            if server
            else {}
        )
        return {"log": run(place, per_device_train_batch_size=4, **options), "processes": PartialState().num_processes}


if __name__ == "__main__":
    kinds = {"exactness": exactness, "runs": runs, "stale": stale, "two_processes": two_processes}
    results = kinds[sys.argv[1]](*sys.argv[3:])
    if PartialState().is_main_process:
        Path(sys.argv[2]).write_text(json.dumps(results))
