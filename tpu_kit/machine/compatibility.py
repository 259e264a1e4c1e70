"""Versions of torch, torch_xla, libtpu and jax that work together, and commands that install them.

Needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

Python = tuple[int, int]  # major and minor version
Version = Callable[[str], str | None]
"""Returns the installed version of a package, or None."""

REPOSITORY = "https://github.com/tpu-kit/tpu_kit"
"""The kit's repository; a test compares the notebooks, README.md and pyproject.toml with it."""

PYTHONS: tuple[Python, ...] = ((3, 11), (3, 12), (3, 13))
"""transformers 5 needs 3.11; torch_xla has no wheel for 3.14."""

PACKAGES = ("torch", "torch_xla", "libtpu", "jax", "jaxlib")
"""The packages of a pairing."""

TESTED = {"transformers": ("5.15", "5.24"), "peft": ("0.21", "0.21")}
"""The first and the last minor version with which the tests ran."""

_NO_WHEEL = {("0.0.21", (3, 13))}  # versions of libtpu, and a Python for which they have no wheel


@dataclass(frozen=True)
class Pairing:
    """A release of torch_xla and the versions of other packages that run with it; of several, the first is installed.

    Attributes:
        torch: of torch, torch_xla and torchaudio; torch_xla is compiled against that torch.
        libtpu: of the TPU's driver and compiler.
        jax: of jax and jaxlib.
        torchvision: not needed, but notebook images have it, and it is built for one torch.
        kernel_format: the newest serialization of Pallas kernels that its libtpu reads; None if it reads the format
            that its jax exports.
    """

    torch: str
    libtpu: tuple[str, ...]
    jax: tuple[str, ...]
    torchvision: str
    kernel_format: int | None = None

    def allowed(self, python: Python) -> dict[str, tuple[str, ...]]:
        """The versions that pair, by package; the first has a wheel for this Python."""
        libtpu = sorted(self.libtpu, key=lambda version: (version, python) in _NO_WHEEL)
        return {
            "torch": (self.torch,), "torch_xla": (self.torch,), "libtpu": tuple(libtpu), "jax": self.jax,
            "jaxlib": self.jax, "torchvision": (self.torchvision,), "torchaudio": (self.torch,),
        }  # fmt: skip

    def versions(self, python: Python) -> dict[str, str]:
        """The versions to install for a Python, by package."""
        return {name: self.allowed(python)[name][0] for name in PACKAGES}


PAIRINGS: tuple[Pairing, ...] = (
    # torch_xla's last release. Its extras pin libtpu 0.0.21 and jax 0.7.1. Colab's TPU image of 2026-08-19 has libtpu
    # 0.0.21.1 and jax 0.7.2 (tests/images/colab-tpu.txt); both were run with it.
    Pairing("2.9.0", libtpu=("0.0.21", "0.0.21.1"), jax=("0.7.1", "0.7.2"), torchvision="0.24.0"),
    # Kaggle's TPU image (tests/images/kaggle-tpu.txt) has jax 0.7.2 and libtpu 0.0.17. The extras of torch_xla pin that
    # libtpu too, and jax 0.6.2, which was not tried. Of jax 0.7.2's kernels this libtpu said "Unsupported version:
    # expected <= 4 but got 7", 2026-11-22.
    Pairing("2.8.0", libtpu=("0.0.17",), jax=("0.7.2",), torchvision="0.23.0", kernel_format=4),
)


def bare(version: str) -> str:
    """The version without a build's label such as +cpu."""
    return version.split("+")[0]


def installed_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def code_of(name: str) -> bytes:
    """Returns the code of the user's function "module:function", which tells whether it has changed.

    It is the file of the module, and of those beside it, or of its package, that it imports, one after the other. It is
    empty without a file, as of a notebook's cell.
    """
    if name.startswith("__main__:"):
        return b""
    module = importlib.import_module(name.partition(":")[0])
    package, file = module.__name__.partition(".")[0], getattr(module, "__file__", None)
    if file is None:
        return b""
    folder = Path(file).parents[module.__name__.count(".") + (Path(file).name == "__init__.py")]
    files: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        one = waiting.pop()
        file = getattr(one, "__file__", None)
        beside = file is not None and Path(file).is_relative_to(folder) and "site-packages" not in Path(file).parts
        if file is None or one.__name__ in files or not (beside or one.__name__.partition(".")[0] == package):
            continue
        files[one.__name__] = Path(file).read_bytes()
        for value in [sys.modules.get(one.__name__.rpartition(".")[0]), *vars(one).values()]:
            of = getattr(value, "__module__", None)
            imported = value if isinstance(value, ModuleType) else sys.modules.get(of) if isinstance(of, str) else None
            waiting += [imported] if isinstance(imported, ModuleType) else []
    return b"".join(files[name] for name in sorted(files))


