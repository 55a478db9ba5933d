"""The collapse alarm: when it rings, when it doesn't, and that it survives a checkpoint."""

import logging
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from trl_gtr.distributed.ppo_base import OnlineTrainerState
from trl_gtr.runs.callbacks import GTRProgressCallback, ThoughtCollapseCallback

HEALTHY = {
    "thoughts/distinct_4": 0.4,
    "thoughts/identical_across_states": 0.9,
    "thoughts/identical_untrue": 0.1,
    "thoughts/top_share": 0.05,
}


def ring(callback, logs):
    control = TrainerControl()
    state = TrainerState(global_step=1)
    state.is_world_process_zero = True
    for entry in logs:
        callback.on_log(None, state, control, logs=entry)
    return control


@pytest.mark.parametrize(
    ("sign", "words"),
    [
        ({"thoughts/identical_untrue": 0.9}, "90% of thoughts are untrue and repeated in other states"),
        ({"thoughts/top_share": 0.8}, "one thought accounts for 80% of all"),
        ({"thoughts/distinct_4": 0.01}, "distinct 4-grams fell from 0.400 to 0.010"),
    ],
)
def test_each_sign_of_collapse_warns_once(caplog, sign, words):
    with caplog.at_level(logging.WARNING):
        control = ring(ThoughtCollapseCallback(patience=2), [HEALTHY] + [HEALTHY | sign] * 4)
    assert len(caplog.records) == 1
    assert words in caplog.records[0].message
    assert not control.should_training_stop


def test_repetition_is_not_called_untrue_where_nobody_knows(caplog):
    unknown = {name: value for name, value in HEALTHY.items() if name != "thoughts/identical_untrue"}
    with caplog.at_level(logging.WARNING):
        ring(ThoughtCollapseCallback(patience=1), [unknown])
    assert "90% of thoughts are repeated in other states" in caplog.records[0].message
    assert "untrue" not in caplog.records[0].message


def test_patience_starts_anew_after_a_good_log(caplog):
    bad = HEALTHY | {"thoughts/top_share": 0.8}
    with caplog.at_level(logging.WARNING):
        ring(ThoughtCollapseCallback(patience=2), [bad, HEALTHY, bad, HEALTHY])
    assert not caplog.records


def test_it_can_stop_the_run():
    bad = HEALTHY | {"thoughts/top_share": 0.8}
    assert ring(ThoughtCollapseCallback(patience=1, stop=True), [bad]).should_training_stop
    assert not ring(ThoughtCollapseCallback(patience=1, stop=True), [HEALTHY]).should_training_stop


def test_logs_without_thoughts_are_passed_over(caplog):
    callback = ThoughtCollapseCallback(patience=1)
    with caplog.at_level(logging.WARNING):
        ring(callback, [{"eval_success": 1.0}])
    assert callback.first_distinct is None


def test_its_state_can_be_restored():
    callback = ThoughtCollapseCallback(patience=5, max_top=0.3)
    ring(callback, [HEALTHY, HEALTHY | {"thoughts/top_share": 0.8}])
    saved = callback.state()
    restored = ThoughtCollapseCallback(**saved["args"])
    for name, value in saved["attributes"].items():
        setattr(restored, name, value)
    assert (restored.first_distinct, restored.bad_logs, restored.max_top) == (0.4, 1, 0.3)


def test_success_is_shown_once_enough_episodes_have_ended():
    """The first to end are the short ones: a success over three of them says nothing."""
    callback, state, shown = GTRProgressCallback(), OnlineTrainerState(), []
    state.is_world_process_zero, state.max_steps, args = True, 3, SimpleNamespace(num_envs=8)
    callback.on_train_begin(args, state, None)
    callback.training_bar.set_postfix = shown.append
    for count, success in ((3, 1.0), (7, 0.25), (11, 0.5), (21, 0.4)):
        callback.on_log(args, state, None, logs={"episode/success": success, "episode/count": count, "lr": 1.0})
    callback.on_log(args, state, None, logs={"thoughts/true": 0.5})  # no episode ended
    callback.on_train_end(args, state, None)
    # (4 × 0.25 + 4 × 0.5) / 8, then the ten of the last update alone
    assert shown == [{"success": "0.38"}, {"success": "0.40"}, {"success": "0.40", "true thoughts": "0.50"}]
