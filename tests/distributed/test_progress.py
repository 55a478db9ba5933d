"""Signs of life, in a terminal: bars within an update, and warnings that don't get mixed up with them."""

from __future__ import annotations

import io
import logging
import re
import sys
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toy import ColourTask, quiet_config
from tqdm.auto import tqdm

from trl_gtr import make_task
from trl_gtr.correctors import ExpertCorrector
from trl_gtr.distributed.progress import BarProgress, Progress
from trl_gtr.evaluation.agents import RandomAgent
from trl_gtr.evaluation.evaluate import evaluate_agent
from trl_gtr.rollouts.collector import RolloutCollector
from trl_gtr.trainer import GTRTrainer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(terminal: Terminal) -> list[str]:
    """The lines that stay: the cursor goes back, up and down, and later characters replace earlier ones."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[A|[\r\n]|[^\r\n\x1b]", terminal.getvalue()):
        if token == "\x1b[A":
            row = max(0, row - 1)
        elif token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            line = lines[row].ljust(column)
            lines[row], column = line[:column] + token + line[column + 1 :], column + 1
    return [line.rstrip() for line in lines if line.strip()]


def test_warnings_get_lines_of_their_own() -> None:
    terminal, progress = Terminal(), BarProgress()
    logger = logging.getLogger("some.library")
    handler = logging.StreamHandler(terminal)  # created before, as that of transformers is
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with redirect_stderr(terminal), progress.shown():
            progress.begin("collect", 10, "step")
            progress.advance(5)
            logger.warning("from a handler")
            print("to stderr", file=sys.stderr)
            progress.advance(1)
        assert handler.stream is terminal
    finally:
        logger.removeHandler(handler)
    shown = screen(terminal)
    assert shown == ["from a handler", "to stderr"]  # the bar is gone


def test_a_bar_says_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_gtr.distributed.progress.tqdm", partial(tqdm, mininterval=0))
    terminal, progress = Terminal(), BarProgress()
    with redirect_stderr(terminal), progress.shown():
        progress.begin("collect", 4, "step")
        progress.advance(4, corrector="$1.20")
        progress.begin("learn", 2, "optimizer step")
        progress.advance()
    for words in ("collect: 100%", "step/s, corrector=$1.20]", "learn:  50%"):
        assert words in terminal.getvalue()


def test_without_a_terminal_nothing_is_shown() -> None:
    stream, progress = io.StringIO(), BarProgress()
    with redirect_stderr(stream), progress.shown():
        progress.begin("collect", 4, "step")
        progress.advance(4)
    assert stream.getvalue() == ""


class Told(Progress):
    """Records the phases: name → units announced, units done, values shown."""

    def __init__(self) -> None:
        self.phases: dict[str, list[Any]] = {}
        self.current = ""

    def begin(self, phase: str, total: int, unit: str) -> None:
        self.current = phase
        self.phases[phase] = [total, 0, {}]

    def advance(self, count: int = 1, **values: str) -> None:
        self.phases[self.current][1] += count
        self.phases[self.current][2] = values


def test_an_update_tells_of_all_that_it_does(toy_checkpoint: str, tmp_path: Path) -> None:
    settings = {"num_ppo_epochs": 2, "update_schedule": "separate", "cloning_steps": 3, "eval_episodes": 5}
    trainer = GTRTrainer(
        toy_checkpoint, quiet_config(tmp_path, total_env_steps=16, **settings), ColourTask(), ExpertCorrector()
    )
    told = trainer.progress = trainer.updater.progress = Told()
    trainer.train()
    trainer.evaluate()
    assert {name: phase[:2] for name, phase in told.phases.items()} == {
        "collect": [16, 16],
        "corrections": [4, 4],
        "score": [1, 0],
        "learn": [7, 7],  # 2 epochs × 16 steps / 8, then 3 of cloning
        "evaluate": [5, 5],
    }


def test_the_corrector_s_spending_is_shown(toy_checkpoint: str, tmp_path: Path) -> None:
    class Paid(ExpertCorrector):
        def metrics(self) -> dict[str, float]:
            return {"corrector/usd_spent": 1.234}

    trainer = GTRTrainer(toy_checkpoint, quiet_config(tmp_path, total_env_steps=16), ColourTask(), Paid())
    told = trainer.progress = Told()
    trainer.train()
    assert told.phases["collect"][2] == {"corrector": "$1.23"}


def test_evaluations_and_rollouts_need_no_progress() -> None:
    task = make_task("number_line")
    told = Told()
    evaluate_agent(RandomAgent(), task, 3, progress=told)
    assert told.phases["evaluate"][:2] == [3, 3]
    assert evaluate_agent(RandomAgent(), task, 3).complete
    assert RolloutCollector.collect.__kwdefaults__["progress"] is None


def test_a_run_in_a_terminal(toy_checkpoint: str, tmp_path: Path) -> None:
    """Its bar stays, those within an update don't, and a warning doesn't cut either."""

    class Warns(ExpertCorrector):
        def correct(self, requests: Any) -> Any:
            logging.getLogger("trl_gtr.test").warning("look at this")
            return super().correct(requests)

    terminal, config = Terminal(), quiet_config(tmp_path, disable_tqdm=False, save_steps=1, save_strategy="steps")
    handler = logging.StreamHandler(terminal)
    logging.getLogger("trl_gtr").addHandler(handler)
    try:
        with redirect_stderr(terminal):
            GTRTrainer(toy_checkpoint, config, ColourTask(), Warns()).train()
    finally:
        logging.getLogger("trl_gtr").removeHandler(handler)
    for phase in ("collect:", "learn:"):
        assert phase in terminal.getvalue()
    shown = screen(terminal)
    warned = [line for line in shown if "look at this" in line]
    assert len(warned) == 8  # 2 updates of 4 vector steps
    assert set(warned) == {"look at this"}
    assert "Writing" not in terminal.getvalue()  # transformers' bar for the weights of each checkpoint
    assert [line for line in shown if "2/2" in line and "steps/s=" in line] == [shown[-1]]
