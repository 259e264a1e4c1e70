"""Installs missing packages of the kit with one command of pip or uv, and checks that they work together.

All notebooks call `ensure`; notebook 1 shows its steps: `look`, `decide`, `carry_out`, `check`. Needs nothing but
Python.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path
from typing import Any, Literal, cast, get_args

from tpu_kit.config.fields import ConfigError
from tpu_kit.distributed.child_process import run_child
from tpu_kit.machine import torch_tpu
from tpu_kit.machine.checks import Check, Machine, replaced_modules
from tpu_kit.machine.compatibility import (
    PACKAGES,
    PAIRINGS,
    PYTHONS,
    REPOSITORY,
    environment_line,
    find_packaging,
    installed_version,
    mismatches,
    requirements,
    untested,
)
from tpu_kit.notebook.kernel import check_names, parameters, shorten_errors
from tpu_kit.notebook.kernel import show_checks as show_checks
from tpu_kit.notebook.kernel import show_table as show_table

Kind = Literal["tpu", "torch-tpu", "gpu"]
"""Packages to install. tpu: torch with torch_xla, libtpu and jax, for a TPU or its rehearsal. torch-tpu: torch_tpu in
place of torch_xla. gpu: torch without a backend for TPUs."""

_LINUX, _GPU = "Linux x86_64", "NVIDIA GPU"

shorten_errors()


@dataclass(frozen=True)
class Site:
    """The machine and its installed packages.

    Attributes:
        platform: "Colab", "Kaggle", "TPU VM", "GPU machine" or "computer without an accelerator".
        accelerator: chips such as "4 x v5e", or "NVIDIA GPU"; empty if there is none.
        system: operating system and processor, for example "Linux x86_64".
        python: major and minor version.
        versions: versions of all installed packages, by normalised name.
        uv: path of uv; empty if it is not installed.
        pip: whether this Python has pip.
        gpus: names of NVIDIA GPUs that the driver reports.
    """

    platform: str
    accelerator: str
    system: str
    python: tuple[int, int]
    versions: Mapping[str, str]
    uv: str = ""
    pip: bool = True
    gpus: tuple[str, ...] = ()

    def version(self, package: str) -> str | None:
        """Returns the installed version of a package, or None."""
        return self.versions.get(_normal(package))

    def rows(self) -> list[dict[str, str]]:
        """Returns rows of name and text for `show_table`: platform, accelerator, system, Python, backend, versions."""
        names = (*PACKAGES[:2], "torch_tpu", *PACKAGES[2:], "transformers", "peft")
        versions = {name: self.version(name) or "not installed" for name in names}
        found = {
            "runs on": self.platform,
            "accelerator": ", ".join(self.gpus) or self.accelerator or "none: the CPU rehearses the TPU's path",
            "system": self.system,
            "Python": _dotted(self.python),
            "backend for TPUs": torch_tpu.describe_backends(self.version),
            **versions,
            "tpu_kit": str(Path(__file__).parents[1]),
        }
        return [{"what": name, "found": text} for name, text in found.items()]


def look(at: Machine | None = None) -> Site:
    """Describes `at` (default: this machine) and this Python's packages, without importing them or opening a device."""
    at = at or Machine()
    tpus, gpu = at.tpus(), (at.root / "proc/driver/nvidia/version").exists()
    services = {"COLAB_RELEASE_TAG": "Colab", "KAGGLE_KERNEL_RUN_TYPE": "Kaggle"}
    machine = "TPU VM" if tpus else "GPU machine" if gpu else "computer without an accelerator"
    return Site(
        next((name for variable, name in services.items() if variable in at.environ), machine),
        f"{len(tpus)} x {tpus[0]}" if tpus else _GPU if gpu else "",
        f"{platform.system()} {platform.machine()}", at.python, _installed(), shutil.which("uv") or "",
        importlib.util.find_spec("pip") is not None, () if tpus else tuple(at.gpus()),
    )  # fmt: skip


def _installed() -> dict[str, str]:
    """Returns installed versions by normalised package name; for two copies, the version that Python imports."""
    return {_normal(one.name): one.version for one in reversed(list(distributions())) if one.name}


