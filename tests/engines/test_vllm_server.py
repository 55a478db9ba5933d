"""The learner's side of a vLLM server, against a small HTTP server that stands in for it."""

from __future__ import annotations

import itertools
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_cases import FakeVLLM, Receiver
from vlms import some_images, some_prompts

from trl_gtr.engines import vllm_connection, vllm_server, vllm_weight_files
from trl_gtr.engines.base import EngineLost, EngineRefused
from trl_gtr.engines.vllm import VLLMEngine
from trl_gtr.engines.vllm_connection import Connection, Refused, ServerLost
from trl_gtr.engines.vllm_server import VLLMServer
from trl_gtr.engines.vllm_transfer import FileTransfer, NotShared, StreamTransfer, WeightTransfer
from trl_gtr.engines.vllm_weight_files import ScratchFolder, write_weights
from trl_gtr.policy.scoring import VLMPolicy

PROMPTS, IMAGES = some_prompts(3), some_images(3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_connection, "POLL", 0.01)


@pytest.fixture(scope="module")
def policy(tiny_vlm: Any) -> Any:
    model, processor = tiny_vlm()
    return model, VLMPolicy(model, processor, temperature=1.0, max_completion_length=8)


@pytest.fixture
def server(policy: Any) -> Iterator[FakeVLLM]:
    model, encoding = policy
    token = model.config.image_token_id
    count = int((encoding.encoder.encode(PROMPTS[:1], IMAGES[:1])["input_ids"] == token).sum())

    def expand(ids: list[int]) -> list[int]:
        return [t for each in ids for t in [each] * (count if each == token else 1)]

    with FakeVLLM(model, expand, [70, encoding.eos_token_ids[0]]) as running:
        yield running


def engine_with(transfer: WeightTransfer, policy: Any, server: FakeVLLM) -> VLLMEngine:
    model, encoding = policy
    return VLLMEngine(encoding, model, VLLMServer(Connection(server.url + "/v1", 60), model, transfer))


@pytest.fixture
def engine(policy: Any, server: FakeVLLM, tmp_path: Path) -> Iterator[VLLMEngine]:
    made = engine_with(FileTransfer(str(tmp_path)), policy, server)
    yield made
    made.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def streaming(policy: Any, server: FakeVLLM) -> Iterator[VLLMEngine]:
    """Its weights go over the network."""
    made = engine_with(StreamTransfer("gloo", 0, 60), policy, server)
    yield made
    made.close()


def failing(times: int, part: str, status: int = 500) -> Callable[[str, dict[str, Any]], int | None]:
    """Answers this often with an error where the path holds `part`."""
    asked = itertools.count()  # safe in threads

    def fail(path: str, body: dict[str, Any]) -> int | None:
        return status if part in path and next(asked) < times else None

    return fail


def failing_method(method: str) -> Callable[[str, dict[str, Any]], int | None]:
    return lambda path, body: 500 if body.get("method") == method else None


def test_weights_arrive_and_caches_are_reset(engine: VLLMEngine, server: FakeVLLM, tmp_path: Path) -> None:
    with engine.ready():
        generations = engine.generate(PROMPTS, IMAGES)
    assert [each.logprobs.tolist() for each in generations] == [[-0.5, -0.5]] * 3
    own = dict(engine.model.named_parameters())
    assert server.worker.weights.keys() == own.keys()
    assert all(torch.equal(server.worker.weights[name], own[name]) for name in own)
    assert [server.count(f"reset_{cache}_cache") for cache in ("prefix", "mm", "encoder")] == [2, 1, 1]
    engine.sync(engine.model)
    assert server.worker.gtr_version == engine.version
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1  # the one for a server that is restarted
    image = next(body for path, body in server.posts if "generate" in path)["content_parts"][0]
    assert image["url"].startswith("data:image/png;base64,")


def test_a_restarted_server_gets_the_weights_again(engine: VLLMEngine, server: FakeVLLM) -> None:
    with engine.ready():
        server.forget()
        engine.generate(PROMPTS, IMAGES)
        assert server.worker.gtr_version == engine.version
        assert server.count("gtr_load_file") == 2
        engine.generate(PROMPTS, IMAGES)
    assert server.count("gtr_load_file") == 2


