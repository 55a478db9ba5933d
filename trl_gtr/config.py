"""Every GTR hyper-parameter, documented in one place. `docs/configuration` is generated from these help texts."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import MISSING, dataclass, fields, replace
from datetime import timedelta
from functools import cache, partialmethod
from typing import Any, Literal, get_args, get_origin, get_type_hints

from accelerate import PartialState
from accelerate.utils import str_to_bool
from transformers.utils import is_torch_bf16_gpu_available

from .distributed.engine_fields import EngineFields, EnvironmentFields
from .distributed.field_rules import INHERITED, Rule, field_with_rule as _field, suggest_fields
from .distributed.ppo_base import PPOConfig
from .distributed.presets import PRESETS
from .distributed.sizes import Sizes, episode_count, require
from .storage.plain_data import json_options

logger = logging.getLogger(__name__)

MODEL_INIT_KWARGS = ("model_init_kwargs", '{"dtype": "bfloat16"}')
"""Field name and example, for `json_options`."""


@suggest_fields
@dataclass
class GTRConfig(EngineFields, EnvironmentFields, PPOConfig):
    """Configuration of [`GTRTrainer`].

    One update collects `num_envs × rollout_steps` environment steps and learns from them in mini-batches of
    `mini_batch_size = per_device_train_batch_size × gradient_accumulation_steps × processes`. `global_step`,
    `logging_steps`, `save_steps` and `eval_steps` count updates. "Paper" is the GTR paper (arXiv 2503.08525).
    """

    _argument_group_name = "GTR, PPO and training"

    # --- defaults that differ from PPOConfig's -----------------------------------------------------------------
    learning_rate: float = _field(
        1e-5, "Learning rate of the policy. Paper: 1e-5 with cosine decay to 1e-9.", at_least=0
    )
    adam_epsilon: float = _field(1e-7, "Epsilon of AdamW. Paper: 1e-7.")
    max_grad_norm: float = _field(
        0.5, "Clip the gradient norm of each mini-batch to this; 0 turns clipping off.", at_least=0
    )
    gamma: float = _field(0.9, "Discount per environment step. Paper: 0.9.", at_least=0, at_most=1)
    lam: float = _field(0.95, "λ of GAE, over environment steps. Paper: 0.95.", at_least=0, at_most=1)
    cliprange: float = _field(0.1, "Clip range of the probability ratio. Paper: 0.1.", above=0, below=1)
    vf_coef: float = _field(0.5, "Weight of the value loss. Paper: 0.5.", at_least=0)
    cliprange_value: float | None = _field(None, "Clip range of the value; None (default): no clipping.")
    kl_coef: float = _field(
        0.0, "Weight of a k3 KL penalty to the starting policy; 0 (paper): no reference model is kept.", at_least=0
    )
    kl_estimator: Literal["k1", "k3"] = _field("k3", "Estimator of that KL; only k3 has a usable gradient.")
    temperature: float = _field(
        0.2,
        "Sampling temperature, for rollouts and for their log-probs. Paper: 0.2.",
        above=0,
        advice="PPO needs sampled actions; use a small temperature.",
    )
    logging_steps: float = _field(1, "Log every so many updates.", resume="free")
    bf16: bool | None = _field(
        None,
        "bfloat16 autocast. None: on if the accelerator supports it, off on CPU. Sums stay in float32.",
        resume="free",
    )

    model_init_kwargs: dict[str, Any] | str | None = _field(  # noqa: RUF009
        None, "Arguments to `from_pretrained` for a model given by name; JSON on the command line.", resume="free"
    )

    # --- sizes ------------------------------------------------------------------------------------------------
    total_env_steps: int = _field(
        15_000, "Environment steps in the whole run, over all processes. Paper: 15000.", resume="free", at_least=1
    )
    num_envs: int = _field(16, "Environments stepped in parallel, over all processes.", at_least=1)
    rollout_steps: int = _field(
        64,
        "Steps per environment in one update. Paper: 1024 steps per update on cards. With groups, an update plays "
        "whole episodes: then this is only their expected length.",
        at_least=1,
    )
    mini_batch_size: int | None = _field(
        None,
        "Environment steps per optimizer step, over all processes; sets `gradient_accumulation_steps`. None: batch "
        "size per process × accumulation steps × processes. Paper: 128.",
        resume="free",
        at_least=1,
    )
    gradient_accumulation_steps: int = _field(
        None,
        "Batches accumulated per process before an optimizer step. None: computed from `mini_batch_size`, or 1.",
        at_least=1,
        optional=True,
    )
    overlap: bool = _field(
        False,
        "Generate for two halves of each process's environments in turn: while one half generates, the other half's "
        "environments step and their images are processed, in the background. For slow environments (see "
        "docs/scaling). Not with groups.",
    )
    max_completion_length: int = _field(256, "Maximum number of new tokens per response. Paper: 256.", at_least=1)
    feature_cache_gb: float = _field(
        2.0,
        "Memory per process, in GiB, for caching processed images; images that don't fit are processed again.",
        resume="free",
        at_least=0,
        below=math.inf,
        advice="0: no cache.",
    )

    # --- the response -----------------------------------------------------------------------------------------
    repetition_penalty: float = _field(
        1.0,
        "As in `generate`; also applied to the log-probs, so that scoring matches sampling. Paper: 1.2.",
        above=0,
        advice="1.0 turns it off.",
    )
    thought_prob_coef: float = _field(
        0.5,
        "λ: weight of the thought tokens' log-prob relative to the action's. Paper: 0.5 on cards, 0.2 on ALFWorld.",
        at_least=0,
    )
    invalid_action: Literal["random", "penalty"] = _field(
        "random",
        "What happens when a response has no legal action: 'random' plays a random legal one, 'penalty' skips the "
        "environment step for a reward of -1; skipped steps count towards the game's step limit.",
    )
    format_reward: float = _field(
        5.0,
        "Bonus for a valid response, in reward units, added to that step's advantage after GAE. With groups a reward "
        "like any other, so that long episodes earn more: set it to 0. Paper: 5.",
        at_least=0,
    )
    reward_scale: float | None = _field(
        None,
        "Multiplies rewards and the format reward. None: the task's own `reward_scale`, else 1.",
        above=0,
    )

    # --- what a step is worth ---------------------------------------------------------------------------------
    advantage_estimator: Literal["gae", "grpo", "rloo", "gigpo"] = _field(
        "gae",
        "'gae' (paper): GAE with a value head. The others have no value head: they compare `group_size` episodes that "
        "start in the same state.",
    )
    group_size: int = _field(1, "Episodes per group, for 'grpo', 'rloo' and 'gigpo'.", at_least=1)
    group_norm: Literal["published", "std", "mean"] = _field(
        "published",
        "'std': divide by the spread of the group's returns, 'mean': don't. 'published': 'std' for 'grpo', 'mean' for "
        "'gigpo'; 'rloo' never divides.",
    )
    step_advantage_coef: float = _field(1.0, "ω of 'gigpo': weight of its step-level advantage.", at_least=0)
    refill_groups: int = _field(
        0,
        "Further groups that may be played in an update in place of one whose returns are all equal (DAPO's dynamic "
        "sampling).",
        at_least=0,
    )

    # --- PPO --------------------------------------------------------------------------------------------------
    ratio_level: Literal["response", "token"] = _field(
        "response",
        "'response' (paper): one probability ratio per response. 'token': one per token, each clipped on its own; "
        "`thought_prob_coef` then weighs thought tokens in the mean over tokens.",
    )
    cliprange_high: float | None = _field(
        None, "Clip range above 1, for clip-higher (DAPO); None: `cliprange`.", above=0
    )
    ppo_coef: float = _field(1.0, "Weight of the policy loss; 0 drops it (cloning only).", at_least=0)
    dual_clip: float | None = _field(
        3.0, "Caps the loss for negative advantages at this multiple of |A|; None: plain PPO.", above=1
    )
    target_kl: float | None = _field(
        None,
        "Stop an update's PPO epochs once a mini-batch's approximate KL, over all processes, exceeds this. It is per "
        "response, or per token with `ratio_level='token'`.",
        above=0,
    )
    min_advantage_std: float = _field(
        0.1,
        "Advantages are divided by max(std, this), so that noise isn't amplified when episodes hardly differ.",
        above=0,
    )
    value_head_sizes: list[int] = _field(  # noqa: RUF009
        MISSING, "Hidden layers of the value head. Paper: 1024 512.", default_factory=lambda: [1024, 512]
    )
    value_learning_rate: float | None = _field(3e-4, "Learning rate of the value head; None: `learning_rate`.")
    value_gradient_to_trunk: bool = _field(
        False, "Let the value loss train the model too, as in the paper. It can wreck a small model's policy."
    )
    one_batch_shape: bool = _field(
        False,
        "Pad all batches of an update to the shape of the largest, so that ratios start at exactly 1 in bfloat16 "
        "too. Costs padding, and scoring uses batches of `per_device_train_batch_size`.",
    )
    value_warmup_updates: int = _field(0, "Initial updates in which PPO trains only the value head.", at_least=0)

    # --- thought cloning --------------------------------------------------------------------------------------
    thought_cloning_coef: float = _field(1.0, "Weight of the thought-cloning loss; 0 drops it (PPO only).", at_least=0)
    cloning_weight: Literal["share", "constant"] = _field(
        "share", "'share' (paper): multiply the weight by the share of this update's steps that were corrected."
    )
    update_schedule: Literal["joint", "separate"] = _field(
        "joint",
        "'joint' (paper): one summed loss per micro-batch. 'separate': a separate cloning phase after PPO.",
    )
    cloning_steps: int = _field(16, "Mini-batches in the separate cloning phase.", at_least=1)
    cloning_epochs: float | None = _field(
        None,
        "At most this many passes over all labels in one cloning phase, whatever `cloning_steps`: many steps on a few "
        "labels overfit. None: no limit.",
        above=0,
    )
    cloning_learning_rate: float | None = _field(
        None, "Learning rate in the separate cloning phase, on the run's schedule; None or 0: `learning_rate`."
    )
    correction_buffer_size: int = _field(
        100_000, "Corrections kept across updates (DAgger); beyond that, a uniform reservoir sample.", at_least=1
    )
    clone: Literal[
        "corrected_thoughts", "thoughts", "thoughts_and_right_actions", "corrected_responses", "responses"
    ] = _field(
        "corrected_thoughts",
        "What is cloned. 'corrected_thoughts' (paper): only corrected thoughts, no actions. 'thoughts': also thoughts "
        "that were already right. 'thoughts_and_right_actions': also the action, if the agent chose the one that the "
        "right thought calls for. 'corrected_responses' and 'responses': like the first two, but always with the "
        "corrector's action (worse in the paper).",
    )
    # Settings of version 0.1: setting one raises an error that names its replacement.
    clone_right_thoughts: bool | None = _field(None, "Replaced.", resume="free", instead="clone='thoughts'")
    clone_right_actions: bool | None = _field(
        None, "Replaced.", resume="free", instead="clone='thoughts_and_right_actions'"
    )
    clone_full_response: bool | None = _field(
        None,
        "Replaced.",
        resume="free",
        instead="clone='corrected_responses', or 'responses' to include right thoughts,",
    )

    # --- several processes, faults, resuming ------------------------------------------------------------------
    rollout_timeout: float | None = _field(
        None,
        "Seconds after which a process returns what it has collected, so that slow environments don't hold up the "
        "others; checked between steps. None: half of `ddp_timeout` with several processes, else no limit.",
        resume="free",
        above=0,
    )
    correction_timeout: float | None = _field(
        None,
        "Seconds to wait for corrections at the end of a rollout; any still missing count as failed. None: 300, or a "
        "quarter of `ddp_timeout` if that is less and there are several processes.",
        resume="free",
        above=0,
    )
    ddp_timeout: int = _field(
        1800, "Seconds a process waits for the others before the run fails.", resume="free", above=0
    )
    max_skipped_steps: int = _field(
        10,
        "An optimizer step whose loss or gradient isn't finite is skipped; this many in a row end the run.",
        resume="free",
        at_least=1,
    )
    on_hopeless: Literal["stop", "warn"] = _field(
        "stop", "After two updates in a row from which nothing can be learned: save and stop, or warn.", resume="free"
    )
    allow_changed_config: bool = _field(
        False,
        "Resume even if settings differ from the checkpoint's. The result is no longer the same run.",
        resume="free",
    )
    pickle_environments: bool = _field(
        False,
        "Save environments as pickles instead of replaying their episodes on resume: for environments whose episodes "
        "aren't determined by seed and actions. Unpickling can execute arbitrary code from the checkpoint.",
        resume="free",
    )
    overwrite: bool = _field(
        False,
        "Start over in an output folder that holds an earlier run: only its checkpoints, metrics, model card and "
        "logged episodes are deleted when training begins. Without it, such a folder is an error.",
        resume="free",
    )

    # --- logging ----------------------------------------------------------------------------------------------
    log_completions: bool = _field(False, "Print a table of sampled steps with every log.", resume="free")
    num_completions_to_print: int = _field(4, "Number of rows in that table.", resume="free")
    episode_log_rate: float = _field(
        0.1,
        "Share of episodes written to `episodes/` in the output folder, for the report; 0: none.",
        resume="free",
        at_least=0,
        at_most=1,
    )
    episode_log_max_steps: int = _field(
        5000,
        "Approximate limit on the steps written there: the share is lowered for runs that would exceed it.",
        resume="free",
        at_least=1,
    )
    eval_episodes: int | str | None = _field(
        64,
        "Episodes per `evaluate()`; 'all': every game or hand of the evaluation task once, if it lists them.",
        resume="free",
    )
    eval_greedy: bool = _field(True, "Evaluate without sampling.", resume="free")

    def __post_init__(self) -> None:
        self._refuse_fields()
        self.model_init_kwargs = json_options(self.model_init_kwargs, *MODEL_INIT_KWARGS) or None
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        self._set_time_out_on_cpu()
        super().__post_init__()
        self._check_values()

    def __getstate__(self) -> dict[str, Any]:
        """Omit the Hub token: `training_args.bin` is this object pickled, and is pushed with the policy."""
        return self.__dict__ | {"hub_token": None}

    @property
    def num_updates(self) -> int:
        """Updates in the run: `total_env_steps` rounded up to whole rollouts. With groups, the expected number."""
        return math.ceil(self.total_env_steps / (self.num_envs * self.rollout_steps))

    @property
    def rollout_deadline(self) -> float:
        """`rollout_timeout` in seconds, with the default resolved."""
        if self.rollout_timeout is not None:
            return self.rollout_timeout
        return self.ddp_timeout / 2 if PartialState().num_processes > 1 else math.inf

    @property
    def correction_deadline(self) -> float:
        """`correction_timeout` in seconds, with the default resolved."""
        if self.correction_timeout is not None:
            return self.correction_timeout
        return min(300.0, self.ddp_timeout / 4) if PartialState().num_processes > 1 else 300.0

    def resume_settings(self) -> dict[str, Any]:
        """Settings a resumed run must share with its checkpoint: everything that affects learning."""
        values = self.to_dict()
        shared = {name: values[name] for name, rule in field_rules().items() if rule.resume == "same"}
        return shared | {"processes": PartialState().num_processes}

    def _set_time_out_on_cpu(self) -> None:
        """On CPU, `TrainingArguments` doesn't pass `ddp_timeout` to the process group, so create the group first."""
        use_cpu = self.use_cpu or str_to_bool(os.environ.get("ACCELERATE_USE_CPU", "False"))
        if use_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GTRConfig:
        """The published settings of a method, see [`PRESETS`], with your own on top."""
        require(name in PRESETS, f"There is no preset {name!r}: choose one of {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **overrides})

    gtr = partialmethod(preset, "gtr")
    rl4vlm = partialmethod(preset, "rl4vlm")
    vl_dac = partialmethod(preset, "vl_dac")
    grpo = partialmethod(preset, "grpo")
    rloo = partialmethod(preset, "rloo")
    gigpo = partialmethod(preset, "gigpo")

    def _refuse_fields(self) -> None:
        defaults = {f.name: f.default for f in fields(self)}
        for name, instead in refused_fields().items():
            if name in defaults and getattr(self, name) != defaults[name]:
                reason = instead.removeprefix("nothing: ")
                advice = f": {reason}." if reason != instead else f". Set {instead} instead."
                raise ValueError(f"GTRConfig does not use `{name}`{advice} Leave `{name}` out.")

    def _check_values(self) -> None:
        self.eval_episodes = episode_count(self.eval_episodes, "`eval_episodes`")
        for name, rule in field_rules().items():
            value = getattr(self, name)
            if not rule.allows(value):
                raise ValueError(f"`{name}` must be {rule}, got {value!r}. {rule.advice}".rstrip())
        self._check_combinations()

    def _set_sizes(self, processes: int) -> None:
        """Check that the sizes divide evenly, and derive `gradient_accumulation_steps` from a given mini-batch."""
        sizes = Sizes(self.num_envs, self.rollout_steps, self.per_device_train_batch_size, processes, self.group_size)
        self.mini_batch_size = sizes.mini_batch(self.mini_batch_size, self.gradient_accumulation_steps)
        self.gradient_accumulation_steps = self.mini_batch_size // sizes.batch

    def _check_combinations(self) -> None:
        require(
            self.ppo_coef > 0 or self.thought_cloning_coef > 0,
            "`ppo_coef` and `thought_cloning_coef` are both 0: nothing would be learned. Raise one of them.",
        )
        self._set_sizes(PartialState().num_processes)
        require(
            PartialState().num_processes == 1 or self.rollout_deadline + self.correction_deadline < self.ddp_timeout,
            f"`rollout_timeout` ({self.rollout_deadline:g}) and `correction_timeout` ({self.correction_deadline:g}) "
            f"must add up to less than `ddp_timeout` ({self.ddp_timeout}), after which the other processes give up.",
        )
        require(
            not self.fsdp and not str_to_bool(os.environ.get("ACCELERATE_USE_FSDP", "False")),
            "FSDP is not supported: use DDP or DeepSpeed (examples/accelerate_configs).",
        )
        require(
            not self.cloning_learning_rate or self.update_schedule == "separate",
            "`cloning_learning_rate` needs `update_schedule='separate'`: a joint step has only one learning rate.",
        )
        require(
            self.cloning_epochs is None or self.update_schedule == "separate",
            "`cloning_epochs` needs `update_schedule='separate'`: joint steps clone as often as PPO steps.",
        )
        require(
            not self.cloning_learning_rate or self.learning_rate > 0,
            "`cloning_learning_rate` follows the schedule of `learning_rate`, which is 0.",
        )
        require(
            self.cliprange_high is None or self.cliprange_high >= self.cliprange,
            f"`cliprange_high` = {self.cliprange_high} must be at least `cliprange` = {self.cliprange}.",
        )
        require(
            self.vllm_importance_sampling_mode != "token_truncate" or self.ratio_level == "token",
            "`vllm_importance_sampling_mode='token_truncate'` weighs tokens, but `ratio_level='response'` has one "
            "loss per response: set 'sequence_truncate', or `ratio_level='token'`.",
        )
        require(self.kl_coef == 0 or self.kl_estimator == "k3", "`kl_coef` > 0 needs `kl_estimator='k3'`.")


@cache
def field_rules() -> dict[str, Rule]:
    """The rules of all fields that have one, ours first, completed from the fields' types."""
    rules, hints = {}, get_type_hints(GTRConfig)
    for each in fields(GTRConfig):
        if "rule" in each.metadata:
            rule, values = each.metadata["rule"], get_args(hints[each.name])
            optional = rule.optional or type(None) in values
            choices = values if get_origin(hints[each.name]) is Literal else ()
            rules[each.name] = replace(rule, optional=optional, choices=choices)
    return rules | {name: rule for name, rule in INHERITED.items() if name in hints}


def refused_fields() -> dict[str, str]:
    """Fields that raise an error when set, and what to set instead."""
    return {name: rule.instead for name, rule in field_rules().items() if rule.instead is not None}
