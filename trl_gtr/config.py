"""Every hyper-parameter of GTR, documented once. `docs/configuration` is generated from these help texts."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import timedelta
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from accelerate import PartialState
from accelerate.utils import str_to_bool

from .distributed.field_rules import INHERITED, FieldMetadata, Rule
from .distributed.ppo_base import PPOConfig
from .storage.plain_data import json_options

logger = logging.getLogger(__name__)

MODEL_INIT_KWARGS = ("model_init_kwargs", '{"dtype": "bfloat16"}')
"""The field's name and an example, for `json_options`."""


def _field(
    default: Any, help: str, resume: Literal["same", "free"] = "same", default_factory: Any = MISSING, **rule: Any
) -> Any:
    """A field with its help and its rule. What decides what is learned must be the same in a resumed run."""
    metadata = FieldMetadata(help=help, rule=Rule(resume, **rule))
    return field(default=default, default_factory=default_factory, metadata=metadata)


def episode_count(given: int | str | None, name: str) -> int | Literal["all"]:
    """A number of episodes, or "all"; command lines give both as text."""
    if given == "all":
        return "all"
    try:
        count = int(given or 0)
    except ValueError:
        raise ValueError(f"{name} must be a number or 'all', got {given!r}.") from None
    _require(count >= 1, f"{name} must be at least 1, or 'all', got {given}.")
    return count


