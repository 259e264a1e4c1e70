"""Narrow copies of models that see, and documents with images, to compare the kit with transformers before a launch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tpu_kit.model.families.vision import columns, encoder_of, sizes_of

_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "mm_embed_dim": 32, "output_proj_dims": 32,
}  # fmt: skip
_SOFT_TOKENS = 70  # of an image of Gemma 4, at most
_GRIDS = ((4, 5), None, (3, 4))  # soft tokens of the images of the documents, in rows and columns
_TEXT = 100  # ids below it are text
_IMAGE_IDS = re.compile(r"(image|video|audio|boi|eoi|boa|eoa)_token_(id|index)")


class Document(NamedTuple):
    """A document with one image or none.

    Attributes:
        ids: (S,) int64.
        given: what transformers' `forward` takes for its image.
        columns: pixels (patches, numbers) uint8 and perhaps patch_positions of the image; empty without one.
    """

    ids: torch.Tensor
    given: dict[str, torch.Tensor]
    columns: dict[str, torch.Tensor]


def narrow_config(whole: Any, text: Any) -> Any:
    """Returns the configuration of a narrow copy of a model, of which `text` is that of the narrow text model."""
    given = {name: value for name, value in whole.to_dict().items() if name not in ("dtype", "architectures")}
    vision = given["vision_config"]
    given["vision_config"] = vision | {name: size for name, size in _SIZES.items() if vision.get(name)}
    given |= {"text_config": text.to_dict(), "audio_config": None}
    given |= {name: _TEXT + place for place, name in enumerate(sorted(filter(_IMAGE_IDS.fullmatch, given)))}
    return type(whole)(**{name: value for name, value in given.items() if value is not None or name == "audio_config"})


def soften(model: Any) -> None:
    """Makes random weights of a tower smaller: sharp attention amplifies rounding, of transformers as well."""
    if (encoder := encoder_of(model)) is not None:
        with torch.no_grad():
            for parameter in encoder.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(0.4)


def documents(config: Any) -> list[Document]:
    """Makes documents of random text around random images for a narrow copy."""
    generator, found = torch.Generator().manual_seed(3), []
    for grid in _GRIDS:
        before, after = (torch.randint(3, _TEXT, (count,), generator=generator) for count in (6, 9))
        if grid is None:
            found.append(Document(torch.cat([before, after]), {}, {}))
            continue
        made, tokens = _image(config, grid, generator)
        ids = torch.cat([before, torch.full((tokens,), config.image_token_id), after])
        found.append(Document(ids, _given(config, made, ids), made))
    return found


def _image(config: Any, grid: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """Returns the columns of a random image, and its soft tokens."""
    sizes = sizes_of(config, _SOFT_TOKENS)
    pixels = torch.randint(0, 256, (sizes.patches, sizes.numbers), generator=generator, dtype=torch.uint8)
    if not sizes.positions:
        return {"pixels": pixels}, sizes.tokens
    pool = 1 if config.model_type == "gemma4_unified" else config.vision_config.pooling_kernel_size
    rows, width = (pool * count for count in grid)
    places = torch.full((sizes.patches, 2), -1, dtype=torch.int32)
    place = torch.arange(rows * width, dtype=torch.int32)
    places[: rows * width] = torch.stack([place % width, torch.div(place, width, rounding_mode="floor")], 1)
    pixels[rows * width :] = 0
    return {"pixels": pixels, "patch_positions": places}, grid[0] * grid[1]


def _given(config: Any, made: dict[str, torch.Tensor], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    pixels = made["pixels"].float() * (1 / 255)
    if "patch_positions" in made:
        types = (ids == config.image_token_id).long()[None]
        return {"pixel_values": pixels[None], "image_position_ids": made["patch_positions"][None].long(),
                "mm_token_type_ids": types}  # fmt: skip
    patch, whole = config.vision_config.patch_size, config.vision_config.image_size
    side = whole // patch
    squares = ((pixels - 0.5) / 0.5).reshape(side, side, patch, patch, 3).permute(4, 0, 2, 1, 3)
    image = torch.nn.functional.pad(squares.reshape(3, side * patch, side * patch), (0, whole - side * patch) * 2)
    return {"pixel_values": image[None, None], "pixel_attention_mask": torch.ones(1, 1, whole, whole)}


def logits(model: Any, one: Document, reply: torch.Tensor | None = None) -> torch.Tensor:
    """Returns transformers' logits (S, V) of a document alone, perhaps with a reply, with the masks of generation."""
    reply = one.ids[:0] if reply is None else reply
    ids, given = torch.cat([one.ids, reply])[None], dict[str, Any](one.given)
    if "mm_token_type_ids" in given:
        given["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(reply)))
        given["attention_mask"] = type(model).create_masks_for_generate(
            config=model.config, inputs_embeds=torch.zeros(*ids.shape, 4), attention_mask=torch.ones_like(ids),
            past_key_values=None, position_ids=torch.arange(ids.shape[1])[None],
            mm_token_type_ids=given["mm_token_type_ids"],
        )  # fmt: skip
    found: torch.Tensor = model(input_ids=ids, use_cache=False, **given).logits[0]
    return found


def images_of(config: Any, held: Sequence[Document], starts: Sequence[int], length: int) -> dict[str, torch.Tensor]:
    """Returns the columns of images of one row, (1, ...), that holds documents from `starts` on."""
    sizes, room = sizes_of(config, _SOFT_TOKENS), sum(bool(one.columns) for one in held)
    found = {name: torch.zeros(1, *shape, dtype=dtype)
             for name, (shape, dtype) in columns(config, max(1, room), length, _SOFT_TOKENS).items()}  # fmt: skip
    found["image_index"].fill_(-1)
    slot = 0
    for one, start in zip(held, starts, strict=True):
        for name, value in one.columns.items():
            found[name][0, slot] = value
        places = start + (one.ids == config.image_token_id).nonzero()[:, 0]
        found["image_index"][0, places] = torch.arange(len(places), dtype=torch.int32) + slot * sizes.tokens
        slot += bool(one.columns)
    return found


def images_of_each(config: Any, documents: Sequence[Document], length: int) -> dict[str, torch.Tensor]:
    """Returns the columns of images of rows with one document each."""
    rows = [images_of(config, [one], [0], length) for one in documents]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
