"""Looks up TPUs, a few GPUs and TPU slices by name; chips.toml has their figures and prices, each with its source.

A slice name counts TensorCores for v4, v5p and v7x, but chips for v5e ("v5litepod-8") and v6e. PyTorch/XLA sees a v7x
chip as two devices (each core has half of the HBM), and a v4 or v5p chip as one ("megacore").
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Price:
    """A list price in US dollars per chip-hour, before taxes and any agreed discount.

    A TPU's price includes its virtual machine; a GPU's includes it where the catalogue lists it ("+" in the source).
    Spot prices move (the provider may change them daily), so treat `spot` as an order of magnitude.
    """

    on_demand: float
    spot: float | None
    source: str
    """Where and when it was read, from a copy of unknown date: the price is at least that old."""


@dataclass(frozen=True)
class Topology:
    """How JAX's compile-only TPU client is asked for a slice (`jax.experimental.topologies.get_topology_desc`)."""

    name: str
    """`topology_name`, for example "v5e:2x4"; the shape counts chips."""
    chips_per_host_bounds: tuple[int, int, int]
    chip_config_name: str | None = None
    """"megacore" where it must be named to get one device a chip (v4), otherwise None."""
    slices: int = 1
    """Equal slices, which the data center network joins."""

    @property
    def chips(self) -> int:
        """Chips in all slices: the product of the shape, for each."""
        return self.slices * math.prod(int(side) for side in self.name.split(":")[1].split("x"))

    @property
    def chips_per_host(self) -> int:
        """Chips of a host."""
        return math.prod(self.chips_per_host_bounds)

    @property
    def hosts(self) -> int:
        """Hosts of all slices."""
        return self.chips // self.chips_per_host

    def __str__(self) -> str:
        return self.name if self.slices == 1 else f"{self.slices}x{self.name}"


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator chip. All figures are per chip, except the two that are per device (`devices_per_chip`)."""

    name: str
    hbm_bytes: int
    """Memory as published, read as GiB."""
    usable_hbm_bytes: int | None = None
    """Per device: the largest program arguments that libtpu 0.0.21 accepted; for a GPU, CUDA's total memory."""
    vector_memory_bytes: int | None = None
    """Per device: the most that libtpu 0.0.21 gave to arrays in memory on the chip; on v4 its common memory."""
    bf16_flops: float | None = None
    """Peak dense bf16 FLOP/s: not the peaks for int8 or fp8 (v5e 393, v6e 1836, v7x 4614) or NVIDIA's with sparsity."""
    hbm_bandwidth: float
    """Bytes/s."""
    ici_bandwidth: float | None = None
    """Bytes/s between chips, over all links and both directions (NVLink for GPUs; None for those that have none)."""
    dcn_bandwidth: float | None = None
    """Bytes/s that a chip can send to other slices over the data center network, all chips of a host at once."""
    watts: float | None = None
    """Mean power in use; for a GPU its rated limit, which is more."""
    cores: int | None = None
    """TensorCores of a TPU chip."""
    devices_per_chip: int = 1
    """Devices that the framework sees for a chip."""
    accelerator_prefix: str | None = None
    """Slices are named `<prefix>-<count>`."""
    name_counts_cores: bool = False
    """Whether that count is of TensorCores, not of chips."""
    slice_sizes: tuple[int, ...] = field(default=(), repr=False)
    """Chips of the slices that can be asked for by name, from the price catalogue, xpk and Google's pages."""
    topologies: Mapping[int, Topology] = field(default_factory=dict, compare=False, repr=False)
    """Chips -> topology that libtpu 0.0.21 accepted. It refuses v7x ("Invalid TPU external name"), so that has none."""
    price: Price | None = None
    aliases: tuple[str, ...] = ()
    """Other names, among them what JAX and CUDA call the device."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Field name -> the source of its figure, and the sources that differ."""

    def slice_name(self, chips: int) -> str:
        """The provider's name for a slice of so many chips, such as "v5litepod-8" or "v4-32"."""
        unit = (self.cores or 1) if self.name_counts_cores else 1
        return f"{self.accelerator_prefix}-{chips * unit}"


def _read_chips() -> tuple[Chip, ...]:
    tables = tomllib.loads(Path(__file__).with_name("chips.toml").read_text())
    references = tables.pop("references")
    return tuple(_chip(name, table, references) for name, table in tables.items())


