"""An MLP over tiles of tokens, so that its (tokens, intermediate size) activations exist for one tile at a time.

A token's MLP does not depend on other tokens. The backward pass computes each tile again; where the layer is computed
again anyway, that is no extra work: the layer's own second forward pass of the MLP has no use, and is left out.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu_kit.models import partition
from tpu_kit.models.activation_checkpointing import SeededDropout, mix
from tpu_kit.models.architecture import FEW_TILES
from tpu_kit.xla.scan import Tensors, in_turn, scan
from tpu_kit.xla.sharding import current_mesh


def autocast_now(device_type: str) -> dict[str, Any]:
    """The arguments that give `torch.autocast` its present state, for a backward pass, which runs without."""
    return {
        "device_type": device_type, "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type), "cache_enabled": False,
    }  # fmt: skip


def chunk_mlp(mlp: torch.nn.Module, tokens: int) -> None:
    """Makes a module from (B, S, H) to (B, S, H), in place, run over tiles of up to `tokens` tokens."""
    mlp.__class__ = type(f"Tiled{type(mlp).__name__}", (_Tiled, type(mlp)), {})
    mlp._tile_tokens = tokens  # type: ignore[assignment]


def is_tiled(mlp: torch.nn.Module) -> bool:
    """Whether `chunk_mlp` was applied to it: the gradients of its tensors are sums."""
    return isinstance(mlp, _Tiled)


def tiles_of(tokens: int, most: int) -> int:
    """The smallest number of equal tiles of at most `most` tokens."""
    return next(count for count in range(-(-tokens // most), tokens + 1) if tokens % count == 0)


class _Tiled(torch.nn.Module):
    _tile_tokens: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mesh = current_mesh()
        if mesh is None:
            tokens, width = hidden.numel() // hidden.shape[-1], hidden.shape[-1]
            count = tiles_of(tokens, self._tile_tokens)
        else:  # of each row: all devices work on every tile
            count = tiles_of(hidden.shape[1], max(1, self._tile_tokens * mesh.batch_shards // hidden.shape[0]))
        if count == 1:
            return self.whole(hidden)
        tiles = hidden.reshape(count, tokens // count, width) if mesh is None else partition.tiles(hidden, count)
        tensors: dict[str, torch.Tensor] = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        seeds = [f"{name}.seed" for name, part in self.named_modules() if isinstance(part, SeededDropout)]
        inputs = [tiles]
        if seeds and self.training:
            numbers = torch.arange(count, device=hidden.device, dtype=torch.int32)
            inputs.append(mix(tensors[seeds[0]] + numbers * 0x61C88647))
        kept = {name: tensor for name, tensor in tensors.items() if name not in seeds}
        tile = _Tile(self, list(kept), [name for name in kept if kept[name].requires_grad], seeds)
        if torch.is_grad_enabled():
            output: torch.Tensor = _OverTiles.apply(tile, len(inputs), *inputs, *kept.values())
        else:
            output = tile.forward(inputs, list(kept.values()))
        return (output if mesh is None else output.transpose(0, 1)).reshape(hidden.shape)

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """The family's own forward pass."""
        output: torch.Tensor = super().forward(hidden)
        return output


class _Whole(torch.nn.Module):
    """A tiled MLP called as one that is not."""

    def __init__(self, mlp: _Tiled) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp.whole(hidden)


class _Tile:
    """The loops over the tiles, forward and backward; inputs are the tiles and, where it draws, a seed of each."""

    def __init__(self, mlp: _Tiled, names: list[str], trained: list[str], seeds: list[str]) -> None:
        self.mlp, self.names, self.trained, self.seeds = _Whole(mlp), names, trained, seeds

    def forward(self, inputs: Tensors, tensors: Tensors) -> torch.Tensor:
        def body(carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
            return carry, [self._call(slices, dict(zip(self.names, carry, strict=True)))]

        _, (output,) = scan(body, tensors, inputs)
        return output

    def backward(self, upstream: torch.Tensor, inputs: Tensors, tensors: Tensors) -> tuple[torch.Tensor, Tensors]:
        """The gradients of the tiles and of the trained tensors, summed over the tiles."""
        count = len(self.names)

        def body(carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
            named = dict(zip(self.names, carry[:count], strict=True))
            with torch.enable_grad():
                tile = slices[1].detach().requires_grad_()
                trained = {name: named[name].detach().requires_grad_() for name in self.trained}
                output = self._call([tile, *slices[2:]], {**named, **trained})
                gradient, *found = torch.autograd.grad(output, [tile, *trained.values()], slices[0])
            return [*carry[:count], *(a + b for a, b in zip(carry[count:], found, strict=True))], [gradient]

        sums = [torch.zeros_like(tensors[self.names.index(name)]) for name in self.trained]
        loop = in_turn if upstream.shape[0] <= FEW_TILES else scan
        carry, (gradient,) = loop(body, [*tensors, *sums], [upstream, *inputs])
        return gradient, carry[count:]

    def _call(self, slices: Tensors, named: dict[str, torch.Tensor]) -> torch.Tensor:
        named = named | {name: seed for seed in slices[1:] for name in self.seeds}
        state = {f"mlp.{name}": tensor for name, tensor in named.items()}
        output: torch.Tensor = torch.func.functional_call(self.mlp, state, (slices[0],), tie_weights=False)
        return output


class _OverTiles(torch.autograd.Function):
    """Keeps the input alone."""

    @staticmethod
    def forward(ctx: Any, tile: _Tile, inputs: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.tile, ctx.inputs, ctx.autocast = tile, inputs, autocast_now(tensors[0].device.type)
        ctx.save_for_backward(*tensors)
        ctx.trained = [tensor.requires_grad for tensor in tensors[inputs:]]
        return tile.forward(list(tensors[:inputs]), list(tensors[inputs:]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, tensors = ctx.saved_tensors[: ctx.inputs], ctx.saved_tensors[ctx.inputs :]
        with torch.autocast(**ctx.autocast):
            gradient, found = ctx.tile.backward(upstream, list(inputs), list(tensors))
        sums = iter(found)
        rest = [None] * (ctx.inputs - 1)
        return None, None, gradient, *rest, *(next(sums) if trained else None for trained in ctx.trained)
