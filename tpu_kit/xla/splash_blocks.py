"""The blocks of attention: those of the splash kernel, which of JAX's two backward passes it takes, and sdpa's.

The fused kernel computes the five products of a pair of blocks at once, but writes a gradient of the queries for each
block of keys: (S / block, n, S, D), which grows with the square of the row. The unfused pass has two kernels, which
both compute scores and the gradient of weights: seven products, and no such gradients.
"""

from __future__ import annotations

LANES = 128
LARGEST_BLOCK = 1024  # with 2048 the vector memory of a v5e overflows at head size 128
PARTIAL_BYTES = 2**30
"""The most bytes of gradients of the queries, one for each block of keys, for which the fused kernel is taken: it takes
the compiler's memory twice."""
HIDDEN_BLOCKS = 4
"""Blocks of a row, for each that a window lets a query see, above which the fused kernel takes longer: it writes and
reads zeros for hidden blocks, 0.8 us for each on a v5e and 0.4 on a v6e by their bandwidth, where two products of a
visible block take 2.9 and 1.2 us."""

WHOLE = 4096
"""The longest row whose attention without a kernel is computed at once."""


def query_block(length: int) -> int:
    """Returns the queries whose scores exist at a time in attention without a kernel: all, or some of a long row.

    So the scores of a head are 2**24 numbers at most up to 131,072 tokens: those of a row of 4,096.
    """
    return length if length <= WHOLE else max(128, 1 << ((WHOLE * 1024 // length).bit_length() - 1))


def block_tokens(length: int, head_dim: int) -> int:
    """Returns the tokens of a block: at most 1024, half as many for heads of more than 128, and so on."""
    return min(length, LARGEST_BLOCK >> (-(-max(1, head_dim) // LANES) - 1).bit_length())


def padded_length(length: int, shards: int = 1) -> int:
    """Rounds a length up to 128, 256, 512 or a multiple of 1024, which the kernel's blocks divide.

    If several devices share the queries of a row, each of their two blocks of tokens has such a length.
    """
    if shards > 1:
        return 2 * shards * padded_length(-(-length // (2 * shards)))
    return next((block for block in (128, 256, 512) if length <= block), -(-length // 1024) * 1024)


def partial_bytes(rows: float, heads: float, length: int, head_dim: int, size: int) -> int:
    """Returns the bytes of the queries' gradients that the fused kernel writes; for the arguments see `is_fused`."""
    blocks = -(-length // block_tokens(length, head_dim))
    return int(blocks * rows * heads * length) * -(-head_dim // LANES) * LANES * size if blocks > 1 else 0


def is_fused(rows: float, heads: float, length: int, head_dim: int, size: int, window: int | None = None) -> bool:
    """Whether the backward pass of attention takes the fused kernel.

    Args:
        rows: of a pass on a device; a part of a row if devices share its tokens.
        heads: query heads of a device; divided by the devices that share the queries of a row.
        length: tokens of a row.
        head_dim: size of a head, which fills whole lanes.
        size: bytes of a value.
        window: keys that a query sees, or None.
    """
    block = block_tokens(length, head_dim)
    blocks = -(-length // block)
    if window is not None and blocks > HIDDEN_BLOCKS * (1 + -(-(window - 1) // block)):
        return False
    return partial_bytes(rows, heads, length, head_dim, size) <= PARTIAL_BYTES
