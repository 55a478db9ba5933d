"""How fast do transformers and vLLM generate, how long does a sync take, and how far apart are their log-probs?

    python examples/benchmarks/engines.py            # the embedded model and a large random one
    python examples/benchmarks/engines.py --quick    # the embedded model and 8 environments only

The engines answer prompts of the same task in turn, in one process, and always to the full length, so that both have
the same work. "raw" is vLLM's own `generate` for the same requests, without our engine around it, which also processes
the images for scoring. Medians over `--rounds`, each with observations of its own and empty caches, as in a rollout.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from trl_gtr import GTRConfig, TransformersEngine, load_policy, make_task
from trl_gtr.engines.vllm import VLLMEngine
from trl_gtr.engines.vllm_colocated import ColocatedVLLM
from trl_gtr.policy.network import PolicyWithValue
from trl_gtr.policy.scoring import VLMPolicy

LARGE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}


def large_model() -> tuple[Any, Any]:
    """A LLaVA with random weights and the embedded model's tokenizer and image size."""
    tiny, processor = load_policy("tiny")
    text = LlamaConfig(**tiny.config.text_config.to_dict() | LARGE | {"num_hidden_layers": 12, "head_dim": 64})
    text.num_key_value_heads = 12
    vision = CLIPVisionConfig(**tiny.config.vision_config.to_dict() | LARGE | {"num_hidden_layers": 6})
    config = LlavaConfig(**tiny.config.to_dict() | {"text_config": text, "vision_config": vision})
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).eval(), processor


def observations(count: int, number: int) -> tuple[list[str], list[np.ndarray]]:
    """First observations of games, others for each number."""
    task = make_task("points24")
    env = task.make_env()
    first = [env.reset(seed=number * count + i) for i in range(count)]
    return [task.prompt(*each) for each in first], [np.array(image) for image, _ in first]


def seconds(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def mismatch(policy: VLMPolicy, model: Any, prompts: Any, images: Any, generations: Any) -> float:
    ids = [each.ids for each in generations]
    with torch.no_grad():
        scores = policy.score(PolicyWithValue(model, None), prompts, images, ids, [0] * len(ids), 1.0)
    rows = zip(scores.token_logprobs, generations, strict=True)
    return max(float(np.abs(row[: len(each.ids)].numpy() - each.logprobs).max()) for row, each in rows)


def measure(name: str, model: Any, processor: Any, args: argparse.Namespace, table: Table) -> None:
    policy = VLMPolicy(model, processor, temperature=1.0, max_completion_length=args.tokens)
    policy.suppressed[policy.eos_token_ids] = True  # every response has the full length
    config = GTRConfig(output_dir="unused", use_cpu=True, report_to="none")
    backend = ColocatedVLLM(model, processor, config, max(args.envs))
    ours, theirs = VLLMEngine(policy, model, backend), TransformersEngine(policy, model)
    sync = statistics.median(seconds(ours.sync, model) for _ in range(3))
    for envs in args.envs:
        times: list[list[float]] = [[], [], []]
        difference = 0.0
        for number in range(args.rounds + 1):
            times[0].append(seconds(theirs.generate, *observations(envs, 2 * number)))
            prompts, images = observations(envs, 2 * number + 1)  # others: each engine has to process its images
            with ours.ready():  # with empty caches
                times[1].append(seconds(ours.generate, prompts, images))
            pictures, seeds = [(image,) for image in images], range(len(images))
            asked = backend.arguments(ours.requests(ours.prompt_ids(prompts, images), pictures, seeds))
            with ours.ready():
                times[2].append(seconds(partial(backend.llm.generate, use_tqdm=False), *asked))
            generations = ours.generate(prompts, images)
            difference = max(difference, mismatch(policy, model, prompts, images, generations))
        hf, vllm, raw = (statistics.median(each[1:]) for each in times)  # the first warms up
        cells = f"{envs / hf:.1f}", f"{envs / vllm:.1f}", f"{hf / vllm:.2f}", f"{vllm / raw:.2f}"
        table.add_row(name, str(envs), *cells, f"{sync:.2f} s", f"{difference:.1e}")
    ours.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["tiny", "large"], help="`large`: random, with 159 M parameters"
    )
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the embedded model, 8 environments, 8 tokens, one round")
    args = parser.parse_args(argv)
    if args.quick:
        args.models, args.envs, args.tokens, args.rounds = ["tiny"], [8], 8, 1
    columns = "transformers /s", "vLLM /s", "vLLM / transformers", "vLLM: engine / raw", "sync", "largest mismatch"
    table = Table("model", "environments", *columns)
    for name in args.models:
        measure(name, *(large_model() if name == "large" else load_policy(name)), args, table)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
