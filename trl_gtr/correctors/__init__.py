"""Who corrects the agent's thoughts; see `base` for the seam."""

from .arguments import CorrectorArguments, make_corrector
from .audit import AuditedCorrector, AuditReport, audit
from .base import BudgetExhausted, Corrector, failed
from .cache import CachedCorrector, CacheMiss, RecordedCorrector
from .expert import ExpertCorrector, UnreliableCorrector
from .local import LocalCorrector
from .openai.corrector import OpenAICorrector

__all__ = [
    "AuditReport",
    "AuditedCorrector",
    "BudgetExhausted",
    "CacheMiss",
    "CachedCorrector",
    "Corrector",
    "CorrectorArguments",
    "ExpertCorrector",
    "LocalCorrector",
    "OpenAICorrector",
    "RecordedCorrector",
    "UnreliableCorrector",
    "audit",
    "failed",
    "make_corrector",
]
