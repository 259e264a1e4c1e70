"""Chooses device type and number of replicas of a launch, and finds their memory, without initialising a device."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
from dataclasses import dataclass, replace

from tpu_kit.config.mesh import Mesh, mesh_size, resolve_mesh
from tpu_kit.config.schema import LaunchConfig, TrainConfig
from tpu_kit.distributed.hosts import ONE, Hosts
from tpu_kit.distributed.replica.runtime import DeviceType
from tpu_kit.machine import chips, torch_tpu
from tpu_kit.machine.calibration import load
from tpu_kit.machine.checks import Machine
from tpu_kit.machine.chips import Chip
from tpu_kit.machine.compatibility import environment_line
from tpu_kit.machine.host import PROCESS_BYTES, free_memory
from tpu_kit.machine.slices import TargetSlice, find_slice
from tpu_kit.torch_tpu import limits
from tpu_kit.torch_tpu.environment import NAME as TORCH_TPU

REHEARSAL_REPLICAS = 4  # on xla-cpu, if neither the configuration nor the environment has a number
# Shares of memory that the choice of the batch size leaves free; guesses. The memory formula is for a TPU's compiler; a
# GPU also holds a context, libraries and its allocator's gaps, and other processes use host memory.
GPU_FREE, HOST_FREE = 0.3, 0.5
_PJRT: dict[str, DeviceType] = {"TPU": "tpu", "CPU": "xla-cpu"}


@dataclass(frozen=True)
class Backend:
    """Device type, replicas per host (None: all TPU devices), mesh (None: no sharding) and hosts of a launch."""

    device_type: DeviceType
    num_replicas: int | None  # per host; None if only the TPU runtime knows the number (all its devices)
    reason: str  # why `detect` chose this backend
    mesh: Mesh | None = None  # devices over which one process shards the model; None for replicas and a single device
    hosts: Hosts = ONE

    @property
    def first_rank(self) -> int:
        """The rank of this host's first replica, or on a mesh of its only process."""
        return self.hosts.index * (self.num_replicas or 1)

    def __str__(self) -> str:
        each = f"{self.hosts.count} hosts" if self.hosts.count > 1 else ""
        if self.mesh is not None:
            what = f"a mesh of {self.mesh.size} devices{each and f' on {each}'}, {self.mesh}"
        else:
            count = "all devices" if self.num_replicas is None else f"{self.num_replicas} replica(s)"
            what = f"{count}{each and f' on each of {each}'}"
        return f"device_type={self.device_type}, {what}: {self.reason}"


def detect(launch: LaunchConfig | None = None, at: Machine | None = None, hosts: Hosts = ONE) -> Backend:
    """Chooses the backend of a launch, without initialising a device or using the network.

    The device type `auto` means tpu for PJRT_DEVICE=TPU and xla-cpu for PJRT_DEVICE=CPU. Otherwise it means tpu if
    there are a TPU and torch_xla, else cuda if there is a GPU, else cpu. If `launch.num_replicas` is None, a host has a
    replica on every TPU device or GPU, CPU_NUM_DEVICES or 4 replicas on xla-cpu, and 1 on cpu and torch-tpu. The mesh
    `auto` and a mesh of a single device count as no mesh, but device type tpu on several hosts always gets a mesh.

    Args:
        launch: device type, number of replicas per host, mesh and its rules; None for the defaults.
        at: the machine and its environment; None for this machine.
        hosts: the hosts of the run.

    Raises:
        ValueError: the device or its package is missing. For `auto` without PJRT_DEVICE, this is only a TPU without
            torch_xla on a machine without a GPU. Or torch_xla and torch_tpu are both installed, PJRT_DEVICE contradicts
            `launch.device_type`, this host cannot have that number of replicas, or CPU_NUM_DEVICES is no number. Or
            xla-cpu has several hosts, or a mesh is given for another type than tpu and xla-cpu. Or as `resolve_mesh`,
            and for torch-tpu as `limits.check_machine`.
    """
    launch, at = launch or LaunchConfig(), at or Machine()
    wish, pjrt = launch.device_type, at.environ.get("PJRT_DEVICE", "").upper()
    if wish == "auto":
        device_type, reason = _choose(pjrt, at)
    else:
        device_type, reason = wish, "as configured"
        wants_xla = wish != TORCH_TPU  # PJRT_DEVICE is for torch_xla
        if wants_xla and wish != (pjrt_wish := _PJRT.get(pjrt, wish)) and (wish, pjrt_wish) != ("cpu", "xla-cpu"):
            raise ValueError(
                f"launch.device_type={wish}, but the environment says PJRT_DEVICE={pjrt}, which is {pjrt_wish}. Unset "
                f"PJRT_DEVICE, or set launch.device_type={pjrt_wish}"
            )
    _require(device_type, at, launch.num_replicas or 1)
    if hosts.count > 1 and device_type == "xla-cpu":
        raise ValueError(
            f"device_type={device_type} on {hosts.count} hosts ({hosts.source}): torch_xla connects no hosts on the "
            "CPU; several hosts train with tpu, cuda or cpu"
        )
    mesh = None if launch.mesh == "auto" else launch.mesh  # `planning.preflight` replaces auto; other callers get none
    if mesh is None and hosts.count > 1 and device_type == "tpu":
        mesh = "data=-1"
    if mesh is None:
        return Backend(device_type, _replicas(device_type, launch.num_replicas, at), reason, hosts=hosts)
    found = _mesh(mesh, device_type, launch, at, hosts)
    return Backend(device_type, 1, reason, found if found.size > 1 else None, hosts)


