"""Memory and time for merging one adapted layer's weight, of which a model has hundreds: they are merged one by one.

python examples/benchmarks/merge_memory.py --shape 14336 4096 --rank 128 --policies 4
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from trl_gtr.guides.merging import LoraWeight, MergeRule, Snapshots

UNIT = 1 if sys.platform == "darwin" else 1024


def peak() -> int:
    """Peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=2, type=int, default=[14336, 4096], help="of the weight; LLaVA-7B's largest")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--policies", type=int, default=4, help="in the past, the start included")
    parser.add_argument("--merge", default="ties", choices=("ties", "linear"))
    args = parser.parse_args()
    rows, columns = args.shape
    base = nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16), requires_grad=False)
    merged = nn.Parameter(base.detach().clone(), requires_grad=False)
    down, up = nn.Parameter(torch.zeros(args.rank, columns)), nn.Parameter(torch.zeros(rows, args.rank))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        weight = LoraWeight("layer", merged, base, down, up, 2.0, transposed=False)
        past = Snapshots(MergeRule(args.merge), [weight], Path(folder))
        for _ in range(args.policies):
            past.add()
            down.normal_()
            up.normal_()
        before, start = peak(), time.process_time()
        past.merge()
        seconds, grown = time.process_time() - start, peak() - before
    whole = 4 * rows * columns
    print(f"{args.merge}, {args.policies} policies: {seconds:.1f} CPU seconds; peak {grown / 1e9:.2f} GB,", end=" ")
    print(f"{grown / whole:.1f} times the weight in float32 ({whole / 1e9:.2f} GB)")


if __name__ == "__main__":
    main()
