"""A local server for the part of the Hugging Face hub's HTTP API that the kit uses.

It describes models, takes uploads (git-LFS, "basic" transfers) and commits, and serves files. Its answers follow the
sources of the hub's client (huggingface_hub 2.4, 2026-11). It has no Xet transfers, so clients need
HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

USER = "ann"
"""The user of every token."""
TOKEN, READER = "hf_" + "a" * 34, "hf_" + "b" * 34
NAME = "ann/tuned"
_FIRST = hashlib.sha1().hexdigest()


@dataclass
class Repository:
    """A model repository.

    Attributes:
        private: Whether it was created private.
        commits: sha -> the files at that commit, in order.
        heads: branch -> the sha of its newest commit.
        messages: The commit messages, in order.
    """

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {_FIRST: {}})
    heads: dict[str, str] = field(default_factory=lambda: {"main": _FIRST})
    messages: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The sha of the newest commit of main."""
        return self.heads["main"]

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the newest commit of main."""
        return self.commits[self.head]

    @property
    def branches(self) -> dict[str, dict[str, bytes]]:
        """The files of the newest commit of each branch."""
        return {branch: self.commits[sha] for branch, sha in self.heads.items()}

    def commit(self, files: dict[str, bytes], message: str, branch: str = "main") -> str:
        """Adds a commit and returns its sha."""
        sha = hashlib.sha1(f"{self.heads[branch]} {message} {sorted(files)}".encode()).hexdigest()
        self.commits[sha] = files
        self.heads[branch] = sha
        self.messages.append(message)
        return sha


@dataclass
class Hub:
    """The state of the server, and the requests it received.

    Attributes:
        url: The value for HF_ENDPOINT.
        paths: The paths of all requests.
        models: Model name -> the answer about it.
        roles: Token -> its role, "write" or "read", or its permissions by user, organisation or model.
        organisations: Organisation of the user -> the user's role there.
        repositories: Name -> repository.
        objects: sha256 -> uploaded file.
        card_errors: The errors that card validation returns.
        lost: Called with the path of a handled request; if true, the connection is closed without an answer.
        fault: Called before each request with method and path; a returned status and headers are the answer.
    """

    url: str = ""
    paths: list[str] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, str | dict[str, list[str]]] = field(default_factory=dict)
    organisations: dict[str, str] = field(default_factory=dict)
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    card_errors: list[dict[str, str]] = field(default_factory=list)
    lost: Callable[[str], bool] = lambda path: False
    fault: Callable[[str, str], tuple[int, dict[str, str]] | None] = lambda method, path: None


class _Refusal(Exception):
    def __init__(self, status: int, text: str, headers: dict[str, str] | None = None, **more: Any) -> None:
        super().__init__(text)
        self.status, self.headers, self.content = status, headers or {}, {"error": text, **more}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.paths.append(path)
        try:
            if (failed := self.hub.fault(self.command, path)) is not None:
                raise _Refusal(failed[0], "a fault of the test", failed[1])
            answer = self._answer(path, body)
        except _Refusal as refusal:
            return self._send(refusal.status, json.dumps(refusal.content).encode(), refusal.headers)
        if self.hub.lost(path):
            return self.connection.close()
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self._send(200, raw, {"X-Repo-Commit": self._commit_of(path)} if "/resolve/" in path else {})

    do_GET = do_POST = do_PUT = do_HEAD = _serve

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        kinds = {"Content-Type": "application/json", "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
        for name, value in {**kinds, **headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        with contextlib.suppress(ConnectionError):  # the client was killed
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def _role(self) -> str | dict[str, list[str]] | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return self.hub.roles.get(token)

    def _writable(self, name: str) -> Repository:
        if self._role() in ("read", None) or name.partition("/")[0] != USER:
            raise _Refusal(403, f"You don't have the required permissions to write to {name}")
        return self._repository(name)

    def _repository(self, name: str) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and self._role() is None):
            raise _Refusal(401, "Repository not found", {"X-Error-Code": "RepoNotFound"})
        return repository

    def _commit_of(self, path: str) -> str:
        name, _, rest = path.strip("/").partition("/resolve/")
        repository, revision = self._repository(name), unquote(rest.partition("/")[0])
        if revision not in {*repository.commits, *repository.heads}:
            raise _Refusal(404, f"Invalid rev id: {revision}", {"X-Error-Code": "RevisionNotFound"})
        return repository.heads.get(revision, revision)

    def _answer(self, path: str, body: bytes) -> Any:
        hub, parts = self.hub, path.strip("/").split("/")
        if path == "/api/whoami-v2":
            if (role := self._role()) is None:
                raise _Refusal(401, "Invalid user token.")
            token: dict[str, Any] = {"role": role}
            if isinstance(role, dict):
                scopes = [{"entity": {"name": name}, "permissions": allowed} for name, allowed in role.items()]
                token = {"role": "fineGrained", "fineGrained": {"global": [], "scoped": scopes}}
            orgs = [{"name": name, "roleInOrg": allowed} for name, allowed in hub.organisations.items()]
            return {"type": "user", "name": USER, "orgs": orgs, "auth": {"accessToken": token}}
        if path == "/api/validate-yaml":  # validates a card
            if hub.card_errors:
                raise _Refusal(400, "invalid", errors=hub.card_errors, warnings=[])
            return {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if "/resolve/" in path:
            file = path.partition("/resolve/")[2].partition("/")[2]
            files = self._repository("/".join(parts[:2])).commits[self._commit_of(path)]
            if file not in files:
                raise _Refusal(404, "Entry not found", {"X-Error-Code": "EntryNotFound"})
            return files[file]
        if path.endswith(".git/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            return {"transfer": "basic", "objects": [self._slot(each) for each in wanted]}
        if parts[0] == "lfs":
            if hashlib.sha256(body).hexdigest() != parts[1]:
                raise _Refusal(400, "the content does not match its hash")
            hub.objects[parts[1]] = body
            return {}
        name = "/".join(parts[2:4])
        if len(parts) > 4 and parts[4] == "preupload":
            self._writable(name)
            return {"files": [self._mode(each) for each in json.loads(body)["files"]]}
        if len(parts) > 4 and parts[4] == "commit":
            return self._commit(name, unquote(parts[5]), [json.loads(line) for line in body.splitlines()])
        if len(parts) > 4 and parts[4] == "branch":
            if (branch := unquote(parts[5])) in (heads := self._writable(name).heads):
                raise _Refusal(409, f"Reference already exists: {branch}")
            heads[branch] = heads["main"]
            return {}
        if len(parts) > 4 and parts[4] == "tree":
            listed = sorted(self._repository(name).commits[self._commit_of(f"{name}/resolve/{parts[5]}")].items())
            return [{"type": "file", "path": file, "size": len(raw), "oid": "0" * 40} for file, raw in listed]
        if name in hub.repositories:
            repository, branch = self._repository(name), unquote(parts[5]) if len(parts) > 4 else "main"
            sha = self._commit_of(f"{name}/resolve/{branch}")
            files = [{"rfilename": file} for file in sorted(repository.commits[sha])]
            return {"id": name, "sha": sha, "private": repository.private, "siblings": files}
        name = path.removeprefix("/api/models/").partition("/revision/")[0]
        if name not in hub.models:
            raise _Refusal(404, "Repository not found", {"X-Error-Code": "RepoNotFound"})
        return hub.models[name]

    def _create(self, asked: dict[str, Any]) -> Any:
        owner = asked.get("organization") or USER
        if self._role() in ("read", None) or owner != USER:
            raise _Refusal(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        name = f"{owner}/{asked['name']}"
        if name in self.hub.repositories:
            raise _Refusal(409, "You already created this model repo", url=f"{self.hub.url}/{name}")
        self.hub.repositories[name] = Repository(asked.get("private") or asked.get("visibility") == "private")
        return {"url": f"{self.hub.url}/{name}"}

    @staticmethod
    def _mode(file: dict[str, Any]) -> dict[str, Any]:
        large = file["path"].endswith((".safetensors", ".gguf", ".bin"))
        return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

    def _slot(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.hub.objects:
            return wanted
        return wanted | {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}}

    def _commit(self, name: str, branch: str, lines: list[dict[str, Any]]) -> Any:
        repository, header = self._writable(name), lines[0]["value"]
        if header.get("parentCommit") not in (None, repository.heads[branch]):
            raise _Refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repository.branches[branch])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise _Refusal(400, f"{line['key']}?")
        sha = repository.commit(files, header["summary"], branch)
        return {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"}


@contextlib.contextmanager
def run_hub() -> Iterator[Hub]:
    """Runs a hub in a thread of this process."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