@dataclass
class GTRConfig(PPOConfig):
    """Configuration of [`GTRTrainer`].

    One update collects `num_envs × rollout_steps` environment steps; its mini-batches are `mini_batch_size` of them,
    which is `per_device_train_batch_size × gradient_accumulation_steps × processes`. `global_step` counts updates, and
    so do `logging_steps`, `save_steps` and `eval_steps`. "Paper" is Guided Thought Reinforcement (arXiv 2503.08525).
    """

    _argument_group_name = "GTR, PPO and training"

    # --- defaults that differ from PPOConfig's -----------------------------------------------------------------
    learning_rate: float = _field(
        1e-5, "Learning rate of the policy. Paper: 1e-5, falling to 1e-9 by a cosine.", at_least=0
    )
    adam_epsilon: float = _field(1e-7, "Epsilon of AdamW. Paper: 1e-7.")
    max_grad_norm: float = _field(
        0.5, "Gradients of a mini-batch are clipped to this norm; 0 turns clipping off.", at_least=0
    )
    gamma: float = _field(0.9, "Discount per environment step. Paper: 0.9.", at_least=0, at_most=1)
    lam: float = _field(0.95, "λ of GAE, over environment steps. Paper: 0.95.", at_least=0, at_most=1)
    cliprange: float = _field(0.1, "Clip range of the probability ratio. Paper: 0.1.", above=0, below=1)
    vf_coef: float = _field(0.5, "Weight of the value loss. Paper: 0.5.", at_least=0)
    cliprange_value: float | None = _field(None, "Clip range of the value; None (default) leaves it unclipped.")
    kl_coef: float = _field(
        0.0, "Weight of a k3 KL penalty to the starting policy; 0 (paper) holds no reference.", at_least=0
    )
    kl_estimator: Literal["k1", "k3"] = _field("k3", "Estimator of that KL; only k3 has a usable gradient.")
    temperature: float = _field(
        0.2,
        "Sampling temperature, in rollouts and in their log-probs. Paper: 0.2.",
        above=0,
        advice="PPO needs sampled actions; take a small temperature.",
    )
    logging_steps: float = _field(1, "Log every this many updates.", resume="free")
    bf16: bool | None = _field(
        None,
        "bfloat16 autocast. None: on where the accelerator supports it, off on CPU. Sums stay in float32.",
        resume="free",
    )

    model_init_kwargs: dict[str, Any] | str | None = _field(  # noqa: RUF009
        None, "Arguments of `from_pretrained` for a model given by name; JSON on the command line.", resume="free"
    )

    # --- sizes ------------------------------------------------------------------------------------------------
    total_env_steps: int = _field(
        15_000, "Environment steps of the whole run, all processes together. Paper: 15000.", resume="free", at_least=1
    )
    num_envs: int = _field(16, "Environments stepped side by side, all processes together.", at_least=1)
    rollout_steps: int = _field(
        64, "Steps of each environment in one update. Paper: 1024 steps an update on cards.", at_least=1
    )
    mini_batch_size: int | None = _field(
        None,
        "Environment steps behind one optimizer step, all processes together; `gradient_accumulation_steps` follows "
        "from it. None: what the batch size of a process, the accumulation steps and the processes make. Paper: 128.",
        resume="free",
        at_least=1,
    )
    gradient_accumulation_steps: int = _field(
        None,
        "Batches that each process adds up before an optimizer step. None: worked out from `mini_batch_size`, or 1.",
        at_least=1,
        optional=True,
    )
    max_completion_length: int = _field(256, "Most new tokens of a response. Paper: 256.", at_least=1)
    feature_cache_gb: float = _field(
        2.0,
        "Memory of each process, in GiB, for images that are processed already; what doesn't fit is done again.",
        resume="free",
        at_least=0,
        below=math.inf,
        advice="0: no cache.",
    )

    # --- the response -----------------------------------------------------------------------------------------
    repetition_penalty: float = _field(
        1.0,
        "As in `generate`; applied to the log-probs too, so that what is scored is what was sampled. Paper: 1.2.",
        above=0,
        advice="1.0 turns it off.",
    )
    thought_prob_coef: float = _field(
        0.5,
        "λ: weight of the thought tokens' log-prob beside the action's. Paper: 0.5 on cards, 0.2 on ALFWorld.",
        at_least=0,
    )
    invalid_action: Literal["random", "penalty"] = _field(
        "random",
        "What a response without a legal action does: 'random' executes a random legal one, 'penalty' skips the "
        "environment's step and pays -1; a skipped step counts towards the game's own limit of steps.",
    )
    format_reward: float = _field(
        5.0,
        "Bonus of a valid response, in units of reward, added to its own step's advantage after GAE. Paper: 5.",
        at_least=0,
    )
    reward_scale: float | None = _field(
        None,
        "Rewards and the format reward are multiplied by this. None: the task's own `reward_scale`, else 1.",
        above=0,
    )

    # --- PPO --------------------------------------------------------------------------------------------------
    ppo_coef: float = _field(1.0, "Weight of the policy loss; 0 drops it (cloning only).", at_least=0)
    dual_clip: float | None = _field(
        3.0, "Bounds the loss of negative advantages at this multiple of |A|; None: plain PPO.", above=1
    )
    target_kl: float | None = _field(
        None,
        "PPO epochs of an update end once a mini-batch's approximate KL, over all processes, exceeds this.",
        above=0,
    )
    min_advantage_std: float = _field(
        0.1,
        "Advantages are divided by max(their spread, this), so that noise isn't blown up when all goes well.",
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
        "Score all of an update's batches with as many rows and tokens, those of the largest, so that ratios start at "
        "exactly 1 in bfloat16 too. Costs padding, and scoring in batches of `per_device_train_batch_size`.",
    )
    value_warmup_updates: int = _field(0, "First updates in which PPO trains the value head only.", at_least=0)

    # --- thought cloning --------------------------------------------------------------------------------------
    thought_cloning_coef: float = _field(1.0, "Weight of the thought-cloning loss; 0 drops it (PPO only).", at_least=0)
    cloning_weight: Literal["share", "constant"] = _field(
        "share", "'share' (paper): the weight is multiplied by the share of steps that were corrected in this update."
    )
    update_schedule: Literal["joint", "separate"] = _field(
        "joint",
        "'joint' (paper): one summed loss per micro-batch. 'separate': cloning is a phase of its own after PPO.",
    )
    cloning_steps: int = _field(16, "Mini-batches of the separate cloning phase.", at_least=1)
    cloning_learning_rate: float | None = _field(
        None, "Learning rate in the separate cloning phase, on the run's schedule; None or 0: `learning_rate`."
    )
    correction_buffer_size: int = _field(
        100_000, "Corrections kept across updates (DAgger); then a uniform reservoir.", at_least=1
    )
    clone: Literal[
        "corrected_thoughts", "thoughts", "thoughts_and_right_actions", "corrected_responses", "responses"
    ] = _field(
        "corrected_thoughts",
        "What is cloned. 'corrected_thoughts' (paper): no others, and no actions. 'thoughts': those that were right "
        "already too. 'thoughts_and_right_actions': with the action where the agent's own is what the right thought "
        "calls for. 'corrected_responses' and 'responses': as the first two, always with the corrector's action (the "
        "paper found it worse).",
    )
    # Settings of version 0.1: given, they are an error that names what replaced them.
    clone_right_thoughts: bool | None = _field(None, "Replaced.", resume="free", instead="clone='thoughts'")
    clone_right_actions: bool | None = _field(
        None, "Replaced.", resume="free", instead="clone='thoughts_and_right_actions'"
    )
    clone_full_response: bool | None = _field(
        None,
        "Replaced.",
        resume="free",
        instead="clone='corrected_responses', or 'responses' with right thoughts too,",
    )

    # --- several processes, faults, resuming ------------------------------------------------------------------
    rollout_timeout: float | None = _field(
        None,
        "Seconds after which a process hands in what it has collected, so that slow environments don't keep the "
        "others waiting; looked at between steps. None: half of `ddp_timeout` with several processes, else no limit.",
        resume="free",
        above=0,
    )
    correction_timeout: float | None = _field(
        None,
        "Seconds to wait, when a rollout ends, for corrections; what isn't back by then has failed. None: 300, or a "
        "quarter of `ddp_timeout` with several processes if that is less.",
        resume="free",
        above=0,
    )
    ddp_timeout: int = _field(
        1800, "Seconds that a process waits for the others before the run ends with an error.", resume="free", above=0
    )
    max_skipped_steps: int = _field(
        10,
        "An optimizer step whose loss or gradient isn't finite is skipped; this many in a row end the run.",
        resume="free",
        at_least=1,
    )
    allow_changed_config: bool = _field(
        False,
        "Resume although settings differ from the checkpoint's. The run is then not the one that it continues.",
        resume="free",
    )
    pickle_environments: bool = _field(
        False,
        "Save environments as pickles instead of playing their episodes again on resuming: for environments whose "
        "episodes don't follow from seed and actions. Resuming executes whatever such a checkpoint says.",
        resume="free",
    )
    overwrite: bool = _field(
        False,
        "Start afresh in an output folder that holds an earlier run: its checkpoints, metrics, card and logged "
        "episodes are removed as training begins, and nothing else. Without it such a folder is refused.",
        resume="free",
    )

    # --- what is shown ----------------------------------------------------------------------------------------
    log_completions: bool = _field(False, "Print a table of sampled steps at every log.", resume="free")
    num_completions_to_print: int = _field(4, "Rows of that table.", resume="free")
    episode_log_rate: float = _field(
        0.1,
        "Share of the episodes that are written to `episodes/` in the output folder, for the report; 0: none.",
        resume="free",
        at_least=0,
        at_most=1,
    )
    episode_log_max_steps: int = _field(
        5000,
        "About how many steps a run may write there: the share is lowered in a run that would write more.",
        resume="free",
        at_least=1,
    )
    eval_episodes: int | str | None = _field(
        64,
        "Episodes of `evaluate()`; 'all': each game or hand of the evaluation task once, if it has a list of them.",
        resume="free",
    )
    eval_greedy: bool = _field(True, "Evaluate without sampling.", resume="free")

    def __post_init__(self) -> None:
        self._refuse_fields()
        self.model_init_kwargs = json_options(self.model_init_kwargs, *MODEL_INIT_KWARGS) or None
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and _accelerator_has_bf16()
        self._set_time_out_on_cpu()
        super().__post_init__()
        self._check_values()

    def __getstate__(self) -> dict[str, Any]:
        """Without the hub's token: `training_args.bin` is this object pickled, and is pushed with the policy."""
        return self.__dict__ | {"hub_token": None}

    @property
    def num_updates(self) -> int:
        """How many updates the run has: `total_env_steps` rounded up to whole rollouts."""
        return math.ceil(self.total_env_steps / (self.num_envs * self.rollout_steps))

    @property
    def rollout_deadline(self) -> float:
        """`rollout_timeout` in seconds, its default filled in."""
        if self.rollout_timeout is not None:
            return self.rollout_timeout
        return self.ddp_timeout / 2 if PartialState().num_processes > 1 else math.inf

    @property
    def correction_deadline(self) -> float:
        """`correction_timeout` in seconds, its default filled in."""
        if self.correction_timeout is not None:
            return self.correction_timeout
        return min(300.0, self.ddp_timeout / 4) if PartialState().num_processes > 1 else 300.0

    def resume_settings(self) -> dict[str, Any]:
        """What a resumed run must share with its checkpoint: everything that decides what is learned."""
        values = self.to_dict()
        shared = {name: values[name] for name, rule in field_rules().items() if rule.resume == "same"}
        return shared | {"processes": PartialState().num_processes}

    def _set_time_out_on_cpu(self) -> None:
        """`TrainingArguments` hands `ddp_timeout` to the process group, but not on the CPU: make the group first."""
        use_cpu = self.use_cpu or str_to_bool(os.environ.get("ACCELERATE_USE_CPU", "False"))
        if use_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))

    @classmethod
    def rl4vlm(cls, **overrides: Any) -> GTRConfig:
        """RL4VLM (arXiv 2405.10292): PPO with no corrector and no format reward. Pair it with a task made with
        `cut=False`."""
        return cls(**{"thought_cloning_coef": 0.0, "format_reward": 0.0, **overrides})

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
        """Check that the sizes divide, and work out `gradient_accumulation_steps` where a mini-batch is given."""
        given, rollout = self.gradient_accumulation_steps, self.num_envs * self.rollout_steps
        _require(
            self.num_envs % processes == 0,
            f"`num_envs` = {self.num_envs} must be a multiple of the number of processes, {processes}."
            + _other_shape(rollout, processes),
        )
        batch = self.per_device_train_batch_size * processes
        mini_batch = self.mini_batch_size or batch * (given or 1)
        _require(
            mini_batch % batch == 0,
            f"`mini_batch_size` = {mini_batch} is no multiple of per_device_train_batch_size × processes = "
            f"{self.per_device_train_batch_size} × {processes} = {batch}. "
            + _sizes_that_fit(rollout, batch, mini_batch),
        )
        _require(
            rollout % mini_batch == 0,
            f"An update has num_envs × rollout_steps = {rollout} steps, which is no multiple of the mini-batch: "
            f"{mini_batch}, over all processes. {_sizes_that_fit(rollout, batch, mini_batch)}",
        )
        self.gradient_accumulation_steps, self.mini_batch_size = mini_batch // batch, mini_batch
        _require(
            given in (None, self.gradient_accumulation_steps),
            f"`mini_batch_size` = {mini_batch} takes {self.gradient_accumulation_steps} accumulation steps of "
            f"{self.per_device_train_batch_size} on each of {processes} processes, but `gradient_accumulation_steps` "
            f"= {given} was given. Leave it out: it follows from the mini-batch.",
        )
        if mini_batch == rollout:
            logger.warning(
                "The mini-batch is the whole rollout of %d steps, so that each PPO epoch makes a single optimizer "
                "step. Set a smaller `mini_batch_size` (paper: 128), or collect more steps in an update.",
                rollout,
            )

    def _check_combinations(self) -> None:
        _require(
            self.ppo_coef > 0 or self.thought_cloning_coef > 0,
            "`ppo_coef` and `thought_cloning_coef` are both 0: nothing would be learned. Raise one of them.",
        )
        self._set_sizes(PartialState().num_processes)
        _require(
            PartialState().num_processes == 1 or self.rollout_deadline + self.correction_deadline < self.ddp_timeout,
            f"`rollout_timeout` ({self.rollout_deadline:g}) and `correction_timeout` ({self.correction_deadline:g}) "
            f"together must be less than `ddp_timeout` ({self.ddp_timeout}), after which the others wait no longer.",
        )
        _require(
            not self.fsdp and not str_to_bool(os.environ.get("ACCELERATE_USE_FSDP", "False")),
            "FSDP is not supported: use DDP or DeepSpeed (examples/accelerate_configs).",
        )
        _require(
            not self.cloning_learning_rate or self.update_schedule == "separate",
            "`cloning_learning_rate` needs `update_schedule='separate'`: a joint step has one learning rate.",
        )
        _require(
            not self.cloning_learning_rate or self.learning_rate > 0,
            "`cloning_learning_rate` follows the schedule of `learning_rate`, which is 0.",
        )
        _require(self.kl_coef == 0 or self.kl_estimator == "k3", "`kl_coef` > 0 needs `kl_estimator='k3'`.")


