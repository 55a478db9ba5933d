"""Merging past policies into one, tensor by tensor: a [`MergeRule`] says how, a [`Past`] keeps what it takes.

Every merge here is a function of sums over the past, so a new policy is added without going back to the earlier ones.
A full model keeps these sums in one file. For an adapter they would be as large as the model, so its past is kept as
small snapshots, and the sums are built anew for one weight at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..storage.files import link_or_copy
from ..storage.tensor_files import TensorSpec, write_tensors
from .base import GUIDE_FILES

FOLDER = "teacher"
"""Subfolder of a run's output folder that holds its past."""
Merge = Literal["ties", "linear"]
Weighting = Literal["sma", "ema"]
Sums = dict[str, Tensor]
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class MergeRule:
    """How policies θ_0 (the start), θ_1, … are merged, given τ_i = θ_i − θ_0.

    `linear`: θ_0 + Σ w_i τ_i. `ties` (arXiv 2306.01708): each τ_i is trimmed to its largest entries; each entry's sign
    is that of Σ w_i τ_i, and its value the weighted mean of those τ_i that agree with it. The start's τ is 0, so it
    counts in `linear` only.

    Args:
        merge: `"ties"` or `"linear"`.
        weighting: `"sma"`: all alike. `"ema"`: the newest policy gets `ema_alpha`, and all others the rest, so that
            w_i = α (1 − α)^(n−i), and (1 − α)^n for the start.
        ties_density: Share of the entries of each tensor that trimming keeps.
        ema_alpha: α.
    """

    merge: Merge = "ties"
    weighting: Weighting = "ema"
    ties_density: float = 0.8
    ema_alpha: float = 0.5

    def __post_init__(self) -> None:
        for name, value, choices in (("merge", self.merge, Merge), ("weighting", self.weighting, Weighting)):
            if value not in get_args(choices):
                raise ValueError(f"`{name}` must be one of {', '.join(get_args(choices))}, got {value!r}.")
        if not 0 < self.ties_density <= 1:
            raise ValueError(f"`ties_density` must be above 0 and at most 1, got {self.ties_density}.")
        if not 0 < self.ema_alpha <= 1:
            raise ValueError(f"`ema_alpha` must be above 0 and at most 1, got {self.ema_alpha}.")

    def __str__(self) -> str:
        """What decides the sums, in words."""
        trimming = f", ties_density={self.ties_density}" if self.merge == "ties" else ""
        weights = f", ema_alpha={self.ema_alpha}" if self.weighting == "ema" else ""
        return f"merge='{self.merge}', weighting='{self.weighting}'{trimming}{weights}"

    @property
    def sum_names(self) -> tuple[str, ...]:
        """The sums that a merge needs, each as large as the weight."""
        if self.merge == "linear":
            return ("total",)
        return ("positive", "negative", "positive_weight", "negative_weight")

    def begin(self, like: Tensor) -> Sums:
        """The sums when there is only the start."""
        return {name: torch.zeros_like(like, dtype=torch.float32) for name in self.sum_names}

    def add(self, sums: Sums, difference: Tensor) -> None:
        """Add a policy's τ to the sums, in place."""
        old, new = (1.0, 1.0) if self.weighting == "sma" else (1 - self.ema_alpha, self.ema_alpha)
        if self.merge == "linear":
            sums["total"].mul_(old).add_(difference, alpha=new)
            return
        kept = trimmed(difference, self.ties_density)
        sums["positive"].mul_(old).add_(kept.clamp(min=0), alpha=new)
        sums["negative"].mul_(old).add_(kept.clamp(max=0), alpha=new)
        sums["positive_weight"].mul_(old).add_((kept > 0).float(), alpha=new)
        sums["negative_weight"].mul_(old).add_((kept < 0).float(), alpha=new)

    def merged(self, sums: Sums, count: int) -> Tensor:
        """The merged τ of `count` policies, the start included."""
        if self.merge == "linear":
            return sums["total"] / (count if self.weighting == "sma" else 1)
        total = sums["positive"] + sums["negative"]
        up = total > 0
        agreeing = torch.where(up, sums["positive_weight"], sums["negative_weight"])
        mean = torch.where(up, sums["positive"], sums["negative"]).div_(agreeing.clamp_(min=_TINY))
        return mean.masked_fill_(total == 0, 0.0)


def trimmed(difference: Tensor, density: float) -> Tensor:
    """The tensor with only the `density` share of entries that are largest in magnitude; the others are 0.

    Of entries that are equally large, which is common in bfloat16, the first are kept.
    """
    dropped = difference.numel() - max(1, round(density * difference.numel()))
    if dropped <= 0:
        return difference
    magnitude = difference.abs().flatten()
    smallest = magnitude.kthvalue(dropped + 1).values
    kept = magnitude >= smallest
    surplus = int(kept.sum()) - (difference.numel() - dropped)
    if surplus and smallest > 0:
        kept[(magnitude == smallest).nonzero()[-surplus:]] = False
    return torch.where(kept.view(difference.shape), difference, 0.0)


