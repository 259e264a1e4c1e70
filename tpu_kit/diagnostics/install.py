"""Installs the kit's packages with one command of pip or uv, and checks that their versions match.

Every notebook calls `ensure`; notebook 1 shows its parts: `look`, `decide`, `carry_out`, `check`. This module needs
nothing but Python.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions, requires
from pathlib import Path
from typing import Any, Literal

from tpu_kit.config.fields import ConfigError
from tpu_kit.distributed.child_process import run_child
from tpu_kit.hardware.compatibility import (
    PACKAGES,
    PAIRINGS,
    PYTHONS,
    bare,
    beside_torch_tpu,
    environment_line,
    find_pairing,
    mismatches,
)
from tpu_kit.hardware.compatibility import REPOSITORY as REPOSITORY
from tpu_kit.hardware.machine import Check, Machine
from tpu_kit.notebook.kernel import check_names, explain_missing_names, parameters
from tpu_kit.notebook.kernel import show_checks as show_checks
from tpu_kit.notebook.kernel import show_table as show_table

Kind = Literal["tpu", "gpu"]
"""The packages to install: torch with torch_xla, libtpu and jax, for a TPU or its simulation; or torch alone."""

_LINUX = "Linux x86_64"
_OPTIONS = ("kit_source", "hardware", "extras", "torch_index", "restart")
# A kernel that loaded one of these before the installation keeps the old version.
_LOADED = ("torch", "torch_xla", "jax", "jaxlib", "numpy", "transformers", "peft", "datasets", "tpu_kit")
_LINE = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*?)\s*(?:;\s*(.*))?")

explain_missing_names()


# -------------------------------------------------------------------------------------------------------- what is there


@dataclass(frozen=True)
class Site:
    """The machine and its installed packages.

    Attributes:
        place: "Colab", "Kaggle", "TPU VM", "GPU machine" or "computer without an accelerator".
        accelerator: such as "4 x v5e"; empty if there is none.
        system: operating system and processor, such as "Linux x86_64".
        python: major and minor version.
        versions: of all installed packages, by normalised name.
        uv: path of uv; empty if there is none.
        pip: whether this Python has pip.
    """

    place: str
    accelerator: str
    system: str
    python: tuple[int, int]
    versions: Mapping[str, str]
    uv: str = ""
    pip: bool = True

    @property
    def has_tpu(self) -> bool:
        """Whether TPU chips are attached."""
        return self.accelerator != "" and "GPU" not in self.accelerator

    def version(self, package: str) -> str | None:
        """The installed version of a package."""
        return self.versions.get(normal(package))

    def rows(self) -> list[dict[str, str]]:
        """The rows of a table."""
        have = {name: self.version(name) for name in (*PACKAGES, "transformers", "peft")}
        return [
            {"what": "runs on", "found": self.place},
            {"what": "accelerator", "found": self.accelerator or "none: the CPU rehearses the TPU's path"},
            {"what": "system", "found": self.system},
            {"what": "Python", "found": ".".join(map(str, self.python))},
            *({"what": name, "found": version or "not installed"} for name, version in have.items()),
            {"what": "tpu_kit", "found": str(Path(__file__).parents[1])},
        ]


def normal(name: str) -> str:
    """The normalised name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Versions of all installed packages, by normalised name; of two copies, the one that Python imports."""
    return {normal(one.name): one.version for one in reversed(list(distributions())) if one.name}


def look(at: Machine | None = None) -> Site:
    """Finds the machine and its packages, without importing them and without touching a device."""
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
        shutil.which("uv") or "", importlib.util.find_spec("pip") is not None,
    )  # fmt: skip


def pairings() -> list[dict[str, str]]:
    """Returns the versions that pair, as rows of a table; the first row is installed where nothing is there."""
    pythons = f"{_dotted(PYTHONS[0])} to {_dotted(PYTHONS[-1])}"
    return [
        {
            "torch and torch_xla": pairing.torch, "libtpu": " or ".join(pairing.libtpu),
            "jax and jaxlib": " or ".join(pairing.jax), "Python": pythons, "system": _LINUX,
        }
        for pairing in PAIRINGS
    ]  # fmt: skip


def _dotted(python: tuple[int, int]) -> str:
    return ".".join(map(str, python))


# ------------------------------------------------------------------------------------------------------ what is missing


@dataclass(frozen=True)
class Decision:
    """The decision about an installation.

    Attributes:
        action: "nothing", "install", or "impossible" with this Python on this machine.
        kind: the packages to install.
        why: one line for each problem.
        add: the requirements to install.
        keep: "name==version" of packages that must not be replaced; empty if one must be.
        command: of pip or uv; empty unless the action is "install".
        ways_out: what the user can do if it is impossible.
    """

    action: Literal["nothing", "install", "impossible"]
    kind: Kind
    why: tuple[str, ...]
    add: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    ways_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.action == "nothing":
            return "Nothing to do: " + "; ".join(self.why)
        why = [f"  - {line}" for line in self.why]
        if self.action == "install":
            kept = [f"Left as they are: {len(self.keep)} packages"] if self.keep else []
            return "\n".join(["To install, because:", *why, *kept, shlex.join(self.command)])
        ways = [f"  - {line}" for line in self.ways_out]
        return "\n".join(["It cannot be installed here:", *why, "Ways out:", *ways])


def decide(
    site: Site,
    hardware: str = "auto",
    torch_index: str = "",
    source: str = "",
    extras: Sequence[str] = (),
    pins: str | None = None,
) -> Decision:
    """Decides what to install. Packages that fit stay as they are.

    Args:
        site: the machine and its packages.
        hardware: "tpu", "gpu", or "auto": the TPU's packages wherever their wheels fit, because a CPU rehearses with
            them, except on a machine with a GPU or with torch but not torch_xla.
        torch_index: address of an index with other wheels of torch.
        source: where the kit came from; a folder of wheels replaces the package index.
        extras: extras of the kit to install too, such as "trackers".
        pins: text of the requirements file with the tested versions; read by default.
    """
    kind, against = _kind(site, hardware)
    if against:
        return Decision("impossible", kind, tuple(against), ways_out=_ways_out(site, kind, source))
    tested = _pins(pins if pins is not None else requirements(kind, source).read_text())
    add, wrong, names = {}, [], list(PACKAGES) if kind == "tpu" else []
    if kind == "tpu":
        add = mismatches(site.version, site.python, with_tpu=True)
        pairing = find_pairing(site.version) or PAIRINGS[0]
        wrong = [
            f"{name} is {site.version(name)}, and must be {' or '.join(pairing.allowed(name))}"
            for name in add
            if site.version(name)
        ]
        # Built for one torch: with another one, importing transformers fails.
        beside = {name: pin for name, pin in pairing.beside.items() if bare(site.version(name) or pin) != pin}
        wrong += [f"{name} {site.version(name)} is built for another torch: {pin}" for name, pin in beside.items()]
        add |= beside
    add = {name: f"=={pin}" for name, pin in add.items()}
    for name, bounds in _needed(extras).items():
        if name in names:
            continue
        names.append(name)
        have = site.version(name)
        if have is not None and not _within(have, bounds):
            wrong.append(f"{name} is {have}, and must be {bounds}")
        if have is None or not _within(have, bounds):
            add[name] = tested.get(normal(name), bounds)
    absent = [name for name in add if site.version(name) is None]
    wrong = [f"not installed: {', '.join(absent)}"] * bool(absent) + wrong
    if not wrong:
        pair = ", ".join(f"{name} {site.version(name)}" for name in (PACKAGES if kind == "tpu" else ("torch",)))
        return Decision("nothing", kind, (f"all {len(names)} packages are there, and {pair} pair",))
    if not site.uv and not site.pip:
        why = "this Python has no pip, and there is no uv: run `python -m ensurepip`, or install uv, and look again"
        return Decision("impossible", kind, (why,), ways_out=(why,))
    tool = [site.uv, "pip"] if site.uv else [sys.executable, "-m", "pip"]
    line = [*tool, "install", *(["--python", sys.executable] if site.uv else []), "--quiet"]
    if wheels := wheel_folder(source):
        line += ["--no-index", "--find-links", wheels]
    if torch_index and "torch" in add:
        line += ["--extra-index-url", torch_index, *(["--index-strategy", "unsafe-best-match"] if site.uv else [])]
    wanted = tuple(f"{name}{bounds}" for name, bounds in add.items())
    keep: tuple[str, ...] = ()
    if len(absent) == len(add):  # without versions that pip cannot read
        readable = [(name, one) for name, one in sorted(site.versions.items()) if re.fullmatch(r"\d[\w.+!-]*", one)]
        keep = tuple(f"{name}=={one}" for name, one in readable)
    return Decision("install", kind, tuple(wrong), wanted, keep, (*line, *wanted))


def _kind(site: Site, hardware: str) -> tuple[Kind, list[str]]:
    """Which packages to install, and the reasons why that is impossible."""
    on_linux = site.system == _LINUX
    kind: Kind
    if hardware != "auto":
        kind = hardware  # type: ignore[assignment]  # `options` has checked the text
    else:
        # torch without torch_xla stays as it is if no TPU is attached.
        alone = site.version("torch") is not None and site.version("torch_xla") is None and not site.has_tpu
        kind = "gpu" if "GPU" in site.accelerator or not on_linux or alone else "tpu"
    against = []
    if site.python not in PYTHONS:
        against.append(f"Python {_dotted(site.python)}: the kit needs 3.11 to 3.13")
    if kind != "gpu" and not on_linux:
        against.append(f"{site.system}: torch_xla has wheels for {_LINUX} alone; hardware='gpu' installs torch alone")
    if kind == "tpu" and (other := site.version("torch_tpu")):
        against.append(beside_torch_tpu(other))
    return kind, against


def requirements(kind: Kind, source: str = "") -> Path:
    """Returns the file with the tested versions, from the folder that the kit is installed from, or from the kit."""
    name = f"requirements-{kind}.txt"
    beside = Path(source).expanduser() / name
    return beside if source and beside.is_file() else Path(__file__).parents[1] / name


def wheel_folder(source: str) -> str:
    """The folder, if `source` is one with wheels, such as a Kaggle dataset; else empty."""
    folder = Path(source).expanduser()
    return str(folder) if source and folder.is_dir() and any(folder.glob("*.whl")) else ""


def _needed(extras: Sequence[str]) -> dict[str, str]:
    """The requirements of the kit with these extras: package to bounds such as ">=5.15"."""
    project_file = Path(__file__).parents[2] / "pyproject.toml"
    if project_file.is_file():  # a clone: newer than the metadata of an editable installation
        import tomllib

        project = tomllib.loads(project_file.read_text())["project"]
        lines = list(project["dependencies"])
        for extra, needs in project["optional-dependencies"].items():
            lines += [f'{line}; extra == "{extra}"' for line in needs]
    else:
        lines = requires("tpu_kit") or []
    found = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        assert match is not None, line
        name, bounds, marker = match.groups()
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker or "")
        if extra is None or extra[1] in extras:
            found[name] = bounds.replace(" ", "")
    return found


def _pins(text: str) -> dict[str, str]:
    """The tested versions of a requirements file: normalised name to bounds."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    matches = [_LINE.fullmatch(line) for line in lines if line]
    return {normal(match[1]): match[2].replace(" ", "") for match in matches if match}


