"""Images in packed rows with static shapes: transformers' vision towers without boolean indexing.

A row has K slots for images, or for tiles of images. Besides the tokens, a batch has these tensors:

    pixels           (B, K, patches, numbers) uint8
    patch_positions  (B, K, patches, 2) int32, Gemma 4, Qwen and LFM2-VL: column and row of each patch, -1 for padding
    image_index      (B, S) int32: the index among the K * T soft tokens of the row, -1 for text
    axis_positions   (B, 3, S) int32, Qwen: time, row and column of each token for the rotary embedding

The tower runs without gradients; the projector maps its states to features (B, K * T, H). An image token's embedding is
the feature at its index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from tpu_kit.config.loader import OptimConfig
from tpu_kit.model.attention import refuse_unknown, sdpa_attention
from tpu_kit.model.base_model import base_model
from tpu_kit.model.families.vision_towers import TOWERS, deep_layers
from tpu_kit.model.loop import layer_inputs
from tpu_kit.model.loop.layer_calls import decoder_layers, keep_after
from tpu_kit.model.loop.layer_inputs import Visibility
from tpu_kit.model.loop.layer_scan import ScannedLayers, scan_layers
from tpu_kit.model.splash_attention import splash_attention
from tpu_kit.xla import traced_program
from tpu_kit.xla.scan import PROGRAM_DEVICES

TOWER = "tpu_kit_tower"
"""Name of the towers' attention function in transformers' `AttentionInterface`."""

GRIDS = "tpu_kit_flash_tower"
"""Name of the attention function of Qwen's towers. If the name contains "flash", transformers passes `cu_seqlens`, here
segment ids, to the function; otherwise it reads them on the host and computes images one by one."""

MOST_TOKENS = 1280
"""Default maximum of soft tokens of an image of Qwen; data.image_tokens overrides it."""
OF_GRIDS = ("qwen2_5_vl", "qwen3_5", "qwen3_vl")
TILE_TOKENS = 256
"""Soft tokens of a tile of LFM2-VL; maximum of soft tokens of a whole picture."""

Shape = tuple[tuple[int, ...], torch.dtype]


class Sizes(NamedTuple):
    """The sizes of an image, or of a tile of an image.

    Attributes:
        patches: number of patches, padding included.
        numbers: values of a patch.
        tokens: maximum of soft tokens.
        positions: whether patches have positions.
        axes: whether the rotary embedding of the text model takes positions in three axes.
    """

    patches: int
    numbers: int
    tokens: int
    positions: bool
    axes: bool = False


def sizes_of(config: Any, tokens: int | None = None) -> Sizes:
    """Returns the sizes of a model's images.

    Args:
        config: configuration of transformers, with a vision_config.
        tokens: maximum of soft tokens of an image; None: the family's default. Ignored in Gemma 3, SmolVLM and Idefics
            3. In LFM2-VL it is for a tile, and larger values count as 256.

    Raises:
        ValueError: the kit does not train images of this family, or `config` has no vision_config.
    """
    vision: Any = getattr(config, "vision_config", None)
    kind = config.model_type if vision is not None else None
    most = tokens or getattr(vision, "num_soft_tokens", None) or 280
    if kind == "gemma4_unified":
        return Sizes(most, 3 * vision.model_patch_size**2, most, True)
    if kind == "gemma4":
        return Sizes(most * vision.pooling_kernel_size**2, 3 * vision.patch_size**2, most, True)
    if kind in ("smolvlm", "idefics3"):
        side = vision.image_size // vision.patch_size
        return Sizes(side**2, 3 * vision.patch_size**2, side**2 // config.scale_factor**2, False)
    if kind == "gemma3":
        side = vision.image_size // vision.patch_size
        return Sizes(side**2, 3 * vision.patch_size**2, config.mm_tokens_per_image, False)
    if kind in OF_GRIDS:
        most = tokens or MOST_TOKENS
        return Sizes(most * vision.spatial_merge_size**2, 3 * vision.patch_size**2, most, True, True)
    if kind == "lfm2_vl":
        most = min(tokens or TILE_TOKENS, TILE_TOKENS)
        return Sizes(most * config.downsample_factor**2, 3 * vision.patch_size**2, most, True)
    raise ValueError(f"images of {config.model_type} are not trained; these families are: {', '.join(sorted(TOWERS))}")


def columns(config: Any, images: int, length: int, tokens: int | None = None) -> dict[str, Shape]:
    """Returns name -> (shape, dtype) of the image tensors of a row; `images` slots; for `tokens` see `sizes_of`."""
    return columns_of(sizes_of(config, tokens), images, length)


def columns_of(sizes: Sizes, images: int, length: int) -> dict[str, Shape]:
    """Returns name -> (shape, dtype) of the image tensors of a row of `length` tokens with `images` slots.

    The names are pixels, image_index, with `sizes.positions` patch_positions, and with `sizes.axes` axis_positions.
    """
    found: dict[str, Shape] = {"pixels": ((images, sizes.patches, sizes.numbers), torch.uint8)}
    if sizes.positions:
        found["patch_positions"] = ((images, sizes.patches, 2), torch.int32)
    if sizes.axes:
        found["axis_positions"] = ((3, length), torch.int32)
    return found | {"image_index": ((length,), torch.int32)}


def check_rows(config: Any, tokens: int, length: int) -> None:
    """Raises ValueError if `tokens`, the soft tokens of an image, are more than `length`, the tokens of a row.

    Also raises it if image tokens see each other in the model with the configuration `config`, and the numbers of
    binary digits of `tokens` and `length` add up to more than 31.
    """
    if tokens > length:
        raise ValueError(
            f"data.max_length={length}: an image takes up to {tokens} tokens; raise it, or lower data.image_tokens"
        )
    if _looks_ahead(config) and tokens.bit_length() + length.bit_length() > 31:
        raise ValueError(f"data.max_length={length}: too long for attention with images of {tokens} tokens; lower it")


def axis_positions(image: np.ndarray, slots: Sequence[int], positions: np.ndarray, merge: int) -> np.ndarray:
    """Returns a document's positions in time, row and column, (3, S) int32, as transformers' `get_rope_index` does.

    A text token has three equal positions. After an image, they continue from its largest position plus 1.

    Args:
        image: (S,) bool, true for soft tokens of images.
        slots: number of soft tokens of each image in the document.
        positions: (images, P, 2) integers, column and row of each patch. Each soft token has merge**2 consecutive
            patches; patches after the last soft token are padding.
        merge: side of a soft token in patches.
    """
    found = np.empty((3, len(image)), dtype=np.int32)
    places, start, end, position = np.flatnonzero(image), 0, 0, 0
    for count, patches in zip(slots, positions, strict=True):
        first = int(places[start])
        here = position + first - end
        found[:, end:first] = np.arange(position, here)
        column, row = (patches[: count * merge**2 : merge**2] // merge).T
        found[:, first : first + count] = here + np.stack([np.zeros_like(row), row, column])
        position, start, end = here + int(max(row.max(), column.max())) + 1, start + count, first + count
    found[:, end:] = position + np.arange(len(image) - end)
    return found


def in_rows(pixels: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns transformers' LFM2-VL inputs, patches in row order, for pixels (N, P, numbers) in [0, 1].

    `positions` (N, P, 2) are column and row of each patch, -1 for padding. The keys are pixel_values, like `pixels` but
    in [-1, 1] and with padding last; pixel_attention_mask (N, P), 1 for patches and 0 for padding; and spatial_shapes
    (N, 2), rows and columns of patches.
    """
    valid = (positions >= 0).all(-1)
    place = torch.where(valid, positions[..., 1] * valid.shape[1] + positions[..., 0], valid.shape[1] ** 2)
    values = ((pixels - 0.5) / 0.5).gather(1, place.argsort(1)[..., None].expand_as(pixels))
    shapes = positions.amax(1).flip(-1).long() + 1
    return {"pixel_values": values, "pixel_attention_mask": valid.long(), "spatial_shapes": shapes}


