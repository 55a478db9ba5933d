"""Text from outside: for files, for a terminal, and without keys."""

from __future__ import annotations

import base64
import html
import json
import time
import urllib.parse
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console
from toy import COLOURS, PROMPT, ColourTask

from trl_gtr.responses.safe_text import hide_secrets, one_line, printable, storable
from trl_gtr.runs.rollout_metrics import completions_table
from trl_gtr.runs.trackers import caption
from trl_gtr.types import Correction, Rollout, Transition

KEY = "sk-proj-A/b+c_0123456789=xyz"
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=60)  # lone surrogates too


@given(ANY_TEXT)
def test_storable_text_can_be_encoded(text: str) -> None:
    assert len(storable(text).encode()) >= len(text)
    if text.isprintable():
        assert storable(text) == text


@given(ANY_TEXT)
def test_printable_text_holds_no_control_character(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert all(c.isprintable() or c in "\n\t" or ord(c) > 0xFF for c in shown.replace("\xad", "").replace("\xa0", ""))
    assert not set(shown) & set("\x1b\x9b\x07\x08\r\x7f\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2028")
    assert "\n" not in one_line(text)
    if text.isprintable():
        assert shown == text


def test_control_characters_are_spelt_out() -> None:
    assert printable("a\x1b[31m\u202eb\ud800\n\tc") == "a\\x1b[31m\\u202eb\\ud800\n\tc"
    assert one_line("  a \r\n b\x1b ", 4) == "a b\\"


def spellings() -> dict[str, str]:
    escape = "".join(f"\\u{ord(c):04x}" for c in KEY)
    found = {
        "plain": KEY,
        "JSON": json.dumps(KEY),
        "JSON with slashes escaped": KEY.replace("/", "\\/"),
        "escapes": escape,
        "capital escapes": "".join(f"\\u{ord(c):04X}" for c in KEY),
        "some escapes": "".join(f"\\u{ord(c):04x}" if i % 3 else c for i, c in enumerate(KEY)),
        "escapes in JSON in JSON": json.dumps(json.dumps(escape)),
        "hexadecimal": "".join(f"\\x{ord(c):02x}" for c in KEY),
        "URL": urllib.parse.quote(KEY, safe=""),
        "URL in a URL": urllib.parse.quote(urllib.parse.quote(KEY, safe=""), safe=""),
        "every character of a URL": "".join(f"%{ord(c):02x}" for c in KEY),
        "HTML": html.escape(KEY),
        "numbers in HTML": "".join(f"&#{ord(c)};" for c in KEY),
        "hexadecimal in HTML": "".join(f"&#x{ord(c):X};" for c in KEY),
        "base64 for URLs": base64.urlsafe_b64encode(b"user:" + KEY.encode()).decode(),
    }
    return found | {f"base64, {n}": base64.b64encode(b"u" * n + KEY.encode() + b"vw").decode() for n in range(4)}


@pytest.mark.parametrize("spelling", spellings().values(), ids=spellings().keys())
def test_key_is_hidden_however_it_is_spelt(spelling: str) -> None:
    shown = hide_secrets(f"You sent {spelling} to us", [None, KEY])
    assert "[key]" in shown
    assert KEY not in html.unescape(urllib.parse.unquote(urllib.parse.unquote(shown)))
    assert shown.startswith("You sent ")
    assert shown.endswith(" to us")
    core = shown.removeprefix("You sent ").removesuffix(" to us").replace("[key]", "")
    assert len(core) < 10  # quotes, or what base64 shares with its neighbours


@settings(deadline=None)
@given(st.text("ab\\u0073sk-%&#;", max_size=40), st.integers(0, 60))
def test_start_of_a_key_at_a_cut_is_hidden(before: str, kept: int) -> None:
    text = ("x" * 1000 + before + KEY)[: 1000 + kept]
    shown = hide_secrets(text, [KEY], was_cut=True)
    assert KEY[:8] not in shown
    assert len(shown) > 500


def test_placeholders_stay() -> None:
    assert hide_secrets("none of these", ["none", "", None]) == "none of these"
    assert hide_secrets("short", [KEY], was_cut=True) == ""


@pytest.mark.parametrize("text", ["\\", "%25", "&amp;", "s\\u006b", KEY[:-1], "s", "c2st"])
def test_search_for_a_key_takes_linear_time(text: str) -> None:
    started = time.process_time()
    hide_secrets(text * (2**20 // len(text)), [KEY])
    assert time.process_time() - started < 20  # a second at most; a quadratic search takes hours


# --- where it is shown ----------------------------------------------------------------------------------------------

ATTACK = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e half \ud800 [red]markup[/red]"


def attacked_rollout() -> Rollout:
    task = ColourTask()
    response = task.format.parse(f'{{"thoughts": "{ATTACK}", "action": "{ATTACK}"}}')
    step: dict[str, Any] = {"terminated": False, "truncated": False, "bootstrap": False, "legal": False}
    image = np.zeros((4, 4, 3), np.uint8)
    steps = [
        Transition(i, 0, image, PROMPT + ATTACK, response, np.arange(3), 0.0, info={"colour": "red"}, **step)
        for i in range(3)
    ]
    corrections = [
        Correction("corrected", thought={"thoughts": ATTACK}, action=next(iter(COLOURS))),
        Correction("failed", reason=ATTACK),
        None,
    ]
    return Rollout(steps, corrections, [], [])


def test_printed_steps_control_no_terminal(tmp_path: Any) -> None:
    """What an agent writes and an expert keeps is printed as text, and lone surrogates break nothing."""
    with (tmp_path / "out.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=200, force_terminal=True, color_system=None).print(
            completions_table(attacked_rollout(), 3, seed=0)
        )
    shown = (tmp_path / "out.txt").read_text("utf-8").replace("\x1b[3m", "").replace("\x1b[0m", "")
    shown = shown.replace("\x1b[1m", "")  # the table's own title
    assert "\\x1b]0;title" in shown
    assert "[red]markup" in shown
    assert not set(shown) & set("\x1b\x9b\x07\u202e\ud800")


def test_captions_for_trackers_can_be_encoded() -> None:
    rollout = attacked_rollout()
    for i in range(3):
        caption(rollout, i).encode()
