"""Versions, extras, GPUs, and what of ALFWorld can run here: `trl-gtr check`."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from packaging.requirements import Requirement

from ..environments.alfworld.check import report


def main(argv: Sequence[str] | None = None) -> int:
    """What is installed, against what the package asks for; 1 if something that it needs is missing or too old."""
    argparse.ArgumentParser(prog="trl-gtr check", description=__doc__).parse_args(argv)
    import torch  # takes seconds, which `--help` needn't

    wrong = 0
    print(f"Python {sys.version.split()[0]}, trl-gtr {importlib.metadata.version('trl-gtr')}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"GPUs: {', '.join(gpus) or 'none: fine for the tiny model'}\n")
    for extra, requirements in _requirements().items():
        found = [_finding(requirement) for requirement in requirements]
        missing = [finding for finding in found if not finding.startswith("ok")]
        if not extra:
            wrong = len(missing)
        state = "ok" if not missing else f'missing: pip install "trl-gtr[{extra}]"' if extra else "wrong"
        print(f"{f'extra {extra}' if extra else 'needed'}: {state}")
        for finding in found:
            print(f"  {finding}")
    print(f"\nALFWorld\n{report()[0]}")
    return 1 if wrong else 0


def _requirements() -> dict[str, list[Requirement]]:
    """What the package needs (under the empty name) and what its extras for users need."""
    found: dict[str, list[Requirement]] = {"": []}
    for text in importlib.metadata.requires("trl-gtr") or []:
        requirement = Requirement(text)
        extra = next((e for e in ("openai", "deepspeed", "report") if f'"{e}"' in str(requirement.marker)), "")
        if extra or requirement.marker is None:
            found.setdefault(extra, []).append(requirement)
    return found


def _finding(requirement: Requirement) -> str:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"missing  {requirement.name}{requirement.specifier}"
    fits = requirement.specifier.contains(version, prereleases=True)
    return f"{'ok      ' if fits else 'unfit   '} {requirement.name} {version} (wanted {requirement.specifier})"
