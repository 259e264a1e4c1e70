"""Versions of torch_tpu (TorchTPU) and of the packages beside it, and which backend for TPUs an environment has.

TorchTPU succeeds torch_xla; both cannot be installed together. This module needs nothing but Python.
"""

from __future__ import annotations

from tpu_kit.machine.compatibility import PAIRINGS, Version, bare

# A beta. By its metadata it takes torch 2.11 to 2.15 and libtpu from 0.0.50 on. The kit calls private functions of it
# and of torch, so it refuses other versions than those with which the tests ran (`make test-torch-tpu`).
TESTED: dict[str, str] = {
    "torch": "2.13.0", "torch_tpu": "0.2.0", "libtpu": "0.0.52", "jax": "0.10.2", "jaxlib": "0.10.2",
}  # fmt: skip
"""Package -> its version, all pinned in requirements-torch-tpu.txt."""

# Dates of torch_xla's last release and of the tested torch_tpu. Colab's TPU image of 2026-08-19 has torch_xla 2.9.0,
# Kaggle's image of 2026-03 has 2.8.0 (tests/images).
_RELEASED = {"torch_xla": "2025-11", "torch_tpu": "2026-10-19"}


def mismatches(version: Version) -> dict[str, str]:
    """Finds the packages for torch_tpu that are absent or of another version: package -> the tested version."""
    return {name: tested for name, tested in TESTED.items() if bare(version(name) or "") != tested}


def describe_backends(version: Version) -> str:
    """Returns a text that says whether torch_xla and torch_tpu are installed, with versions and release dates.

    If torch_tpu is installed, the text also says why the two exclude each other.
    """
    xla, tpu = version("torch_xla"), version("torch_tpu")
    last = f"torch_xla {PAIRINGS[0].torch} of {_RELEASED['torch_xla']} is its last release"
    if tpu is None:
        return f"torch_xla {xla} ({last}; torch_tpu succeeds it)" if xla else "neither torch_xla nor torch_tpu"
    dated = f" of {_RELEASED['torch_tpu']}" if bare(tpu) == TESTED["torch_tpu"] else ", not the tested release"
    both = f"torch_xla {xla} and torch_tpu {tpu}" if xla else f"torch_tpu {tpu}{dated}, without torch_xla ({last})"
    releases = " or ".join(pairing.torch for pairing in PAIRINGS)
    needs = f"torch_tpu needs torch 2.11 or later, and torch_xla {releases} the same torch"
    return f"{both}: {needs}, so each needs an environment of its own"
