"""The seam, the expert, answers and small parts; what speaks HTTP is tested in test_openai_corrector.py."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import asdict, astuple, replace
from typing import Any

import numpy as np
import pytest
from corrector_cases import no_answer, number_line_request, points_answer, points_request, yes_answer
from hypothesis import given, settings, strategies as st
from toy import BareColourTask
from transformers import HfArgumentParser

from trl_gtr.correctors import (
    AuditedCorrector,
    CachedCorrector,
    Corrector,
    CorrectorArguments,
    ExpertCorrector,
    OpenAICorrector,
    UnreliableCorrector,
    failed,
    make_corrector,
)
from trl_gtr.correctors.answers import AnswerProblem, parse_answer
from trl_gtr.correctors.base import CorrectorWrapper, request_digest
from trl_gtr.correctors.openai.breaker import Breaker
from trl_gtr.correctors.openai.budget import Budget, Limits
from trl_gtr.correctors.openai.chat import Reply, ToolCall, read_reply
from trl_gtr.correctors.openai.conversation import Conversation
from trl_gtr.responses.format import Field, ThoughtFormat
from trl_gtr.tasks import make_task
from trl_gtr.tasks.number_line import NumberLineTask
from trl_gtr.types import Correction, CorrectionRequest

# -- the expert ------------------------------------------------------------------------------------------------------


def test_expert_verdicts() -> None:
    right = number_line_request(1, 4)
    misread = number_line_request(1, 4, said=(2, 4))
    backwards = number_line_request(1, 4, action="-")
    answers = ExpertCorrector().correct([right, misread, backwards])
    assert [answer.verdict for answer in answers] == ["right", "corrected", "corrected"]
    assert [answer.action for answer in answers] == ["+", "+", "+"]
    assert answers[0].thought is None
    assert answers[1].thought is not None
    assert answers[1].thought["current number"] == 1
    assert answers[1].thought["thoughts"] == misread.response.fields["thoughts"]  # the direction was right: words stay
    assert answers[2].thought is not None
    assert answers[2].thought["thoughts"] != backwards.response.fields["thoughts"]
    assert {answer.source for answer in answers} == {"expert"}
    assert {answer.usage.calls for answer in answers} == {0}


def test_expert_on_points24() -> None:
    misread = points_request(("4", "6", "A", "A"), "4", read=("4", "6", "A", "7"), aim="4*6*1*1")
    hopeless = points_request(("A", "A", "A", "A"), "", aim="1+1+1+1", symbol="1", action="1")
    right = points_request()
    answers = ExpertCorrector().correct([misread, hopeless, right])
    assert [answer.verdict for answer in answers] == ["corrected", "unsolvable", "right"]
    assert answers[0].thought == dict(misread.response.fields) | {"cards": ["4", "6", "A", "A"]}
    assert [answer.target for answer in answers] == ["4*6*1*1", None, "4*6*1*1"]
    assert [answer.action for answer in answers] == ["*", None, "*"]


def test_expert_keeps_thoughts_apart() -> None:
    """Agents that word their thoughts differently are not corrected into one template."""
    wordings = [
        "We are at {n}, the goal is 4: up we go, +.",
        "4 is more than {n}. Increase with +.",
        "Since {n} < 4 the right move is +.",
        "Moving right, +, takes me from {n} to 4.",
    ]
    requests = []
    for n, wording in itertools.product((2, 3), wordings):
        request = number_line_request(1, 4, said=(n, 4))
        fields = {**request.response.fields, "thoughts": wording.format(n=n)}
        text = request.task.format.render(fields, "+")
        requests.append(replace(request, response=request.task.format.parse(text)))
    answers = ExpertCorrector().correct(requests)
    assert {answer.verdict for answer in answers} == {"corrected"}
    assert len({answer.thought["thoughts"] for answer in answers if answer.thought}) == 8


def blackjack_request(thoughts: str, action: str) -> Any:
    """11 against a 6: hit."""
    task = make_task("blackjack")
    info = {"Dealer Card": [[6, "6", "H"], [10, "K", "S"]], "Player Card": [[5, "5", "H"], [6, "6", "S"]]}
    response = task.format.respond({"thoughts": thoughts}, action)
    return replace(
        number_line_request(), task=task, info=info, response=response, public_state=task.public_state(info)
    )


def test_expert_names_the_sound_action_beside_a_right_reading() -> None:
    """Blackjack's judge looks at the reading; standing on 11 is still not what the right thought calls for."""
    request = blackjack_request("My total is 11 and the dealer shows 6.", "stand")
    answer = ExpertCorrector().correct([request])[0]
    assert (answer.verdict, answer.action) == ("right", "hit")


