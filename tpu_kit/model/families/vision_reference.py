"""Narrow copies of vision models, and documents with images, to compare the kit with transformers before a launch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tpu_kit.model.families.vision import OF_GRIDS, axis_positions, columns, encoder_of, in_rows, sizes_of
from tpu_kit.model.families.vision_towers import TOWERS

_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "mm_embed_dim": 32, "output_proj_dims": 32,
}  # fmt: skip
_SOFT_TOKENS = 70  # maximum of an image of Gemma 4
_GRIDS = ((4, 5), None, (3, 4))  # per document: rows and columns of soft tokens of its image; None: no image
_TEXT = 100  # ids below are text
_IMAGE_IDS = re.compile(r"(image|video|audio|boi|eoi|boa|eoa)_token_(id|index)")


class Document(NamedTuple):
    """A document with at most one image.

    Attributes:
        ids: (S,) int64.
        given: arguments of transformers' `forward` for the image.
        columns: pixels (patches, numbers) uint8 and, in some families, patch_positions; empty without an image.
    """

    ids: torch.Tensor
    given: dict[str, torch.Tensor]
    columns: dict[str, torch.Tensor]


def narrow_config(whole: Any, text: Any) -> Any:
    """Returns a copy of the vision configuration `whole` with a small tower, no audio, and `text`, already narrow."""
    given = {name: value for name, value in whole.to_dict().items() if name not in ("dtype", "architectures")}
    vision = given["vision_config"]
    given["vision_config"] = vision | {name: size for name, size in _SIZES.items() if vision.get(name)}
    if whole.model_type == "gemma3":  # 4,096 patches of an image take seconds
        given["vision_config"]["image_size"], given["mm_tokens_per_image"] = 8 * vision["patch_size"], 16
    if whole.model_type in OF_GRIDS:
        sizes = {"depth": 4, "num_heads": 2, "out_hidden_size": text.hidden_size, "num_position_embeddings": 64,
                 "fullatt_block_indexes": [1, 3], "deepstack_visual_indexes": [0, 2]}  # fmt: skip
        given["vision_config"] |= {name: size for name, size in sizes.items() if vision.get(name)}
    given |= {"text_config": text.to_dict(), "audio_config": None}
    given |= {name: _TEXT + place for place, name in enumerate(sorted(filter(_IMAGE_IDS.fullmatch, given)))}
    return type(whole)(**{name: value for name, value in given.items() if value is not None or name == "audio_config"})


def soften(model: Any) -> None:
    """Scales a tower's random matrices down, in place, because sharp attention amplifies rounding, in transformers too.

    Also zeroes the rows of the input and output embeddings for ids from 100, such as image tokens. So no greedy reply
    has such an id, for which transformers would need a picture. `model` has a configuration from `narrow_config`.
    """
    encoder, ends = encoder_of(model), (model.get_input_embeddings(), model.get_output_embeddings())
    with torch.no_grad():
        for end in ends:
            end.weight[_TEXT:] = 0
        for parameter in () if encoder is None else encoder.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.4)


def documents(config: Any) -> list[Document]:
    """Makes three documents of random text ids below 100, always the same; all but the second have a random image."""
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
    """Returns `Document.columns` of a random image with `grid` (rows, columns) of soft tokens, and their number.

    Families without positions have images of a fixed size, and ignore `grid`.
    """
    sizes = sizes_of(config, _SOFT_TOKENS)
    pixels = torch.randint(0, 256, (sizes.patches, sizes.numbers), generator=generator, dtype=torch.uint8)
    if not sizes.positions:
        return {"pixels": pixels}, sizes.tokens
    pool = _patches_of_side(config)
    rows, width = (pool * count for count in grid)
    places = torch.full((sizes.patches, 2), -1, dtype=torch.int32)
    place = torch.arange(rows * width, dtype=torch.int32)
    if config.model_type != "gemma4":  # the patches of a soft token are neighbours
        place = place.view(grid[0], pool, grid[1], pool).transpose(1, 2).flatten()
    places[: rows * width] = torch.stack([place % width, torch.div(place, width, rounding_mode="floor")], 1)
    pixels[rows * width :] = 0
    return {"pixels": pixels, "patch_positions": places}, grid[0] * grid[1]


def _patches_of_side(config: Any) -> int:
    """Returns the side of a soft token in patches."""
    if config.model_type == "gemma4_unified":
        return 1
    if config.model_type == "lfm2_vl":
        return int(config.downsample_factor)
    vision = config.vision_config
    return int(vision.spatial_merge_size if config.model_type in OF_GRIDS else vision.pooling_kernel_size)


def _given(config: Any, made: dict[str, torch.Tensor], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns `Document.given` for a document's image, a batch of 1, from its columns `made` and the ids (S,)."""
    pixels, types = made["pixels"].float() * (1 / 255), (ids == config.image_token_id).long()[None]
    if config.model_type in OF_GRIDS:
        tower, places = TOWERS[config.model_type], made["patch_positions"]
        used, times = int((places >= 0).all(1).sum()), config.vision_config.temporal_patch_size
        parts = zip(pixels[:used].chunk(3, 1), tower.mean, tower.std, strict=True)
        channels = torch.stack([(one - mean) / std for one, mean, std in parts], 1)
        columns, rows = (places.amax(0) + 1).tolist()
        return {"pixel_values": channels[:, :, None].expand(-1, -1, times, -1).flatten(1),
                "image_grid_thw": torch.tensor([[1, rows, columns]]), "mm_token_type_ids": types}  # fmt: skip
    if config.model_type == "lfm2_vl":
        return in_rows(pixels[None], made["patch_positions"][None])
    if "patch_positions" in made:
        return {"pixel_values": pixels[None], "image_position_ids": made["patch_positions"][None].long(),
                "mm_token_type_ids": types}  # fmt: skip
    patch, whole = config.vision_config.patch_size, config.vision_config.image_size
    side = whole // patch
    squares = ((pixels - 0.5) / 0.5).reshape(side, side, patch, patch, 3).permute(4, 0, 2, 1, 3)
    image = torch.nn.functional.pad(squares.reshape(3, side * patch, side * patch), (0, whole - side * patch) * 2)
    if config.model_type == "gemma3":
        return {"pixel_values": image[None], "token_type_ids": types}
    return {"pixel_values": image[None, None], "pixel_attention_mask": torch.ones(1, 1, whole, whole)}


