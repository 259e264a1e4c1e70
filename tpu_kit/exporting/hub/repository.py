"""A repository of the Hugging Face hub: checks early that it can be written to, and commits all files at once.

huggingface_hub finds the token: HF_TOKEN, or the stored login. It is sent only to the hub.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tpu_kit.config.fields import hide_secrets
from tpu_kit.config.hub import check_repository_name
from tpu_kit.machine.chips import MIB
from tpu_kit.machine.hub import ask_hub_once
from tpu_kit.machine.upload_rate import keep_rate

T = TypeVar("T")

_LOGIN = (
    "log in with `hf auth login`, or set HF_TOKEN to a token with write permission (on Kaggle and Colab a secret of "
    "this name, which a notebook's cells.secrets reads)"
)
_INDEX = "export.json"  # names the files of an export
_EXPORTED = (".json", ".jinja", ".safetensors", ".gguf")  # suffixes of the files of exports
_HTTP = ("httpx", "httpx2", "requests")  # HTTP clients of huggingface_hub's versions, with their own errors
_PATIENCE, _WAITS = 300.0, 3  # the longest Retry-After to wait for, in seconds, and the number of waits


@dataclass(frozen=True)
class Pushed:
    """A commit on the hub.

    Attributes:
        url: address of the commit.
        sha: hash of the commit.
        bytes: size of its files; the repository has grown by at most this.
        removed: files of an earlier export that the commit removes.
    """

    url: str
    sha: str
    bytes: int
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        gone = f"; {len(self.removed)} files of the earlier export removed" if self.removed else ""
        return f"pushed to {self.url}, {self.bytes / MIB:,.1f} MiB, which its history keeps{gone}"


@dataclass(frozen=True)
class Head:
    """The newest commit of a branch: its hash and the names of its files."""

    sha: str
    files: frozenset[str]


@dataclass(frozen=True)
class HubRepository:
    """A branch of a model repository. Methods raise ValueError with one line that names the repository and the cause.

    Attributes:
        model_id: "owner/name".
        private: whether a new repository is private.
        revision: the branch, created if it does not exist; None = main.
        option: name of the option that names the repository, for errors.
        sleep: waits for a number of seconds.
    """

    model_id: str
    private: bool = True
    revision: str | None = None
    option: str = "push"
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    @property
    def url(self) -> str:
        """The address of the branch."""
        from huggingface_hub import HfApi

        return f"{HfApi().endpoint}/{self.model_id}" + (f"/tree/{self.revision}" if self.revision else "")

    def check(self) -> None:
        """Checks, before any work, that an export can be pushed; changes nothing.

        Raises:
            ValueError: the name is invalid, there is no valid token, the token cannot write there, or the repository
                belongs to somebody else. The repository has files of an export at its root that the kit did not write.
                Or the hub cannot be reached.
        """
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            check_repository_name(self.model_id)
            validate_repo_id(self.model_id)
        except (ValueError, HFValidationError) as error:
            raise ValueError(f"{self._named} {error}") from error
        if get_token() is None:
            raise ValueError(f"{self._named}: there is no token of the Hugging Face hub: {_LOGIN}")
        with self._explained("the token is invalid"):
            user = self._patiently(lambda: HfApi().whoami())
        if problem := _not_writable(user, self.model_id):
            raise ValueError(f"{self._named}: {problem}")
        head = self.find() or Head("", frozenset())
        exported = {name for name in head.files if name.endswith(_EXPORTED) or name in ("README.md", "Modelfile")}
        self._refuse_foreign(head, {name for name in exported if "/" not in name})

    def find(self) -> Head | None:
        """Returns the newest commit; None if the hub answers that the repository or branch does not exist."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        reads = self._explained("the repository cannot be read", writes=False)
        with reads, suppress(RepositoryNotFoundError, RevisionNotFoundError):
            return self._read()
        return None

    def open(self) -> Head:
        """Creates the repository and the branch if they do not exist; returns the newest commit."""
        from huggingface_hub import HfApi

        with self._explained("the repository cannot be created or read"):
            self._patiently(lambda: HfApi().create_repo(self.model_id, private=self.private, exist_ok=True))
            if branch := self.revision:
                self._patiently(lambda: HfApi().create_branch(self.model_id, branch=branch, exist_ok=True))
            return self._read()

    def read(self, head: Head, name: str) -> bytes | None:
        """Downloads a file of a commit to the hub's cache, and returns its content; None if there is no such file."""
        from huggingface_hub import HfApi

        if name not in head.files:
            return None
        with self._explained(f"its {name} cannot be read", writes=False):
            return Path(HfApi().hf_hub_download(self.model_id, name, revision=head.sha)).read_bytes()

    def fetch(self, head: Head, folder: str, to: Path) -> None:
        """Downloads `folder` of a commit to the local folder `to`/`folder`; continues an earlier download there."""
        from huggingface_hub import HfApi

        with self._explained("the download failed", writes=False):
            HfApi().snapshot_download(
                self.model_id, revision=head.sha, allow_patterns=f"{folder}/*", local_dir=to, max_workers=4
            )

    def commit(self, head: Head, files: Mapping[str, Path], removed: set[str], message: str) -> Pushed:
        """Uploads files, then makes a single commit; raises ValueError if the branch has moved on from `head`.

        Args:
            head: the parent commit.
            files: local paths by their names in the repository.
            removed: names of files to remove; names in `files`, or not in `head`, are ignored.
            message: title of the commit.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api, name, branch = HfApi(), self.model_id, self.revision
        gone = tuple(sorted(removed & head.files - {*files}))
        with self._explained("the upload failed"):
            # Hashes every file once, for the calls below.
            added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in files.items()]
            operations: list[Any] = [*added, *(CommitOperationDelete(path_in_repo=name) for name in gone)]
            seconds = self._patiently(
                lambda: _seconds_of(api.preupload_lfs_files, name, added, revision=branch, free_memory=False)
            )
            made = self._patiently(
                lambda: api.create_commit(
                    name, operations, commit_message=message, revision=branch, parent_commit=head.sha
                )
            )
        size = sum(one.upload_info.size for one in added)
        keep_rate(size, seconds)
        return Pushed(made.commit_url, made.oid, size, gone)

    def push(self, folders: Mapping[str, Path]) -> Pushed:
        """Pushes exports as a single commit; makes the repository and the branch if they do not exist.

        The commit removes all other files of earlier exports of the kit; files that the kit did not write stay.

        Args:
            folders: folders of `export.export`, with export.json, by their folder in the repository; "" is the root.

        Raises:
            ValueError: the repository has files of the same names that the kit did not write, has moved on meanwhile,
                or cannot be written to. The local folders stay complete.
        """
        head = self.open()
        files = {
            "/".join(filter(None, [place, path.relative_to(folder).as_posix()])): path
            for place, folder in folders.items()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        earlier = self._refuse_foreign(head, {*files})
        return self.commit(head, files, earlier, "Export by tpu_kit")

    def _refuse_foreign(self, head: Head, names: set[str]) -> set[str]:
        """Returns the files of the kit's exports in `head`; raises ValueError if other files have some of `names`."""
        earlier = set()
        for index in [name for name in head.files if name == _INDEX or name.endswith(f"/{_INDEX}")]:
            folder = index.removesuffix(_INDEX)
            with suppress(json.JSONDecodeError, KeyError, TypeError):
                listed = json.loads(self.read(head, index) or b"")["files"]
                earlier |= {index, *(f"{folder}{name}" for name in listed)}
        if foreign := sorted(head.files & names - earlier):
            raise ValueError(
                f"{self._named}: the repository has {', '.join(foreign[:5])}, which no export of tpu_kit wrote: give "
                "another name, or delete these files there"
            )
        return earlier

    def _read(self) -> Head:
        """Returns the newest commit of the branch; raises the hub's own errors."""
        from huggingface_hub import HfApi

        found = self._patiently(lambda: HfApi().model_info(self.model_id, revision=self.revision))
        return Head(str(found.sha), frozenset(one.rfilename for one in found.siblings or ()))

    @property
    def _named(self) -> str:
        """The repository as "OPTION=owner/name", for errors."""
        return f"{self.option}={self.model_id}"

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Returns the result of `ask`; repeats it up to `_WAITS` times if the hub asks to wait up to `_PATIENCE` s.

        Other errors of `ask`, and the error of the last try, are raised unchanged.
        """
        from huggingface_hub.errors import HfHubHTTPError

        for _ in range(_WAITS):
            try:
                return ask()
            except HfHubHTTPError as error:
                if (wait := _retry_after(error)) is None or wait > _PATIENCE:
                    raise
                self.sleep(wait)
        return ask()

    @contextmanager
    def _explained(self, what: str, writes: bool = True) -> Iterator[None]:
        """Turns the block's errors of the hub and network into ValueError with the cause.

        The first argument tells which action failed, such as "the upload failed", for other causes. `writes` is
        whether the token needs write permission, for the advice. Before the block, it tests if the hub is reachable.
        """
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        ask_hub_once()
        login, verb = (_LOGIN, "write") if writes else (_LOGIN.replace(" with write permission", ""), "read")
        try:
            yield
        except OfflineModeIsEnabled as error:
            raise ValueError(f"{self._named}: HF_HUB_OFFLINE is set, or the hub did not answer: unset it") from error
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else None
            wait, said = _retry_after(error), hide_secrets(str(error).strip().splitlines()[0])
            full = "the quota of the account is used up: make room, push to another account, or to a public repository"
            reason = {
                401: f"{what}: {login}",
                402: full,
                403: full if "storage" in str(error).lower() else f"the token may not {verb} there: {login}",
                412: "the repository has changed meanwhile, so nothing was committed: look at it, then push again",
                413: "a file is larger than the hub accepts",
                429: f"the hub limits the rate of requests: wait {f'{wait:.0f} s' if wait else 'some minutes'}",
            }.get(status or 0, f"{what}: {said}")
            reason = f"the hub answers {status}: try again later" if status and status >= 500 else reason
            raise ValueError(f"{self._named}: {reason}") from error
        except Exception as error:  # a ValueError is the hub's answer to a wrong card
            away = type(error).__module__.split(".")[0] in _HTTP or isinstance(error, ConnectionError | TimeoutError)
            if not away and not isinstance(error, OSError | ValueError):
                raise
            reason = f"the hub cannot be reached{_network()}" if away else what
            raise ValueError(f"{self._named}: {reason}: {hide_secrets(' '.join(str(error).split()))}") from error


def _not_writable(user: Mapping[str, Any], model_id: str) -> str:
    """Returns why the token cannot write to a repository, by the result of `whoami`; empty if it can."""
    token, owner = user.get("auth", {}).get("accessToken", {}), model_id.partition("/")[0]
    organisations = {one["name"]: one.get("roleInOrg") for one in user.get("orgs", ())}
    if token.get("role") == "read":
        return f"the token can only read: {_LOGIN}"
    if owner != user["name"] and owner not in organisations:
        return f"the token belongs to {', '.join([user['name'], *organisations])}, not to {owner}"
    if organisations.get(owner) == "read":
        return f"{user['name']} may only read in {owner}: ask its administrator for write permission, or take your name"
    if token.get("role") == "fineGrained" and (scopes := token.get("fineGrained", {}).get("scoped")) is not None:
        written = {one["entity"]["name"] for one in scopes if "repo.write" in one["permissions"]}
        if not written & {owner, model_id}:
            listed = ", ".join(sorted(written)) or "no repository"
            return f"the token may write only to {listed}: give it the permission repo.write for {owner}"
    return ""


def _seconds_of(function: Callable[..., object], *given: Any, **named: Any) -> float:
    """Calls a function, and returns its duration in seconds."""
    begun = time.monotonic()
    function(*given, **named)
    return time.monotonic() - begun


def _retry_after(error: Any) -> float | None:
    """Returns the seconds that the hub asks to wait in the response of `error`; None if it does not ask."""
    from huggingface_hub.utils import parse_ratelimit_headers

    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    if (limit := parse_ratelimit_headers(headers)) is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    with suppress(ValueError):
        return float(headers.get("Retry-After", ""))
    return None


def _network() -> str:
    """Returns advice for an error text about the network: on Kaggle to turn it on, else empty."""
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return " (turn on Internet in the notebook's settings)"
    return ""
