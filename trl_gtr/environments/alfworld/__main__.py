"""`python -m trl_gtr.environments.alfworld --check`: report what can run here, and what the rest needs."""

from __future__ import annotations

import argparse
import sys

from .check import report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trl_gtr.environments.alfworld", description=__doc__)
    parser.add_argument("--check", action="store_true", help="report what is installed and what is missing")
    if not parser.parse_args().check:
        parser.print_help()
        return 2
    text, playable = report()
    print(text)
    return 0 if playable else 1


if __name__ == "__main__":
    sys.exit(main())
