"""Opens the pictures of rows: files beside the rows, objects in a bucket, bytes in the rows, and data URLs.

The header of a picture decides whether it can be used. Errors name the picture; the caller adds the row.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import io
import os
import re
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from datasets import config as datasets_config
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tpu_kit.data.rows.field_values import RowError

MOST_PIXELS = 50_000_000
"""Maximum of pixels of a picture; a decoded pixel takes 3 bytes."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")  # PIL's modes of 8 bits
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF's tag, and the values that swap height and width
_END = 32 * 1024
_STORES = ("gs", "hf")  # fsspec's other file systems read any local file (file://) or the web
_LONGEST_PATH = 1_000  # a longer text is taken for base64


class Picture(NamedTuple):
    """A picture's header.

    Attributes:
        height: in pixels, after EXIF's rotation.
        width: likewise.
        digest: hash (hex) of the bytes; for a file, of its length and its first and last 32 KiB.
        file: absolute path or address; empty for bytes and data URLs.
        stamp: text that changes with the content of the file; empty without a file.
        source: path, address or bytes, as `PictureFiles` opens them.
    """

    height: int
    width: int
    digest: str
    file: str = ""
    stamp: str = ""
    source: Any = None


@dataclass(frozen=True)
class PictureFiles:
    """Opens the pictures of a source of rows.

    A picture is a path, an address (gs://, hf://), a data URL, bytes, or a mapping with one of these as "bytes", "path"
    or "url".

    Attributes:
        folder: folder or address of the rows, the base of relative paths; empty if the rows are in no folder.
    """

    folder: str

    @classmethod
    def beside(cls, source: str) -> PictureFiles:
        """Returns the opener for pictures beside the rows of `source`, a name as in `load_rows`.

        FOLDER and FOLDER:CONFIGURATION give FOLDER as `folder`; a file or an object in a store gives its folder. A
        pattern gives the folder before its first *, ? or [. Other names, such as a data set of the hub, give "".
        """
        if "://" in source and source.partition("://")[0] not in LocalFileSystem.protocol:
            return cls(_before_pattern(source).rpartition("/")[0])
        path = LocalFileSystem._strip_protocol(source)
        for folder in (path, path.rpartition(":")[0]):  # FOLDER:CONFIGURATION
            if os.path.isdir(folder):
                return cls(folder)
        start = path if os.path.isfile(path) else _before_pattern(path)
        return cls(os.path.dirname(start) if os.path.isfile(path) or start != path else "")

    def picture(self, source: Any) -> Picture:
        """Returns the header of a picture, without decoding its pixels; its `source` is the argument.

        Raises:
            RowError: the picture cannot be opened, its format is not in `FORMATS`, or it is animated. It has more than
                `MOST_PIXELS`, or more than 8 bits a channel. Its address is not gs:// or hf://, or its path is neither
                in `folder` nor in the cache of Hugging Face.
        """
        name, place = name_of(source), self._place(source)
        with self._opened(source) as file, _described(name):
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            digest = hashlib.blake2b(str(size).encode() + file.read(_END if place else size), digest_size=8)
            if place and size > _END:
                file.seek(max(_END, size - _END))
                digest.update(file.read(_END))
            file.seek(0)
            image = _image(file, name)
            width, height = image.size
            if _orientation(image) in _TURNED and image.format != "TIFF":  # PIL has rotated its size already
                width, height = height, width
            return Picture(height, width, digest.hexdigest(), place, _stamp_of(file) if place else "", source)

    def read(self, source: Any) -> bytes:
        """Returns the undecoded bytes of a picture; raises RowError if it cannot be opened, and checks nothing else."""
        with self._opened(source) as file:
            return file.read()

    def decoded(self, source: Any) -> Any:
        """Returns a picture as PIL's RGB: rotated by its EXIF orientation, with white behind transparent parts.

        Raises:
            RowError: as `picture`, or the picture cannot be decoded.
        """
        from PIL import Image, ImageOps

        name = name_of(source)
        with self._opened(source) as file, _described(name):
            image = _image(file, name)
            if _orientation(image):
                image = ImageOps.exif_transpose(image)
            if "A" in image.getbands() or image.info.get("transparency") is not None:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")

    def stamps(self, files: Sequence[str]) -> list[str]:
        """Returns the current `Picture.stamp` of every path or address in `files`, "" where it cannot be found out.

        Lists the folders of a store instead of requesting single objects.
        """
        found = dict[str, str]()
        for folder in {file.rpartition("/")[0] for file in files if "://" in file}:
            with contextlib.suppress(Exception):  # stores raise many kinds; without a stamp, pictures are read again
                system, path = url_to_fs(folder)
                for about in system.ls(path, detail=True, refresh=True):
                    found[f"{folder}/{about['name'].rpartition('/')[2]}"] = _stamp(about)
        for file in {*files} - found.keys():
            with contextlib.suppress(OSError):
                found[file] = _stamp(os.stat(file))
        return [found.get(file, "") for file in files]

    @contextlib.contextmanager
    def _opened(self, source: Any) -> Iterator[BinaryIO]:
        """Opens the bytes of a picture, closed after the context; raises RowError if it may not or cannot be read."""
        source = _plain(source)
        if isinstance(source, bytes):
            yield io.BytesIO(source)
            return
        if not isinstance(source, str):
            raise RowError(f"an image is a path, bytes or a data URL, not {type(source).__name__}")
        if source.startswith("data:"):
            try:
                content = base64.b64decode(source.partition(",")[2], validate=True)
            except binascii.Error as error:
                raise RowError(f"image {name_of(source)}: {error}") from error
            yield io.BytesIO(content)
            return
        address = self._address(source)
        try:
            if "://" in address:
                system, path = url_to_fs(address)
                opened = system.open(path, "rb")
            elif not stat.S_ISREG(os.stat(address).st_mode):  # opening a pipe would block
                raise ValueError("this is not a regular file; name another")
            else:
                opened = open(address, "rb")  # noqa: SIM115  closed below
        except (OSError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError)
            raise RowError(f"image {name_of(source)}: {'no such file' if missing else error}") from error
        with opened as file:
            yield file

    def _place(self, source: Any) -> str:
        """Returns the path or address of a picture, empty for bytes and data URLs; raises RowError as `_address`."""
        source = _plain(source)
        return self._address(source) if isinstance(source, str) and not source.startswith("data:") else ""

    def _address(self, source: str) -> str:
        """Returns the real path or the address of a file; raises RowError if it may not be read.

        Addresses must be gs:// or hf://; paths must lie below `folder` or the cache of Hugging Face, links followed.
        """
        name = name_of(source)
        if source.startswith(("http://", "https://")):
            raise RowError(f"image {name}: images are not fetched from the web; download them first")
        if "://" in source:
            if source.partition("://")[0] not in _STORES or "::" in source:
                raise RowError(f"image {name}: an address is gs:// or hf://; give other files below the rows")
            return source
        if len(source) > _LONGEST_PATH:
            raise RowError(
                f"image {name}: a text of {len(source):,} characters is no path; if it is base64, give it as "
                "data:image/...;base64,..."
            )
        if "://" in self.folder:
            if self.folder.partition("://")[0] not in _STORES or "::" in self.folder:
                text = f"images are not fetched from {self.folder}, where the rows are; copy rows and images to a disk"
                raise RowError(f"image {name}: {text}")
            if os.path.isabs(source) or ".." in Path(source).parts or "::" in source:
                raise RowError(f"image {name}: it is not in {self.folder}, where the rows are")
            return f"{self.folder}/{source}"
        if not self.folder and not os.path.isabs(source):
            raise RowError(f"image {name}: these rows are in no folder; give images as bytes, or rows in a file")
        path = Path(os.path.realpath(Path(self.folder, source)))
        allowed = [Path(os.path.realpath(one)) for one in (self.folder, datasets_config.HF_CACHE_HOME) if one]
        if not any(path.is_relative_to(one) for one in allowed):
            raise RowError(f"image {name}: it is outside of {self.folder or 'the data set'}; copy it below the rows")
        return str(path)


