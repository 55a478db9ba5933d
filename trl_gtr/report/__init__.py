"""Turns run folders into one self-contained page: curves, episodes, collapse, settings.

    from trl_gtr import write_report

    write_report(["runs/points24"])

The page needs no network and no server. Model output appears only as escaped text, or as JSON that the page's script
inserts as text; a content security policy blocks all other scripts.
"""

from .page import MAX_BYTES, watch_report, write_report

__all__ = ["MAX_BYTES", "watch_report", "write_report"]