def _normal(name: str) -> str:
    """Returns a package's normalised name: lower case, and - for runs of - _ and dots."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _dotted(python: tuple[int, int]) -> str:
    return ".".join(map(str, python))


def pairings() -> list[dict[str, str]]:
    """Returns rows for `show_table` of versions that work together: the default first, torch_tpu's last."""
    found = [(one.torch, f"torch_xla {one.torch}", " or ".join(one.libtpu), " or ".join(one.jax)) for one in PAIRINGS]
    tested = torch_tpu.TESTED
    found.append((tested["torch"], f"torch_tpu {tested['torch_tpu']}", tested["libtpu"], tested["jax"]))
    return [
        {
            "torch": torch, "backend for TPUs": backend, "libtpu": libtpu, "jax and jaxlib": jax, "system": _LINUX,
            "Python": f"{_dotted(PYTHONS[0])} to {_dotted(PYTHONS[-1])}",
        }
        for torch, backend, libtpu, jax in found
    ]  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """The result of `decide`.

    Attributes:
        kind: the packages to install.
        why: a line per problem, or a line that says that all is well.
        add: requirements to install.
        keep: "name==version" of packages that must not be replaced; empty if any package must be replaced.
        command: command of pip or uv; empty if there is nothing to install.
        notes: installed packages of untested versions, which are kept.
    """

    kind: Kind
    why: tuple[str, ...]
    add: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.command:
            return "Nothing to do: " + "; ".join((*self.why, *self.notes))
        kept = [f"Unchanged: {len(self.keep)} packages"] if self.keep else []
        kept += [f"Unchanged: {note}" for note in self.notes]
        return "\n".join(["To install, because:", *_listed(self.why), *kept, shlex.join(self.command)])


def _listed(lines: Sequence[str]) -> list[str]:
    return [f"  - {line}" for line in lines]


def decide(
    site: Site, hardware: str = "auto", torch_index: str = "", source: str = "", extras: Sequence[str] = ()
) -> Decision:
    """Chooses the packages to install; installs nothing. Installed packages of allowed versions are kept.

    Args:
        site: the machine and its packages.
        hardware: "tpu", "torch-tpu", "gpu" or "auto". auto means torch-tpu if the tested torch_tpu is installed without
            torch_xla. It means gpu on a machine with a GPU, on a system without wheels of torch_xla, or with torch but
            neither torch_xla nor a TPU. Otherwise it means tpu, because a CPU rehearses with it.
        torch_index: URL of an index with other wheels of torch.
        source: where the kit came from: "git" (also ""), "index", "tpu_kit==VERSION" or a path; errors name it in
            alternatives. A folder of wheels replaces the package index.
        extras: extras of the kit to install too, such as "trackers".

    Raises:
        ValueError: Python is not 3.11 to 3.13; or the choice is not gpu, and the system is not Linux x86_64 or has the
            other backend (torch_xla, torch_tpu). Or packages are missing without pip and uv, or tpu_kit is not
            installed.
    """
    kind = _kind(site, hardware, source)
    wrong: dict[str, tuple[str, str]] = {}  # package -> the required version in words, and the bounds to install
    if kind == "tpu":
        pairs = mismatches(site.version, site.python, with_tpu=True)
        wrong |= {name: (" or ".join(versions), f"=={versions[0]}") for name, versions in pairs.items()}
    elif kind == "torch-tpu":
        wrong |= {name: (pin, f"=={pin}") for name, pin in torch_tpu.mismatches(site.version).items()}
    tested = _read_requirements(requirements(kind).read_text().splitlines())
    for name, bounds in _read_requirements(_required(), extras).items():
        if kind != "gpu" and name in PACKAGES:
            continue
        have = site.version(name)
        if have is None or not _within(have, bounds):
            wrong[name] = bounds, tested.get(name, bounds)
    notes = tuple(text for name, text in untested(site.version).items() if name not in wrong)
    if not wrong:
        pair = ", ".join(f"{name} {site.version(name)}" for name in _pair(kind))
        text = f"with {pair}" if kind == "gpu" else f"and {pair} pair"
        return Decision(kind, (f"all packages are installed, {text}",), notes=notes)
    absent = [name for name in wrong if site.version(name) is None]
    why = [f"not installed: {', '.join(absent)}"] * bool(absent)
    why += [f"{name} is {now}, and must be {must}" for name, (must, _) in wrong.items() if (now := site.version(name))]
    if not site.uv and not site.pip:
        advice = "run `python -m ensurepip`, or install uv, and look again"
        raise _impossible(["this Python has no pip, and there is no uv"], [advice])
    uv, pip = [site.uv, "pip", "install", "--python", sys.executable], [sys.executable, "-m", "pip", "install"]
    line = [*(uv if site.uv else pip), "--quiet"]
    folder = Path(source).expanduser()
    if source and folder.is_dir() and any(folder.glob("*.whl")):  # for example a Kaggle dataset
        line += ["--no-index", "--find-links", str(folder)]
    if torch_index and "torch" in wrong:
        line += ["--extra-index-url", torch_index, *(["--index-strategy", "unsafe-best-match"] if site.uv else [])]
    add = tuple(f"{name}{bounds}" for name, (_, bounds) in wrong.items())
    keep = _constraints(site.versions) if len(absent) == len(wrong) else ()
    return Decision(kind, tuple(why), add, keep, (*line, *add), notes)


