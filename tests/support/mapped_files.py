"""Finds the files from which the arrays of packed rows are mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tpu_kit.data.batching import PackedDataset
from tpu_kit.data.tokenizing import Bits, Joined


def files_of(data: PackedDataset) -> set[str]:
    """Returns the names of the files that hold the token ids and loss masks; "" is the process's own memory."""
    flat = (data.documents.input_ids, data.documents.loss_mask)
    parts = [part for each in flat for part in (each.parts if isinstance(each, Joined) else [each])]
    return {_file_of(part.packed if isinstance(part, Bits) else part) for part in parts}


def _file_of(array: np.ndarray) -> str:
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, _, _, inode, *name = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in place.split("-"))
        if first <= address < last:
            return Path(name[0]).name.removesuffix(" (deleted)") if inode != "0" else ""
    raise AssertionError("the array lies in no mapped memory")
