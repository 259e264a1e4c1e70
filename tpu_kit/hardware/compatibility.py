"""The table of versions of torch, torch_xla, libtpu and jax that work together. Needs nothing but Python.

The doctor (`machine`), `install` and `compile_check` read it.
"""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Python = tuple[int, int]  # major and minor version


@dataclass(frozen=True)
class Pairing:
    """A release of torch_xla, and the versions of the other packages that run with it.

    Attributes:
        torch: torch and torch_xla have the same version; torch_xla is compiled against that torch.
        libtpu: versions of the TPU's driver and compiler, with the Pythons that have wheels of them; the first that
            fits is installed.
        jax: versions of jax and jaxlib; the first is installed.
        beside: packages of notebook images that are not needed, but are built for one torch.
        kernel_format: the newest serialization of Pallas kernels that its libtpu reads; None if it reads the format
            that its jax exports.
    """

    torch: str
    libtpu: Mapping[str, tuple[Python, ...]]
    jax: tuple[str, ...]
    beside: Mapping[str, str]
    kernel_format: int | None = None

    def libtpu_for(self, python: Python) -> str | None:
        """The libtpu to install for a Python; None where it has no wheel."""
        return next((version for version, pythons in self.libtpu.items() if python in pythons), None)

    def versions(self, python: Python) -> dict[str, str]:
        """The versions to install for a Python, by package; without libtpu if it has no wheel."""
        driver = self.libtpu_for(python)
        found = {"torch": self.torch, "torch_xla": self.torch}
        return found | ({"libtpu": driver} if driver else {}) | {"jax": self.jax[0], "jaxlib": self.jax[0]}

    def allowed(self, package: str) -> tuple[str, ...]:
        """The versions of a package that pair with this torch_xla."""
        if package == "libtpu":
            return tuple(self.libtpu)
        return self.jax if package in ("jax", "jaxlib") else (self.torch,)


PYTHONS: tuple[Python, ...] = ((3, 11), (3, 12), (3, 13))
"""transformers 5 needs 3.11; torch_xla has no wheel for 3.14."""

PAIRINGS: tuple[Pairing, ...] = (
    # torch_xla's last release. Its extras pin libtpu 0.0.21 and jax 0.7.1. Colab's TPU image of 2026-08-19 has libtpu
    # 0.0.21.1 and jax 0.7.2 (tests/images/colab-tpu.txt); both were run with it.
    Pairing(
        torch="2.9.0",
        libtpu={"0.0.21": ((3, 11), (3, 12)), "0.0.21.1": PYTHONS},
        jax=("0.7.1", "0.7.2"),
        beside={"torchvision": "0.24.0", "torchaudio": "2.9.0"},
    ),
    # Kaggle's TPU image (tests/images/kaggle-tpu.txt) has jax 0.7.2 and libtpu 0.0.17. The extras of torch_xla pin that
    # libtpu too, and jax 0.6.2, which was not tried.
    Pairing(
        torch="2.8.0",
        libtpu={"0.0.17": PYTHONS},
        jax=("0.7.2",),
        beside={"torchvision": "0.23.0", "torchaudio": "2.8.0"},
        kernel_format=4,  # of jax 0.7.2 it said "Unsupported version: expected <= 4 but got 7", 2026-11-22
    ),
)
REPOSITORY = "https://github.com/tpu-kit/tpu_kit"
"""The kit's repository; a test compares the notebooks, README.md and pyproject.toml with it."""
PACKAGES = ("torch", "torch_xla", "libtpu", "jax", "jaxlib")
"""The packages of a pairing."""

TESTED = {"transformers": ("5.15", "5.23"), "peft": ("0.21", "0.21")}
"""The first and the last minor version with which the tests ran."""


def bare(version: str) -> str:
    """The version without a build's label such as +cpu."""
    return version.split("+")[0]


def installed_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_pairing(version: Callable[[str], str | None]) -> Pairing | None:
    """Finds the pairing whose torch and torch_xla are installed; None if there is none.

    Args:
        version: returns the installed version of a package, or None.
    """
    for pairing in PAIRINGS:
        if all(bare(version(name) or "") == pairing.torch for name in ("torch", "torch_xla")):
            return pairing
    return None


def mismatches(version: Callable[[str], str | None], python: Python, *, with_tpu: bool) -> dict[str, str]:
    """Finds what to install so that the packages pair: package to version; empty if they pair.

    Packages that pair already are kept. If torch and torch_xla belong to no pairing, the newest one is chosen.

    Args:
        version: returns the installed version of a package, or None.
        python: version of the Python to install for.
        with_tpu: whether a TPU, or its compiler, is used, which need libtpu and jax.
    """
    pairing = find_pairing(version) or PAIRINGS[0]
    wanted = pairing.versions(python)
    found = {}
    for name, pick in wanted.items():
        have = version(name)
        needed = with_tpu or name in ("torch", "torch_xla")
        if needed if have is None else bare(have) not in pairing.allowed(name):
            found[name] = pick
    if {"jax", "jaxlib"} & set(found) or bare(version("jax") or "") != bare(version("jaxlib") or ""):
        found |= {name: wanted[name] for name in ("jax", "jaxlib") if with_tpu or version(name) is not None}
    return {name: wanted[name] for name in wanted if name in found}


def install_line(python: Python) -> str:
    """The line of pip that installs the newest pairing."""
    return "pip install " + " ".join(f'"{name}=={pin}"' for name, pin in PAIRINGS[0].versions(python).items())


def environment_line(requirements: str, kit: str) -> str:
    """The line of the shell that makes an environment of its own for the kit, with a Python that uv finds or fetches.

    Args:
        requirements: the file of the tested versions.
        kit: what pip installs the kit from.
    """
    given = shlex.join(["-r", requirements, kit])
    return f"pip install uv && uv venv --python 3.12 ~/tpu_kit-env && uv pip install --python ~/tpu_kit-env {given}"


def beside_torch_tpu(version: str) -> str:
    """Says why torch_tpu (TorchTPU), torch_xla's successor, and the kit on a TPU cannot share an environment."""
    releases = " or ".join(pairing.torch for pairing in PAIRINGS)
    return (
        f"torch_tpu {version} needs torch 2.11 or later, and the kit on a TPU torch_xla {releases} with the same torch"
        ": each needs an environment of its own"
    )


def is_tested(package: str, version: str) -> bool:
    """Whether a version of a package in `TESTED` is between the versions that the tests ran with."""
    first, last = TESTED[package]
    return _minor(first) <= _minor(version) <= _minor(last)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
