"""RolloutCollector: what is recorded, what is asked, and what happens to unreadable answers."""

import contextlib
import itertools
import pickle
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
from alfworld_cases import needs_alfworld
from function_engine import make_collector
from toy import COLOURS, ColourEnv, ColourTask

from trl_gtr import make_task
from trl_gtr.correctors import Corrector, ExpertCorrector
from trl_gtr.evaluation.agents import RandomAgent
from trl_gtr.evaluation.evaluate import evaluate_agent
from trl_gtr.rollouts.playing import SkippableStep
from trl_gtr.rollouts.vector_envs import unpack_infos
from trl_gtr.types import Correction, Generation

SHORT_ALFWORLD = {"games": "bundled", "max_episode_steps": 8}


def scripted(task, script=None):
    """A policy that reads the colour off the picture, or says what `script(image)` gives."""

    def read(image):
        mean = image.reshape(-1, 3).mean(0)
        return min(COLOURS, key=lambda colour: np.abs(np.array(COLOURS[colour]) - mean).sum())

    def answer(image):
        colour = read(image)
        return task.format.render({"thoughts": f"it is {colour}"}, colour)

    def generate(prompts, images):
        texts = [(script or answer)(image) for image in images]
        return [Generation(np.arange(len(text)), text) for text in texts]

    return generate


def collector(task=None, script=None, corrector=None, num_envs=3, **kwargs):
    task = task or ColourTask()
    return make_collector(task, scripted(task, script), corrector, num_envs=num_envs, **kwargs)


def test_transitions_come_step_by_step_with_their_own_state():
    rollout = collector(ColourTask(length=2), corrector=ExpertCorrector()).collect(5)
    assert len(rollout) == 15
    assert [t.step for t in rollout.transitions] == [step for step in range(5) for _ in range(3)]
    assert [t.env_index for t in rollout.transitions] == [0, 1, 2] * 5
    # The info and the picture belong together: the scripted policy reads it right every time.
    assert all(t.reward == 1.0 for t in rollout.transitions)
    assert all(t.response.action == t.info["colour"] for t in rollout.transitions)
    assert all(c.verdict == "right" for c in rollout.corrections)
    assert [t.terminated for t in rollout.transitions if t.env_index == 0] == [False, True, False, True, False]


def test_episodes_are_whole_even_when_they_began_in_an_earlier_rollout():
    source = collector(ColourTask(length=3))
    first, second = source.collect(2), source.collect(2)
    assert not first.episodes
    assert [len(episode) for episode in second.episodes] == [3, 3, 3]
    assert all(step.image.size == 0 for episode in second.episodes for step in episode)


def test_a_truncated_episode_keeps_its_true_final_observation():
    rollout = collector(ColourTask(length=2, terminates=False)).collect(2)
    last = rollout.transitions[-1]
    assert last.truncated
    assert last.bootstrap
    assert last.final_prompt == "Which colour?"
    # the vector environment has reset already: what comes next is another picture
    assert not np.array_equal(last.final_image, rollout.last_images[-1])


def test_a_truncation_marked_as_final_does_not_bootstrap():
    class Marked(ColourEnv):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, terminated, truncated, info | ({"bootstrap": False} if truncated else {})

    class MarkedTask(ColourTask):
        def make_env(self, *, evaluation=False):
            return Marked(terminates=False)

    rollout = collector(MarkedTask()).collect(2)
    assert rollout.transitions[-1].truncated
    assert not rollout.transitions[-1].bootstrap
    assert rollout.transitions[-1].final_image is None


def test_unreadable_text_plays_at_random_without_a_correction():
    asked = []

    class Counting(Corrector):
        def correct(self, requests):
            asked.extend(requests)
            return [Correction("right") for _ in requests]

    rollout = collector(script=lambda image: "no idea", corrector=Counting(), num_envs=50).collect(4)
    assert not asked
    assert rollout.corrections == [None] * 200
    assert not any(t.legal for t in rollout.transitions)
    wins = sum(t.reward > 0 for t in rollout.transitions)
    assert 25 <= wins <= 80  # a quarter of 200, within five standard deviations
    # what was played instead is known, and it is what was rewarded
    assert all((t.substitute == t.info["colour"]) == (t.reward > 0) for t in rollout.transitions)


