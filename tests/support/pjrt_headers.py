"""Unpacks the headers of PJRT's C API out of a wheel of TensorFlow: python -m tests.support.pjrt_headers WHEEL."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from tests.support.torch_tpu_environment import HEADERS

_FOLDER = "xla/pjrt/c/"


def main(wheel: str) -> None:
    """Writes the headers to `HEADERS`, where the tests look for them."""
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if f"/{_FOLDER}" in name and name.endswith(".h"):
                target = HEADERS / _FOLDER / Path(name).name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(packed.read(name))


if __name__ == "__main__":
    main(sys.argv[1])