def test_what_a_lost_server_left_undone_is_repeated(engine: VLLMEngine, server: FakeVLLM) -> None:
    with engine.ready():
        server.fail = failing(1, "generate")
        assert len(engine.generate(PROMPTS, IMAGES)) == 3
        server.fail = failing(1, "collective_rpc", 503)
        assert len(engine.generate(PROMPTS, IMAGES)) == 3
        server.fail = failing(1000, "generate")
        with pytest.raises(ConnectionError, match="3 times in a row"):
            engine.generate(PROMPTS, IMAGES)
        server.fail = failing(1, "generate", 404)  # of something in its place
        assert len(engine.generate(PROMPTS, IMAGES)) == 3
        server.fail = failing(1000, "generate", 403)
        with pytest.raises(EngineLost, match=r"HTTP 403.*python -m trl_gtr\.engines\.vllm_serve"):
            engine.generate(PROMPTS, IMAGES)


def test_a_prompt_that_the_server_refuses_is_not_asked_again(engine: VLLMEngine, server: FakeVLLM) -> None:
    with engine.ready():
        server.fail = failing(1000, "generate", 400)
        with pytest.raises(EngineLost, match=r"HTTP 400.*--max-model-len"):
            engine.generate(PROMPTS[:1], IMAGES[:1])
        assert server.count("generate") == 1


def test_responses_from_weights_that_changed_meanwhile_are_dropped(engine: VLLMEngine, server: FakeVLLM) -> None:
    with engine.ready():
        real, others = server.answer, [2]

        def answer(path: str, body: dict[str, Any]) -> Any:
            if "generate" in path and others[0] > 0:
                others[0] -= 1
                server.worker.gtr_version = "of another run"
            return real(path, body)

        server.answer = answer  # type: ignore[method-assign]
        engine.generate(PROMPTS, IMAGES)
    assert server.count("generate") == 6
    assert server.worker.gtr_version == engine.version


def test_another_model_is_refused(policy: Any, server: FakeVLLM) -> None:
    model, _ = policy
    server.worker.config |= {"text_config.hidden_size": 64}
    with pytest.raises(ValueError, match=r"another model than the run's \(text_config.hidden_size: 64, not 32\)"):
        VLLMServer(Connection(server.url, 60), model, FileTransfer())


@pytest.mark.parametrize(
    ("name", "value"), [("text_config.rms_norm_eps", 0.1), ("text_config.rope.rope_theta", 1.0), ("projector", "?")]
)
def test_what_weights_do_not_show_is_compared_where_both_tell(
    name: str, value: Any, policy: Any, server: FakeVLLM
) -> None:
    model, _ = policy
    differs = name in server.worker.config  # else it is something that the learner's release doesn't know
    server.worker.config |= {name: value}
    if differs:
        with pytest.raises(ValueError, match=f"another model than the run's .*{name}: {value}"):
            VLLMServer(Connection(server.url, 60), model, FileTransfer())
        del server.worker.config[name]  # the server's release doesn't tell
    VLLMServer(Connection(server.url, 60), model, FileTransfer()).close()
    assert differs == name.startswith("text_config")


def test_other_weights_than_were_sent_are_refused(engine: VLLMEngine, server: FakeVLLM) -> None:
    sums = server.worker.gtr_sums

    def others() -> dict[str, list[str]]:
        return sums() | {"model.language_model.norm.weight": ["float32", "0" * 64]}

    server.worker.gtr_sums = others  # type: ignore[method-assign]
    with pytest.raises(
        EngineRefused, match=r"another model than the run's \(model.language_model.norm.weight has other"
    ):
        engine.sync(engine.model)
    server.worker.gtr_sums = sums  # type: ignore[method-assign]
    engine.sync(engine.model)
    asked = server.count("gtr_sums")
    engine.sync(engine.model)
    assert server.count("gtr_sums") == asked == 2  # later its workers check what arrives


def test_a_server_without_the_extension_is_refused(policy: Any, server: FakeVLLM) -> None:
    model, _ = policy
    server.fail = failing(1, "collective_rpc", 404)
    with pytest.raises(ValueError, match=r"can't take new weights .*python -m trl_gtr\.engines\.vllm_serve"):
        VLLMServer(Connection(server.url, 60), model, FileTransfer())