def _pair(kind: Kind) -> tuple[str, ...]:
    """Returns the names of the packages whose versions depend on each other; for gpu only torch."""
    return {"tpu": PACKAGES, "torch-tpu": tuple(torch_tpu.TESTED), "gpu": ("torch",)}[kind]


def _required() -> list[str]:
    """Returns tpu_kit's requirements from its metadata; raises ValueError if it is not installed."""
    try:
        return requires("tpu_kit") or []
    except PackageNotFoundError:
        folder = shlex.quote(str(Path(__file__).parents[2]))
        advice = f"run `pip install --no-deps -e {folder}`, then this cell again, which adds its requirements"
        raise ValueError(
            f"tpu_kit is in {folder}, but not installed, so its requirements are unknown: {advice}"
        ) from None


def _kind(site: Site, hardware: str, source: str) -> Kind:
    """Chooses the kind of packages; arguments as in `decide`; raises ValueError if they cannot be installed."""
    # torch without torch_xla is kept if no TPU is attached.
    has_tpu = site.accelerator not in ("", _GPU)
    alone = site.version("torch") is not None and site.version("torch_xla") is None and not has_tpu
    if hardware == "auto" and not torch_tpu.mismatches(site.version) and not site.version("torch_xla"):
        kind: Kind = "torch-tpu"  # an environment made for torch_tpu
    elif hardware == "auto":
        kind = "gpu" if site.accelerator == _GPU or site.system != _LINUX or alone else "tpu"
    else:
        kind = cast(Kind, hardware)
    against = []
    if site.python not in PYTHONS:
        against.append(f"Python {_dotted(site.python)}: the kit needs 3.11 to 3.13")
    if kind != "gpu" and site.system != _LINUX:
        backend = "torch_tpu" if kind == "torch-tpu" else "torch_xla"
        against.append(f"{site.system}: {backend} has wheels only for {_LINUX}; hardware='gpu' installs only torch")
    if (kind == "tpu" and site.version("torch_tpu")) or (kind == "torch-tpu" and site.version("torch_xla")):
        against.append(f"hardware={kind}, and here is {torch_tpu.describe_backends(site.version)}")
    if against:
        raise _impossible(against, _ways_out(site, kind, source))
    return kind


def _impossible(against: Sequence[str], ways_out: Sequence[str]) -> ValueError:
    """Returns an error, to raise, that lists the reasons and the alternatives."""
    return ValueError("\n".join(["It cannot be installed here:", *_listed(against), "Instead:", *_listed(ways_out)]))


