"""Write one self-contained HTML page about runs, while they run too: `trl-gtr report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..responses.safe_text import printable


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trl-gtr report", description=__doc__)
    parser.add_argument("runs", nargs="+", help="output folders")
    parser.add_argument("--labels", nargs="+", help="a name for each run; runs of one name are seeds, drawn as a band")
    parser.add_argument("--output", help="the file; default: report.html in the first run's folder")
    args = parser.parse_args(argv)
    from ..report import write_report  # it needs an extra, and time to load

    try:
        path = write_report(args.runs, args.labels, args.output)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    print(f"{printable(path)} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0
