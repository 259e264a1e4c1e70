"""Exports on the Hugging Face hub, against a server on this machine that speaks its HTTP API."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, snapshot_download

from tests.exporting.test_export import make_run
from tests.support.child_processes import REPOSITORY, child_environment
from tests.support.hub import NAME, READER, TOKEN, Hub, Repository
from tpu_kit.cli import main
from tpu_kit.exporting.hub.repository import HubRepository, Pushed


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """An export's folder, with the files that a push reads."""
    return write_export(tmp_path / "out", "model.safetensors", "config.json")


def check_repository(name: str) -> None:
    HubRepository(name).check()


def write_export(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(os.urandom(100))
    (folder / "export.json").write_text(json.dumps({"format": "merged", "files": [*names]}))
    return folder


def push(folder: Path, name: str, private: bool = True) -> Pushed:
    return HubRepository(name, private).push({"": folder})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_adapter_is_exported_and_pushed(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "format=adapter", f"push={NAME}"]) == 0
    said = capsys.readouterr().out
    repository = hub.repositories[NAME]
    assert f"to be pushed to {hub.url}/{NAME}" in said
    assert f"pushed to {hub.url}/{NAME}/commit/{repository.head}" in said
    assert repository.private and len(repository.messages) == 1
    local = contents(tmp_path / "run" / "export" / "adapter")
    assert repository.files == local and "adapter_model.safetensors" in local
    assert contents(Path(snapshot_download(NAME, token=TOKEN))) == local
    assert TOKEN not in said and not any(TOKEN.encode() in content for content in local.values())


def test_a_later_export_replaces_the_earlier_one_in_one_commit(hub: Hub, exported: Path, tmp_path: Path) -> None:
    first = push(exported, NAME, private=False)
    repository = hub.repositories[NAME]
    repository.commit({**repository.files, "notes.txt": b"of the user", ".gitattributes": b"*"}, "by hand")
    parts = write_export(tmp_path / "parts", "model-1.safetensors", "model-2.safetensors", "config.json")
    second = push(parts, NAME)
    assert not repository.private and second.removed == ("model.safetensors",)
    assert repository.files == {**contents(parts), "notes.txt": b"of the user", ".gitattributes": b"*"}
    assert [first.sha, second.sha] == [sha for sha in repository.commits if sha in (first.sha, second.sha)]
    assert str(second).endswith(" MiB, which its history keeps; 1 files of the earlier export removed")


def test_files_of_somebody_else_are_not_overwritten(hub: Hub, exported: Path) -> None:
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit({"config.json": b"{}"}, "another model")
    with pytest.raises(ValueError, match=r"the repository has config.json, which no export of tpu_kit wrote: give"):
        push(exported, NAME)
    assert hub.repositories[NAME].files == {"config.json": b"{}"}


def test_a_repository_that_moves_on_is_not_overwritten(hub: Hub, exported: Path) -> None:
    def another(method: str, path: str) -> None:
        if path.endswith("/preupload/main"):
            hub.repositories[NAME].commit({"theirs.txt": b"1"}, "another job")

    hub.fault = another
    with pytest.raises(ValueError, match="the repository has changed meanwhile, so nothing was committed: look at it"):
        push(exported, NAME)
    assert hub.repositories[NAME].files == {"theirs.txt": b"1"}


@pytest.mark.parametrize(
    ("status", "path", "text"),
    [
        (402, "/api/repos/create", "the quota of the account is used up"),
        ((403, "Private repository storage limit reached"), "/commit/main", "the quota of the account is used up"),
        (403, "/commit/main", "the token may not write there: log in with `hf auth login`"),
        (413, "/preupload/main", "a file is larger than the hub accepts"),
        (429, "/commit/main", "the hub limits the rate of requests: wait some minutes"),
        (400, "/commit/main", "the upload failed: "),
    ],
)
def test_a_refusal_is_one_line(hub: Hub, exported: Path, status: int | tuple[int, str], path: str, text: str) -> None:
    code, said = status if isinstance(status, tuple) else (status, "a fault of the test")
    hub.fault = lambda method, asked: (code, {"X-Error-Message": said}) if asked.endswith(path) else None
    with pytest.raises(ValueError) as error:
        push(exported, NAME)
    assert str(error.value).startswith(f"push={NAME}: {text}")
    assert "\n" not in str(error.value) and TOKEN not in str(error.value)


def test_what_is_read_needs_no_token_that_writes(hub: Hub) -> None:
    hub.fault = lambda method, asked: (403, {})
    repository = HubRepository(NAME, option="checkpoint.source")
    with pytest.raises(ValueError, match=r"the token may not read there: .* set HF_TOKEN to a token [(]on Kaggle"):
        repository.find()


