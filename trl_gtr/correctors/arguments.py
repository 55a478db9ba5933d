"""Correctors by name, for the command line and YAML files."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from typing import Any

from .audit import AuditedCorrector
from .base import Corrector
from .cache import CachedCorrector, RecordedCorrector
from .expert import ExpertCorrector, UnreliableCorrector
from .local import LocalCorrector
from .openai.corrector import OpenAICorrector

NAMES = ("expert", "openai", "azure", "local", "recorded", "none")


def option(default: Any, help_text: str, **metadata: Any) -> Any:
    """A dataclass field that is an option on the command line."""
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass
class CorrectorArguments:
    """Which corrector a run uses. API keys are read only from the environment: command lines are public."""

    corrector: str = option(
        "expert",
        "Who corrects thoughts: expert (the task's exact expert, free), openai (any OpenAI-compatible server), azure, "
        "local (a model loaded in this process), recorded (replays a cache), none.",
        choices=NAMES,
    )
    corrector_model: str = option(
        "gpt-4o", "Model name for openai, deployment for azure, model name or folder for local."
    )
    corrector_base_url: str | None = option(
        None, "Server address, e.g. http://localhost:8000/v1. Default: OPENAI_BASE_URL or AZURE_OPENAI_ENDPOINT."
    )
    corrector_temperature: float | None = option(None, "Sampling temperature. Default: 0.4 over HTTP, 0 for local.")
    corrector_image_size: int | None = option(
        None, "Longer side, in pixels, of images sent over HTTP. Default: unchanged."
    )
    corrector_concurrency: int = option(32, "Maximum concurrent corrections over HTTP.")
    corrector_timeout: float = option(30.0, "Seconds allowed for one HTTP attempt.")
    corrector_deadline: float = option(90.0, "Seconds allowed for one correction, including all retries.")
    corrector_max_calls: int | None = option(None, "Budget for the whole run, in HTTP calls.")
    corrector_max_tokens: int | None = option(None, "Budget for the whole run, in prompt and answer tokens.")
    corrector_max_usd: float | None = option(None, "Budget for the whole run, in US dollars.")
    corrector_prices: list[float] | None = field(
        default=None,
        metadata={
            "help": "USD per million prompt tokens and per million answer tokens, for models without a listed price."
        },
    )
    corrector_when_spent: str = option(
        "stop",
        "When the budget is spent: stop (with a checkpoint), continue (without corrections), expert (switch to it).",
        choices=("stop", "continue", "expert"),
    )
    corrector_cache: str | None = option(
        None, "Folder that caches answers, so that a rerun doesn't pay for them again; recorded replays it."
    )
    corrector_audit_share: float | None = option(
        None, "Share of corrections graded against the truth; 0 turns it off. Default: 0.1 for a language model."
    )
    corrector_wrong: float = option(0.0, "Share of answers to turn into their opposite, to study a bad corrector.")
    corrector_silent: float = option(0.0, "Share of answers to withhold, to study a scarce corrector.")
    corrector_verify_with_truth: bool = option(
        False, "Discard answers that contradict the hidden truth. Makes any model an oracle."
    )

    _argument_group_name = "the corrector"


def make_corrector(arguments: CorrectorArguments | str = "expert", **options: Any) -> Corrector | None:
    """Build the corrector described by the arguments; `None` for `none`.

    Options are fields of `CorrectorArguments`, with or without the `corrector_` prefix:
    `make_corrector("openai", model="gpt-4o", max_usd=20)`.
    """
    if isinstance(arguments, str):
        arguments = CorrectorArguments(corrector=arguments)
    known = CorrectorArguments.__dataclass_fields__
    named = {name if name in known else f"corrector_{name}": value for name, value in options.items()}
    unknown = [name for name in named if name not in known]
    if unknown:
        raise ValueError(f"unknown options {unknown}; choose from {[name for name in known if name != 'corrector']}")
    arguments = replace(arguments, **named)
    if arguments.corrector == "none":
        return None
    corrector = _base_corrector(arguments)
    if arguments.corrector_cache is not None and arguments.corrector in ("openai", "azure", "local"):
        corrector = CachedCorrector(corrector, arguments.corrector_cache)
    if arguments.corrector_wrong or arguments.corrector_silent:
        corrector = UnreliableCorrector(corrector, arguments.corrector_wrong, arguments.corrector_silent)
    share = arguments.corrector_audit_share
    if share is None:
        share = 0.0 if arguments.corrector in ("expert", "recorded") else 0.1
    return AuditedCorrector(corrector, share) if share else corrector


def _base_corrector(arguments: CorrectorArguments) -> Corrector:
    name = arguments.corrector
    if name == "expert":
        return ExpertCorrector()
    if name == "recorded":
        if arguments.corrector_cache is None:
            raise ValueError("corrector 'recorded' replays a cache: set corrector_cache to its folder")
        return RecordedCorrector(arguments.corrector_cache)
    if name == "local":
        return LocalCorrector(arguments.corrector_model, temperature=arguments.corrector_temperature or 0.0)
    if name not in ("openai", "azure"):
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"corrector must be one of {', '.join(NAMES)}, not {name!r}{hint}")
    prices = arguments.corrector_prices
    if prices is not None and len(prices) != 2:
        raise ValueError(f"corrector_prices must be two numbers, for prompt and answer tokens, not {prices}")
    return OpenAICorrector(
        arguments.corrector_model,
        azure=name == "azure",
        base_url=arguments.corrector_base_url,
        temperature=0.4 if arguments.corrector_temperature is None else arguments.corrector_temperature,
        image_size=arguments.corrector_image_size,
        concurrency=arguments.corrector_concurrency,
        timeout=arguments.corrector_timeout,
        deadline=arguments.corrector_deadline,
        max_calls=arguments.corrector_max_calls,
        max_tokens=arguments.corrector_max_tokens,
        max_usd=arguments.corrector_max_usd,
        prices=None if prices is None else (prices[0], prices[1]),
        when_spent=ExpertCorrector() if arguments.corrector_when_spent == "expert" else arguments.corrector_when_spent,  # type: ignore[arg-type]
        verify_with_truth=arguments.corrector_verify_with_truth,
    )
