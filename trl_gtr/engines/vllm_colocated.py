"""vLLM in the learner's own process, on its device."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image

from ..config import GTRConfig
from ..distributed.random_states import same_random_states
from ..policy.loading import unwrap_adapter
from .base import EngineLost
from .vllm_batch import ContinuousBatch
from .vllm_requests import Backend, Request, Sampled, Weights
from .vllm_weight_files import ScratchFolder, write_weights
from .vllm_worker import WORKER_EXTENSION

_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default a share of all memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner's threads are in the same process
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than it saves
}
_WEIGHTS, _CACHE = "weights", "kv_cache"
"""What vLLM puts to sleep, by its own names."""


class ColocatedVLLM(Backend):
    """A vLLM with the learner's model, without weights until the first `load`.

    Args:
        model: The learner's model, for its config.
        processor: Its processor.
        args: The `vllm_*` settings.
        max_requests: The most responses sampled at a time.
    """

    def __init__(self, model: Any, processor: Any, args: GTRConfig, max_requests: int) -> None:
        vllm, base = _import_vllm(), unwrap_adapter(model)
        check_family(type(base).__name__)
        self._sampling_params = vllm.SamplingParams
        self._sleeps, self._shards = args.vllm_enable_sleep_mode, args.vllm_tensor_parallel_size
        self._asleep: set[str] = set()
        self._owns_group = not dist.is_initialized()
        set_num_threads, on_cpu = torch.set_num_threads, not torch.cuda.is_available()
        with tempfile.TemporaryDirectory() as folder, same_random_states():
            config = copy.deepcopy(base.config)
            config.architectures = [type(base).__name__]  # which a model that was built in code lacks
            config.save_pretrained(folder)
            processor.save_pretrained(folder)
            self.llm: Any = vllm.LLM(
                model=folder,
                load_format="dummy",  # the weights come from the learner
                dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else str(base.dtype).removeprefix("torch."),
                worker_extension_cls=WORKER_EXTENSION,
                generation_config="vllm",  # not the checkpoint's, which may hold a top_k
                logprobs_mode="processed_logprobs",
                max_num_seqs=max_requests,
                max_model_len=args.vllm_max_model_length,
                gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                tensor_parallel_size=self._shards,
                enable_sleep_mode=self._sleeps,
                enforce_eager=on_cpu,
                # a seeded request whose prompt is split ends with an error there
                enable_chunked_prefill=False if on_cpu else None,
                disable_log_stats=True,
                seed=args.seed,
                **self._launcher(),
            )
        self._batch = ContinuousBatch(self.llm.llm_engine)
        torch.set_num_threads = set_num_threads  # on a CPU, vLLM replaces it by a function that does nothing

    @staticmethod
    def _launcher() -> dict[str, Any]:
        several = dist.is_initialized() and dist.get_world_size() > 1
        return {"distributed_executor_backend": "external_launcher"} if several else {}

    def load(self, weights: Weights, version: str) -> None:
        self._wake(_WEIGHTS)
        if self._shards == 1:
            self.llm.collective_rpc("gtr_load", args=(weights(),))
        else:  # its workers are processes of their own
            with closing(ScratchFolder()) as folder:
                path = write_weights(weights(), folder.path / "weights.safetensors")
                self.llm.collective_rpc("gtr_load_file", args=(str(path),))
        self._empty_caches()
        self.llm.collective_rpc("gtr_use", args=(version,))

    def _empty_caches(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise EngineLost("vLLM's prefix cache could not be emptied: requests are still under way.")
        self.llm.llm_engine.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def sample(self, requests: Sequence[Request], version: str) -> list[Sampled]:
        self._check_version(version)
        with _refusals_end_the_run():
            answers = self.llm.generate(*self.arguments(requests), use_tqdm=False)
        return [_read(answer) for answer in answers]

    def _check_version(self, version: str) -> None:
        states = self.llm.collective_rpc("gtr_state")
        if any(state["version"] != version for state in states):
            raise EngineLost(f"vLLM has other weights ({states}) than the learner's latest ({version}).")

    def sample_one(self, request: Request, version: str) -> Sampled:
        [prompt], [parameters] = self.arguments([request])
        with _refusals_end_the_run():
            return _read(self._batch.generate(prompt, parameters, lambda: self._check_version(version)))

    def arguments(self, requests: Sequence[Request]) -> tuple[list[Any], list[Any]]:
        """Prompts and sampling parameters for vLLM's own `generate`."""
        prompts = [
            {
                "prompt_token_ids": each.ids,
                "multi_modal_data": {"image": [Image.fromarray(picture) for picture in each.pictures]},
            }
            for each in requests
        ]
        return prompts, [self._sampling_params(**each.sampling) for each in requests]

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._wake(_WEIGHTS, _CACHE)
        # What an evaluation has cached changes log-probs in their last digits, and a resumed run lacks it.
        self._empty_caches()
        try:
            yield
        finally:
            if self._sleeps:
                # level 2 would drop the weights too, but an evaluation may follow without a sync
                self.llm.sleep(level=1)
                self._asleep = {_WEIGHTS, _CACHE}

    def _wake(self, *parts: str) -> None:
        """Wake what is asleep. vLLM would map the memory of what is awake a second time, and fail."""
        for part in parts:
            if part in self._asleep:
                self.llm.wake_up(tags=[part])
                self._asleep.remove(part)

    def close(self) -> None:
        if self.llm is None:
            return
        from vllm.distributed import parallel_state

        self._batch.close()
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        if self._owns_group:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


@contextmanager
def _refusals_end_the_run() -> Iterator[None]:
    """vLLM refuses a request that it can't answer, such as a prompt longer than the model allows."""
    try:
        yield
    except ValueError as error:
        raise EngineLost(f"vLLM refuses a request: {error}") from error


def _read(answer: Any) -> Sampled:
    [output] = answer.outputs
    if output.finish_reason not in ("stop", "length"):
        raise EngineLost(f"vLLM ended a response with {output.finish_reason!r}.")
    ids = list(output.token_ids)
    logprobs = [each[token].logprob for token, each in zip(ids, output.logprobs, strict=True)]
    return Sampled(list(answer.prompt_token_ids), ids, logprobs)


def check_family(name: str) -> None:
    """Raise a `ValueError` with a fix if vLLM has no implementation of this model class."""
    if name not in _import_vllm().ModelRegistry.get_supported_archs():
        raise ValueError(
            f"The installed vLLM has no {name}. Use engine='transformers', or a vLLM release that supports this model."
        )


def _import_vllm() -> Any:
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if not torch.cuda.is_available():
        settings |= _ON_CPU
    for name, value in settings.items():
        os.environ.setdefault(name, value)  # what the user has set stays
    import vllm

    return vllm