def test_an_illegal_action_still_gets_its_thought_corrected():
    script = lambda image: '{"thoughts": "it is pink", "action": "pink"}'  # noqa: E731
    rollout = collector(script=script, corrector=ExpertCorrector()).collect(1)
    assert not any(t.legal for t in rollout.transitions)
    assert {c.verdict for c in rollout.corrections} == {"corrected"}


def test_a_penalty_steps_nothing_and_costs_one():
    source = collector(script=lambda image: "no idea", invalid_action="penalty", num_envs=2)
    assert {t.substitute for t in source.collect(1).transitions} == {None}
    before = [image.copy() for image in source.images]
    rollout = source.collect(3)
    assert all(t.reward == -1.0 and not t.terminated for t in rollout.transitions)
    assert all(np.array_equal(a, b) for a, b in zip(before, source.images, strict=True))
    assert all(env.unwrapped.steps == 0 for env in source.parts[0].envs.envs)


def test_skips_count_against_the_step_limit():
    gym.register("tests/Colour-v0", ColourEnv, max_episode_steps=4)
    try:
        env = SkippableStep(gym.make("tests/Colour-v0"))
        env.reset(seed=0)
        ends = [env.step(SkippableStep.skip(env.action_space))[3] for _ in range(4)]
        assert ends == [False, False, False, True]
    finally:
        del gym.registry["tests/Colour-v0"]


@pytest.mark.parametrize(
    ("task", "limit", "evaluation_limit"),
    [
        (make_task("number_line"), 10, 10),
        (make_task("number_line", env_kwargs={"max_position": 9}), 18, 18),
        (make_task("points24"), 22, 22),
        (make_task("ezpoints"), 7, 7),
        (make_task("blackjack"), 20, 20),
        # the sixth action would end an episode of training, and of training alone
        pytest.param(make_task("alfworld", max_actions=5, env_kwargs=SHORT_ALFWORLD), 6, 8, marks=needs_alfworld),
        pytest.param(make_task("alfworld", max_actions=9, env_kwargs=SHORT_ALFWORLD), 8, 8, marks=needs_alfworld),
    ],
    ids=["number_line", "longer number_line", "points24", "ezpoints", "blackjack", "alfworld", "shorter alfworld"],
)
def test_skips_count_against_the_games_own_limit(task, limit, evaluation_limit):
    """An episode without a readable answer is as long as the longest with one; in training and in evaluation."""
    source = collector(task, script=lambda image: "no idea", invalid_action="penalty", num_envs=2)
    with contextlib.closing(source):
        episodes = source.collect(limit + 1).episodes
    assert [len(episode) for episode in episodes] == [limit, limit]
    assert all(episode[-1].truncated and episode[-1].bootstrap for episode in episodes)
    report = evaluate_agent(RandomAgent(), task, 2, invalid_action="penalty")
    assert [(e.length, e.total_reward) for e in report.episodes] == [(evaluation_limit, -evaluation_limit)] * 2


@pytest.mark.parametrize("skips", [0, 3])
def test_steps_and_skips_together_reach_the_limit(skips):
    env = SkippableStep(make_task("number_line").make_env())
    env.reset(seed=0, options={"target": 5, "current": 0})
    skip, ended, steps = SkippableStep.skip(env.action_space), False, 0
    while not ended:
        _, _, terminated, ended, _ = env.step(skip if steps < skips else 0)  # 0: away from the target
        assert not terminated
        steps += 1
    assert steps == 10


def test_a_goal_that_is_reached_in_the_last_step_is_no_truncation():
    env = SkippableStep(make_task("number_line").make_env())
    env.reset(seed=0, options={"target": 5, "current": 0})
    skip = SkippableStep.skip(env.action_space)
    for action in [skip] * 5 + [1] * 5:
        _, reward, terminated, truncated, _ = env.step(action)
    assert (reward, terminated, truncated) == (1.0, True, False)


def test_the_longest_games_last_as_long_as_they_say(monkeypatch):
    """By playing on for as long as the rules allow."""
    points = make_task("points24").make_env(evaluation=True)
    points.reset(seed=0)
    assert _steps_until_end(points, itertools.repeat(10)) == points.get_wrapper_attr("step_limit")  # "+" all the time
    monkeypatch.setattr("trl_gtr.environments.cards.blackjack.draw_card", lambda rng: (1, "A", "H"))
    blackjack = make_task("blackjack").make_env()
    blackjack.reset(seed=0)
    assert _steps_until_end(blackjack, itertools.repeat(1)) == blackjack.get_wrapper_attr("step_limit")