def run_problems(config: TrainConfig, backend: Backend) -> list[str]:
    """Returns a text, with the fix, for each setting that TorchTPU or a mesh over several hosts does not support."""
    if backend.device_type == TORCH_TPU:
        return limits.problems(config, backend.hosts.count)
    return slice_problems(config) if backend.hosts.count > 1 and backend.mesh is not None else []


def slice_problems(config: TrainConfig) -> list[str]:
    """Returns a text, with the fix, for each setting that a run on a TPU slice of several hosts does not support.

    It assumes such a run, whatever `config.launch` says. The settings are `tracking.generate_rows` and
    `tracking.eval_generate_rows` above 0, any `launch.num_replicas`, and on pairs `preference.reference=start` with a
    loss that compares with it. If there are none, the result is [].
    """
    answers = "answers are generated on a single host; set it to 0, and evaluate on one host afterwards"
    problems = [
        f"{name}: {config[name]} on a TPU slice of several hosts: {answers}"
        for name in ("tracking.generate_rows", "tracking.eval_generate_rows") if config[name]
    ]  # fmt: skip
    if (replicas := config.launch.num_replicas) is not None:
        text = "one process drives the chips of a host, as a part of a mesh; remove it, or set launch.mesh=data=-1"
        problems.append(f"launch.num_replicas: {replicas} on a TPU slice of several hosts: {text}")
    preference = config.preference
    if config.on_pairs and preference.compares and preference.reference == "start":
        text = "it is exchanged only within a host; set it to step, or losses=[simpo] or [orpo], which have none"
        problems.append(f"preference.reference: 'start' on a TPU slice of several hosts: {text}")
    return problems


def _choose(pjrt: str, at: Machine) -> tuple[DeviceType, str]:
    """Returns the device type that `auto` means, and why; raises ValueError for a TPU without torch_xla and no GPU.

    `pjrt` is PJRT_DEVICE in upper case; values other than TPU and CPU have no effect.
    """
    if pjrt in _PJRT:
        return _PJRT[pjrt], f"the environment says PJRT_DEVICE={pjrt}"
    has_xla = at.version("torch_xla") is not None
    if at.tpus() and has_xla:
        return "tpu", f"{len(at.tpus())} x TPU {at.tpus()[0]} found"
    signs = "" if has_xla else at.tpu_signs()
    no_tpu = "a TPU was found, but torch_xla is not installed" if signs else "no TPU was found"
    if count := gpu_count():
        return "cuda", f"{no_tpu}; {count} GPU(s) found"
    if signs:
        raise ValueError(
            f"launch.device_type=auto: this machine has a TPU ({signs}), and torch_xla, which drives it, is not "
            f"installed. {_xla_advice(at)}\nor set launch.device_type=cpu to train on the CPU{_experimental(at)}"
        )
    return "cpu", f"{no_tpu}, and no GPU; launch.device_type=xla-cpu rehearses the TPU's path here"


