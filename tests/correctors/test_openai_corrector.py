"""OpenAICorrector against a real HTTP server: protocol, faults, trust."""

from __future__ import annotations

import asyncio
import base64
import email.utils
import gzip
import io
import itertools
import json
import logging
import re
import signal
import socket
import threading
import time
import tracemalloc
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chat_server import ChatServer, calls_tool, completion, cuts, drips, floods, hangs, raw, says, status, waits
from corrector_cases import CANARY, SECRET, no_answer, number_line_request, points_request, yes_answer
from function_engine import make_collector
from PIL import Image
from toy import BareColourTask

from trl_gtr.correctors import OpenAICorrector
from trl_gtr.correctors.background import BackgroundLoop
from trl_gtr.correctors.base import request_digest
from trl_gtr.correctors.openai.bounded_http import MAX_ERROR_BODY
from trl_gtr.correctors.openai.chat import read_reply
from trl_gtr.tasks.number_line import NumberLineTask
from trl_gtr.types import CorrectionRequest, Generation

pytest.importorskip("openai")


@pytest.fixture(autouse=True)
def _no_proxy_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "OPENAI_BASE_URL", "OPENAI_API_KEY", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def make() -> Iterator[Any]:
    """Builds correctors with short times, and closes them."""
    made: list[OpenAICorrector] = []

    def build(server: ChatServer | str, **options: Any) -> OpenAICorrector:
        options = {
            "api_key": SECRET,
            "timeout": 5.0,
            "deadline": 10.0,
            "retry_delay": 0.01,
            "max_retries": 2,
        } | options
        url = server if isinstance(server, str) else server.url
        made.append(OpenAICorrector(options.pop("model", "test-model"), base_url=url, **options))
        return made[-1]

    yield build
    for corrector in made:
        corrector.close()


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def waiting(corrector: OpenAICorrector) -> int:
    """How many callers wait for a correction."""
    return sum(flight.waiting for flight in list(corrector._open()._flights.values()))


WRONG = number_line_request(1, 4, said=(2, 4))
RIGHT = number_line_request(1, 4)


# -- what is sent ----------------------------------------------------------------------------------------------------


def test_request_holds_a_png_and_the_schema_but_never_the_truth(make: Any) -> None:
    with ChatServer(says(yes_answer())) as server:
        request = number_line_request(shade=77)
        make(server, image_size=20).correct([request])
        body = server.seen[0].body
    assert CANARY not in server.seen[0].text
    assert body["model"] == "test-model"
    assert body["temperature"] == 0.4
    system, user = body["messages"]
    text, picture = user["content"]
    assert request.prompt in text["text"]
    assert request.response.text in text["text"]
    assert "Does the target lie above or below" in system["content"]
    header, _, data = picture["image_url"]["url"].partition(",")
    assert header == "data:image/png;base64"
    decoded = Image.open(io.BytesIO(base64.b64decode(data)))
    assert decoded.format == "PNG"
    assert decoded.size == (20, 15)  # 40 × 30 before
    assert np.array(decoded)[0, 0].tolist() == [77, 77, 77]
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["numbers", "direction", "evaluation", "correction", "right_action"]
    assert schema["properties"]["evaluation"]["enum"] == ["YES", "NO"]


def test_hidden_truth_changes_no_byte_of_the_request(make: Any) -> None:
    points = points_request(read=("4", "6", "A", "7"))
    with ChatServer(says("")) as server:
        for request, other in ((WRONG, {"Current": 5, "Target": 0}), (points, {"Cards": [], "Numbers": [9, 9, 9, 9]})):
            sent = []
            for info in (request.info, {**request.info, **other}):
                first = len(server.seen)
                make(server).correct([replace(request, info=info)])
                sent.append([seen.text for seen in server.seen[first:]])
            assert sent[0] == sent[1]
            assert len(sent[0]) == 2  # the question and the repair


def test_azure_paths_and_header(make: Any) -> None:
    with ChatServer(says(yes_answer()), key=SECRET) as server:
        corrector = make(server.root, model="my-deployment", azure=True, api_version="2024-10-21")
        corrector.check(NumberLineTask())
        assert corrector.correct([RIGHT])[0].verdict == "right"
        path, headers = server.seen[0].path, server.seen[0].headers
    assert path == "/openai/deployments/my-deployment/chat/completions?api-version=2024-10-21"
    assert headers["api-key"] == SECRET


def test_key_and_address_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatServer(says(yes_answer()), key=SECRET) as server:
        monkeypatch.setenv("OPENAI_API_KEY", SECRET)
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        corrector = OpenAICorrector("test-model")
        assert corrector.correct([RIGHT])[0].verdict == "right"
        corrector.close()


def test_own_server_needs_no_key_and_openai_does(make: Any) -> None:
    with ChatServer(says(yes_answer())) as server:
        assert make(server, api_key=None).correct([RIGHT])[0].verdict == "right"
    with pytest.raises(ValueError, match="api_key"):
        OpenAICorrector("gpt-4o")


# -- what comes back -------------------------------------------------------------------------------------------------


