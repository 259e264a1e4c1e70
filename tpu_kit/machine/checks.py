"""Checks this machine without opening a device: each `Check` has a result and the command that fixes a problem.

Versions come from package metadata, chips from /sys, the processes that hold them from /proc, the rest from the
environment: quick, and safe in a notebook's kernel. Needs only Python, because `install` calls it before it installs
any package.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tpu_kit.config.fields import hide_secrets
from tpu_kit.machine import chips, torch_tpu
from tpu_kit.machine.compatibility import (
    PACKAGES,
    PYTHONS,
    TESTED,
    Version,
    bare,
    environment_line,
    install_line,
    installed_version,
    mismatches,
    untested,
)

Status = Literal["ok", "warning", "failure", "skipped"]
MARKS: Mapping[Status, str] = {"ok": "✓", "warning": "!", "failure": "✗", "skipped": "–"}  # noqa: RUF001  the dash is intended

_GOOGLE = "0x1ae0"  # vendor id on the PCI bus

# Variables with another value in each process of a launch; see `preset_per_process`.
PER_PROCESS = (
    "CLOUD_TPU_TASK_ID", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_BOUNDS",
    "TPU_PROCESS_PORT", "TPU_VISIBLE_CHIPS",
)  # fmt: skip


TPU_NAMES = ("TPU_ACCELERATOR_TYPE", "TPU_NAME")
"""Environment variables that name a TPU."""


@dataclass(frozen=True)
class Check:
    """Result of a check; `fix` is a command or a setting, empty if none is needed."""

    name: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        for name in ("found", "fix"):  # both may quote another library or the environment
            object.__setattr__(self, name, hide_secrets(getattr(self, name)))

    def __str__(self) -> str:
        fix = f"\n{'':>21}-> {self.fix}" if self.fix else ""
        return f"{MARKS[self.status]} {self.name:<18} {self.found}{fix}"


@dataclass(frozen=True)
class Machine:
    """The machine to check; tests pass another folder tree, environment or set of versions.

    Attributes:
        root: folder that contains sys, proc, dev and tmp.
        environ: environment variables.
        version: returns the version of an installed package, or None.
        python: major and minor version of the interpreter.
        metadata_server: host and port of Google Cloud's metadata server; GCE_METADATA_HOST overrides it, as in Google's
            libraries. The default is an address, because looking up a name can take long outside the cloud.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    version: Version = installed_version
    python: tuple[int, int] = (sys.version_info[0], sys.version_info[1])
    metadata_server: str = field(default_factory=lambda: os.environ.get("GCE_METADATA_HOST") or "169.254.169.254")

    def read(self, path: str) -> str:
        """Returns the text of a file below `root`, stripped; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def metadata(self, key: str, timeout: float = 2.0) -> str | None:
        """Asks the metadata server for a key below computeMetadata/v1/instance/; None if the key has no value.

        Raises:
            OSError, http.client.HTTPException: no server of Google Cloud answers within `timeout` seconds.
        """
        with contextlib.closing(http.client.HTTPConnection(self.metadata_server, timeout=timeout)) as connection:
            connection.request("GET", f"/computeMetadata/v1/instance/{key}", headers={"Metadata-Flavor": "Google"})
            answer = connection.getresponse()
            if answer.getheader("Metadata-Flavor") != "Google":
                raise http.client.HTTPException(f"{self.metadata_server} is not Google Cloud's")
            return answer.read(65536).decode(errors="replace") if answer.status == http.client.OK else None

    def tpus(self) -> list[str]:
        """Lists the known TPU chips on the PCI bus, such as ["v5e", "v5e"], without opening them."""
        devices = sorted((self.root / "sys/bus/pci/devices").glob("*"))
        names = [str(device.relative_to(self.root)) for device in devices]
        ids = [self.read(f"{name}/device") for name in names if self.read(f"{name}/vendor") == _GOOGLE]
        return [chip.name for each in ids for chip in chips.CHIPS.values() if chip.pci_device == each]

    def tpu_signs(self) -> str:
        """Returns the evidence of a TPU in this machine, such as "4 x v5e"; empty if there is none.

        The bus may show no chip: chips.toml may lack it, or a container may hide the bus. Then the result has the paths
        of the device files. Without such files, it has "NAME=VALUE" for every variable in `TPU_NAMES` that is set.
        Commas separate several paths or variables. Other devices have vfio files too, so these count only if libtpu or
        torch_tpu is installed.
        """
        if tpus := self.tpus():
            return f"{len(tpus)} x {tpus[0]}"
        packages = any(map(self.version, ("libtpu", "torch_tpu")))
        files = [str(node) for node in self.nodes() if packages or node.name.startswith("accel")]
        named = [f"{name}={value}" for name in TPU_NAMES if (value := self.environ.get(name))]
        return ", ".join(files or named)

    def tpu_devices(self) -> int:
        """Returns the number of devices of these chips as PyTorch/XLA counts them."""
        return sum(chips.CHIPS[name].devices_per_chip for name in self.tpus())

    def gpus(self) -> list[str]:
        """Lists the NVIDIA GPUs by the names that their driver reports."""
        files = sorted((self.root / "proc/driver/nvidia/gpus").glob("*/information"))
        texts = [self.read(str(file.relative_to(self.root))) for file in files]
        return [match[1] for text in texts if (match := re.search(r"^Model:\s*(\S.*)", text, re.MULTILINE))]

    def nodes(self) -> list[Path]:
        """Lists the chips' device files. /dev/vfio/vfio belongs to the driver, not to a chip."""
        dev = self.root / "dev"
        return sorted([*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")])

    def holders(self, paths: Iterable[Path]) -> dict[int, str]:
        """Maps the ids of processes that have any of these files open to their command lines, as far as /proc shows."""
        wanted = {str(path) for path in paths}
        holders: dict[int, str] = {}
        for folder in (self.root / "proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                if any(_link(fd) in wanted for fd in (folder / "fd").iterdir()):
                    holders[int(folder.name)] = self.command(int(folder.name))
        return holders

    def command(self, pid: int) -> str:
        """Returns the command line of a process, at most 90 characters; empty if /proc does not show it."""
        line = " ".join(self.read(f"proc/{pid}/cmdline").replace("\0", " ").split()) or self.read(f"proc/{pid}/comm")
        return line if len(line) <= 90 else line[:87] + "..."


def _link(path: Path) -> str:
    """Returns the target of a symbolic link; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def check_python(machine: Machine) -> Check:
    """Checks that wheels of torch_xla and libtpu exist for this Python."""
    python = "Python " + ".".join(map(str, machine.python))
    if machine.python in PYTHONS:
        return Check("Python", "ok", python)
    return Check("Python", "failure", f"{python}: the kit and torch_xla need 3.11 to 3.13", environment_line())


def check_packages(machine: Machine, on_tpu: bool, on_torch_tpu: bool = False) -> Check:
    """Checks that the versions of torch, torch_xla, libtpu and jax work together: others fail at import.

    "failure" if torch is missing, if versions do not fit, or if torch_tpu and torch_xla are both installed. "warning"
    for untested transformers or peft, and for tensorflow beside torch_xla.

    Args:
        machine: the machine.
        on_tpu: whether the run needs torch_xla's TPU: a missing torch_xla is then a "failure", else "skipped", and "ok"
            on a machine with a GPU.
        on_torch_tpu: whether the run needs torch_tpu (`launch.device_type=torch-tpu`), which is then checked instead of
            torch_xla. Without it, torch_tpu alone is a "warning", with `on_tpu` a "failure".
    """
    have = {name: version for name in PACKAGES if (version := machine.version(name))}
    found = " ".join(f"{name} {version}" for name, version in have.items()) or "torch is not installed"
    then, name = ", then restart the kernel", "Packages"
    if "torch" not in have:
        return Check(name, "failure", found, "pip install -r requirements-gpu.txt (requirements-tpu.txt for TPU)")
    if on_torch_tpu:
        backends = torch_tpu.describe_backends(machine.version)
        wrong_pins = torch_tpu.mismatches(machine.version)
        must = "".join(f"; {package} must be {pin}" for package, pin in wrong_pins.items())
        if wrong_pins or "torch_xla" in have:
            return Check(name, "failure", f"{found}; {backends}{must}", environment_line("torch-tpu"))
        return Check(name, "ok", f"{found}; {backends}")
    if machine.version("torch_tpu"):
        status: Status = "failure" if on_tpu or "torch_xla" in have else "warning"
        found += f"; {torch_tpu.describe_backends(machine.version)}. Without a TPU the kit trains on CPU and GPU here"
        return Check(name, status, found, environment_line())
    others = untested(machine.version)
    if others:
        found += "".join(f"; {text}" for text in others.values()) + ": its releases have broken TPU before"
    wrong = mismatches(machine.version, machine.python, with_tpu=on_tpu)
    line = install_line({package: versions[0] for package, versions in wrong.items()})
    if "torch_xla" not in have:
        found += "; torch_xla is not installed, so there is no TPU and no rehearsal of one"
        if others and not on_tpu:
            return Check(name, "warning", found, _tested_line(others) + then)
        if machine.gpus() and not on_tpu:  # installing torch_xla would replace a torch that is built for the GPU
            return Check(name, "ok", found)
        if on_tpu:
            return Check(name, "failure", found, line + then)
        return Check(name, "skipped", found, f"{line} (only for TPU and its rehearsal)")
    if wrong:
        must = ", ".join(f"{package} must be {' or '.join(versions)}" for package, versions in wrong.items())
        return Check(name, "failure", f"{found}: {must}", line + then)
    if others:
        return Check(name, "warning", found, f"{_tested_line(others)}{then}; or a short rehearsal, if you need it")
    if machine.version("tensorflow"):
        found += "; tensorflow is installed too: it loads its own TPU driver and may take the chip"
        return Check(name, "warning", found, f"pip uninstall -y tensorflow{then}")
    return Check(name, "ok", found)


def _tested_line(packages: Iterable[str]) -> str:
    """Returns the pip command that installs the last tested minor version of packages in `TESTED`."""
    return install_line({package: f"{TESTED[package][1]}.*" for package in packages})


def replaced_modules(version: Version) -> Iterator[str]:
    """Yields a text for each package that this process loaded before another version was installed."""
    for name in ("torch", "torch_xla", "jax", "jaxlib", "numpy", "transformers", "peft", "datasets", "tpu_kit"):
        loaded, now = getattr(sys.modules.get(name), "__version__", None), version(name)
        if loaded and now and bare(loaded) != bare(now):
            yield f"{name} {loaded} is loaded, {now} is installed: pip replaced it under this process"


def check_process(machine: Machine) -> Check:
    """Checks that this process can launch: loaded packages equal installed packages, XLA runtime not initialised.

    Returns "ok", or else a "failure" whose fix restarts the process.
    """
    if replaced := "; ".join(replaced_modules(machine.version)):
        return Check("This process", "failure", replaced, restart())
    # Asks only a loaded module; the call initialises nothing.
    extension = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    if extension is not None and extension._xla_runtime_is_initialized():
        found = 'it has touched the XLA device: a launch would fail with "Runtime is already initialized"'
        return Check("This process", "failure", found, f"{restart()}; do not call torch_xla.device() in a cell")
    return Check("This process", "ok", "it has not touched the XLA device")


def in_kernel() -> bool:
    """Whether this process is a notebook's kernel. A loaded ipykernel is no proof: papermill loads it too."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def restart() -> str:
    """Returns the instruction that starts a new process."""
    return "restart the kernel (Kernel > Restart)" if in_kernel() else f"kill {os.getpid()}, start again"


def check_tpu(machine: Machine, asked: bool) -> Check:
    """Checks that this user can open the device files of the chips on the PCI bus, else a "failure"; opens none.

    Without chips: "failure" if `asked`, which means that the run needs a TPU. Otherwise "warning" if the environment
    names a TPU (`TPU_NAMES`), or "skipped".
    """
    tpus, nodes = machine.tpus(), machine.nodes()
    named = next(filter(None, map(machine.environ.get, TPU_NAMES)), None)
    if not tpus:
        text = f"none attached, though the environment names {named}" if named else "none attached"
        if asked or named:
            fix = "Colab: Runtime > Change runtime type; Kaggle: Settings > Accelerator; or device_type=xla-cpu"
            return Check("TPU", "failure" if asked else "warning", text, fix)
        return Check("TPU", "skipped", text)
    text = f"{len(tpus)} x {tpus[0]}" + (f" ({named})" if named else "")
    if not nodes:
        text += ", but /dev has no accel* or vfio/* file for them: the container has no access to the devices"
        return Check("TPU", "failure", text, "docker run --privileged --net=host ...")
    closed = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        return Check("TPU", "failure", f"{text}; no permission: {closed[0]}", f"sudo chmod a+rw {' '.join(closed)}")
    return Check("TPU", "ok", f"{text}, {len(nodes)} device files")


def check_gpu(machine: Machine, wanted: bool, seen: int) -> Check:
    """Checks that PyTorch sees the GPUs of NVIDIA's driver, or warns: `device_type=auto` would train on the CPU.

    Args:
        machine: a machine with at least one GPU.
        wanted: whether the run should use the GPUs; if not, the check is "skipped".
        seen: number of GPUs that PyTorch sees, if they are wanted, else 0.
    """
    gpus, driver = machine.gpus(), re.search(r"\s(\d+\.[\d.]+)\s", machine.read("proc/driver/nvidia/version"))
    found = f"{len(gpus)} x {gpus[0]}" + (f", driver {driver[1]}" if driver else "")
    if seen or not wanted:
        return Check("GPU", "ok" if seen else "skipped", found + ("" if seen else "; this run does not use it"))
    if (hidden := machine.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return Check(
            "GPU", "warning", f"{found}; CUDA_VISIBLE_DEVICES={hidden} hides it", unset(["CUDA_VISIBLE_DEVICES"])
        )
    found += f"; torch {machine.version('torch')} does not see it: it is built without CUDA, or for a newer driver"
    return Check("GPU", "warning", found, "pip uninstall -y torch, then pip install -r requirements-gpu.txt")


def check_metadata(machine: Machine) -> Check:
    """Checks that torch_xla can find the TPU's topology at import, else a "failure"; "skipped" without chips.

    torch_xla asks Google Cloud's metadata server. If TPU_SKIP_MDS_QUERY is set, it reads TPU_ACCELERATOR_TYPE instead.
    The check may wait a second for the server; its fix sets these and other variables.
    """
    name, tpus = "TPU metadata", machine.tpus()
    if not tpus:
        return Check(name, "skipped", "not requested: torch_xla needs it only on a machine with chips")
    chip = chips.chip(tpus[0])
    topology = chip.topologies.get(len(tpus))
    bounds = ",".join(map(str, topology.chips_per_host_bounds)) if topology else "X,Y,Z"
    # Sets the HOST variables: torch_xla would not change the PROCESS variables from process to process.
    fix = (
        f"export TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE={chip.slice_name(len(tpus))} TPU_HOST_BOUNDS=1,1,1 "
        f"TPU_CHIPS_PER_HOST_BOUNDS={bounds} TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=localhost"
    )
    if machine.environ.get("TPU_SKIP_MDS_QUERY"):
        if kind := machine.environ.get("TPU_ACCELERATOR_TYPE"):
            return Check(name, "ok", f"from the environment: {kind}")
        return Check(name, "failure", "TPU_SKIP_MDS_QUERY is set, TPU_ACCELERATOR_TYPE is not", fix)
    try:
        text = machine.metadata("attributes/tpu-env", timeout=1)  # the key that torch_xla reads
        if match := re.search(r"ACCELERATOR_TYPE:\s*'?([\w-]+)", text or ""):
            return Check(name, "ok", f"the metadata server says {match[1]}")
        problem = "the metadata server does not know the TPU's type"
    except (OSError, http.client.HTTPException) as error:
        problem = f"no metadata server ({error or type(error).__name__})"
    return Check(name, "failure", f"{problem}: importing torch_xla would fail or hang", fix)


def check_holder(machine: Machine) -> Check:
    """Checks that no process has a chip open (a TPU serves one process), and that libtpu can open its lock file.

    Else it is a "failure", also if this process has the chip open. "skipped" without device files. Processes of other
    users may be invisible.
    """
    name, nodes, lock = "Chip in use", machine.nodes(), machine.root / "tmp/libtpu_lockfile"
    if not nodes:
        return Check(name, "skipped", "no device files")
    holders = machine.holders(nodes)
    if os.getpid() in holders:
        return Check(name, "failure", f"held by this process, PID {os.getpid()}", restart())
    if holders:
        text = "; ".join(f"PID {pid}: {command}" for pid, command in holders.items())
        return Check(name, "failure", f"held by {text}", f"kill {' '.join(map(str, holders))}")
    # libtpu makes the file with mode 600. Never open it here: a process that holds the lock would lose it at the close.
    if lock.exists() and os.geteuid() not in (0, lock.stat().st_uid):
        text = f"{lock} belongs to another user, whose process was killed or holds the TPU: libtpu cannot open it"
        return Check(name, "failure", text, f"sudo rm {lock}")
    return Check(name, "ok", "by no process")


def preset_per_process(machine: Machine) -> list[str]:
    """Lists environment variables that the replicas of a launch must not inherit.

    torch_xla keeps values that are set, so the same value in all processes would give them the same chip. Kaggle's
    image sets TPU_PROCESS_ADDRESSES=local (tpu/Dockerfile of Kaggle/docker-python). On several hosts the list is empty,
    because the cluster sets these variables.
    """
    if machine.tpu_devices() < 2 or "," in machine.environ.get("TPU_WORKER_HOSTNAMES", ""):
        return []
    return [name for name in PER_PROCESS if name in machine.environ]


def unset(names: Sequence[str]) -> str:
    """Returns the shell command that removes environment variables, in a notebook's kernel the Python statement."""
    if in_kernel():  # a shell command cannot change its environment
        return f"import os; [os.environ.pop(name, None) for name in {list(names)}], then restart the kernel"
    return f"unset {' '.join(names)}"


def check_settings(machine: Machine) -> Check:
    """Returns a "warning" of environment variables that make a run as slow as on a CPU, else "ok".

    Often they are left from debugging: PJRT_DEVICE (with chips, other than TPU), XLA_USE_EAGER_DEBUG_MODE, XLA_FLAGS
    (optimisation level 0 or 1), PT_XLA_DEBUG, PT_XLA_DEBUG_LEVEL and XLA_SAVE_TENSORS_FILE. The fix unsets them.
    """
    environ, slow = machine.environ, {}
    if machine.tpus() and environ.get("PJRT_DEVICE", "TPU") != "TPU":
        slow["PJRT_DEVICE"] = f"={environ['PJRT_DEVICE']} leaves the TPU unused"
    if environ.get("XLA_USE_EAGER_DEBUG_MODE") == "1":
        slow["XLA_USE_EAGER_DEBUG_MODE"] = " compiles and runs each operation alone"
    if re.search(r"backend_optimization_level=[01]\b", environ.get("XLA_FLAGS", "")):
        slow["XLA_FLAGS"] = " turns the compiler's optimisation off"
    for name in ("PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL", "XLA_SAVE_TENSORS_FILE"):
        if environ.get(name, "0") not in ("", "0"):
            slow[name] = " writes a report at each step"
    text = "; ".join(name + why for name, why in slow.items())
    return Check("Settings", "warning", text, unset(list(slow))) if slow else Check("Settings", "ok", "none slows it")


def verdict(checks: Sequence[Check], device_type: str, at: Machine | None = None) -> str:
    """Returns a summary of checks: only the first failure, with its fix, or else the machine's use and all warnings.

    The use follows from `device_type`: "tpu", "torch-tpu" and "cuda" mean training, other types a rehearsal on the CPU.
    "no TPU attached" follows the use, also for "cuda", if `at` (default: this machine) shows no chip on its bus.
    """
    if first := next((check for check in checks if check.status == "failure"), None):
        return f"Not ready. Fix this first: {first.name}: {first.found}\n→ {first.fix}"
    trains_on = {"tpu": "TPU", "torch-tpu": "TPU", "cuda": "GPU"}.get(device_type)
    ready = f"train on this {trains_on}" if trains_on else "rehearse on this CPU"
    notes = (f"! {check.name}: {check.found}" for check in checks if check.status == "warning")
    return "\n".join([f"Ready to {ready}{'' if (at or Machine()).tpus() else '; no TPU attached'}.", *notes])
