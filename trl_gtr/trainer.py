"""GTRTrainer: TRL's PPO trainer for vision-language agents whose thoughts a corrector mends.

The algorithm is [`GTRTrainer.train`]; each of its steps is one method below it.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import AutoProcessor, PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import TrainOutput, set_seed

from .config import MODEL_INIT_KWARGS, GTRConfig
from .correctors.base import Corrector
from .distributed.means import Means
from .distributed.processes import Processes
from .distributed.signals import StopSignals
from .distributed.trl_bridge import PPOBridge, unwrap_model_for_generation
from .evaluation.agents import PolicyAgent
from .evaluation.evaluate import EvaluationReport, count_episodes, evaluate_agent
from .guides.buffer import CorrectionBuffer, cloning_coefficient
from .guides.labels import Label, LabelMaker, count_labels
from .learning import ppo
from .learning.update import Experience, Updater
from .policy.adapters import REFERENCE, check_config, check_trainable, ensure_named_base
from .policy.loading import check_processor, load_policy
from .policy.scoring import PolicyWithValue, ValueHead, VLMPolicy
from .rollouts.collector import Clock, RolloutCollector
from .runs.callbacks import GTRProgressCallback
from .runs.checkpointer import Part, RunCheckpointer, RunCounters
from .runs.diagnostics import rollout_diagnostics
from .runs.episode_log import EpisodeLog
from .runs.manifest import describe_run
from .runs.rollout_metrics import (
    add_up,
    count_failures,
    count_rollout,
    print_completions,
    with_failures,
    without_images,
)
from .runs.run_log import RunLog
from .runs.stopping import RunStopper
from .runs.trackers import TrackerImages
from .storage.plain_data import json_options
from .storage.state_files import ARRAYS, TENSORS
from .tasks.base import Task
from .types import Generation, Rollout, Transition

logger = logging.getLogger(__name__)


class StepScores(NamedTuple):
    """Scores of a rollout's steps, each (steps,)."""

    logprob: Tensor
    thought_logprob: Tensor
    action_logprob: Tensor
    value: Tensor
    entropy: Tensor