def _within(version: str, bounds: str) -> bool:
    have = _numbers(bare(version))
    tests: dict[str, Callable[[list[int]], bool]] = {
        "==": have.__eq__, "!=": have.__ne__, ">=": have.__ge__, "<=": have.__le__, "<": have.__lt__, ">": have.__gt__,
    }  # fmt: skip
    return all(tests[sign](_numbers(bound)) for sign, bound in re.findall(r"([=<>!]+)([^,]+)", bounds))


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _ways_out(site: Site, kind: Kind, source: str) -> tuple[str, ...]:
    if site.system != _LINUX:
        return ("hardware='gpu' here, for torch alone; or a Linux machine, Colab or Kaggle for TPU",)
    service = {
        "Colab": ("Runtime > Change runtime type > Runtime version: one with Python 3.11 to 3.13; then run all again",),
        "Kaggle": ("Settings > Environment: one with Python 3.11 to 3.13; then run all again",),
    }.get(site.place, ())
    local = Path(source).expanduser()
    kit = str(local) if source and local.exists() else "tpu_kit" if source == "index" else f"git+{REPOSITORY}"
    own = environment_line(str(requirements(kind, source)), kit)
    python = "~/tpu_kit-env/bin/python"
    return (
        *service,
        f"an environment of its own: {own} && {python} -m ipykernel install --user --name tpu_kit",
        f"then choose the kernel tpu_kit, or run there: {python} -m tpu_kit train embedded-cot",
    )