# --- what is merged --------------------------------------------------------------------------------------------------

Read = Callable[[str], Tensor]
"""Reads a tensor from a file by its name."""


class Weight(ABC):
    """A weight of the trained model, and its counterpart in the teacher.

    Args:
        name: Its name in files.
        merged: The teacher's weight, which [`write`] sets.
    """

    def __init__(self, name: str, merged: nn.Parameter) -> None:
        self.name, self.merged = name, merged

    @abstractmethod
    def parts(self) -> dict[str, Tensor]:
        """What a snapshot holds of it: the current tensors, by name."""

    @abstractmethod
    def value(self, read: Read) -> Tensor:
        """What is merged, in float32, from the parts of a snapshot."""

    def write(self, value: Tensor) -> None:
        """Give the teacher a merged value."""
        with torch.no_grad():
            self.merged.copy_(value)

    def current(self) -> Tensor:
        """The value in the model right now."""
        return self.value(self.parts().__getitem__)


class FullWeight(Weight):
    """A weight that is trained itself."""

    def __init__(self, name: str, merged: nn.Parameter, trained: nn.Parameter) -> None:
        super().__init__(name, merged)
        self.trained = trained

    def parts(self) -> dict[str, Tensor]:
        return {self.name: self.trained.detach()}

    def value(self, read: Read) -> Tensor:
        return read(self.name).to(self.merged.device, torch.float32)


class LoraWeight(Weight):
    """A linear layer's weight with a LoRA adapter. The product B·A·scale is merged: a mean of As times a mean of Bs is
    not the mean of the products.

    Args:
        base: The frozen weight below the adapter.
        down, up: A and B.
        scale: The adapter's scaling.
        transposed: The layer stores its weight as (in, out).
    """

    def __init__(
        self,
        name: str,
        merged: nn.Parameter,
        base: nn.Parameter,
        down: nn.Parameter,
        up: nn.Parameter,
        scale: float,
        transposed: bool,
    ) -> None:
        super().__init__(name, merged)
        self.base, self.down, self.up, self.scale, self.transposed = base, down, up, scale, transposed

    def parts(self) -> dict[str, Tensor]:
        return {f"{self.name}.lora_A": self.down.detach(), f"{self.name}.lora_B": self.up.detach()}

    def value(self, read: Read) -> Tensor:
        device = self.merged.device
        down, up = (read(f"{self.name}.lora_{part}").to(device, torch.float32) for part in "AB")
        product = (up @ down) * self.scale
        return product.T if self.transposed else product

    def write(self, value: Tensor) -> None:
        super().write(self.base.detach().float() + value)


# --- the past --------------------------------------------------------------------------------------------------------


class Distance(NamedTuple):
    """Euclidean distances over all merged weights."""

    to_teacher: float
    """From the current policy to the merged one."""
    travelled: float
    """From the current policy to the start."""