class GTRTrainer(PPOBridge):
    """Trains a vision-language model to act: PPO on its actions, thought cloning on its corrected thoughts.

    Args:
        model: A vision-language model, or the name or folder to load it from.
        args: The hyper-parameters.
        task: What is played.
        corrector: Who mends thoughts. Needed unless `thought_cloning_coef` is 0.
        processing_class: The model's processor; loaded with the model if left out.
        eval_task: What `evaluate` plays; the training task if left out.
        callbacks: Further `TrainerCallback`s.
        optimizers: Optimizer of the model's weights, and its scheduler or `None`; made from `args` if left out.
        peft_config: Train an adapter instead of the model.
    """

    _tag_names = ["trl", "ppo", "gtr"]  # noqa: RUF012
    _name = "GTR"
    _paper = {  # noqa: RUF012
        "title": "GTR: Guided Thought Reinforcement Prevents Thought Collapse in RL-based VLM Agent Training",
        "id": "2503.08525",
        "citation": textwrap.dedent("""\
            @article{wei2025gtr,
                title  = {GTR: Guided Thought Reinforcement Prevents Thought Collapse in RL-based VLM Agent Training},
                author = {Tong Wei and Yijun Yang and Junliang Xing and Yuanchun Shi and Zongqing Lu and Deheng Ye},
                year   = 2025,
                eprint = {arXiv:2503.08525}
            }"""),
    }

    def __init__(
        self,
        model: PreTrainedModel | str,
        args: GTRConfig | None = None,
        task: Task | None = None,
        corrector: Corrector | None = None,
        processing_class: Any = None,
        eval_task: Task | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
    ) -> None:
        args = args or GTRConfig()
        self.task, self.eval_task = _check_task(task, corrector, args), Task.ensure(eval_task or task)
        if args.eval_strategy != "no":
            count_episodes(eval_task or self.task, args.eval_episodes)  # raises now, not after the first update
        self.corrector = corrector
        if not isinstance(model, str | os.PathLike):
            check_trainable(model, peft_config, with_reference=args.kl_coef > 0)
        elif peft_config is not None:
            check_config(peft_config, with_reference=args.kl_coef > 0)
        set_seed(args.seed)
        # Before the model is loaded: what an environment lacks is told at once.
        local_envs = args.num_envs // PartialState().num_processes
        self.collector = RolloutCollector(
            self.task,
            self._generate,
            corrector,
            num_envs=local_envs,
            first_index=PartialState().process_index * local_envs,
            seed=args.seed,
            invalid_action=args.invalid_action,
            pickle_environments=args.pickle_environments,
            exact_resume=not args.allow_changed_config,
        )
        model, processing_class = _load(model, processing_class, args)
        ensure_named_base(model, peft_config, processing_class, args.output_dir)
        value_head = ValueHead(model.config.get_text_config().hidden_size, args.value_head_sizes)
        self.policy = VLMPolicy(
            model,
            processing_class,
            temperature=args.temperature,
            repetition_penalty=args.repetition_penalty,
            max_completion_length=args.max_completion_length,
            feature_cache_bytes=int(args.feature_cache_gb * 2**30),
        )
        super().__init__(
            args,
            model,
            value_head,
            processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
        )
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(GTRProgressCallback)
        self._add_logs()
        self.reward_scale = args.reward_scale or float(self.task.reward_scale)
        self.processes = Processes(self.accelerator, args.ddp_timeout)
        self.processes.share_weights(self.trained)
        self.buffer = CorrectionBuffer(args.correction_buffer_size, seed=args.seed + self.processes.rank)
        self.labels = LabelMaker(args, self.task, self.policy)
        self.updater = Updater(
            args, self.accelerator, self.processes, self.network, self.optimizer, self.policy, self.buffer
        )
        self.signals, self.counters = StopSignals(), RunCounters()
        self.started, self._last_loss = 0.0, math.nan
        self.checkpointer = self._make_checkpointer()
        self.stopper = RunStopper(
            self.processes,
            self.checkpointer,
            self.collector,
            save=None if args.save_strategy == "no" else lambda: self._save_checkpoint(self.model, trial=None),
            end=self._end,
        )

    def _make_checkpointer(self) -> RunCheckpointer:
        """It is handed all that has state beside what `Trainer` saves."""
        adapter = self.trained.policy.active_peft_config.to_dict() if self.is_peft_model else {}
        parts = {
            "correction_buffer": Part(self.buffer, ARRAYS),
            "environments": Part(self.collector),
            "updater": Part(self.updater, TENSORS, shared=True),
            "counters": Part(self.counters),
        }
        if self.corrector is not None:
            parts["corrector"] = Part(self.corrector)
        manifest = describe_run(self.task, self.corrector, adapter, self.args)
        return RunCheckpointer(self.args, self.processes, manifest, parts)

    # --- the algorithm ------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Collect, learn, repeat, for `num_updates` updates."""
        self._begin(self.checkpointer.find(resume_from_checkpoint))
        try:
            with StopSignals() as self.signals:
                while self.state.global_step < self.args.num_updates and not self.control.should_training_stop:
                    clock, means = Clock(), Means()
                    rollout, steps = self._collect()  # 1. act, while the corrector judges
                    corrected = self._store_corrections(rollout, means)  # 2. aggregate what it said
                    with clock("score"):
                        experience = self._score_rollout(rollout, steps, corrected, means)  # 3. values, advantages
                    with clock("update"):
                        self.updater.update(experience, self.state.global_step, means)  # 4. learn
                    self._finish_update(rollout, experience, means, rollout.times | clock.seconds)  # 5. log, save
                    if self.stopper.stop_if_spent(self.state.global_step, rollout.stop_reason):
                        self.control.should_training_stop = True
                    self.stopper.raise_if_diverged(self.state.global_step, self.updater)
                self.stopper.stop_on_signal(self.state.global_step, self.processes.gather(self.signals.received))
        except BaseException:
            if self.corrector is not None:
                self.corrector.close()  # corrections under way come back at once; nobody waits for their threads
            raise
        self._end()
        seconds = time.perf_counter() - self.started
        return TrainOutput(self.state.global_step, self._last_loss, {"train_runtime": seconds})

    def _end(self) -> None:
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)

    def _begin(self, checkpoint: str | None) -> None:
        args = self.args
        self.started, self._last_loss = time.perf_counter(), math.nan
        self.checkpointer.claim_output_dir(checkpoint)
        if checkpoint is not None:
            self.checkpointer.load(checkpoint, self.load_checkpoint)
            self._load_rng_state(checkpoint)  # last: whatever is loaded above may draw random numbers
        # After resuming: a run may be made longer.
        self.state.max_steps, self.state.num_train_epochs = args.num_updates, 1
        self.state.compute_steps(args, args.num_updates)
        self.model.train()
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if self.processes.sum(self.corrector is not None and self.corrector.exhausted):
            logger.warning("Nothing is left of the corrector's budget: the run goes no further. Raise its limits.")
            self.control.should_training_stop = True

    @torch.no_grad()
    def _collect(self) -> tuple[Rollout, list[int]]:
        """A rollout, and how many steps the environments of each process have made in it."""
        args, start = self.args, time.perf_counter()
        before = self.stopper.snapshot(self.state.global_step)
        rollout, fault = Rollout([], [], [], []), None
        with self._acting_policy():
            try:
                rollout = self.collector.collect(
                    args.rollout_steps,
                    timeout=args.rollout_deadline,
                    correction_timeout=args.correction_deadline,
                    stopped=lambda: self.signals.received is not None,
                )
            except FloatingPointError as error:  # the others must hear of it, or they wait
                fault = str(error)
            seconds = time.perf_counter() - start
            rollout.times["wait_for_processes"] = self.processes.barrier("collection")
        made = len(rollout) // self.collector.envs.num_envs
        reports = self.processes.gather((made, seconds, self.signals.received, fault))
        made_by_each, spent_by_each, received, faults = zip(*reports, strict=True)
        self.stopper.stop_on_signal(self.state.global_step, received, faults, before)
        if self.processes.world_size > 1:
            rollout.times |= {f"collect_rank_{rank}": spent for rank, spent in enumerate(spent_by_each)}
        for rank, (made, spent) in enumerate(zip(made_by_each, spent_by_each, strict=True)):
            if made < args.rollout_steps and self.is_world_process_zero():
                logger.warning(
                    "Process %d ran out of time (rollout_timeout): it hands in %d of %d steps after %.1f s.",
                    rank,
                    made,
                    args.rollout_steps,
                    spent,
                )
        return rollout, list(made_by_each)

    def _store_corrections(self, rollout: Rollout, means: Means) -> int:
        """Put this rollout's labels into the buffer; how many steps were corrected, over all processes."""
        self.counters.failed_corrections.update(count_failures(rollout))
        made: list[Label] = []
        for step, correction in zip(rollout.transitions, rollout.corrections, strict=True):
            label = None if correction is None else self.labels.label(step, correction)
            if label is None:
                continue
            made.append(label)
            if label.num_labels:
                self.buffer.add(step.prompt, step.image, label.ids, label.num_labels, update=self.state.global_step)
        count_labels(made, means)
        return int(self.processes.sum(sum(c is not None and c.verdict == "corrected" for c in rollout.corrections)))

    @torch.no_grad()
    def _score_rollout(self, rollout: Rollout, made: list[int], corrected: int, means: Means) -> Experience:
        """Old log-probs and values by the update's own scoring function, then advantages."""
        steps, args = rollout.transitions, self.args
        starts = [self.policy.spans.action_start(t.response_ids, t.response.action_span) for t in steps]
        self.updater.choose_shape(steps)
        old, token_logprobs = self._score_all(self.network, steps, starts)
        advantages, returns = self._advantages(rollout, old.value)
        means.add("policy/entropy", old.entropy)
        means.add("response/thought_tokens", starts)
        all_steps = sum(made) * self.collector.envs.num_envs
        return Experience(
            transitions=steps,
            action_starts=starts,
            logprob=old.logprob,
            thought_logprob=old.thought_logprob,
            action_logprob=old.action_logprob,
            values=old.value,
            advantages=advantages,
            returns=returns,
            token_logprobs=token_logprobs,
            steps=made,
            cloning_coef=cloning_coefficient(args.cloning_weight, args.thought_cloning_coef, corrected, all_steps),
            reference=self._reference_logprobs(steps, starts) if args.kl_coef > 0 else None,
        )

    def _advantages(self, rollout: Rollout, values: Tensor) -> tuple[Tensor, Tensor]:
        """GAE over environment steps, plus each step's own format reward, normalised over all processes."""
        args, steps = self.args, rollout.transitions
        shape = (-1, len(rollout.last_images))

        def grid(numbers: Sequence[float | bool], dtype: torch.dtype = torch.bool) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=values.device).view(shape)

        cut = [i for i, t in enumerate(steps) if t.bootstrap]
        following = self._values(
            [*(steps[i].final_prompt for i in cut), *rollout.last_prompts],
            [*(steps[i].final_image for i in cut), *rollout.last_images],
        )
        final_values = torch.zeros_like(values)
        final_values[cut] = following[: len(cut)]
        advantages, returns = ppo.gae(
            rewards=grid([t.reward for t in steps], torch.float32) * self.reward_scale,
            values=values.view(shape),
            # A truncation that the state shows (a cut, an over-long formula) is an end like any other.
            terminated=grid([(t.terminated or t.truncated) and not t.bootstrap for t in steps]),
            truncated=grid([t.bootstrap for t in steps]),
            final_values=final_values.view(shape),
            last_values=following[len(cut) :],
            gamma=args.gamma,
            lam=args.lam,
        )
        # After GAE and not in the returns: a bonus for every valid response must not pay for long episodes.
        bonus = args.format_reward * self.reward_scale
        advantages = advantages + bonus * grid([t.legal for t in steps], torch.float32)
        moments = sum(self.processes.gather(ppo.advantage_moments(advantages).cpu()))
        return ppo.normalize_advantages(advantages, moments, args.min_advantage_std).flatten(), returns.flatten()

    def _finish_update(
        self, rollout: Rollout, experience: Experience, means: Means, seconds: dict[str, float]
    ) -> None:
        """Count, log, and do what the callbacks ask for."""
        args, state = self.args, self.state
        learning_rate = self.lr_scheduler.get_last_lr()[0]
        self.lr_scheduler.step()
        state.global_step += 1
        state.episode += int(self.processes.sum(len(rollout.episodes)))
        state.epoch = state.global_step / args.num_updates
        self.counters.env_steps += sum(experience.steps) * self.collector.envs.num_envs
        self.control = self.callback_handler.call_event(
            "on_step_end", args, state, self.control, rollout=rollout, experience=experience
        )
        if self.control.should_log:
            self.log(self._metrics(rollout, experience, means, seconds) | {"lr": learning_rate})
            if args.log_completions and self.is_world_process_zero():
                advantages = experience.advantages.cpu().numpy()
                print_completions(rollout, args.num_completions_to_print, state.global_step, advantages)
        if self.control.should_evaluate:
            self.evaluate()
        if self.control.should_save:
            self._save_checkpoint(self.model, trial=None)
            self.control = self.callback_handler.on_save(args, state, self.control)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Policy (or adapter) as an ordinary `from_pretrained` folder, with value head and manifest beside it."""
        folder = output_dir or self.args.output_dir
        # DeepSpeed's processes save the optimizer together after this: a full disk must be known to all before.
        with self.checkpointer.writing(f"The policy could not be written to {folder}"):
            super().save_model(output_dir, _internal_call)
            if self.args.should_save:
                self.checkpointer.manifest.write(folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        save_trainer = partial(super()._save_checkpoint, model, trial)
        self.checkpointer.save(self.state.global_step, save_trainer)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.checkpointer.writes_into)

    def evaluate(
        self,
        eval_task: Task | None = None,
        metric_key_prefix: str = "eval",
        episodes: int | Literal["all"] | None = None,
    ) -> dict[str, float]:
        """Play whole episodes without cuts and log success, return and the rest under `eval_*`."""
        args, task = self.args, eval_task or self.eval_task
        assert task is not None
        count = count_episodes(task, episodes or args.eval_episodes)
        mine = range(self.processes.rank, count, self.processes.world_size)
        agent = PolicyAgent(lambda prompts, images: self._generate(prompts, images, greedy=args.eval_greedy))
        several = self.processes.world_size > 1
        end = time.monotonic() + (args.ddp_timeout / 2 if several else math.inf)  # nobody waits longer for a slow one
        # Its own random numbers: how often one evaluates must not change what is learned.
        with torch.random.fork_rng(), torch.no_grad(), self._acting_policy():
            torch.manual_seed(args.seed + self.processes.rank)
            played = evaluate_agent(
                agent,
                task,
                mine,
                seed=args.seed,
                num_envs=args.per_device_eval_batch_size,
                invalid_action=args.invalid_action,
                stopped=lambda: self.signals.received is not None or time.monotonic() > end,
            ).episodes
            self.processes.barrier("evaluation")
        received, by_process = zip(*self.processes.gather((self.signals.received, played)), strict=True)
        if any(received):
            return {}  # the run is about to stop; half an evaluation would be in its log
        everybody = [episode for each in by_process for episode in each]
        if len(everybody) < count:
            logger.warning("%d episodes were evaluated in the time that there was.", len(everybody))
            if not everybody:
                return {}
        self.last_evaluation = EvaluationReport(task.name, tuple(sorted(everybody, key=lambda e: e.index)))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.last_evaluation.metrics().items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(args, self.state, self.control, metrics)
        return metrics

    def _add_logs(self) -> None:
        """Callbacks that write what a report is made of; `on_step_end` hands them rollout and experience."""
        args, model = self.args, self.trained.policy
        about = {
            "task": self.task.name,
            "model": getattr(model, "name_or_path", "") or type(model).__name__,
            "parameters": sum(weight.numel() for name, weight in model.named_parameters() if REFERENCE not in name),
            "trainable": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
            "corrector": None if self.corrector is None else self.corrector.identity,
        }
        self.add_callback(RunLog(args, about))
        if args.episode_log_rate > 0:
            self.add_callback(EpisodeLog(args, self.task, self.policy.spans))
        if args.report_to:
            self.add_callback(TrackerImages(args, self.callback_handler.callbacks))

    # --- what the steps are made of -----------------------------------------------------------------------------

    @contextmanager
    def _acting_policy(self) -> Iterator[None]:
        """The bare model for `_generate`; under ZeRO-3 with its parameters gathered."""
        with unwrap_model_for_generation(
            self.model, self.accelerator, gather_deepspeed3_params=self.args.ds3_gather_for_generation
        ) as unwrapped:
            self._acting = unwrapped.policy
            yield

    def _generate(
        self, prompts: Sequence[str], images: Sequence[np.ndarray], greedy: bool = False
    ) -> list[Generation]:
        with self.accelerator.autocast():
            return self.policy.generate(self._acting, prompts, images, greedy=greedy)

    def _score_all(
        self, module: nn.Module, steps: Sequence[Transition], starts: Sequence[int]
    ) -> tuple[StepScores, list[Tensor]]:
        """Scores of all steps in their order, and each one's token log-probs; in batches of like lengths."""
        order = np.argsort([len(t.response_ids) for t in steps], kind="stable")
        batches = [
            self.updater.score([steps[i] for i in chunk], [starts[i] for i in chunk], module, with_entropy=True)
            for chunk in self._chunks(order)
        ]
        back = np.argsort(order, kind="stable")
        tokens = [row[kept] for batch in batches for row, kept in zip(batch.token_logprobs, batch.mask, strict=True)]
        columns = {name: torch.cat([getattr(batch, name) for batch in batches])[back] for name in StepScores._fields}
        return StepScores(**columns), [tokens[i] for i in back]

    def _values(self, prompts: Sequence[Any], images: Sequence[Any]) -> Tensor:
        chunks = self._chunks(np.arange(len(prompts)))
        values = [self.policy.values(self.network, [prompts[i] for i in c], [images[i] for i in c]) for c in chunks]
        return torch.cat(values)[: len(prompts)]

    def _reference_logprobs(self, steps: Sequence[Transition], starts: Sequence[int]) -> list[Tensor]:
        """Token log-probs under the starting policy: the adapter off, or the copy that the parent made."""
        if self.is_peft_model:
            with self.null_ref_context():
                return self._score_all(self.network, steps, starts)[1]
        with self.accelerator.autocast():  # the trained model is wrapped in it, the reference isn't
            return self._score_all(PolicyWithValue(self.ref_model, self.trained.value_head), steps, starts)[1]

    def _chunks(self, order: np.ndarray) -> list[list[int]]:
        """Batches to score. Under ZeRO-3 a forward pass is everybody's: who has fewer repeats the first at the end."""
        args = self.args
        size = args.per_device_train_batch_size if args.one_batch_shape else args.per_device_eval_batch_size
        chunks = [order[i : i + size].tolist() for i in range(0, len(order), size)]
        if self.processes.zero3:
            chunks += chunks[:1] * (max(self.processes.gather(len(chunks))) - len(chunks))
        return chunks

    def _metrics(
        self, rollout: Rollout, experience: Experience, means: Means, seconds: dict[str, float]
    ) -> dict[str, float]:
        """Everything that is logged of one update, over all processes; each name is explained in docs/metrics."""
        gather = self.processes.gather
        count_rollout(rollout, self.task, means)
        for name, value in seconds.items():
            means.add(f"time/{name}", value)
        for name, value in _memory().items():
            means.maximum(name, value)
        means.add("value/mean", experience.values)
        means.add("value/return", experience.returns)
        metrics = means.reduce(gather)
        self._last_loss = metrics.get("loss/total", math.nan)
        # These are no means: they need everybody's steps in one place.
        values, returns = zip(*gather((experience.values.cpu(), experience.returns.cpu())), strict=True)
        explained = ppo.explained_variance(torch.cat(values), torch.cat(returns))
        everything = rollout if self.processes.world_size == 1 else _joined(gather(without_images(rollout)))
        metrics |= rollout_diagnostics(everything, self.task)
        if self.corrector is not None:
            metrics |= add_up(gather(with_failures(self.corrector.metrics(), self.counters.failed_corrections)))
        slowest = max(gather(sum(seconds[name] for name in seconds if not name.startswith("collect_rank"))))
        return metrics | {
            **({"value/explained_variance": explained} if math.isfinite(explained) else {}),
            "env_steps": self.counters.env_steps,
            "episode/count": self.state.episode,
            "buffer/size": int(self.processes.sum(len(self.buffer))),
            "buffer/images": int(self.processes.sum(self.buffer.num_images)),
            "speed/steps_per_second": sum(experience.steps) * self.collector.envs.num_envs / slowest,
        }

    def corrections_dataset(self) -> Any:
        """All corrections so far as a `datasets.Dataset` for `SFTTrainer`: images and messages."""
        from .guides.sft_data import corrections_dataset

        return corrections_dataset(self.buffer, self.policy.processor)