def _require(device_type: str, at: Machine, replicas: int) -> None:
    """Raises ValueError if the device or its package is missing; opens no device.

    It does so for tpu and xla-cpu also if torch_tpu is installed beside torch_xla, and for torch-tpu if
    `limits.check_machine` does, which alone reads `replicas`.
    """
    beside = at.version("torch_tpu")
    if device_type in ("tpu", "xla-cpu") and beside and at.version("torch_xla"):
        raise ValueError(
            f"launch.device_type={device_type}: {torch_tpu.describe_backends(at.version)}. Uninstall torch_tpu and "
            f"install requirements-tpu.txt, or make an environment with torch_xla:\n  {environment_line()}"
        )
    if device_type in ("tpu", "xla-cpu") and at.version("torch_xla") is None:
        other = "cpu" if at.tpu_signs() else "auto with PJRT_DEVICE unset"
        raise ValueError(
            f"launch.device_type={device_type} needs torch_xla, which is not installed here. {_xla_advice(at)}\n"
            f"or use launch.device_type={other}{_experimental(at)}"
        )
    if device_type == TORCH_TPU:
        limits.check_machine(at, replicas)
    if device_type == "tpu" and not at.tpus() and not at.nodes():
        raise ValueError(
            "launch.device_type=tpu, but this machine has no TPU. On Colab: Runtime > Change runtime type; on Kaggle: "
            "Settings > Accelerator. launch.device_type=xla-cpu rehearses the same code on this CPU"
        )
    if device_type == "cuda" and not gpu_count():
        raise ValueError(
            "launch.device_type=cuda, but PyTorch sees no GPU here (nvidia-smi tells whether the driver does). Use "
            "launch.device_type=auto, or install a PyTorch built for CUDA"
        )


def _xla_advice(at: Machine) -> str:
    """Returns how to install torch_xla: in another environment if torch_tpu is installed, which needs another torch."""
    if at.version("torch_tpu"):
        return f"Here is {torch_tpu.describe_backends(at.version)}. Make one with torch_xla:\n  {environment_line()}"
    return "Install it with\n  pip install -r requirements-tpu.txt"


def _experimental(at: Machine) -> str:
    """Returns ", or torch-tpu, ..." for an error, if torch_tpu is installed and there are signs of a TPU; else ""."""
    return f", or {TORCH_TPU}, which is experimental" if at.version("torch_tpu") and at.tpu_signs() else ""


def _replicas(device_type: str, asked: int | None, at: Machine) -> int | None:
    """Returns the number of replicas per host; raises ValueError if this host cannot have `asked` replicas.

    If `asked` is None: CPU_NUM_DEVICES or 4 on xla-cpu, all GPUs on cuda, 1 on cpu and torch-tpu. On a TPU 1 if
    `asked` is 1, else None, which means all devices; if their number is known, `asked` must be that or None.
    """
    if device_type == "xla-cpu":
        text = at.environ.get("CPU_NUM_DEVICES", str(REHEARSAL_REPLICAS))
        if asked is None and (not text.isdigit() or int(text) < 1):
            raise ValueError(
                f"the environment says CPU_NUM_DEVICES={text!r}; it must be a number of replicas, 1 or more"
            )
        return asked or int(text)
    if device_type in ("cpu", TORCH_TPU):
        return asked or 1
    if device_type == "cuda":
        there = gpu_count()
        if (asked or 1) > there:
            raise ValueError(f"launch.num_replicas={asked}, with {there} GPU(s); use {there} or leave it out")
        return asked or there
    devices = at.tpu_devices()
    if devices and asked not in (None, 1, devices):
        text = f"launch.num_replicas={asked} with {devices} TPU devices: torch_xla starts one process, or one for each"
        raise ValueError(f"{text}; use num_replicas={devices}, or leave it out")
    return 1 if asked == 1 else None


def _mesh(text: str, device_type: str, launch: LaunchConfig, at: Machine, hosts: Hosts) -> Mesh:
    """Returns the mesh `text` ("data=2,fsdp=-1") on all hosts' devices, with the rules of `launch`.

    XLA:CPU makes as many devices as the mesh names, with -1 CPU_NUM_DEVICES or 4. Raises ValueError if the type is
    neither tpu nor xla-cpu, the numbers of devices differ, or text or rules are wrong.
    """
    if device_type not in _PJRT.values():
        raise ValueError(
            f"launch.mesh={text} needs XLA, and the launch runs on {device_type}. Use launch.device_type=tpu or "
            "xla-cpu, or remove launch.mesh"
        )
    if device_type == "tpu":
        devices = at.tpu_devices() or len(at.nodes())
        return resolve_mesh(text, devices * hosts.count, launch.mesh_rules)
    return resolve_mesh(text, mesh_size(text) or _replicas(device_type, None, at) or 1, launch.mesh_rules)