def test_an_unreachable_server_is_waited_for_and_told(policy: Any) -> None:
    model, _ = policy
    with pytest.raises(ConnectionError, match=r"no vLLM server at http://127.0.0.1:9 .*vllm_base_url"):
        VLLMServer(Connection("http://127.0.0.1:9", 0.05), model, FileTransfer())


def test_a_folder_that_the_server_does_not_see_is_told(
    engine: VLLMEngine, server: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.backend.transfer, "_file", "/elsewhere/weights.safetensors")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="vllm_sync_dir"):
        engine.backend._send("1")  # type: ignore[attr-defined]


def test_a_cache_of_old_weights_is_not_left_behind(engine: VLLMEngine, server: FakeVLLM) -> None:
    server.busy = 1  # the first time, requests are still under way
    engine.sync(engine.model)
    assert server.count("reset_prefix_cache") == 3
    assert server.count("gtr_load_file") == 2


def holds_the_weights_of(engine: VLLMEngine, server: FakeVLLM) -> bool:
    own = dict(engine.model.named_parameters())
    arrived = server.worker.weights.keys() == own.keys() and all(
        torch.equal(server.worker.weights[name], own[name]) for name in own
    )
    return arrived and server.worker.gtr_version == engine.version


def test_weights_arrive_over_the_network(streaming: VLLMEngine, server: FakeVLLM) -> None:
    with streaming.ready():
        assert len(streaming.generate(PROMPTS, IMAGES)) == 3
    assert holds_the_weights_of(streaming, server)
    stream = server.worker.gtr_stream
    with torch.no_grad():
        next(streaming.model.parameters()).add_(1)
    with streaming.ready():
        assert holds_the_weights_of(streaming, server)
    assert server.worker.gtr_stream is stream  # joined once
    assert server.count("gtr_receive") == 2


def test_a_restarted_server_joins_again(streaming: VLLMEngine, server: FakeVLLM) -> None:
    with streaming.ready():
        server.forget()
        streaming.generate(PROMPTS, IMAGES)
    assert holds_the_weights_of(streaming, server)


def test_a_server_that_fails_in_mid_stream_is_not_waited_for(streaming: VLLMEngine, server: FakeVLLM) -> None:
    server.worker = Receiver(server.worker.config, stop_after=3)
    streaming.backend.connection.timeout = 60  # type: ignore[attr-defined]
    streaming.backend.transfer.timeout = 60  # type: ignore[attr-defined]
    began = time.monotonic()
    with pytest.raises(EngineLost, match="out of memory"):
        streaming.sync(streaming.model)
    assert time.monotonic() - began < 30
    server.worker = Receiver(server.worker.config)
    streaming.sync(streaming.model)
    assert holds_the_weights_of(streaming, server)


def test_a_port_that_is_taken_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"Can't listen on port \d+: set `vllm_group_port`"):
            StreamTransfer("gloo", taken.getsockname()[1], 5)


def of_another_process(engine: VLLMEngine, transfer: WeightTransfer, server: FakeVLLM) -> VLLMEngine:
    """The engine that another process has after a sync by the first."""
    backend = VLLMServer(Connection(server.url, 60), engine.model, transfer)
    other = VLLMEngine(engine.policy, engine.model, backend, name=engine._name)
    other._syncs, backend.loaded = engine._syncs, engine.version
    backend.transfer.follow(lambda: engine.model.named_parameters(), "")
    return other


def test_processes_that_share_a_server_send_in_turn(streaming: VLLMEngine, server: FakeVLLM) -> None:
    streaming.sync(streaming.model)
    other = of_another_process(streaming, StreamTransfer("gloo", 0, 60), server)
    server.forget()  # noticed by the other process alone
    other.generate(PROMPTS, IMAGES)
    assert holds_the_weights_of(streaming, server)
    streaming.sync(streaming.model)
    assert holds_the_weights_of(streaming, server)
    assert server.count("gtr_receive") == 3  # none had to be repeated
    other.close()


