"""evaluate_agent: the same deals for everybody, sound intervals, no cuts."""

import gzip

import numpy as np
import pytest
from chat_server import ChatServer, floods, raw, redirects, says, status
from corrector_cases import SECRET
from function_engine import FunctionEngine
from toy import ColourTask

from trl_gtr import make_task
from trl_gtr.correctors.openai.bounded_http import MAX_BODY, MAX_ERROR_BODY
from trl_gtr.evaluation.agents import ExpertAgent, PolicyAgent, RandomAgent, ServedAgent
from trl_gtr.evaluation.evaluate import evaluate_agent
from trl_gtr.evaluation.reports import EvaluationReport, Rate
from trl_gtr.scripts import evaluate as evaluate_command
from trl_gtr.types import Generation


def test_wilson_interval_against_published_values():
    # Newcombe (1998), table I, method 3 (Wilson score): 81/263, 15/148, 0/20, 1/29
    for hits, count, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert Rate(hits, count).interval == pytest.approx((low, high), abs=5e-5)


def test_the_expert_wins_and_chance_is_chance():
    task = ColourTask(length=1)
    assert evaluate_agent(ExpertAgent(task), task, 40).success.value == 1.0
    random = evaluate_agent(RandomAgent(), task, 400, num_envs=50).success
    assert random.interval[0] < 0.25 < random.interval[1]


@pytest.mark.parametrize("name", ["points24", "ezpoints", "number_line"])
def test_the_expert_wins_every_deal_that_can_be_won(name):
    task = make_task(name)
    report = evaluate_agent(ExpertAgent(task), task, 60)
    assert report.success_solvable.value == 1.0
    assert (report.success.value < 1.0) == (name == "points24")  # of its random hands a fifth makes no 24
    assert report.success.hits == report.success_solvable.hits


def test_chance_on_a_number_line_is_what_a_calculation_says():
    def reaches(current, target, steps):
        if current == target:
            return 1.0
        if steps == 0:
            return 0.0
        return (reaches(max(current - 1, 0), target, steps - 1) + reaches(min(current + 1, 5), target, steps - 1)) / 2

    task = make_task("number_line")
    starts = [task.make_env().reset(seed=seed)[1] for seed in range(300)]
    expected = np.mean([reaches(info["Current"], info["Target"], 10) for info in starts])
    low, high = evaluate_agent(RandomAgent(), task, 300, num_envs=50).success.interval
    assert low < expected < high
    assert 0.5 < expected < 0.9


def test_success_by_kind_of_deal():
    task = make_task("points24")
    report = evaluate_agent(ExpertAgent(task), task, 60)
    kinds = report.by_difficulty()
    assert list(kinds) == ["no formula", "only + and -", "with * or /", "with parentheses"]
    assert sum(rate.count for rate in kinds.values()) == 60
    assert {kind: rate.value for kind, rate in kinds.items()} == {**dict.fromkeys(kinds, 1.0), "no formula": 0.0}
    written = report.to_json()["by_difficulty"]["no formula"]
    assert written == {"hits": 0, "count": kinds["no formula"].count, "interval": kinds["no formula"].interval}
    assert evaluate_agent(RandomAgent(), ColourTask(length=1), 2).by_difficulty() == {}


@pytest.mark.parametrize(
    ("name", "deal", "kind"),
    [
        ("points24", {"cards": ["H4", "D9", "CA", "SK"]}, "only + and -"),
        ("points24", {"cards": ["HA", "D2", "C3", "S4"]}, "with * or /"),
        ("points24", {"cards": ["H3", "D3", "C8", "S8"]}, "with parentheses"),
        ("points24", {"cards": ["HA", "DA", "CA", "SA"]}, "no formula"),
        ("ezpoints", {"cards": ["H2", "DK"]}, "only + and -"),
        ("ezpoints", {"cards": ["H2", "D6"]}, "with * or /"),
        ("number_line", {"current": 1, "target": 4}, "distance 3"),
    ],
)
def test_kinds_of_deals(name, deal, kind):
    task = make_task(name)
    _, info = task.make_env().reset(seed=0, options=deal)
    assert task.difficulty(info) == kind


def test_blackjack_deals_are_told_apart_by_their_total():
    task = make_task("blackjack")
    for total, kind in {11: "11 or less", 12: "12 to 16", 16: "12 to 16", 17: "17 or more", 21: "17 or more"}.items():
        assert task.difficulty({"Player Card": [[total - 2, "", ""], [2, "", ""]]}) == kind


def test_where_no_deal_can_be_won_there_is_no_share_of_them():
    task = make_task("points24", hands=[["A", "A", "A", "A"]])
    metrics = evaluate_agent(RandomAgent(), task, 2).metrics()
    assert metrics["success"] == 0.0
    assert "success_solvable" not in metrics


