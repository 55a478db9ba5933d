"""A stand-in for the part of the Hugging Face Hub's HTTP API that an upload uses: repositories, LFS objects, commits.

What is committed is kept in `files`, by repository and path, so that a test can look at what would be on the hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = (".safetensors", ".parquet", ".png", ".bin")
SHA = "0" * 40


class HubStandIn:
    """Serves on a free port of this machine while open."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.cards: list[str] = []
        self.tokens: set[str] = set()
        self.unknown: list[str] = []
        """Requests that nobody answered."""
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> HubStandIn:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> Any:
        """The JSON to answer with; `None` for what this hub doesn't know."""
        if (method, path) == ("POST", "/api/repos/create"):
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.files.setdefault(name, {})
            return {"url": f"{self.url}/{name}", "name": name, "id": name}
        if (method, path) == ("POST", "/api/validate-yaml"):
            self.cards.append(json.loads(body)["content"])
            return {"errors": [], "warnings": []}
        if method == "PUT" and path.startswith("/upload/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/upload/")
            self.objects[path.removeprefix("/upload/")] = body
            return {}
        if match := re.fullmatch(r"/(.+/.+)\.git/info/lfs/objects/batch", path):
            asked = json.loads(body)["objects"]
            return {
                "transfer": "basic",
                "objects": [
                    one | {"actions": {"upload": {"href": f"{self.url}/upload/{one['oid']}"}}} for one in asked
                ],
            }
        if match := re.fullmatch(r"/api/models/(.+/[^/]+)/preupload/main", path):
            asked = json.loads(body)["files"]
            modes = {one["path"]: "lfs" if one["path"].endswith(LARGE) else "regular" for one in asked}
            return {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
        if match := re.fullmatch(r"/api/models/(.+/[^/]+)/commit/main", path):
            self._commit(self.files[match[1]], [json.loads(line) for line in body.splitlines()])
            return {"commitUrl": f"{self.url}/{match[1]}/commit/{SHA}", "commitOid": SHA, "success": True}
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/main)?", path):
            return {"id": match[1], "modelId": match[1], "sha": SHA, "siblings": [], "private": False, "tags": []}
        return None

    def _commit(self, files: dict[str, bytes], operations: list[dict[str, Any]]) -> None:
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization"):
            self.hub.tokens.add(self.headers["Authorization"])
        path = self.path.partition("?")[0]
        answer = self.hub.answer(self.command, path, body)
        if answer is None:
            self.hub.unknown.append(f"{self.command} {path}")
        data = json.dumps(answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_HEAD = _serve

    def log_message(self, *_: object) -> None:
        pass