def test_only_one_process_sends_again(engine: VLLMEngine, server: FakeVLLM) -> None:
    engine.sync(engine.model)
    server.forget()
    server.worker.gtr_claim("another process", engine.version, force=False)
    sends = threading.Timer(0.1, lambda: server.worker.gtr_use(engine.version, "another process"))
    sends.start()
    assert len(engine.generate(PROMPTS, IMAGES)) == 3
    assert server.count("gtr_load_file") == 1
    server.forget()
    server.worker.gtr_claim("a process that was killed", engine.version, force=False)
    engine.backend.connection.timeout = 3  # type: ignore[attr-defined]
    with pytest.raises(EngineLost, match="got no weights from the process that began"):
        engine.generate(PROMPTS, IMAGES)
    engine.backend.connection.timeout = 60  # type: ignore[attr-defined]
    engine.sync(engine.model)  # the next run
    assert holds_the_weights_of(engine, server)


def test_a_server_that_does_not_know_how_is_not_waited_for(streaming: VLLMEngine, server: FakeVLLM) -> None:
    streaming.backend.transfer.timeout = 60  # type: ignore[attr-defined]
    began, server.fail = time.monotonic(), failing_method("gtr_receive")
    with pytest.raises(EngineLost, match="failed 3 times"):
        streaming.sync(streaming.model)
    assert time.monotonic() - began < 30


def test_what_is_wrong_with_the_weights_is_no_fault_of_the_server(streaming: VLLMEngine, server: FakeVLLM) -> None:
    def weights() -> Iterator[Any]:
        yield from list(streaming.model.named_parameters())[:3]
        raise MemoryError("the merged layer")

    streaming.backend.transfer.timeout = 60  # type: ignore[attr-defined]
    began = time.monotonic()
    with pytest.raises(MemoryError, match="the merged layer"):
        streaming.backend.load(weights, "1")
    assert time.monotonic() - began < 30
    streaming.sync(streaming.model)
    assert holds_the_weights_of(streaming, server)


