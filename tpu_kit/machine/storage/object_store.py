"""Reads and writes objects below a URL such as gs://bucket/folder with gcsfs.

gcsfs finds the credentials and repeats failed requests. Other schemes use their fsspec packages and are not tested.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tpu_kit.machine.chips import MIB

# A request fails after SILENT_SECONDS without data, or after REQUEST_SECONDS; gcsfs tries 6 times.
# Files are uploaded in parts that are small enough for a slow connection.
SILENT_SECONDS, REQUEST_SECONDS = 60.0, 300.0
PART_BYTES = 8 * MIB
_BUGS = (AssertionError, AttributeError, KeyError, NameError, TypeError)


def is_url(place: Path | str) -> bool:
    """Whether a place is a URL, not a local folder."""
    return isinstance(place, str) and "://" in place


def leads_out(name: str) -> bool:
    """Whether a name from an untrusted source, joined to a folder, is a path outside of the folder."""
    return name.startswith("/") or ".." in name.split("/")


def join(place: Path | str, *names: str) -> Path | str:
    """Joins names to a place; returns a text for a URL, else a Path."""
    return "/".join([str(place).rstrip("/"), *names]) if is_url(place) else Path(place, *names)


def parent(place: Path | str) -> Path | str:
    """Returns the parent of a URL as a URL, or the parent of a path as an absolute Path."""
    return str(place).rstrip("/").rpartition("/")[0] if is_url(place) else Path(place).absolute().parent


class ObjectFolder:
    """Accesses the objects below a URL by names relative to it. Folders need not be made or removed.

    All methods raise OSError with advice in its text; `read` and `get` raise FileNotFoundError for a missing object.

    Raises:
        ValueError: the package for the scheme is missing, or the URL names no bucket.
    """

    def __init__(self, url: str) -> None:
        scheme, _, path = url.partition("://")
        self.url = f"{scheme}://{path.rstrip('/')}"
        self.bucket = f"{scheme}://{path.split('/')[0]}"
        if self.bucket.endswith("://"):
            raise ValueError(f"{url} names no bucket: write {scheme}://bucket/folder")
        connect = _filesystem(scheme)
        with self._explained():
            self._files = connect()
            self._root = str(self._files._strip_protocol(self.url))

    def __reduce__(self) -> tuple[type[ObjectFolder], tuple[str]]:
        return type(self), (self.url,)  # an unpickled copy makes its own connection

    def place(self, name: str) -> str:
        """Returns the URL of an object."""
        return f"{self.url}/{name}"

    def list(self, folder: str = "") -> dict[str, tuple[int, str]]:
        """Maps the names of all objects, or of the objects below `folder`, to (bytes, MD5 in hex digits).

        Names are relative to the URL. Empty if there are no objects. The store computes the MD5; it is empty for an
        object composed of several others. Raises OSError if a name would lead out of the folder of a copy.
        """
        with self._explained():
            try:
                found = self._files.find(f"{self._root}/{folder}".rstrip("/"), detail=True)
            except FileNotFoundError:
                if self._files.exists(self.bucket):
                    return {}
                raise
        objects = {
            path[len(self._root) + 1 :]: (int(about["size"]), base64.b64decode(about.get("md5Hash") or "").hex())
            for path, about in found.items()
        }
        if bad := next(filter(leads_out, objects), None):
            text = f"{self.url} holds an object named {bad!r}, which a copy would write outside of its folder"
            advice = "remove it, or use a folder that only you and people you trust can write to"
            raise OSError(errno.EINVAL, f"{text}: {advice}")
        return {name: about for name, about in objects.items() if not f"/{name}".endswith("/")}  # a folder's marker

    def names(self, folder: str = "") -> Sequence[str]:
        """Lists the names in a folder, without subfolders' contents; folders end in "/". Empty if it does not exist."""
        root = f"{self._root}/{folder}".rstrip("/")
        with self._explained():
            try:
                found = self._files.ls(root, detail=True)
            except FileNotFoundError:
                return []
        names = {about["name"].rstrip("/").removeprefix(f"{root}/"): about["type"] for about in found}
        return [f"{name}/" if kind == "directory" else name for name, kind in names.items() if "/" not in name]

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Returns an object's content, or the bytes `start` to `end` that exist."""
        with self._explained(name):
            return bytes(self._files.cat_file(f"{self._root}/{name}", start=start, end=end))

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Reads small objects concurrently; returns the contents by name, without objects that do not exist."""
        names = list(names)
        with self._explained():
            # `cat` would read [, * and ? in a name as a pattern.
            contents = self._files.cat_ranges([f"{self._root}/{name}" for name in names], None, None)
            for content in contents:
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
        return {name: content for name, content in zip(names, contents, strict=True) if isinstance(content, bytes)}

    def create(self, name: str, content: bytes) -> None:
        """Makes an object; the first of several writers wins.

        Raises FileExistsError if the object exists with other content. Does nothing if it has this content already.
        """
        try:
            with self._explained():
                self._files.pipe_file(f"{self._root}/{name}", content, mode="create")
        except FileExistsError:
            # If the content is this writer's, the first answer was lost, and gcsfs has repeated the request.
            if self.read_all([name]).get(name) != content:
                raise

    def write(self, name: str, content: bytes) -> None:
        """Makes or replaces an object."""
        with self._explained():
            self._files.pipe_file(f"{self._root}/{name}", content)

    def put(self, file: Path, name: str) -> None:
        """Uploads a file as object `name`, new or replaced. A broken upload leaves no object and is repeated once."""
        options = {"chunksize": PART_BYTES} if self.url.startswith(("gs://", "gcs://")) else {}
        for last in (False, True):
            try:
                with self._explained():
                    return self._files.put_file(str(file), f"{self._root}/{name}", **options)
            except (OSError, AttributeError) as error:
                # gcsfs 2026.2.0, which Colab's fsspec requires, reads a missing attribute after a broken upload.
                if last or getattr(error, "errno", None) in (errno.EACCES, errno.ENOENT):
                    raise

    def get(self, name: str, file: Path) -> None:
        """Downloads an object to the local file `file`, new or replaced, in an existing folder."""
        try:
            with self._explained(name):
                self._files.get_file(f"{self._root}/{name}", str(file))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            text = f"{self.place(name)} cannot be written to {file.parent} ({os.strerror(error.errno)})"
            raise OSError(error.errno, f"{text}: free space there, or set TMPDIR to another disk's folder") from error

    def copy(self, name: str, to: ObjectFolder) -> None:
        """Copies an object, under the same name, to another folder of the same store, without a download."""
        with self._explained():
            self._files.cp_file(f"{self._root}/{name}", f"{to._root}/{name}")

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects in order; skips missing objects."""
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._explained(name):
                self._files.rm_file(f"{self._root}/{name}")

    @contextlib.contextmanager
    def _explained(self, name: str | None = None) -> Iterator[None]:
        """Converts the errors of a block to OSError with advice; keeps FileExistsError and errors of code (`_BUGS`).

        With the `name` of an object, keeps FileNotFoundError too.
        """
        try:
            yield
        except (FileExistsError, *_BUGS):
            raise
        except Exception as error:
            if name is not None and isinstance(error, FileNotFoundError):
                raise
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> OSError:
        """Converts an error of gcsfs, aiohttp, requests or google.auth to an OSError with advice."""
        origin, kind = type(error).__module__.split(".")[0], type(error).__name__
        status = str(getattr(error, "code", None) or "")
        if isinstance(error, FileNotFoundError):
            make = f"make it (gcloud storage buckets create {self.bucket}), or check its name"
            return OSError(errno.ENOENT, f"there is no bucket {self.bucket}: {make}")
        if status == "401" or (origin == "google" and kind != "TransportError"):
            how = "run `gcloud auth application-default login`, on Colab `google.colab.auth.authenticate_user()`"
            text = f"{self.bucket} needs credentials, and no valid credentials were found: {how}, or set "
            return OSError(errno.EACCES, text + "GOOGLE_APPLICATION_CREDENTIALS")
        if isinstance(error, PermissionError) or status == "403" or str(error).startswith("Forbidden"):
            text = f"this account may not do that in {self.bucket}: give it the role Storage Object User there"
            return OSError(errno.EACCES, f"{text} ({error})")
        if origin in ("aiohttp", "requests", "google") or isinstance(error, (ConnectionError, TimeoutError)):
            text = f"{self.bucket} could not be reached ({kind}: {error}): check the network, then run this again"
            return OSError(errno.ENETUNREACH, text)
        if isinstance(error, OSError) and error.errno is not None:
            return error
        return OSError(errno.EIO, f"{self.bucket} answered {kind}: {error}")


