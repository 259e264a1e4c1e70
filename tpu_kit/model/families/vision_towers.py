"""transformers' vision towers with static shapes, by family. A new family of vision models is an entry of `TOWERS`.

A tower computes all images of a batch at once, without boolean indexing and without reading values on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tpu_kit.model.loop.layer_calls import kept_states

Hidden = Callable[[Any, torch.Tensor, torch.Tensor | None, int], Sequence[torch.Tensor]]
"""Computes the input of each projector. Arguments: the model, pixels (N, P, numbers) fp32 in [0, 1], positions
(N, P, 2) or None, and the number of soft tokens of an image."""


class Tower(NamedTuple):
    """The vision modules of a family of models.

    Attributes:
        hidden: computes the inputs of the projectors.
        projector: path in `model.model` of the projector to token embeddings.
        encoder: path in `model.model` of the module with the tower's list of layers; empty without a tower.
        mean: per channel, subtracted from the pixels; processors with other means are refused.
        std: per channel, divides the pixels after the subtraction.
    """

    hidden: Hidden
    projector: str
    encoder: str = ""
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)


def _patches(model: Any, pixels: torch.Tensor, positions: torch.Tensor | None, tokens: int) -> Sequence[torch.Tensor]:
    """Returns the pixels unchanged, (N, P, numbers), as the only item."""
    return [pixels]  # the family has no tower


def _gemma4(model: Any, pixels: torch.Tensor, positions: torch.Tensor | None, tokens: int) -> Sequence[torch.Tensor]:
    """Like `Gemma4VisionModel.forward`, as `Hidden`: [(N, tokens, D)]. Does not strip the padding, which comes last."""
    assert positions is not None
    tower = model.model.vision_tower
    padding = (positions == -1).all(-1)
    embeds = tower.patch_embedder(pixels, positions, padding)
    hidden = tower.encoder(
        inputs_embeds=embeds, attention_mask=~padding, pixel_position_ids=positions
    ).last_hidden_state
    hidden, _ = tower.pooler(
        hidden_states=hidden, pixel_position_ids=positions, padding_positions=padding, output_length=tokens
    )
    if tower.config.standardize:
        hidden = (hidden - tower.std_bias.float()) * tower.std_scale.float()
    return [hidden.to(embeds.dtype)]


def _square(model: Any, pixels: torch.Tensor, positions: torch.Tensor | None, tokens: int) -> Sequence[torch.Tensor]:
    """Like `forward` of Idefics 3's and SigLIP's towers, as `Hidden`: [(N, P, D)]; images fill their square."""
    tower = model.model.vision_tower if hasattr(model.model, "vision_tower") else model.model.vision_model
    embeddings = tower.embeddings
    pixels = (pixels - 0.5) / 0.5
    kernel = embeddings.patch_embedding
    weight = kernel.weight.permute(0, 2, 3, 1).flatten(1)  # a patch is (rows, columns, channels)
    hidden = torch.nn.functional.linear(pixels.to(weight.dtype), weight, kernel.bias)
    hidden = hidden + embeddings.position_embedding.weight[None, : hidden.shape[1]]
    hidden = tower.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
    return [tower.post_layernorm(hidden)]


def _grid(model: Any, pixels: torch.Tensor, positions: torch.Tensor | None, tokens: int) -> Sequence[torch.Tensor]:
    """Like `forward` of Qwen's towers, as `Hidden`; an image is a row of patches; the device computes grid data.

    Returns the last states (N * P, D), then the states after the layers in `deep_layers`, in this order.

    The processor repeats a picture for each time step of the convolution; the kit sums the weights over time instead.
    Segment ids separate the windows of layers with a window, so patches keep their order.
    """
    assert positions is not None
    tower, kind = model.model.visual, TOWERS[model.config.model_type]
    valid = (positions >= 0).all(-1)
    column, row = positions.clamp(min=0).unbind(-1)
    kernel = tower.patch_embed.proj
    weight = kernel.weight.float().sum(2).flatten(1).to(kernel.weight.dtype)
    channels = zip(pixels.chunk(3, -1), kind.mean, kind.std, strict=True)  # a patch is (channels, rows, columns)
    pixels = torch.cat([(one - mean) / std for one, mean, std in channels], -1)
    hidden = torch.nn.functional.linear(pixels.to(weight.dtype), weight, kernel.bias)
    if hasattr(tower, "pos_embed"):
        hidden = hidden + _interpolated(tower, row, column, valid).to(hidden.dtype)
    hidden = hidden.flatten(0, 1)
    places = torch.stack([row, column], -1).flatten(0, 1)
    rotation = tower.rotary_pos_emb(hidden, places)
    whole = valid.to(torch.int32)
    near = whole
    if whole_layers := getattr(tower, "fullatt_block_indexes", None):
        side = tower.window_size // tower.patch_size // tower.spatial_merge_size * tower.spatial_merge_size
        window = row.div(side, rounding_mode="floor") * valid.shape[1] + column.div(side, rounding_mode="floor")
        near = torch.where(valid, window + 1, 0).to(torch.int32)
    deep, states = deep_layers(tower.config), dict[int, torch.Tensor]()
    for number, block in enumerate(tower.blocks):
        seen = near if whole_layers and number not in whole_layers else whole
        hidden = block(hidden, cu_seqlens=seen, max_seqlen=1, position_embeddings=rotation)
        if number in deep:
            states[number + 1] = hidden
    states |= kept_states(tower)  # a loop returns the states of its layers after its end
    return [hidden, *(states[number + 1] for number in deep)]


def _resized(model: Any, pixels: torch.Tensor, positions: torch.Tensor | None, tokens: int) -> Sequence[torch.Tensor]:
    """Like `forward` of SigLIP 2's tower, as `Hidden`: [(N * tokens, n, n, D)], n x n patches of a soft token."""
    assert positions is not None
    tower, joined = model.model.vision_tower, model.config.downsample_factor
    valid, embeddings = (positions >= 0).all(-1), tower.embeddings
    table = embeddings.position_embedding.weight
    columns, rows = (_shares(one, valid, embeddings.position_embedding_size) for one in positions.unbind(-1))
    shares = (rows[..., :, None] * columns[..., None, :]).flatten(-2)
    hidden = embeddings.patch_embedding(((pixels - 0.5) / 0.5).to(table.dtype))
    hidden = hidden + (shares @ table.float()).to(table.dtype)
    hidden = tower.encoder(inputs_embeds=hidden, attention_mask=valid[:, None, None]).last_hidden_state
    return [tower.post_layernorm(hidden).reshape(-1, joined, joined, hidden.shape[-1])]


