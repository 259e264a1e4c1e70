"""Finds the slice that a user names to plan for: its chips, its devices, the memory of each.

"2xv5litepod-64" names two such slices, which the data center network (DCN) joins.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace

from tpu_kit.config.mesh import Mesh
from tpu_kit.hardware import chips as known_chips
from tpu_kit.hardware.calibration import Calibration, load
from tpu_kit.hardware.chips import GIB, Chip, Topology


@dataclass(frozen=True)
class TargetSlice:
    """A slice to plan for, or several equal ones.

    Attributes:
        chip: its chip.
        name: the slice's, such as "v5litepod-8"; of two "2xv5litepod-8".
        chips: number of chips of all slices, which are paid for.
        replicas: number of replicas; on a mesh, of shards of the batch.
        topology: the compiler's name for it; None where it has none.
        found_bytes: memory of a device as the machine itself reports it; None where it was not asked.
        free: the least share of it to leave free, where the formula was not made for this device.
        calibration: what `verify` measured on such a chip of this machine.
        mesh: the devices over which the model is sharded; None for replicas.
        slices: number of slices.
    """

    chip: Chip
    name: str
    chips: int
    replicas: int
    topology: str | None
    found_bytes: int | None = None
    free: float = 0.0
    calibration: Calibration = field(default_factory=lambda: Calibration(""))
    mesh: Mesh | None = None
    slices: int = 1

    @property
    def devices(self) -> int:
        """Number of devices that work on an update."""
        return self.mesh.size if self.mesh else self.replicas

    @property
    def hosts(self) -> int:
        """Number of hosts; a slice whose topology is not known counts as one."""
        known = self.chip.topologies.get(self.chips // self.slices)
        return self.slices * (known.hosts if known else 1)

    def sharded(self, mesh: Mesh) -> TargetSlice:
        """The same slice with the model sharded over its devices."""
        return replace(self, replicas=mesh.batch_shards, mesh=mesh)

    @property
    def limit(self) -> int:
        """Bytes that a program can have on a device, by the compiler's count.

        Fewer where programs were measured to take more than that count. Where they take less, the count stays: it
        decides whether a program compiles.
        """
        return int(self.bytes / max(1.0, self.calibration.memory or 1.0))

    @property
    def bytes(self) -> int:
        """Bytes that a device has for programs; if not known, the published memory less 1 GiB."""
        if self.found_bytes is not None:
            return self.found_bytes
        if self.chip.usable_hbm_bytes is not None:
            return self.chip.usable_hbm_bytes
        return self.chip.hbm_bytes // self.chip.devices_per_chip - GIB


def find_slice(name: str, num_replicas: int | None) -> TargetSlice:
    """Finds the slice that a name means: a chip ("v5e"), a slice ("v5litepod-8") or a topology ("v5e:2x4").

    A chip alone means the smallest slice with room for the replicas. Without a number, each device is a replica. Before
    each name may stand a number of slices, as in "2xv5litepod-8".

    Raises:
        ValueError: no such chip, slice or topology, no TPU, or too few devices.
    """
    slices, name = _slices(name)
    if ":" in name:
        kind, topology = find_topology(name, 1)
        count = topology.chips
    elif re.fullmatch(r".+[-_]\d+", name.strip()):
        kind, count = known_chips.parse_accelerator_type(name)
    else:
        kind = known_chips.chip(name)
        if kind.accelerator_prefix is None:
            tpus = ", ".join(one.name for one in known_chips.CHIPS.values() if one.accelerator_prefix)
            raise ValueError(f"{kind.name} is a GPU, and plans are made for TPUs: {tpus}")
        each = slices * kind.devices_per_chip
        sizes = [size for size in kind.slice_sizes if size * each >= (num_replicas or 1)]
        if not sizes:
            most = kind.slice_sizes[-1] * each
            raise ValueError(f"launch.num_replicas={num_replicas}: the largest slice of {kind.name} has {most} devices")
        count = sizes[0]
    devices = slices * count * kind.devices_per_chip
    known = kind.topologies.get(count)
    several = "" if slices == 1 else f"{slices}x"
    if num_replicas is not None and num_replicas > devices:
        raise ValueError(
            f"launch.num_replicas={num_replicas}: {several}{name} has {devices} devices; use 1 to that many"
        )
    return TargetSlice(
        kind, several + kind.slice_name(count), slices * count, num_replicas or devices,
        several + known.name if known else None, calibration=load(kind.name), slices=slices,
    )  # fmt: skip


def _slices(name: str) -> tuple[int, str]:
    """The number of slices that stands before a name, and the name."""
    found = re.fullmatch(r"(?:(\d+)x)?(.*)", name.strip())
    assert found is not None
    count = int(found[1] or 1)
    if count < 1:
        raise ValueError(f"{name!r} names no slice; write 2x{found[2]} for two of them")
    return count, found[2]


def find_topology(chip: str, num_replicas: int) -> tuple[Chip, Topology]:
    """Finds the chip and the slice to compile for, or the slices, as "2xv5e:8x8".

    Raises:
        ValueError: no such chip or topology, the compiler has none for the chip, or it has too few devices.
    """
    slices, chip = _slices(chip)
    name, _, shape = chip.partition(":")
    kind = known_chips.chip(name)
    known = sorted((replace(one, slices=slices) for one in kind.topologies.values()), key=lambda one: one.chips)
    names = [one.name for one in known]
    if not known:
        compilable = [name for name, kind in known_chips.CHIPS.items() if kind.topologies]
        raise ValueError(f"libtpu cannot compile for {kind.name}; it can for {', '.join(compilable)}")
    if shape and f"{kind.name}:{shape}" not in names:
        near = difflib.get_close_matches(f"{kind.name}:{shape}", names, n=1, cutoff=0.0)
        raise ValueError(f"there is no topology {chip}: did you mean {near[0]}? Known: {', '.join(names)}")
    if shape:
        known = [one for one in known if one.name == f"{kind.name}:{shape}"]
    devices = [one.chips * kind.devices_per_chip for one in known]
    if num_replicas < 1 or num_replicas > devices[-1]:
        raise ValueError(f"num_replicas={num_replicas}: {known[-1]} has {devices[-1]} devices; use 1 to that many")
    return kind, next(one for one, count in zip(known, devices, strict=True) if count >= num_replicas)
