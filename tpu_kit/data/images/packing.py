"""Assigns documents to rows that hold at most K images, and finds the least K that leaves few token slots empty."""

from __future__ import annotations

import numpy as np

from tpu_kit.data.batching import best_fill, filled_rows

ENOUGH = 0.98
"""The share of the fill without a limit that the derived K keeps."""


def fewest_images(lengths: np.ndarray, images: np.ndarray, row_length: int, at_least: int) -> int:
    """Returns the least K, from `at_least` on, with which rows are nearly as full as without a limit.

    Args:
        lengths: tokens of each document, 1 to `row_length`.
        images: image slots of each document.
        row_length: tokens of a row.
        at_least: the most image slots of a document.
    """
    whole = len(best_fill(lengths, row_length)[1])
    most, step = max(at_least, -(-int(images.sum()) // whole)), 1
    while len(best_fill_of_images(lengths, images, row_length, most)[1]) * ENOUGH > whole:
        most, step = most + step, 1 + step // 2
    return most


def best_fill_of_images(
    lengths: np.ndarray, images: np.ndarray, row_length: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """As `batching.best_fill`, for rows of at most `most` images: a subset sum for each number of images.

    Args:
        lengths: tokens of each document, 1 to `row_length`.
        images: image slots of each document, at most `most`.
        row_length: tokens of a row.
        most: image slots of a row.

    Returns:
        The document numbers row after row, and how many documents each row has (both int64).
    """
    assert images.max() <= most, (images.max(), most)
    order = np.lexsort((images, lengths))
    unique, starts = np.unique(np.stack([lengths, images], 1)[order], axis=0, return_index=True)
    sizes = [(int(length), int(count)) for length, count in unique]
    return filled_rows(order, starts, lambda left, largest: _fullest(sizes, left, largest, row_length, most))


def _fullest(sizes: list[tuple[int, int]], left: list[int], largest: int, row_length: int, most: int) -> dict[int, int]:
    """Returns the number of documents of each size (index in `sizes`) that fill a row best, at least one `largest`."""
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
