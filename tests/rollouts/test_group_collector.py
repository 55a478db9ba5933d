"""GroupCollector: equal starts, whole episodes, no token for those that have ended, refills, cuts, resuming."""

import itertools
from functools import partial

import numpy as np
import pytest
from counter_env import CounterTask
from function_engine import FunctionEngine
from toy import COLOURS, ColourEnv, ColourTask, GuessTask

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.rollouts.group_collector import GroupCollector
from trl_gtr.rollouts.playing import DEFAULT_STEP_LIMIT
from trl_gtr.types import Generation


def say(task, colour):
    text = task.format.render({"thoughts": f"it is {colour}"}, colour)
    return Generation(np.arange(len(text)), text)


def cycling(task, sizes):
    """Names the colours in turn, whatever is shown; the sizes of all batches go to `sizes`."""
    colours = itertools.cycle(COLOURS)

    def generate(prompts, images):
        sizes.append(len(prompts))
        return [say(task, next(colours)) for _ in prompts]

    return generate


def collect(task, function, corrector=None, timeout=float("inf"), **options):
    settings = {"num_envs": 4, "group_size": 2, "seed": 0, **options}
    collector = GroupCollector(task, corrector, **settings)
    return collector, partial(collector.collect, FunctionEngine(function), 1, timeout=timeout)


def by_env(rollout, env):
    return [step for step in rollout.transitions if step.env_index == env]


def test_a_group_starts_in_the_same_state_and_groups_differ():
    task = ColourTask(length=2)
    _, play = collect(task, cycling(task, []), num_envs=8, group_size=4)
    first, second = play(), play()
    starts = [by_env(first, env)[0] for env in range(8)]
    assert all(np.array_equal(starts[0].image, start.image) for start in starts[:4])
    assert all(np.array_equal(starts[4].image, start.image) for start in starts[4:])
    assert not np.array_equal(starts[0].image, starts[4].image)
    assert not np.array_equal(starts[0].image, by_env(second, 0)[0].image)  # the next update plays another
    assert [step.episode for step in by_env(second, 0)] == [1, 1]


