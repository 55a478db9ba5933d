"""`trl-gtr play --page`: a game as a page, served to this machine only."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..correctors.openai.corrector import data_url
from ..evaluation.game import Game, PlayedStep, readable, written_response
from ..responses.safe_text import storable
from .play_terminal import verdict

if TYPE_CHECKING:
    from ..evaluation.agents import Agent

PAGE = Path(__file__).with_name("play.html")
LOOPBACK = "127.0.0.1"
MAX_BODY = 100_000


class PageGame:
    """A game as JSON: its state, and what the page's buttons do. Thread-safe.

    Args:
        game: The game to play.
        agent: Plays; `None` lets the person play.
    """

    def __init__(self, game: Game, agent: Agent | None) -> None:
        self.game, self.agent = game, agent
        self.steps: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def state(self) -> dict[str, Any]:
        with self._lock:
            return self._state()

    def act(self, action: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a button says and return the new state, with an `error` if it was not possible."""
        with self._lock:
            if action == "deal":
                self.game.deal()
                self.steps = []
            elif action == "hint":
                return self._state() | {"hint": self.game.hint() or "The expert has no answer here."}
            elif not self.game.ended:
                try:
                    self._step(given)
                except ValueError as error:
                    return self._state() | {"error": str(error)}
            return self._state()

    def _step(self, given: Mapping[str, Any]) -> None:
        game, has_thought = self.game, True
        if self.agent is not None:
            (text,) = self.agent.respond([game.prompt], [game.image], [game.episode.info])
        else:
            thought = {str(key): str(value) for key, value in given.get("thought", {}).items()}
            has_thought = any(value.strip() for value in thought.values())
            text = written_response(game.task.format, thought, str(given.get("action", "")))
            if not game.is_legal(text):
                raise ValueError("This action is not legal here.")
        self.steps.append(_shown(game.step(text), has_thought))

    def _state(self) -> dict[str, Any]:
        game, person = self.game, self.agent is None
        return {
            "task": game.task.name,
            "image": data_url(game.image),
            "rules": game.rules,
            "prompt": game.prompt,
            "fields": [{"key": each.key, "help": each.help} for each in game.task.format.fields] if person else [],
            "actions": list(game.task.legal_actions(game.episode.info)) if person and not game.ended else [],
            "person": person,
            "ended": game.ended,
            "succeeded": game.ended and game.succeeded,
            "score": f"{game.won} of {game.played} deals won",
            "steps": self.steps,
        }


def _shown(step: PlayedStep, has_thought: bool) -> dict[str, Any]:
    response = step.transition.response
    return {
        "thought": {key: readable(value) for key, value in response.fields.items()} if has_thought else {},
        "action": response.action or "",
        "error": response.error or "",
        "substitute": step.transition.substitute or "",
        "reward": step.transition.reward,
        "verdict": [words for words, _ in verdict(step)] if has_thought else [],
        "true": bool(step.judgement) and all(step.judgement.values()) and has_thought,
    }


def make_server(game: PageGame, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """A server on loopback and the page's address. Only requests with its secret path get an answer."""
    secret = secrets.token_urlsafe(16)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self._path() == "":
                self._send(PAGE.read_bytes(), "text/html; charset=utf-8")
            elif self._path() == "state":
                self._send_json(game.state())
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def do_POST(self) -> None:
            action, length = self._path(), int(self.headers.get("Content-Length") or 0)
            if action not in ("step", "deal", "hint") or length > MAX_BODY:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                given = json.loads(self.rfile.read(length) or b"{}")
            except ValueError:
                given = None
            if isinstance(given, dict) and isinstance(given.get("thought", {}), dict):
                self._send_json(game.act(action, given))
            else:
                self.send_error(HTTPStatus.BAD_REQUEST)

        def _path(self) -> str | None:
            """What follows the secret; `None` without it, or under another host's name (DNS rebinding)."""
            start = f"/{secret}/"
            host = (self.headers.get("Host") or "").partition(":")[0]
            known = self.path.startswith(start) and host in (LOOPBACK, "localhost")
            return self.path.removeprefix(start) if known else None

        def _send_json(self, content: dict[str, Any]) -> None:
            self._send(storable(json.dumps(content, ensure_ascii=False)).encode(), "application/json")

        def _send(self, body: bytes, kind: str) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the terminal quiet."""

    server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    return server, f"http://{LOOPBACK}:{server.server_port}/{secret}/"


def serve(game: Game, agent: Agent | None, port: int = 0) -> None:
    """Serve a game until Ctrl-C."""
    server, address = make_server(PageGame(game, agent), port)
    print(f"Open {address} (Ctrl-C ends)", flush=True)
    with server:
        server.serve_forever()