def upload(folder: Path, url: str) -> None:
    """Uploads all files of a folder and its subfolders below a URL; keeps other objects there; raises OSError."""
    target = ObjectFolder(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            target.put(path, path.relative_to(folder).as_posix())


@contextlib.contextmanager
def at_hand(place: Path | str, *names: str) -> Iterator[Path]:
    """Yields a local folder: `place` itself, or a temporary copy of the objects below a URL.

    A local `place` is yielded as an absolute path, even if it does not exist; `names` is ignored. From a URL, copies
    the objects and folders in `names`, by default all; skips missing names. The copy is deleted when the block ends.

    Raises:
        ValueError: the object store cannot be read. In a ValueError of the block, the URL replaces the copy's path.
    """
    if not is_url(place):
        yield Path(place).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as scratch:
        try:
            source = ObjectFolder(str(place))
            for name in source.list():
                if not names or name in names or name.startswith(tuple(f"{one}/" for one in names)):
                    Path(scratch, name).parent.mkdir(parents=True, exist_ok=True)
                    source.get(name, Path(scratch, name))
        except OSError as error:
            raise ValueError(str(error)) from error
        try:
            yield Path(scratch)
        except ValueError as error:
            if scratch not in str(error):
                raise
            raise ValueError(str(error).replace(scratch, str(place).rstrip("/"))) from error


def _filesystem(scheme: str) -> Callable[[], Any]:
    """Returns the constructor of a scheme's file system; raises ValueError if it is unknown or lacks its package."""
    # By default gcsfs queries a second service for each bucket; only zonal buckets need that.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback of each error that it raises
    # Other processes write to the store too: a cached listing may be out of date.
    options: dict[str, Any] = {"use_listings_cache": False}
    try:
        import fsspec

        if scheme not in ("gs", "gcs"):
            return partial(fsspec.get_filesystem_class(scheme), **options)
        import aiohttp
        from gcsfs.core import GCSFileSystem
    except ImportError as error:
        package = "gcsfs" if scheme in ("gs", "gcs") else f"fsspec's package for {scheme}://"
        raise ValueError(f"{scheme}:// needs {package}: pip install it ({error})") from error
    # "md5" compares digests after an upload.
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=SILENT_SECONDS, sock_read=SILENT_SECONDS)
    return partial(GCSFileSystem, consistency="md5", requests_timeout=timeout, **options)