# -------------------------------------------------------------------------------------------------------- installing it


def options(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the notebook's parameters, checked.

    Raises:
        ConfigError: an unknown name, with the nearest one, or an invalid value.
    """
    given = parameters(namespace)
    check_names(given, _OPTIONS)
    if given.get("hardware", "auto") not in ("auto", "tpu", "gpu"):
        raise ConfigError([f"hardware={given['hardware']!r}: there are auto, tpu and gpu"])
    return given


def ensure(kit_source: str = "git") -> None:
    """Installs the packages that the kit needs and this environment lacks, and prints what was kept and added.

    Args:
        kit_source: where the kit came from, as in the parameters of the notebooks.

    Raises:
        ValueError: it is impossible here, the command failed, or a loaded package was replaced, so that the kernel must
            be restarted.
    """
    decision = decide(look(), source=kit_source)
    if decision.action == "nothing":
        print(f"tpu_kit is ready: {decision.why[0]}")
        return
    carry_out(decision)
    if stale():
        raise ValueError("Restart the kernel, then run all cells again: " + "; ".join(stale()))


def carry_out(decision: Decision) -> None:
    """Runs the command; prints its output, and which packages were kept, replaced and added.

    Raises:
        ValueError: it is impossible, or the command failed, with the end of its output.
    """
    if decision.action == "impossible":
        raise ValueError(str(decision))
    if decision.action == "nothing":
        print("Nothing was to be done.")
        return
    before = installed()
    with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="tpu_kit-keep-") as keep:
        keep.write("\n".join(decision.keep))
        keep.flush()
        # As constraints: if a package conflicts with an installed one, pip fails and replaces nothing.
        kept = {"PIP_CONSTRAINT": keep.name, "UV_CONSTRAINT": keep.name} if decision.keep else {}
        _run(decision.command, {**os.environ, **kept})
    after = installed()
    added = [f"{name} {version}" for name, version in after.items() if name not in before]
    replaced = [f"{name} {before[name]} -> {now}" for name, now in after.items() if before.get(name, now) != now]
    print("Added:", ", ".join(added) or "nothing")
    print("Replaced:", ", ".join(replaced) or "nothing")
    print("Left as they were:", sum(after.get(name) == version for name, version in before.items()), "packages")


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    print("$", shlex.join(command), flush=True)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        print(line, end="", flush=True)
        said.append(line.rstrip())
    if process.wait():
        raise ValueError(f"{shlex.join(command)} failed{_advice(said)}:\n" + "\n".join(said[-10:]))


def _advice(said: Sequence[str]) -> str:
    text = "\n".join(said)
    if "No space left" in text:
        return " (the disk is full: without a GPU set torch_index to an index without CUDA, or free some room)"
    if "Temporary failure in name resolution" in text or "Failed to establish a new connection" in text:
        return " (no network: on Kaggle turn on Settings > Internet, or attach a dataset of wheels as kit_source)"
    if "ResolutionImpossible" in text or "conflict" in text:
        return " (what is missing conflicts with a package that is here; nothing was replaced: use a new environment)"
    return ""


_CHILD = """
import importlib, json, sys
found, error = {}, ""
try:
    for name in sys.argv[1].split():
        found[name] = getattr(importlib.import_module(name), "__version__", "")
    if "torch_xla" in found:
        import torch
        found["sum"] = (torch.ones(3, device=importlib.import_module("torch_xla").device()) + 1).sum().item()
except BaseException as problem:
    error = f"{type(problem).__name__}: {problem}"
print(json.dumps({"found": found, "error": error}))
"""


def check(decision: Decision) -> list[Check]:
    """Loads the packages in a new process, as a run does, and computes one sum with torch_xla on its CPU."""
    names = {"tpu": "torch torch_xla libtpu jax", "gpu": "torch"}[decision.kind]
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "TPU_SKIP_MDS_QUERY": "1", "USE_TORCH_XLA": "1"}
    done = run_child(["-c", _CHILD, f"{names} transformers peft datasets omegaconf tpu_kit"], environment)
    answer = json.loads((done.output.splitlines() or ['{"found": {}, "error": ""}'])[-1])
    error = answer["error"] or (f"the process ended with {done.how}" if done.status else "")
    found = answer["found"]
    pair = " ".join(f"{name} {found[name]}".strip() for name in names.split() if name in found) or "nothing"
    if error:
        cause = ": torch and torch_xla do not pair" if "undefined symbol" in error else ""
        text = f"{pair} loaded, then {error[:300]}{cause}"
        return [Check("They pair", "failure", text, "run this notebook again from the top")]
    rows = [Check("They pair", "ok", f"{pair} load together")]
    if "sum" in found:
        status: Literal["ok", "failure"] = "ok" if found["sum"] == 6 else "failure"
        rows.append(Check("They compute", status, f"(1 + 1) * 3 is {found['sum']:g} on torch_xla's CPU"))
    return rows


def stale() -> list[str]:
    """The packages that this process loaded before another version was installed."""
    versions, found = installed(), []
    for name in _LOADED:
        loaded, now = getattr(sys.modules.get(name), "__version__", None), versions.get(normal(name))
        if loaded and now and bare(loaded) != bare(now):
            found.append(f"{name} {loaded} is loaded, {now} is installed")
    return found


def restart(allowed: bool = False) -> None:
    """Prints whether the kernel must be restarted, and restarts it if allowed."""
    old = stale()
    if not old:
        print("The kernel can stay as it is.")
        return
    print("The kernel must be restarted: " + "; ".join(old))
    if not allowed:
        print("Kernel > Restart (Colab: Runtime > Restart session), then go on with the next notebook.")
        print("Or set restart = True above, run its cell and this one again, and it restarts by itself.")
        return
    from IPython import get_ipython

    get_ipython().kernel.do_shutdown(restart=True)
