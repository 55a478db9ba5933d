"""LocalCorrector: a real tiny model for the path through `generate`, scripted words for what follows from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from corrector_cases import CANARY, no_answer, number_line_request, points_answer, points_request, yes_answer

from trl_gtr.correctors import LocalCorrector
from trl_gtr.correctors.local import _own_dice, flatten
from trl_gtr.engines.base import Engine
from trl_gtr.types import Cancellation, Generation

WRONG = number_line_request(1, 4, said=(2, 4))
RIGHT = number_line_request(1, 4)


class Script(Engine):
    """Stands for the engine: what to say to each prompt, and what was asked."""

    def __init__(self, *rounds: list[Any], cut_off: bool = False) -> None:
        self.rounds, self.cut_off = list(rounds), cut_off
        self.asked: list[list[str]] = []

    def generate(self, prompts: Sequence[str], images: Sequence[np.ndarray], greedy: bool = False) -> list[Generation]:
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
    corrector._engine = script
    return script


def test_random_model_fails_honestly_and_repeatably(local: LocalCorrector) -> None:
    requests = [RIGHT, WRONG, number_line_request(3, 0, action="-")]
    answers = local.correct(requests)
    assert [answer.failure for answer in answers] == ["unusable"] * 3
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
    assert [answer.failure for answer in answers] == ["cancelled"] * 2
    script.generate = first  # type: ignore[method-assign]
    assert local.correct([RIGHT])[0].failure == "cancelled"
    local.reopen()
    assert local.correct([RIGHT])[0].verdict == "right"


def test_what_never_began_took_no_time(local: LocalCorrector) -> None:
    """Or the batches given up in the queue would make the corrector look faster than it is."""
    scripted(local, [yes_answer()])
    given_up = replace(RIGHT, cancellation=Cancellation())
    given_up.cancellation.cancel()
    assert local.correct([given_up])[0].latency == 0.0
    local.close()
    assert local.correct([RIGHT])[0].latency == 0.0
    local.reopen()
    assert local.correct([RIGHT])[0].latency > 0.0


def test_what_is_given_up_for_being_late_is_not_generated(local: LocalCorrector) -> None:
    """After the first batch nobody waits any more: its answers are kept, those to be repaired and the rest aren't."""
    cancellation = Cancellation()
    requests = [replace(request, cancellation=cancellation) for request in (RIGHT, WRONG, RIGHT, RIGHT, RIGHT)]
    script = scripted(local, [yes_answer(), "hm", yes_answer(), yes_answer()])
    first = script.generate
    script.generate = lambda *a, **k: (cancellation.cancel(), first(*a, **k))[1]  # type: ignore[method-assign]
    answers = local.correct(requests)
    assert [answer.failure or answer.verdict for answer in answers] == [
        "right",
        "late",
        "right",
        "right",
        "late",
    ]
    assert len(script.asked) == 1


def test_counts_survive_a_resume(local: LocalCorrector) -> None:
    scripted(local, [yes_answer()], [yes_answer()])
    local.correct([RIGHT])
    state = json.loads(json.dumps(local.state_dict()))
    local.correct([RIGHT])
    local.load_state_dict(state)
    assert local.metrics()["corrector/calls"] == 1


def test_state_of_another_corrector_is_no_obstacle(local: LocalCorrector, caplog: pytest.LogCaptureFixture) -> None:
    local.load_state_dict({})
    assert "of a run with another corrector" in caplog.text


def test_model_that_fails_costs_labels_and_not_the_run(
    local: LocalCorrector, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    script = scripted(local, [yes_answer()])
    works, script.generate = script.generate, out_of_memory  # type: ignore[method-assign]
    answers = local.correct([WRONG] * 6)
    assert [answer.explanation for answer in answers] == ["unusable: OutOfMemoryError in generate"] * 6
    assert caplog.text.count("lower batch_size") == 1
    script.generate = works  # type: ignore[method-assign]
    assert local.correct([RIGHT])[0].verdict == "right"


def test_sampling_has_random_numbers_of_its_own(tiny_vlm: Any) -> None:
    warm = LocalCorrector(*tiny_vlm(), temperature=1.0, max_completion_length=8)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn = [warm._generate(["prompt"], [RIGHT.image])[0].ids.tolist() for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)  # the policy's are untouched
    assert drawn[0] == drawn[1]
    others = {tuple(warm._generate([f"prompt {i}"], [RIGHT.image])[0].ids) for i in range(4)}
    assert len(others) == 4


def test_noise_makes_a_sample_of_the_tempered_distribution() -> None:
    """Logits 0, 1 and 2 at temperature 2: shares of e^0, e^0.5 and e^1, over their sum."""

    class Model(torch.nn.Module):
        def forward(self) -> Any:
            return SimpleNamespace(logits=torch.tensor([0.0, 1.0, 2.0]).expand(20_000, 1, 3))

    model = Model()
    with _own_dice(model, seed=1, temperature=2.0):
        tokens = model().logits[:, -1].argmax(-1)
    shares = torch.bincount(tokens, minlength=3) / 20_000
    assert shares.tolist() == pytest.approx([0.1863, 0.3072, 0.5065], abs=0.015)
    assert model().logits[0, -1].tolist() == [0.0, 1.0, 2.0]


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
