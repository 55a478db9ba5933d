"""The four games: the original's recorded episodes step by step, gymnasium's own checks, and refusals."""

import copy
import json
import pickle
import random
import subprocess
import sys
import time
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from paths import SHARED, TESTS
from PIL import Image

from trl_gtr.environments import BlackjackEnv, EZPointsEnv, NumberLineEnv, Points24Env, TextObservation
from trl_gtr.environments.cards.arithmetic import solve

CLASSES = {
    "gym_cards/Points24-v0": Points24Env,
    "gym_cards/EZPoints-v0": EZPointsEnv,
    "gym_cards/NumberLine-v0": NumberLineEnv,
    "gym_cards/Blackjack-v0": BlackjackEnv,
}
SAMPLE = TESTS / "data" / "gym_cards_episodes.json"
ALL_RECORDINGS = SHARED / "fixtures" / "gym_cards_trajectories.json"

each_game = pytest.mark.parametrize("env_id", CLASSES)


def play(env, text):
    """Play actions given as text, divided by blanks; the last step's result."""
    actions = env.unwrapped.actions
    for token in text.split():
        result = env.step(actions.index(token))
    return result


# --- parity ----------------------------------------------------------------------------------------------------------


def lists(hand):
    return [list(card) for card in hand]


def state_of(info):
    if "Formula" in info:
        return ["".join(info["Formula"])]
    if "Target" in info:
        return [info["Current"]]
    return [lists(info["Player Card"]), lists(info["Dealer Card"])]


def replay(env, episode):
    if "seed" in episode:
        _, info = env.reset(seed=episode["seed"])
        assert lists(info["Dealer Card"]) == episode["dealer"]
        assert lists(info["Player Card"]) == episode["player"]
    elif "cards" in episode:
        _, info = env.reset(options={"cards": episode["cards"]})
        assert info == {"Cards": episode["cards"], "Numbers": episode["numbers"], "Formula": []}
    else:
        _, info = env.reset(options={key: episode[key] for key in ("target", "current")})
        assert info == {"Target": episode["target"], "Current": episode["current"]}
    for action, *expected in episode["steps"]:
        index = action if isinstance(action, int) else env.unwrapped.actions.index(action)
        _, reward, terminated, truncated, info = env.step(index)
        assert [reward, terminated, truncated, *state_of(info)] == expected


@each_game
@pytest.mark.parametrize("recordings", [SAMPLE, ALL_RECORDINGS], ids=["sample", "all"])
def test_recorded_episodes_of_the_original(env_id, recordings):
    if not recordings.exists():
        pytest.skip("the folder with all recordings is not beside this repository")
    episodes = json.loads(recordings.read_text())[env_id]
    assert len(episodes) == (8 if recordings == SAMPLE else 150)
    env = gym.make(env_id)
    for episode in episodes:
        replay(env, episode)


# --- gymnasium -------------------------------------------------------------------------------------------------------


@each_game
@pytest.mark.filterwarnings("error::UserWarning")
def test_gymnasium_finds_nothing_to_complain_about(env_id, capsys):
    check_env(gym.make(env_id).unwrapped)
    assert "▀" in capsys.readouterr().out  # it has tried the human mode too


@pytest.mark.filterwarnings("error::UserWarning")
def test_gymnasium_accepts_the_symbolic_blackjack():
    check_env(BlackjackEnv(is_pixel=False), skip_render_check=True)
    env = BlackjackEnv(is_pixel=False)
    deal = {"dealer": [[9, "9", "H"], [7, "7", "S"]], "player": [[1, "A", "C"], [6, "6", "D"]]}
    assert env.reset(options=deal)[0] == (17, 9, 1)


@each_game
def test_registration(env_id):
    env = gym.make(env_id)
    assert type(env.unwrapped) is CLASSES[env_id]
    assert env.spec.max_episode_steps == 300
    assert env.observation_space == gym.spaces.Box(0, 255, (300, 300, 3), np.uint8)
    assert (
        env.action_space.n
        == {"Points24": 17, "EZPoints": 13, "NumberLine": 2, "Blackjack": 2}[env_id.split("/")[1].split("-")[0]]
    )


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_environments_need_no_torch():
    run_python("import trl_gtr.environments, sys; assert not {'torch', 'transformers', 'trl'} & set(sys.modules)")


