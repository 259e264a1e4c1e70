"""The part of the Hugging Face hub that takes uploads and describes models, on this machine; it keeps what is asked."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What happened.

    Attributes:
        url: for HF_ENDPOINT.
        refuse: answer every call with 403.
        calls: method and path of each request, with the token that came with it.
        private: repositories that were made, and whether they are private.
        files: what was committed or put into its store, by name or hash.
        models: what it answers about a model, by its name.
    """

    url: str = ""
    refuse: bool = False
    calls: list[tuple[str, str, str | None]] = field(default_factory=list)
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def run_hub() -> Iterator[Hub]:
    """Runs one; small files go into the commit, safetensors into the store beside it."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self._take()
            path = self.path.partition("?")[0]
            if hub.refuse:
                return self._answer({"error": "no"}, 403)
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked.get('organization')}/{asked['name']}"
                hub.private[name] = asked.get("visibility") == "private" or asked.get("private", False)
                return self._answer({"url": f"{hub.url}/{name}"})
            if path == "/api/validate-yaml":
                return self._answer({"errors": [], "warnings": []})
            if "/preupload/" in path:
                names = [file["path"] for file in json.loads(body)["files"]]
                modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
                files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
                return self._answer({"files": files})
            if path.endswith("/info/lfs/objects/batch"):
                objects = [
                    one | {"actions": {"upload": {"href": f"{hub.url}/store/{one['oid']}"}}}
                    for one in json.loads(body)["objects"]
                ]
                return self._answer({"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")
            if "/commit/" in path:
                for line in body.splitlines():
                    part = json.loads(line)
                    if part["key"] == "file":
                        hub.files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
                    elif part["key"] == "lfsFile":
                        hub.files[part["value"]["path"]] = hub.files.pop(part["value"]["oid"])
                place = path.removeprefix("/api/models/").partition("/commit/")[0]
                url = f"{hub.url}/{place}/commit/{'0' * 40}"
                return self._answer({"success": True, "commitOid": "0" * 40, "commitUrl": url})
            return self._answer({"error": "what?"}, 404)

        def do_PUT(self) -> None:
            hub.files[self.path.rpartition("/")[2]] = self._take()
            self._answer({})

        def do_GET(self) -> None:
            self._take()
            name = self.path.partition("?")[0].removeprefix("/api/models/").partition("/revision/")[0]
            if name in hub.models and not hub.refuse:
                return self._answer(hub.models[name])
            self._answer({"error": "what?"}, 403 if hub.refuse else 404)

        def _take(self) -> bytes:
            given = self.headers.get("Authorization")
            hub.calls.append((self.command, self.path, given.removeprefix("Bearer ") if given else None))
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _answer(self, content: object, status: int = 200, kind: str = "application/json") -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
