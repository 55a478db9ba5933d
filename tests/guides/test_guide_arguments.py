"""Guides by name."""

import pytest
from toy import quiet_config

from trl_gtr.correctors import CorrectorArguments, ExpertCorrector
from trl_gtr.guides.arguments import GuideArguments, make_guide
from trl_gtr.guides.base import Guide
from trl_gtr.guides.corrected import CorrectedThoughts
from trl_gtr.guides.merged_teacher import MergedTeacher


def made(tmp_path, corrector="expert", thought_cloning_coef=1.0, **settings):
    args = quiet_config(tmp_path, thought_cloning_coef=thought_cloning_coef)
    return make_guide(GuideArguments(**settings), CorrectorArguments(corrector=corrector), args)


def test_every_name_makes_its_guide(tmp_path):
    assert type(made(tmp_path)) is CorrectedThoughts
    assert type(made(tmp_path, thought_cloning_coef=0.0)) is Guide
    assert type(made(tmp_path, guide="none")) is Guide
    for name, variant in (("turbo_sft", "sft"), ("turbo_kl", "kl")):
        guide = made(tmp_path, guide=name)
        assert (type(guide), guide.variant, guide.corrector) == (MergedTeacher, variant, None)
    both = made(tmp_path, guide="turbo_sft", turbo_with_corrector=True)
    assert isinstance(both.corrector, ExpertCorrector)
    with pytest.raises(ValueError, match="guide must be one of corrector, turbo_sft, turbo_kl, none, not 'turbo'"):
        made(tmp_path, guide="turbo")
    with pytest.raises(ValueError, match="Thought cloning needs a `corrector`"):
        made(tmp_path, corrector="none")


def test_defaults_are_the_classs_own(tmp_path):
    assert made(tmp_path, guide="turbo_sft").settings() == MergedTeacher("sft").settings()


def test_settings_arrive(tmp_path):
    settings = {
        "merge": "linear",
        "weighting": "sma",
        "ema_alpha": 0.25,
        "merge_every": 3,
        "ties_density": 0.5,
        "kl_beta": 2.0,
    }
    own = {"teacher_temperature": 0.7, "teacher_top_k": 9, "teacher_tries": 2}
    found = made(tmp_path, guide="turbo_kl", **settings, **own).settings()
    assert found == {"variant": "kl", **settings, "temperature": 0.7, "top_k": 9, "tries": 2}
    with pytest.raises(ValueError, match="`merge_every` must be a whole number, at least 1, got 0"):
        made(tmp_path, guide="turbo_kl", merge_every=0)
