"""What a user may call a TPU to plan for, and what it then is: chips to pay for, devices, the memory of each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpu_kit import chips as known_chips
from tpu_kit.chips import Chip


@dataclass(frozen=True)
class Where:
    """A slice to plan for.

    Attributes:
        chip: what it is made of.
        name: the slice's, such as "v5litepod-8".
        chips: that are paid.
        replicas: that work.
        topology: the compiler's name for it; None where it knows none.
        found_bytes: memory of a device as the machine itself tells it; None where it was not asked.
        free: the least share of it to leave free, where the formula was not made for this device.
    """

    chip: Chip
    name: str
    chips: int
    replicas: int
    topology: str | None
    found_bytes: int | None = None
    free: float = 0.0

    @property
    def limit(self) -> int:
        """Bytes that a program can have on a device; where that is not known, the published memory less 1 GiB."""
        if self.found_bytes is not None:
            return self.found_bytes
        if self.chip.usable_hbm_bytes is not None:
            return self.chip.usable_hbm_bytes
        return self.chip.hbm_bytes // self.chip.devices_per_chip - 2**30


def find_slice(name: str, num_replicas: int | None) -> Where:
    """The slice that a name means: a chip ("v5e"), a slice ("v5litepod-8") or a topology ("v5e:2x4").

    A chip alone is the smallest slice with room for the replicas. Replicas are all devices where no number is given.

    Raises:
        ValueError: no such chip, slice or topology, no TPU, or too few devices.
    """
    if ":" in name:
        from tpu_kit.compiler import find_topology

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
    return Where(kind, label, count, num_replicas or devices, at.name if at else None)