@pytest.mark.parametrize("action", ["stand", "hit"])
def test_expert_corrects_a_right_reading_that_concludes_the_wrong_action(action: str) -> None:
    request = blackjack_request("My total is 11 and the dealer shows 6, so I stand.", action)
    answer = ExpertCorrector().correct([request])[0]
    assert (answer.verdict, answer.action) == ("corrected", "hit")
    assert answer.thought is not None
    assert request.task.format.conclusion(answer.thought) == "hit"


def test_expert_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="task 'colours' has no expert"):
        ExpertCorrector().check(BareColourTask())
    ExpertCorrector().check(make_task("number_line"))


# -- the seam --------------------------------------------------------------------------------------------------------


class Agreeing(Corrector):
    """Defines nothing but what a corrector needs."""

    def correct(self, requests: Any) -> list[Correction]:
        return [Correction("right") for _ in requests]


def test_a_corrector_needs_no_more_than_correct() -> None:
    corrector = Agreeing()
    assert corrector.identity == "Agreeing"
    assert type("Renamed", (Agreeing,), {})().identity == "Renamed"
    assert corrector.exhausted is False
    assert corrector.metrics() == corrector.state_dict() == {}
    corrector.check(make_task("number_line"))
    corrector.load_state_dict({"of": "another corrector"})
    corrector.close()
    corrector.reopen()
    assert [answer.verdict for answer in corrector.correct([number_line_request()])] == ["right"]


def test_an_identity_may_be_assigned() -> None:
    class Named(Agreeing):
        def __init__(self, model: str) -> None:
            self.identity = f"named {model}"

    assert Named("a").identity == "named a"
    assert CorrectorWrapper(Named("b")).identity == "named b"


def test_a_corrector_is_checked_where_it_is_made() -> None:
    class Misspelt(Agreeing):
        def metric(self) -> dict[str, float]:
            return {"corrector/mine": 1.0}

    class Missing(Corrector):
        pass

    with pytest.raises(TypeError, match=r"Misspelt\.metric is not a member of Corrector; did you mean `metrics`\?"):
        Misspelt()
    with pytest.raises(TypeError, match=r"Missing must define `correct`: trl_gtr\.Corrector has no default"):
        Missing()


def test_only_a_corrector_can_be_wrapped() -> None:
    class Alike:
        def correct(self, requests: Any) -> list[Correction]:
            return []

    with pytest.raises(TypeError, match=r"Alike is not a Corrector: subclass trl_gtr\.Corrector"):
        CachedCorrector(Alike(), "somewhere")  # type: ignore[arg-type]


def test_wrappers_pass_everything_on() -> None:
    class Telling(Agreeing):
        exhausted = True

        def __init__(self) -> None:
            self.told: list[Any] = []

        def check(self, task: Any) -> None:
            self.told.append(("check", task))

        def metrics(self) -> dict[str, float]:
            return {"corrector/mine": 1.0}

        def state_dict(self) -> dict[str, Any]:
            return {"told": len(self.told)}

        def load_state_dict(self, state: Any) -> None:
            self.told.append(("load", state))

        def close(self) -> None:
            self.told.append("close")

        def reopen(self) -> None:
            self.told.append("reopen")

    inner, task = Telling(), NumberLineTask()
    outer = CorrectorWrapper(inner)
    assert (outer.exhausted, outer.metrics(), outer.state_dict()) == (True, {"corrector/mine": 1.0}, {"told": 0})
    outer.check(task)
    outer.load_state_dict({"told": 3})
    outer.close()
    outer.reopen()
    assert inner.told == [("check", task), ("load", {"told": 3}), "close", "reopen"]


def test_failures_are_typed() -> None:
    timeout = failed("timeout", "after 3 s")
    assert (timeout.verdict, timeout.failure, timeout.reason) == ("failed", "timeout", "after 3 s")
    assert timeout.explanation == "timeout: after 3 s"
    assert (failed("refused").reason, failed("refused").explanation) == (None, "refused")
    assert Correction("failed", reason="moon phase").failure == "other"
    assert Correction("right", reason="timeout: not really").failure is None
    with pytest.raises(ValueError, match="failure must be one of timeout, late"):
        Correction("failed", failure="moon phase")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'right' can't have a failure"):
        Correction("right", failure="timeout")