def test_a_registration_that_is_there_already_wins():
    run_python(
        "import gymnasium as gym\n"
        "gym.register('gym_cards/Points24-v0', entry_point='other:Game')\n"
        "import trl_gtr.environments\n"
        "assert gym.spec('gym_cards/Points24-v0').entry_point == 'other:Game'\n"
        "assert 'trl_gtr' in gym.spec('gym_cards/EZPoints-v0').entry_point"
    )


@each_game
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_vector_environments(env_id, vector, mode):
    envs = vector([lambda: gym.make(env_id)] * 3, autoreset_mode=mode)
    single = gym.make(env_id)
    try:
        observations, info = envs.reset(seed=[4, 5, 6])
        for index, seed in enumerate([4, 5, 6]):
            expected, expected_info = single.reset(seed=seed)
            np.testing.assert_array_equal(observations[index], expected)
            assert {key: info[key][index] for key in expected_info} == expected_info
        envs.action_space.seed(0)
        ended = False
        for _ in range(45):  # more than any of the games lasts
            observations, _, terminated, truncated, info = envs.step(envs.action_space.sample())
            assert observations.shape == (3, 300, 300, 3)
            over = terminated | truncated
            ended |= bool(over.any())
            if mode == AutoresetMode.SAME_STEP and over.any():
                assert set(expected_info) <= set(info["final_info"])
        assert ended
    finally:
        envs.close()


@each_game
def test_a_seed_decides_everything(env_id):
    def history(seed):
        env = gym.make(env_id)
        env.action_space.seed(1)
        seen = [env.reset(seed=seed)]
        for _ in range(60):
            result = env.step(env.action_space.sample())
            seen.append(result)
            if result[2] or result[3]:
                seen.append(env.reset())
        return [(observation.tobytes(), *rest) for observation, *rest in seen]

    assert history(3) == history(3)
    assert history(3) != history(4)


@each_game
def test_pickled_in_the_middle_of_an_episode(env_id):
    for seed in range(5):
        env = gym.make(env_id)
        env.reset(seed=seed)
        env.step(1)
        if not env.unwrapped._running:
            continue
        twin = pickle.loads(pickle.dumps(env))
        assert len(pickle.dumps(env.unwrapped)) < 5_000  # the state, no pictures
        for action in (1, 0, 1, 0):
            if env.unwrapped._running:
                ours, theirs = env.step(action), twin.step(action)
                np.testing.assert_array_equal(ours[0], theirs[0])
                assert ours[1:] == theirs[1:]
        assert state_of(env.reset()[1]) == state_of(twin.reset()[1])


@each_game
def test_nothing_that_is_handed_out_is_live(env_id):
    env = CLASSES[env_id](render_mode="rgb_array")
    observation, info = env.reset(seed=1)
    before, before_info = observation.copy(), copy.deepcopy(info)
    observation[:] = 0
    for value in info.values():
        if isinstance(value, list):
            value.clear()
    env.render()[:] = 0
    np.testing.assert_array_equal(env.render(), before)
    assert env._info() == before_info
    _, info = env.reset(seed=1)
    assert info == before_info
    old = copy.deepcopy(info)
    env.step(1)
    assert info == old


@each_game
def test_infos_are_plain_python(env_id):
    def plain(value):
        if isinstance(value, (list, tuple)):
            return all(plain(item) for item in value)
        return type(value) in (int, str)

    env = CLASSES[env_id]()
    _, info = env.reset(seed=2)
    _, reward, terminated, truncated, later = env.step(np.int64(1))
    assert all(plain(value) for value in [*info.values(), *later.values()])
    assert [type(reward), type(terminated), type(truncated)] == [float, bool, bool]
    assert json.loads(json.dumps(info))