def test_verdicts(make: Any) -> None:
    with ChatServer(says(yes_answer()), says(no_answer())) as server:
        corrector = make(server, prices=(2.0, 10.0))
        right = corrector.correct([RIGHT])[0]
        corrected = corrector.correct([WRONG])[0]
    assert (right.verdict, right.thought, right.action) == ("right", None, "+")
    assert corrected.verdict == "corrected"
    assert corrected.thought == {
        "current number": 1,
        "target number": 4,
        "thoughts": "From 1 to 4 I go up: +.",
    }
    assert corrected.action == "+"
    assert corrected.usage.calls == 1
    assert corrected.usage.usd == pytest.approx((100 * 2 + 20 * 10) / 1e6)
    assert corrected.source == corrector.identity
    assert corrected.latency > 0


def test_order_of_a_batch_is_kept(make: Any) -> None:
    def by_picture(handler: Any, seen: Any) -> None:
        said = re.search(r'current number\\": ([0-9]), \\"target number\\": 5', seen.text)
        assert said
        says(no_answer(int(said[1]) - 1, 5))(handler, seen)

    requests = [number_line_request(i, 5, said=(i + 1, 5)) for i in (3, 0, 2, 1)]
    with ChatServer(by_picture) as server:
        answers = make(server).correct(requests)
    assert [answer.thought["current number"] for answer in answers] == [3, 0, 2, 1]


def test_one_repair_round_names_the_problem(make: Any) -> None:
    with ChatServer(says("no idea"), says(no_answer())) as server:
        corrector = make(server)
        answer = corrector.correct([WRONG])[0]
        messages = server.seen[1].body["messages"]
    assert answer.verdict == "corrected"
    assert answer.usage.calls == 2
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert "no JSON object" in messages[-1]["content"]
    assert corrector.metrics()["corrector/repairs"] == 1


UNUSABLE = {
    "malformed": '{"numbers": "1',
    "empty": "",
    "null": None,
    "a list": "[1, 2]",
    "lower case": json.dumps(yes_answer() | {"evaluation": "yes"}),
    "a sentence with NO in it": json.dumps(yes_answer() | {"evaluation": "None of it is wrong"}),
    "substring of the enum beside a correction": json.dumps(no_answer(evaluation="None")),
    "lower case beside a correction": json.dumps(no_answer(evaluation="no")),
    "a boolean": json.dumps(yes_answer() | {"evaluation": True}),
    "missing key": json.dumps({"evaluation": "YES", "correction": None}),
    "another key": json.dumps(yes_answer() | {"score": "5"}),
    "no correction": json.dumps(no_answer(correction=None)),
    "correction is text": json.dumps(no_answer(correction="go up")),
    "correction lacks a key": json.dumps(no_answer(correction={"thoughts": "up +"})),
    "correction of wrong type": json.dumps(
        no_answer(correction={"current number": [1], "target number": 4, "thoughts": "up: +"})
    ),
    "YES with a correction": json.dumps(no_answer() | {"evaluation": "YES"}),
    "NO that changes nothing": json.dumps(no_answer(correction=dict(WRONG.response.fields), right_action="+")),
    "illegal action": json.dumps(no_answer(right_action="jump")),
    "impossible reading": json.dumps(no_answer(1, 40)),
    "wrong by its own reading": json.dumps(no_answer(4, 1) | {"right_action": "+"}),
    "NaN": json.dumps(no_answer()).replace('"current number": 1', '"current number": NaN'),
    "same key twice": json.dumps(yes_answer())[:-1] + ', "evaluation": "NO"}',
    "deep": '{"a":' + "[" * 100_000,
}