def test_where_nobody_judges_only_the_experts_thought_is_right() -> None:
    class Unjudged(BareColourTask):
        def expert(self, info: Any, hint: Any = None) -> Any:
            return self.format.respond({"thoughts": f"it is {info['colour']}"}, info["colour"])

    task = Unjudged()
    image, info = np.zeros((4, 4, 3), np.uint8), {"colour": "red"}
    said = [task.format.respond({"thoughts": f"it is {colour}"}, colour) for colour in ("red", "blue")]
    requests = [CorrectionRequest(image, "", response, {}, info, task) for response in said]
    right, wrong = ExpertCorrector().correct(requests)
    assert right.verdict == "right"
    assert (wrong.verdict, wrong.thought) == ("corrected", {"thoughts": "it is red"})


def test_digest_is_of_what_can_be_seen() -> None:
    request = number_line_request()
    digest = request_digest(request)
    assert digest == request_digest(number_line_request())
    assert digest == request_digest(replace(request, info={"Current": 5, "Target": 0}))  # hidden truth
    renamed = NumberLineTask()
    renamed.name = "another"
    reworded = NumberLineTask()
    reworded.rubric = replace(renamed.rubric, advice="else")
    others = [
        replace(request, task=renamed),
        replace(request, task=reworded),
        replace(request, prompt="else"),
        replace(request, image=request.image + 1),
        replace(request, image=request.image.reshape(40, 30, 3)),
        replace(request, public_state={"actions": ["-"]}),
        number_line_request(action="-"),
        number_line_request(said=(2, 4)),
    ]
    assert len({digest, *map(request_digest, others)}) == 9
    strided = np.zeros((30, 80, 3), np.uint8)[:, ::2]
    assert request_digest(replace(request, image=strided)) == digest
    assert request_digest(replace(request, public_state={"actions": ("-", "+")})) == digest
    with pytest.raises(ValueError, match="not set"):
        request_digest(replace(request, public_state={"actions": {"-"}}))


def test_unreliable_corrector_by_construction() -> None:
    requests = [number_line_request(1, 4, said=(1 + i % 2, 4), shade=i % 256) for i in range(400)]
    unreliable = UnreliableCorrector(ExpertCorrector(), wrong=0.25, silent=0.2, seed=3)
    answers = unreliable.correct(requests)
    silent = sum(answer.verdict == "failed" for answer in answers)
    expected = ["right", "corrected"] * 200
    wrong = sum(a.verdict not in ("failed", e) for a, e in zip(answers, expected, strict=True))
    # 400 × 0.2 = 80 and 320 × 0.25 = 80, each ± 4 standard deviations
    assert 48 <= silent <= 112
    assert 48 <= wrong <= 112
    again = UnreliableCorrector(ExpertCorrector(), wrong=0.25, silent=0.2, seed=3)
    reordered = again.correct(requests[::-1])[::-1]
    assert [a.verdict for a in reordered] == [a.verdict for a in answers]
    other = UnreliableCorrector(ExpertCorrector(), wrong=0.25, silent=0.2, seed=4).correct(requests)
    assert [a.verdict for a in other] != [a.verdict for a in answers]
    untouched = UnreliableCorrector(ExpertCorrector()).correct(requests[:10])
    assert [a.verdict for a in untouched] == expected[:10]
    with pytest.raises(ValueError, match="share between 0 and 1"):
        UnreliableCorrector(ExpertCorrector(), wrong=2)


# -- answers ---------------------------------------------------------------------------------------------------------


def test_answer_may_stand_in_fences_and_words() -> None:
    text = f"Here you are:\n```json\n{json.dumps(no_answer())}\n```\nGood luck!"
    assert parse_answer(text, number_line_request(said=(2, 4))).verdict == "corrected"


YES_NO = json.dumps(yes_answer()) + "\nWait, that is wrong. My final answer:\n" + json.dumps(no_answer())


def test_a_draft_is_no_answer() -> None:
    request = number_line_request(said=(2, 4))
    for text in (YES_NO, f"```{json.dumps(no_answer())}``` {{"):
        with pytest.raises(AnswerProblem, match="more than one JSON object"):
            parse_answer(text, request)
    final = json.dumps(no_answer())
    for thinking in (f"<think>{YES_NO}</think>", f"{json.dumps(yes_answer())} no.</think>\n"):
        assert parse_answer(thinking + final, request).verdict == "corrected"
    with pytest.raises(AnswerProblem, match="in the middle of its thinking"):
        parse_answer(f"<think>{final}", request)


def blackjack(thoughts: str, action: str | None, evaluation: str = "NO", done: str = "stand") -> Correction:
    """An answer about an agent that wants to stand on 11 against a 6."""
    request = blackjack_request("My total is 11 and the dealer shows 6, so I stand.", done)
    correction = {"thoughts": thoughts} if evaluation == "NO" else None
    answer = {"totals": "", "choice": "", "evaluation": evaluation, "correction": correction, "right_action": action}
    return parse_answer(json.dumps(answer), request)