@each_game
def test_at_least_2000_steps_a_second(env_id):
    env = gym.make(env_id)
    rng = random.Random(0)
    env.reset(seed=0)

    def steps(count):
        start = time.process_time()
        for _ in range(count):
            *_, terminated, truncated, _ = env.step(rng.randrange(env.action_space.n))
            if terminated or truncated:
                env.reset()
        return count / (time.process_time() - start)

    steps(500)  # draws the cards
    assert steps(1500) > 2000


# --- refusals --------------------------------------------------------------------------------------------------------


@each_game
@pytest.mark.parametrize("action", [-1, 99, 1.0, "1", None, True, np.array([1]), np.float32(1)])
def test_no_such_action(env_id, action):
    env = CLASSES[env_id]()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="An action is an integer, one of: 0 "):
        env.step(action)


@each_game
def test_step_needs_a_running_episode(env_id):
    env = CLASSES[env_id]()
    with pytest.raises(ValueError, match=r"call reset\(\)"):
        env.step(0)
    env.reset(seed=0)
    while not any(env.step(0)[2:4]):
        pass
    with pytest.raises(ValueError, match=r"call reset\(\)"):
        env.step(0)
    with pytest.raises(gym.error.ResetNeeded):
        gym.make(env_id).step(0)


@each_game
def test_unknown_render_mode_and_options(env_id):
    with pytest.raises(ValueError, match=r"choose one of \['human', 'rgb_array'\]"):
        CLASSES[env_id](render_mode="hologram")
    env = CLASSES[env_id](render_mode="rgb_array")
    with pytest.raises(ValueError, match="reset"):
        env.render()
    for options in ({"deck": 1}, ["cards"]):
        with pytest.raises(ValueError, match="only the keys"):
            env.reset(options=options)
    env.reset(seed=0, options={})


@pytest.mark.parametrize(
    "cards",
    [["H4", "SK", "D7"], ["H4", "SK", "D7", "C1"], ["H4", "SK", "D7", 4], "H4SKD7CA", None, ["4H", "SK", "D7", "CA"]],
)
def test_impossible_points24_cards(cards):
    with pytest.raises(ValueError, match=r"card names|A card is its suit"):
        Points24Env().reset(options={"cards": cards})


def test_impossible_ezpoints_cards():
    with pytest.raises(ValueError, match="make 12"):
        EZPointsEnv().reset(options={"cards": ["H8", "S8"]})
    with pytest.raises(ValueError, match="2 card names"):
        EZPointsEnv().reset(options={"cards": ["H8"]})


@pytest.mark.parametrize("max_position", [1, 0, -3, 2.5, "5", True])
def test_impossible_number_lines(max_position):
    with pytest.raises(ValueError, match="at least 2"):
        NumberLineEnv(max_position)


@pytest.mark.parametrize(
    "options",
    [
        {"target": 3},
        {"current": 3},
        {"target": 3, "current": 3},
        {"target": 6, "current": 0},
        {"target": -1, "current": 0},
        {"target": 1.0, "current": 0},
        {"target": True, "current": 0},
        {"target": None, "current": 0},
    ],
)
def test_impossible_positions(options):
    with pytest.raises(ValueError, match=r"integers from 0 to 5|must differ"):
        NumberLineEnv().reset(options=options)


@pytest.mark.parametrize(
    "hand",
    [
        [],
        None,
        [[10, "K", "H"]],
        [[10, "K", "H"]] * 3,
        [[10, "10", "H"], [2, "2", "H"]],
        [[11, "A", "H"], [2, "2", "H"]],
        [[1, "1", "H"], [2, "2", "H"]],
        [[2, "3", "H"], [2, "2", "H"]],
        [[2, "2", "X"], [2, "2", "H"]],
        [[2, "2"], [2, "2", "H"]],
        [["2", "2", "H"], [2, "2", "H"]],
        [[True, "A", "H"], [2, "2", "H"]],
        [[10, "", "H"], [2, "2", "H"]],
        [[2, "2", ""], [2, "2", "H"]],
        ["HK", "H2"],
    ],
)
@pytest.mark.parametrize("who", ["dealer", "player"])
def test_impossible_blackjack_hands(who, hand):
    with pytest.raises(ValueError, match=r"must be two cards|no such card"):
        BlackjackEnv().reset(options={who: hand})


