"""LocalCorrector: a real tiny model for the path through `generate`, scripted words for what follows from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from corrector_cases import CANARY, no_answer, number_line_request, points_answer, points_request, yes_answer

from trl_gtr.correctors import LocalCorrector, failure_kind
from trl_gtr.correctors.local import flatten
from trl_gtr.types import Generation

WRONG = number_line_request(1, 4, said=(2, 4))
RIGHT = number_line_request(1, 4)


class Script:
    """Stands for `VLMPolicy.generate`: what to say to each prompt, and what was asked."""

    def __init__(self, *rounds: list[Any], cut_off: bool = False) -> None:
        self.rounds, self.cut_off = list(rounds), cut_off
        self.asked: list[list[str]] = []

    def generate(
        self, model: Any, prompts: Sequence[str], images: Sequence[np.ndarray], *, greedy: bool
    ) -> list[Generation]:
        assert greedy
        assert len(prompts) == len(images)
        self.asked.append(list(prompts))
        said = [word if isinstance(word, str) else json.dumps(word) for word in self.rounds.pop(0)]
        return [
            Generation(ids=np.zeros(10, np.int64), text=text, hit_length_limit=self.cut_off)
            for text in said[: len(prompts)]
        ]


@pytest.fixture
def local(tiny_vlm: Any) -> LocalCorrector:
    return LocalCorrector(*tiny_vlm(), max_completion_length=8, batch_size=4)


def scripted(corrector: LocalCorrector, *rounds: list[Any], **options: Any) -> Script:
    script = Script(*rounds, **options)
    corrector._policy = script  # type: ignore[assignment]
    return script


def test_random_model_fails_honestly_and_repeatably(local: LocalCorrector) -> None:
    requests = [RIGHT, WRONG, number_line_request(3, 0, action="-")]
    answers = local.correct(requests)
    assert [failure_kind(answer) for answer in answers] == ["unusable"] * 3
    assert [answer.usage.calls for answer in answers] == [2] * 3  # the answer and its repair
    assert 3 * 2 <= local.metrics()["corrector/tokens"] <= 3 * 2 * 8
    assert local.metrics()["corrector/failed_unusable"] == 3
    assert [answer.reason for answer in local.correct(requests)] == [answer.reason for answer in answers]


def test_verdicts_in_order_and_in_batches(local: LocalCorrector) -> None:
    script = scripted(local, [yes_answer(), no_answer(), yes_answer(), yes_answer()], [no_answer()])
    answers = local.correct([RIGHT, WRONG, RIGHT, RIGHT, WRONG])
    assert [answer.verdict for answer in answers] == ["right", "corrected", "right", "right", "corrected"]
    assert [len(prompts) for prompts in script.asked] == [4, 1]
    assert answers[1].thought == no_answer()["correction"]
    assert answers[1].source == local.identity
    assert CANARY not in "".join(script.asked[0])


def test_only_what_is_unusable_is_asked_again(local: LocalCorrector) -> None:
    script = scripted(local, [yes_answer(), "hm", "hm"], [no_answer(), "hm"])
    answers = local.correct([RIGHT, WRONG, WRONG])
    assert [answer.verdict for answer in answers] == ["right", "corrected", "failed"]
    assert [len(prompts) for prompts in script.asked] == [3, 2]
    assert "You wrote:\nhm\n\nThat answer can't be used: there is no JSON object in it." in script.asked[1][0]
    assert [answer.usage.calls for answer in answers] == [1, 2, 2]


def test_tools_in_words(local: LocalCorrector) -> None:
    hand = {"card1": "4", "card2": "6", "card3": "A", "card4": "A"}
    call = {"tool": "find_all_correct_formulas", "arguments": hand}
    script = scripted(local, [call], [points_answer()])
    answer = local.correct([points_request(read=("4", "6", "A", "7"))])[0]
    assert (answer.verdict, answer.target) == ("corrected", "4*6*1*1")
    assert "find_all_correct_formulas: " in script.asked[0][0]
    assert "The tool found: " in script.asked[1][0]


def test_truncated_answer_is_unusable(local: LocalCorrector) -> None:
    scripted(local, [no_answer()], [no_answer()], cut_off=True)
    assert "length limit" in str(local.correct([WRONG])[0].reason)


def test_close_ends_after_the_batch(local: LocalCorrector) -> None:
    script = scripted(local, ["hm", "hm"], [yes_answer()])
    first = script.generate
    script.generate = lambda *a, **k: (local.close(), first(*a, **k))[1]  # type: ignore[method-assign]
    answers = local.correct([WRONG, RIGHT])
    assert [failure_kind(answer) for answer in answers] == ["cancelled"] * 2
    script.generate = first  # type: ignore[method-assign]
    assert failure_kind(local.correct([RIGHT])[0]) == "cancelled"
    local.reopen()
    assert local.correct([RIGHT])[0].verdict == "right"


def test_counts_survive_a_resume(local: LocalCorrector) -> None:
    scripted(local, [yes_answer()], [yes_answer()])
    local.correct([RIGHT])
    state = json.loads(json.dumps(local.state_dict()))
    local.correct([RIGHT])
    local.load_state_dict(state)
    assert local.metrics()["corrector/calls"] == 1


def test_from_a_folder_and_without_a_processor(tiny_vlm: Any, tmp_path: Any) -> None:
    model, processor = tiny_vlm()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    corrector = LocalCorrector(str(tmp_path), max_completion_length=4, device="cpu")
    assert str(tmp_path) in corrector.identity
    assert corrector.correct([RIGHT])[0].verdict == "failed"
    with pytest.raises(ValueError, match="needs its processor"):
        LocalCorrector(model)


def test_flatten() -> None:
    messages = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "question"}, {"type": "image"}]},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "again"},
    ]
    assert flatten(messages) == "rules\n\nquestion\n\nYou wrote:\nanswer\n\nagain"
