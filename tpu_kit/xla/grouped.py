"""Grouped matrix products for a mixture of experts, with a static number of rows for any routing.

Every pair of a token and its selected expert is a row. Rows are sorted by expert, and the rows of an expert are padded
to whole tiles. A tile therefore has one expert, the number of tiles does not depend on the routing, and no pair is
dropped. `layout` computes the rows. `rows_of` and `sums_of` copy tokens to rows and back. They are each other's
gradient, and both only gather, because TPUs scatter slowly. `product` is a Pallas kernel that multiplies tiles with the
weights of their experts. It dequantizes integer weights in vector memory, once for all tiles of an expert.

On a mesh, a device processes its own tokens with all experts. In generation it processes all tokens with its own
experts (`Tiles.in_place`): no weight moves, and `sums_of` adds over the devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tpu_kit.config.mesh import BATCH
from tpu_kit.xla.pallas import call

_VECTOR_MEMORY = 64 * 2**20  # limit of the kernel in bytes
_BLOCK_BYTES = 4 * 2**20  # limit of a block of weights in bf16: larger blocks compile longer
_ROWS_AT_ONCE = 256  # rows of int8 weights that are converted at a time


class Tiles(NamedTuple):
    """Static settings of the grouped products.

    Attributes:
        experts: number of experts.
        rows: rows in a tile.
        bits: bits of a weight: 16 for floats of any size, 8 and 4 for integers as stored by `quantization`.
        group: inputs that share a scale, with 4 bits.
        back: whether to multiply with the transposed weights, for the gradient.
        in_place: on a mesh, the number of shards of the experts, which stay on their devices. 0: every device has all
            experts and its own tokens.
        kernel: whether the program is for a TPU and uses the kernel.
        interpret: whether Pallas' interpreter runs the kernel on a CPU, for tests.
    """

    experts: int
    rows: int
    bits: int = 16
    group: int = 0
    back: bool = False
    in_place: int = 0
    kernel: bool = True
    interpret: bool = False


class TileLayout(NamedTuple):
    """Maps the pairs of T tokens with K experts per token to R rows.

    Attributes:
        token: (R,) int32, the token of each row; -1 for padding.
        pair: (R,) int32, the flat index in (T, K) of each row's pair; -1 for padding.
        row: (T, K) int32, the row of each pair. With experts in place there is a table for each shard of the experts,
            with -1 for pairs of other devices.
        expert: (R / rows of a tile,) int32, the expert of each tile.
        used: (1,) int32, the number of tiles with pairs, which come first.
    """

    token: torch.Tensor
    pair: torch.Tensor
    row: torch.Tensor
    expert: torch.Tensor
    used: torch.Tensor


def layout(tiles: Tiles, index: torch.Tensor) -> TileLayout:
    """Returns rows for all pairs, sorted by expert; `index` (T, K), integers, has the experts of each token."""
    return TileLayout(*_call(_layout, tiles, ["token"], ["row"] * 5, index.to(torch.int32)))


def rows_of(tiles: Tiles, tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gathers the rows `index` (R,) of `tensor` (N, ...) to (R, ...); rows whose index is -1 are zero."""
    return _call(_rows_of, tiles, ["token", "row"], ["row"], tensor, index)[0]