def test_bad_target_points_and_no_solvable_deal(monkeypatch):
    monkeypatch.setattr("trl_gtr.environments.cards.points24.MAX_DEALS", 30)
    with pytest.raises(ValueError, match="target_points"):
        Points24Env(target_points="24")
    with pytest.raises(ValueError, match="solvable_only=False"):
        Points24Env(target_points=10**8, solvable_only=True).reset(seed=0)


# --- Points24 and EZPoints -------------------------------------------------------------------------------------------


def points24(cards, **kwargs):
    env = Points24Env(**kwargs)
    env.reset(options={"cards": cards})
    return env


@pytest.mark.parametrize(
    ("cards", "actions", "reward"),
    [
        (["H8", "S3", "D8", "C3"], "8 / ( 3 - 8 / 3 ) =", 10),  # only exact arithmetic sees it
        (["HA", "S2", "DA", "C2"], "1 2 + 1 2 =", -1),  # twelve and twelve, no
        (["HA", "S2", "DA", "C2"], "( 1 + 2 + 1 ) * 2 =", -1),  # 8
        (["H2", "S3", "D3", "CA"], "3 * 2 * * 3 * 1 =", -1),  # no powers
        (["H7", "S2", "D8", "CA"], "7 / / 2 * 8 * 1 =", -1),  # no floor division
        (["H5", "S5", "D5", "CA"], "( - 1 + 5 * 5 ) * 5 / 5 =", -1),  # no sign before a number
        (["HT", "SJ", "DQ", "CK"], "10 + 10 + 10 + 10 =", -1),
        (["H6", "S4", "DA", "CA"], "6 * 4 =", -1),  # two numbers are left
        (["H6", "S4", "DA", "CA"], "6 * 4 * 1 * 1 =", 10),
        (["H6", "S4", "DA", "CA"], "6 * 9 4 * 1 3 * 1 =", 10),  # spaces mean nothing
        (["H6", "S4", "DA", "CA"], "6 / ( 1 - 1 ) * 4 =", -1),
        (["H6", "S4", "DA", "CA"], "=", -1),
        (["HK", "S4", "DQ", "C4"], "( 10 * 10 - 4 ) / 4 =", 10),
    ],
)
def test_points24_outcomes(cards, actions, reward):
    _, got, terminated, truncated, info = play(points24(cards), actions)
    assert (got, terminated, truncated) == (reward, True, False)
    assert "=" not in info["Formula"]


def test_a_number_that_is_spent_costs_one_and_leaves_a_space():
    env = points24(["H6", "S6", "DA", "CA"])
    assert play(env, "6 6")[1] == 0
    _, reward, terminated, truncated, info = play(env, "6")
    assert (reward, terminated, truncated) == (-1, False, False)
    assert info["Formula"] == ["6", "6", " "]
    assert play(env, "5")[4]["Formula"] == ["6", "6", " ", " "]


def test_equals_counts_at_20_elements_and_not_at_21():
    cards = ["H6", "S4", "DA", "CA"]
    env = points24(cards)
    result = play(env, "( ( ( ( ( ( 6 * 4 ) ) ) ) ) ) * 1 * 1")  # 19 elements
    assert len(result[4]["Formula"]) == 19
    assert play(env, "9 =")[1:4] == (10, True, False)
    env = points24(cards)
    play(env, "( ( ( ( ( ( 6 * 4 ) ) ) ) ) ) * 1 * 1 9 9")
    _, reward, terminated, truncated, info = play(env, "=")
    assert (reward, terminated, truncated) == (-1, False, True)
    assert len(info["Formula"]) == 21


def test_face_cards_can_count_eleven_to_thirteen():
    env = points24(["HJ", "SK", "DA", "CA"], treat_face_cards_as_10=False)
    assert env.action_space.n == 20
    assert play(env, "11 + 13 * 1 * 1 =")[1] == 10
    assert env.reset(options={"cards": ["HT", "SJ", "DQ", "CK"]})[1]["Numbers"] == [10, 11, 12, 13]