# -------------------------------------------------------------------------------------------------- hooks of `registry`


def connect(model: torch.nn.Module, frozen: bool) -> None:
    """Registers towers' attention functions in transformers, without selecting them; `own_attention` has their names.

    With DeepStack, the first text layers also add the tower's features to their outputs: their classes are replaced, in
    place. `frozen` has no effect.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(TOWER, tower_attention)
    AttentionMaskInterface.register(TOWER, _valid_keys)
    AttentionInterface.register(GRIDS, grid_attention)
    base: Any = base_model(model)
    for number in range(len(deep_layers(base.config.vision_config))):
        _take_addition(decoder_layers(base.get_decoder())[1][number], number)


def own_attention(model: Any) -> dict[str, str]:
    """Returns {"vision_config": name of the tower's attention}; without a tower, the name is as configured."""
    config = model.config.vision_config
    if encoder_of(model) is None:
        return {"vision_config": config._attn_implementation}
    return {"vision_config": GRIDS if model.config.model_type in OF_GRIDS else TOWER}


def loop_layers(model: torch.nn.Module, optim: OptimConfig, device_type: str) -> None:
    """Replaces a tower's layers by a loop with remat=full, on XLA or with optim.scan_layers=on; ignores optim.remat.

    A second call does nothing, and a model without a tower does not change. Raises ValueError as `scan_layers` does.
    """
    base: Any = base_model(model)
    encoder = encoder_of(base)
    if encoder is not None and not isinstance(decoder_layers(encoder)[1], ScannedLayers):
        if device_type in PROGRAM_DEVICES:
            for number in deep_layers(base.config.vision_config):
                keep_after(encoder, number + 1)
        scan_layers(encoder, replace(optim, remat="full"), device_type, _inputs(base))


def decoder_inputs(
    model: Any, batch: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Any], tuple[torch.Tensor, ...]]:
    """Computes the decoder's inputs for a batch with images; see `registry.decoder_inputs`.

    The first value has inputs_embeds (B, S, H) and no input_ids. Qwen also has position_ids (3, B, S), and Gemma 4 with
    per-layer embeddings has per_layer_inputs.

    The second value is empty unless the tokens of an image see each other. Then it has `ahead` (B, S), the integer
    `most_ahead`, and `everywhere`. This is True in Gemma 3, for all layers. It is False in Gemma 4, where only layers
    with a window look ahead, as in Google's code and vLLM.

    The third value has DeepStack's additions, (B, S, H), 0 at text; it is () in other families.
    """
    ids, index, text = batch["input_ids"], batch["image_index"], model.config.get_text_config()
    seen = index >= 0
    if model.config.model_type.startswith("gemma"):  # a padding id has its own per-layer embedding
        ids = torch.where(seen, text.pad_token_id, ids)
    embeds = model.get_input_embeddings()(ids)
    tokens = tokens_of(model.config, batch["pixels"].shape[2])
    found, *deep = (one.to(embeds.dtype) for one in features(model, batch, tokens))
    given = {"inputs_embeds": torch.where(seen[..., None], _taken(found, index), embeds)}
    additions = tuple(torch.where(seen[..., None], _taken(one, index), 0) for one in deep)
    if "axis_positions" in batch:
        given["position_ids"] = batch["axis_positions"].transpose(0, 1)
    if getattr(text, "hidden_size_per_layer_input", 0):
        given["per_layer_inputs"] = model.get_decoder().get_per_layer_inputs(ids)
    if not _looks_ahead(model.config):
        return given, {}, additions
    found = ahead(index, batch["pixels"].shape[1], tokens)
    everywhere = model.config.model_type == "gemma3"
    return given, {"ahead": found, "most_ahead": tokens - 1, "everywhere": everywhere}, additions