class Past(ABC):
    """The run's past policies, as files that never change once they are written.

    Args:
        rule: How to merge.
        weights: What to merge.
        folder: Where the files go.
    """

    def __init__(self, rule: MergeRule, weights: Sequence[Weight], folder: Path) -> None:
        self.rule, self.weights, self.folder = rule, weights, folder
        self.count = 0
        """Policies so far, the start included."""

    @abstractmethod
    def add(self) -> None:
        """Add the current policy; the first is the start."""

    @abstractmethod
    def _differences(self) -> Iterator[tuple[Weight, Tensor, Tensor]]:
        """For each weight: its start and the merged τ."""

    @abstractmethod
    def bytes_needed(self, policies: int, checkpoints: int) -> int:
        """Disk space for that many policies, in a run that keeps that many checkpoints."""

    def merge(self) -> Distance:
        """Give the teacher the merge of all policies so far."""
        to_teacher = travelled = 0.0
        for weight, start, merged in self._differences():
            weight.write(start + merged)
            current = weight.current() - start
            to_teacher = math.hypot(to_teacher, float((current - merged).norm()))
            travelled = math.hypot(travelled, float(current.norm()))
        return Distance(to_teacher, travelled)

    def files(self) -> dict[str, Path]:
        """All files, by name."""
        return {path.name: path for path in sorted(self.folder.glob("*.safetensors"))} if self.count else {}

    def bytes_held(self) -> int:
        """Disk space of all files here and in the checkpoints beside it, of this run or an earlier one.

        A checkpoint may be the last to hold a file, or hold only another link to it.
        """
        kept = self.folder.parent.glob(f"checkpoint-*/{GUIDE_FILES}/*.safetensors")
        found = [path.stat() for path in (*self.folder.glob("*.safetensors"), *kept)]
        return sum({(each.st_dev, each.st_ino): each.st_size for each in found}.values())

    def check_files(self, files: Mapping[str, Path]) -> None:
        """Raise a `ValueError` if this rule can't go on with the files of a checkpoint: sums belong to one rule."""
        for path in files.values():
            with safe_open(path, "pt") as opened:
                rule = (opened.metadata() or {}).get("rule", str(self.rule))  # a policy can be merged by any
            if rule != str(self.rule):
                raise ValueError(
                    f"{path} holds sums for {rule}, with which {self.rule} can't go on: resume with the settings that "
                    "the checkpoint was saved with, or start a new run from its policy."
                )

    def restore(self, files: Mapping[str, Path]) -> None:
        """Continue with the files of a checkpoint; those of later updates are removed."""
        self.clear()
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, path in files.items():
            link_or_copy(path, self.folder / name)
        self.count = 1 + max(int(Path(name).stem.rpartition("_")[2]) for name in files)

    def clear(self) -> None:
        """Remove all files."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()
        self.count = 0

    def _parts(self) -> dict[str, Tensor]:
        return {name: tensor for weight in self.weights for name, tensor in weight.parts().items()}

    def _snapshot(self, name: str) -> None:
        parts = self._parts()
        specs = {key: TensorSpec.of(tensor) for key, tensor in parts.items()}
        write_tensors(self.folder / name, specs, parts.values())

    def _snapshot_bytes(self) -> int:
        return sum(TensorSpec.of(tensor).num_bytes for tensor in self._parts().values())


class Snapshots(Past):
    """One file for each policy: for adapters, which are small."""

    def add(self) -> None:
        self._snapshot(f"snapshot_{self.count:06d}.safetensors")
        self.count += 1

    def _differences(self) -> Iterator[tuple[Weight, Tensor, Tensor]]:
        with ExitStack() as opened:
            first, *later = [opened.enter_context(safe_open(file, "pt")) for file in self.files().values()]
            for weight in self.weights:
                start = weight.value(first.get_tensor)
                sums = self.rule.begin(start)
                for snapshot in later:
                    self.rule.add(sums, weight.value(snapshot.get_tensor) - start)
                yield weight, start, self.rule.merged(sums, self.count)

    def bytes_needed(self, policies: int, checkpoints: int) -> int:
        return policies * self._snapshot_bytes()  # checkpoints link to the same files


class RunningSums(Past):
    """The start, and the sums over all policies since: for full models, however long the run."""

    START = "start_000000.safetensors"

    def add(self) -> None:
        if self.count == 0:
            self._snapshot(self.START)
        else:
            name = f"sums_{self.count:06d}.safetensors"
            write_tensors(self.folder / name, self._specs(), self._new_sums(), {"rule": str(self.rule)})
            self._sums(self.count - 1).unlink(missing_ok=True)  # checkpoints have their own links to it
        self.count += 1

    def _sums(self, number: int) -> Path:
        return self.folder / f"sums_{number:06d}.safetensors"

    def _specs(self) -> dict[str, TensorSpec]:
        return {
            f"{weight.name}.{name}": TensorSpec(torch.float32, tuple(weight.merged.shape))
            for weight in self.weights
            for name in self.rule.sum_names
        }

    def _read(self, opened: Any, weight: Weight, like: Tensor) -> Sums:
        if opened is None:
            return self.rule.begin(like)
        return {name: opened.get_tensor(f"{weight.name}.{name}").to(like.device) for name in self.rule.sum_names}

    def _with_files(self) -> Iterator[tuple[Weight, Tensor, Sums]]:
        """Each weight with its start and the sums so far."""
        with ExitStack() as opened:
            start = opened.enter_context(safe_open(self.folder / self.START, "pt"))
            file = self._sums(self.count - 1)
            sums = opened.enter_context(safe_open(file, "pt")) if self.count > 1 else None
            for weight in self.weights:
                value = weight.value(start.get_tensor)
                yield weight, value, self._read(sums, weight, value)

    def _new_sums(self) -> Iterator[Tensor]:
        for weight, start, sums in self._with_files():
            self.rule.add(sums, weight.current() - start)
            yield from sums.values()

    def _differences(self) -> Iterator[tuple[Weight, Tensor, Tensor]]:
        for weight, start, sums in self._with_files():
            yield weight, start, self.rule.merged(sums, self.count)

    def bytes_needed(self, policies: int, checkpoints: int) -> int:
        # While a merge is written, the one before is still there.
        sums = sum(spec.num_bytes for spec in self._specs().values())
        return self._snapshot_bytes() + (2 + checkpoints) * sums
