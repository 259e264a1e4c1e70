"""Block sizes of attention with and without the splash kernel, and the choice between JAX's two backward passes.

The fused backward kernel computes the five matrix products of a pair of blocks at once. It writes a gradient of the
queries for every block of keys, (S / block, n, S, D), which grows with the square of the row. The unfused pass has two
kernels that both compute scores and the gradient of weights: seven products, without these partial gradients.
"""

from __future__ import annotations

LANES = 128
LARGEST_BLOCK = 1024  # with 2048 the vector memory of a v5e overflows at head size 128
PARTIAL_BYTES = 2**30
"""Limit of the queries' partial gradients for the fused kernel; the compiler uses this memory twice."""
HIDDEN_BLOCKS = 4
"""Limit of the ratio of all key blocks to visible key blocks for the fused kernel. For a hidden block it writes and
reads zeros, which takes 0.8 us on a v5e and 0.4 us on a v6e by their bandwidth. Two products of a visible block take
2.9 and 1.2 us."""

WHOLE = 4096
"""The longest row for which attention without a kernel computes all queries at once."""


def query_block(length: int) -> int:
    """Returns how many queries attention without a kernel computes at a time: all up to 4,096, else a power of two.

    Up to 131,072 tokens, a head then has at most 2**24 scores at a time, as for a row of 4,096 tokens.
    """
    return length if length <= WHOLE else max(128, 1 << ((WHOLE * 1024 // length).bit_length() - 1))


def block_tokens(length: int, head_dim: int) -> int:
    """Returns the tokens in a block: at most 1024, halved for head sizes above 128, 256, 512 and so on."""
    return min(length, LARGEST_BLOCK >> (-(-max(1, head_dim) // LANES) - 1).bit_length())


def padded_length(length: int, shards: int = 1) -> int:
    """Rounds a length up to 128, 256, 512 or a multiple of 1024, which are divisible by the kernel's blocks.

    If the queries of a row are divided over `shards` devices, both blocks of tokens of a device have such a length.
    """
    if shards > 1:
        return 2 * shards * padded_length(-(-length // (2 * shards)))
    return next((block for block in (128, 256, 512) if length <= block), -(-length // 1024) * 1024)


def partial_bytes(rows: float, heads: float, length: int, head_dim: int, size: int) -> int:
    """Returns the bytes of the fused kernel's partial gradients, 0 for one block; for the arguments see `is_fused`."""
    blocks = -(-length // block_tokens(length, head_dim))
    return int(blocks * rows * heads * length) * -(-head_dim // LANES) * LANES * size if blocks > 1 else 0


def is_fused(rows: float, heads: float, length: int, head_dim: int, size: int, window: int | None = None) -> bool:
    """Whether the backward pass of attention uses the fused kernel.

    It does not if the partial gradients need more than `PARTIAL_BYTES`, or if a row has more than `HIDDEN_BLOCKS` times
    as many blocks of keys as a window shows.

    Args:
        rows: rows of a pass on a device; a fraction if a row's tokens are divided over devices.
        heads: query heads of a device, divided by the number of devices over which a row's queries are divided.
        length: tokens in a row.
        head_dim: size of a head; in memory it is padded to whole lanes.
        size: bytes of a value.
        window: number of keys that a query sees, or None.
    """
    block = block_tokens(length, head_dim)
    blocks = -(-length // block)
    if window is not None and blocks > HIDDEN_BLOCKS * (1 + -(-(window - 1) // block)):
        return False
    return partial_bytes(rows, heads, length, head_dim, size) <= PARTIAL_BYTES
