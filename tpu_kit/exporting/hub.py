"""Pushes a finished export to the Hugging Face hub, as one commit.

The token is the one that huggingface_hub finds: HF_TOKEN, or the stored login. It is sent to the hub alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_kit.config.fields import hide_secrets

_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token with write permission"


@dataclass(frozen=True)
class Pushed:
    """A commit on the hub.

    Attributes:
        url: its address.
        sha: its hash.
        removed: files of an earlier export that it removes.
    """

    url: str
    sha: str
    removed: tuple[str, ...]

    def __str__(self) -> str:
        gone = f"; {len(self.removed)} files of the earlier export removed" if self.removed else ""
        return f"pushed to {self.url}{gone}"


def check_repository(model_id: str) -> str:
    """Checks before any work that `push` can write to a repository; returns its address.

    Raises:
        ValueError: the name is invalid, there is no valid token, it cannot write, the repository belongs to somebody
            else, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    api, (owner, _, name) = HfApi(), model_id.partition("/")
    try:
        validate_repo_id(model_id)
    except HFValidationError as error:
        raise ValueError(f"push={model_id} is no name of a repository: {error}") from error
    if not name:
        raise ValueError(f"push={model_id}: give the owner too, as in push=your-name/{model_id}")
    if get_token() is None:
        raise ValueError(f"push={model_id}: there is no token of the Hugging Face hub: {_LOGIN}")
    with _explained(model_id, "the token is invalid"):
        user = api.whoami()
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise ValueError(f"push={model_id}: the token can only read: {_LOGIN}")
    owners = [user["name"], *(organisation["name"] for organisation in user.get("orgs", ()))]
    if owner not in owners:
        raise ValueError(f"push={model_id}: the token belongs to {', '.join(owners)}, not to {owner}")
    return f"{api.endpoint}/{model_id}"


def push(folder: Path, model_id: str, *, private: bool = True, message: str = "Export by tpu_kit") -> Pushed:
    """Uploads the files of an export, then makes one commit after which the repository holds exactly this export.

    Files that an earlier export of the kit left are removed in the same commit; other files of the repository stay.

    Args:
        folder: of `export.export`, with `export.json`.
        model_id: "owner/name"; created if it does not exist.
        private: whether a new repository is private.
        message: of the commit.

    Raises:
        ValueError: the repository has files of the same names that are not of the kit, has moved on meanwhile, or
            cannot be written to. The folder is complete in any case.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    with _explained(model_id, "the repository cannot be created or read"):
        api.create_repo(model_id, private=private, exist_ok=True)
        found = api.model_info(model_id)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    there = {sibling.rfilename for sibling in found.siblings or ()}
    earlier = _earlier_files(api, model_id, str(found.sha), there)
    if foreign := sorted(there & {*files} - earlier - {".gitattributes"}):
        raise ValueError(
            f"push={model_id}: the repository has {', '.join(foreign[:5])}, which no export of tpu_kit wrote: give "
            "another name, or delete these files there"
        )
    removed = sorted(earlier & there - {*files})
    additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(folder / name)) for name in files]
    deletions = [CommitOperationDelete(path_in_repo=name) for name in removed]
    with _explained(model_id, "the upload failed"):
        api.preupload_lfs_files(model_id, additions, free_memory=False)
        made = api.create_commit(model_id, [*additions, *deletions], commit_message=message, parent_commit=found.sha)
    return Pushed(made.commit_url, made.oid, tuple(removed))


def _earlier_files(api: Any, model_id: str, revision: str, there: set[str]) -> set[str]:
    """Returns the files that an earlier export of the kit wrote into the repository, by its `export.json`."""
    if "export.json" not in there:
        return set()
    with _explained(model_id, "its export.json cannot be read"):
        text = Path(api.hf_hub_download(model_id, "export.json", revision=revision)).read_text()
    try:
        return {"export.json", *map(str, json.loads(text)["files"])}
    except (json.JSONDecodeError, KeyError, TypeError):
        return set()


@contextmanager
def _explained(model_id: str, what: str) -> Iterator[None]:
    """Turns errors of the hub into one line with what to do; the local files are complete."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    repeat = "the local export is complete; the same command pushes it again"
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ValueError(f"push={model_id}: HF_HUB_OFFLINE is set: unset it to push; {repeat}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        reason = {
            401: f"{what}: {_LOGIN}",
            402: "the quota of the account is used up: make room, or push to another account",
            403: f"the token may not write there: {_LOGIN}",
            412: "the repository has changed meanwhile, so nothing was committed: look at it, then push again",
            413: "a file is larger than the hub accepts",
            429: "the hub limits the rate of requests: wait some minutes",
        }.get(status or 0, f"{what}: {hide_secrets(str(error).splitlines()[0])}")
        raise ValueError(f"push={model_id}: {reason}; {repeat}") from error
    except (OSError, ValueError) as error:  # a ValueError is what the hub says of a card
        raise ValueError(f"push={model_id}: {what}: {hide_secrets(' '.join(str(error).split()))}; {repeat}") from error
