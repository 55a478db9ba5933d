"""Rules for config fields: valid ranges, what a resumed run must share, and which fields are rejected.

`GTRConfig`'s own fields have their rules in their metadata; rules for inherited fields are here.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """Rules for one field.

    Args:
        resume: "same": a resumed run must keep the checkpoint's value. "free": it may change.
        at_least, above, at_most, below: The valid range.
        choices: The allowed values; not needed for a `Literal`.
        optional: `None` is allowed; not needed if the type says so.
        advice: Appended to the error for an invalid value.
        instead: The field is rejected: what to set instead, or "nothing: " and why.
    """

    resume: Literal["same", "free"] = "free"
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    optional: bool = False
    advice: str = ""
    instead: str | None = None

    def allows(self, value: Any) -> bool:
        if value is None and self.optional:
            return True
        return (
            (not self.choices or value in self.choices)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.choices:
            return f"one of {self.choices}"
        none = " or None" if self.optional else ""
        low = f"at least {self.at_least:g}" if self.above is None else f"greater than {self.above:g}"
        high = "" if self.at_most is None else f" and at most {self.at_most:g}"
        return low + (high if self.below is None else f" and less than {self.below:g}") + none


class FieldMetadata(dict[str, Any]):
    """Help and rule of a field. `HfArgumentParser` passes a copy to argparse, however it makes it, and argparse must
    not get the rule. So the rule is there for those who ask for it by name only."""

    def copy(self) -> dict[str, Any]:
        return {"help": self["help"]}

    def keys(self) -> Any:
        return self.copy().keys()

    def items(self) -> Any:
        return self.copy().items()

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())


def field_with_rule(
    default: Any, help: str, resume: Literal["same", "free"] = "same", default_factory: Any = MISSING, **rule: Any
) -> Any:
    """A field with its help and rule. Fields that affect learning must be the same in a resumed run."""
    metadata = FieldMetadata(help=help, rule=Rule(resume, **rule))
    return field(default=default, default_factory=default_factory, metadata=metadata)


def suggest_fields(cls: type[T]) -> type[T]:
    """Class decorator for a dataclass: an unknown field raises a `TypeError` that names the most similar one."""
    construct = cls.__init__
    known = [each.name for each in fields(cls) if each.init]  # type: ignore[arg-type]

    @functools.wraps(construct)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean `{near[0]}`?" if near else "docs/configuration.md lists its fields."
                raise TypeError(f"{type(self).__name__} has no field `{name}`: {hint}")
        construct(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls


_NO_EFFECT = "nothing: it has no effect here"
_EOS = "nothing: the tokenizer's EOS ends a response"

INHERITED: dict[str, Rule] = {
    "per_device_train_batch_size": Rule("same", at_least=1),
    "num_ppo_epochs": Rule("same", at_least=1),
    "seed": Rule("same"),
    "optim": Rule("same"),
    "optim_args": Rule("same"),
    "weight_decay": Rule("same"),
    "adam_beta1": Rule("same"),
    "adam_beta2": Rule("same"),
    "lr_scheduler_type": Rule("same"),
    "lr_scheduler_kwargs": Rule("same"),
    "warmup_steps": Rule("same"),
    **dict.fromkeys(
        ("save_strategy", "eval_strategy", "logging_strategy"),
        Rule(choices=("no", "steps"), advice="There are no epochs here, and steps are updates."),
    ),
    **{
        name: Rule(instead=instead)
        for name, instead in {
            "response_length": "max_completion_length",
            "total_episodes": "total_env_steps",
            "num_mini_batches": "mini_batch_size",
            "local_rollout_forward_batch_size": "num_envs (one batched generate serves all environments)",
            "num_sample_generations": "log_completions",
            "missing_eos_penalty": "format_reward (a truncated response is not a valid object)",
            "whiten_rewards": "nothing: advantages are normalised instead",
            "reward_model_path": "task: the environment gives the reward",
            "sft_model_path": "the trainer's `model`",
            "stop_token": _EOS,
            "stop_token_id": _EOS,
            "dataset_num_proc": "nothing: there is no dataset",
            "num_train_epochs": "total_env_steps",
            "max_steps": "total_env_steps",
            "deepspeed": "accelerate's configuration (examples/accelerate_configs/zero2.yaml)",
            "ref_adapter_name": "kl_coef: the reference is the starting policy",
            "world_size": "nothing: the launcher decides",
            "num_total_batches": "total_env_steps",
            "micro_batch_size": "per_device_train_batch_size",
            "local_batch_size": "per_device_train_batch_size",
            "batch_size": "per_device_train_batch_size",
            "local_mini_batch_size": "mini_batch_size",
            "ds3_gather_for_generation": "nothing: every process plays its own episodes (or use ZeRO-2)",
            "load_best_model_at_end": "nothing: load the checkpoint that you want with `from_pretrained`",
            "torch_compile": _NO_EFFECT,
            "torch_compile_backend": _NO_EFFECT,
            "torch_compile_mode": _NO_EFFECT,
            "eval_on_start": _NO_EFFECT,
            "save_only_model": _NO_EFFECT,
            "save_on_each_node": _NO_EFFECT,
        }.items()
    },
}
"""Rules for fields declared by `PPOConfig` and `TrainingArguments`."""