def test_episodes_are_whole_and_finished_ones_cost_nothing():
    task, sizes = GuessTask(length=3), []
    _, play = collect(task, cycling(task, sizes))
    rollout = play()
    lengths = [len(by_env(rollout, env)) for env in range(4)]
    assert len(set(lengths)) > 1, "the example must have episodes of different lengths"
    assert sum(sizes) == len(rollout) == sum(lengths)
    assert sizes == [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert sorted(map(len, rollout.episodes)) == sorted(lengths)
    for env in range(4):
        own = by_env(rollout, env)
        assert [step.step for step in own] == [step.episode_step for step in own] == list(range(len(own)))
        assert [step.terminated or step.truncated for step in own] == [False] * (len(own) - 1) + [True]
        assert not any(step.bootstrap for step in own)
    assert rollout.last_images == rollout.last_prompts == []


def test_corrections_stay_with_their_steps_when_the_batch_shrinks():
    task = GuessTask(length=3)
    _, play = collect(task, cycling(task, []), ExpertCorrector())
    rollout = play()
    assert len(rollout.corrections) == len(rollout)
    for step, correction in zip(rollout.transitions, rollout.corrections, strict=True):
        assert correction.verdict == ("right" if step.reward else "corrected")


def test_a_group_that_teaches_nothing_is_refilled_up_to_a_bound():
    task, seen = ColourTask(length=1), []

    def teaches(group):
        seen.append([len(episode) for episode in group])
        return group[0][0].env_index == 2  # the second lane's groups do, the first lane's never

    collector, play = collect(task, cycling(task, []), refills=3, teaches=teaches)
    rollout = play()
    assert [len(by_env(rollout, env)) for env in range(4)] == [4, 4, 1, 1]
    assert [step.episode for step in by_env(rollout, 1)] == [0, 1, 2, 3]
    assert [step.step for step in by_env(rollout, 1)] == [0, 1, 2, 3]
    images = [step.image.tobytes() for step in by_env(rollout, 0)]
    assert len(set(images)) == 4
    assert images == [step.image.tobytes() for step in by_env(rollout, 1)]
    assert collector.ended == [4, 4, 1, 1]
    assert all(lengths == [1, 1] for lengths in seen)


def test_without_refills_one_group_is_played():
    task = ColourTask(length=1)
    _, play = collect(task, cycling(task, []), teaches=lambda group: False)
    assert len(play()) == 4


def test_a_cut_group_is_left_and_the_next_rollout_starts_anew(caplog):
    task = ColourTask(length=2)
    collector, play = collect(task, cycling(task, []), timeout=0.0)
    rollout = play()
    assert len(rollout) == 4  # at least one step
    assert not rollout.episodes
    assert "2 of 2 groups were cut short" in caplog.text
    assert collector.ended == [1] * 4
    again = play()
    assert [step.episode_step for step in again.transitions] == [0] * 4
    assert not np.array_equal(again.transitions[0].image, rollout.transitions[0].image)


def test_an_endless_game_ends_at_the_step_limit():
    task = ColourTask(length=10**6)
    _, play = collect(task, cycling(task, []), num_envs=2)
    rollout = play()
    assert [len(episode) for episode in rollout.episodes] == [DEFAULT_STEP_LIMIT] * 2
    assert rollout.episodes[0][-1].truncated


class UnseededTask(ColourTask):
    def make_env(self, *, evaluation=False):
        class Unseeded(ColourEnv):
            def reset(self, *, seed=None, options=None):
                return super().reset(seed=None)

        return Unseeded()


def test_environments_that_start_differently_are_refused_at_once():
    with pytest.raises(ValueError, match=r"start differently.*`reset\(seed=…\)` must decide everything"):
        GroupCollector(UnseededTask(), num_envs=4, group_size=2, seed=0)


def test_a_group_is_played_by_one_process():
    with pytest.raises(ValueError, match="4 environments can't be divided into groups of 3"):
        GroupCollector(ColourTask(), num_envs=4, group_size=3, seed=0)


def fingerprint(rollout):
    return [(s.env_index, s.step, s.image.tobytes(), s.reward, s.substitute) for s in rollout.transitions]


def test_groups_do_not_depend_on_the_number_of_processes():
    task = GuessTask(length=3)

    def red(prompts, images):
        return [say(task, "red") for _ in prompts]

    _, together = collect(task, red)
    parts = [collect(task, red, num_envs=2, first_index=first)[1] for first in (0, 2)]
    for _ in range(2):
        apart = [each for part in parts for each in fingerprint(part())]
        assert sorted(fingerprint(together())) == sorted(apart)


def test_a_saved_state_continues_exactly():
    task = GuessTask(length=3)

    def unreadable(prompts, images):  # random actions are played instead
        return [Generation(np.arange(3), "…") for _ in prompts]

    source, play = collect(task, unreadable)
    play()
    state = source.state_dict()
    expected = fingerprint(play())
    other, play_on = collect(task, unreadable)
    other.load_state_dict(state)
    assert fingerprint(play_on()) == expected
    source.rewind(state)
    assert source.state_dict() == state
    assert fingerprint(play()) == expected
    with pytest.raises(ValueError, match="holds 4 environments"):
        collect(task, unreadable, num_envs=2)[0].load_state_dict(state)


@pytest.mark.parametrize("vectorization", ["processes", "sync"])
def test_workers_play_groups_and_a_lost_one_is_told(vectorization):
    task = CounterTask(vectorization)
    deaths = iter([True])

    def generate(prompts, images):
        die = vectorization == "processes" and next(deaths, False)
        actions = ["die" if die and i == 1 else "go" for i in range(len(prompts))]
        return [Generation(np.arange(3), task.format.render({}, action)) for action in actions]

    collector, play = collect(task, generate)
    try:
        if vectorization == "processes":
            with pytest.warns(UserWarning, match="episode is lost"):
                rollout = play()
            assert [e[-1].final_info.get("worker_lost", False) for e in rollout.episodes].count(True) == 1
            assert by_env(rollout, 1)[-1].final_info["worker_lost"]
        rollout = play()
        targets = [by_env(rollout, env)[0].info["target"] for env in range(4)]
        assert targets[0] == targets[1]
        assert targets[2] == targets[3]
        assert [len(by_env(rollout, env)) for env in range(4)] == targets
    finally:
        collector.close()


def test_a_time_out_that_lets_some_group_end_is_long_enough(monkeypatch):
    collector, _ = collect(ColourTask(length=3), cycling(ColourTask(length=3), []))
    now = itertools.count()  # every look at the clock is a second later
    monkeypatch.setattr("trl_gtr.rollouts.group_collector.time.monotonic", lambda: float(next(now)))
    with pytest.raises(ValueError, match="A group of episodes takes longer"):
        collector.check_timeout(1.5)
    envs = collector.parts[0].envs
    step_some = envs.step_some

    def first_lane_ends(actions):
        return {i: (*result[:3], i < 2, result[4]) for i, result in step_some(actions).items()}

    monkeypatch.setattr(envs, "step_some", first_lane_ends)
    collector.check_timeout(1.5)
