"""What a corrector is asked about a step whose prompt has earlier turns, and what is counted for it."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chat_server import ChatServer, says
from corrector_cases import SECRET, number_line_request, yes_answer
from PIL import Image

from trl_gtr.correctors import LocalCorrector, OpenAICorrector
from trl_gtr.correctors.base import request_digest
from trl_gtr.correctors.openai.budget import Budget, CallSizes, Limits
from trl_gtr.correctors.questions import question
from trl_gtr.evaluation.agents import ServedAgent
from trl_gtr.types import CorrectionRequest, Prompt, Turn

PLAIN = number_line_request(1, 4, shade=9)


def with_past(*turns: Turn) -> CorrectionRequest:
    return replace(PLAIN, prompt=Prompt(PLAIN.prompt, turns))


def shade(number: int) -> np.ndarray:
    return np.full((30, 40, 3), number, np.uint8)


PAST = with_past(Turn("told first", "I said 1"), Turn("told second", "I said 2", shade(5)))


def sent_shade(part: Any) -> int:
    data = part["image_url"]["url"].removeprefix("data:image/png;base64,")
    return int(np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))[0, 0, 0])


def test_a_question_without_a_past_is_what_it_always_was() -> None:
    [words, picture] = question(PLAIN, [{"type": "image"}])
    assert words["text"] == (
        f"The agent was shown this picture and told:\n<told>\n{PLAIN.prompt}\n</told>\n"
        f"It responded:\n<response>\n{PLAIN.response.text}\n</response>\nJudge the response."
    )
    assert picture == {"type": "image"}


def test_a_server_is_sent_what_the_agent_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.setenv("no_proxy", "*")
    with ChatServer(says(yes_answer())) as server:
        corrector = OpenAICorrector("test-model", base_url=server.url, api_key=SECRET)
        [answer] = corrector.correct([PAST])
        corrector.close()
    assert answer.verdict == "right"
    first, second, picture, step, own = server.seen[0].body["messages"][1]["content"]
    assert first["text"].startswith("In an earlier step, without its picture here, the agent was told:")
    assert "told first" in first["text"]
    assert "I said 1" in first["text"]
    assert "shown picture 1 and told:" in second["text"]
    assert "I said 2" in second["text"]
    assert "Now it was shown picture 2 and told:" in step["text"]
    assert PLAIN.prompt in step["text"]
    assert step["text"].endswith("Judge the last response.")
    assert (sent_shade(picture), sent_shade(own)) == (5, 9)


def test_a_served_agent_is_sent_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.setenv("no_proxy", "*")
    with ChatServer(says("fine")) as server:
        assert ServedAgent("m", base_url=server.url).respond([PAST.prompt], [PAST.image], [{}]) == ["fine"]
    messages = server.seen[0].body["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert [sent_shade(messages[i]["content"][0]) for i in (2, 4)] == [5, 9]
    assert messages[3]["content"] == [{"type": "text", "text": "I said 2"}]


def test_a_local_model_sees_all_pictures(tiny_vlm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    corrector = LocalCorrector(*tiny_vlm("llava"), max_completion_length=4, batch_size=4)
    asked: list[Any] = []
    generate = corrector._engine.generate

    def spy(prompts: Any, images: Any, greedy: bool = False) -> Any:
        asked.extend(zip(prompts, images, strict=True))
        return generate(prompts, images, greedy)

    monkeypatch.setattr(corrector._engine, "generate", spy)
    corrector.correct([PLAIN, PAST])
    (_, [only]), (words, pictures) = asked[:2]
    assert only is PLAIN.image
    assert [int(each[0, 0, 0]) for each in pictures] == [5, 9]
    assert "picture 2" in words
    assert not corrector._reported  # the model did generate


def test_another_past_is_another_question() -> None:
    """Or a cached answer would be given for it."""
    others = [
        PLAIN,
        PAST,
        with_past(*PAST.prompt.history[:1]),  # type: ignore[attr-defined]
        with_past(Turn("told first", "I said 1"), Turn("told second", "I said 3", shade(5))),
        with_past(Turn("told first", "I said 1"), Turn("told second", "I said 2", shade(6))),
        with_past(Turn("told first", "I said 1", shade(5)), Turn("told second", "I said 2")),
    ]
    assert len({request_digest(each) for each in others}) == len(others)
    assert request_digest(with_past()) == request_digest(PLAIN)


def test_each_picture_is_counted() -> None:
    def body(pictures: int) -> dict[str, Any]:
        return {"messages": [{"content": [{"url": "data:image/png;base64,…"}] * pictures}]}

    sizes = CallSizes(Budget(Limits(), (1.0, 1.0)), max_length=10, picture_tokens=1000)
    one, three = (sizes.estimate(body(count)).prompt_tokens for count in (1, 3))
    assert three - one == pytest.approx(2000, abs=20)
    sizes.counted(body(1), 3000, 5)  # the server counts more for one
    assert sizes.estimate(body(3)).prompt_tokens > 8900
