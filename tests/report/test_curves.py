"""Which curves a run has."""

import pytest

pytest.importorskip("matplotlib", reason="needs trl-gtr[report]")

from trl_gtr.report.curves import CURVES, charts
from trl_gtr.report.runs import Run


def test_only_a_run_with_groups_shows_how_many_were_not_learned_from(tmp_path):
    panels = [panel for panel in CURVES if "groups/dead" in panel.metrics]
    log = [{"step": 1, "groups/dead": 0.5, "groups/cut": 0.0}, {"step": 2, "groups/dead": 0.25, "groups/cut": 0.1}]
    (chart,) = charts(panels, {"grpo": [Run(tmp_path, "grpo", log, {})]})
    assert chart.rows == [["1", "50.0%", "0.0%"], ["2", "25.0%", "10.0%"]]
    assert charts(panels, {"gtr": [Run(tmp_path, "gtr", [{"step": 1, "loss/value": 1.0}], {})]}) == []
