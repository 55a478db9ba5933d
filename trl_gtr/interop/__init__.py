"""Playing a task with TRL's own trainers, e.g. `GRPOTrainer(environment_factory=environment_factory(task))`."""

from .chat import prepare_model
from .environment import TaskEnvironment, environment_factory, episodes, success

__all__ = ["TaskEnvironment", "environment_factory", "episodes", "prepare_model", "success"]