def _before_pattern(source: str) -> str:
    """Returns `source` up to its first *, ? or [."""
    return re.split(r"[*?[]", source, maxsplit=1)[0]


def _stamp_of(file: BinaryIO) -> str:
    """Returns the stamp of an open file or object."""
    details = getattr(file, "details", None)
    return _stamp(os.fstat(file.fileno()) if details is None else details)


def _stamp(about: os.stat_result | Mapping[str, Any]) -> str:
    """Returns size and time of a file's status, or size and hash of a store's details of an object, as a text."""
    if isinstance(about, os.stat_result):
        return f"{about.st_size} {about.st_mtime_ns}"
    return f"{about.get('size')} {about.get('etag') or about.get('blob_id')}"


def _plain(source: Any) -> Any:
    """Returns the bytes, path or url of a mapping, None without any; byte arrays as bytes; other values unchanged."""
    if isinstance(source, Mapping):
        source = next((source[name] for name in ("bytes", "path", "url") if source.get(name)), None)
    return bytes(source) if isinstance(source, bytearray | memoryview) else source


def name_of(source: Any) -> str:
    """Returns a name of a picture for errors: its path, address or data URL, cut to 60 characters, or "of N bytes"."""
    own = source.get("path") if isinstance(source, Mapping) else None
    plain = own or _plain(source)
    if isinstance(plain, bytes):
        return f"of {len(plain):,} bytes"
    return str(plain) if len(str(plain)) <= 60 else f"{str(plain)[:57]}..."


@contextlib.contextmanager
def _described(name: str) -> Iterator[None]:
    """Turns every error inside the context into a RowError that names the picture `name`."""
    try:
        yield
    except RowError:
        raise
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        raise RowError(f"image {name}: it cannot be read ({type(error).__name__}: {error})") from error


def _image(file: BinaryIO, name: str) -> Any:
    """Returns a picture opened by PIL, which reads only its header.

    Raises RowError for formats not in `FORMATS`, more than `MOST_PIXELS`, more than 8 bits a channel, and animations.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():  # PIL's limit of pixels is above `MOST_PIXELS`
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise RowError(f"image {name}: {_too_large()}") from error
    except UnidentifiedImageError as error:
        raise RowError(f"image {name}: not a picture in the format {', '.join(FORMATS)}") from error
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise RowError(f"image {name}: {width} x {height} pixels, {_too_large()}")
    if image.mode not in _MODES:
        raise RowError(f"image {name}: its mode is {image.mode}, with more than 8 bits a channel; convert it to RGB")
    if getattr(image, "is_animated", False) and image.format != "MPO":  # MPO: a camera's JPEG and more behind it
        raise RowError(f"image {name}: it is animated; give the pictures one by one")
    return image


def _orientation(image: Any) -> int | None:
    """Returns the EXIF orientation in a picture's header, or None; PNG's own `getexif` would decode the pixels."""
    from PIL import Image

    found: int | None = Image.Image.getexif(image).get(_ORIENTATION)
    return found


def _too_large() -> str:
    """Returns the part of an error text for pictures of more than `MOST_PIXELS`."""
    return f"more than {MOST_PIXELS:,}; make it smaller, as the model would"