def _read_requirements(lines: Sequence[str], extras: Sequence[str] = ()) -> dict[str, str]:
    """Returns package -> bounds, such as ">=5.15" or "", of requirements; omits lines for extras not in `extras`."""
    bounds = {}
    for line in lines:
        match = re.fullmatch(r"([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*?)\s*(?:;\s*(.*))?", line.split("#")[0].strip())
        if match is not None:
            extra = re.search(r"extra == ['\"]([\w-]+)['\"]", match[3] or "")
            if extra is None or extra[1] in extras:
                bounds[match[1]] = match[2].replace(" ", "")
    return bounds


def _within(version: str, bounds: str) -> bool:
    """Returns whether a version is within bounds such as ">=5.15,<6", or "" for any; False if the version is invalid.

    True if neither `packaging` nor pip is installed: then hardly any package is, and missing packages are installed
    anyway, with packaging among them.
    """
    specifiers = find_packaging("specifiers")
    if specifiers is None:
        return True
    try:
        return specifiers.SpecifierSet(bounds).contains(version, prereleases=True)
    except ValueError:  # before packaging 26
        return False


def _constraints(versions: Mapping[str, str]) -> tuple[str, ...]:
    """Returns "name==version" of packages, as constraints for pip; omits invalid lines, or all without `packaging`."""
    requirements, lines = find_packaging("requirements"), []
    for name, version in sorted(versions.items()):
        with contextlib.suppress(ValueError):
            if requirements is not None and requirements.Requirement(line := f"{name}=={version}"):
                lines.append(line)
    return tuple(lines)


def _ways_out(site: Site, kind: Kind, source: str) -> tuple[str, ...]:
    """Returns the alternatives, as texts, if `kind` cannot be installed here; `source` as in `decide`."""
    if site.system != _LINUX:
        return ("hardware='gpu' here, for torch without TPU; or a Linux machine, Colab or Kaggle for TPU",)
    service = {
        "Colab": ("Runtime > Change runtime type > Runtime version: choose Python 3.11 to 3.13; then run all again",),
        "Kaggle": ("Settings > Environment: choose Python 3.11 to 3.13; then run all again",),
    }.get(site.platform, ())
    local = Path(source).expanduser()
    by_name = {"index": "tpu_kit"}.get(source, source if source.startswith("tpu_kit==") else f"git+{REPOSITORY}")
    kit = str(local) if source and local.exists() else by_name
    python = "~/tpu_kit-env/bin/python"
    if kind == "tpu" and site.version("torch_tpu") and not site.version("torch_xla"):
        service = (*service, "hardware='torch-tpu' here, and launch.device_type=torch-tpu, which is experimental")
    return (
        *service,
        f"a separate environment: {environment_line(kind, kit)} && {python} -m ipykernel install --user --name tpu_kit",
        f"then choose the kernel tpu_kit, or run there: {python} -m tpu_kit train embedded-cot",
    )


# -------------------------------------------------------------------------------------------------------- installing it