def _chip(name: str, table: dict[str, Any], references: dict[str, str]) -> Chip:
    sizes, topologies = list(table.pop("slice_sizes", [])), {}
    sizes += range(64, table.pop("largest_slice", 0) + 1, 64)
    one_host, config = table.pop("chips_per_host", 0), table.pop("chip_config_name", None)
    for shape in table.pop("topologies", "").split():
        x, y, z = ([int(side) for side in shape.split("x")] + [1])[:3]
        bounds = (x, y, z) if x * y * z <= one_host else (2, 2, 1)
        topologies[x * y * z] = Topology(f"{name}:{shape}", bounds, config)
    sources = {
        field: text.format_map(references) for fields, text in table.pop("sources").items() for field in fields.split()
    }
    if price := table.pop("price", None):
        price = Price(**price | {"source": price["source"].format_map(references)})
    if (on_chip := table.pop("vector_memory_mib", None)) is not None:
        table["vector_memory_bytes"] = on_chip * MIB
    return Chip(
        name=name, hbm_bytes=table.pop("hbm_gib") * GIB, aliases=tuple(table.pop("aliases")), price=price,
        slice_sizes=tuple(sizes), topologies=MappingProxyType(topologies), sources=MappingProxyType(sources), **table,
    )  # fmt: skip


CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _read_chips()})
"""Every chip by its short name."""

FREE_SLICES: Mapping[str, tuple[str, ...]] = {"Kaggle": ("v5litepod-8",), "Colab": ("v5litepod-1", "v6e-1")}
"""What notebook services give away, by users' reports (read 2026-11-21). It changes; Kaggle's queue is often long."""
KAGGLE_HOURS_PER_WEEK = 20
KAGGLE_HOURS_PER_SESSION = 9
KAGGLE_OUTPUT_BYTES = 20e9
"""What a notebook may keep in /kaggle/working (kaggle.com/docs/notebooks, "Technical Specifications")."""


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.strip().lower())


_BY_NAME = {_plain(name): chip for chip in CHIPS.values() for name in (chip.name, *chip.aliases)}


def chip(name: str) -> Chip:
    """Looks a chip up.

    Args:
        name: a name in `CHIPS`, a marketing name ("Trillium"), or what the framework calls the device: JAX's
            `device_kind` ("TPU v5 lite"), `torch.cuda.get_device_name()` ("NVIDIA H200"). Case, "-", "_" don't matter.

    Raises:
        ValueError: unknown; names the nearest. Variants that differ in speed (an H100 PCIe) are unknown on purpose.
    """
    found = _BY_NAME.get(_plain(name))
    if found is None:
        matches = difflib.get_close_matches(_plain(name), _BY_NAME, n=4, cutoff=0.5)
        near = dict.fromkeys(_BY_NAME[match].name for match in matches)
        hint = f"did you mean {' or '.join(near)}?" if near else "use one of the known names."
        raise ValueError(f"unknown chip {name!r}: {hint} Known: {', '.join(CHIPS)}.")
    return found


def parse_accelerator_type(name: str) -> tuple[Chip, int]:
    """Reads a TPU slice name, such as "v4-32", "v5litepod-8" (also "v5e-8"), "v6e-256": its chip and number of chips.

    Raises:
        ValueError: not a TPU slice name, or no slice has that size; says what the number counts and the nearest names.
    """
    match = re.fullmatch(r"(.+?)[-_](\d+)", name.strip())
    if match is None:
        raise ValueError(f"{name!r} is not a TPU slice name: write <chip>-<count>, for example v5litepod-8 or v4-32.")
    kind, count = chip(match[1]), int(match[2])
    if kind.accelerator_prefix is None:
        raise ValueError(f"{name!r} is not a TPU slice name: {kind.name} is a GPU.")
    per_chip = (kind.cores or 1) if kind.name_counts_cores else 1
    chips, rest = divmod(count, per_chip)
    if rest or chips not in kind.slice_sizes:
        nearest = sorted(sorted(kind.slice_sizes, key=lambda size: abs(size * per_chip - count))[:3])
        unit = f"TensorCores, {per_chip} a chip" if kind.name_counts_cores else "chips"
        raise ValueError(
            f"there is no {name}: the number counts {unit}. Nearest: {', '.join(map(kind.slice_name, nearest))}."
        )
    return kind, chips
