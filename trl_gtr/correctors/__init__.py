"""Who corrects the agent's thoughts; see `base` for the seam."""

from .base import BudgetExhausted, Corrector, failed, failure_kind
from .expert import ExpertCorrector, UnreliableCorrector

__all__ = ["BudgetExhausted", "Corrector", "ExpertCorrector", "UnreliableCorrector", "failed", "failure_kind"]