def _check_task(task: Task | None, corrector: Corrector | None, args: GTRConfig) -> Task:
    """Say what is missing before a model is loaded or a call is paid for."""
    if task is None:
        raise ValueError("GTRTrainer needs a `task`, e.g. task=make_task('points24').")
    if corrector is None and args.thought_cloning_coef > 0:
        raise ValueError(
            "Thought cloning needs a `corrector`, e.g. corrector=ExpertCorrector(). For PPO alone set "
            "`thought_cloning_coef=0`."
        )
    task = Task.ensure(task)
    if corrector is not None:
        Corrector.ensure(corrector).check(task)
    return task


def _load(model: PreTrainedModel | str, processing_class: Any, args: GTRConfig) -> tuple[PreTrainedModel, Any]:
    if isinstance(model, str | os.PathLike):
        model, loaded = load_policy(model, **json_options(args.model_init_kwargs, *MODEL_INIT_KWARGS))
        processing_class = processing_class or loaded
    elif processing_class is None:
        if not model.config._name_or_path:
            raise ValueError("This model was built here and has no name: pass its processor as `processing_class`.")
        processing_class = AutoProcessor.from_pretrained(model.config._name_or_path)
    check_processor(model, processing_class)
    return model, processing_class


def _joined(rollouts: Sequence[Rollout]) -> Rollout:
    """All processes' steps as one rollout."""
    return Rollout([t for r in rollouts for t in r.transitions], [c for r in rollouts for c in r.corrections], [], [])


def _memory() -> dict[str, float]:
    """Peak memory of this process, in GB."""
    # Linux counts in KB, macOS in bytes.
    unit = 1e9 if sys.platform == "darwin" else 1e6
    memory = {"memory/cpu_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if torch.cuda.is_available():
        memory["memory/gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return memory