def sums_of(tiles: Tiles, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Sums in fp32 rows of (R, ...) that `index` (N, K) lists, in place except -1; returns (N, ...) in their dtype."""
    return _call(_sums_of, tiles, ["row", "row"], ["token"], rows, index)[0]


def product(
    tiles: Tiles, rows: torch.Tensor, at: TileLayout, weight: torch.Tensor, *scale: torch.Tensor
) -> torch.Tensor:
    """Multiplies rows (R, I) with the weights (O, I) of their experts to (R, O); with `back`, (R, O) to (R, I).

    Args:
        tiles: the settings.
        rows: the rows, floats.
        at: the layout of the rows.
        weight: (E, ...) weights of the experts, as stored by `model.weights.quantization`.
        *scale: (E, ...) their scales; none for float weights.
    """
    by = ["row", "row", "row", "expert", *["expert"] * len(scale)]
    return _call(_product, tiles, by, ["row"], rows, at.expert, at.used, weight, *scale)[0]


def _call(
    function: Any, tiles: Tiles, by: Sequence[str], made: Sequence[str], *tensors: torch.Tensor
) -> list[torch.Tensor]:
    """Adds `function(tiles, *tensors)`, a JAX function, to the program and returns its results.

    `by` and `made` tell the first dimension of the tensors and the results: "token", "row" or "expert". On a mesh this
    decides how they are sharded.
    """
    expert = "fsdp" if tiles.in_place > 1 else None
    rows, tokens = (expert, None) if tiles.in_place else (BATCH, BATCH)
    axes = {"expert": expert, "row": rows, "token": tokens}
    inputs, outputs = (tuple((axes[name],) for name in names) for names in (by, made))
    platform = "tpu" if tiles.kernel and not tiles.interpret else "cpu"
    return call(functools.partial(function, tiles), tensors, inputs, outputs, platform)


# ------------------------------------------------------------------------------------------------------------ in JAX


def _own(tiles: Tiles) -> tuple[int, Any]:
    """Returns the number of this device's experts, and the index of its first expert."""
    import jax

    if tiles.in_place < 2:
        return tiles.experts, 0
    own = tiles.experts // tiles.in_place
    return own, jax.lax.axis_index("fsdp") * own


def _layout(tiles: Tiles, index: Any) -> tuple[Any, ...]:
    """Computes `layout` of `index` (T, K) for this device; returns the tensors in the order of `TileLayout`."""
    import jax.numpy as jnp

    experts, start = _own(tiles)
    flat, size = index.reshape(-1) - start, tiles.rows
    flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)  # pairs of other devices come last
    pairs = flat.shape[0]
    count = (pairs + experts * (size - 1)) // size
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    place = jnp.argsort(order).astype(jnp.int32)
    sizes = (flat[:, None] == jnp.arange(experts, dtype=flat.dtype)).sum(0, dtype=jnp.int32)
    needed = -(-sizes // size)
    end = jnp.cumsum(needed)
    first_row, first_place = (end - needed) * size, jnp.cumsum(sizes) - sizes
    expert = (end[None, :] <= jnp.arange(count)[:, None]).sum(1, dtype=jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    of_row = jnp.repeat(expert, size)
    within = jnp.arange(count * size, dtype=jnp.int32) - first_row[of_row]
    there = within < sizes[of_row]  # unused tiles belong to the last expert, after its rows
    pair = jnp.where(there, order[jnp.clip(first_place[of_row] + within, 0, pairs - 1)], -1)
    row = jnp.where(flat < experts, (first_row - first_place)[jnp.minimum(flat, experts - 1)] + place, -1)
    row = row.astype(jnp.int32).reshape(index.shape)
    return pair // index.shape[1], pair, row, expert + start, end[-1:].astype(jnp.int32)


def _rows_of(_: Tiles, tensor: Any, index: Any) -> tuple[Any]:
    """Computes `rows_of`."""
    import jax.numpy as jnp

    there = (index >= 0).reshape(-1, *[1] * (tensor.ndim - 1))
    return (jnp.where(there, tensor[jnp.maximum(index, 0)], 0),)


def _sums_of(tiles: Tiles, rows: Any, index: Any) -> tuple[Any]:
    """Computes `sums_of`, with experts in place over all devices; returns a tuple of one array."""
    import jax
    import jax.numpy as jnp

    if not tiles.in_place:
        return (rows[index].astype(jnp.float32).sum(1).astype(rows.dtype),)
    there = (index >= 0).reshape(*index.shape, *[1] * (rows.ndim - 1))
    sums = jnp.where(there, rows[jnp.maximum(index, 0)].astype(jnp.float32), 0).sum(1)
    return ((jax.lax.psum(sums, "fsdp") if tiles.in_place > 1 else sums).astype(rows.dtype),)


def _columns(outer: int, inner: int, step: int) -> int:
    """Returns the columns in a block of a result with `outer` columns: all, or a multiple of `step`.

    A block of weights has `inner` values per column, at most 4 MiB in bf16, or a single `step`. A number that divides
    `outer` is preferred if it is more than half of the limit.
    """
    most = max(step, _BLOCK_BYTES // (2 * inner) // step * step)
    if outer <= most:
        return outer
    dividing = [size for size in range(step, most + 1, step) if outer % size == 0]
    return dividing[-1] if dividing and dividing[-1] * 2 > most else most


class _Blocks:
    """The blocks of a kernel's grid: (halves of int4 weights, blocks of columns of the result, tiles).

    Tiles are innermost, so that a block of weights is loaded once for all tiles of its expert. With `Tiles.back`, which
    multiplies with the transposed weights, the result has a first axis for the halves of int4 weights (low and high
    bits), because a half may not be a multiple of 128.
    """

    def __init__(self, tiles: Tiles, rows: Any, expert: Any, weight: Any, scale: Any) -> None:
        self.tiles, self.dtype, inner = tiles, rows.dtype, rows.shape[1]
        self.halves = 2 if tiles.bits == 4 and tiles.back else 1
        self.by_rows = (tiles.bits == 4) == tiles.back  # columns of the result lie along rows of the weight
        outer, self.across = weight.shape[1:] if self.by_rows else weight.shape[:0:-1]
        size = _columns(outer, inner, 128)
        if self.halves == 2 and (outer % size or size % tiles.group):
            size = outer
        self.inner, self.outer, self.size = inner, outer, size
        self.grid = (self.halves, -(-outer // size), expert.shape[0])
        self.decoded = (size, self.across) if self.by_rows else (self.across * (2 if tiles.bits == 4 else 1), size)
        self.scale: Any = None if scale is None else self._shaped(scale)

    def _shaped(self, scale: Any) -> Any:
        """Returns the scales in the shape that `specs` divides into blocks."""
        if self.tiles.bits == 8:
            return scale[:, None]
        return scale.reshape(scale.shape[0], 2, 2, -1, scale.shape[-1]) if self.halves == 2 else scale

    def specs(self) -> list[Any]:
        """Returns Pallas' block specs of rows, weights and, for integer weights, scales.

        Their index functions take the place in the grid, the experts of the tiles, and the number of used tiles.
        """
        import jax.numpy as jnp
        from jax.experimental import pallas as pl

        def used_tile(m: Any, used: Any) -> Any:  # an unused tile loads no new block
            return jnp.minimum(m, jnp.maximum(used[0], 1) - 1)

        def spec(shape: Any, place: Any) -> Any:
            return pl.BlockSpec(shape, lambda h, n, m, expert, used: (expert[used_tile(m, used)], *place(h, n)))

        bits, back, size, scale = self.tiles.bits, self.tiles.back, self.size, self.scale
        found = [pl.BlockSpec((self.tiles.rows, self.inner), lambda h, n, m, expert, used: (used_tile(m, used), 0))]
        if self.by_rows:
            found.append(spec((None, size, self.across), lambda h, n: (n, 0)))
        else:
            found.append(spec((None, self.across, size), lambda h, n: (0, n)))
        if bits == 8:
            found.append(spec((None, 1, self.inner if back else size), lambda h, n: (0, 0 if back else n)))
        elif bits == 4 and back:
            groups = scale.shape[3] if size == self.outer else size // self.tiles.group
            found.append(spec((None, 2, None, groups, self.across), lambda h, n: (0, h, n, 0)))
        elif bits == 4:
            found.append(spec((None, 2, scale.shape[2], size), lambda h, n: (0, 0, n)))
        return found

    def decode(self, half: Any, weight: Any, scale: Any, floats: Any) -> None:
        """Writes a block of integers to `floats` as floats: int4 with scales and offsets, int8 without its scales.

        With `back`, `half` is 0 for the low 4 bits of int4 weights and 1 for the high; else both halves are written.
        """
        import jax.numpy as jnp

        def group(shift: Any, start: int, to: int, line: int) -> None:
            """Converts int4 inputs that share a scale, from `start` on, in the half that `shift` selects."""
            codes = weight[start : start + self.tiles.group, :].astype(jnp.int32)
            values = ((codes >> shift) & 15).astype(jnp.float32)
            step, offset = (scale[kind, line : line + 1, :].astype(jnp.float32) for kind in (0, 1))
            floats[to : to + self.tiles.group, :] = (values * step + offset).astype(self.dtype)

        lines = weight.shape[0]
        if self.tiles.bits == 8:
            for start in range(0, lines, _ROWS_AT_ONCE):
                part = weight[start : min(start + _ROWS_AT_ONCE, lines), :].astype(jnp.int32).astype(jnp.float32)
                floats[start : start + part.shape[0], :] = part.astype(self.dtype)
            return
        for number, start in enumerate(range(0, lines, self.tiles.group)):
            if self.tiles.back:
                group(4 * half, start, start, number)
            else:
                group(0, start, start, number)
                group(4, start, lines + start, scale.shape[1] // 2 + number)

    def kernel(self, expert: Any, used: Any, rows: Any, weight: Any, *refs: Any) -> None:
        """Writes a block of the result for a tile to the output in `refs`; unused tiles become zero.

        `expert` has the expert of every tile, `used[0]` the number of used tiles, which come first. `refs` are scales,
        output and a buffer for decoded weights; for float weights only the output.
        """
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl

        bits, back = self.tiles.bits, self.tiles.back
        scale, out, floats = (None, *refs, None) if bits == 16 else refs
        half, m = pl.program_id(0), pl.program_id(2)
        fresh = (m == 0) | (expert[m] != expert[jnp.maximum(m - 1, 0)])

        @pl.when(m >= used[0])
        def _() -> None:
            out[...] = jnp.zeros_like(out)

        if bits < 16:
            pl.when((m < used[0]) & fresh)(lambda: self.decode(half, weight, scale, floats))

        @pl.when(m < used[0])
        def _() -> None:
            left, right = rows[...], weight[...] if bits == 16 else floats[...]
            if bits == 8 and back:
                left = (left.astype(jnp.float32) * scale[...].astype(jnp.float32)).astype(self.dtype)
            contract = ((1,), (1 if self.by_rows else 0,)), ((), ())
            found = jax.lax.dot_general(left, right, contract, preferred_element_type=jnp.float32)
            if bits == 8 and not back:
                found = found * scale[...].astype(jnp.float32)
            out[...] = found.astype(self.dtype)


def _product(tiles: Tiles, rows: Any, expert: Any, used: Any, weight: Any, *scale: Any) -> tuple[Any]:
    """Computes `product` with the Pallas kernel, in a tuple; `expert` and `used` are as in `TileLayout`."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    blocks = _Blocks(tiles, rows, expert, weight, scale[0] if scale else None)
    inputs = [rows, weight] if blocks.scale is None else [rows, weight, blocks.scale]
    halves, outer, count = blocks.halves, blocks.outer, rows.shape[0]
    moved = weight.size * weight.dtype.itemsize + rows.dtype.itemsize * halves * count * (
        rows.shape[1] * blocks.grid[1] + outer
    )
    found = pl.pallas_call(
        blocks.kernel,
        out_shape=jax.ShapeDtypeStruct((halves, count, outer), rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=blocks.grid, in_specs=blocks.specs(),
            out_specs=pl.BlockSpec((None, tiles.rows, blocks.size), lambda h, n, m, expert, used: (h, m, n)),
            scratch_shapes=[] if tiles.bits == 16 else [pltpu.VMEM(blocks.decoded, rows.dtype)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=_VECTOR_MEMORY
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * rows.shape[1] * outer * halves, transcendentals=0, bytes_accessed=moved
        ),
        interpret=tiles.interpret,
        name="tpu_kit_experts",
    )(expert - _own(tiles)[1], used, *inputs)  # fmt: skip
    return (found[0] if halves == 1 else jnp.concatenate([found[0], found[1]], axis=1),)
