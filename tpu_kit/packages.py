"""What must be installed on a machine, decided from what is there. Needs nothing but Python.

`install` carries it out. What `decide` says follows from a `Site` and the file of requirements alone.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

from tpu_kit.machine import BESIDE, PINS, TPU_PYTHONS, Machine

CHECKED = "2026-11-21"
"""When the wheels of the matrix were looked up."""
Kind = Literal["tpu", "rehearsal", "gpu"]
"""What is installed: with torch_xla, libtpu and jax; with torch_xla alone; without any of them."""

_GIT = "git+https://github.com/tpu-kit/tpu_kit"
_LINUX, _NEWEST = "Linux x86_64", (3, 13)
_GIB_NEEDED = {True: 14, False: 4}  # by whether torch brings CUDA's libraries: while pip unpacks, more than stays


@dataclass(frozen=True)
class Site:
    """What there is.

    Attributes:
        place: "Colab", "Kaggle", "TPU VM", "GPU machine" or "computer without an accelerator".
        accelerator: such as "4 x v5e"; empty without.
        system: operating system and processor, such as "Linux x86_64".
        python: major and minor version.
        versions: of all installed packages, by normalised name.
        free_gib: room where packages go.
        uv: path of uv; empty without.
        pip: whether this Python has pip.
    """

    place: str
    accelerator: str
    system: str
    python: tuple[int, int]
    versions: Mapping[str, str]
    free_gib: float
    uv: str = ""
    pip: bool = True

    @property
    def has_tpu(self) -> bool:
        """Whether TPU chips are attached."""
        return self.accelerator != "" and "GPU" not in self.accelerator

    def rows(self) -> list[dict[str, str]]:
        """For a table: what was found."""
        names = ("torch", "torch_xla", "libtpu", "jax", "transformers")
        have = {name: self.versions.get(normal(name)) for name in names}
        return [
            {"what": "runs on", "found": self.place},
            {"what": "accelerator", "found": self.accelerator or "none: the CPU rehearses the TPU's path"},
            {"what": "system", "found": self.system},
            {"what": "Python", "found": ".".join(map(str, self.python))},
            {"what": "room for packages", "found": f"{self.free_gib:.0f} GiB"},
            *({"what": name, "found": version or "not installed"} for name, version in have.items()),
            {"what": "tpu_kit", "found": str(Path(__file__).parent)},
        ]


@dataclass(frozen=True)
class Decision:
    """What is to be done.

    Attributes:
        action: "nothing", "install", or "impossible" with this Python on this machine.
        kind: what is installed.
        why: one line for each thing that is missing or wrong, or stands in the way.
        commands: one line of pip or uv; one that removes something may come before it.
        ways_out: where it is impossible.
    """

    action: Literal["nothing", "install", "impossible"]
    kind: Kind
    why: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...] = ()
    ways_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.action == "nothing":
            return "Nothing to do: " + "; ".join(self.why)
        if self.action == "install":
            return "\n".join(["To install, because:", *_list(self.why), *map(shlex.join, self.commands)])
        return "\n".join(["It cannot be installed here:", *_list(self.why), "Ways out:", *_list(self.ways_out)])


def _list(lines: Sequence[str]) -> list[str]:
    return [f"  - {line}" for line in lines]


def normal(name: str) -> str:
    """The name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Versions of all installed packages, by normalised name."""
    return {normal(one.name): one.version for one in distributions() if one.name}


def look(at: Machine | None = None) -> Site:
    """Look around, without importing what is to be installed, and without touching a device."""
    at = at or Machine()
    tpus, gpu = at.tpus(), (at.root / "proc/driver/nvidia/version").exists()
    accelerator = f"{len(tpus)} x {tpus[0]}" if tpus else "NVIDIA GPU" if gpu else ""
    if "COLAB_RELEASE_TAG" in at.environ:
        place = "Colab"
    elif "KAGGLE_KERNEL_RUN_TYPE" in at.environ:
        place = "Kaggle"
    else:
        place = "TPU VM" if tpus else "GPU machine" if gpu else "computer without an accelerator"
    return Site(
        place, accelerator, f"{platform.system()} {platform.machine()}", at.python, installed(),
        shutil.disk_usage(sys.prefix).free / 2**30, shutil.which("uv") or "",
        importlib.util.find_spec("pip") is not None,
    )  # fmt: skip


def matrix(site: Site) -> list[dict[str, str]]:
    """Which wheels there are for which system and Python; the line of this machine is marked."""
    torch_xla, libtpu = PINS["torch_xla"], PINS["libtpu"]
    lines = [
        (_LINUX, "3.11, 3.12", torch_xla, libtpu, "TPU, its compiler, the rehearsal on a CPU; GPU"),
        (_LINUX, "3.13", torch_xla, "no wheel", "the rehearsal on a CPU; GPU"),
        (_LINUX, "3.10", torch_xla, libtpu, "nothing: the kit's transformers needs 3.11"),
        (_LINUX, "3.14", "no wheel", "no wheel", "nothing"),
        ("others", "3.11 to 3.13", "no wheel", "no wheel", "GPU or CPU, by torch alone: no TPU, no rehearsal"),
    ]
    mine = ".".join(map(str, site.python))
    first, last = (3, 11), (3, 13)
    found = []
    for system, pythons, xla, driver, runs in lines:
        here = mine in pythons.split(", ") if system == _LINUX else first <= site.python <= last
        here = here and (system == site.system or (system == "others" and site.system != _LINUX))
        found.append(
            {"here": "→" if here else "", "system": system, "Python": pythons, "torch_xla": xla, "libtpu": driver,
             f"what runs (wheels looked up {CHECKED})": runs}
        )  # fmt: skip
    return found


def requirements(kind: Kind, source: str = "") -> Path:
    """The file with the pins: of the folder that the kit is installed from, or the one that came with the kit."""
    name = f"requirements-{'tpu' if kind == 'tpu' else 'gpu'}.txt"
    beside = Path(source).expanduser() / name
    return beside if source and beside.is_file() else Path(__file__).with_name(name)


def decide(
    site: Site, hardware: str = "auto", torch_index: str = "", source: str = "", pins: str | None = None
) -> Decision:
    """What has to be done there.

    Args:
        site: what there is.
        hardware: "tpu", "rehearsal", "gpu", or "auto": the TPU's packages wherever their wheels fit, because a CPU
            rehearses with them, except on a machine with a GPU.
        torch_index: address of an index with other wheels of torch.
        source: where the kit came from, for a folder the file of pins in it.
        pins: text of the requirements file; read by default.
    """
    kind, against = _kind(site, hardware)
    if against:
        return Decision("impossible", kind, tuple(against), (), _ways_out(site, kind, source))
    file = requirements(kind, source)
    needed = _needed(kind, pins if pins is not None else file.read_text())
    wrong = _wrong(site, needed)
    extra = [f"{name}=={PINS[name]}" for name in ("torch", "torch_xla")] if kind == "rehearsal" else []
    if kind != "gpu":  # built for one torch: where an image brings another, importing transformers fails
        beside = {name: pin for name, pin in BESIDE.items() if (have := site.versions.get(name)) and bare(have) != pin}
        wrong += [f"{name} {site.versions[name]} is built for another torch: {pin}" for name, pin in beside.items()]
        extra += [f"{name}=={pin}" for name, pin in beside.items()]
    remove: list[str] = []
    if kind != "gpu" and (other := site.versions.get("torch-tpu")):
        wrong.append(f"torch_tpu {other} claims the TPU too, and needs another torch")
        remove = ["torch_tpu"]
    if not wrong:
        return Decision("nothing", kind, (f"all {len(needed)} packages of {file.name} are there and pair",))
    if not site.uv and not site.pip:
        why = "this Python has no pip, and there is no uv: run `python -m ensurepip`, or install uv, and look again"
        return Decision("impossible", kind, (why,), (), (why,))
    tool = [site.uv, "pip"] if site.uv else [sys.executable, "-m", "pip"]
    of_this = ["--python", sys.executable] if site.uv else []
    line = [*tool, "install", *of_this, "--quiet", "-r", str(file), *extra]
    if torch_index:
        line += ["--extra-index-url", torch_index, *(["--index-strategy", "unsafe-best-match"] if site.uv else [])]
    elif "torch" not in site.versions and site.free_gib < _GIB_NEEDED[True]:
        wrong.append(
            f"warning: {site.free_gib:.0f} GiB are free, and torch's default wheels bring CUDA: up to "
            f"{_GIB_NEEDED[True]} GiB while they are unpacked. Without a GPU set torch_index to an index without CUDA"
        )
    quiet = [] if site.uv else ["--yes"]
    first = [(*tool, "uninstall", *of_this, *quiet, *remove)] if remove else []
    return Decision("install", kind, tuple(wrong), (*first, tuple(line)))


def _kind(site: Site, hardware: str) -> tuple[Kind, list[str]]:
    """What is to be installed, and what stands against it."""
    version = "Python " + ".".join(map(str, site.python))
    on_linux, supported = site.system == _LINUX, (3, 11) <= site.python <= _NEWEST
    kind: Kind
    if hardware != "auto":
        kind = hardware  # type: ignore[assignment]
    elif "GPU" in site.accelerator or not on_linux:
        kind = "gpu"
    else:
        kind = "tpu" if site.has_tpu or site.python in TPU_PYTHONS else "rehearsal"
    against = []
    if not supported:
        against.append(f"{version}: the kit needs 3.11 to 3.13" + (", a TPU 3.11 or 3.12" if kind == "tpu" else ""))
    elif kind == "tpu" and site.python not in TPU_PYTHONS:
        against.append(f"{version}: libtpu {PINS['libtpu']} has no wheel for it; a TPU needs 3.11 or 3.12")
    if kind != "gpu" and not on_linux:
        against.append(f"{site.system}: torch_xla has wheels for {_LINUX} alone; hardware='gpu' installs torch alone")
    return kind, against


def _needed(kind: Kind, text: str) -> dict[str, str]:
    """Package to specifier; for a TPU also of the packages that the extras of torch_xla bring."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    found = {}
    for line in filter(None, lines):
        name, specifier = re.fullmatch(r"([\w.-]+)(?:\[[^\]]*\])?\s*(.*)", line).groups()  # type: ignore[union-attr]
        found[name] = specifier
    if kind == "tpu":
        found |= {name: f"=={pin}" for name, pin in PINS.items()}
    elif kind == "rehearsal":
        found |= {name: f"=={PINS[name]}" for name in ("torch", "torch_xla")}
    return found