def test_an_answer_whose_thought_concludes_another_action_is_unusable() -> None:
    with pytest.raises(AnswerProblem, match="the thought concludes 'hit', but the action is 'stand'"):
        blackjack("My total is 20 and the dealer shows 6, so I hit.", "stand")
    with pytest.raises(AnswerProblem, match="the thought concludes 'stand', but the action is 'hit'"):
        blackjack("", None, "YES", done="hit")
    # Without an action of the corrector's own there is nothing to contradict.
    assert blackjack("My total is 20 and the dealer shows 6, so I hit.", None).verdict == "corrected"


@pytest.mark.parametrize(
    "thoughts", ["", " \n", "I hit.", "My total is 99 and the dealer shows 6.", "My total is 11."]
)
def test_blackjack_thoughts_must_say_what_was_read(thoughts: str) -> None:
    with pytest.raises(AnswerProblem):
        blackjack(thoughts, "hit")


def test_blackjack_answers() -> None:
    """A misread hand passes, as nobody but the truth can tell; actions get their legal spelling."""
    assert blackjack("My total is 12 and the dealer shows K, so I hit.", "hit").verdict == "corrected"
    assert blackjack("My total is 11 and the dealer shows 6, so I hit.", " Hit ").action == "hit"
    assert blackjack("", None, "YES").verdict == "right"


def test_a_thought_must_say_something_in_any_task() -> None:
    task = replace_format(ThoughtFormat([Field("cards", "list"), Field("words", "text"), Field("more", "text")]))
    request = replace(number_line_request(), task=task)
    for words, usable in (("", False), ("so", True)):
        answer = no_answer(correction={"cards": [], "words": words, "more": ""})
        if usable:
            assert parse_answer(json.dumps(answer), request).verdict == "corrected"
        else:
            with pytest.raises(AnswerProblem, match="says nothing"):
                parse_answer(json.dumps(answer), request)


def replace_format(form: ThoughtFormat) -> Any:
    """A task that can tell nothing of a thought but its format."""

    class Plain(BareColourTask):
        name, format, rubric = "plain", form, NumberLineTask.rubric

        def legal_actions(self, info: Any) -> list[str]:
            return ["-", "+"]

        def to_env_action(self, response: Any, info: Any) -> Any:
            return response.action if response.action in ("-", "+") else None

    return Plain()


def test_yes_may_repeat_the_agents_own_thought() -> None:
    request = number_line_request()
    answer = yes_answer() | {"correction": dict(request.response.fields), "right_action": "+"}
    assert parse_answer(json.dumps(answer), request).verdict == "right"


def test_yes_may_name_another_right_target() -> None:
    answer = points_answer(target="4*(6+1-1)", correction=None, right_action=None) | {"evaluation": "YES"}
    right = parse_answer(json.dumps(answer), points_request())
    assert (right.verdict, right.target) == ("right", "4*6*1*1")


@pytest.mark.parametrize("target", ["4*6*1*1", "4 * 6 * 1 * 1 = 24", "4×6×1×1", None])
def test_spellings_of_the_target(target: str | None) -> None:
    answer = points_answer(target=target, aim="4*6*1*1")
    assert parse_answer(json.dumps(answer), points_request(read=("4", "6", "A", "7"))).target == "4*6*1*1"


def test_correction_without_an_action_is_judged_by_the_best_one() -> None:
    request = points_request(read=("4", "6", "A", "7"))
    answer = points_answer(right_action=None)
    correction = parse_answer(json.dumps(answer), request)
    assert (correction.verdict, correction.action) == ("corrected", None)
    unnamed = answer["correction"] | {"thoughts": "I aim at 4*6*1*1=24."}
    with pytest.raises(AnswerProblem, match="wrong in: action"):
        parse_answer(json.dumps(answer | {"correction": unnamed}), request)