def test_another_target():
    assert play(points24(["H2", "S3", "DA", "CA"], target_points=7), "2 * 3 + 1 * 1 =")[1] == 10


def test_points24_deals_are_uniform():
    env = Points24Env()
    env.reset(seed=0)
    deals = [env.reset()[1]["Cards"] for _ in range(1500)]
    for place in range(4):
        for position, symbols, share in [(0, "HSDC", 1 / 4), (1, "A23456789TJQK", 1 / 13)]:
            counts = Counter(deal[place][position] for deal in deals)
            assert set(counts) == set(symbols)
            spread = (1500 * share * (1 - share)) ** 0.5
            assert all(abs(count - 1500 * share) < 4 * spread for count in counts.values())


def test_solvable_only():
    env = Points24Env(solvable_only=True)
    env.reset(seed=0)
    assert all(solve(env.reset()[1]["Numbers"]) for _ in range(60))
    with pytest.raises(ValueError, match="solvable_only=False"):
        env.reset(options={"cards": ["HA", "SA", "DA", "CA"]})
    env.reset(options={"cards": ["H6", "S6", "D6", "C6"]})


def test_ezpoints_outcomes():
    env = EZPointsEnv()
    env.reset(options={"cards": ["H2", "C6"]})
    assert play(env, "2 * 6 =")[1:4] == (10, True, False)
    env.reset(options={"cards": ["H2", "C6"]})
    assert play(env, "2 9 * 6 =")[1:4] == (10, True, False)
    env.reset(options={"cards": ["H2", "CK"]})
    assert play(env, "2 + 10 + + +")[2:4] == (False, False)
    assert play(env, "=")[1:4] == (-1, False, True)