@pytest.mark.parametrize("content", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_unusable_answers_fail_after_one_repair(make: Any, content: Any) -> None:
    with ChatServer(says(content)) as server:
        corrector = make(server)
        answer = corrector.correct([WRONG])[0]
        assert len(server.seen) == 2
    assert answer.failure == "unusable"
    assert answer.thought is None
    assert corrector.metrics()["corrector/failed_unusable"] == 1
    assert corrector.metrics()["corrector/calls"] == 2


def test_yes_to_a_thought_that_contradicts_itself_is_not_believed(make: Any) -> None:
    downwards = number_line_request(1, 4, action="-")
    with ChatServer(says(yes_answer())) as server:
        assert make(server).correct([downwards])[0].failure == "unusable"


def test_answer_that_is_wrong_but_consistent_passes_unless_verified(make: Any) -> None:
    """Nobody but the hidden truth can tell that the picture shows 1 and 4 and not 2 and 5."""
    with ChatServer(says(no_answer(2, 5))) as server:
        assert make(server).correct([WRONG])[0].verdict == "corrected"
        checked = make(server, verify_with_truth=True)
        assert checked.correct([WRONG])[0].failure == "untrue"
        assert checked.metrics()["corrector/verified_with_truth"] == 1
        assert CANARY not in "".join(seen.text for seen in server.seen)


# -- faults ----------------------------------------------------------------------------------------------------------

# name: step, kind, tries, options
FAULTS: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "time-out": (hangs, "timeout", 3, {"timeout": 0.15}),
    "deadline": (hangs, "timeout", 1, {"timeout": 5.0, "deadline": 0.3}),
    "slow drip": (drips, "timeout", 3, {"timeout": 0.15}),
    "cut mid-body": (cuts, "connection", 3, {}),
    "429": (status(429), "server", 3, {}),
    "429 with a short Retry-After": (status(429, headers={"Retry-After": "0.05"}), "server", 3, {}),
    "429 with an endless Retry-After": (status(429, headers={"Retry-After": "3600"}), "server", 1, {}),
    "429 without credit": (status(429, code="insufficient_quota"), "server", 1, {}),
    "500": (status(500), "server", 3, {}),
    "502": (status(502), "server", 3, {}),
    "503": (status(503), "server", 3, {}),
    "403": (status(403), "rejected", 1, {}),
    "404": (status(404), "rejected", 1, {}),
    "no JSON body": (raw(b"<html>gateway</html>"), "unusable", 2, {}),
    "no choices": (raw(b'{"choices": []}'), "unusable", 2, {}),
    "body of wrong types": (raw(b'{"choices": {"0": 1}, "usage": "free"}'), "unusable", 2, {}),
    "10 MB": (floods, "unusable", 1, {}),
    "cut off": (says('{"numbers": "1', finish="length"), "unusable", 2, {}),
    "refusal": (says(None, refusal="I can't help with that"), "refused", 1, {}),
    "content filter": (says("", finish="content_filter"), "refused", 1, {}),
    "unknown tool": (calls_tool("launch", {}), "unusable", 1, {}),
}


@pytest.mark.parametrize(("step", "kind", "tries", "options"), FAULTS.values(), ids=FAULTS.keys())
def test_fault_costs_its_own_label_and_the_next_request_works(
    make: Any, step: Any, kind: str, tries: int, options: dict[str, Any]
) -> None:
    good = says(no_answer())
    with ChatServer(*[step] * tries, good) as server:
        corrector = make(server, **options)
        started = time.monotonic()
        answer = corrector.correct([WRONG])[0]
        seconds = time.monotonic() - started
        assert len(server.seen) == tries
        server.released.set()
        session = corrector._open()
        session.chat.timeout = session.deadline = 10.0  # the good answer may take its time on a busy machine
        after = corrector.correct([number_line_request(1, 4, said=(3, 4))])[0]
    assert answer.failure == kind
    assert (answer.thought, answer.action) == (None, None)
    assert seconds < 6
    assert after.verdict == "corrected"
    metrics = corrector.metrics()
    failures = {name: count for name, count in metrics.items() if "failed" in name}
    assert failures == {f"corrector/failed_{kind}": 1}
    assert metrics["corrector/calls"] == tries + 1