def find_pairing(version: Version) -> Pairing | None:
    """Finds the pairing whose torch and torch_xla are installed; None if there is none."""
    installed = {bare(version(name) or "") for name in ("torch", "torch_xla")}
    return next((pairing for pairing in PAIRINGS if installed == {pairing.torch}), None)


def mismatches(version: Version, python: Python, *, with_tpu: bool) -> dict[str, tuple[str, ...]]:
    """Finds the packages that do not pair: package to allowed versions, of which the first is the one to install.

    If torch and torch_xla belong to no pairing, the newest one is meant. A TPU, or its compiler, needs libtpu and jax.
    """
    allowed = (find_pairing(version) or PAIRINGS[0]).allowed(python)
    needed = PACKAGES if with_tpu else ("torch", "torch_xla")
    have = {name: version(name) for name in allowed}
    wrong = {
        name
        for name, versions in allowed.items()
        if (name in needed if (now := have[name]) is None else bare(now) not in versions)
    }
    if {"jax", "jaxlib"} & wrong or bare(have["jax"] or "") != bare(have["jaxlib"] or ""):
        wrong |= {name for name in ("jax", "jaxlib") if with_tpu or have[name] is not None}
    return {name: versions for name, versions in allowed.items() if name in wrong}


def install_line(pins: dict[str, str]) -> str:
    """The line of pip that installs these versions."""
    return "pip install " + " ".join(f'"{name}=={pin}"' for name, pin in pins.items())


def requirements(kind: str) -> Path:
    """The file of the tested versions for "tpu" (torch_xla), "torch-tpu" or "gpu", in the installed kit."""
    return Path(__file__).parents[1] / f"requirements-{kind}.txt"


def environment_line(kind: str = "tpu", kit: str = "") -> str:
    """The line of the shell that makes an environment of its own for the kit, with a Python that uv finds or fetches.

    pip installs the kit from `kit`, by default its clone or its repository.
    """
    clone = Path(__file__).parents[2]
    kit = kit or (str(clone) if (clone / "pyproject.toml").is_file() else f"git+{REPOSITORY}")
    wanted = shlex.join(["-r", str(requirements(kind)), kit])
    return f"pip install uv && uv venv --python 3.12 ~/tpu_kit-env && uv pip install --python ~/tpu_kit-env {wanted}"


def is_tested(package: str, version: str) -> bool:
    """Whether a version of a package in `TESTED` is between the versions that the tests ran with."""
    first, last = map(_minor, TESTED[package])
    return first <= _minor(version) <= last


def untested(version: Version) -> dict[str, str]:
    """What to say of each package with which the tests did not run: another release may compute something else."""
    installed = {package: now for package in TESTED if (now := version(package))}
    return {
        package: f"{package} {now}, tested with {' to '.join(dict.fromkeys(TESTED[package]))}"
        for package, now in installed.items()
        if not is_tested(package, now)
    }


def other_transformers() -> str:
    """What to try with a model that fails: the last transformers that was tested; empty where that is installed."""
    now, last = installed_version("transformers") or "0", TESTED["transformers"][1]
    if _minor(now) == _minor(last):
        return ""
    advice = f"{last} may do it: pip install -U 'transformers~={last}.0', then start anew"
    if _minor(now) > _minor(last):
        advice = f"the tests ran with {last} at the latest, and {advice}"
    return f". This is transformers {now}; {advice}"


def _minor(version: str) -> tuple[int, ...]:
    """The major and minor version; empty if packaging, or pip's copy of it, is missing or cannot read the version."""
    parsed = parse_version(version)
    return () if parsed is None else parsed.release[:2]


def parse_version(version: str) -> Any:
    """A version as `packaging` reads it; None if it cannot, or if neither it nor pip's copy of it is installed."""
    packaging = find_packaging("version")
    try:
        return packaging and packaging.Version(version)
    except packaging.InvalidVersion:
        return None


def find_packaging(module: str) -> Any:
    """A module of `packaging`, else of pip's copy of it; None where neither is installed."""
    for name in ("packaging", "pip._vendor.packaging"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{name}.{module}")
    return None