# --------------------------------------------------------------------------------------------------------------- images


def tokens_of(config: Any, patches: int) -> int:
    """Returns the number of soft tokens of a slot with `patches` patches, padding included; fixed in Gemma 3."""
    vision = config.vision_config
    if config.model_type == "gemma3":
        return int(config.mm_tokens_per_image)
    if config.model_type == "gemma4_unified":
        return patches
    if config.model_type in OF_GRIDS:
        return int(patches // vision.spatial_merge_size**2)
    of_side = {"gemma4": (vision, "pooling_kernel_size"), "lfm2_vl": (config, "downsample_factor")}
    return int(patches // getattr(*of_side.get(config.model_type, (config, "scale_factor"))) ** 2)


def _taken(found: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the features (B, S, H) at each token's index among `found` (B, K * T, H); any values where it is -1.

    XLA multiplies by one-hot rows, which is exact: it gathers along the tokens element by element, which moves hundreds
    of gigabytes.
    """
    if found.device.type != "xla":
        return found.gather(1, index.clamp(min=0).long()[..., None].expand(-1, -1, found.shape[-1]))
    places = torch.arange(found.shape[1], device=index.device, dtype=index.dtype)
    return torch.bmm((index[..., None] == places).to(found.dtype), found)


def features(model: Any, batch: Mapping[str, torch.Tensor], tokens: int) -> list[torch.Tensor]:
    """Computes the features of all images of a batch, tensors (B, K * tokens, H); features of padding mean nothing.

    The first tensor holds embeddings; further tensors (DeepStack) are added to the outputs of the first text layers, in
    order. The tower has no gradients; a projector has them if it is trained. `model` has no PEFT wrapper. `batch` has
    pixels (B, K, patches, numbers) uint8 and, in some families, patch_positions. `tokens` is the result of `tokens_of`.
    """
    rows = batch["pixels"].shape[0]
    pixels = batch["pixels"].flatten(0, 1).float() * (1 / 255)  # the processors' fp32, bit for bit
    positions = batch["patch_positions"].flatten(0, 1) if "patch_positions" in batch else None
    with torch.no_grad():
        every = TOWERS[model.config.model_type].hidden(model, pixels, positions, tokens)
    made = []
    for part, hidden in zip(projectors_of(model), every, strict=True):
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(one.requires_grad for one in part.parameters())):
            found = part(hidden) if hidden is not pixels else part(hidden, positions, return_dict=True).pooler_output
        made.append(found.reshape(rows, -1, found.shape[-1]))
    return made


def projectors_of(model: Any) -> list[Any]:
    """Returns the modules that map tower states to the text model's hidden size: for embeddings, then for DeepStack."""
    path = TOWERS[model.config.model_type].projector
    further = [f"visual.deepstack_merger_list.{n}" for n, _ in enumerate(deep_layers(model.config.vision_config))]
    return [model.model.get_submodule(one) for one in (path, *further)]


def _take_addition(layer: torch.nn.Module, number: int) -> None:
    """Makes a layer add `LayerInputs.additions[number]` to its output; a second call does nothing."""
    if not hasattr(layer, "addition"):
        layer.__class__ = type(f"Adding{type(layer).__name__}", (_Adding, type(layer)), {})
        layer.addition = str(number)  # type: ignore[assignment]  # text, not a tensor: loops keep layers apart by it


class _Adding(torch.nn.Module):
    """A layer that adds tower features to its output at image tokens: DeepStack (https://arxiv.org/abs/2406.04334)."""

    addition: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the layer's output, plus its addition if the batch has additions."""
        output, additions = super().forward(*args, **kwargs), layer_inputs.current().additions
        return output + additions[int(self.addition)].to(output.dtype) if additions else output


def encoder_of(model: Any) -> Any:
    """Returns the tower's module that holds its layers, for a model without PEFT's wrapper; None without a tower."""
    path = TOWERS[model.config.model_type].encoder
    return model.model.get_submodule(path) if path else None


def _inputs(model: Any) -> Callable[[torch.Tensor], dict[str, Any]]:
    """Returns a function that makes example arguments of the tower's encoder from ones (1, N), one per patch."""
    config = model.config.vision_config
    hidden, dtype = config.hidden_size, next(encoder_of(model).parameters()).dtype
    if model.config.model_type in OF_GRIDS:
        return lambda ones: _of_one_token(config, ones.device, dtype)

    def made(ones: torch.Tensor) -> dict[str, Any]:
        embeds = torch.zeros(*ones.shape, hidden, dtype=dtype, device=ones.device)
        if model.config.model_type == "gemma4":
            positions = torch.stack([ones, ones], -1)
            return {"inputs_embeds": embeds, "attention_mask": ones > 0, "pixel_position_ids": positions}
        seen = ones[:, None, None] > 0 if model.config.model_type == "lfm2_vl" else None
        return {"inputs_embeds": embeds, "attention_mask": seen}

    return made


def _of_one_token(config: Any, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Returns example arguments of a Qwen tower for one soft token's patches, also arguments derived from a grid."""
    patches = config.spatial_merge_size**2
    numbers = config.in_channels * config.temporal_patch_size * config.patch_size**2
    places = torch.zeros(patches, 2, dtype=torch.int64, device=device)
    segments = torch.ones(1, patches, dtype=torch.int32, device=device)
    given = {"hidden_states": torch.zeros(patches, numbers, dtype=dtype, device=device), "grid_thw": None,
             "cu_seqlens": segments, "max_seqlen": 1, "position_ids": places}  # fmt: skip
    if hasattr(config, "window_size"):
        order = torch.zeros(1, dtype=torch.int64, device=device)
        return given | {"window_index": order, "cu_window_seqlens": segments + 0, "max_window_seqlen": 1}
    taps = torch.zeros(patches, 4, device=device)
    return given | {"interp_indices": taps.long(), "interp_weights": taps}


# ------------------------------------------------------------------------------------------------------------ attention


def _looks_ahead(config: Any) -> bool:
    """Returns whether the tokens of an image see each other, in all layers or only in layers with a window."""
    text = config.get_text_config()
    return config.model_type == "gemma3" or getattr(text, "use_bidirectional_attention", None) == "vision"


def ahead(image_index: torch.Tensor, images: int, tokens: int) -> torch.Tensor:
    """Counts the later tokens of a token's image, (B, S) int32, with `images` slots of `tokens` tokens; 0 for text.

    `image_index` (B, S) is slot * tokens + the place in the image for tokens of images, and -1 for text.
    """
    place = torch.arange(image_index.shape[1], device=image_index.device, dtype=torch.int32)
    of_image = torch.div(image_index, tokens, rounding_mode="floor")[..., None]
    mine = of_image == torch.arange(images, device=image_index.device)  # (B, S, K)
    last = torch.where(mine, place[:, None], -1).amax(1, keepdim=True)
    return torch.where(mine, last - place[:, None], 0).sum(-1).to(torch.int32)


def tower_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention among the patches of an image, for towers; transformers calls it.

    Maps (N, heads, P, D) to (N, P, heads, D), and None. The mask (N, 1, 1, P) is true for patches that are no padding;
    None: all. `scaling` None is 1 / sqrt(D). Raises ValueError for an unknown argument of the model.
    """
    refuse_unknown({name: value for name, value in kwargs.items() if name not in ("is_causal", "dropout")})
    shape = (query.shape[0], query.shape[2])
    valid = torch.ones(shape, device=query.device) if attention_mask is None else attention_mask[:, 0, 0]
    attend: Any = splash_attention if traced_program.runs_kernels(query) else sdpa_attention
    found: tuple[torch.Tensor, None] = attend(
        module, query, key, value, None, scaling=scaling, visibility=Visibility(valid.to(torch.int32)), causal=False
    )
    return found


def grid_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention within the segments of images; Qwen's towers call it.

    Args:
        module: the attention layer.
        query: (1, heads, N * P, D), N images in one row.
        key: like `query`.
        value: like `query`.
        attention_mask: None.
        cu_seq_lens_q: (N, P) int32 segment ids, in place of transformers' offsets of images.
        scaling: factor on the scores; None: 1 / sqrt(D).
        **kwargs: other arguments of the model; ValueError for an unknown argument.

    Returns:
        The output (1, N * P, heads, D), and None.
    """
    assert attention_mask is None and query.shape[2] == cu_seq_lens_q.numel()
    names = ("is_causal", "dropout", "cu_seq_lens_k", "max_length_q", "max_length_k")
    refuse_unknown({name: one for name, one in kwargs.items() if name not in names})
    images, patches = cu_seq_lens_q.shape
    query, key, value = (one[0].unflatten(1, (images, patches)).transpose(0, 1) for one in (query, key, value))
    attend: Any = splash_attention if traced_program.runs_kernels(query) else sdpa_attention
    found, _ = attend(
        module, query, key, value, None, scaling=scaling, visibility=Visibility(cu_seq_lens_q), causal=False
    )
    return found.flatten(0, 1)[None], None


def _valid_keys(attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Returns the mask (N, P) as a view (N, 1, 1, P); None stays None."""
    return None if attention_mask is None else attention_mask[:, None, None, :]