def test_ezpoints_deals_as_written():
    """Rank 2 to 13 first; for 2, 3, 4, 6 a product in half of the deals; swapped in half of them."""
    share = Counter()
    for rank in range(2, 14):
        number = min(rank, 10)
        seconds = [12 // number, 12 - number] if number in (2, 3, 4, 6) else [12 - number]
        for second in seconds:
            for pair in ((rank, second), (second, rank)):
                share[pair] += 1 / 12 / len(seconds) / 2
    env = EZPointsEnv()
    env.reset(seed=0)
    count = 6000
    deals = Counter(tuple("_A23456789TJQK".index(name[1]) for name in env.reset()[1]["Cards"]) for _ in range(count))
    assert set(deals) == set(share)
    for pair, probability in share.items():
        assert abs(deals[pair] - count * probability) < 4.5 * (count * probability * (1 - probability)) ** 0.5


# --- NumberLine ------------------------------------------------------------------------------------------------------


def test_number_line_rewards_and_ends():
    env = NumberLineEnv()
    env.reset(options={"target": 3, "current": 0})
    assert play(env, "-")[1:] == (-1, False, False, {"Target": 3, "Current": 0})
    assert play(env, "+")[1:] == (0, False, False, {"Target": 3, "Current": 1})
    assert play(env, "-")[1:] == (-1, False, False, {"Target": 3, "Current": 0})
    assert play(env, "+ + +")[1:] == (1, True, False, {"Target": 3, "Current": 3})
    env.reset(options={"target": 0, "current": 5})
    assert play(env, "+ " * 9)[1:4] == (-1, False, False)
    assert play(env, "+")[1:4] == (-1, False, True)
    env = NumberLineEnv(max_position=2)
    env.reset(options={"target": 2, "current": 0})
    assert play(env, "- - + +")[1:4] == (1, True, False)  # reached with the last step: not truncated


@pytest.mark.parametrize("max_position", [2, 5])
def test_number_line_draws(max_position):
    """Two uniform draws; where they are equal the target moves on by one, modulo max_position."""
    points = range(max_position + 1)
    share = Counter()
    for current in points:
        for target in points:
            goal = (target + 1) % max_position if target == current else target
            share[goal, current] += 1 / len(points) ** 2
    env = NumberLineEnv(max_position)
    env.reset(seed=0)
    count = 4000
    draws = Counter(tuple(env.reset()[1].values()) for _ in range(count))
    assert set(draws) == set(share)
    for pair, probability in share.items():
        assert abs(draws[pair] - count * probability) < 4.5 * (count * probability * (1 - probability)) ** 0.5


# --- Blackjack -------------------------------------------------------------------------------------------------------


def test_blackjack_hands_set_and_played():
    env = BlackjackEnv()
    deal = {"dealer": [[10, "K", "H"], [7, "7", "S"]], "player": [[10, "Q", "D"], [8, "8", "C"]]}
    _, info = env.reset(seed=0, options=deal)
    assert info == {
        "Dealer Card": [(10, "K", "H"), (7, "7", "S")],
        "Player Card": [(10, "Q", "D"), (8, "8", "C")],
    }
    assert env.step(0)[1:4] == (1, True, False)  # 18 against 17, where the dealer stops
    deal["player"] = [[10, "Q", "D"], [7, "7", "C"]]
    env.reset(options=deal)
    assert env.step(0)[1] == 0
    deal["player"] = [[10, "Q", "D"], [6, "6", "C"]]
    env.reset(options=deal)
    assert env.step(0)[1] == -1
    deal["dealer"] = [[1, "A", "D"], [6, "6", "C"]]
    deal["player"] = [[1, "A", "D"], [7, "7", "C"]]
    env.reset(options=deal)
    _, reward, *_, info = env.step(0)
    assert (reward, len(info["Dealer Card"])) == (1, 2)  # soft 17 stands


def test_over_21_loses():
    env = BlackjackEnv()
    env.reset(seed=0, options={"player": [[10, "Q", "D"], [10, "Q", "C"]]})
    while True:
        _, reward, terminated, _, info = env.step(1)
        total = sum(value for value, _, _ in info["Player Card"])
        assert terminated == (total > 21)
        assert reward == (-1 if terminated else 0)
        if terminated:
            break


@pytest.mark.parametrize(
    ("rules", "win", "draw_with_drawn_21"),
    [({}, 1, 0), ({"natural": True}, 1.5, 0), ({"sab": True}, 1, 1), ({"sab": True, "natural": True}, 1, 1)],
)
def test_naturals(rules, win, draw_with_drawn_21):
    env = BlackjackEnv(**rules)
    natural = [[1, "A", "C"], [10, "J", "D"]]
    env.reset(seed=0, options={"player": natural, "dealer": [[10, "K", "H"], [9, "9", "S"]]})
    assert env.step(0)[1] == win
    env.reset(seed=0, options={"player": natural, "dealer": [[10, "K", "H"], [1, "A", "S"]]})
    assert env.step(0)[1] == 0
    for seed in range(100):
        env.reset(seed=seed, options={"player": natural, "dealer": [[5, "5", "H"], [6, "6", "S"]]})
        _, reward, *_, info = env.step(0)
        if sum(value for value, _, _ in info["Dealer Card"]) == 21:
            assert reward == draw_with_drawn_21
            return
    pytest.fail("no seed gave the dealer 21 with three cards")


def test_the_picture_hides_the_dealers_second_card():
    env = BlackjackEnv()
    player = [[10, "Q", "D"], [8, "8", "C"]]
    pictures = [
        env.reset(options={"dealer": [[10, "K", "H"], hidden], "player": player})[0]
        for hidden in ([7, "7", "S"], [1, "A", "D"])
    ]
    np.testing.assert_array_equal(*pictures)
    shown = env.reset(options={"dealer": [[9, "9", "H"], [7, "7", "S"]], "player": player})[0]
    assert (shown != pictures[0]).any()


def test_any_number_of_cards_fits_into_the_picture():
    env = BlackjackEnv()
    env.reset(seed=0)
    previous = None
    for count in range(2, 23):
        env._player = [(1, "A", "CDHS"[index % 4]) for index in range(count)]
        picture = env.picture()
        assert picture.shape == (300, 300, 3)
        assert (picture[150:] != previous).any()
        previous = picture[150:]


# --- pictures and words ----------------------------------------------------------------------------------------------


def shrunk(picture):
    return np.asarray(Image.fromarray(picture).resize((96, 96), Image.Resampling.BICUBIC)).astype(int)


def test_every_number_line_state_looks_different_even_at_96_pixels():
    env = NumberLineEnv()
    pictures = {}
    for target in range(6):
        for current in range(6):
            if target != current:
                pictures[target, current] = shrunk(env.reset(options={"target": target, "current": current})[0])
    for one in pictures:
        for other in pictures:
            if one != other:
                assert (np.abs(pictures[one] - pictures[other]).max(axis=2) > 100).sum() >= 25


def test_the_formula_is_in_the_picture_up_to_the_limit():
    env = points24(["HT", "SA", "D9", "C4"])
    previous = env.picture()
    actions = "( ( 10 + 4 ) - 9 ) * ( 1 / ( ( ( - - + + *"
    for token in actions.split():
        picture = play(env, token)[0]
        assert (picture != previous).any()
        np.testing.assert_array_equal(picture[:180], previous[:180])
        previous = picture
    assert len(env._info()["Formula"]) == 21


def test_human_mode_prints_every_state(capsys):
    env = NumberLineEnv(render_mode="human")
    env.reset(options={"target": 3, "current": 1})
    play(env, "+")
    assert env.render() is None
    assert capsys.readouterr().out.count("\n") == 3 * 48


@pytest.mark.parametrize(
    ("env_id", "options", "actions", "first", "then"),
    [
        (
            "gym_cards/Points24-v0",
            {"cards": ["HT", "SA", "DQ", "C4"]},
            "10 7 +",
            "The cards are the 10 of hearts, the ace of spades, the queen of diamonds and the 4 of clubs. "
            "The formula is still empty.",
            "The cards are the 10 of hearts, the ace of spades, the queen of diamonds and the 4 of clubs. "
            "The formula so far is 10 +.",
        ),
        (
            "gym_cards/EZPoints-v0",
            {"cards": ["H3", "S4"]},
            "3 *",
            "The cards are the 3 of hearts and the 4 of spades. The formula is still empty.",
            "The cards are the 3 of hearts and the 4 of spades. The formula so far is 3*.",
        ),
        (
            "gym_cards/NumberLine-v0",
            {"target": 3, "current": 0},
            "+",
            "The target is 3. The current position is 0.",
            "The target is 3. The current position is 1.",
        ),
        (
            "gym_cards/Blackjack-v0",
            {"dealer": [[10, "K", "H"], [7, "7", "S"]], "player": [[1, "A", "C"], [6, "6", "D"]]},
            "stand",
            "The dealer shows the king of hearts. You hold the ace of clubs and the 6 of diamonds: soft 17 points.",
            "The dealer shows the king of hearts. You hold the ace of clubs and the 6 of diamonds: soft 17 points.",
        ),
    ],
)
def test_games_in_words(env_id, options, actions, first, then):
    env = TextObservation(gym.make(env_id))
    observation, info = env.reset(options=options)
    assert observation == first
    assert info == env.unwrapped._info()
    observation = play(env, actions)[0]
    assert observation == then
    assert env.observation_space.contains(observation)
    assert "7 of spades" not in observation


@each_game
def test_words_in_vector_environments(env_id):
    envs = SyncVectorEnv([lambda: TextObservation(gym.make(env_id))] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    observations, _ = envs.reset(seed=0)
    assert all(text.startswith("The ") for text in observations)
    for _ in range(10):
        observations, *_ = envs.step(envs.action_space.sample())
        assert envs.observation_space.contains(observations)


def test_the_longest_blackjack_hand_fits_into_words():
    env = TextObservation(BlackjackEnv())
    env.reset(seed=0)
    env.unwrapped._player = [(1, "A", "D")] * 21
    env.unwrapped._dealer = [(10, "Q", "D")] * 2
    observation = env.step(1)[0]
    assert env.observation_space.contains(observation)


def test_other_games_have_no_words():
    with pytest.raises(ValueError, match="four card games"):
        TextObservation(gym.make("CartPole-v1")).reset()
