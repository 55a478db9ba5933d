"""Memory: which earlier turns a prompt has, and what is refused."""

import pickle

import numpy as np
import pytest
from toy import PROMPT, ColourTask, quiet_config, remembering

from trl_gtr import make_task
from trl_gtr.guides.base import Guide
from trl_gtr.learning.advantages import GAE
from trl_gtr.runs.manifest import describe_run, saved_history
from trl_gtr.storage.plain_data import decode, encode
from trl_gtr.tasks import task_options, task_options_help
from trl_gtr.tasks.memory import Memory, fullest_prompt
from trl_gtr.types import Prompt, turns_before


def picture(shade):
    return np.full((2, 3, 3), shade, np.uint8)


def after(steps, turns, images):
    """The turns after so many steps, as (response, shade of the picture)."""
    memory = Memory(remembering(ColourTask(), turns, images))
    for step in range(steps):
        memory.add(picture(step), {"colour": "red"}, f"answer {step}")
    prompt = memory.prompt(picture(99), {"colour": "red"})
    assert prompt == PROMPT
    return [(turn.response, None if turn.image is None else int(turn.image[0, 0, 0])) for turn in turns_before(prompt)]


def test_the_last_turns_and_of_these_the_last_with_pictures():
    assert after(0, 3, 2) == []
    assert after(1, 3, 2) == [("answer 0", 0)]
    assert after(3, 3, 2) == [("answer 0", None), ("answer 1", 1), ("answer 2", 2)]
    assert after(7, 3, 2) == [("answer 4", None), ("answer 5", 5), ("answer 6", 6)]
    assert after(7, 2, 2) == [("answer 5", 5), ("answer 6", 6)]
    assert after(7, 2, 0) == [("answer 5", None), ("answer 6", None)]


@pytest.mark.parametrize(("turns", "images"), [(0, 0), (1, 0), (2, 1), (5, 4)])
def test_a_restored_past_is_cut_to_what_the_task_shows(turns, images):
    full = Memory(remembering(ColourTask(), 3, 3))
    for step in range(3):
        full.add(picture(step), {"colour": "red"}, f"answer {step}")
    memory = Memory(remembering(ColourTask(), turns, images))
    memory.restore(full.turns)
    kept = [f"answer {step}" for step in range(3)][max(0, 3 - turns) :]
    assert [turn.response for turn in memory.turns] == kept
    assert sum(turn.image is not None for turn in memory.turns) == min(images, len(kept))


def test_without_turns_the_prompt_is_the_tasks_own():
    memory = Memory(ColourTask())
    memory.add(picture(1), {}, "answer")
    assert memory.turns == ()
    assert type(memory.prompt(picture(2), {})) is str


def test_a_task_may_shorten_what_it_said_earlier():
    class Short(ColourTask):
        def earlier_prompt(self, observation, info):
            return f"It was {info['colour']}."

    memory = Memory(remembering(Short(), 1, 0))
    memory.add(picture(1), {"colour": "blue"}, "answer")
    assert memory.prompt(picture(2), {"colour": "red"}).history[0].prompt == "It was blue."


def test_the_fullest_prompt_has_all_turns():
    prompt = fullest_prompt(remembering(ColourTask(), 3, 1), picture(1), {"colour": "red"})
    assert [turn.image is None for turn in prompt.history] == [True, True, False]


def test_a_prompt_is_its_words_and_survives_a_process():
    memory = Memory(remembering(ColourTask(), 2, 1))
    memory.add(picture(3), {}, "answer \ud800")
    prompt = pickle.loads(pickle.dumps(memory.prompt(picture(4), {})))
    assert isinstance(prompt, Prompt)
    assert prompt == PROMPT
    assert type(str(prompt)) is str
    assert prompt.history[0].response == "answer �"  # a request or tokenizer would choke on half a character
    [restored] = decode(encode(memory.turns))
    assert restored.response == prompt.history[0].response
    assert np.array_equal(restored.image, picture(3))


def test_every_task_takes_the_options():
    task = make_task("blackjack", history_turns=2, history_images=1)
    assert (task.history_turns, task.history_images) == (2, 1)
    assert task.options["history_turns"] == 2  # for the model card
    assert {"history_turns", "history_images"} <= task_options("points24").keys() & task_options_help(
        "points24"
    ).keys()
    assert "history_turns" not in make_task("blackjack", history_turns=0).options


class WithAPast(ColourTask):
    history_turns, history_images = 2, 1


def test_a_class_may_have_a_past_and_an_option_change_it(tmp_path):
    assert make_task("test_memory:WithAPast").history_turns == 2
    forgetful = make_task("test_memory:WithAPast", history_turns=0, history_images=0)
    assert (forgetful.history_turns, forgetful.history_images) == (0, 0)
    with pytest.raises(ValueError, match="at least 1"):
        make_task("test_memory:WithAPast", history_turns=0)
    args = quiet_config(tmp_path)
    describe_run(WithAPast(), Guide(), GAE.from_config(args, 1.0), {}, args).write(tmp_path)
    assert saved_history(tmp_path) == (2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history_turns": -1}, "`history_turns` must be a whole number, at least 0, not -1"),
        ({"history_turns": 1.5}, "whole number"),
        ({"history_turns": "2"}, "whole number"),
        ({"history_images": 2}, "Set history_turns to at least 2"),
        ({"history_turns": 1, "history_images": 2}, "Set history_turns to at least 2"),
    ],
)
def test_bad_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("blackjack", **options)
