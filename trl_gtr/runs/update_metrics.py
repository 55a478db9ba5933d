"""Everything that is logged of one update, over all processes; each name is explained in docs/metrics."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence

import torch

from ..distributed.means import Means
from ..distributed.processes import Processes
from ..guides.base import Guide
from ..learning.experience import Experience
from ..learning.losses import explained_variance
from ..tasks.base import Task
from ..types import Rollout
from .diagnostics import rollout_diagnostics
from .rollout_metrics import add_up, count_rollout, without_images


def update_metrics(
    rollout: Rollout,
    experience: Experience,
    means: Means,
    seconds: Mapping[str, float],
    *,
    task: Task,
    guide: Guide,
    processes: Processes,
) -> dict[str, float]:
    """To be called on all processes.

    Args:
        rollout, experience: Of this process.
        means: What was counted on the way; it takes more here.
        seconds: What took how long.
    """
    gather = processes.gather
    count_rollout(rollout, task, means)
    for name, value in seconds.items():
        means.add(f"time/{name}", value)
    for name, value in peak_memory().items():
        means.maximum(name, value)
    metrics = value_metrics(experience, means, processes)
    metrics = means.reduce(gather) | metrics
    # This is no mean: it needs everybody's steps in one place.
    everything = rollout if processes.world_size == 1 else _joined(gather(without_images(rollout)))
    slowest = max(gather(sum(seconds[name] for name in seconds if not name.startswith("collect_rank"))))
    labels, images = (0, 0) if guide.buffer is None else (len(guide.buffer), guide.buffer.num_images)
    return {
        **metrics,
        **rollout_diagnostics(everything, task),
        **add_up(gather(guide.metrics())),
        "buffer/size": int(processes.sum(labels)),
        "buffer/images": int(processes.sum(images)),
        "speed/steps_per_second": experience.env_steps / slowest,
    }


def value_metrics(experience: Experience, means: Means, processes: Processes) -> dict[str, float]:
    """How well the value head knows the returns; nothing where there is none."""
    values, returns = experience.scores.value, experience.returns
    if values is None or returns is None:
        return {}
    means.add("value/mean", values)
    means.add("value/return", returns)
    # Not a mean either.
    all_values, all_returns = zip(*processes.gather((values.cpu(), returns.cpu())), strict=True)
    explained = explained_variance(torch.cat(all_values), torch.cat(all_returns))
    return {"value/explained_variance": explained} if math.isfinite(explained) else {}


def peak_memory() -> dict[str, float]:
    """Of this process, in GB."""
    # Linux counts in KB, macOS in bytes.
    unit = 1e9 if sys.platform == "darwin" else 1e6
    memory = {"memory/cpu_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if torch.cuda.is_available():
        memory["memory/gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return memory


def _joined(rollouts: Sequence[Rollout]) -> Rollout:
    """All processes' steps as one rollout."""
    return Rollout([t for r in rollouts for t in r.transitions], [c for r in rollouts for c in r.corrections], [], [])