def options(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given parameters of the notebook that installs: kit_source, hardware, extras, torch_index, restart.

    Raises:
        ConfigError: another name is given (the text has the nearest name), `hardware` is unknown, or as `parameters`.
    """
    options = parameters(namespace)
    check_names(options, ("kit_source", "hardware", "extras", "torch_index", "restart"))
    if options.get("hardware", "auto") not in ("auto", *get_args(Kind)):
        raise ConfigError([f"hardware={options['hardware']!r}: choose auto, tpu, torch-tpu or gpu"])
    return options


def ensure(kit_source: str = "git") -> None:
    """Installs the packages that this environment lacks (`decide` with "auto"); prints which were kept and added.

    Args:
        kit_source: where the kit came from, as `source` in `decide`.

    Raises:
        ValueError: as `decide` and `carry_out`, or a loaded package was replaced, so that the kernel must be restarted.
    """
    decision = decide(look(), source=kit_source)
    if not decision.command:
        print("tpu_kit is ready:", "; ".join((*decision.why, *decision.notes)))
        return
    carry_out(decision)
    if replaced := "; ".join(replaced_modules(installed_version)):
        raise ValueError(f"Restart the kernel, then run all cells again: {replaced}")


def carry_out(decision: Decision) -> None:
    """Runs the command, if any, with `keep` as constraints; prints its output and the packages that changed.

    Raises:
        ValueError: the command failed; the text has the end of its output.
    """
    if not decision.command:
        print("There was nothing to install.")
        return
    before, command = _installed(), shlex.join(decision.command)
    print("$", command, flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="tpu_kit-keep-") as keep:
        keep.write("\n".join(decision.keep))
        keep.flush()
        # If a package conflicts with an installed one, pip fails and replaces nothing.
        line = [*decision.command, *(["--constraint", keep.name] if decision.keep else [])]
        output = []
        with subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as running:
            for text in running.stdout or ():
                print(text, end="", flush=True)
                output.append(text.rstrip())
    if running.returncode:
        raise ValueError(f"{command} failed:\n" + "\n".join(output[-10:]))
    after = _installed()
    added = [f"{name} {version}" for name, version in after.items() if name not in before]
    replaced = [f"{name} {before[name]} -> {now}" for name, now in after.items() if before.get(name, now) != now]
    print("Added:", ", ".join(added) or "nothing")
    print("Replaced:", ", ".join(replaced) or "nothing")
    print("Unchanged:", sum(after.get(name) == version for name, version in before.items()), "packages")


_CHILD = """
import importlib, json, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    print(name, getattr(module, "__version__", ""))
import torch
device, where = "cuda" if torch.cuda.is_available() else "cpu", "the CPU"
if "torch_xla" in sys.argv:
    import torch_xla
    device, where = torch_xla.device(), "torch_xla's CPU"
elif device == "cuda":
    where = torch.cuda.get_device_name()
assert (torch.ones(3, device=device) + 1).sum().item() == 6, f"(1 + 1) * 3 is not 6 on {where}"
print("computed on", where)
"""


def check(decision: Decision) -> list[Check]:
    """Loads the packages of a kind in a new process, and computes a sum there; opens no TPU.

    It computes on torch_xla's CPU if kind is "tpu", otherwise on a GPU or, if torch sees none, on the CPU. Returns a
    list of one result. It is a failure if the process fails, or if kind is "gpu" and a machine with a GPU computes on
    the CPU.
    """
    pair = [name for name in _pair(decision.kind) if name != "jaxlib"]
    # The process must not open a TPU: PJRT_DEVICE is for torch_xla, TORCH_DEVICE_BACKEND_AUTOLOAD for torch_tpu.
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "TPU_SKIP_MDS_QUERY": "1", "USE_TORCH_XLA": "1",
                   "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # fmt: skip
    names = [*pair, "transformers", "peft", "datasets", "yaml", "tpu_kit"]
    done = run_child(["-c", _CHILD, *names], environment)
    lines = [line.strip() for line in done.output.splitlines() if line.split()[:1] and line.split()[0] in pair]
    loaded = " ".join(lines) or "nothing"
    if done.status:
        text = f"{loaded} loaded, then {done.last_lines(1)[:300]} ({done.how})"
        return [Check("They work", "failure", text, "run this notebook again from the top")]
    where = done.output.rpartition("computed on ")[2].splitlines()[0]
    text, gpus = f"all packages load together ({loaded}), and compute on {where}", Machine().gpus()
    if decision.kind == "gpu" and gpus and where == "the CPU":
        lost = f"{text}, not on the {gpus[0]}: torch is built without CUDA, or for a newer driver"
        return [Check("They work", "failure", lost, "pip uninstall -y torch, then run this notebook again")]
    return [Check("They work", "ok", text)]


def restart(allowed: bool = False) -> None:
    """Prints whether the kernel must be restarted, because a loaded package was replaced; restarts it if `allowed`."""
    replaced = "; ".join(replaced_modules(installed_version))
    if not replaced:
        print("The kernel need not be restarted.")
        return
    print(f"The kernel must be restarted: {replaced}")
    if not allowed:
        print("Kernel > Restart (Colab: Runtime > Restart session), then go on with the next notebook.")
        print("Or set restart = True above and run that cell and this cell again: the kernel then restarts by itself.")
        return
    from IPython import get_ipython

    get_ipython().kernel.do_shutdown(restart=True)
