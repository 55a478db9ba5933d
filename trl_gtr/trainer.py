"""GTRTrainer: TRL's PPO trainer for vision-language agents, with a guide that corrects their thoughts.

The algorithm is in [`GTRTrainer.train`].
"""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import TrainOutput, set_seed

from .config import GTRConfig
from .correctors.base import Corrector
from .distributed.means import Means
from .distributed.processes import Processes
from .distributed.progress import BarProgress, Progress
from .distributed.signals import StopSignals
from .distributed.trl_bridge import PPOBridge
from .engines.base import UNABLE, EngineLost
from .engines.choice import EngineMaker
from .evaluation.all_ranks import evaluate_on_all_ranks
from .evaluation.evaluate import count_episodes
from .evaluation.reports import EvaluationReport
from .guides.base import GUIDE_FILES, Guide, GuidedRun
from .guides.corrected import choose_guide
from .guides.sft_data import corrections_dataset
from .learning.advantages import AdvantageEstimator, choose_estimator
from .learning.experience import Experience, ExperienceMaker, NoGroupEnded, Scorer, check_shaping
from .learning.losses import choose_objective
from .learning.mismatch import SamplerMismatch
from .learning.update import Updater
from .policy.adapters import check_start, ensure_named_base
from .policy.loading import load_or_take
from .policy.network import ValueHead
from .policy.scores import Scores
from .policy.scoring import VLMPolicy
from .rollouts.all_ranks import check_on_all_ranks, collect_on_all_ranks, make_collector
from .rollouts.clock import Clock
from .runs.callbacks import GTRProgressCallback, logging_callbacks
from .runs.checkpointer import GuideFiles, Part, RunCheckpointer, RunCounters
from .runs.given import check_given, check_history_fits
from .runs.hopeless import HopelessRunCallback
from .runs.length import RunLength
from .runs.manifest import describe_run
from .runs.model_card import PAPER, TrainedAgent, write_model_card
from .runs.rollout_metrics import print_completions
from .runs.stopping import RunStopper, Snapshot
from .runs.update_metrics import update_metrics
from .storage.state_files import LINKED_FILES, TENSORS
from .tasks.base import Task
from .types import Rollout

logger = logging.getLogger(__name__)