def gpu_count() -> int:
    """Counts the GPUs that PyTorch can use, with NVML, so that no CUDA context is opened here; 0 without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def seen_on(device_type: str, config: TrainConfig) -> TrainConfig:
    """Returns a copy with the meaning of `auto` settings off a TPU, so that the memory formula describes the run.

    Returns `config` itself for tpu and torch-tpu. On other devices, model.attention=auto becomes sdpa on cpu and
    xla-cpu, and splash on cuda, where no scores are stored either. On cuda and cpu, optim.scan_layers=auto becomes off,
    but stays auto with distill.layers or optim.remat=blocks. All other values stay.
    """
    if device_type in ("tpu", TORCH_TPU):
        return config
    model, optim = config.model, config.optim
    if model.attention == "auto":
        model = replace(model, attention="splash" if device_type == "cuda" else "sdpa")
    looped = device_type == "xla-cpu" or config.distill.layers is not None or optim.remat == "blocks"
    if optim.scan_layers == "auto" and not looped:
        optim = replace(optim, scan_layers="off")
    return replace(config, model=model, optim=optim)


def device_memory_budget(
    config: TrainConfig, at: Machine | None = None, backend: Backend | None = None
) -> TargetSlice | None:
    """Returns the devices of all hosts with the memory per replica, or per device of a TPU mesh; None if it is unknown.

    The memory is a TPU's published size, or the total of the first visible GPU. On the CPU, it is the host's free
    memory minus the processes' own use, divided by the number of replicas. It is unknown on a mesh of XLA:CPU, for an
    unknown TPU, or if it cannot be read.

    Args:
        config: the run; only its `launch` section is read, and only if `backend` is None.
        at: the machine; None for this machine.
        backend: the result of `detect`; None calls it for a single host.

    Raises:
        ValueError: as `detect` if `backend` is None, and as `find_slice` on a TPU.
    """
    at = at or Machine()
    backend = backend or detect(config.launch, at)
    hosts = backend.hosts
    if backend.device_type in ("tpu", TORCH_TPU):
        found = at.tpus()
        if not found:  # the machine has device files of an unknown chip
            return None
        kind = chips.chip(found[0])
        devices = backend.mesh.size if backend.mesh else backend.num_replicas or len(found) * kind.devices_per_chip
        several = f"{hosts.slices}x{kind.slice_name(devices // hosts.slices // kind.devices_per_chip)}"
        where = find_slice(found[0] if hosts.slices == 1 else several, devices)
        return where.sharded(backend.mesh) if backend.mesh else where
    if backend.mesh is not None:
        return None
    replicas = backend.num_replicas or 1
    if backend.device_type == "cuda":
        return _gpu_budget(replicas * hosts.count, at)
    memory = free_memory(at)
    if memory is None:
        return None
    processes = 1 if backend.device_type == "xla-cpu" else replicas
    each = max(0, int((memory - processes * PROCESS_BYTES) / replicas))
    name = "this host" if hosts.count == 1 else f"{hosts.count} hosts"
    return _machine(Chip(name=backend.device_type, hbm_bytes=each, hbm_bandwidth=0.0), name, replicas * hosts.count,
                    each, HOST_FREE, backend.device_type)  # fmt: skip


def _machine(kind: Chip, name: str, replicas: int, size: int, free: float, device_type: DeviceType) -> TargetSlice:
    """Makes a target of GPUs or a CPU: `size` bytes per replica, of which the batch leaves the share `free` free."""
    return TargetSlice(kind, name, replicas, replicas, None, size, free, load(kind.name), device_type=device_type)


def _gpu_budget(replicas: int, at: Machine) -> TargetSlice | None:
    """Returns `replicas` GPUs like the first visible GPU, whose memory nvidia-smi tells; None if it cannot be asked."""
    visible = (at.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", "-i", visible]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        name, _, mebibytes = printed.strip().splitlines()[0].rpartition(", ")
        size = int(mebibytes) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    kind = Chip(name="cuda", hbm_bytes=size, hbm_bandwidth=0.0)
    with contextlib.suppress(ValueError):  # unknown to chips.toml
        kind = chips.chip(name)
    return _machine(kind, name, replicas, size, GPU_FREE, "cuda")
