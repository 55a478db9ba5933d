"""Errors that all processes hear of. What several real processes do is in test_distributed.py."""

from types import SimpleNamespace

import pytest

from trl_gtr.distributed.processes import Processes


@pytest.fixture
def processes():
    return Processes(SimpleNamespace(process_index=0, num_processes=1, distributed_type=None), timeout=1.0)


def test_an_error_is_raised_on_all_ranks(processes, monkeypatch):
    with processes.raise_on_all_ranks("Nothing was written", "Try again."):
        pass
    with (
        pytest.raises(OSError, match=r"Nothing was written \(process 0: KeyError\('x'\)\)\. Try again\.") as raised,
        processes.raise_on_all_ranks("Nothing was written", "Try again."),
    ):
        raise KeyError("x")
    assert isinstance(raised.value.__cause__, KeyError)
    monkeypatch.setattr(processes, "gather", lambda own: [own, "OSError(28)"])
    with (
        pytest.raises(OSError, match=r"Nothing was written \(process 1: OSError\(28\)\)"),
        processes.raise_on_all_ranks("Nothing was written", "Try again."),
    ):
        pass


def test_a_check_runs_on_the_first_process_only(processes, monkeypatch):
    def check():
        raise ValueError("not this folder")

    processes.check_on_first(lambda: None)
    with pytest.raises(ValueError, match="not this folder"):
        processes.check_on_first(check)
    processes.rank = 1
    monkeypatch.setattr(processes, "gather", lambda own: ["said by the first", own])
    with pytest.raises(ValueError, match="said by the first"):
        processes.check_on_first(check)


def test_a_fault_is_raised_everywhere_with_its_own_type(processes, monkeypatch):
    processes.raise_first(None)
    own = ConnectionError("the server is gone")
    with pytest.raises(ConnectionError, match="the server is gone") as raised:
        processes.raise_first(own)
    assert raised.value is own  # with its traceback
    monkeypatch.setattr(processes, "gather", lambda mine: [mine, KeyError("of process 1")])
    with pytest.raises(KeyError, match="of process 1"):
        processes.raise_first(None)


class Strict(Exception):
    """Can be pickled but not unpickled."""

    def __init__(self, *, reason):
        super().__init__(f"strict about {reason}")


def test_a_fault_that_cannot_be_sent_is_told_all_the_same(processes, monkeypatch):
    sent = []
    monkeypatch.setattr(processes, "gather", lambda mine: sent.append(mine) or [mine])
    with pytest.raises(Strict):
        processes.raise_first(Strict(reason="keywords"))
    assert str(sent[0]) == "Strict('strict about keywords')"
