"""Ending a run early: what is saved first, and how the run is left."""

import random
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from trl_gtr.runs.stopping import RunStopper


class Collector:
    state = "in the middle of a rollout"

    def state_dict(self):
        return {"place": self.state}

    def rewind(self, state):
        self.state = state["place"]


@pytest.fixture
def make_stopper():
    """A stopper of one process, and what it did."""

    def make(saves=True, saved=(), received=None):
        done, on_disk, collector = [], set(saved), Collector()
        checkpointer = SimpleNamespace(is_saved=on_disk.__contains__, folder=lambda step: Path(f"checkpoint-{step}"))

        def save():
            done.append(("save", collector.state))
            on_disk.add(2)

        stopper = RunStopper(
            SimpleNamespace(rank=0, gather=lambda value: [value]),
            checkpointer,
            collector,
            save=save if saves else None,
            end=lambda: done.append("end"),
            received=lambda: received,
        )
        return stopper, done

    return make


def test_nothing_happens_without_a_signal(make_stopper):
    stopper, done = make_stopper()
    stopper.stop_on_signal(2, [None, None])
    assert stopper.stop_if_spent(2, None) is False
    stopper.raise_if_diverged(2, SimpleNamespace(gave_up=False))
    assert done == []


def test_a_signal_is_what_ends_a_run_that_an_error_would_end_too(make_stopper, caplog):
    stopper, done = make_stopper(received=15)
    with pytest.raises(SystemExit) as left:
        stopper.end_run(2, ConnectionError("nobody waits for the server any more"))
    assert left.value.code == 128 + 15
    assert "nobody waits for the server any more" in caplog.text
    assert done == [("save", stopper.collector.state), "end"]


def test_a_signal_to_any_process_saves_the_state_before_the_rollout(make_stopper, caplog):
    stopper, done = make_stopper()
    stopper.collector.state = "before"
    before, drawn = stopper.snapshot(2), random.random()
    stopper.collector.state = "after"
    with pytest.raises(SystemExit) as left:
        stopper.stop_on_signal(2, [None, signal.SIGTERM], before=before)
    assert left.value.code == 128 + signal.SIGTERM
    assert done == [("save", "before"), "end"]
    assert random.random() == drawn
    assert (
        "The run stops after update 2: SIGTERM received. Resume from checkpoint-2 (--resume_from_checkpoint true)."
        in caplog.text
    )


def test_a_state_that_is_saved_already_is_not_saved_again(make_stopper):
    stopper, done = make_stopper(saved={2})
    assert stopper.snapshot(2) is None
    assert stopper.stop_if_spent(2, "the corrector's budget is spent")
    assert done == []


def test_a_run_that_saves_nothing_says_so(make_stopper, caplog):
    stopper, done = make_stopper(saves=False)
    assert stopper.snapshot(2) is None
    with pytest.raises(FloatingPointError, match=r"logits are not finite \(process 1\)"):
        stopper.stop_on_signal(2, [None, None], [None, FloatingPointError("logits are not finite")])
    assert done == ["end"]
    assert "Nothing was saved (save_strategy='no')" in caplog.text


def test_a_run_that_diverged_is_saved_and_named(make_stopper):
    stopper, done = make_stopper()
    updater = SimpleNamespace(gave_up=True, not_finite="advantages", skipped_in_a_row=6)
    with pytest.raises(FloatingPointError, match=r"6 optimizer steps in a row were skipped: advantages \(process 0\)"):
        stopper.raise_if_diverged(2, updater)
    (what, _), end = done
    assert (what, end) == ("save", "end")  # callbacks can close their files: run.json says "stopped"