class Recorder:
    """Notes what it is shown and says nothing."""

    def __init__(self):
        self.seen = []

    def respond(self, prompts, images, infos):
        self.seen += [(image.tobytes(), info["colour"]) for image, info in zip(images, infos, strict=True)]
        return [""] * len(prompts)


def test_the_same_seed_deals_the_same_to_every_agent_and_any_batch():
    task = ColourTask(length=1)
    recorders = [Recorder(), Recorder(), Recorder()]
    evaluate_agent(recorders[0], task, 12, seed=4, num_envs=3)
    evaluate_agent(recorders[1], task, 12, seed=4, num_envs=12)
    evaluate_agent(recorders[2], task, 12, seed=5)
    assert sorted(recorders[0].seen) == sorted(recorders[1].seen)
    assert sorted(recorders[0].seen) != sorted(recorders[2].seen)


def test_episodes_can_be_split_by_number():
    task = ColourTask(length=2)
    whole = evaluate_agent(RandomAgent(), task, 10, seed=1)
    parts = [evaluate_agent(RandomAgent(), task, range(start, 10, 2), seed=1).episodes for start in (0, 1)]
    assert sorted(parts[0] + parts[1], key=lambda e: e.index) == list(whole.episodes)


HANDS = [["4", "9", "A", "K"], ["3", "3", "8", "8"], ["2", "2", "6", "10"], ["A", "A", "A", "A"], ["5", "5", "5", "A"]]


class HandRecorder:
    """Notes the hand of every episode, and gives up at once."""

    def __init__(self):
        self.hands = []

    def respond(self, prompts, images, infos):
        self.hands += [" ".join(card[1] for card in info["Cards"]) for info in infos if not info["Formula"]]
        return ['{"cards": [], "formula": "", "thoughts": "", "action": "="}'] * len(prompts)


def test_every_hand_is_played_once_before_any_comes_again():
    task = make_task("points24", hands=HANDS)
    for seed in range(4):
        recorder = HandRecorder()
        evaluate_agent(recorder, task, 10, seed=seed, num_envs=1)
        assert len(set(recorder.hands[:5])) == len(set(recorder.hands[5:])) == 5


def test_all_plays_each_start_once_and_says_which():
    task = make_task("points24", hands=HANDS)
    report = evaluate_agent(HandRecorder(), task, "all")
    played = [episode.start for episode in report.episodes]
    assert sorted(start["hand"] for start in played) == sorted(map(" ".join, HANDS))
    assert [e["start"] for e in report.to_json()["episodes"]] == played
    assert report.different_starts() == {"hands": 5}
    halves = [evaluate_agent(HandRecorder(), task, range(rank, 5, 2)).episodes for rank in (0, 1)]
    assert [e.start for e in sorted(halves[0] + halves[1], key=lambda e: e.index)] == played
    other = evaluate_agent(HandRecorder(), task, "all", seed=1)
    assert [episode.start for episode in other.episodes] != played  # the order, and so what a part of them is


@pytest.mark.parametrize("task", [make_task("points24"), make_task("blackjack"), ColourTask()])
def test_all_is_refused_for_random_deals(task):
    with pytest.raises(ValueError, match="say how many episodes"):
        evaluate_agent(RandomAgent(), task, "all")


def test_all_hands_that_make_24():
    task = make_task("points24", hands="solvable")
    starts = task.starts()
    assert len(starts) == 566
    env = task.make_env(evaluation=True)
    infos = [env.reset(seed=0, options=options)[1] for options in starts]
    assert len({tuple(sorted(info["Numbers"])) for info in infos}) == 566
    assert all(task.solvable(info) for info in infos)


def test_a_model_sees_prompts_and_images_only():
    calls = []

    def generate(prompts, images):
        calls.append((list(prompts), len(images)))
        return [Generation(np.zeros(1, np.int64), '{"thoughts": "it is red", "action": "red"}') for _ in prompts]

    report = evaluate_agent(PolicyAgent(FunctionEngine(generate)), ColourTask(length=1), 8, num_envs=8)
    assert calls == [(["Which colour?"] * 8, 8)]
    assert report.metrics()["valid"] == 1.0
    assert report.metrics()["true_thoughts"] == report.success.value


def test_a_served_model_gets_the_picture_and_the_prompt():
    """Through the real client and a server on loopback."""
    with ChatServer(says('{"thoughts": "it is red", "action": "red"}')) as server:
        agent = ServedAgent("some-model", base_url=server.url)
        report = evaluate_agent(agent, ColourTask(length=1), 6)
    assert report.metrics()["valid"] == 1.0
    assert len(server.seen) == 6
    picture, words = server.seen[0].body["messages"][0]["content"]
    assert words == {"type": "text", "text": "Which colour?"}
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")