@pytest.mark.parametrize("headers", [{"Retry-After": "7"}, {"ratelimit": '"api";r=0;t=7'}])
def test_a_limited_rate_is_waited_for(hub: Hub, exported: Path, headers: dict[str, str]) -> None:
    """In the requests that huggingface_hub does not repeat by itself."""
    waits, refused = list[float](), set[str]()

    def once(method: str, path: str) -> tuple[int, dict[str, str]] | None:
        if path in refused or not path.endswith(("/repos/create", "/models/ann/tuned", "/commit/main")):
            return None
        refused.add(path)
        return 429, headers

    hub.fault = once
    HubRepository(NAME, sleep=waits.append).push({"": exported})
    assert hub.repositories[NAME].files and waits == [7.0, 7.0, 7.0]


def test_a_card_that_the_hub_refuses(hub: Hub, exported: Path) -> None:
    (exported / "README.md").write_text("---\nlicense: none\n---\n")
    hub.card_errors.append({"message": '"license" must be one of [apache-2.0]'})
    with pytest.raises(ValueError, match=r'the upload failed: .* "license" must be one of \[apache-2.0\]$'):
        push(exported, NAME)
    assert hub.repositories[NAME].files == {}


def test_what_cannot_be_pushed_is_told_before_the_export(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_repository(NAME)
    for name, text in {
        "tuned": "push=tuned has no owner; write owner/name, as in your-name/tuned",
        "ann/a b": "push=ann/a b is no repository name",
        "bob/tuned": "push=bob/tuned: the token belongs to ann, not to bob",
    }.items():
        with pytest.raises(ValueError, match=text):
            check_repository(name)
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(ValueError, match="the token can only read: log in with `hf auth login`, or set HF_TOKEN"):
        check_repository(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "c" * 34)
    assert main(["export", str(tmp_path / "no run"), "format=adapter", f"push={NAME}"]) == 1
    assert f"push={NAME}: the token is invalid: log in" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set, or the hub did not answer: unset it"):
        check_repository(NAME)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="there is no token of the Hugging Face hub"):
        check_repository(NAME)


def push_killed_at(hub: Hub, exported: Path, ending: str) -> int:
    """Pushes in a process that is killed when it sends a request; returns its exit code."""
    source = (
        "from pathlib import Path; from tpu_kit.exporting.hub.repository import HubRepository; "
        f"HubRepository({NAME!r}).push({{'': Path({str(exported)!r})}})"
    )
    settings = {"HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": None, "HF_HUB_DISABLE_XET": "1"}
    environment = child_environment({**settings, "PYTHONPATH": str(REPOSITORY)})

    with subprocess.Popen([sys.executable, "-c", source], env=environment) as process:

        def kill(method: str, path: str) -> None:
            if path.endswith(ending):
                process.send_signal(signal.SIGKILL)
                process.wait()

        hub.fault = kill
        return process.wait()


def test_an_upload_cut_at_a_request_is_one_line_and_repeated(
    hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends after the request is done, before the answer."""
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)  # it tries again at once
    for request in REQUESTS:
        before, asked = contents(exported), len(hub.paths)
        hub.lost = lambda path, request=request: path.endswith(request) or (request == "/lfs" and "/lfs/" in path)  # type: ignore[misc]
        try:
            push(exported, NAME)
        except ValueError as error:
            assert str(error).startswith(f"push={NAME}: the hub cannot be reached: ") and "\n" not in str(error)
        assert len(hub.paths) > asked and contents(exported) == before
        assert hub.repositories.get(NAME, Repository()).files in ({}, before)
        hub.lost = lambda path: False
        push(exported, NAME)
        assert hub.repositories.pop(NAME).files == before


REQUESTS = ["/api/repos/create", f"/api/models/{NAME}", "/preupload/main", "/objects/batch", "/lfs", "/commit/main"]


@pytest.mark.parametrize("ending", REQUESTS)
def test_killed_at_a_request_and_repeated(hub: Hub, exported: Path, ending: str) -> None:
    if ending == "/lfs":
        ending += f"/{hashlib.sha256((exported / 'model.safetensors').read_bytes()).hexdigest()}"
    assert push_killed_at(hub, exported, ending) == -signal.SIGKILL
    before = hub.repositories.get(NAME, Repository()).files
    assert before in ({}, contents(exported))
    hub.fault = lambda method, path: None
    push(exported, NAME)
    assert hub.repositories[NAME].files == contents(exported)
