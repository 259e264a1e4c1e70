"""Token ids that carry the pictures that stand in them, and the tensors of their batches."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from tpu_kit.data.images.files import PictureFiles
from tpu_kit.data.images.processors import ImageProcessor
from tpu_kit.data.rows.field_values import RowError


class PicturedIds(list[int]):
    """Token ids in which pictures stand, and the pictures; picklable.

    Attributes:
        pictures: what `files` opens, in their order.
        slots: soft tokens of each slot of the pictures.
        files: opens them.
        processor: of the model.
    """

    def __init__(
        self, ids: Iterable[int], pictures: Sequence[Any], slots: Sequence[int], files: PictureFiles,
        processor: ImageProcessor,
    ) -> None:  # fmt: skip
        super().__init__(ids)
        self.pictures, self.slots, self.files, self.processor = tuple(pictures), tuple(slots), files, processor

    def __add__(self, more: Sequence[int]) -> PicturedIds:  # type: ignore[override]  # as of lists
        return PicturedIds([*self, *more], self.pictures, self.slots, self.files, self.processor)

    def blackened(self) -> PicturedIds:
        """Returns the ids with black pictures of the same sizes: a control of what a model sees."""
        from PIL import Image

        sizes = [(one.width, one.height) for one in map(self.files.picture, self.pictures)]
        pictures = [png(Image.new("RGB", size)) for size in sizes]
        return PicturedIds(self, pictures, self.slots, self.files, self.processor)

    def for_transformers(self) -> dict[str, torch.Tensor]:
        """Returns what a model of transformers takes for the pictures, by its own image processor."""
        return self.processor.for_transformers([*map(self.files.decoded, self.pictures)], list(self))

    def images_among(self, prompts: Sequence[Sequence[int]]) -> PromptImages:
        """Returns what makes the tensors of the pictures of prompts, of which this is one."""
        return PromptImages(self.processor, prompts)


class PromptImages:
    """Makes the tensors of images of batches of prompts, all of one shape; `prompts` are those of all batches."""

    def __init__(self, processor: ImageProcessor, prompts: Sequence[Sequence[int]]) -> None:
        self._processor = processor
        self._room = max(len(prompt.slots) for prompt in prompts if isinstance(prompt, PicturedIds))

    def tensors(self, prompts: Sequence[Sequence[int]], width: int, rows: int) -> dict[str, torch.Tensor]:
        """Returns the columns of `model.families.vision` for a batch of prompts, padded to `rows` of `width` tokens.

        A prompt with a picture that cannot be decoded is asked with black ones, which is told.
        """
        sizes = self._processor.sizes
        pixels = torch.zeros(rows, self._room, sizes.patches, sizes.numbers, dtype=torch.uint8)
        places = torch.zeros(rows, self._room, sizes.patches, 2, dtype=torch.int32)
        index = torch.full((rows, width), -1, dtype=torch.int32)
        for row, prompt in enumerate(prompts):
            if not isinstance(prompt, PicturedIds):
                continue
            try:
                made = [self._processor.pixels(prompt.files.decoded(source)) for source in prompt.pictures]
            except RowError as error:
                print(f"warning: {error}; its prompt is asked with black pictures", file=sys.stderr, flush=True)
                shown = prompt.blackened()
                made = [self._processor.pixels(shown.files.decoded(source)) for source in shown.pictures]
            pixels[row, : len(prompt.slots)] = torch.from_numpy(np.concatenate([one for one, _ in made]))
            if sizes.positions:
                positions = np.concatenate([one for _, one in made if one is not None])
                places[row, : len(prompt.slots)] = torch.from_numpy(positions)
            soft = [slot * sizes.tokens + token for slot, count in enumerate(prompt.slots) for token in range(count)]
            index[row, np.flatnonzero(np.array(prompt) == self._processor.token_id)] = torch.tensor(soft).int()
        found = {"pixels": pixels} | ({"patch_positions": places} if sizes.positions else {})
        return found | {"image_index": index}


def png(picture: Any) -> bytes:
    """Returns a picture of PIL as the bytes of a file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
