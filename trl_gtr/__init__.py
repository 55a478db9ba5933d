"""Guided Thought Reinforcement for vision-language agents, on Hugging Face TRL.

Names are imported on first use, so that `import trl_gtr` and `trl_gtr.environments` load neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# public name → module that defines it
_EXPORTS = {
    "FailureKind": "types",
    "Generation": "types",
    "Response": "types",
    "CorrectionRequest": "types",
    "Correction": "types",
    "Transition": "types",
    "Rollout": "types",
    "GTRConfig": "config",
    "GTRTrainer": "trainer",
    "PPOTrainer": "distributed.ppo_base",
    "AdvantageEstimator": "learning.advantages",
    "Advantages": "learning.advantages",
    "Guide": "guides.base",
    "CorrectedThoughts": "guides.corrected",
    "GuideArguments": "guides.arguments",
    "MergedTeacher": "guides.merged_teacher",
    "ThoughtCollapseCallback": "runs.callbacks",
    "HopelessRun": "runs.stopping",
    "Engine": "engines.base",
    "TransformersEngine": "engines.transformers",
    "RolloutCollector": "rollouts.collector",
    "ExpertAgent": "evaluation.agents",
    "PolicyAgent": "evaluation.agents",
    "RandomAgent": "evaluation.agents",
    "ServedAgent": "evaluation.agents",
    "load_agent": "evaluation.agents",
    "EvaluationReport": "evaluation.reports",
    "evaluate_agent": "evaluation.evaluate",
    "check_task": "evaluation.task_check",
    "make_sft_dataset": "guides.sft_data",
    "prompt_and_completion": "guides.sft_data",
    "load_policy": "policy.loading",
    "lora_target_modules": "policy.loading",
    "Field": "responses.format",
    "ThoughtFormat": "responses.format",
    "Rubric": "tasks",
    "Task": "tasks",
    "Tool": "tasks",
    "make_task": "tasks",
    "GymTask": "tasks.gym",
    "AuditedCorrector": "correctors",
    "BudgetExhausted": "correctors",
    "CacheMiss": "correctors",
    "CachedCorrector": "correctors",
    "Corrector": "correctors",
    "CorrectorArguments": "correctors",
    "ExpertCorrector": "correctors",
    "LocalCorrector": "correctors",
    "OpenAICorrector": "correctors",
    "RecordedCorrector": "correctors",
    "UnreliableCorrector": "correctors",
    "make_corrector": "correctors",
    "train": "scripts.launch",
    "write_report": "report",
}

__all__ = [*sorted(_EXPORTS), "__version__"]

if TYPE_CHECKING:  # "X as X" is how a typed package says that X is public
    from .config import GTRConfig as GTRConfig
    from .correctors import (
        AuditedCorrector as AuditedCorrector,
        BudgetExhausted as BudgetExhausted,
        CachedCorrector as CachedCorrector,
        CacheMiss as CacheMiss,
        Corrector as Corrector,
        CorrectorArguments as CorrectorArguments,
        ExpertCorrector as ExpertCorrector,
        LocalCorrector as LocalCorrector,
        OpenAICorrector as OpenAICorrector,
        RecordedCorrector as RecordedCorrector,
        UnreliableCorrector as UnreliableCorrector,
        make_corrector as make_corrector,
    )
    from .distributed.ppo_base import PPOTrainer as PPOTrainer
    from .engines.base import Engine as Engine
    from .engines.transformers import TransformersEngine as TransformersEngine
    from .evaluation.agents import (
        ExpertAgent as ExpertAgent,
        PolicyAgent as PolicyAgent,
        RandomAgent as RandomAgent,
        ServedAgent as ServedAgent,
        load_agent as load_agent,
    )
    from .evaluation.evaluate import evaluate_agent as evaluate_agent
    from .evaluation.reports import EvaluationReport as EvaluationReport
    from .evaluation.task_check import check_task as check_task
    from .guides.arguments import GuideArguments as GuideArguments
    from .guides.base import Guide as Guide
    from .guides.corrected import CorrectedThoughts as CorrectedThoughts
    from .guides.merged_teacher import MergedTeacher as MergedTeacher
    from .guides.sft_data import make_sft_dataset as make_sft_dataset, prompt_and_completion as prompt_and_completion
    from .learning.advantages import AdvantageEstimator as AdvantageEstimator, Advantages as Advantages
    from .policy.loading import load_policy as load_policy, lora_target_modules as lora_target_modules
    from .report import write_report as write_report
    from .responses.format import Field as Field, ThoughtFormat as ThoughtFormat
    from .rollouts.collector import RolloutCollector as RolloutCollector
    from .runs.callbacks import ThoughtCollapseCallback as ThoughtCollapseCallback
    from .runs.stopping import HopelessRun as HopelessRun
    from .scripts.launch import train as train
    from .tasks import Rubric as Rubric, Task as Task, Tool as Tool, make_task as make_task
    from .tasks.gym import GymTask as GymTask
    from .trainer import GTRTrainer as GTRTrainer
    from .types import (
        Correction as Correction,
        CorrectionRequest as CorrectionRequest,
        FailureKind as FailureKind,
        Generation as Generation,
        Response as Response,
        Rollout as Rollout,
        Transition as Transition,
    )


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value  # next time without this detour
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
