"""What a model makes of a picture: tokens, from its size alone, and pixels, by transformers' processors of PIL.

A picture takes slots of a row, each with the pixels and the soft tokens of one image of the tower: Gemma 4 takes one
for each picture, SmolVLM and Idefics3 take one for each tile. The processors scale bytes by 1 / 255, so pixels stay
bytes until they are on the device.
"""

from __future__ import annotations

import abc
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpu_kit.config.loader import DataConfig, ModelConfig
from tpu_kit.model.families.vision import Sizes, check_rows, sizes_of
from tpu_kit.model.weights.source import locate, read_config

if TYPE_CHECKING:
    from PIL.Image import Image

_VERSION = 2  # increase it when the code below makes other tokens or pixels


@dataclass(frozen=True)
class ImageProcessor(abc.ABC):
    """Makes tokens and pixels of pictures for one model; picklable.

    Attributes:
        sizes: of a slot.
        settings: of the model's own processor, as its files have them.
        token: the text for which a chat template stands for an image.
        token_id: the id of the text, and of the soft tokens.
    """

    sizes: Sizes
    settings: Mapping[str, Any]
    token: str
    token_id: int

    @abc.abstractmethod
    def tokens(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """Returns the ids that stand for a picture, and the number of soft tokens of each of its slots."""

    @abc.abstractmethod
    def pixels(self, image: Image) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns pixels (slots, patches, numbers) uint8 and positions (slots, patches, 2) int32 of an RGB picture."""

    @abc.abstractmethod
    def for_transformers(self, images: list[Image], ids: list[int]) -> dict[str, Any]:
        """Returns tensors of pictures as the processor of transformers makes them, for `forward` with these ids."""

    @property
    def identity(self) -> str:
        """A hash of all that tokens and pixels follow from."""
        packages = [version("transformers"), version("pillow")]
        parts = [_VERSION, type(self).__name__, list(self.sizes), dict(self.settings), self.token_id, packages]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Gemma4(ImageProcessor):
    """Gemma 4: a picture is scaled to at most `sizes.tokens` squares of `side` pixels, and keeps its aspect ratio.

    Attributes:
        begin: id of the token before the soft tokens.
        end: id of the token after them.
        patch: pixels of the side of a patch.
        pool: patches of the side of a soft token.
    """

    begin: int
    end: int
    patch: int
    pool: int

    def tokens(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """See `ImageProcessor.tokens`."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        patches = self.sizes.tokens * self.pool**2
        resized = get_aspect_ratio_preserving_size(height, width, self.patch, patches, self.pool)
        count = math.prod(resized) // (self.patch * self.pool) ** 2
        return [self.begin, *[self.token_id] * count, self.end], [count]

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        options = {"patch_size": self.patch, "pooling_kernel_size": self.pool, "max_soft_tokens": self.sizes.tokens}
        return Gemma4ImageProcessorPil(**{**self.settings, **options})

    def pixels(self, image: Image) -> tuple[np.ndarray, np.ndarray | None]:
        """See `ImageProcessor.pixels`."""
        made = self._processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")
        pixels, positions = np.asarray(made["pixel_values"]), np.asarray(made["image_position_ids"])
        return pixels.astype(np.uint8), positions.astype(np.int32)

    def for_transformers(self, images: list[Image], ids: list[int]) -> dict[str, Any]:
        """See `ImageProcessor.for_transformers`."""
        made = self._processor(images=images, return_tensors="pt")
        types = torch.tensor([ids]).eq(self.token_id).long()
        return {name: made[name] for name in ("pixel_values", "image_position_ids")} | {"mm_token_type_ids": types}


@dataclass(frozen=True)
class Idefics3(ImageProcessor):
    """SmolVLM and Idefics3: a picture is scaled and cut into tiles, with one of the whole picture after them.

    Attributes:
        ids: of the texts around tiles, by the texts.
        patch: pixels of the side of a patch.
        kind: "smolvlm" or "idefics3".
    """

    ids: Mapping[str, tuple[int, ...]]
    patch: int
    kind: str

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        return (SmolVLMImageProcessorPil if self.kind == "smolvlm" else Idefics3ImageProcessorPil)(**self.settings)

    def tokens(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """See `ImageProcessor.tokens`."""
        _, rows, columns = self._processor.get_number_of_image_patches(height, width)
        count = self.sizes.tokens
        soft, around = [self.token_id] * count, self.ids
        ids = list[int]()
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                ids += [*around[_AROUND], *around[f"<row_{row}_col_{column}>"], *soft]
            ids += around["\n\n" if row == rows else "\n"]  # one more line break is before the whole picture
        ids += [*around[_AROUND], *around[_WHOLE], *soft, *around[_AROUND]]
        return ids, [count] * (rows * columns + 1)

    def pixels(self, image: Image) -> tuple[np.ndarray, np.ndarray | None]:
        """See `ImageProcessor.pixels`."""
        made = self._processor(images=[[image]], do_rescale=False, do_normalize=False, return_tensors="np")
        pixels = np.asarray(made["pixel_values"])[0]  # (slots, channels, height, width)
        assert np.asarray(made["pixel_attention_mask"]).all(), "each tile fills its square"
        side = pixels.shape[-1] // self.patch
        used = side * self.patch  # SmolVLM2-2.2B has tiles of 384 pixels and patches of 14
        pixels = pixels[..., :used, :used]
        patches = pixels.reshape(len(pixels), 3, side, self.patch, side, self.patch).transpose(0, 2, 4, 3, 5, 1)
        numbers = patches.reshape(len(pixels), self.sizes.patches, self.sizes.numbers)
        return np.rint(numbers).clip(0, 255).astype(np.uint8), None

    def for_transformers(self, images: list[Image], ids: list[int]) -> dict[str, Any]:
        """See `ImageProcessor.for_transformers`."""
        made = self._processor(images=[images], return_tensors="pt")
        return {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}


_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_MOST_TILES = 20  # of a side


def image_processor(model: ModelConfig, tokenizer: Any, data: DataConfig) -> ImageProcessor:
    """Returns what makes tokens and pixels for a model.

    Args:
        model: with `images`.
        tokenizer: the model's.
        data: `image_tokens` and `max_length`.

    Raises:
        ValueError: the model has no part for images that is trained, its processor's settings cannot be read, or the
            number of tokens is not one of the model's, or more than those of a row.
    """
    tokens = data.image_tokens
    config: Any = read_config(model, needed=True)
    if getattr(config, "vision_config", None) is None:
        raise ValueError(f"model.images=true: {model.name} has no part for images; set it to false")
    given = _settings(model)
    kind, vision = config.model_type, config.vision_config
    if kind in ("gemma4", "gemma4_unified"):
        _check_gemma4(tokens)
        sizes = sizes_of(config, tokens or given.get("max_soft_tokens"))
        check_rows(config, sizes.tokens, data.max_length)
        pool = 1 if kind == "gemma4_unified" else vision.pooling_kernel_size
        patch = vision.model_patch_size if kind == "gemma4_unified" else vision.patch_size
        options: dict[str, Any] = {name: given[name] for name in ("resample", "do_resize") if name in given}
        token = str(tokenizer.convert_ids_to_tokens(config.image_token_id))
        ends = config.boi_token_id, config.eoi_token_id
        return Gemma4(sizes, options, token, config.image_token_id, *ends, patch, pool)
    sizes = sizes_of(config)  # refuses other families
    check_rows(config, sizes.tokens, data.max_length)
    names = ("size", "max_image_size", "resample", "do_resize", "do_image_splitting")
    kept: dict[str, Any] = {name: given[name] for name in names if name in given}
    kept |= _resolution(tokens, sizes.tokens, kept.get("max_image_size", {}).get("longest_edge") or vision.image_size)
    token = str(tokenizer.convert_ids_to_tokens(config.image_token_id))
    ids = {text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
           for text in (_AROUND, _WHOLE, "\n", "\n\n", *_tiles())}  # fmt: skip
    return Idefics3(sizes, kept, token, config.image_token_id, ids, vision.patch_size, kind)


@lru_cache(maxsize=1)
def _tiles() -> tuple[str, ...]:
    every = range(1, _MOST_TILES + 1)
    return tuple(f"<row_{row}_col_{column}>" for row in every for column in every)


def _settings(model: ModelConfig) -> dict[str, Any]:
    """Returns the settings of a model's image processor, as its files have them."""
    from transformers import ImageProcessingMixin

    try:
        found, _ = ImageProcessingMixin.get_image_processor_dict(locate(model), revision=model.revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.name={model.name}: the settings of its image processor (preprocessor_config.json or "
            "processor_config.json) cannot be read; add the file of the original model"
        ) from error
    return dict(found)


def _check_gemma4(tokens: int | None) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import _SUPPORTED_SOFT_TOKENS

    if tokens is not None and tokens not in _SUPPORTED_SOFT_TOKENS:
        offered = ", ".join(map(str, _SUPPORTED_SOFT_TOKENS))
        raise ValueError(f"data.image_tokens={tokens}: Gemma 4 takes {offered}; set one of these, or null")


def _resolution(tokens: int | None, of_tile: int, side: int) -> dict[str, Any]:
    """Returns settings by which a picture takes at most so many soft tokens; none for the model's own."""
    if tokens is None:
        return {}
    if tokens < of_tile:
        raise ValueError(f"data.image_tokens={tokens}: a tile has {of_tile}; set at least that, or null")
    tiles = math.isqrt(max(0, tokens // of_tile - 1))
    size = {"max_image_size": {"longest_edge": side}}
    if tiles < 2:  # the whole picture alone
        return size | {"do_image_splitting": False}
    return size | {"do_image_splitting": True, "size": {"longest_edge": tiles * side}}