def _steps_until_end(env, actions):
    for steps, action in enumerate(actions, 1):
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            return steps


def test_the_deals_follow_the_global_index_of_an_environment():
    whole = collector(num_envs=4, seed=5).collect(3)
    halves = [collector(num_envs=2, first_index=first, seed=5).collect(3) for first in (0, 2)]
    split = {(t.env_index, t.step): t.info for half in halves for t in half.transitions}
    assert {(t.env_index, t.step): t.info for t in whole.transitions} == split
    other = collector(num_envs=4, seed=6).collect(3)
    assert [t.info for t in other.transitions] != [t.info for t in whole.transitions]


def test_corrections_overlap_with_later_steps():
    """Every request is out before the first answer comes: the collector waits for none until the end."""
    arrived, go_on = threading.Semaphore(0), threading.Event()

    class Slow(Corrector):
        def correct(self, requests):
            arrived.release()
            assert go_on.wait(timeout=20)
            return [Correction("right") for _ in requests]

    results = []
    source = collector(corrector=Slow())
    thread = threading.Thread(target=lambda: results.append(source.collect(4)))
    thread.start()
    for _ in range(4):
        assert arrived.acquire(timeout=20)
    assert not results
    go_on.set()
    thread.join(timeout=20)
    assert len(results[0].corrections) == 12


def test_a_rollout_out_of_time_is_shorter_and_ends_where_it_stands(monkeypatch):
    source = collector(ColourTask(length=3))
    now = iter(range(1000))  # every look at the clock is a second later
    monkeypatch.setattr("trl_gtr.rollouts.collector.time.monotonic", lambda: float(next(now)))
    rollout = source.collect(100, timeout=4.0)
    assert 1 < len(rollout) / 3 < 6
    assert len(rollout.corrections) == len(rollout)
    assert [np.array_equal(*pair) for pair in zip(rollout.last_images, source.images, strict=True)] == [True] * 3
    assert len(source.collect(2, timeout=0.0)) == 3  # one step, even where there is no time at all


def test_episodes_are_numbered_through_short_rollouts_and_a_restart():
    source, again = collector(ColourTask(length=3)), collector(ColourTask(length=3))
    played = source.collect(4, timeout=0.0).transitions + source.collect(4).transitions
    again.load_state_dict(source.state_dict())
    played += again.collect(2).transitions
    found = [(t.episode, t.episode_step) for t in played if t.env_index == 1]
    assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_a_correction_that_is_late_has_failed():
    release = threading.Event()

    class Stuck(Corrector):
        def correct(self, requests):
            release.wait(60)
            return ExpertCorrector().correct(requests)

    try:
        rollout = collector(corrector=Stuck()).collect(2, correction_timeout=0.05)
    finally:
        release.set()
    assert [c.failure for c in rollout.corrections] == ["late"] * 6


def test_a_stop_ends_the_rollout_without_waiting():
    release, asked = threading.Event(), itertools.count()

    class Stuck(Corrector):
        def correct(self, requests):
            release.wait(60)
            return []

    try:
        rollout = collector(corrector=Stuck()).collect(50, stopped=lambda: next(asked) >= 2)
    finally:
        release.set()
    assert len(rollout) == 2 * 3


def test_a_corrector_error_surfaces_at_the_end_of_the_rollout():
    class Broken(Corrector):
        def correct(self, requests):
            raise RuntimeError("broken on purpose")

    with pytest.raises(RuntimeError, match="broken on purpose"):
        collector(corrector=Broken()).collect(2)


def test_a_restored_collector_continues_where_it_was():
    source = collector(ColourTask(length=5), script=lambda image: "no idea", seed=3)
    source.collect(2)
    state = source.state_dict()
    expected = source.collect(4)
    other = collector(ColourTask(length=5), script=lambda image: "no idea", seed=99)
    other.load_state_dict(state)
    again = other.collect(4)
    assert [(t.info, t.reward) for t in again.transitions] == [(t.info, t.reward) for t in expected.transitions]
    assert [len(e) for e in again.episodes] == [len(e) for e in expected.episodes]


class Odd:
    """Not plain data."""


