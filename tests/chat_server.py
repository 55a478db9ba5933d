"""A real HTTP server on loopback that speaks the chat-completions protocol, each reply scripted by the test.

with ChatServer(status(503), says("hello")) as server:
    ...  # the first request gets a 503, all further ones "hello"
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Seen:
    """One request as it came over the wire."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    text: str

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.text)


Step = Callable[["Handler", Seen], None]


class ChatServer:
    """Plays `steps` in order, the last one for ever; requests for the list of models don't count.

    With `key`, any other key is answered with 401, in a text that repeats it, as careless servers do.
    """

    def __init__(self, *steps: Step, key: str | None = None, models: tuple[str, ...] = ("test-model",)):
        self.steps, self.key, self.models = steps, key, models
        self.seen: list[Seen] = []
        self.released = threading.Event()  # ends every hanging step
        self.in_flight = self.most_in_flight = self.hung_up = 0
        self.changed = threading.Condition()
        self._http = _Http(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.chat = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def __enter__(self) -> ChatServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def next_step(self, seen: Seen) -> Step:
        with self.changed:
            self.seen.append(seen)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self.changed.notify_all()
            return self.steps[min(len(self.seen), len(self.steps)) - 1]

    def ended(self) -> None:
        with self.changed:
            self.in_flight -= 1
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Until a condition on this server's counts holds."""
        with self.changed:
            assert self.changed.wait_for(condition, seconds), "the server never got there"


class _Http(ThreadingHTTPServer):
    request_queue_size = 256  # 5 else: a burst of connections on a busy machine would find no place and be cut


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def end_headers(self) -> None:
        # One connection a request: a client that reuses one just as it is closed would see a fault that no test wrote.
        self.send_header("Connection", "close")
        super().end_headers()

    @property
    def chat(self) -> ChatServer:
        return self.server.chat  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass

    def _given_key(self) -> str:
        return self.headers.get("api-key") or (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _wrong_key(self) -> bool:
        if self.chat.key in (None, self._given_key()):
            return False
        self.send(401, {"error": {"message": f"Incorrect API key provided: {self._given_key()}", "code": "invalid"}})
        return True

    def do_GET(self) -> None:
        if self._wrong_key():
            return
        if self.path.partition("?")[0].endswith("/models"):
            listed = [{"id": model, "object": "model", "created": 0, "owned_by": "us"} for model in self.chat.models]
            self.send(200, {"object": "list", "data": listed})
        else:
            self.send(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self._wrong_key():
            return
        seen = Seen(self.path, {name.lower(): value for name, value in self.headers.items()}, text)
        step = self.chat.next_step(seen)
        try:
            step(self, seen)
        except (BrokenPipeError, ConnectionResetError):
            pass  # a client that gave up: that is what some tests are about
        finally:
            self.chat.ended()

    def send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def completion(
    content: Any, *, finish: str = "stop", tool_calls: list[Any] | None = None, usage: Any = (100, 20), **message: Any
) -> dict[str, Any]:
    """The body of a reply; `usage` in (prompt, answer) tokens, `None` to leave it out."""
    said = {"role": "assistant", "content": content, **message}
    if tool_calls:
        said["tool_calls"] = tool_calls
    body: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "test-model",
        "choices": [{"index": 0, "message": said, "finish_reason": finish}],
    }
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    return body


def says(content: Any, **options: Any) -> Step:
    """An ordinary reply: a text, or an object to be written as JSON."""
    text = content if content is None or isinstance(content, str) else json.dumps(content)
    return lambda handler, _: handler.send(200, completion(text, **options))


def calls_tool(name: str, arguments: Any, count: int = 1) -> Step:
    """A reply that asks for a tool; arguments as an object or as raw text."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"type": "function", "function": {"name": name, "arguments": text}}
    calls = [{"id": f"call_{i}", **call} for i in range(count)]
    return lambda handler, _: handler.send(200, completion(None, finish="tool_calls", tool_calls=calls))


def raw(data: bytes) -> Step:
    """A 200 with any body."""
    return lambda handler, _: handler.send(200, data)


def status(number: int, message: str = "scripted", headers: dict[str, str] | None = None, **error: Any) -> Step:
    return lambda handler, _: handler.send(number, {"error": {"message": message, **error}}, headers)


def hangs(handler: Handler, _: Seen) -> None:
    """Never answers."""
    handler.chat.released.wait(60)
    handler.close_connection = True


def redirects(handler: Handler, _: Seen) -> None:
    """Sends the client to where it is already."""
    handler.send(307, b"", {"Location": handler.path})


def waits_for_hang_up(handler: Handler, _: Seen) -> None:
    """Never answers, and notices when the client closes the connection."""
    assert handler.connection.recv(1) == b""
    with handler.chat.changed:
        handler.chat.hung_up += 1
    handler.close_connection = True


def cuts(handler: Handler, _: Seen) -> None:
    """Promises more than it sends, then drops the connection."""
    handler.send_response(200)
    handler.send_header("Content-Length", "5000")
    handler.end_headers()
    handler.wfile.write(b'{"id": "chatcmpl-1", "choices": [{"mess')
    handler.close_connection = True


def drips(handler: Handler, _: Seen) -> None:
    """A byte now and then, for ever: no single read ever times out."""
    handler.send_response(200)
    handler.send_header("Content-Length", "5000")
    handler.end_headers()
    while not handler.chat.released.wait(0.02):
        handler.wfile.write(b" ")
        handler.wfile.flush()
    handler.close_connection = True


def floods(handler: Handler, _: Seen) -> None:
    """An answer of 10 MB."""
    handler.send(200, completion("x" * 10_000_000))


def waits(event: threading.Event, then: Step) -> Step:
    """Answers once the test says so."""

    def step(handler: Handler, seen: Seen) -> None:
        assert event.wait(30)
        then(handler, seen)

    return step
