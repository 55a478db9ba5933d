"""Memory and time for merging: one adapted layer's weight, of which a model has hundreds, or a whole embedded model.

Weights are merged one by one, so the largest decides. An adapter's past is kept as snapshots, a whole model's as sums.

python examples/benchmarks/merge_memory.py --shape 14336 4096 --rank 128 --policies 4
python examples/benchmarks/merge_memory.py --embedded tiny
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from trl_gtr.guides.merging import LoraWeight, MergeRule, Past, RunningSums, Snapshots
from trl_gtr.guides.teacher_model import make_teacher
from trl_gtr.policy.loading import load_policy

UNIT = 1 if sys.platform == "darwin" else 1024
PEAK = Path("/proc/self/clear_refs")


def measured(work: Callable[[], object]) -> tuple[float, int]:
    """CPU seconds, and by how many bytes the process's peak memory has grown.

    Linux can forget an earlier peak; elsewhere what stays below that isn't seen.
    """
    if PEAK.exists():
        PEAK.write_text("5")
    before, start = peak(), time.process_time()
    work()
    return time.process_time() - start, peak() - before


def peak() -> int:
    """Peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


def one_layer(rule: MergeRule, folder: Path, shape: tuple[int, int], rank: int) -> tuple[Past, list[nn.Parameter]]:
    """The past of one layer with LoRA in bfloat16, and what is trained of it."""
    rows, columns = shape
    base = nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16), requires_grad=False)
    merged = nn.Parameter(base.detach().clone(), requires_grad=False)
    down, up = nn.Parameter(torch.zeros(rank, columns)), nn.Parameter(torch.zeros(rows, rank))
    weight = LoraWeight("layer", merged, base, down, up, 2.0, transposed=False)
    return Snapshots(rule, [weight], folder), [down, up]


def embedded_model(rule: MergeRule, folder: Path, name: str) -> tuple[Past, list[nn.Parameter]]:
    """The past of a model that is trained whole, and its weights."""
    model, _ = load_policy(name)
    _, weights = make_teacher(model)
    return RunningSums(rule, weights, folder), [weight for weight in model.parameters() if weight.requires_grad]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=2, type=int, default=[14336, 4096], help="of the weight; LLaVA-7B's largest")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--embedded", metavar="NAME", help="this embedded model instead of one layer")
    parser.add_argument("--policies", type=int, default=4, help="in the past, the start included")
    parser.add_argument("--merge", default="ties", choices=("ties", "linear"))
    args = parser.parse_args()
    rule = MergeRule(args.merge)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if args.embedded:
            past, trained = embedded_model(rule, Path(folder), args.embedded)
        else:
            past, trained = one_layer(rule, Path(folder), tuple(args.shape), args.rank)
        for _ in range(args.policies - 1):
            past.add()
            for weight in trained:
                weight.add_(torch.randn_like(weight))
        adding = measured(past.add)
        merging = measured(past.merge)
    largest = 4 * max(weight.merged.numel() for weight in past.weights)
    print(f"{args.merge}, {args.policies} policies, largest weight in float32: {largest / 1e6:.3g} MB")
    for what, (seconds, grown) in (("adding a policy", adding), ("merging", merging)):
        print(
            f"{what}: {seconds:.2f} CPU seconds; peak +{grown / 1e6:.4g} MB, {grown / largest:.1f} times that weight"
        )


if __name__ == "__main__":
    main()
