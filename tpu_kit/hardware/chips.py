"""Figures of each TPU and of a few GPUs, each with its source: memory, speed, names of slices, list prices.

A figure without a source is None; `Chip.sources` names, per field, the source of a figure and the sources that differ.
Today these are None: power of v5e, v5p, v6e and v7x; usable memory, topologies and price of v7x; bf16 speed of the T4
(it has no bf16 units); usable memory of most GPUs.

Things that guides often get wrong:

* A slice name counts TensorCores for v4, v5p and v7x, but chips for v5e ("v5litepod-8") and v6e. So v4-32 is 16
  chips on 4 hosts, v5p-8 is 4 chips, and v5litepod-8 and v6e-8 are 8 chips.
* PyTorch/XLA sees a v7x chip as two devices (each core has half of the HBM), a v4 or v5p chip as one ("megacore").
* 393 TOP/s (v5e), 1836 TOP/s (v6e) and 4614 TFLOP/s (v7x) are int8 or fp8 peaks, not bf16; NVIDIA prints peaks "with
  sparsity", twice what dense training can reach.
* Vendors write GB for GiB: a "16 GB" v5e has 16 GiB, of which a program gets 15.75.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

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
    bf16_flops: float | None
    """Peak dense bf16 FLOP/s."""
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


def _sources(by_fields: dict[str, str]) -> Mapping[str, str]:
    return MappingProxyType({name: text for names, text in by_fields.items() for name in names.split()})


def _topologies(chip: str, shapes: str, one_host: int = 4, config: str | None = None) -> Mapping[int, Topology]:
    found = {}
    for shape in shapes.split():
        sides = [int(side) for side in shape.split("x")] + [1]
        bounds = (sides[0], sides[1], sides[2]) if math.prod(sides) <= one_host else (2, 2, 1)
        topology = Topology(f"{chip}:{shape}", bounds, config)
        found[topology.chips] = topology
    return MappingProxyType(found)


_DOCS = "https://docs.cloud.google.com/tpu/docs/"
_DCN = f"{_DOCS}tpu7x: data center network bandwidth per chip"
_TPU7X = _DOCS + "tpu7x"
_JAX = "jax-ml/jax jax/_src/pallas/mosaic/tpu_info.py (commit 04c63627260d)"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus/ (2025-02)"
_XPK = "AI-Hypercomputer/xpk src/xpk/core/system_characteristics.py (commit 02b0c0928aee)"
_LIBTPU = "measured without a TPU: libtpu 0.0.21, compile-only client"
_CATALOG = "skypilot-org/skypilot-catalog catalogs/v8/gcp/vms.csv (commit 006059e0f18a, read 2026-11-21), row "
_POWER = "Jouppi et al. 2023, arXiv:2304.01433, table 4: mean of production workloads"
_RATED = "the board power that NVIDIA's datasheet names, a limit"
_A100 = "https://glennklockwood.com/garden/processors/A100, after NVIDIA's A100 datasheet"
_H100 = "https://glennklockwood.com/garden/processors/h100, after NVIDIA's H100 datasheet (SXM5)"
_H200 = "https://huggingface.co/datasets/devidasmishra/ai-inference-hardware-economics-2026"
_L4 = "https://jeffcarp.github.io/ml-hyperpolyglot/accelerators.html"
_T4 = "https://topcpu.net/en/gpu-c/l4-vs-tesla-t4"
_FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8"

_CHIPS = (
    Chip(
        name="v4", aliases=("TPU v4",), hbm_bytes=32 * GIB, usable_hbm_bytes=33014218752,
        bf16_flops=275e12, hbm_bandwidth=1200e9, ici_bandwidth=540e9, cores=2, vector_memory_bytes=128 * MIB,
        accelerator_prefix="v4", name_counts_cores=True,
        slice_sizes=(4, 8, 16, 32, *range(64, 4097, 64)), topologies=_topologies("v4", _CUBES, config="megacore"),
        price=Price(12.88 / 4, 3.686 / 4, _CATALOG + "us-central2 tpu-v4-8, over 4 chips"),
        watts=170, sources=_sources({
            "watts": _POWER,
            "hbm_bytes bf16_flops hbm_bandwidth": f"{_DOCS}v4; {_JAX} says 1.23e12 bytes/s",
            "usable_hbm_bytes": f"{_LIBTPU}, megacore: limit 30.75G, reserved 1.25G",
            "vector_memory_bytes": f"{_LIBTPU}: buffer assignment of SmolLM2-1.7B in full",
            "ici_bandwidth": f"{_BOOK}: 6 links of 90e9, both directions; its links of v5e to v6e are 10 % low",
            "cores devices_per_chip": f"{_DOCS}v4; {_XPK}; {_LIBTPU}: v4:2x2x1 is 4 devices"})),
    Chip(
        name="v5e", aliases=("TPU v5 lite", "TPU v5e", "v5litepod", "v5lite"), hbm_bytes=16 * GIB,
        usable_hbm_bytes=16909238272, bf16_flops=197e12, hbm_bandwidth=819e9,
        ici_bandwidth=400e9, dcn_bandwidth=3.125e9, cores=1, accelerator_prefix="v5litepod",
        vector_memory_bytes=112 * MIB,
        slice_sizes=(1, 4, 8, 16, 32, 64, 128, 256), topologies=_topologies("v5e", _FLAT, one_host=8),
        price=Price(1.20, 0.24493, _CATALOG + "us-central1 tpu-v5litepod-1 (spot is 0.48 in us-west4)"),
        sources=_sources({
            "hbm_bytes cores": f"{_DOCS}v5e",
            "usable_hbm_bytes": f"{_LIBTPU}: limit 15.75G, reserved 258M",
            "vector_memory_bytes": f"{_LIBTPU}: buffer assignment of SmolLM2-360M in full",
            "bf16_flops": f"{_DOCS}v5e (393 TOP/s is int8); {_JAX} agrees",
            "hbm_bandwidth": f"{_DOCS}v5e: 819 GB/s, later 800 GiB/s; {_JAX} says 820e9; {_BOOK} 8.1e11",
            "ici_bandwidth": f"{_DOCS}v5e: 400 GB/s both ways, earlier 1600 Gbit/s one way; {_BOOK} makes it 360e9",
            "dcn_bandwidth": f"{_DOCS}v6e: 6.4 Tbit/s a pod of 256 chips, 2 x 100 Gbit/s a host of 8",
            "devices_per_chip": f"{_LIBTPU}; {_XPK}; {_DOCS}v5e: machines of 1, 4 or 8 chips"})),
    Chip(
        name="v5p", aliases=("TPU v5", "TPU v5p"), hbm_bytes=96 * GIB, usable_hbm_bytes=102802882560,
        bf16_flops=459e12, hbm_bandwidth=2765e9, ici_bandwidth=1200e9, cores=2, vector_memory_bytes=46 * MIB,
        dcn_bandwidth=6.25e9,
        accelerator_prefix="v5p", name_counts_cores=True,
        slice_sizes=(4, 8, 16, 32, *range(64, 6145, 64)), topologies=_topologies("v5p", _CUBES),
        price=Price(4.20, 0.83570, _CATALOG + "us-central1 tpu-v5p-12288, over 6144 chips (spot 1.68 in us-east5)"),
        sources=_sources({
            "hbm_bytes": f"{_JAX}: 103e9; {_BOOK}: 96 GB; {_DOCS}v5p says 95, less than the compiler gives a program",
            "usable_hbm_bytes": f"{_LIBTPU}: limit 95.74G, reserved 263M",
            "vector_memory_bytes": f"{_LIBTPU}: buffer assignment of TinyLlama-1.1B in full (Llama-3.2-1B: 44)",
            "bf16_flops hbm_bandwidth": f"{_DOCS}v5p; {_JAX} agrees on FLOP/s, says 2.46e12 bytes/s",
            "ici_bandwidth": f"{_TPU7X}: 1200 GB/s both ways; {_DOCS}v5p: 4800 Gbit/s one way; {_BOOK} makes it 1080e9",
            "dcn_bandwidth": f"{_DCN}, 50 Gbit/s",
            "cores devices_per_chip": f"{_DOCS}v5p; {_XPK}; {_LIBTPU}: v5p:2x2x1 is 4 devices"})),
    Chip(
        name="v6e", aliases=("TPU v6 lite", "TPU v6e", "trillium"), hbm_bytes=32 * GIB,
        usable_hbm_bytes=33550073856, bf16_flops=918e12, hbm_bandwidth=1638e9,
        ici_bandwidth=800e9, dcn_bandwidth=12.5e9, cores=1, accelerator_prefix="v6e",
        slice_sizes=(1, 4, 8, 16, 32, 64, 128, 256), topologies=_topologies("v6e", _FLAT, one_host=8),
        price=Price(2.70, 0.54421, _CATALOG + "us-central1 tpu-v6e-1 (spot is 1.215 in us-east5)"),
        sources=_sources({
            "hbm_bytes cores": f"{_DOCS}v6e",
            "usable_hbm_bytes": f"{_LIBTPU}: limit 31.25G, reserved 260M",
            "bf16_flops": f"{_DOCS}v6e (1836 TOP/s is int8); {_JAX} and {_BOOK} say 920e12",
            "hbm_bandwidth": f"{_TPU7X}; {_DOCS}v6e: 1640, later 1600 GB/s",
            "dcn_bandwidth": f"{_DCN}, 100 Gbit/s; {_DOCS}v6e: 25.6 Tbit/s a pod of 256 chips",
            "ici_bandwidth": f"{_DOCS}v6e: 800 GB/s both ways; earlier 3584, then 3200 Gbit/s one way",
            "devices_per_chip": f"{_LIBTPU}; {_XPK}; {_DOCS}v6e: 16 chips are 4 VMs on 2 hosts"})),
    Chip(
        name="v7x", aliases=("tpu7x", "TPU v7x", "TPU v7", "ironwood"), hbm_bytes=192 * GIB,
        bf16_flops=2307e12, hbm_bandwidth=7380e9, ici_bandwidth=1200e9, cores=2, devices_per_chip=2,
        dcn_bandwidth=12.5e9, accelerator_prefix="tpu7x", name_counts_cores=True,
        slice_sizes=(1, 4, 8, 16, 32, *range(64, 9217, 64)),
        sources=_sources({
            "hbm_bytes ici_bandwidth cores bf16_flops": f"{_TPU7X} (4614 TFLOP/s is fp8)",
            "dcn_bandwidth": f"{_DCN}, 100 Gbit/s",
            "hbm_bandwidth": f"{_TPU7X}; https://aiwiki.ai/wiki/tpu_ironwood has the announced 7.37e12",
            "devices_per_chip": f"{_TPU7X}: two chiplets, two devices (JAX; PyTorch/XLA was not tried)"})),
    Chip(
        name="t4", aliases=("Tesla T4", "NVIDIA T4"), hbm_bytes=16 * GIB, bf16_flops=None, hbm_bandwidth=320e9,
        price=Price(0.35, 0.175, _CATALOG + "us-central1 T4 x4, over 4"),
        watts=70, sources=_sources({
            "watts": _RATED,
            "hbm_bytes hbm_bandwidth": f"{_T4} (fp16 is 65 TFLOP/s; Turing has no bf16 units)"})),
    Chip(
        name="l4", aliases=("NVIDIA L4",), hbm_bytes=24 * GIB, bf16_flops=121e12, hbm_bandwidth=300e9,
        price=Price(0.56004, 0.2231, _CATALOG + "us-central1 L4"),
        watts=72, sources=_sources({
            "watts": _RATED,
            "hbm_bytes bf16_flops hbm_bandwidth": f"{_L4} (often quoted as 242, with sparsity); {_T4}"})),
    Chip(
        name="a100-40gb", aliases=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"), hbm_bytes=40 * GIB,
        usable_hbm_bytes=42405855232, bf16_flops=312e12, hbm_bandwidth=1555e9, ici_bandwidth=600e9,
        price=Price(3.67339, 1.80385, _CATALOG + "us-central1 A100 + a2-highgpu-1g"),
        watts=400, sources=_sources({
            "watts": _RATED,
            "hbm_bytes bf16_flops hbm_bandwidth ici_bandwidth": _A100,
            "usable_hbm_bytes": "deviceQuery output at https://upb-pc2.atlassian.net/wiki/spaces/PC2DOK/pages/1900609"})),
    Chip(
        name="a100-80gb", aliases=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), hbm_bytes=80 * GIB,
        bf16_flops=312e12, hbm_bandwidth=2039e9, ici_bandwidth=600e9,
        price=Price(5.52382, 1.64753, _CATALOG + "us-east5 A100-80GB + a2-ultragpu-1g; its us-central1 row is "
                    "below its spot price, so it was not used"),
        watts=400, sources=_sources({
            "watts": _RATED,
            "hbm_bytes bf16_flops hbm_bandwidth ici_bandwidth": f"{_A100}; the PCIe card has 1935e9"})),
    Chip(
        name="h100", aliases=("NVIDIA H100 80GB HBM3", "H100 SXM"), hbm_bytes=80 * GIB,
        bf16_flops=989e12, hbm_bandwidth=3350e9, ici_bandwidth=900e9,
        price=Price(10.97906, 2.50556, _CATALOG + "us-east4 H100 + a3-highgpu-1g; its us-central1 row has 4.20 for "
                    "the GPU, which looks like another kind of contract"),
        watts=700, sources=_sources({
            "watts": _RATED,
            "hbm_bytes bf16_flops hbm_bandwidth ici_bandwidth": f"{_H100} (1979 is with sparsity)"})),
    Chip(
        name="h200", aliases=("NVIDIA H200",), hbm_bytes=141 * GIB, bf16_flops=989e12, hbm_bandwidth=4800e9,
        ici_bandwidth=900e9, price=Price(74.49392 / 8, 37.2472 / 8, _CATALOG + "us-central1 H200 x8, over 8; its "
                                         "us-east5 row has 36.60"),
        watts=700, sources=_sources({
            "watts": _RATED,
            "hbm_bytes ici_bandwidth": "mlcommons/inference_results_v4.1, closed/NVIDIA/systems/H200-SXM-141GBx8_TRT*",
            "bf16_flops hbm_bandwidth": f"{_H200}; {_H100} calls it an H100 with more HBM"})),
)  # fmt: skip

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _CHIPS})
"""Every chip by its short name."""

FREE_SLICES: Mapping[str, tuple[str, ...]] = {"Kaggle": ("v5litepod-8",), "Colab": ("v5litepod-1", "v6e-1")}
"""What notebook services give away, by users' reports (read 2026-11-21). It changes; Kaggle's queue is often long."""
KAGGLE_HOURS_PER_WEEK = 20
KAGGLE_HOURS_PER_SESSION = 9
KAGGLE_OUTPUT_BYTES = 20e9
"""What a notebook may keep in /kaggle/working (kaggle.com/docs/notebooks, "Technical Specifications")."""


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.strip().lower())


_BY_NAME = {_plain(name): chip for chip in _CHIPS for name in (chip.name, *chip.aliases)}


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