def test_a_server_error_is_reported_in_one_line_without_the_key(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    options = ["--task", "number_line", "--episodes", "1", "--agents", "openai:some-model", "--base_url"]
    with ChatServer(status(403, f"\x1b[2J no\nentry for {SECRET}")) as server, pytest.raises(SystemExit):
        evaluate_command.main([*options, server.url])
    told = capsys.readouterr().err
    assert told.startswith("error: some-model gave no answer: ")
    assert "403" in told
    assert "entry for [key]" in told
    assert SECRET not in told
    assert "\x1b" not in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (redirects, "make --base_url the final one"),
        (floods, "no chat completion"),
        (raw(b"<html>"), "no chat completion"),
        (lambda handler, _: handler.send(200, b"?", {"Content-Encoding": "br"}), "only gzip was requested"),
        (status(400, "x" * 1_000_000), "Error code: 400"),
    ],
)
def test_a_served_model_that_does_not_answer_ends_the_evaluation(step, words):
    with ChatServer(step) as server:
        agent = ServedAgent("some-model", base_url=server.url)
        agent.client.max_retries = 0
        with pytest.raises(ValueError, match=words) as error:
            evaluate_agent(agent, ColourTask(length=1), 1)
    assert len(str(error.value)) < 400
    assert len(server.seen) == 1  # of a redirect, too


@pytest.mark.parametrize(("number", "limit"), [(200, MAX_BODY + 1), (500, MAX_ERROR_BODY)])
@pytest.mark.parametrize("packing", ["identity", "gzip"])
def test_no_more_of_a_body_than_its_limit_is_read(number, limit, packing):
    body = b"x" * 5_000_000
    sent = gzip.compress(body) if packing == "gzip" else body
    with ChatServer(lambda handler, _: handler.send(number, sent, {"Content-Encoding": packing})) as server:
        client = ServedAgent("some-model", base_url=server.url).client._client
        assert len(client.post(server.url, json={}).content) == limit


def test_a_penalty_costs_and_ends_at_the_step_limit():
    report = evaluate_agent(RandomAgent(), ColourTask(length=1), 2, invalid_action="penalty")
    assert all(episode.total_reward == -300 and episode.length == 300 for episode in report.episodes)


def test_evaluation_asks_for_an_environment_without_cuts():
    asked = []

    class Watching(ColourTask):
        def make_env(self, *, evaluation=False):
            asked.append(evaluation)
            return super().make_env()

    evaluate_agent(RandomAgent(), Watching(length=1), 3)
    assert asked == [True, True, True]


class Fined(ColourTask):
    """Takes half a point for every response that names no colour."""

    illegal_reward = -0.5


def test_a_random_action_in_place_of_an_illegal_one_is_paid_for():
    free, fined = (evaluate_agent(RandomAgent(), task, 20) for task in (ColourTask(), Fined()))
    assert [e.total_reward - 2 * 0.5 for e in free.episodes] == [e.total_reward for e in fined.episodes]
    assert [e.success for e in free.episodes] == [e.success for e in fined.episodes]
    task = Fined()
    assert evaluate_agent(ExpertAgent(task), task, 5).mean_return == 2.0
    skipped = evaluate_agent(RandomAgent(), task, 1, invalid_action="penalty")
    assert skipped.episodes[0].total_reward == -skipped.episodes[0].length  # a skipped step has its own price


def test_a_process_may_have_no_episode_to_play():
    assert evaluate_agent(RandomAgent(), ColourTask(), range(3, 3)).episodes == ()


def test_no_episodes_is_an_error():
    with pytest.raises(ValueError, match="number of episodes must be at least 1"):
        evaluate_agent(RandomAgent(), ColourTask(), 0)
    with pytest.raises(ValueError, match="one environment"):
        evaluate_agent(RandomAgent(), ColourTask(), 3, num_envs=0)


def test_an_evaluation_that_is_stopped_counts_what_was_played():
    left = iter([False] * 5)  # five vector steps of two environments, episodes of two steps
    report = evaluate_agent(RandomAgent(), ColourTask(length=2), 20, num_envs=2, stopped=lambda: next(left, True))
    assert [episode.index for episode in report.episodes] == [0, 1, 2, 3]
    assert not report.complete
    assert report.planned == 20
    assert report.metrics("eval")["eval_episodes"] == 4
    assert "4 of 20 episodes" in str(report)
    assert evaluate_agent(RandomAgent(), ColourTask(length=2), 3).complete


def test_nothing_can_be_measured_without_an_episode():
    report = evaluate_agent(RandomAgent(), ColourTask(length=2), 3, stopped=lambda: True)
    assert not report.complete
    assert str(report) == "colours: none of 3 episodes finished"
    with pytest.raises(ValueError, match="nothing to measure"):
        report.metrics()


def test_a_report_says_the_same_as_json():
    report = evaluate_agent(RandomAgent(), ColourTask(length=1), 5)
    assert isinstance(report, EvaluationReport)
    written = report.to_json()
    assert written["metrics"]["episodes"] == len(written["episodes"]) == 5