def logits(model: Any, one: Document, reply: torch.Tensor | None = None) -> torch.Tensor:
    """Returns transformers' logits (S + R, V) of a document and a reply's ids (R,), with generation's masks."""
    reply = one.ids[:0] if reply is None else reply
    ids, given = torch.cat([one.ids, reply])[None], dict[str, Any](one.given)
    for name in [name for name in given if name.endswith("token_type_ids")]:
        given[name] = torch.nn.functional.pad(given[name], (0, len(reply)))
        if "image_grid_thw" in given:  # its image tokens see no later tokens
            continue
        given["attention_mask"] = type(model).create_masks_for_generate(
            config=model.config, inputs_embeds=torch.zeros(*ids.shape, 4), attention_mask=torch.ones_like(ids),
            past_key_values=None, position_ids=torch.arange(ids.shape[1])[None], **{name: given[name]},
        )  # fmt: skip
    found: torch.Tensor = model(input_ids=ids, use_cache=False, **given).logits[0]
    return found


def images_of(config: Any, held: Sequence[Document], starts: Sequence[int], length: int) -> dict[str, torch.Tensor]:
    """Returns the image columns (1, ...) of a row of `length` tokens with documents `held` that begin at `starts`.

    The keys are as in `vision.columns_of`. The row has a slot per image, in the order of the documents, and at least
    one. `starts` has the place of a document's first token in the row.
    """
    sizes, room = sizes_of(config, _SOFT_TOKENS), sum(bool(one.columns) for one in held)
    found = {name: torch.zeros(1, *shape, dtype=dtype)
             for name, (shape, dtype) in columns(config, max(1, room), length, _SOFT_TOKENS).items()}  # fmt: skip
    found["image_index"].fill_(-1)
    slot = 0
    for one, start in zip(held, starts, strict=True):
        for name, value in one.columns.items():
            found[name][0, slot] = value
        image = one.ids == config.image_token_id
        if sizes.axes:
            known = [one.columns["patch_positions"].numpy()] if one.columns else []
            axes = axis_positions(
                image.numpy(), [int(image.sum())] * len(known), np.array(known), _patches_of_side(config)
            )
            found["axis_positions"][0, :, start : start + len(axes[0])] = torch.from_numpy(axes[:, : length - start])
        places = start + image.nonzero()[:, 0]
        found["image_index"][0, places] = torch.arange(len(places), dtype=torch.int32) + slot * sizes.tokens
        slot += bool(one.columns)
    return found


def images_of_each(config: Any, documents: Sequence[Document], length: int) -> dict[str, torch.Tensor]:
    """Returns the image columns (documents, ...) of rows of `length` tokens that hold a single document, from 0."""
    rows = [images_of(config, [one], [0], length) for one in documents]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