class OddTask(ColourTask):
    """Its infos hold something that only a pickle can."""

    def make_env(self, *, evaluation=False):
        class OddEnv(ColourEnv):
            def _show(self):
                observation, info = super()._show()
                return observation, {**info, "odd": Odd()}

        return OddEnv(**self.env_kwargs)


def test_an_environment_that_cant_be_saved_says_so():
    with pytest.raises(
        ValueError, match=r"Odd is not plain data.*`pickle_environments=True`, or `save_strategy='no'`"
    ):
        collector(OddTask()).state_dict()

    class Unpicklable(ColourTask):
        def make_env(self, *, evaluation=False):
            env = ColourEnv()
            env.lock = threading.Lock()
            return env

    collector(Unpicklable()).state_dict()  # nobody pickles it
    with pytest.raises(
        ValueError, match=r"pickle '_thread.lock' object\. Fix that, or train with `save_strategy='no'`"
    ):
        collector(Unpicklable(), pickle_environments=True).state_dict()


def test_pickles_are_used_only_on_request():
    source = collector(OddTask(length=5), pickle_environments=True)
    source.collect(2)
    state = source.state_dict()
    expected = source.collect(4)
    with pytest.raises(ValueError, match="only if you trust its author"):
        collector(ColourTask(length=5)).load_state_dict(state)
    again = collector(OddTask(length=5), pickle_environments=True, seed=9)
    again.load_state_dict(state)
    colours = [(t.info["colour"], t.reward) for t in again.collect(4).transitions]
    assert colours == [(t.info["colour"], t.reward) for t in expected.transitions]
    # Plain data can be read in any case.
    plain = collector(ColourTask(length=5))
    plain.collect(3)
    again = collector(ColourTask(length=5), pickle_environments=True)
    again.load_state_dict(plain.state_dict())
    assert [info["colour"] for info in again.infos] == [info["colour"] for info in plain.infos]


def test_a_rewound_collector_continues_from_there():
    source = collector(ColourTask(length=5), script=lambda image: "no idea", seed=3)
    source.collect(2)
    state = source.state_dict()
    expected = source.collect(4)
    source.rewind(state)
    assert source.state_dict() is state  # for a checkpoint; nothing is played for it
    again = source.collect(4)
    assert [(t.info, t.reward) for t in again.transitions] == [(t.info, t.reward) for t in expected.transitions]
    assert source.state_dict() is not state


def test_replays_that_differ_are_refused_unless_allowed():
    source, blank = collector(ColourTask(length=5), seed=3), ColourTask(length=5, blank=True)
    source.collect(2)
    with pytest.raises(ValueError, match=r"different observation.*`allow_changed_config=True`"):
        collector(blank, seed=3).load_state_dict(source.state_dict())
    other = collector(blank, seed=3, exact_resume=False)
    with pytest.warns(UserWarning, match="different observation"):
        other.load_state_dict(source.state_dict())
    assert all(np.abs(image.mean() - 128) < 5 for image in other.images)  # what the environment shows now
    assert [info["colour"] for info in other.infos] == [info["colour"] for info in source.infos]


def test_a_checkpoint_of_another_size_is_refused():
    with pytest.raises(ValueError, match="holds 2 environments"):
        collector(num_envs=3).load_state_dict(collector(num_envs=2).state_dict())


def test_live_lists_in_infos_are_copied():
    """The original card games hand out the list that they go on appending to."""
    live = ["4"]
    infos = {"Formula": np.array([live, None], dtype=object), "_Formula": np.array([True, False])}
    unpacked = unpack_infos(infos, 2)
    live.append("+")
    assert unpacked == [{"Formula": ["4"]}, {}]


def test_nested_infos_and_numbers_become_plain():
    infos = {
        "Target": np.array([3, 0]),
        "_Target": np.array([True, False]),
        "final_info": {"Current": np.array([0.0, 2.5]), "_Current": np.array([False, True])},
        "_final_info": np.array([False, True]),
    }
    unpacked = unpack_infos(infos, 2)
    assert unpacked == [{"Target": 3}, {"final_info": {"Current": 2.5}}]
    assert type(unpacked[0]["Target"]) is int
    pickle.dumps(unpacked)


def test_times_are_counted_by_phase():
    def slow(image):
        time.sleep(0.01)
        return "no idea"

    times = collector(script=slow, num_envs=2).collect(2).times
    assert times["generate"] >= 0.04
    assert set(times) == {"generate", "environment", "wait_for_corrections"}