@cache
def field_rules() -> dict[str, Rule]:
    """The rules of all fields that have one, ours first; what a field's type says is part of its rule."""
    rules, hints = {}, get_type_hints(GTRConfig)
    for each in fields(GTRConfig):
        if each.name in GTRConfig.__annotations__:
            rule, values = each.metadata["rule"], get_args(hints[each.name])
            optional = rule.optional or type(None) in values
            choices = values if get_origin(hints[each.name]) is Literal else ()
            rules[each.name] = replace(rule, optional=optional, choices=choices)
    return rules | {name: rule for name, rule in INHERITED.items() if name in hints}


def refused_fields() -> dict[str, str]:
    """Fields that raise an error when they are set, and what to set instead."""
    return {name: rule.instead for name, rule in field_rules().items() if rule.instead is not None}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _other_shape(rollout: int, processes: int) -> str:
    """How the same number of steps could be collected with an environment for every process."""
    if rollout % processes:
        return ""
    return f" `num_envs` = {processes} with `rollout_steps` = {rollout // processes} collects as many steps."


def _sizes_that_fit(rollout: int, batch: int, wanted: int) -> str:
    """The mini-batches nearest to the wanted one that divide a rollout and that whole batches make up."""
    sizes = [size for size in range(batch, rollout + 1, batch) if rollout % size == 0]
    if not sizes:
        return "No mini-batch fits: change `per_device_train_batch_size`, `num_envs` or `rollout_steps`."
    nearest = sorted(sorted(sizes, key=lambda size: abs(size - wanted))[:4])
    return f"A `mini_batch_size` of {', '.join(map(str, nearest))} would fit; or change the other sizes."


def _accelerator_has_bf16() -> bool:
    from transformers.utils import is_torch_bf16_gpu_available

    return is_torch_bf16_gpu_available()
