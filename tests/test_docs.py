"""The pages keep up with the code: every metric and episode column is explained, every generated part is current."""

import ast
import importlib
import inspect
import re
import runpy
import textwrap

import pytest
from paths import DOCS
from toy import ColourTask, quiet_config

from trl_gtr.correctors import AuditedCorrector, ExpertCorrector
from trl_gtr.runs.episode_log import SCHEMA
from trl_gtr.trainer import GTRTrainer

# `Trainer.log` adds these to every entry: the update, and the share of the run that is over.
OF_THE_TRAINER = {"step", "epoch"}


def names_on(*pages: str) -> set[str]:
    """What stands in backticks on these pages."""
    return {name for page in pages for name in re.findall(r"`([^`\n]+)`", (DOCS / page).read_text("utf-8"))}


@pytest.fixture
def logged(toy_checkpoint, tmp_path) -> set[str]:
    """Every name of a short run that has everything in it: PPO, cloning, KL, an audited corrector, an evaluation."""
    args = quiet_config(tmp_path, kl_coef=0.01, eval_episodes=2)
    corrector = AuditedCorrector(ExpertCorrector(), share=1.0)
    trainer = GTRTrainer(toy_checkpoint, args, ColourTask(), corrector)
    trainer.train()
    trainer.evaluate()
    return {name for entry in trainer.state.log_history for name in entry}


def test_every_logged_name_is_explained(logged):
    explained = names_on("metrics.md", "correctors.md") | OF_THE_TRAINER
    assert {"loss/kl", "corrector/precision", "eval_success"} <= logged  # the run had everything in it
    patterns = [re.escape(name).replace("<part>", "[a-z_]+") for name in explained if "<part>" in name]
    missing = {name for name in logged - explained if not any(re.fullmatch(p, name) for p in patterns)}
    assert not missing, f"docs/metrics.md says nothing about {sorted(missing)}"


def test_every_column_of_the_episodes_is_explained():
    missing = set(SCHEMA) - names_on("report.md")
    assert not missing, f"docs/report.md says nothing about {sorted(missing)}"


def test_each_formula_is_a_short_function():
    formulas = re.findall(r"reference\.md#([\w.]+)\.(\w+)", (DOCS / "algorithms.md").read_text("utf-8"))
    assert {"gae", "grpo", "rloo", "gigpo", "policy_loss"} <= {name for _, name in formulas}
    for module, name in formulas:
        found = getattr(importlib.import_module(module), name)
        function = found.__call__ if inspect.isclass(found) else found
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert tree.body[-1].end_lineno - tree.body[bool(ast.get_docstring(tree))].lineno < 20, name


def test_a_study_with_merged_teachers_has_a_table():
    part = runpy.run_path(str(DOCS / "generate.py"))["PARTS"]["teacher"]
    header, _, *rows = part("algorithms").splitlines()  # a study without teachers, whose cells for them are empty
    assert header.startswith("| task | arm | seeds | success | true thoughts | entropy | valid responses | teacher −")
    assert len(rows) == 30


def test_pages_are_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text("utf-8")
    missing = [page.name for page in DOCS.glob("*.md") if f": {page.name}" not in navigation]
    assert not missing, f"mkdocs.yml doesn't name {missing}"


def test_generated_parts_are_current():
    script = runpy.run_path(str(DOCS / "generate.py"))
    pages = {page: page.read_text("utf-8") for page in DOCS.glob("*.md")}
    assert sum(text.count("<!-- begin generated") for text in pages.values()) >= 9
    assert all(
        text.count("<!-- begin generated") == len(script["PART"].findall(text)) for text in pages.values()
    )  # a marker that is never closed would be left as it is
    stale = [page.name for page, text in pages.items() if script["generated"](text) != text]
    assert not stale, f"run `python docs/generate.py`: {stale} are out of date"
