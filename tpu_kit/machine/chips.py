"""Looks up TPUs, a few GPUs and TPU slices by name; chips.toml has their figures and prices.

A slice name counts TensorCores for v4, v5p and v7x, but chips for v5e ("v5litepod-8") and v6e. PyTorch/XLA sees a v7x
chip as two devices (a core has half of the HBM), and a v4 or v5p chip as one device ("megacore").
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

MIB, GIB = 2**20, 2**30


class Price(NamedTuple):
    """List prices in US dollars per chip-hour, before taxes and any agreed discount.

    A TPU's price includes its virtual machine; a GPU's only if its source has a "+". Spot prices may change daily.
    """

    on_demand: float
    spot: float


@dataclass(frozen=True)
class Topology:
    """Arguments that describe a slice to JAX's compile-only client (`jax.experimental.topologies.get_topology_desc`).

    Attributes:
        name: `topology_name`, for example "v5e:2x4"; the shape counts chips.
        chip_config_name: "megacore" if the compiler needs it to make a chip one device (v4), otherwise None.
        slices: number of equal slices, connected by the data center network.
    """

    name: str
    chips_per_host_bounds: tuple[int, int, int]
    chip_config_name: str | None = None
    slices: int = 1

    @property
    def chips(self) -> int:
        """Number of chips in all slices."""
        return self.slices * math.prod(int(side) for side in self.name.split(":")[1].split("x"))

    @property
    def chips_per_host(self) -> int:
        """Number of chips per host."""
        return math.prod(self.chips_per_host_bounds)

    @property
    def hosts(self) -> int:
        """Number of hosts of all slices."""
        return self.chips // self.chips_per_host

    def __str__(self) -> str:
        return self.name if self.slices == 1 else f"{self.slices}x{self.name}"


@dataclass(frozen=True, kw_only=True)
class Chip:
    """An accelerator chip; figures are per chip unless they say "per device".

    Attributes:
        hbm_bytes: published memory, whose "GB" are read as GiB.
        usable_hbm_bytes: per device; the largest program arguments that libtpu 0.0.21 accepted, or CUDA's total memory.
        bf16_flops: peak dense FLOP/s: not the peaks for int8 or fp8 (v5e 393, v6e 1836, v7x 4614) or with sparsity.
        clock: cycles/s of a TensorCore; None for a chip that libtpu 0.0.21 does not compile for.
        matrix_unit: rows and columns of a matrix unit; None for a GPU, which multiplies small tiles.
        hbm_bandwidth: bytes/s.
        ici_bandwidth: bytes/s between chips, over all links and both directions (NVLink for GPUs).
        dcn_bandwidth: bytes/s that a chip can send to other slices while all chips of its host send.
        cores: number of TensorCores.
        devices_per_chip: devices that the framework sees per chip.
        pci_device: device id on the PCI bus.
        accelerator_prefix: slices are named `<prefix>-<count>`; None for a GPU.
        name_counts_cores: whether that count means TensorCores rather than chips.
        slice_sizes: numbers of chips of the slices that the provider offers.
        topologies: the topologies that libtpu 0.0.21 accepted, by number of chips.
        aliases: other names, such as the device names of JAX and CUDA.
    """

    name: str
    hbm_bytes: int
    usable_hbm_bytes: int | None = None
    bf16_flops: float | None = None
    clock: float | None = None
    matrix_unit: int | None = None
    hbm_bandwidth: float
    ici_bandwidth: float | None = None
    dcn_bandwidth: float | None = None
    cores: int | None = None
    devices_per_chip: int = 1
    pci_device: str | None = None
    accelerator_prefix: str | None = None
    name_counts_cores: bool = False
    slice_sizes: tuple[int, ...] = field(default=(), repr=False)
    topologies: Mapping[int, Topology] = field(default_factory=dict, compare=False, repr=False)
    price: Price | None = None
    aliases: tuple[str, ...] = ()

    def slice_name(self, chips: int) -> str:
        """Returns the provider's name for a slice of `chips` chips, such as "v5litepod-8" or "v4-32"."""
        return f"{self.accelerator_prefix}-{chips * self.named_per_chip}"

    @property
    def named_per_chip(self) -> int:
        """How much a chip adds to the number in a slice's name: its TensorCores, or 1."""
        return self.cores or 1 if self.name_counts_cores else 1


