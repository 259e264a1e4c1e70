"""Token ids that hold their pictures, and the image tensors of batches of prompts."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from tpu_kit.data.images.files import PictureFiles, name_of
from tpu_kit.data.images.processors import ImageProcessor
from tpu_kit.data.rows.field_values import RowError

_WITHOUT_PNG = ("CMYK", "HSV", "LAB", "RGBX", "YCbCr")  # 8-bit modes that PNG does not support


class PicturedIds(list[int]):
    """Token ids of a prompt with its soft tokens of images, together with the pictures; picklable.

    Attributes:
        pictures: paths, addresses or bytes for `files`, in the order of their tokens.
        slots: soft tokens of every slot of the pictures.
    """

    def __init__(
        self, ids: Iterable[int], pictures: Sequence[Any], slots: Sequence[int], files: PictureFiles,
        processor: ImageProcessor,
    ) -> None:  # fmt: skip
        super().__init__(ids)
        self.pictures, self.slots, self.files, self.processor = tuple(pictures), tuple(slots), files, processor

    def __add__(self, more: Sequence[int]) -> PicturedIds:  # type: ignore[override]  # like lists
        """Returns the ids followed by the text tokens `more`, with the same pictures."""
        return PicturedIds([*self, *more], self.pictures, self.slots, self.files, self.processor)

    def blackened(self) -> PicturedIds:
        """Returns a copy with bytes of black PNG files in the pictures' sizes; RowError as `PictureFiles.picture`."""
        from PIL import Image

        sizes = [(one.width, one.height) for one in map(self.files.picture, self.pictures)]
        pictures = [png(Image.new("RGB", size)) for size in sizes]
        return PicturedIds(self, pictures, self.slots, self.files, self.processor)

    def for_transformers(self) -> dict[str, torch.Tensor]:
        """Decodes the pictures; returns arguments of transformers' `forward` by name, without input_ids."""
        return self.processor.for_transformers([*map(self.files.decoded, self.pictures)], list(self))

    def pixels(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Decodes its pictures, and returns pixels and positions or None, as `pixels_of`; may raise RowError."""
        return pixels_of(self.pictures, self.slots, self.files, self.processor)

    def images_among(self, prompts: Sequence[Sequence[int]]) -> PromptImages:
        """Returns a maker of image tensors for `prompts`, including these ids."""
        return PromptImages(self.processor, prompts)


class PromptImages:
    """Makes image tensors for batches of `prompts`, some with pictures; all rows have the largest prompt's slots."""

    def __init__(self, processor: ImageProcessor, prompts: Sequence[Sequence[int]]) -> None:
        self._processor = processor
        self._room = max(len(prompt.slots) for prompt in prompts if isinstance(prompt, PicturedIds))

    def tensors(self, prompts: Sequence[Sequence[int]], width: int, rows: int) -> dict[str, torch.Tensor]:
        """Returns the CPU image tensors of a batch of prompts by name, with the shapes of `model.families.vision`.

        The tensors are pixels, patch_positions and axis_positions if `processor.sizes` has them, and image_index. Rows
        without pictures hold zeros, -1 in image_index, and 0 to width - 1 on every axis of axis_positions; so do rows
        after the prompts. If a picture cannot be decoded, all pictures of its prompt are black; warns on stderr.

        `prompts` begin at column 0 of the first rows. `rows` is B, and `width` is S; it has room for all soft tokens.

        Raises:
            RowError: a picture is missing, its header is damaged, or its size has changed since its tokens were made.
        """
        sizes = self._processor.sizes
        pixels = torch.zeros(rows, self._room, sizes.patches, sizes.numbers, dtype=torch.uint8)
        places = torch.zeros(rows, self._room, sizes.patches, 2, dtype=torch.int32)
        index = torch.full((rows, width), -1, dtype=torch.int32)
        axes = torch.arange(width, dtype=torch.int32).repeat(rows, 3, 1)
        for row, prompt in enumerate(prompts):
            if not isinstance(prompt, PicturedIds):
                continue
            try:
                numbers, positions = prompt.pixels()
            except RowError as error:
                try:
                    numbers, positions = prompt.blackened().pixels()
                except RowError:  # its size has changed, or its header is damaged too
                    raise error from None
                print(f"warning: {error}; its prompt is asked with black pictures", file=sys.stderr, flush=True)
            pixels[row, : len(prompt.slots)] = torch.from_numpy(numbers)
            if positions is not None:
                places[row, : len(prompt.slots)] = torch.from_numpy(positions)
            put_index(index[row], np.array(prompt), prompt.slots, self._processor)
            if sizes.axes:
                assert positions is not None
                made = self._processor.axes(np.array(prompt), prompt.slots, positions)[:, :width]
                axes[row, :, : made.shape[1]] = torch.from_numpy(made)
        found = {"pixels": pixels} | ({"patch_positions": places} if sizes.positions else {})
        return found | ({"axis_positions": axes} if sizes.axes else {}) | {"image_index": index}


def put_index(
    index: torch.Tensor, ids: np.ndarray, slots: Sequence[int], processor: ImageProcessor, first: int = 0
) -> None:
    """Writes the indices of the soft tokens of a document or a prompt into `index`, at the places of image tokens.

    `index` is int32 (S,), a row's `image_index` of `model.families.vision` from the first id on. `slots` are the soft
    tokens of every slot of the pictures; `first` is the number of the first slot in the row.
    """
    starts = (first + np.arange(len(slots))) * processor.sizes.tokens
    soft = np.concatenate([start + np.arange(count) for start, count in zip(starts, slots, strict=True)])
    index[np.flatnonzero(ids == processor.token_id)] = torch.from_numpy(soft.astype(np.int32))


def pixels_of(
    pictures: Iterable[Any], slots: Sequence[int], files: PictureFiles, processor: ImageProcessor
) -> tuple[np.ndarray, np.ndarray | None]:
    """Decodes the pictures, at least one, of a document or a prompt.

    `slots` are the soft tokens of all their slots, in order, from when the document's or prompt's tokens were made.

    Returns:
        Pixels (slots, patches, numbers) uint8 and positions (slots, patches, 2) int32 or None, see `ImageProcessor`.

    Raises:
        RowError: as `PictureFiles.decoded` and `ImageProcessor.tokens`; or a picture gives other slots than `slots`.
    """
    made, planned = [], list(slots)
    for source in pictures:
        picture = files.decoded(source)
        counts = processor.tokens(picture.height, picture.width)[1]
        if counts != planned[: len(counts)]:
            size = f"{picture.width} x {picture.height} pixels"
            raise RowError(
                f"image {name_of(source)}: it has {size}, other than when the rows were prepared; do not "
                "change files during a run, and start it again"
            )
        planned = planned[len(counts) :]
        made.append(processor.pixels(picture))
    assert not planned, "a row has as many pictures as when it was prepared"
    positions = [one for _, one in made if one is not None]
    return np.concatenate([one for one, _ in made]), np.concatenate(positions) if positions else None


def png(picture: Any) -> bytes:
    """Returns a PIL picture as PNG bytes: rotated by EXIF, CMYK and the like as RGB; RowError for modes such as F."""
    from PIL import ImageOps

    picture, buffer = ImageOps.exif_transpose(picture), io.BytesIO()
    if picture.mode in _WITHOUT_PNG:
        picture = picture.convert("RGB")
    try:
        picture.save(buffer, "PNG")
    except OSError as error:
        raise RowError(
            f"a picture has the mode {picture.mode}, which PNG does not support; convert it to RGB"
        ) from error
    return buffer.getvalue()
