"""Packs documents into rows of at most K images, and finds a small K that leaves few token slots empty."""

from __future__ import annotations

import numpy as np

from tpu_kit.data.batching import best_fill, filled_rows

ENOUGH = 0.98
"""The derived K fills rows to at least this share of the fill without a limit."""


def fewest_images(lengths: np.ndarray, images: np.ndarray, row_length: int, at_least: int) -> int:
    """Returns a small K, at least `at_least`, that needs at most 1 / `ENOUGH` times the rows of an unlimited packing.

    `lengths` (documents,) are tokens, 1 to `row_length`, and `images` (documents,) image slots, at most `at_least`.
    """
    whole = len(best_fill(lengths, row_length)[1])
    most, step = max(at_least, -(-int(images.sum()) // whole)), 1
    while len(best_fill_of_images(lengths, images, row_length, most)[1]) * ENOUGH > whole:
        most, step = most + step, 1 + step // 2
    return most


def best_fill_of_images(
    lengths: np.ndarray, images: np.ndarray, row_length: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Fills rows of at most `most` images like `batching.best_fill`, by a subset sum per number of images.

    `lengths` (documents,) are tokens, 1 to `row_length`, and `images` (documents,) image slots, at most `most`.

    Returns:
        Document numbers row after row, and the number of documents per row (both int64).
    """
    assert images.max() <= most, (images.max(), most)
    order = np.lexsort((images, lengths))
    unique, starts = np.unique(np.stack([lengths, images], 1)[order], axis=0, return_index=True)
    sizes = [(int(length), int(count)) for length, count in unique]
    return filled_rows(order, starts, lambda left, largest: _fullest(sizes, left, largest, row_length, most))


def _fullest(sizes: list[tuple[int, int]], left: list[int], largest: int, row_length: int, most: int) -> dict[int, int]:
    """Returns index in `sizes` -> number of documents that together fill a row best, with at least 1 for `largest`.

    `sizes` are (tokens, image slots), ascending; `left` has the remaining documents by size; `largest` is an index.
    """
    room, spare = row_length - sizes[largest][0], most - sizes[largest][1]
    whole = (1 << room + 1) - 1
    reach, stages = [1] + [0] * spare, list[tuple[int, list[int]]]()  # bit s of reach[k]: k images and s tokens
    for i in range(largest, -1, -1):
        size, count = sizes[i]
        copies = min(left[i] - (i == largest), room // size, spare // count if count else room)
        if copies <= 0:
            continue
        stages.append((i, reach.copy()))
        part = 1
        while copies:  # 1, 2, 4, ... and the rest: every number of copies is a sum of these
            part = min(part, copies)
            for k in range(spare, part * count - 1, -1):
                reach[k] |= (reach[k - part * count] << part * size) & whole
            copies, part = copies - part, 2 * part
        if any(one >> room for one in reach):
            break
    best = max(range(spare + 1), key=lambda k: reach[k].bit_length())
    target, chosen = reach[best].bit_length() - 1, {largest: 1}
    for i, before in reversed(stages):
        size, count = sizes[i]
        while not before[best] >> target & 1:
            target, best = target - size, best - count
            chosen[i] = chosen.get(i, 0) + 1
    return chosen
