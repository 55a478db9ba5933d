"""Guides by name, for the command line and YAML files."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import GTRConfig
from ..correctors.arguments import CorrectorArguments, make_corrector, option
from .base import Guide
from .corrected import choose_guide
from .merged_teacher import MergedTeacher, Variant

NAMES = ("corrector", "turbo_sft", "turbo_kl", "none")


@dataclass
class GuideArguments:
    """Who teaches thoughts. The numbers are those of GTR-Turbo (arXiv 2512.13043)."""

    guide: str = option(
        "corrector",
        "Who teaches thoughts: corrector (--corrector), turbo_sft or turbo_kl (GTR-Turbo: a merge of the run's past "
        "policies), none (PPO only).",
        choices=NAMES,
    )
    turbo_with_corrector: bool = option(
        False, "With turbo_*: also clone the labels of --corrector; the merged teacher teaches where it gives none."
    )
    merge: str = option("ties", "How past policies are merged: ties or linear.", choices=("ties", "linear"))
    weighting: str = option(
        "ema",
        "Their weights: ema (the newest policy gets `ema_alpha`) or sma (all alike).",
        choices=("ema", "sma"),
    )
    ema_alpha: float = option(0.5, "Weight of the newest policy with ema.")
    merge_every: int = option(
        1, "Updates between merges. More than the run has: the teacher stays the starting policy."
    )
    ties_density: float = option(0.8, "Share of each tensor's changes that TIES keeps, the largest.")
    kl_beta: float = option(1.0, "turbo_kl: weight of the KL to the teacher in the advantage, in reward units.")
    teacher_temperature: float = option(0.2, "turbo_sft: sampling temperature of the teacher's thoughts.")
    teacher_top_k: int = option(5, "turbo_sft: sample from this many of the likeliest tokens; 0: from all.")
    teacher_tries: int = option(3, "turbo_sft: how often the teacher is asked until its response is valid.")

    _argument_group_name = "the guide"

    @property
    def variant(self) -> Variant | None:
        """Of the merged teacher; `None` for another guide."""
        return {"turbo_sft": "sft", "turbo_kl": "kl"}.get(self.guide)  # type: ignore[return-value]

    @property
    def asks_corrector(self) -> bool:
        return self.guide == "corrector" or (self.variant is not None and self.turbo_with_corrector)


def make_guide(arguments: GuideArguments, corrector_arguments: CorrectorArguments, args: GTRConfig) -> Guide:
    """Build the guide described by the arguments. Without cloning no corrector is asked: it would have nothing to do.

    Args:
        arguments: Which guide, and its settings.
        corrector_arguments: The corrector, if the guide has one.
        args: The run's settings.
    """
    if arguments.guide not in NAMES:
        raise ValueError(f"guide must be one of {', '.join(NAMES)}, not {arguments.guide!r}")
    if arguments.guide == "none":
        return Guide()
    asks = args.thought_cloning_coef > 0 and arguments.asks_corrector
    corrector = make_corrector(corrector_arguments) if asks else None
    if arguments.variant is None:
        return choose_guide(None, corrector, args)
    return MergedTeacher(
        arguments.variant,
        merge=arguments.merge,  # type: ignore[arg-type]
        weighting=arguments.weighting,  # type: ignore[arg-type]
        merge_every=arguments.merge_every,
        ties_density=arguments.ties_density,
        ema_alpha=arguments.ema_alpha,
        kl_beta=arguments.kl_beta,
        temperature=arguments.teacher_temperature,
        top_k=arguments.teacher_top_k,
        tries=arguments.teacher_tries,
        corrector=corrector,
    )
