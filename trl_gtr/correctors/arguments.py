"""The correctors by name, for command lines and YAML files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .audit import AuditedCorrector
from .base import Corrector
from .cache import CachedCorrector, RecordedCorrector
from .expert import ExpertCorrector, UnreliableCorrector
from .local import LocalCorrector
from .openai.corrector import OpenAICorrector

NAMES = ("expert", "openai", "azure", "local", "recorded", "none")


def _option(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass
class CorrectorArguments:
    """Which corrector a run uses. Keys are read from the environment only: a command line is seen by others."""

    corrector: str = _option(
        "expert",
        "Who corrects thoughts: expert (the task's exact one, free), openai (any OpenAI-compatible server), azure, "
        "local (a model loaded here), recorded (replay of a cache), none.",
        choices=NAMES,
    )
    corrector_model: str = _option("gpt-4o", "Model of openai, deployment of azure, name or folder of local.")
    corrector_base_url: str | None = _option(
        None, "Address of the server, e.g. http://localhost:8000/v1. OPENAI_BASE_URL or AZURE_OPENAI_ENDPOINT else."
    )
    corrector_temperature: float | None = _option(
        None, "Sampling temperature: 0.4 over HTTP, 0 for local if left out."
    )
    corrector_image_size: int | None = _option(
        None, "Longer side in pixels of pictures sent over HTTP. As it is else."
    )
    corrector_concurrency: int = _option(32, "Corrections under way at once over HTTP.")
    corrector_timeout: float = _option(30.0, "Seconds for one HTTP try.")
    corrector_deadline: float = _option(90.0, "Seconds for one correction with all its retries.")
    corrector_max_calls: int | None = _option(None, "Budget of the whole run in HTTP calls.")
    corrector_max_tokens: int | None = _option(None, "Budget of the whole run in tokens, prompt and answer together.")
    corrector_max_usd: float | None = _option(None, "Budget of the whole run in US dollars.")
    corrector_prices: list[float] | None = field(
        default=None,
        metadata={"help": "USD per million prompt tokens and per million answer tokens, for models not listed."},
    )
    corrector_when_spent: str = _option(
        "stop",
        "When the budget is spent: stop (with a checkpoint), continue (without corrections), expert (it takes over).",
        choices=("stop", "continue", "expert"),
    )
    corrector_cache: str | None = _option(
        None, "Folder for answers, so that a rerun pays for nothing twice; what recorded replays."
    )
    corrector_audit_share: float | None = _option(
        None, "Share of corrections that are graded against the truth; 0.1 for a language model if left out, 0 is off."
    )
    corrector_wrong: float = _option(
        0.0, "Turn this share of the answers into their opposite, to study what a bad corrector does."
    )
    corrector_silent: float = _option(0.0, "Withhold this share of the answers, to study a scarce corrector.")
    corrector_verify_with_truth: bool = _option(
        False, "Throw away answers that the hidden truth contradicts. Makes any model an oracle."
    )

    _argument_group_name = "the corrector"


def make_corrector(arguments: CorrectorArguments | str = "expert", **options: Any) -> Corrector | None:
    """The corrector that the arguments describe; `None` for `none`.

    Options are fields of `CorrectorArguments`, the prefix `corrector_` left out if you like:
    `make_corrector("openai", model="gpt-4o", max_usd=20)`.
    """
    if isinstance(arguments, str):
        arguments = CorrectorArguments(corrector=arguments)
    known = CorrectorArguments.__dataclass_fields__
    named = {name if name in known else f"corrector_{name}": value for name, value in options.items()}
    unknown = [name for name in named if name not in known]
    if unknown:
        raise ValueError(f"unknown options {unknown}; there are {[name for name in known if name != 'corrector']}")
    arguments = replace(arguments, **named)
    if arguments.corrector == "none":
        return None
    corrector = _bare_corrector(arguments)
    if arguments.corrector_cache is not None and arguments.corrector in ("openai", "azure", "local"):
        corrector = CachedCorrector(corrector, arguments.corrector_cache)
    if arguments.corrector_wrong or arguments.corrector_silent:
        corrector = UnreliableCorrector(corrector, arguments.corrector_wrong, arguments.corrector_silent)
    share = arguments.corrector_audit_share
    if share is None:
        share = 0.0 if arguments.corrector in ("expert", "recorded") else 0.1
    return AuditedCorrector(corrector, share) if share else corrector


def _bare_corrector(arguments: CorrectorArguments) -> Corrector:
    name = arguments.corrector
    if name == "expert":
        return ExpertCorrector()
    if name == "recorded":
        if arguments.corrector_cache is None:
            raise ValueError("corrector recorded replays a cache: name its folder with corrector_cache")
        return RecordedCorrector(arguments.corrector_cache)
    if name == "local":
        return LocalCorrector(arguments.corrector_model, temperature=arguments.corrector_temperature or 0.0)
    if name not in ("openai", "azure"):
        raise ValueError(f"corrector must be one of {', '.join(NAMES)}, not {name!r}")
    prices = arguments.corrector_prices
    if prices is not None and len(prices) != 2:
        raise ValueError(f"corrector_prices are two numbers, of prompt and of answer tokens, not {prices}")
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