def _shares(place: torch.Tensor, valid: torch.Tensor, side: int) -> torch.Tensor:
    """Returns weights (N, P, side) of a table's rows for places (N, P), like antialiased bilinear `interpolate`.

    `valid` (N, P) is false for padding; the largest valid place + 1 is an image's size, to which the table is resized.
    """
    count = torch.where(valid, place, 0).amax(1, keepdim=True) + 1
    scale = side / count
    centre = (place.clamp(min=0) + 0.5) * scale
    away = torch.arange(side, device=place.device) + 0.5 - centre[..., None]
    found = (1 - away.abs() / scale.clamp(min=1)[..., None]).clamp(min=0)
    return found / found.sum(-1, keepdim=True)


def deep_layers(config: Any) -> Sequence[int]:
    """Returns the indices, from 0, of tower layers whose states are added to the first text layers; () for none."""
    return tuple(getattr(config, "deepstack_visual_indexes", None) or ())


def _interpolated(tower: Any, row: torch.Tensor, column: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Returns position embeddings (N, P, D) of patches (N, P), interpolated bilinearly from the tower's square table.

    `valid` is false for padding. The largest valid row and column give an image's size. Like transformers'
    `get_vision_interpolation_indices_and_weights` with align_corners.
    """
    side = tower.num_grid_per_side
    taps = []
    for place in (row, column):
        count = torch.where(valid, place, 0).amax(1, keepdim=True) + 1
        source = place.float() * (side - 1) / (count - 1).clamp(min=1)
        low = source.floor()
        taps.append(((low, 1 - (source - low)), ((low + 1).clamp(max=side - 1), source - low)))
    found = [
        tower.pos_embed((down * side + right).long()) * (share * part)[..., None]
        for down, share in taps[0] for right, part in taps[1]
    ]  # fmt: skip
    return found[0] + found[1] + found[2] + found[3]


_HALF = (0.5, 0.5, 0.5)
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_TILES = Tower(_square, "connector", "vision_model.encoder", _HALF, _HALF)
TOWERS: Mapping[str, Tower] = {
    "gemma4_unified": Tower(_patches, "embed_vision"),
    "gemma4": Tower(_gemma4, "embed_vision", "vision_tower.encoder"),
    "gemma3": Tower(_square, "multi_modal_projector", "vision_tower.encoder", _HALF, _HALF),
    "lfm2_vl": Tower(_resized, "multi_modal_projector", "vision_tower.encoder", _HALF, _HALF),
    "qwen2_5_vl": Tower(_grid, "visual.merger", "visual", *_CLIP),
    "qwen3_5": Tower(_grid, "visual.merger", "visual", _HALF, _HALF),
    "qwen3_vl": Tower(_grid, "visual.merger", "visual", _HALF, _HALF),
    "smolvlm": _TILES, "idefics3": _TILES,
}  # fmt: skip
