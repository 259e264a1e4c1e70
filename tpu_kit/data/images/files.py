"""Opens the pictures of rows: files beside the rows, objects in a bucket, bytes in the rows, and data URLs.

A header says whether a picture can be used; errors name the picture, and the caller adds its row.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import fsspec
from datasets import config as datasets_config

from tpu_kit.data.rows.field_values import RowError

MOST_PIXELS = 50_000_000
"""Pixels of a picture at most: decoding takes 3 bytes for each of them."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")  # of 8 bits
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF: the values that swap height and width
_END = 32 * 1024


class Picture(NamedTuple):
    """What a header says of a picture.

    Attributes:
        height: in pixels, after EXIF's rotation.
        width: likewise.
        digest: a hash of its length, its first and its last bytes.
    """

    height: int
    width: int
    digest: str


@dataclass(frozen=True)
class PictureFiles:
    """Opens the pictures of a source of rows.

    Attributes:
        folder: the folder or the address of the rows, which relative paths are of; empty if the rows are in none.
    """

    folder: str

    @classmethod
    def beside(cls, source: str) -> PictureFiles:
        """Returns that of a source of rows."""
        if "://" in source:
            return cls(source.rpartition("/")[0])
        start = source.partition("*")[0] if "*" in source else source
        path = Path(start)
        if path.is_dir():
            return cls(str(path))
        return cls(str(path.parent)) if path.is_file() or "*" in source else cls("")

    def picture(self, source: Any) -> Picture:
        """Reads the header of a picture.

        Raises:
            RowError: it cannot be opened or used.
        """
        name = name_of(source)
        with self._opened(source) as file, _described(name):
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            digest = hashlib.blake2b(str(size).encode() + file.read(_END), digest_size=8)
            if size > _END:
                file.seek(max(_END, size - _END))
                digest.update(file.read(_END))
            file.seek(0)
            image = _image(file, name)
            width, height = image.size
            if image.getexif().get(_ORIENTATION) in _TURNED:
                width, height = height, width
        return Picture(height, width, digest.hexdigest())

    def decoded(self, source: Any) -> Any:
        """Returns a picture of PIL in RGB, turned as EXIF says.

        Raises:
            RowError: it cannot be opened or decoded.
        """
        from PIL import ImageOps

        name = name_of(source)
        with self._opened(source) as file, _described(name):
            return ImageOps.exif_transpose(_image(file, name)).convert("RGB")

    @contextlib.contextmanager
    def _opened(self, source: Any) -> Iterator[BinaryIO]:
        """Opens the bytes of a picture."""
        source = _plain(source)
        if isinstance(source, bytes):
            yield io.BytesIO(source)
            return
        if not isinstance(source, str):
            raise RowError(f"an image is a path, bytes, a data URL or base64, not {type(source).__name__}")
        if source.startswith("data:"):
            try:
                yield io.BytesIO(base64.b64decode(source.partition(",")[2], validate=True))
            except binascii.Error as error:
                raise RowError(f"image {name_of(source)}: {error}") from error
            return
        address = self._address(source)
        try:
            opened = fsspec.open(address, "rb").open() if "://" in address else open(address, "rb")  # noqa: SIM115
        except (OSError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError)
            raise RowError(f"image {source}: {'no such file' if missing else error}") from error
        with opened as file:
            yield file

    def _address(self, source: str) -> str:
        """Returns the path or the address of a file; raises RowError if it may not be read."""
        if source.startswith(("http://", "https://")):
            raise RowError(f"image {source[:60]}: images are not fetched from the web; download them first")
        if "://" in source:
            # Other file systems of fsspec reach any file of this machine (file://) or of the web.
            if source.partition("://")[0] not in ("gs", "hf", self.folder.partition("://")[0]):
                raise RowError(f"image {source[:60]}: an address is gs:// or hf://; give other files below the rows")
            return source
        if "://" in self.folder:
            if os.path.isabs(source) or ".." in Path(source).parts:
                raise RowError(f"image {source}: it is not in {self.folder}, where the rows are")
            return f"{self.folder}/{source}"
        if not self.folder and not os.path.isabs(source):
            raise RowError(f"image {source}: these rows are in no folder; give images as bytes, or rows in a file")
        path = Path(os.path.realpath(Path(self.folder, source)))
        allowed = [Path(os.path.realpath(one)) for one in (self.folder, datasets_config.HF_CACHE_HOME) if one]
        if not any(path.is_relative_to(one) for one in allowed):
            raise RowError(f"image {source}: it is outside of {self.folder or 'the data set'}; copy it below the rows")
        return str(path)


def _plain(source: Any) -> Any:
    """Returns the bytes or the text of an image; a mapping is that of `datasets`, or an address in OpenAI's form."""
    if isinstance(source, Mapping):
        source = next((source[name] for name in ("bytes", "path", "url") if source.get(name)), None)
    return bytes(source) if isinstance(source, bytearray | memoryview) else source


def name_of(source: Any) -> str:
    """Returns a short text that names a picture in an error."""
    own = source.get("path") if isinstance(source, Mapping) else None
    plain = own or _plain(source)
    if isinstance(plain, bytes):
        return f"of {len(plain):,} bytes"
    return str(plain) if len(str(plain)) <= 60 else f"{str(plain)[:57]}..."


@contextlib.contextmanager
def _described(name: str) -> Iterator[None]:
    """Turns what PIL raises into errors that name the picture."""
    try:
        yield
    except RowError:
        raise
    except Exception as error:  # of decoders, which raise many kinds for damaged files
        raise RowError(f"image {name}: it cannot be read ({type(error).__name__}: {error})") from error


def _image(file: BinaryIO, name: str) -> Any:
    """Opens a picture of PIL, of which only the header is read."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():  # of so many pixels; the bound below is lower
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise RowError(f"image {name}: {_too_large()}") from error
    except UnidentifiedImageError as error:
        raise RowError(f"image {name}: no picture of the kinds {', '.join(FORMATS)}") from error
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise RowError(f"image {name}: {width} x {height} pixels, {_too_large()}")
    if image.mode not in _MODES:
        raise RowError(f"image {name}: its mode is {image.mode}, with more than 8 bits a channel; convert it to RGB")
    if getattr(image, "is_animated", False):
        raise RowError(f"image {name}: it is animated; give the pictures one by one")
    return image


def _too_large() -> str:
    return f"more than {MOST_PIXELS:,}; make it smaller, as the model would"