class GTRTrainer(PPOBridge):
    """Trains a vision-language model to act: PPO on its actions, thought cloning on its corrected thoughts.

    Args:
        model: A vision-language model, or the name or folder to load it from.
        args: The hyper-parameters.
        task: The task to play.
        corrector: Corrects thoughts: a corrector, or the name of one (`"expert"`). Required unless
            `thought_cloning_coef` is 0 or a `guide` is given.
        processing_class: The model's processor; loaded with the model if left out.
        eval_task: The task for `evaluate`; the training task if left out.
        callbacks: Additional `TrainerCallback`s.
        optimizers: Optimizer for the model's weights, and its scheduler or `None`; built from `args` if left out.
        peft_config: Train an adapter instead of the model.
        guide: Teaches thoughts, in place of a `corrector`.
        advantage_estimator: The one that `args` names if left out.
    """

    _tag_names = ["trl", "ppo", "gtr"]  # noqa: RUF012
    _name = "GTR"
    _paper = PAPER

    def __init__(
        self,
        model: PreTrainedModel | str,
        args: GTRConfig | None = None,
        task: Task | None = None,
        corrector: Corrector | str | None = None,
        processing_class: Any = None,
        eval_task: Task | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        guide: Guide | None = None,
        advantage_estimator: AdvantageEstimator | None = None,
    ) -> None:
        args, task = check_given(args, task, model)
        self.task, self.eval_task = task, Task.ensure(eval_task or task)
        self.guide = choose_guide(guide, corrector, args)
        self.guide.check(task)
        self.guide.check_settings(args)
        self.corrector = self.guide.corrector
        self.estimator = choose_estimator(advantage_estimator, args, task)
        check_shaping(self.guide, self.estimator)
        if args.eval_strategy != "no":
            count_episodes(self.eval_task, args.eval_episodes)  # raises now, not after the first update
        check_start(model, peft_config, with_reference=args.kl_coef > 0)
        set_seed(args.seed)
        # Before the model is loaded: an environment that can't be made fails early.
        teaches = self.estimator.teaches if self.estimator.needs_groups else None
        self.collector = make_collector(task, self.corrector, args, teaches)
        model, processing_class = load_or_take(model, processing_class, args.model_init_kwargs)
        ensure_named_base(model, peft_config, processing_class, args.output_dir)
        hidden_size = model.config.get_text_config().hidden_size
        value_head = ValueHead(hidden_size, args.value_head_sizes) if self.estimator.needs_values else None
        self.policy = VLMPolicy.from_settings(model, processing_class, args)
        check_history_fits(self.policy, self.collector, self.eval_task)
        given = {"callbacks": callbacks, "optimizers": optimizers, "peft_config": peft_config}
        super().__init__(args, model, value_head, processing_class, **given)
        self.processes = Processes(self.accelerator, args.ddp_timeout)
        self.processes.share_weights(self.trained)
        self.hopeless = HopelessRunCallback(args, task, self.trained.policy, not self.guide.teaches_alone)
        shows = not args.disable_tqdm and self.is_world_process_zero()
        self.progress = BarProgress() if shows else Progress()
        self._add_callbacks()
        scorer = Scorer(args, self.policy, self.network, self.processes, self.accelerator.autocast)
        self.signals, self.counters = StopSignals(), RunCounters()
        shared = args, self.policy, self.accelerator, self.processes
        make_engine = EngineMaker(*shared, stopped=lambda: self.signals.received is not None)
        self.engine = make_engine(self.model)
        model, score = self.trained.policy, scorer.score_under
        self.guide.attach(GuidedRun(args, task, self.policy, model, self.processes, score, make_engine))
        parts = self.estimator, self.guide, self.processes, self.reference_network
        self.make_experience = ExperienceMaker(args, scorer, *parts)
        objective, buffer = choose_objective(args), self.guide.buffer
        self.updater = Updater(
            args, self.accelerator, self.processes, scorer, self.optimizer, objective, buffer, self.progress
        )
        self.length = RunLength(args, varies=self.estimator.needs_groups)
        self._last_loss, self._engine_checked = math.nan, False
        self.checkpointer = self._make_checkpointer()
        self.stopper = self._make_stopper()

    def _make_checkpointer(self) -> RunCheckpointer:
        """A checkpointer for all state that `Trainer` doesn't save itself."""
        adapter = self.trained.policy.active_peft_config.to_dict() if self.is_peft_model else {}
        parts = {
            "guide": Part(self.guide, TENSORS),
            GUIDE_FILES: Part(GuideFiles(self.guide), LINKED_FILES, shared=True),
            "environments": Part(self.collector),
            "updater": Part(self.updater, TENSORS, shared=True),
            "counters": Part(self.counters),
        }
        manifest = describe_run(self.task, self.guide, self.estimator, adapter, self.args)
        return RunCheckpointer(self.args, self.processes, manifest, parts)

    def _make_stopper(self) -> RunStopper:
        saves = self.args.save_strategy != "no"
        return RunStopper(
            self.processes,
            self.checkpointer,
            self.collector,
            save=(lambda: self._save_checkpoint(self.model, trial=None)) if saves else None,
            end=self._end,
            received=lambda: self.signals.received,
            needs_corrector=not self.guide.teaches_alone,
        )

    def _add_callbacks(self) -> None:
        args, handler = self.args, self.callback_handler
        if not args.disable_tqdm:
            self.remove_callback(DEFAULT_PROGRESS_CALLBACK)  # in a notebook, another than in a terminal
            self.add_callback(GTRProgressCallback)
        model, spans = self.trained.policy, self.policy.spans
        self.add_callback(self.hopeless)
        for callback in logging_callbacks(args, self.task, self.corrector, model, spans, handler.callbacks):
            self.add_callback(callback)

    # --- the algorithm ------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Collect, learn, repeat, until `total_env_steps` steps have been played."""
        started = time.perf_counter()
        self._begin(self.checkpointer.find(resume_from_checkpoint))
        try:
            with StopSignals() as self.signals, self.progress.shown():
                while self._goes_on:
                    clock, means, update = Clock(), Means(), self.state.global_step
                    rollout, before = self._collect()  # 1. act, while the corrector judges
                    with clock("score"):
                        scores = self._score(rollout, means, before)  # 2. log-probs of the policy that acted
                    with clock("guide"):
                        corrected = self._label(rollout, means, before)  # 3. add the guide's labels
                    with clock("score"):
                        experience = self.make_experience(rollout, scores, corrected, means)  # 4. advantages
                    with clock("update"):
                        self.updater.update(experience, update, means)  # 5. learn
                    self.progress.end()
                    with clock("guide"):
                        self.guide.after_update(self.trained.policy, means)
                    with clock("sync"):
                        lost = self._sync()
                    self._finish_update(
                        rollout, experience, means, rollout.times | clock.seconds, lost
                    )  # 6. log, save
                    if self.stopper.stop_if_spent(self.state.global_step, rollout.stop_reason):
                        self.control.should_training_stop = True
                    self.stopper.raise_if_diverged(self.state.global_step, self.updater)
                    if self._goes_on:
                        self.stopper.raise_if_hopeless(self.state.global_step, self.hopeless.why_stop)
                self.stopper.stop_on_signal(self.state.global_step, self.processes.gather(self.signals.received))
        except BaseException:
            self.guide.close()
            raise
        self._end()
        return TrainOutput(self.state.global_step, self._last_loss, {"train_runtime": time.perf_counter() - started})

    @property
    def _goes_on(self) -> bool:
        return self.state.global_step < self.state.max_steps and not self.control.should_training_stop

    def _end(self) -> None:
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)

    def _begin(self, checkpoint: str | None) -> None:
        args = self.args
        self._last_loss = math.nan
        self.checkpointer.claim_output_dir(checkpoint)
        if checkpoint is not None:
            self.checkpointer.load(checkpoint, self.load_checkpoint)
            self._load_rng_state(checkpoint)  # last: loading the rest may draw random numbers
        # After resuming, because a resumed run may be longer.
        self.state.max_steps = self.length.updates(self.state.global_step, self.counters.env_steps)
        self.state.num_train_epochs = 1
        self.state.compute_steps(args, self.state.max_steps)
        self.model.train()
        self.engine.sync(self.trained.policy)
        self._check_engine()
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        exhausted = self.processes.sum(self.corrector is not None and self.corrector.exhausted)
        if exhausted and self.stopper.needs_corrector:
            logger.warning("The corrector's budget is spent, so the run stops here. Raise its limits to continue.")
            self.control.should_training_stop = True

    def _check_engine(self) -> None:
        """Before the first rollout or evaluation."""
        if not self._engine_checked:
            check_on_all_ranks(self.engine, self.collector, self.processes)
        self._engine_checked = True

    @torch.no_grad()
    def _collect(self) -> tuple[Rollout, Snapshot | None]:
        """Collect this process's rollout and wait for all other processes; also the state before it."""
        args, step = self.args, self.state.global_step
        play = partial(
            self.collector.collect,
            self.engine,
            args.rollout_steps,
            timeout=args.rollout_deadline,
            correction_timeout=args.correction_deadline,
            stopped=lambda: self.signals.received is not None,
            progress=self.progress,
        )
        before = self.stopper.snapshot(step)
        try:
            with self.engine.ready():
                collected = collect_on_all_ranks(play, self.processes, lambda: self.signals.received)
        except EngineLost as error:
            self.stopper.abandon_rollout(step, error, before)
        self.stopper.stop_on_signal(step, collected.received, collected.faults, before)
        if self.is_world_process_zero() and not self.estimator.needs_groups:
            collected.warn_of_late(planned=args.rollout_steps * self.collector.num_envs)
        return collected.rollout, before

    def _score(self, rollout: Rollout, means: Means, before: Snapshot | None) -> Scores:
        self.progress.begin("score", 1, "rollout")
        try:
            return self.make_experience.score(rollout, means)
        except (SamplerMismatch, NoGroupEnded) as error:
            self.stopper.abandon_rollout(self.state.global_step, error, before)

    def _label(self, rollout: Rollout, means: Means, before: Snapshot | None) -> int:
        try:
            return self.guide.labels(rollout, self.state.global_step, means)
        except UNABLE as error:
            self.stopper.abandon_rollout(self.state.global_step, error, before)

    def _sync(self) -> EngineLost | None:
        """Give the engines of all processes the new weights. Returns why one can't take them, for the update is to be
        saved first."""
        lost: EngineLost | None = None
        try:
            self.engine.sync(self.trained.policy)
        except EngineLost as error:
            lost = error.with_traceback(None)
        return next((each for each in self.processes.gather(lost) if each), None)

    def _finish_update(
        self,
        rollout: Rollout,
        experience: Experience,
        means: Means,
        seconds: dict[str, float],
        lost: Exception | None = None,
    ) -> None:
        """Update counters, log, and evaluate or save if the callbacks ask for it. Without an engine, end the run."""
        args, state = self.args, self.state
        learning_rate = self.lr_scheduler.get_last_lr()[0]
        state.global_step += 1
        state.episode += int(self.processes.sum(len(rollout.episodes)))
        before, self.counters.env_steps = self.counters.env_steps, self.counters.env_steps + experience.env_steps
        for _ in range(self.length.schedule_steps(before, self.counters.env_steps)):
            self.lr_scheduler.step()
        state.max_steps = self.length.updates(state.global_step, self.counters.env_steps)
        state.epoch = state.global_step / state.max_steps
        self.control = self.callback_handler.call_event(
            "on_step_end", args, state, self.control, rollout=rollout, experience=experience
        )
        if self.control.should_log:
            metrics = update_metrics(
                rollout, experience, means, seconds, task=self.task, guide=self.guide, processes=self.processes
            )
            self._last_loss = metrics.get("loss/total", math.nan)
            self.log(
                metrics | {"env_steps": self.counters.env_steps, "episode/count": state.episode, "lr": learning_rate}
            )
            if args.log_completions and self.is_world_process_zero():
                advantages = experience.advantages.cpu().numpy()
                print_completions(rollout, args.num_completions_to_print, state.global_step, advantages)
        if self.control.should_evaluate and lost is None:
            try:
                self.evaluate()
            except UNABLE as error:
                lost = error
        if self.control.should_save:
            self._save_checkpoint(self.model, trial=None)
            self.control = self.callback_handler.on_save(args, state, self.control)
        if lost is not None:
            self.stopper.end_run(state.global_step, lost)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or adapter) as an ordinary `from_pretrained` folder, plus value head and manifest."""
        folder = output_dir or self.args.output_dir
        # DeepSpeed's processes save the optimizer together afterwards, so all must learn of a full disk first.
        with self.checkpointer.writing(f"The policy could not be written to {folder}"):
            super().save_model(output_dir, _internal_call)
            if self.args.should_save:
                self.checkpointer.manifest.write(folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.checkpointer.save(self.state.global_step, partial(super()._save_checkpoint, model, trial))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.checkpointer.writes_into)

    def evaluate(
        self,
        eval_task: Task | None = None,
        metric_key_prefix: str = "eval",
        episodes: int | Literal["all"] | None = None,
    ) -> EvaluationReport:
        """Play whole episodes without cuts and log success, return and other metrics under `eval_*`.

        The report is not `complete` if the evaluation ran out of time or was interrupted by a signal; an interrupted
        evaluation is not logged.
        """
        args, task = self.args, Task.ensure(eval_task or self.eval_task)
        play = partial(
            evaluate_on_all_ranks,
            task=task,
            episodes=count_episodes(task, episodes or args.eval_episodes),
            args=args,
            processes=self.processes,
            received=lambda: self.signals.received,
            progress=self.progress,
        )
        self._check_engine()
        report, stopped = play(self.engine)
        if report.episodes and not stopped:
            metrics = report.metrics(metric_key_prefix)
            if self.guide.engine is not None:
                taught, stopped = play(self.guide.engine)
                metrics |= taught.metrics(f"{metric_key_prefix}_teacher") if taught.episodes and not stopped else {}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(args, self.state, self.control, metrics)
        return report

    def close(self) -> None:
        """Close the environments and all engines, including any worker processes."""
        self.collector.close()
        self.engine.close()
        self.guide.release()

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write `README.md` to the output folder: base model, usage, evaluations, curves, corrector.

        Called by `push_to_hub`. An agent has no dataset, so `dataset_name` is ignored.
        """
        if not self.is_world_process_zero():
            return
        agent = TrainedAgent(
            name=model_name or Path(self.args.output_dir).name,
            hub_model_id=self.hub_model_id,
            base_model=self.trained.policy.name_or_path,
            is_adapter=self.is_peft_model,
            task=self.task,
            corrector=None if self.corrector is None else self.corrector.identity,
            guide=self.guide.description,
            args=self.args,
            log=self.state.log_history,
            paper=self._paper,
            tags=[tags] if isinstance(tags, str) else tags or [],
        )
        write_model_card(self.args.output_dir, agent)

    def corrections_dataset(self) -> Any:
        """All corrections so far as a `datasets.Dataset` of images and messages for `SFTTrainer`."""
        if self.guide.buffer is None:
            raise ValueError("This run's guide provides no labels: train with a `corrector` to get corrections.")
        return corrections_dataset(self.guide.buffer, self.policy.processor)
