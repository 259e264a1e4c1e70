"""Lists versions of torch, torch_xla, libtpu and jax that work together, and the commands that install them.

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
"""Packages whose versions must fit together."""

TESTED = {"transformers": ("5.15", "5.24"), "peft": ("0.21", "0.21")}
"""The first and the last minor version with which the tests ran."""

_NO_WHEEL = {("0.0.21", (3, 13))}  # versions of libtpu, and a Python for which they have no wheel


@dataclass(frozen=True)
class Pairing:
    """A release of torch_xla and the versions of other packages that run with it; the kit installs the first version.

    Attributes:
        torch: version of torch, torch_xla and torchaudio; torch_xla is compiled against that torch.
        libtpu: versions of the TPU's driver and compiler.
        jax: versions of jax and jaxlib.
        torchvision: not needed, but notebook images have it, and it is built for one version of torch.
        kernel_format: newest serialization version of Pallas kernels that this libtpu reads; None if it reads the
            version that this jax exports.
    """

    torch: str
    libtpu: tuple[str, ...]
    jax: tuple[str, ...]
    torchvision: str
    kernel_format: int | None = None

    def allowed(self, python: Python) -> dict[str, tuple[str, ...]]:
        """Returns allowed versions by package: of `PACKAGES`, torchvision and torchaudio.

        The first version of a package has a wheel for this Python.
        """
        libtpu = sorted(self.libtpu, key=lambda version: (version, python) in _NO_WHEEL)
        return {
            "torch": (self.torch,), "torch_xla": (self.torch,), "libtpu": tuple(libtpu), "jax": self.jax,
            "jaxlib": self.jax, "torchvision": (self.torchvision,), "torchaudio": (self.torch,),
        }  # fmt: skip

    def versions(self, python: Python) -> dict[str, str]:
        """Returns the versions to install for a Python, by package."""
        return {name: self.allowed(python)[name][0] for name in PACKAGES}


PAIRINGS: tuple[Pairing, ...] = (
    # torch_xla's last release. Its extras pin libtpu 0.0.21 and jax 0.7.1. Colab's TPU image of 2026-08-19 has libtpu
    # 0.0.21.1 and jax 0.7.2 (tests/images/colab-tpu.txt); both were run with it.
    Pairing("2.9.0", libtpu=("0.0.21", "0.0.21.1"), jax=("0.7.1", "0.7.2"), torchvision="0.24.0"),
    # Kaggle's TPU image (tests/images/kaggle-tpu.txt) has jax 0.7.2 and libtpu 0.0.17. The extras of torch_xla pin that
    # libtpu too, and jax 0.6.2, which was not tried. This libtpu refused the kernels of jax 0.7.2 on 2026-11-22:
    # "Unsupported version: expected <= 4 but got 7".
    Pairing("2.8.0", libtpu=("0.0.17",), jax=("0.7.2",), torchvision="0.23.0", kernel_format=4),
)


def bare(version: str) -> str:
    """Returns a version without its build label, such as +cpu."""
    return version.split("+")[0]


def installed_version(package: str) -> str | None:
    """Returns the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def code_of(name: str) -> bytes:
    """Returns the source files behind the user's function "module:function", to detect changes of it.

    Imports the module. The bytes are its file and the files of all modules that it imports, directly or not, from the
    same folder or package, concatenated by module name. Empty if the module has no file, as for a function that a
    notebook's cell defines ("__main__:function"). Raises the error of the import.
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
    """Finds the pairing of the installed torch and torch_xla; None if they belong to no pairing."""
    installed = {bare(version(name) or "") for name in ("torch", "torch_xla")}
    return next((pairing for pairing in PAIRINGS if installed == {pairing.torch}), None)


def mismatches(version: Version, python: Python, *, with_tpu: bool) -> dict[str, tuple[str, ...]]:
    """Returns the packages that do not fit: name -> allowed versions, the version to install first; empty if all fit.

    If the installed torch and torch_xla belong to no pairing, the versions of `PAIRINGS[0]` are expected. These two
    must be installed; with `with_tpu`, libtpu, jax and jaxlib too. Other packages of `Pairing.allowed` must fit only if
    they are installed. jax and jaxlib fit only together, with equal versions.
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
    """Returns the pip command that installs these versions."""
    return "pip install " + " ".join(f'"{name}=={pin}"' for name, pin in pins.items())


def requirements(kind: str) -> Path:
    """Returns the kit's requirements file with the tested versions for "tpu" (torch_xla), "torch-tpu" or "gpu"."""
    return Path(__file__).parents[1] / f"requirements-{kind}.txt"


def environment_line(kind: str = "tpu", kit: str = "") -> str:
    """Returns the shell command that makes a virtual environment for the kit, with a Python that uv finds or downloads.

    It installs the kit from `kit`, by default its clone or its repository.
    """
    clone = Path(__file__).parents[2]
    kit = kit or (str(clone) if (clone / "pyproject.toml").is_file() else f"git+{REPOSITORY}")
    wanted = shlex.join(["-r", str(requirements(kind)), kit])
    return f"pip install uv && uv venv --python 3.12 ~/tpu_kit-env && uv pip install --python ~/tpu_kit-env {wanted}"


def is_tested(package: str, version: str) -> bool:
    """Whether a version of a package in `TESTED` lies in the tested range."""
    first, last = map(_minor, TESTED[package])
    return first <= _minor(version) <= last


def untested(version: Version) -> dict[str, str]:
    """Maps installed packages outside of the range in `TESTED` to a warning: they may compute something else."""
    installed = {package: now for package in TESTED if (now := version(package))}
    return {
        package: f"{package} {now}, tested with {' to '.join(dict.fromkeys(TESTED[package]))}"
        for package, now in installed.items()
        if not is_tested(package, now)
    }


def other_transformers() -> str:
    """Returns the end of an error text that advises the newest tested transformers; empty if that is installed."""
    now, last = installed_version("transformers") or "0", TESTED["transformers"][1]
    if _minor(now) == _minor(last):
        return ""
    advice = f"{last} may do it: pip install -U 'transformers~={last}.0', then start anew"
    if _minor(now) > _minor(last):
        advice = f"the newest tested version is {last}, and {advice}"
    return f". This is transformers {now}; {advice}"


def _minor(version: str) -> tuple[int, ...]:
    """Returns major and minor version; empty if `packaging` and pip's copy are missing or cannot parse it."""
    parsed = parse_version(version)
    return () if parsed is None else parsed.release[:2]


def parse_version(version: str) -> Any:
    """Parses a version with `packaging`; None if it cannot, or if neither `packaging` nor pip's copy is installed."""
    packaging = find_packaging("version")
    try:
        return packaging and packaging.Version(version)
    except packaging.InvalidVersion:
        return None


def find_packaging(module: str) -> Any:
    """Imports a module of `packaging`, or else of pip's copy; None if neither is installed."""
    for name in ("packaging", "pip._vendor.packaging"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{name}.{module}")
    return None
