"""Makes the tokens of a picture, from its size alone, and its pixels, mostly by transformers' PIL processors.

A picture takes one or more slots of a row. A slot holds the pixels and soft tokens of one image of the vision tower:
the picture in Gemma and Qwen; a tile or the whole, smaller picture in SmolVLM, Idefics3 and LFM2-VL. Pixels stay bytes,
0 to 255, until they are on the device, which scales them by 1 / 255 and normalizes them.
"""

from __future__ import annotations

import abc
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpu_kit.config.loader import DataConfig, ModelConfig
from tpu_kit.data.rows.field_values import RowError
from tpu_kit.model.families.vision import (
    MOST_TOKENS,
    OF_GRIDS,
    TILE_TOKENS,
    Sizes,
    axis_positions,
    check_rows,
    in_rows,
    sizes_of,
)
from tpu_kit.model.families.vision_towers import TOWERS
from tpu_kit.model.weights.source import locate, read_config

if TYPE_CHECKING:
    from PIL.Image import Image

_VERSION = 3  # increase it if the code below makes other tokens or pixels


@dataclass(frozen=True)
class ImageProcessor(abc.ABC):
    """Makes the tokens and pixels of pictures for a model; picklable.

    Attributes:
        sizes: sizes of a slot.
        settings: settings of transformers' processor, from the model's files and `data.image_tokens`.
        token: text that a chat template writes for an image.
        token_id: id of soft tokens, and of `token` unless `place_id` differs.
    """

    sizes: Sizes
    settings: Mapping[str, Any]
    token: str
    token_id: int

    @property
    def place_id(self) -> int:
        """The id of `token`, the text that a chat template writes for an image: `token_id`, except in Gemma 3."""
        return self.token_id

    def shown(self, text: str) -> str:
        """Returns a rendered chat; in Gemma 3 with two line breaks before and after every `token`, else unchanged."""
        return text

    @abc.abstractmethod
    def tokens(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """Returns a picture's tokens from its size in pixels; raises RowError if it would take too many.

        Returns:
            The ids that replace `place_id` in a chat, markers included, and the number of soft tokens of each slot.
        """

    @abc.abstractmethod
    def pixels(self, image: Image) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns pixels (slots, patches, numbers) uint8 and positions (slots, patches, 2) int32 of an RGB picture.

        Positions are column and row of a patch, -1 for padding; None if slots are never padded (Gemma 3, Idefics3).
        """

    @abc.abstractmethod
    def for_transformers(self, images: list[Image], ids: list[int]) -> dict[str, Any]:
        """Returns arguments of transformers' `forward` by name, without input_ids, for RGB pictures in prompt `ids`."""

    def axes(self, ids: np.ndarray, slots: Sequence[int], positions: np.ndarray) -> np.ndarray:
        """Returns positions in time, row and column, (3, S) int32, for a rotary embedding in three axes; only in Qwen.

        Args:
            ids: (S,) of a document or a prompt.
            slots: soft tokens per slot.
            positions: positions of `pixels` for all slots.
        """
        raise AssertionError("only processors with `sizes.axes` have axes")

    @property
    def identity(self) -> str:
        """A hash (hex) of class, sizes, settings, `token_id`, and versions of this code, transformers and pillow."""
        packages = [version("transformers"), version("pillow")]
        parts = [_VERSION, type(self).__name__, list(self.sizes), dict(self.settings), self.token_id, packages]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Gemma4(ImageProcessor):
    """Gemma 4: scales a picture, up or down, to at most `sizes.tokens` soft tokens, and keeps its aspect ratio.

    Attributes:
        begin: id of the token before the soft tokens.
        end: id of the token after them.
        patch: side of a patch in pixels.
        pool: side of a soft token in patches.
    """

    begin: int
    end: int
    patch: int
    pool: int

    def tokens(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """Returns `begin`, the soft tokens and `end` of a picture of this size; and [their number], never too large."""
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
        """Returns patches (1, patches, numbers) uint8 and their column and row (1, patches, 2), -1 for padding."""
        made = self._processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")
        pixels, positions = np.asarray(made["pixel_values"]), np.asarray(made["image_position_ids"])
        return pixels.astype(np.uint8), positions.astype(np.int32)

    def for_transformers(self, images: list[Image], ids: list[int]) -> dict[str, Any]:
        """Returns pixel_values and image_position_ids of pictures, and mm_token_type_ids (1, S): 1 at soft tokens."""
        made = self._processor(images=images, return_tensors="pt")
        types = torch.tensor([ids]).eq(self.token_id).long()
        return {name: made[name] for name in ("pixel_values", "image_position_ids")} | {"mm_token_type_ids": types}


@dataclass(frozen=True)
class Idefics3(ImageProcessor):
    """SmolVLM and Idefics3: scales a picture and cuts it into tiles; the whole picture is the last or the only tile.

    Attributes:
        ids: markers of tiles and line breaks between them -> their ids.
        patch: side of a patch in pixels.
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
        """Returns ids with markers (tiles by row, then the whole), and [`sizes.tokens` per slot]; never a RowError."""
        _, rows, columns = self._processor.get_number_of_image_patches(height, width)
        count = self.sizes.tokens
        soft, around = [self.token_id] * count, self.ids
        ids = list[int]()
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                ids += [*around[_AROUND], *around[f"<row_{row}_col_{column}>"], *soft]
            ids += around["\n\n" if row == rows else "\n"]  # two line breaks precede the whole picture
        ids += [*around[_AROUND], *around[_WHOLE], *soft, *around[_AROUND]]
        return ids, [count] * (rows * columns + 1)

    def pixels(self, image: Image) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns patches (tiles, patches, numbers) uint8, with the whole picture last, and None for positions."""
        made = self._processor(images=[[image]], do_rescale=False, do_normalize=False, return_tensors="np")
        pixels = np.asarray(made["pixel_values"])[0]  # (slots, channels, height, width)
        assert np.asarray(made["pixel_attention_mask"]).all(), "each tile fills its square"
        return patches_of(pixels, self.patch), None

    def for_transformers(self, images: list[Image], ids: list[int]) -> dict[str, Any]:
        """Returns pixel_values and pixel_attention_mask of the tiles of a prompt's pictures; ignores `ids`."""
        made = self._processor(images=[images], return_tensors="pt")
        return {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}


@dataclass(frozen=True)
class Gemma3(ImageProcessor):
    """Gemma 3: scales every picture to the same square, without pan and scan.

    Attributes:
        begin: id of the token before the soft tokens; chat templates write it.
        end: id of the token after them.
        patch: side of a patch in pixels.
    """

    begin: int
    end: int
    patch: int

    @property
    def place_id(self) -> int:
        """The id of `token`: `begin`, as chat templates of Gemma 3 write only the begin of an image."""
        return self.begin

    def shown(self, text: str) -> str:
        """Returns a rendered chat with two line breaks before and after every `token`."""
        return text.replace(self.token, f"\n\n{self.token}\n\n")

    def tokens(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """Returns `begin`, the soft tokens and `end`, and [`sizes.tokens`], whatever the picture's size."""
        return [self.begin, *[self.token_id] * self.sizes.tokens, self.end], [self.sizes.tokens]

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(**self.settings)

    def pixels(self, image: Image) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns patches (1, patches, numbers) uint8, and None for positions."""
        made = self._processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")
        return patches_of(np.asarray(made["pixel_values"]), self.patch), None

    def for_transformers(self, images: list[Image], ids: list[int]) -> dict[str, Any]:
        """Returns pixel_values of pictures, and token_type_ids (1, S): 1 at soft tokens, else 0."""
        types = torch.tensor([ids]).eq(self.token_id).long()
        return {"pixel_values": self._processor(images=images, return_tensors="pt")["pixel_values"],
                "token_type_ids": types}  # fmt: skip


@dataclass(frozen=True)
class Qwen(ImageProcessor):
    """Qwen2.5-VL, Qwen3-VL, Qwen3.5: scales a picture to at most `sizes.tokens` soft tokens at its aspect ratio.

    Attributes:
        patch: side of a patch in pixels.
        merge: side of a soft token in patches.
    """

    patch: int
    merge: int

    def tokens(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """Returns soft tokens without markers, and [their number].

        Raises RowError for more than `sizes.tokens`, or if a side is over 200 times as long as the other.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        side, size = self.patch * self.merge, self.settings["size"]
        try:
            made = smart_resize(height, width, side, size["shortest_edge"], size["longest_edge"])
        except ValueError as error:
            raise RowError(f"a picture of {width} x {height} pixels cannot be used: {error}") from error
        if (count := math.prod(made) // side**2) > self.sizes.tokens:
            raise _too_long(height, width, count, self.sizes.tokens)
        return [self.token_id] * count, [count]

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(**self.settings, patch_size=self.patch, merge_size=self.merge)

    def pixels(self, image: Image) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns patches (1, patches, numbers) uint8, and their column and row (1, patches, 2) int32, -1 for padding.

        Patches of a soft token are adjacent.
        """
        made = self._processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")
        patches, (_, rows, columns) = np.asarray(made["pixel_values"]), made["image_grid_thw"][0]
        once = patches.reshape(len(patches), 3, -1, self.patch**2)[:, :, 0].reshape(len(patches), -1)  # times are equal
        row, column = _by_token(rows, columns, self.merge)
        numbers = np.zeros((1, self.sizes.patches, self.sizes.numbers), dtype=np.uint8)
        numbers[0, : len(once)] = np.rint(once).clip(0, 255).astype(np.uint8)
        positions = np.full((1, self.sizes.patches, 2), -1, dtype=np.int32)
        positions[0, : len(once)] = np.stack([column, row], -1)
        return numbers, positions

    def axes(self, ids: np.ndarray, slots: Sequence[int], positions: np.ndarray) -> np.ndarray:
        """Returns time, row and column (3, S) int32 of every token of `ids`, as transformers' `get_rope_index`."""
        return axis_positions(ids == self.token_id, slots, positions, self.merge)

    def for_transformers(self, images: list[Image], ids: list[int]) -> dict[str, Any]:
        """Returns pixel_values and image_grid_thw of pictures, and mm_token_type_ids (1, S): 1 at soft tokens."""
        made = self._processor(images=images, return_tensors="pt")
        types = torch.tensor([ids]).eq(self.token_id).long()
        return {name: made[name] for name in ("pixel_values", "image_grid_thw")} | {"mm_token_type_ids": types}


@dataclass(frozen=True)
class Lfm2(ImageProcessor):
    """LFM2-VL: scales a picture at its aspect ratio; tiles of a large picture precede the whole, if `use_thumbnail`.

    transformers' processor of LFM2-VL needs torchvision; this class scales with PIL.

    Attributes:
        ids: markers of images and tiles -> their ids.
        patch: side of a patch in pixels.
        merge: side of a soft token in patches.
    """

    ids: Mapping[str, tuple[int, ...]]
    patch: int
    merge: int

    def _grids(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Returns columns and rows of tiles (0: none), and rows and columns of the whole picture's soft tokens."""
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

        given, side, sizes = self.settings, self.patch * self.merge, (height, width)
        least, most = (given[name] * side**2 for name in ("min_image_tokens", "max_image_tokens"))
        rows, columns = (max(1, round(one / side)) for one in sizes)
        across = down = 0
        if given["do_image_splitting"] and rows * columns * side**2 > most * given["max_pixels_tolerance"]:
            bounds = max(2, given["min_tiles"]), given["max_tiles"]
            across, down = get_optimal_tiled_canvas(sizes, (given["tile_size"], given["tile_size"]), *bounds)
        if rows * columns * side**2 > most:
            by = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(one / by / side)) for one in sizes)
        elif rows * columns * side**2 < least:
            by = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(one * by / side) for one in sizes)
        if rows * columns > self.sizes.tokens:
            raise _too_long(height, width, rows * columns, self.sizes.tokens)
        return across, down, rows, columns

    def tokens(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """Returns ids with markers (tiles by row, then the whole), and soft tokens per slot; RowError if too many."""
        across, down, rows, columns = self._grids(height, width)
        of_tile = (self.settings["tile_size"] // self.patch // self.merge) ** 2
        ids, counts = [*self.ids[_START]], [of_tile] * across * down
        for place, count in enumerate(counts):
            ids += [*self.ids[_TILE.format(place // across + 1, place % across + 1)], *[self.token_id] * count]
        if not counts or self.settings["use_thumbnail"]:
            ids += [*self.ids[_THUMBNAIL]] * bool(counts) + [self.token_id] * (rows * columns)
            counts.append(rows * columns)
        return [*ids, *self.ids[_END]], counts

    def pixels(self, image: Image) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns patches (slots, patches, numbers) uint8, and their column and row (slots, patches, 2) int32.

        Patches are padded with 0, columns and rows with -1. Slots have the order of `tokens`, which raises the same
        RowError. Patches of a soft token are adjacent.
        """
        across, down, *whole = self._grids(image.height, image.width)
        side, tile, made = self.patch * self.merge, self.settings["tile_size"], list[Any]()
        if across:
            scaled = image.resize((across * tile, down * tile), self.settings["resample"])
            corners = [(left * tile, top * tile) for top in range(down) for left in range(across)]
            made += [scaled.crop((left, top, left + tile, top + tile)) for left, top in corners]
        if not made or self.settings["use_thumbnail"]:
            made.append(image.resize((whole[1] * side, whole[0] * side), self.settings["resample"]))
        numbers = np.zeros((len(made), self.sizes.patches, self.sizes.numbers), dtype=np.uint8)
        positions = np.full((len(made), self.sizes.patches, 2), -1, dtype=np.int32)
        for slot, one in enumerate(made):
            rows, columns = one.height // self.patch, one.width // self.patch
            row, column = _by_token(rows, columns, self.merge)
            patches = patches_of(np.asarray(one).transpose(2, 0, 1)[None], self.patch)[0]
            numbers[slot, : rows * columns] = patches[row * columns + column]
            positions[slot, : rows * columns] = np.stack([column, row], -1)
        return numbers, positions

    def for_transformers(self, images: list[Image], ids: list[int]) -> dict[str, Any]:
        """Returns pixel_values, pixel_attention_mask and spatial_shapes, made from own `pixels`; ignores `ids`."""
        numbers, positions = zip(*map(self.pixels, images), strict=True)
        pixels = torch.from_numpy(np.concatenate(numbers)).float() * (1 / 255)
        return in_rows(pixels, torch.from_numpy(np.concatenate(positions)))


def _too_long(height: int, width: int, count: int, most: int) -> RowError:
    """Returns the error for a picture that takes `count` soft tokens, more than `most`."""
    return RowError(
        f"a picture of {width} x {height} pixels takes {count} tokens, more than {most}: its sides differ too much; "
        "cut it, or raise data.image_tokens"
    )


def _by_token(rows: int, columns: int, merge: int) -> Sequence[np.ndarray]:
    """Returns rows and columns of a picture's patches, (rows * columns,) both; a soft token's patches are adjacent."""
    shape = rows // merge, merge, columns // merge, merge
    return [one.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for one in np.indices((rows, columns))]


def patches_of(pixels: np.ndarray, patch: int) -> np.ndarray:
    """Cuts pixels (N, 3, height, width) into patches (N, P, 3 * patch**2), rounded and clipped to uint8.

    Patches are in row-major order, numbers of a patch too, with channels last. Pixels that fill no patch are dropped.
    """
    rows, columns = (size // patch for size in pixels.shape[-2:])
    used = pixels[..., : rows * patch, : columns * patch]  # SmolVLM2-2.2B: 14 does not divide 384 pixels
    cut = used.reshape(len(pixels), 3, rows, patch, columns, patch).transpose(0, 2, 4, 3, 5, 1)
    return np.rint(cut.reshape(len(pixels), rows * columns, 3 * patch**2)).clip(0, 255).astype(np.uint8)


_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_MOST_TILES = 20  # per side
_OF_LFM2 = {
    "min_image_tokens": 64, "max_image_tokens": TILE_TOKENS, "do_image_splitting": True, "min_tiles": 2,
    "max_tiles": 10, "use_thumbnail": True, "tile_size": 512, "max_pixels_tolerance": 2.0, "resample": 2,
}  # fmt: skip
_START, _END, _THUMBNAIL, _TILE = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|img_row_{}_col_{}|>"


def image_processor(model: ModelConfig, tokenizer: Any, data: DataConfig) -> ImageProcessor:
    """Returns the image processor of a model, from the model's files, its tokenizer, and the data section.

    The section's `image_tokens` (None: the model's default) and `max_length` are used.

    Raises:
        ValueError: the model has no vision part, or an unsupported family; its processor's settings cannot be read or
            are not supported; or the model does not offer `image_tokens`. Also as `vision.check_rows`, such as for an
            image that may exceed `max_length`.
    """
    tokens = data.image_tokens
    config: Any = read_config(model, needed=True)
    if getattr(config, "vision_config", None) is None:
        raise ValueError(f"model.images=true: {model.name} has no vision part; set it to false")
    sizes = sizes_of(config, tokens)  # raises for other families
    given, kind, vision = _settings(model), config.model_type, config.vision_config
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
    if kind in OF_GRIDS:
        return _qwen(model, tokenizer, config, given, data)
    _check_normal(model, config, given)
    check_rows(config, sizes.tokens, data.max_length)
    if kind == "gemma3":
        return _gemma3(model, tokenizer, config, sizes, given, tokens)
    if kind == "lfm2_vl":
        return _lfm2(model.name, tokenizer, config, sizes, given, tokens)
    names = ("size", "max_image_size", "resample", "do_resize", "do_image_splitting")
    kept: dict[str, Any] = {name: given[name] for name in names if name in given}
    kept |= _resolution(tokens, sizes.tokens, kept.get("max_image_size", {}).get("longest_edge") or vision.image_size)
    token = str(tokenizer.convert_ids_to_tokens(config.image_token_id))
    ids = _ids_of(tokenizer, (_AROUND, _WHOLE, "\n", "\n\n", *_tiles()))
    return Idefics3(sizes, kept, token, config.image_token_id, ids, vision.patch_size, kind)


def _ids_of(tokenizer: Any, texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Returns text -> its token ids, without the tokenizer's special tokens around it."""
    return {text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts}


@lru_cache(maxsize=1)
def _tiles() -> tuple[str, ...]:
    """Returns the texts "<row_R_col_C>" of SmolVLM and Idefics3 for all R and C from 1 to `_MOST_TILES`."""
    every = range(1, _MOST_TILES + 1)
    return tuple(f"<row_{row}_col_{column}>" for row in every for column in every)


def _settings(model: ModelConfig) -> dict[str, Any]:
    """Returns the settings of preprocessor_config.json or processor_config.json; raises ValueError without them."""
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
    """Raises ValueError if Gemma 4 does not offer `data.image_tokens`; None is allowed."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import _SUPPORTED_SOFT_TOKENS

    if tokens is not None and tokens not in _SUPPORTED_SOFT_TOKENS:
        offered = ", ".join(map(str, _SUPPORTED_SOFT_TOKENS))
        raise ValueError(f"data.image_tokens={tokens}: Gemma 4 takes {offered}; set one of these, or null")


def _gemma3(
    model: ModelConfig, tokenizer: Any, config: Any, sizes: Sizes, given: Mapping[str, Any], tokens: int | None
) -> Gemma3:
    """Returns Gemma 3's processor; ValueError for pan and scan, or if `tokens` is neither None nor `sizes.tokens`."""
    if tokens not in (None, sizes.tokens):
        raise ValueError(
            f"data.image_tokens={tokens}: a picture of Gemma 3 takes {sizes.tokens} tokens, whatever its size; set null"
        )
    if given.get("do_pan_and_scan"):
        raise ValueError(
            f"model.name={model.name}: its image processor cuts pictures (do_pan_and_scan), which is not trained; set "
            "it to false in preprocessor_config.json"
        )
    side = config.vision_config.image_size
    options = {"size": {"height": side, "width": side}} | {name: given[name] for name in ("resample",) if name in given}
    token = str(tokenizer.convert_ids_to_tokens(config.boi_token_id))
    ends = config.boi_token_id, config.eoi_token_id
    return Gemma3(sizes, options, token, config.image_token_id, *ends, config.vision_config.patch_size)


def _qwen(model: ModelConfig, tokenizer: Any, config: Any, given: Mapping[str, Any], data: DataConfig) -> Qwen:
    """Returns Qwen's processor; data.image_tokens of None means `MOST_TOKENS`, or the model's own limit if lower.

    Raises ValueError if `given` (of `_settings`) does not allow that number, or as `_check_normal` and `check_rows`.
    """
    vision, size = config.vision_config, given.get("size") or {}
    square = (vision.patch_size * vision.spatial_merge_size) ** 2  # pixels of a soft token
    least = given.get("min_pixels") or size.get("shortest_edge") or 4 * square
    most = given.get("max_pixels") or size.get("longest_edge") or MOST_TOKENS * square
    tokens = data.image_tokens
    # Rounding up to whole soft tokens at most doubles a side of at least one.
    fewest, limit = 4 * -(-least // square), most // square
    if tokens is not None and not fewest <= tokens <= limit:
        raise ValueError(
            f"data.image_tokens={tokens}: a picture of {model.name} takes {fewest} to {limit:,} tokens at most; set a "
            "number of these, or null"
        )
    _check_normal(model, config, given)
    sizes = sizes_of(config, tokens or min(MOST_TOKENS, limit))
    check_rows(config, sizes.tokens, data.max_length)
    options: dict[str, Any] = {"size": {"shortest_edge": least, "longest_edge": sizes.tokens * square}}
    options |= {name: given[name] for name in ("resample",) if name in given}
    options |= {"temporal_patch_size": vision.temporal_patch_size, "image_mean": list(TOWERS[config.model_type].mean),
                "image_std": list(TOWERS[config.model_type].std)}  # fmt: skip
    token = str(tokenizer.convert_ids_to_tokens(config.image_token_id))
    return Qwen(sizes, options, token, config.image_token_id, vision.patch_size, vision.spatial_merge_size)


def _lfm2(name: str, tokenizer: Any, config: Any, sizes: Sizes, given: Mapping[str, Any], tokens: int | None) -> Lfm2:
    """Returns LFM2-VL's processor; raises ValueError if a slot could take more than `TILE_TOKENS` soft tokens.

    `tokens` limits a whole picture, tiles included; None keeps the limits in `given` (see `_settings`) or `_OF_LFM2`.
    """
    kept: dict[str, Any] = {name: given.get(name, value) for name, value in _OF_LFM2.items()}
    merge, patch, whole = config.downsample_factor, config.vision_config.patch_size, kept["max_image_tokens"]
    of_tile = (kept["tile_size"] // patch // merge) ** 2
    if tokens is not None:
        tiles = min(kept["max_tiles"], (tokens - whole * kept["use_thumbnail"]) // of_tile)
        kept["do_image_splitting"] &= tiles >= kept["min_tiles"]
        kept |= {"max_tiles": tiles, "max_image_tokens": min(tokens, whole)}
        kept["min_image_tokens"] = min(kept["min_image_tokens"], max(1, tokens // 4))  # sides are rounded up
    most = max(kept["max_image_tokens"], of_tile * kept["do_image_splitting"])
    if most > TILE_TOKENS:
        text = f"makes images of {most} tokens, but memory is planned for {TILE_TOKENS}; lower max_image_tokens or"
        raise ValueError(f"model.name={name}: its image processor {text} tile_size in preprocessor_config.json")
    every = range(1, kept["max_tiles"] + 1)
    named = (_TILE.format(row, column) for row in every for column in every)
    ids = _ids_of(tokenizer, (_START, _END, _THUMBNAIL, *named))
    token = str(tokenizer.convert_ids_to_tokens(config.image_token_id))
    sizes = sizes._replace(tokens=most, patches=most * merge**2)
    return Lfm2(sizes, kept, token, config.image_token_id, ids, patch, merge)


def _check_normal(model: ModelConfig, config: Any, given: Mapping[str, Any]) -> None:
    """Raises ValueError if the settings `given` have an image_mean or image_std, and it differs from `TOWERS`."""
    kind = config.model_type
    for name, own in (("image_mean", TOWERS[kind].mean), ("image_std", TOWERS[kind].std)):
        if name in given and not np.allclose(given[name], own, atol=1e-6):
            raise ValueError(
                f"model.name={model.name}: its image processor has {name}={given[name]}, but images of {kind} are "
                f"computed with {list(own)}; use the file of the original model"
            )


def _resolution(tokens: int | None, of_tile: int, side: int) -> dict[str, Any]:
    """Returns settings that limit a picture to `tokens` soft tokens; empty for None, the model's own limit.

    `of_tile` are a tile's soft tokens (ValueError if `tokens` are fewer); `side` is its side in pixels.
    """
    if tokens is None:
        return {}
    if tokens < of_tile:
        raise ValueError(f"data.image_tokens={tokens}: a tile has {of_tile} tokens; set at least that, or null")
    tiles = math.isqrt(max(0, tokens // of_tile - 1))
    size = {"max_image_size": {"longest_edge": side}}
    if tiles < 2:  # only the whole picture
        return size | {"do_image_splitting": False}
    return size | {"do_image_splitting": True, "size": {"longest_edge": tiles * side}}