_TABLES = tomllib.loads(Path(__file__).with_name("chips.toml").read_text())

FREE_SLICES: Mapping[str, Sequence[str]] = _TABLES.pop("free")
"""Maps a notebook service to the slices that it offers for free."""
KAGGLE_HOURS_PER_WEEK = 20
KAGGLE_HOURS_PER_SESSION = 9
KAGGLE_OUTPUT_BYTES = 20e9
"""Limit of files that a notebook keeps in /kaggle/working (kaggle.com/docs/notebooks, "Technical Specifications")."""


def _chip(name: str, table: dict[str, Any]) -> Chip:
    """Makes a chip from its table in chips.toml; removes entries from the table."""
    sizes = [*table.pop("slice_sizes", []), *range(64, table.pop("largest_slice", 0) + 1, 64)]
    one_host, config, topologies = table.pop("chips_per_host", 0), table.pop("chip_config_name", None), {}
    for shape in table.pop("topologies", "").split():
        x, y, z = ([int(side) for side in shape.split("x")] + [1])[:3]
        bounds = (x, y, z) if x * y * z <= one_host else (2, 2, 1)
        topologies[x * y * z] = Topology(f"{name}:{shape}", bounds, config)
    price = Price(**table.pop("price")) if "price" in table else None
    aliases = tuple(table.pop("aliases"))
    return Chip(name=name, aliases=aliases, slice_sizes=tuple(sizes), topologies=topologies, price=price, **table)


CHIPS: Mapping[str, Chip] = MappingProxyType({name: _chip(name, table) for name, table in _TABLES.items()})
"""All chips by short name."""


def _plain(name: str) -> str:
    """Returns a name in lower case, with a space for any white space, "_" and "-"."""
    return re.sub(r"[\s_-]+", " ", name.strip().lower())


_BY_NAME = {_plain(name): chip for chip in CHIPS.values() for name in (chip.name, *chip.aliases)}


def chip(name: str) -> Chip:
    """Looks up a chip by name.

    Args:
        name: a name in `CHIPS`, a marketing name ("Trillium"), JAX's `device_kind` ("TPU v5 lite") or
            `torch.cuda.get_device_name()` ("NVIDIA H200"). Case, "-" and "_" don't matter.

    Raises:
        ValueError: unknown; has the nearest names. Variants of other speed (an H100 PCIe) are unknown on purpose.
    """
    match = _BY_NAME.get(_plain(name))
    if match is None:
        matches = difflib.get_close_matches(_plain(name), _BY_NAME, n=4, cutoff=0.5)
        near = dict.fromkeys(_BY_NAME[match].name for match in matches)
        hint = f"did you mean {' or '.join(near)}?" if near else "use one of the known names."
        raise ValueError(f"unknown chip {name!r}: {hint} Known: {', '.join(CHIPS)}.")
    return match


def parse_accelerator_type(name: str) -> tuple[Chip, int]:
    """Returns the chip and the number of chips of a slice name, such as "v4-32", "v5litepod-8", "v5e-8" or "v6e-256".

    Raises:
        ValueError: not a TPU slice name, an unknown chip, or no slice has that size; the text has the nearest names.
    """
    match = re.fullmatch(r"(.+?)[-_](\d+)", name.strip())
    if match is None:
        raise ValueError(f"{name!r} is not a TPU slice name: write <chip>-<count>, for example v5litepod-8 or v4-32.")
    kind, count = chip(match[1]), int(match[2])
    if kind.accelerator_prefix is None:
        raise ValueError(f"{name!r} is not a TPU slice name: {kind.name} is a GPU.")
    chips, rest = divmod(count, kind.named_per_chip)
    if rest or chips not in kind.slice_sizes:
        nearest = sorted(sorted(kind.slice_sizes, key=lambda size: abs(size * kind.named_per_chip - count))[:3])
        unit = f"TensorCores, {kind.cores} a chip" if kind.name_counts_cores else "chips"
        raise ValueError(
            f"there is no {name}: the number counts {unit}. Nearest: {', '.join(map(kind.slice_name, nearest))}."
        )
    return kind, chips