def test_connection_refused(make: Any) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound but not listening: nobody else takes the port
        corrector = make(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
        answer = corrector.correct([WRONG])[0]
        assert answer.failure == "connection"
        assert answer.usage.calls == 3
        assert answer.usage.prompt_tokens == 0  # never sent
        with pytest.raises(ValueError, match="is the server up"):
            corrector.check(NumberLineTask())


def test_recovers_within_the_retries(make: Any) -> None:
    with ChatServer(status(500), cuts, says(no_answer())) as server:
        corrector = make(server)
        answer = corrector.correct([WRONG])[0]
    assert answer.verdict == "corrected"
    assert answer.usage.calls == 3
    assert corrector.metrics()["corrector/retries"] == 2


@pytest.mark.parametrize("form", ["seconds", "milliseconds", "date"])
def test_retry_after_is_honoured(make: Any, form: str) -> None:
    headers = {
        "seconds": {"Retry-After": "0.3"},
        "milliseconds": {"retry-after-ms": "300"},
        "date": {"Retry-After": email.utils.formatdate(time.time() + 2, usegmt=True)},
    }[form]
    times: list[float] = []

    def note(then: Any) -> Any:
        return lambda handler, seen: (times.append(time.monotonic()), then(handler, seen))

    with ChatServer(note(status(429, headers=headers)), note(says(no_answer()))) as server:
        assert make(server).correct([WRONG])[0].verdict == "corrected"
    assert times[1] - times[0] >= 0.29


def test_retries_wait_longer_each_time_with_jitter(make: Any) -> None:
    with ChatServer(says("")) as server:
        chat = make(server, retry_delay=1.0)._open().chat
    delays = [[chat._delay(tries) for _ in range(50)] for tries in range(3)]
    for tries, drawn in enumerate(delays):
        assert 0.5 * 2**tries <= min(drawn) < max(drawn) <= 2**tries
        assert len(set(drawn)) > 40


def test_schema_unsupported_falls_back_and_is_remembered(make: Any) -> None:
    def strict_server(handler: Any, seen: Any) -> None:
        kind = seen.body.get("response_format", {}).get("type", "text")
        step = says(no_answer()) if kind == "text" else status(400, f"{kind} is not supported")
        step(handler, seen)

    with ChatServer(strict_server) as server:
        corrector = make(server)
        assert corrector.correct([WRONG])[0].verdict == "corrected"
        formats = [seen.body.get("response_format", {}).get("type") for seen in server.seen]
        assert formats == ["json_schema", "json_object", None]
        assert corrector.correct([number_line_request(1, 4, said=(3, 4))])[0].verdict == "corrected"
        assert all("response_format" not in seen.body for seen in server.seen[3:])


def test_newer_models_that_reject_temperature_and_max_tokens(make: Any) -> None:
    def picky(handler: Any, seen: Any) -> None:
        if "max_tokens" in seen.body:
            status(400, "Unsupported parameter: use 'max_completion_tokens' instead")(handler, seen)
        elif "temperature" in seen.body:
            status(400, "temperature does not support 0.4")(handler, seen)
        else:
            says(no_answer())(handler, seen)

    with ChatServer(picky) as server:
        assert make(server).correct([WRONG])[0].verdict == "corrected"
        last = server.seen[-1].body
    assert last["max_completion_tokens"] == 1024
    assert last["response_format"]["type"] == "json_schema"


def test_bad_request_for_ever_ends(make: Any) -> None:
    with ChatServer(status(400, "response_format, max_tokens, temperature: no")) as server:
        answer = make(server).correct([WRONG])[0]
        assert len(server.seen) == 5  # without temperature, with max_completion_tokens, json_object, text
    assert answer.failure == "rejected"


@pytest.mark.parametrize(
    ("error", "kind", "tries"),
    [
        (status(400, "The response was filtered: bad tool, json", code="content_filter"), "refused", 1),
        (status(400, "Reduce the messages or tools", code="context_length_exceeded"), "rejected", 1),
        (status(400, "maximum context length is 4096 tokens; max_tokens, tools"), "rejected", 1),
        (status(400, "the image can't be read"), "rejected", 1),
        (status(400, "json_schema: this one step is at fault"), "rejected", 3),
    ],
    ids=["content filter", "length", "length in words", "image", "named"],
)
def test_fault_of_one_step_costs_the_others_nothing(make: Any, error: Any, kind: str, tries: int) -> None:
    """Whatever is tried for the step that is rejected, the next one gets schema, limits and temperature again."""
    with ChatServer(*[error] * tries, says(no_answer())) as server:
        corrector = make(server)
        assert corrector.correct([WRONG])[0].failure == kind
        assert len(server.seen) == tries
        assert corrector.correct([number_line_request(1, 4, said=(3, 4))])[0].verdict == "corrected"
        first, last = server.seen[0].body, server.seen[-1].body
    assert last["response_format"]["type"] == "json_schema"
    assert set(first) == set(last) == {"model", "messages", "max_tokens", "temperature", "response_format"}


def test_rejected_parameter_is_known_by_its_name_alone(make: Any) -> None:
    def terse(handler: Any, seen: Any) -> None:
        rejected = "response_format" in seen.body
        step = status(400, "Unknown parameter", param="response_format") if rejected else says(no_answer())
        step(handler, seen)

    with ChatServer(terse) as server:
        assert make(server).correct([WRONG])[0].verdict == "corrected"


def test_lone_surrogates_are_an_unusable_answer_and_no_crash(make: Any, tmp_path: Any) -> None:
    """JSON can spell half a character; no file, tokenizer or further request can hold it."""
    from trl_gtr.correctors import CachedCorrector

    thought = no_answer()["correction"] | {"thoughts": "From 1 to 4 I go up \ud800: +."}
    with ChatServer(says("half \ud800 an answer"), says(no_answer(correction=thought))) as server:
        cached = CachedCorrector(make(server), tmp_path)
        answer = cached.correct([WRONG])[0]
        assert len(server.seen) == 2
    assert answer.failure == "unusable"
    with ChatServer(says(json.dumps(no_answer()).replace("up", "up \\ud800"))) as server:
        assert make(server).correct([WRONG])[0].failure == "unusable"


@pytest.mark.parametrize("tokens", [10**400, 10**12])
def test_impossible_token_counts_are_not_believed(make: Any, tokens: int) -> None:
    with ChatServer(says(no_answer(), usage=(tokens, 1))) as server:
        corrector = make(server, prices=(2.0, 10.0), max_usd=5.0)
        assert corrector.correct([WRONG])[0].verdict == "corrected"
    assert 0 < corrector.metrics()["corrector/usd_spent"] < 0.1  # the estimate


def test_fault_of_our_own_costs_a_label_and_is_reported_once(
    make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError(f"with {SECRET} in it")

    with ChatServer(says(no_answer())) as server:
        corrector = make(server)
        monkeypatch.setattr("trl_gtr.correctors.openai.conversation.parse_answer", broken)
        answers = [corrector.correct([number_line_request(shade=shade)])[0] for shade in range(2)]
        monkeypatch.undo()
        assert corrector.correct([WRONG])[0].verdict == "corrected"
    assert [answer.explanation for answer in answers] == ["unusable: RuntimeError"] * 2
    assert caplog.text.count("with [key] in it") == 1
    assert SECRET not in caplog.text


# -- start -----------------------------------------------------------------------------------------------------------


def test_wrong_key_fails_at_the_start_and_nothing_is_spent(make: Any) -> None:
    with ChatServer(says(yes_answer()), key="sk-another-key") as server:
        corrector = make(server)
        with pytest.raises(ValueError, match=r"rejects the key \(HTTP 401\): set OPENAI_API_KEY") as caught:
            corrector.check(NumberLineTask())
        assert server.seen == []
    assert SECRET not in str(caught.value)
    assert corrector.metrics()["corrector/calls"] == 0


def test_wrong_key_that_shows_with_the_first_call_ends_the_run(make: Any) -> None:
    """Some servers list their models to anybody."""
    with ChatServer(status(401, f"bad key {SECRET}")) as server:
        corrector = make(server)
        corrector.check(NumberLineTask())
        with pytest.raises(ValueError, match=r"rejects the key \(HTTP 401\): set OPENAI_API_KEY") as caught:
            corrector.correct([number_line_request(shade=shade) for shade in range(4)])
    assert SECRET not in "".join(__import__("traceback").format_exception(caught.value))


def test_key_that_expires_later_costs_labels_only(make: Any) -> None:
    with ChatServer(says(yes_answer()), status(401), says(no_answer())) as server:
        corrector = make(server)
        assert corrector.correct([RIGHT])[0].verdict == "right"
        assert corrector.correct([WRONG])[0].failure == "rejected"
        assert corrector.correct([number_line_request(1, 4, said=(3, 4))])[0].verdict == "corrected"
    assert corrector.metrics()["corrector/failed_rejected"] == 1


# -- bodies ----------------------------------------------------------------------------------------------------------


def flood(number: int, packing: str | None) -> Any:
    """50 MB under this status."""
    body = b'{"error": {"message": "' + b"x" * 50_000_000 + b'"}}'
    if packing is not None:
        packer = zlib.compressobj(1, wbits=31 if packing == "gzip" else 15)
        body = packer.compress(body) + packer.flush()
    headers = {"Content-Encoding": packing} if packing else {}
    return lambda handler, _: handler.send(number, body, headers | ({"Location": "/v1/x"} if number == 302 else {}))


@pytest.mark.parametrize("packing", [None, "gzip", "deflate"])
@pytest.mark.parametrize("number", [200, 302, 400, 500])
def test_floods_are_not_read(make: Any, number: int, packing: str | None) -> None:
    """Of 50 MB no more than a limit is taken from the socket or unpacked."""
    step = flood(number, packing)
    with ChatServer(step) as server:
        corrector = make(server, max_retries=0)
        corrector._open().chat.answered = True
        tracemalloc.start()
        try:
            answer = corrector.correct([WRONG])[0]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert answer.failure in ("unusable", "rejected", "server", "connection")
    assert len(answer.reason or "") < 400
    assert peak < 20_000_000


@pytest.mark.parametrize("packing", ["gzip", "GZIP", "x-gzip"])
def test_packed_answers_are_read(make: Any, packing: str) -> None:
    body = gzip.compress(json.dumps(completion(json.dumps(no_answer()))).encode())
    with ChatServer(lambda handler, _: handler.send(200, body, {"Content-Encoding": packing})) as server:
        assert make(server).correct([WRONG])[0].verdict == "corrected"
        assert server.seen[0].headers["accept-encoding"] == "gzip"  # servers don't agree on what deflate is


@pytest.mark.parametrize(
    ("packing", "words"),
    [
        ("gzip", "unusable: the answer isn't valid gzip, although its header says so"),
        ("br", "unusable: the answer is compressed with br; only gzip was requested"),
        ("deflate", "unusable: the answer is compressed with deflate; only gzip was requested"),
        (SECRET, "unusable: the answer is compressed with something else; only gzip was requested"),
    ],
)
def test_packing_that_cannot_be_undone(make: Any, packing: str, words: str) -> None:
    def packed(number: int) -> Any:
        return lambda handler, _: handler.send(number, b"no such data", {"Content-Encoding": packing})

    with ChatServer(packed(200)) as server:
        assert make(server).correct([WRONG])[0].explanation == words
        assert len(server.seen) == 1  # it would be packed like that again
    with ChatServer(packed(403)) as server:
        assert make(server).correct([WRONG])[0].failure == "rejected"


def test_error_that_is_cut_off_is_known_by_its_status(make: Any) -> None:
    def cut(handler: Any, _: Any) -> None:
        handler.send_response(403)
        handler.send_header("Content-Length", "5000")
        handler.end_headers()
        handler.wfile.write(b'{"error": {"mess')
        handler.close_connection = True

    with ChatServer(cut) as server:
        answer = make(server).correct([WRONG])[0]
    assert answer.explanation.startswith("rejected: HTTP 403")


def test_servers_control_no_terminal(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    attack = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\rdone"
    for leak in (status(403, attack), says(None, refusal=attack), status(400, "no", param=attack)):
        with ChatServer(leak, models=(attack, "b")) as server:
            corrector = make(server)
            corrector.check(NumberLineTask())
            reason = corrector.correct([WRONG])[0].reason or ""
            assert not re.search("[\x00-\x1f\x7f-\x9f\u202e]", reason)
            assert "\\x1b]0;title" in reason
    assert caplog.text.count("title") >= 6
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", caplog.text)


def test_lone_surrogates_of_the_agent_are_sent_replaced(make: Any) -> None:
    odd = replace(WRONG, prompt="\ud800 what?", response=replace(WRONG.response, text=WRONG.response.text + "\udfff"))
    with ChatServer(says(no_answer())) as server:
        assert make(server).correct([odd])[0].verdict == "corrected"
        assert "\ufffd what?" in server.seen[0].body["messages"][1]["content"][0]["text"]


ODD_LISTS = [b"<html>hi</html>", b"", b"[]", b"3", b'{"data": [{"name": "x"}]}', b'{"data": 7}', b'{"data": null}']


@pytest.mark.parametrize("body", ODD_LISTS)
def test_odd_list_of_models_is_no_obstacle(make: Any, monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr("chat_server.Handler.do_GET", lambda handler: handler.send(200, body))
    with ChatServer(says(yes_answer())) as server:
        make(server).check(NumberLineTask())


def test_identity_names_what_answers_depend_on() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"base_url": "http://localhost:1/other/v1"},
        {"base_url": "http://localhost:2/v1"},
        {"max_completion_length": 99},
        {"temperature": 0.0},
        {"image_size": 20},
        {"max_tool_rounds": 1},
        {"verify_with_truth": True},
    ]
    base = {"base_url": "http://localhost:1/v1", "api_key": SECRET}
    assert len({OpenAICorrector("m", **(base | more)).identity for more in options}) == len(options)
    keyed = OpenAICorrector("m", base_url=f"http://user:{SECRET}@localhost/{SECRET}/v1", api_key=SECRET)
    assert SECRET not in keyed.identity


def test_unlisted_model_warns(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with ChatServer(says(""), models=("qwen", "llava")) as server:
        make(server).check(NumberLineTask())
    assert "doesn't list model 'test-model'; it lists qwen, llava" in caplog.text


def test_without_the_openai_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    with pytest.raises(ImportError, match=re.escape('pip install "trl-gtr[openai]"')):
        OpenAICorrector(api_key=SECRET)


# -- the key ---------------------------------------------------------------------------------------------------------


def test_key_is_nowhere(make: Any, caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    """Servers that repeat the key in errors, refusals and answers; every logger at DEBUG."""
    from trl_gtr.correctors import CachedCorrector

    caplog.set_level(logging.DEBUG)
    for name in list(logging.root.manager.loggerDict):
        caplog.set_level(logging.DEBUG, logger=name)
    thought = no_answer()["correction"] | {"thoughts": f"{SECRET} says I go up: +."}
    escaped = json.dumps(no_answer(correction=thought)).replace(SECRET, "".join(f"\\u{ord(c):04x}" for c in SECRET))
    leaks = [
        status(400, f"bad key {SECRET}"),
        status(500, f"bad key {SECRET}"),
        status(400, "x" * (300 - len(SECRET) // 2) + SECRET),  # where the words are cut
        status(403, f"bad {urllib.parse.quote(SECRET, safe='').replace('-', '%2d')}"),
        status(403, "bad header", param=SECRET),
        lambda handler, _: handler.send(400, b" " * (MAX_ERROR_BODY - len(SECRET) // 2) + SECRET.encode()),
        says(escaped),
        raw(json.dumps(completion(escaped)).replace("k", "\\u006b").encode()),
        says(None, refusal=f"not with {SECRET}"),
        says(no_answer(correction=thought)),
    ]
    found: list[str] = []
    for leak in leaks:
        with ChatServer(leak) as server:
            corrector = make(server)
            cached = CachedCorrector(corrector, tmp_path)
            found += map(repr, cached.correct([WRONG]))
            found += [repr(corrector), repr(cached), repr(corrector.__dict__), corrector.identity]
            found += [json.dumps(corrector.state_dict()), json.dumps(corrector.metrics())]
            assert server.seen[0].headers["authorization"] == f"Bearer {SECRET}"
    with ChatServer(says(""), key="another") as server:
        with pytest.raises(ValueError, match="rejects the key") as caught:
            make(server).check(NumberLineTask())
        found.append("".join(__import__("traceback").format_exception(caught.value)))
    found += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    found += [record.getMessage() + repr(record.args) for record in caplog.records]
    assert len(found) > 30
    assert "[key] says I go up" in "".join(found)  # the leak did get as far as the answer
    # Half of it is found too.
    leaking = [text for text in found if SECRET[: len(SECRET) // 2] in urllib.parse.unquote(text)]
    assert leaking == []


# -- several at once -------------------------------------------------------------------------------------------------


def test_identical_requests_in_flight_are_sent_once_and_paid_once(make: Any) -> None:
    go = threading.Event()
    with ChatServer(waits(go, says(no_answer()))) as server:
        corrector = make(server)
        answers: list[Any] = []
        other = threading.Thread(target=lambda: answers.extend(corrector.correct([WRONG])))
        other.start()
        server.wait_for(lambda: server.in_flight == 1)
        third = threading.Thread(target=lambda: answers.extend(corrector.correct([WRONG, WRONG])))
        third.start()
        eventually(lambda: waiting(corrector) == 3)
        go.set()
        other.join()
        third.join()
        assert len(server.seen) == 1
    assert [answer.verdict for answer in answers] == ["corrected"] * 3
    assert sorted(answer.usage.calls for answer in answers) == [0, 0, 1]
    assert corrector.metrics()["corrector/calls"] == 1
    assert corrector.metrics()["corrector/shared"] == 2


def test_concurrency_limit(make: Any) -> None:
    go = threading.Event()
    with ChatServer(waits(go, says(yes_answer()))) as server:
        corrector = make(server, concurrency=3)
        requests = [number_line_request(1, 4, shade=shade) for shade in range(9)]
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.extend(corrector.correct(requests)))
        thread.start()
        server.wait_for(lambda: server.in_flight == 3)
        go.set()
        thread.join()
        assert server.most_in_flight == 3
    assert [answer.verdict for answer in answers] == ["right"] * 9


def test_close_ends_pending_corrections_at_once(make: Any) -> None:
    with ChatServer(hangs) as server:
        corrector = make(server, timeout=60.0, deadline=60.0, concurrency=2)
        requests = [number_line_request(1, 4, shade=shade) for shade in range(6)]
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.extend(corrector.correct(requests)))
        thread.start()
        server.wait_for(lambda: server.in_flight == 2)
        started = time.monotonic()
        corrector.close()
        thread.join(5)
        assert time.monotonic() - started < 2
        assert len(server.seen) == 2  # those that waited were never sent
    assert [answer.failure for answer in answers] == ["cancelled"] * 6


def test_nothing_is_sent_after_close_by_a_thread_that_was_about_to_ask(
    make: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` comes while a cache is still computing what to ask."""
    from trl_gtr.correctors import AuditedCorrector, CachedCorrector, base, cache

    computing, closed = threading.Event(), threading.Event()

    def slow_digest(request: Any) -> str:
        computing.set()
        assert closed.wait(10)
        return base.request_digest(request)

    monkeypatch.setattr(cache, "request_digest", slow_digest)
    with ChatServer(says(yes_answer())) as server:
        corrector = AuditedCorrector(CachedCorrector(make(server), tmp_path))
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.extend(corrector.correct([RIGHT])))
        thread.start()
        assert computing.wait(10)
        corrector.close()
        closed.set()
        thread.join(10)
        assert server.seen == []
        assert [answer.failure for answer in answers] == ["cancelled"]
        corrector.reopen()
        assert corrector.correct([RIGHT])[0].verdict == "right"


def test_ended_loop_takes_nothing_more() -> None:
    ran: list[int] = []

    async def work(number: int) -> int:
        ran.append(number)
        return number

    async def end() -> None:
        ran.append(0)

    loop = BackgroundLoop("test")
    assert loop.submit(work, 1).result(10) == 1
    loop.stop(end)
    assert loop.submit(work, 2).cancelled()
    loop.stop(end)
    assert ran == [1, 0]


def test_request_that_nobody_waits_for_is_not_joined(make: Any) -> None:
    """After an interrupted call an identical one is asked anew; its answer is not the cancelled one's."""
    with ChatServer(hangs, says(no_answer())) as server:
        session = make(server, timeout=60.0, deadline=60.0)._open()
        parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
        first = session.submit(WRONG, parts)
        server.wait_for(lambda: server.in_flight == 1)

        async def cancel_and_ask_at_once() -> Any:
            (flight,) = session._flights.values()
            join = next(task for task in asyncio.all_tasks() if "Session._join" in repr(task))
            join.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not flight.task.done()
            return await session._join(request_digest(WRONG), WRONG, parts)

        assert session._background.submit(cancel_and_ask_at_once).result(10).verdict == "corrected"
        assert first.cancelled()


def test_closed_corrector_can_be_used_again(make: Any) -> None:
    with ChatServer(says(yes_answer())) as server:
        corrector = make(server)
        for _ in range(2):
            assert corrector.correct([RIGHT])[0].verdict == "right"
            corrector.close()
            assert corrector.correct([RIGHT])[0].failure == "cancelled"
            corrector.reopen()
        assert corrector.metrics()["corrector/calls"] == 2


def test_server_that_is_down_is_left_alone(make: Any) -> None:
    """512 corrections against a dead server must not wait out 512 deadlines."""
    with ChatServer(hangs) as server:
        corrector = make(server, concurrency=8, timeout=0.1, max_retries=0)
        requests = [number_line_request(1, 4, shade=shade) for shade in range(60)]
        started = time.monotonic()
        answers = corrector.correct(requests)
        assert time.monotonic() - started < 3
        assert len(server.seen) <= 16
    kinds = [answer.failure for answer in answers]
    assert set(kinds) == {"timeout", "unavailable"}
    assert kinds.count("unavailable") >= 44


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def _interrupt_once(server: ChatServer, count: int) -> threading.Thread:
    """Send the main thread a real SIGINT as soon as the server has so many requests in hand."""

    def interrupt() -> None:
        server.wait_for(lambda: server.in_flight == count)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_ctrl_c_in_correct_ends_at_once_and_sends_no_more(make: Any) -> None:
    with ChatServer(hangs) as server:
        corrector = make(server, timeout=60.0, deadline=60.0, concurrency=2)
        requests = [number_line_request(1, 4, shade=shade) for shade in range(6)]
        started = time.monotonic()
        thread = _interrupt_once(server, 2)
        with pytest.raises(KeyboardInterrupt):
            corrector.correct(requests)
        assert time.monotonic() - started < 5
        thread.join()
        eventually(lambda: waiting(corrector) == 0)
        assert len(server.seen) == 2


def test_ctrl_c_while_a_pool_corrects_ends_at_once(make: Any) -> None:
    """As the collector does it: calls in a pool, the main thread waiting for them, `close` on the way out."""
    with ChatServer(hangs) as server, ThreadPoolExecutor(4) as pool:
        corrector = make(server, timeout=60.0, deadline=60.0)
        futures = [pool.submit(corrector.correct, [number_line_request(1, 4, shade=shade)]) for shade in range(4)]
        started = time.monotonic()
        thread = _interrupt_once(server, 4)
        with pytest.raises(KeyboardInterrupt):
            [future.result() for future in futures]
        corrector.close()
        answers = [future.result(5)[0] for future in futures]
        assert time.monotonic() - started < 5
        thread.join()
    assert [answer.failure for answer in answers] == ["cancelled"] * 4


# -- in a rollout ----------------------------------------------------------------------------------------------------


def test_rollout_over_a_server_full_of_faults(make: Any) -> None:
    """Of 32 steps a quarter each meets a 503, a hanging server, gibberish and a good answer."""
    numbers = itertools.count()

    def generate(prompts: list[str], images: list[np.ndarray]) -> list[Generation]:
        texts = [
            f'{{"current number": 0, "target number": 2, "thoughts": "Try {next(numbers)}: +.", "action": "+"}}'
            for _ in prompts
        ]
        return [Generation(np.zeros(1, np.int64), text) for text in texts]

    def by_number(handler: Any, seen: Any) -> None:
        number = re.search(r"Try ([0-9]+)", seen.text)
        assert number
        (status(503), hangs, says("gibberish"), says(no_answer()))[int(number[1]) % 4](handler, seen)

    with ChatServer(by_number) as server:
        corrector = make(server, timeout=3.0, max_retries=0)
        collector = make_collector(NumberLineTask(), generate, corrector, num_envs=8)
        started = time.monotonic()
        rollout = collector.collect(4)
        assert time.monotonic() - started < 20
    kinds = [c.failure or c.verdict for c in rollout.corrections if c is not None]
    assert kinds == ["server", "timeout", "unusable", "corrected"] * 8
    metrics = corrector.metrics()
    assert [metrics[f"corrector/failed_{kind}"] for kind in ("server", "timeout", "unusable")] == [8, 8, 8]
    assert metrics["corrector/calls"] == 8 + 8 + 2 * 8 + 8


# -- reading replies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 4}, (3, 4)),
        ({"prompt_tokens": "3", "completion_tokens": 4}, None),
        ({"prompt_tokens": -3, "completion_tokens": 4}, None),
        ({"prompt_tokens": 3, "completion_tokens": 10**9}, None),
        ({}, None),
        ([3, 4], None),
        (None, None),
    ],
)
def test_token_counts_are_believed_only_if_they_can_be(usage: Any, expected: Any) -> None:
    body = {"choices": [{"message": {"content": "hello"}}], "usage": usage}
    reply, tokens = read_reply(json.dumps(body))
    assert reply.content == "hello"
    assert tokens == expected


def test_the_truth_must_be_known_to_verify_with_it(make: Any) -> None:
    with ChatServer(says("")) as server, pytest.raises(ValueError, match=r"needs a judge\(\), but task 'colours'"):
        make(server, verify_with_truth=True).check(BareColourTask())


def test_a_task_without_a_rubric_gets_general_questions(make: Any) -> None:
    """Minimal tasks can have a language model as corrector: the answer's keys come from the general rubric."""
    task, info = BareColourTask(), {"colour": "red"}
    response = task.format.parse(task.format.render({"thoughts": "it is blue"}, "blue"))
    request = CorrectionRequest(np.zeros((4, 4, 3), np.uint8), "Which colour?", response, {}, info, task)
    answer = {"picture": "all red", "thought": "no", "choice": "red", "evaluation": "NO"}
    answer |= {"correction": {"thoughts": "it is red"}, "right_action": "red"}
    with ChatServer(says(answer)) as server:
        corrector = make(server)
        corrector.check(task)
        (correction,) = corrector.correct([request])
        asked = json.dumps(server.seen[-1].body)
    assert (correction.verdict, correction.thought, correction.action) == (
        "corrected",
        {"thoughts": "it is red"},
        "red",
    )
    assert "agent that plays colours" in asked
