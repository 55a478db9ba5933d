"""From the folders of runs to one self-contained page: curves, episodes to look at, collapse, settings.

    from trl_gtr import write_report

    write_report(["runs/points24"])

The page needs no network and no server. What a model has written reaches it only as escaped text and as JSON that a
script puts in place as text; a content policy forbids every other script.
"""

from .page import MAX_BYTES, watch_report, write_report

__all__ = ["MAX_BYTES", "watch_report", "write_report"]
