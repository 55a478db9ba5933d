"""Where the repository's parts are."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
SHARED = ROOT.parent / "shared"
"""Larger data for tests, skipped where it is absent."""
