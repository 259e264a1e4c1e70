"""The part of the Hugging Face hub that describes models, on this machine."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What it answers, and what it was asked.

    Attributes:
        url: for HF_ENDPOINT.
        paths: of the requests.
        models: what it answers about a model, by its name.
    """

    url: str = ""
    paths: list[str] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def run_hub() -> Iterator[Hub]:
    """Runs one."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.paths.append(path)
            name = path.removeprefix("/api/models/").partition("/revision/")[0]
            text = json.dumps(hub.models.get(name, {"error": "what?"})).encode()
            self.send_response(200 if name in hub.models else 404)
            self.send_header("Content-Type", "application/json")
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
