"""The structure of a step's program, for the step and the planner: loops over layers, and limits of unrolled code.

`layer_scan` makes the loops over blocks of equal layers, with a stack of weights for equal layers of all iterations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

FEW_TILES = 4
"""Maximum of MLP tiles whose backward pass is unrolled. A loop copies the weights that it carries; with more tiles, the
unrolled program would grow."""
ALONE = 2**24
"""Minimum of elements of a gradient whose squares are summed separately; see `training.step`. 64 MiB are more than a
stack of adapters of rank 16, and less than a stack of a whole model's matrices."""


class Loop(NamedTuple):
    """A run of equal blocks of layers.

    Attributes:
        start: number of the first layer.
        turns: number of blocks, the iterations of the loop.
        neighbours: lengths of the groups of equal neighbours in a block; a group is one layer of the program.
    """

    start: int
    turns: int
    neighbours: list[int]

    @property
    def period(self) -> int:
        """Layers of a block."""
        return sum(self.neighbours)


def loops(keys: Sequence[Any]) -> list[Loop]:
    """Divides layers into loops, in order, some of one turn; layers with equal `keys` (one per layer) may share one."""
    found, start = [], 0
    for period, turns in spans(keys):
        neighbours = [len(list(group)) for _, group in itertools.groupby(keys[start : start + period])]
        found.append(Loop(start, turns, neighbours))
        start += period * turns
    return found


def in_blocks(loops: Sequence[Loop]) -> list[Loop]:
    """Groups the layers of loops over single layers into blocks, for optim.remat=blocks.

    For n layers in blocks of k, the backward pass holds n / k states between blocks and k - 1 states within a block
    (Chen et al. 2016, arXiv:1604.06174). The block size k is the divisor of n with the fewest states, the smallest if
    several are equal. Loops over larger blocks do not change.
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
    """Raises ValueError if optim.remat=blocks would store as many states as optim.remat=full.

    `loops` is a result of the function `loops`. An example is a prime number of layers that are all equal.
    """
    if not any(loop.period > 1 for loop in in_blocks(loops)):
        counts = ", ".join(str(loop.turns) for loop in loops)
        raise ValueError(
            f"optim.remat=blocks saves the input of each block of equal layers, and the numbers of equal layers in a "
            f"row, {counts}, have no divisor that saves memory: set optim.remat=full"
        )


def stacks(loops: Sequence[Loop]) -> Iterator[tuple[str, list[int]]]:
    """Yields (path, layers) per stack: "runs.0.layers.0" in `ScannedLayers`, and the numbers of its layers from 0."""
    for number, (start, turns, neighbours) in enumerate(loops):
        period = sum(neighbours)
        blocks = range(start, start + period * turns, period)
        for stack, (count, end) in enumerate(zip(neighbours, itertools.accumulate(neighbours), strict=True)):
            layers = [first + offset for first in blocks for offset in range(end - count, end)]
            yield f"runs.{number}.layers.{stack}", layers


def spans(keys: Sequence[Any]) -> list[tuple[int, int]]:
    """Divides a sequence into runs of equal blocks; returns (period, turns) per run.

    The period is the number of items in a block, and turns the number of blocks. The sum of (period + 1) is smallest.
    """
    best = [(0, 0, 0)]  # per prefix of the sequence: the smallest sum, and the last run (period, turns)
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
