"""The environment of `make test-torch-tpu`: torch_tpu, with a PJRT plugin for the CPU in place of libtpu.

`python -m tests.support.torch_tpu_environment` writes the installed versions into the kit as the supported ones.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tpu_kit.machine import torch_tpu
from tpu_kit.machine.compatibility import bare, installed_version

HEADERS = Path(sys.prefix) / "include" / "pjrt"
"""The folder to which the Makefile unpacks PJRT's headers, from a wheel of TensorFlow."""

PLUGIN = "lammps_jax_pjrt_cpu"
"""A package that contains XLA:CPU as a plugin."""


def why_not() -> str:
    """Returns the reason why the tests cannot run here; empty if they can."""
    if installed_version("torch_tpu") is None:
        return "torch_tpu is not installed: make test-torch-tpu has an environment of its own"
    if find_spec(PLUGIN) is None or not HEADERS.is_dir():
        return f"{PLUGIN} or the headers of PJRT in {HEADERS} are missing: make test-torch-tpu"
    return ""


needs_torch_tpu = pytest.mark.skipif(bool(why_not()), reason=why_not() or "all is there")


@functools.cache
def environment() -> dict[str, str | None]:
    """Builds the plugin; returns the environment changes for a process that runs torch_tpu."""
    (plugin,) = Path(find_spec(PLUGIN).origin).parent.glob("*pjrt*cpu*.so")  # type: ignore[union-attr, arg-type]  # found
    library = Path(tempfile.mkdtemp(prefix="tpu_kit-shim-")) / "shim.so"
    source = Path(__file__).with_name("pjrt_shim.c")
    command = ["gcc", "-O2", "-Wall", "-shared", "-fPIC", "-I", HEADERS, source, "-o", library, "-ldl"]
    subprocess.run(command, check=True)
    return {
        "TPU_LIBRARY_PATH": str(library), "SHIM_REAL": str(plugin), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TPU_SKIP_MDS_QUERY": "1",  # otherwise it queries the metadata server for minutes
        "USE_TORCH_XLA": "0", "PJRT_DEVICE": None, "XLA_FLAGS": None, "JAX_PLATFORMS": "cpu",
    }  # fmt: skip


def adopt() -> None:
    """Writes the installed versions into the kit, which refuses all others."""
    path = Path(torch_tpu.__file__)
    text = path.read_text()
    for name, tested in torch_tpu.TESTED.items():
        now = bare(installed_version(name) or "")
        assert text.count(f'"{name}": "{tested}"') == 1 and now, name
        text = text.replace(f'"{name}": "{tested}"', f'"{name}": "{now}"')
        print(f"{name} {tested} -> {now}")
    path.write_text(text)


if __name__ == "__main__":
    adopt()