def _wrong(site: Site, needed: Mapping[str, str]) -> list[str]:
    absent = [name for name in needed if normal(name) not in site.versions]
    wrong = [f"not installed: {', '.join(absent)}"] if absent else []
    for name, specifier in needed.items():
        have = site.versions.get(normal(name))
        if have is not None and not all(_meets(have, part) for part in specifier.split(",") if part):
            wrong.append(f"{name} is {have}, and must be {specifier.removeprefix('==')}")
    return wrong


def bare(version: str) -> str:
    """The version without a build's label such as +cpu."""
    return version.split("+")[0]


def _meets(version: str, specifier: str) -> bool:
    sign, wanted = re.fullmatch(r"\s*(==|>=|<=|<|>)\s*([\w.]+)\s*", specifier).groups()  # type: ignore[union-attr]
    if sign == "==":
        return bare(version) == wanted
    have, want = ([int(number) for number in re.findall(r"\d+", text)] for text in (bare(version), wanted))
    return {">=": have >= want, "<=": have <= want, "<": have < want, ">": have > want}[sign]


def _ways_out(site: Site, kind: Kind, source: str) -> tuple[str, ...]:
    ways = []
    if site.place == "Colab":
        ways.append("Runtime > Change runtime type > Runtime version: one with Python 3.11 or 3.12; then run all again")
    if site.place == "Kaggle":
        ways.append("Settings > Environment: one with Python 3.11 or 3.12; then run all again")
    if site.system == _LINUX:
        local = Path(source).expanduser()
        kit = str(local) if source and local.exists() else "tpu_kit" if source == "index" else _GIT
        file = requirements("gpu" if kind == "gpu" else "tpu", source)  # for the Python there
        given = shlex.join(["-r", str(file), kit])
        ways.append(
            "an environment with a Python that fits, which uv fetches: pip install uv && uv venv --python 3.12 "
            f"~/tpu_kit-env && uv pip install --python ~/tpu_kit-env {given} && "
            "~/tpu_kit-env/bin/python -m ipykernel install --user --name tpu_kit"
        )
        one_kernel = site.place in ("Colab", "Kaggle")
        ways.append(
            "in it, as this service has one kernel only: !~/tpu_kit-env/bin/python -m tpu_kit train embedded-cot"
            if one_kernel
            else "then choose the kernel tpu_kit for the notebooks (Kernel > Change Kernel)"
        )
    else:
        ways.append("hardware='gpu' here, for torch alone; or a Linux machine, Colab or Kaggle for TPU")
    return tuple(ways)
