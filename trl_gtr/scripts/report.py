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
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=30.0,
        metavar="SECONDS",
        help="write it again while the runs go on; an open page follows (default: every 30 seconds)",
    )
    args = parser.parse_args(argv)
    from ..report import watch_report, write_report  # they need an extra, and time to load

    try:
        if args.watch is None:
            pages = iter([write_report(args.runs, args.labels, args.output)])
        else:
            pages = watch_report(args.runs, args.labels, args.output, args.watch)
        for path in pages:
            print(f"{printable(path)} ({path.stat().st_size / 1e6:.1f} MB)", flush=True)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