# Lone surrogates too: JSON can spell them.
TEXT = st.text(st.characters() | st.characters(categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(key=st.sampled_from(sorted(points_answer())), value=JSON, request_index=st.integers(0, 1))
def test_no_mangled_answer_becomes_a_label_by_accident(key: str, value: Any, request_index: int) -> None:
    request = points_request(read=("4", "6", "A", "7")) if request_index else points_request()
    answer = points_answer() | {key: value}
    try:
        correction = parse_answer(json.dumps(answer), request)
    except AnswerProblem:
        return
    assert correction.verdict in ("corrected", "unsolvable")
    repr(correction).encode()
    json.dumps(asdict(correction), ensure_ascii=False).encode()
    if correction.verdict == "corrected":
        assert answer["evaluation"] == "NO"
        assert answer["possible_solution"] == "YES"
        assert sorted(correction.thought["cards"]) == ["4", "6", "A", "A"]
        assert correction.thought["formula"] == "4"


@settings(max_examples=300, deadline=None)
@given(text=st.text() | TEXT | JSON.map(json.dumps), tokens=st.integers(-1, 10**400))
def test_any_text_is_read_without_an_exception(text: str, tokens: int) -> None:
    read_reply(text)
    call = {"id": text, "function": {"name": text, "arguments": text}}
    said = {"message": {"content": text, "refusal": text, "tool_calls": [call]}}
    counted = {"prompt_tokens": tokens, "completion_tokens": 1}
    reply, usage = read_reply(json.dumps({"choices": [said], "usage": counted}))
    parts = [reply.content, reply.refusal or "", *(part for call in reply.tool_calls for part in astuple(call))]
    "".join(parts).encode()
    assert usage is None or Budget(Limits(), (1.0, 1.0)).cost(*usage).usd < 100
    request = points_request(read=("4", "6", "A", "7"))
    conversation = Conversation(request, [{"type": "image"}])
    for reply in (
        Reply(text),
        Reply(tool_calls=(ToolCall("1", "find_all_correct_formulas", text), ToolCall("2", text, "{}"))),
    ):
        answer = conversation.hear(reply)
        assert answer is None or answer.verdict == "failed"


# -- the breaker -----------------------------------------------------------------------------------------------------


def test_breaker_rests_probes_and_recovers() -> None:
    now = [0.0]
    breaker = Breaker(failures=3, rest=10.0, clock=lambda: now[0])
    for _ in range(2):
        breaker.record(reached=False)
    breaker.record(reached=True)  # only failures in a row count
    for _ in range(3):
        assert breaker.allows()
        breaker.record(reached=False)
    assert not breaker.allows()
    now[0] = 10.0
    assert breaker.allows()  # the probe
    assert not breaker.allows()  # not a second one
    breaker.record(reached=False)
    now[0] = 29.9
    assert not breaker.allows()  # the second rest is twice as long
    now[0] = 30.0
    assert breaker.allows()
    breaker.abandon()
    assert breaker.allows()
    breaker.record(reached=True)
    assert breaker.allows()
    assert breaker.allows()
    assert breaker.rest == 10.0


# -- by name ---------------------------------------------------------------------------------------------------------


def test_default_on_the_command_line_is_the_expert() -> None:
    (arguments,) = HfArgumentParser(CorrectorArguments).parse_args_into_dataclasses([])
    assert type(make_corrector(arguments)) is ExpertCorrector
    assert make_corrector("none") is None


def test_command_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-command-line")
    line = f"--corrector openai --corrector_model gpt-4o --corrector_max_usd 20 --corrector_cache {tmp_path}"
    line += " --corrector_when_spent expert --corrector_prices 3 4"
    (arguments,) = HfArgumentParser(CorrectorArguments).parse_args_into_dataclasses(line.split())
    audited = make_corrector(arguments)
    assert isinstance(audited, AuditedCorrector)
    assert audited.share == 0.1
    assert isinstance(audited.corrector, CachedCorrector)
    corrector = audited.corrector.corrector
    assert isinstance(corrector, OpenAICorrector)
    assert (corrector.model, corrector.budget.limits.usd, corrector.budget.prices) == ("gpt-4o", 20, (3.0, 4.0))
    assert isinstance(corrector.when_spent, ExpertCorrector)
    assert audited.metrics()["corrector/usd_remaining"] == 20
    assert audited.metrics()["corrector/cache_hits"] == 0


def test_make_corrector_by_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-keywords")
    corrector = make_corrector("openai", model="gpt-4o-mini", max_calls=7, audit_share=0)
    assert isinstance(corrector, OpenAICorrector)
    assert corrector.budget.limits.calls == 7
    with pytest.raises(ValueError, match=r"unknown options \['corrector_maxusd'\]"):
        make_corrector("openai", maxusd=3)
    with pytest.raises(ValueError, match="corrector must be one of expert, openai"):
        make_corrector("gpt")
    with pytest.raises(ValueError, match="set corrector_cache to its folder"):
        make_corrector("recorded")
    with pytest.raises(ValueError, match="two numbers"):
        make_corrector("openai", prices=[1.0])


def test_correctors_import_neither_torch_nor_openai() -> None:
    code = (
        "import sys, trl_gtr.correctors; print([m for m in ('torch', 'transformers', 'openai') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
