"""What a user may call a TPU to plan for, and what it then is: chips to pay for, devices, the memory of each."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field

from tpu_kit.hardware import chips as known_chips
from tpu_kit.hardware.calibration import Calibration, load
from tpu_kit.hardware.chips import Chip, Topology
from tpu_kit.hardware.units import GIB


@dataclass(frozen=True)
class TargetSlice:
    """A slice to plan for.

    Attributes:
        chip: what it is made of.
        name: the slice's, such as "v5litepod-8".
        chips: that are paid.
        replicas: that work.
        topology: the compiler's name for it; None where it knows none.
        found_bytes: memory of a device as the machine itself tells it; None where it was not asked.
        free: the least share of it to leave free, where the formula was not made for this device.
        calibration: what `verify` measured on such a chip of this machine.
    """

    chip: Chip
    name: str
    chips: int
    replicas: int
    topology: str | None
    found_bytes: int | None = None
    free: float = 0.0
    calibration: Calibration = field(default_factory=lambda: Calibration(""))

    @property
    def limit(self) -> int:
        """Bytes that a program can have on a device, by the compiler's count: fewer where it was measured to take more.

        Where it was measured to take less, the compiler's own count still decides whether it compiles.
        """
        return int(self.bytes / max(1.0, self.calibration.memory or 1.0))

    @property
    def bytes(self) -> int:
        """Bytes that a device has for programs; where that is not known, the published memory less 1 GiB."""
        if self.found_bytes is not None:
            return self.found_bytes
        if self.chip.usable_hbm_bytes is not None:
            return self.chip.usable_hbm_bytes
        return self.chip.hbm_bytes // self.chip.devices_per_chip - GIB


def find_slice(name: str, num_replicas: int | None) -> TargetSlice:
    """The slice that a name means: a chip ("v5e"), a slice ("v5litepod-8") or a topology ("v5e:2x4").

    A chip alone is the smallest slice with room for the replicas. Replicas are all devices where no number is given.

    Raises:
        ValueError: no such chip, slice or topology, no TPU, or too few devices.
    """
    if ":" in name:
        kind, topology = find_topology(name, num_replicas or 1)
        count = topology.chips
    elif re.fullmatch(r".+[-_]\d+", name.strip()):
        found = known_chips.parse_accelerator_type(name)
        kind, count = found.chip, found.chips
    else:
        kind = known_chips.chip(name)
        if kind.accelerator_prefix is None:
            tpus = ", ".join(one.name for one in known_chips.CHIPS.values() if one.accelerator_prefix)
            raise ValueError(f"{kind.name} is a GPU, and plans are made for TPUs: {tpus}")
        sizes = [size for size in kind.slice_sizes if size * kind.devices_per_chip >= (num_replicas or 1)]
        if not sizes:
            most = kind.slice_sizes[-1] * kind.devices_per_chip
            raise ValueError(f"launch.num_replicas={num_replicas}: the largest slice of {kind.name} has {most} devices")
        count = sizes[0]
    devices = count * kind.devices_per_chip
    if num_replicas is not None and num_replicas > devices:
        raise ValueError(f"launch.num_replicas={num_replicas}: {name} has {devices} devices; use 1 to that many")
    unit = (kind.cores or 1) if kind.name_counts_cores else 1
    at = kind.topologies.get(count)
    label = f"{kind.accelerator_prefix}-{count * unit}"
    return TargetSlice(
        kind, label, count, num_replicas or devices, at.name if at else None, calibration=load(kind.name)
    )


def find_topology(chip: str, num_replicas: int) -> tuple[Chip, Topology]:
    """The chip and the slice to compile for.

    Raises:
        ValueError: no such chip or topology, or the compiler knows none for the chip, or it has too few devices.
    """
    name, _, shape = chip.partition(":")
    kind = known_chips.chip(name)
    known = sorted(kind.topologies.values(), key=lambda one: one.chips)
    names = [one.name for one in known]
    if not known:
        raise ValueError(f"libtpu cannot compile for {kind.name}; it can for {', '.join(_compilable())}")
    if shape and f"{kind.name}:{shape}" not in names:
        near = difflib.get_close_matches(f"{kind.name}:{shape}", names, n=1, cutoff=0.0)
        raise ValueError(f"there is no topology {chip}: did you mean {near[0]}? Known: {', '.join(names)}")
    if shape:
        known = [one for one in known if one.name == f"{kind.name}:{shape}"]
    devices = [one.chips * kind.devices_per_chip for one in known]
    if num_replicas < 1 or num_replicas > devices[-1]:
        raise ValueError(f"num_replicas={num_replicas}: {known[-1].name} has {devices[-1]} devices; use 1 to that many")
    return kind, next(one for one, count in zip(known, devices, strict=True) if count >= num_replicas)


def _compilable() -> list[str]:
    return [name for name, kind in known_chips.CHIPS.items() if kind.topologies]