@pytest.mark.parametrize("fault", [EngineLost("gone"), ValueError("no room: set `vllm_sync_dir`")])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_processes_learn_why_process_0_could_not_send(
    rank: int, fault: Exception, engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def refuse(*_: Any) -> None:
        raise fault

    def raise_first(own: Exception | None) -> None:
        told.append(own)
        raise fault

    processes = SimpleNamespace(rank=rank, raise_first=raise_first)
    monkeypatch.setattr(engine.backend, "processes", processes)
    monkeypatch.setattr(engine.backend.transfer, "offer", refuse)  # type: ignore[attr-defined]
    with pytest.raises(type(fault), match=str(fault)):
        engine.sync(engine.model)
    [own] = told
    assert isinstance(own, type(fault)) if rank == 0 else own is None
    assert own is None or str(own) == str(fault)


def test_requests_do_not_wait_for_a_hanging_server_one_after_another(engine: VLLMEngine, server: FakeVLLM) -> None:
    """Its HTTP side lives and its engine hangs: sixteen requests take as long as one."""
    hang = threading.Event()

    def answer(path: str, body: dict[str, Any]) -> Any:
        if path != "/health":
            hang.wait(60)

    with engine.ready():
        server.answer = answer  # type: ignore[method-assign]
        engine.backend.connection.timeout = 1  # type: ignore[attr-defined]
        began = time.monotonic()
        with ThreadPoolExecutor(16) as threads:
            asked = [threads.submit(engine.respond, PROMPTS[0], IMAGES[0], seed) for seed in range(16)]
        assert all(isinstance(each.exception(), EngineLost) for each in asked)
        assert time.monotonic() - began < 12  # one after another would be 16 and more
        hang.set()


def test_a_signal_ends_the_wait_for_a_hanging_server(engine: VLLMEngine, server: FakeVLLM) -> None:
    hang, stopped = threading.Event(), threading.Event()

    def answer(path: str, body: dict[str, Any]) -> Any:
        stopped.set()  # the signal comes while it waits
        hang.wait(60)

    with engine.ready():
        server.answer = answer  # type: ignore[method-assign]
        engine.backend.connection.stopped = stopped.is_set  # type: ignore[attr-defined]
        began = time.monotonic()
        with pytest.raises(EngineLost, match="The run was stopped while it waited"):
            engine.generate(PROMPTS, IMAGES)
        assert time.monotonic() - began < 30
        hang.set()


def test_requests_that_found_no_place_are_not_begun_after_a_failure(
    policy: Any, server: FakeVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that hangs would let each round of them wait."""
    monkeypatch.setattr(vllm_server, "_MAX_CONNECTIONS", 2)
    monkeypatch.setattr(vllm_server, "_ATTEMPTS", 1)
    engine = engine_with(FileTransfer(str(tmp_path)), policy, server)
    cancelled = threading.Event()
    asked = itertools.count()
    cancel = Future.cancel

    def fail(path: str, body: dict[str, Any]) -> int | None:
        if "generate" in path and next(asked):  # all but the first wait until those without a place are cancelled
            cancelled.wait(10)
            cancelled.set()
        return 500 if "generate" in path else None

    def cancel_the_last(future: Future[Any]) -> bool:
        done = cancel(future)
        if future is last[-1]:
            cancelled.set()
        return done

    last: list[Future[Any]] = []
    submit = engine.backend._pool.submit  # type: ignore[attr-defined]
    monkeypatch.setattr(
        engine.backend._pool,  # type: ignore[attr-defined]
        "submit",
        lambda *each: last.append(submit(*each)) or last[-1],
    )
    monkeypatch.setattr(Future, "cancel", cancel_the_last)
    with engine.ready():
        server.fail = fail
        with pytest.raises(EngineLost, match="1 times in a row"):
            engine.generate(some_prompts(24), some_images(24))
        assert server.count("generate") <= 3  # two places, and the one that the first left
    engine.close()


@pytest.mark.parametrize("page", [b"OK", b"", b"<html>come back later</html>", b'{"status": "starting"}'])
def test_a_page_of_something_in_between_is_no_answer(page: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection("http://127.0.0.1:9", 0.0)
    monkeypatch.setattr(connection, "_read", lambda *_: page)
    connection.wait()  # whatever its words, it is up
    with pytest.raises(ServerLost, match="it answered"):
        connection.call("gtr_state")


@pytest.mark.parametrize("wrong", [None, {"results": []}, {"results": [None]}, {"results": None}, ["x"]])
@pytest.mark.parametrize("asked", ["gtr_claim", "gtr_use", "gtr_state", "gtr_sums", "reset_prefix_cache"])
def test_what_something_in_between_answers_is_asked_for_again(
    asked: str, wrong: Any, engine: VLLMEngine, server: FakeVLLM
) -> None:
    real, once = server.answer, [wrong]

    def answer(path: str, body: dict[str, Any]) -> Any:
        told = (asked in path or asked == body.get("method")) and once
        return once.pop() if told else real(path, body)

    server.answer = answer  # type: ignore[method-assign]
    with engine.ready():
        assert len(engine.generate(PROMPTS[:1], IMAGES[:1])) == 1
    assert not once


@pytest.mark.parametrize("wrong", [None, {"results": []}, {"results": [None]}])
def test_what_is_no_config_is_told(wrong: Any, policy: Any, server: FakeVLLM) -> None:
    server.answer = lambda path, body: wrong  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="can't take new weights"):
        VLLMServer(Connection(server.url, 60), policy[0], FileTransfer())


def test_what_is_no_response_is_asked_for_again(engine: VLLMEngine, server: FakeVLLM) -> None:
    real, wrong = server.answer, [{"choices": []}, {"status": "starting"}]

    def answer(path: str, body: dict[str, Any]) -> Any:
        return wrong.pop() if "generate" in path and wrong else real(path, body)

    server.answer = answer  # type: ignore[method-assign]
    with engine.ready():
        assert len(engine.generate(PROMPTS[:1], IMAGES[:1])) == 1
    assert not wrong


def test_any_process_knows_that_something_was_loaded(
    engine: VLLMEngine, server: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has followed the first finds that it can't send the weights again: the run is saved."""
    engine.sync(engine.model)
    other = of_another_process(engine, FileTransfer(), server)
    processes = SimpleNamespace(rank=1, raise_first=lambda fault: None, gather=lambda own: ["no such file"])
    monkeypatch.setattr(other.backend, "processes", processes)
    other.backend.load(lambda: engine.model.named_parameters(), engine.version)
    server.forget()
    with pytest.raises(EngineLost, match="The vLLM server can't read no such file"):
        other.generate(PROMPTS, IMAGES)
    other.close()


def test_what_refuses_in_place_of_a_server_is_waited_out_if_it_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [Refused("HTTP 404"), Refused("HTTP 404"), Refused("HTTP 404"), b""]

    def read(*_: Any) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    connection = Connection("http://127.0.0.1:9", 60.0)
    monkeypatch.setattr(connection, "_read", read)
    with pytest.raises(Refused, match="HTTP 404"):  # at the start it is a wrong address, and told at once
        connection.wait()
    connection.wait(restarting=True)
    assert not answers


def test_nobody_waits_for_a_server_once_the_run_is_to_end() -> None:
    began, connection = time.monotonic(), Connection("http://127.0.0.1:9", 600.0, stopped=lambda: True)
    with pytest.raises(EngineLost, match="The run was stopped while it waited"):
        connection.wait()
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("part", ["offer", "send"])
def test_weights_that_can_no_longer_be_brought_end_a_run_that_has_learned(
    part: str, engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise NotShared("no room in /dev/shm")

    with monkeypatch.context() as at_start:
        at_start.setattr(engine.backend.transfer, part, refuse)  # type: ignore[attr-defined]
        with pytest.raises(EngineRefused, match="no room"):
            engine.sync(engine.model)
    engine.sync(engine.model)
    monkeypatch.setattr(engine.backend.transfer, part, refuse)  # type: ignore[attr-defined]
    with pytest.raises(EngineLost, match="no room"):
        engine.sync(engine.model)


def test_a_mistake_of_ours_is_not_taken_for_a_lost_server(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: Any) -> None:
        raise ValueError("too many values to unpack")

    engine.sync(engine.model)
    monkeypatch.setattr(engine.backend.transfer, "send", mistaken)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="too many values"):
        engine.sync(engine.model)


def test_a_run_does_not_use_what_another_has_loaded(engine: VLLMEngine, server: FakeVLLM) -> None:
    """Both send at the same time: the one that comes second must send again."""
    load, others = server.worker.gtr_load, [1]

    def load_and_let_another_claim(weights: Any) -> None:
        load(weights)
        if others:
            others.clear()
            server.worker.gtr_claim("another run", "its version", force=True)

    server.worker.gtr_load = load_and_let_another_claim  # type: ignore[method-assign]
    engine.sync(engine.model)
    assert server.count("gtr_load_file") == 2
    assert holds_the_weights_of(engine, server)


def test_a_process_that_cannot_send_lets_others(engine: VLLMEngine, server: FakeVLLM) -> None:
    engine.backend.transfer._file = "/elsewhere"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="vllm_sync_dir"):
        engine.backend._send("1")  # type: ignore[attr-defined]
    assert server.worker.gtr_sender == ""


def test_a_request_costs_one_look_at_the_servers_state(engine: VLLMEngine, server: FakeVLLM) -> None:
    with engine.ready():
        looks = server.count("gtr_state")
        for seed in range(4):
            engine.respond(PROMPTS[0], IMAGES[0], seed)
    assert server.count("gtr_state") - looks == 4


def test_files_of_a_killed_run_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_weight_files, "_IN_MEMORY", str(tmp_path))
    kill_itself = (
        "from trl_gtr.engines import vllm_weight_files as files; import os, sys; files._IN_MEMORY = sys.argv[1]"
    )
    kill_itself += "; folder = files.ScratchFolder(); os.kill(os.getpid(), 9)"
    running = ScratchFolder()
    subprocess.run([sys.executable, "-c", kill_itself, str(tmp_path)], check=False, timeout=60)
    assert len(list(tmp_path.iterdir())) == 2
    later = ScratchFolder()
    assert set(tmp_path.iterdir()) == {running.path, later.path}
    for folder in (running, later):
        folder.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(ValueError, match=r"take 0\.00 GiB.*vllm_sync_dir"):
        write_weights([("a", torch.zeros(2**18 + 1))], tmp_path / "weights")
    assert write_weights([("a", torch.zeros(2**10))], tmp_path / "weights").is_file()
