"""Finds the slice to plan for by its name, and describes its chips, devices and memory.

"2xv5litepod-64" means two v5litepod-64 slices, connected by the data center network (DCN).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tpu_kit.config.mesh import Mesh
from tpu_kit.machine import chips
from tpu_kit.machine.calibration import Calibration, load
from tpu_kit.machine.chips import GIB, Chip, Topology

RESERVE = 0.08
"""Share of a TPU's usable memory that the memory formula leaves free: more than its largest underestimate of compiled
steps (tests/recorded_memory.json)."""

ON_GPU = "On a GPU, `train` prints the memory and the time of a step before it starts; batch_size=auto fills the memory"
"""Advice for users of a GPU, because plans are made for TPUs."""


@dataclass(frozen=True)
class TargetSlice:
    """A slice to plan for, several equal slices, or this machine.

    Attributes:
        chip: kind of chip; a chip of unknown speed if the machine has no known chip.
        name: the provider's name, such as "v5litepod-8", or "2xv5litepod-8" for two slices.
        chips: number of chips in all slices; the cost counts these.
        replicas: number of replicas; on a mesh, number of shards of the batch.
        topology: the compiler's name for the slice; None if it has none.
        found_bytes: memory per replica as this machine reports it; None if it was not asked.
        free: share of the memory that the memory formula leaves free; larger for devices it was not made for.
        calibration: measurements of `verify` on such a chip in this machine.
        mesh: devices over which the model is sharded; None for replicas.
        slices: number of slices.
        service: service that offers the slice for free, such as "Kaggle"; empty for a paid slice.
        device_type: type of the devices.
    """

    chip: Chip
    name: str
    chips: int
    replicas: int
    topology: str | None
    found_bytes: int | None = None
    free: float = RESERVE
    calibration: Calibration = field(default_factory=lambda: Calibration(""))
    mesh: Mesh | None = None
    slices: int = 1
    service: str = ""
    device_type: Literal["tpu", "torch-tpu", "cuda", "cpu", "xla-cpu"] = "tpu"

    @property
    def devices(self) -> int:
        """Number of devices that compute an update."""
        return self.mesh.size if self.mesh else self.replicas

    @property
    def hosts(self) -> int:
        """Number of hosts; a slice of unknown topology counts as one host."""
        topology = self.chip.topologies.get(self.chips // self.slices)
        return self.slices * (topology.hosts if topology else 1)

    def sharded(self, mesh: Mesh) -> TargetSlice:
        """Returns the same slice with the model sharded over its devices."""
        return replace(self, replicas=mesh.batch_shards, mesh=mesh)

    @property
    def limit(self) -> int:
        """Largest memory of a program on a device, in bytes of the compiler's count.

        Smaller if `verify` measured programs that take more than the compiler counts. Not larger if they take less,
        because the compiler's count decides whether a program compiles.
        """
        return int(self.bytes / max(1.0, self.calibration.memory or 1.0))

    @property
    def budget(self) -> float:
        """Bytes of a device that a run chosen by the memory formula may use."""
        return self.limit * (1 - self.free)

    @property
    def bytes(self) -> int:
        """Bytes of a device that programs can use; if not known, the published memory minus 1 GiB."""
        published = self.chip.hbm_bytes // self.chip.devices_per_chip - GIB
        return self.chip.usable_hbm_bytes or published if self.found_bytes is None else self.found_bytes


def services(names: Sequence[str]) -> list[str]:
    """Replaces names of notebook services by the slices that they offer for free, as in "Colab v6e-1"; keeps others."""
    free = {service.lower(): [f"{service} {each}" for each in slices] for service, slices in chips.FREE_SLICES.items()}
    return [slice_name for name in names for slice_name in free.get(name.strip().lower(), [name.strip()])]


def find_slice(name: str, num_replicas: int | None) -> TargetSlice:
    """Finds a slice by the name of a chip ("v5e"), a slice ("v5litepod-8") or a topology ("v5e:2x4").

    A chip's name means its smallest slice with room for `num_replicas`. If that is None, it means the smallest slice of
    all, and every slice gets a replica per device. The name may begin with a number of slices ("2xv5litepod-8") or with
    a service that offers the slice for free ("Colab v6e-1"). Reads the chip's calibration on this machine.

    Raises:
        ValueError: no such chip, slice or topology, a GPU, or fewer devices than `num_replicas`.
    """
    service, _, name = name.strip().rpartition(" ")
    slices, each = _slices(name)
    if ":" in each:
        kind, topology = find_topology(each, 1)
        sizes: Sequence[int] = [topology.chips]
    elif re.fullmatch(r".+[-_]\d+", each):
        kind, count = chips.parse_accelerator_type(each)
        sizes = [count]
    else:
        kind = chips.chip(each)
        sizes = kind.slice_sizes
    if kind.accelerator_prefix is None:
        tpus = ", ".join(name for name, chip in chips.CHIPS.items() if chip.accelerator_prefix)
        raise ValueError(f"{kind.name} is a GPU, and plans are made for TPUs: {tpus}. {ON_GPU}")
    devices = {size: slices * size * kind.devices_per_chip for size in sizes}
    fitting = [size for size in sizes if devices[size] >= (num_replicas or 1)]
    if not fitting:
        most = f"{name} has {devices[sizes[-1]]} devices; use 1 to that many"
        raise ValueError(f"launch.num_replicas={num_replicas}: {most}")
    size, several = fitting[0], "" if slices == 1 else f"{slices}x"
    shape = kind.topologies.get(size)
    return TargetSlice(
        kind, several + kind.slice_name(size), slices * size, num_replicas or devices[size],
        several + shape.name if shape else None, calibration=load(kind.name), slices=slices, service=service,
    )  # fmt: skip


def _slices(name: str) -> tuple[int, str]:
    """Splits "2xv5e-8" into the number of slices, by default 1, and the name of a slice; raises ValueError for 0."""
    match = re.fullmatch(r"(?:(\d+)x)?(.*)", name.strip())
    assert match is not None
    if match[1] and int(match[1]) < 1:
        raise ValueError(f"{name!r} has 0 slices; write 2x{match[2]} for two slices")
    return int(match[1] or 1), match[2]


def find_topology(name: str, num_replicas: int) -> tuple[Chip, Topology]:
    """Finds the chip and the topology to compile for by a name such as "v5e", "v5e:2x4" or "2xv5e:8x8" (two slices).

    A chip's name means its smallest topology with at least `num_replicas` devices, over all slices.

    Raises:
        ValueError: no such chip or topology, libtpu does not compile for the chip, or `num_replicas` is below 1 or
            above the number of devices.
    """
    slices, each = _slices(name)
    chip, _, shape = each.partition(":")
    kind = chips.chip(chip)
    if not kind.topologies:
        compilable = [name for name, chip in chips.CHIPS.items() if chip.topologies]
        raise ValueError(f"libtpu cannot compile for {kind.name}; it can for {', '.join(compilable)}")
    wanted, names = f"{kind.name}:{shape}", [topology.name for topology in kind.topologies.values()]
    if shape and wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.0)
        raise ValueError(f"there is no topology {each}: did you mean {near[0]}? Known: {', '.join(names)}")
    fitting = [each for each in kind.topologies.values() if not shape or each.name == wanted]
    for topology in sorted((replace(each, slices=slices) for each in fitting), key=lambda each: each.chips):
        devices = topology.chips * kind.devices_per_chip
        if 1 <= num_replicas <= devices:
            return kind, topology
    raise ValueError(f"num_replicas={num_replicas}: {topology} has {devices} devices; use 1 to that many")
