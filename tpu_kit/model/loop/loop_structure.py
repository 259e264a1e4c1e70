"""The structure of a step's program that the planner must know, too: loops over layers, and what is unrolled or alone.

`layer_scan` makes the loops over blocks of equal layers, with a stack of weights for equal layers of all turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

FEW_TILES = 4
"""Tiles of an MLP up to which its backward pass is unrolled: a loop copies the weights that it carries, and with more
tiles the program would grow."""
ALONE = 2**24
"""Number of elements from which on the squares of a gradient are summed by themselves; see `training.step`.
64 MiB are more than a stack of adapters of rank 16, and less than a stack of a whole model's matrices."""


class Loop(NamedTuple):
    """A run of equal blocks of layers.

    Attributes:
        start: its first layer.
        turns: number of blocks.
        neighbours: numbers of equal neighbours within a block; the program has one layer for each.
    """

    start: int
    turns: int
    neighbours: list[int]

    @property
    def period(self) -> int:
        """Layers of a block."""
        return sum(self.neighbours)


def loops(keys: Sequence[Any]) -> list[Loop]:
    """Divides layers into loops; `keys` are equal for layers that can be turns of one loop."""
    found, start = [], 0
    for period, turns in spans(keys):
        neighbours = [len(list(group)) for _, group in itertools.groupby(keys[start : start + period])]
        found.append(Loop(start, turns, neighbours))
        start += period * turns
    return found


def in_blocks(loops: Sequence[Loop]) -> list[Loop]:
    """Makes the turns of loops over single layers blocks of equal neighbours, as optim.remat=blocks asks.

    The backward pass holds a state for each turn, and one for each further layer of a turn (Chen et al. 2016,
    arXiv:1604.06174). A block has the number of layers, of those that divide the loop, that leaves the fewest states;
    of several the smallest. Turns that are blocks already stay.
    """
    found = []
    for loop in loops:
        if loop.neighbours == [1]:
            sizes = [size for size in range(1, loop.turns + 1) if loop.turns % size == 0]
            size = min(sizes, key=lambda one: loop.turns // one + one)
            loop = Loop(loop.start, loop.turns // size, [size])
        found.append(loop)
    return found


def check_blocks(loops: Sequence[Loop]) -> None:
    """Raises ValueError if optim.remat=blocks would keep as many states as optim.remat=full."""
    if not any(loop.period > 1 for loop in in_blocks(loops)):
        counts = ", ".join(str(loop.turns) for loop in loops)
        raise ValueError(
            f"optim.remat=blocks keeps the input of each block of equal layers, and the numbers of equal layers in a "
            f"row, {counts}, have no divisor that saves memory: set optim.remat=full"
        )


def stacks(loops: Sequence[Loop]) -> Iterator[tuple[str, list[int]]]:
    """Yields the path of each stack of weights in the list of layers, and the layers whose weights it holds."""
    for number, (start, turns, neighbours) in enumerate(loops):
        period = sum(neighbours)
        blocks = range(start, start + period * turns, period)
        for stack, (count, end) in enumerate(zip(neighbours, itertools.accumulate(neighbours), strict=True)):
            layers = [first + offset for first in blocks for offset in range(end - count, end)]
            yield f"runs.{number}.layers.{stack}", layers


def spans(keys: Sequence[Any]) -> list[tuple[int, int]]:
    """Divides a sequence into runs (period, turns) of equal blocks, with the least sum of (items of a block + 1)."""
    best = [(0, 0, 0)]  # of the items up to each place: the sum, and the last run
    for end in range(1, len(keys) + 1):
        least = (best[-1][0] + 2, 1, 1)
        for period in range(1, end + 1):
            if period + 1 >= least[0]:
                break
            turns, start, block = 1, end - 2 * period, keys[end - period : end]
            while start >= 0 and keys[start : start + period] == block:
                turns += 1
                least = min(least, (best[start][0] + period + 1, period, turns), key=lambda one: one[0])
                start -= period
        best.append(least)
    found, end = [], len(keys)
    while end:
        _, period, turns = best[end]
        found.append((period, turns))
        end -= period * turns
    return found[::-1]
