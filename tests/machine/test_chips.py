import json
import re

import pytest

from tests.support.child_processes import REPOSITORY, run_python
from tpu_kit.machine.chips import CHIPS, FREE_SLICES, GIB, KAGGLE_HOURS_PER_WEEK, Chip, chip, parse_accelerator_type
from tpu_kit.machine.slices import find_slice, find_topology

TPUS = [c for c in CHIPS.values() if c.accelerator_prefix is not None]


def test_every_figure_has_a_source_and_no_source_lacks_its_figure() -> None:
    """The comments of a chip's table name figures and their sources."""
    text = (REPOSITORY / "tpu_kit/machine/chips.toml").read_text()
    for table in re.split(r"^(?=\[)", text, flags=re.MULTILINE)[2:]:
        figures = set(
            re.findall(r"^(\w+(?:bytes|flops|bandwidth)|cores|clock|matrix_unit) = ", table, flags=re.MULTILINE)
        )
        sources = {name for names in re.findall(r"^# ([\w ]+): .", table, flags=re.MULTILINE) for name in names.split()}
        assert sources - {"devices_per_chip"} == figures, table
        where = "us-central" if "accelerator_prefix" in table else "us-"  # as `pod` prints it
        assert "price = " not in table or f"{{catalog}} {where}" in table
    assert re.search(r"{catalog}: .* read \d{4}-\d\d-\d\d", text)


@pytest.mark.parametrize("c", CHIPS.values(), ids=CHIPS)
def test_figures_have_the_right_order_of_magnitude(c: Chip):
    # Wide bands: they catch a slipped unit (GB for GiB/s, bits for bytes, TFLOP/s for FLOP/s), not a wrong digit.
    assert 16 * GIB <= c.hbm_bytes <= 192 * GIB
    assert 3e11 <= c.hbm_bandwidth <= 8e12
    assert c.bf16_flops is None or 4e13 <= c.bf16_flops <= 3e15
    assert c.ici_bandwidth is None or 4e11 <= c.ici_bandwidth <= 1.2e12
    if c.usable_hbm_bytes is not None:
        per_device = c.hbm_bytes // c.devices_per_chip
        assert 0.9 * per_device < c.usable_hbm_bytes <= per_device


@pytest.mark.parametrize("c", CHIPS.values(), ids=CHIPS)
def test_prices_have_the_right_order_of_magnitude(c: Chip):
    if c.price is None:
        assert c.name == "v7x"
        return
    assert 0.1 < c.price.on_demand < 15
    assert c.price.spot is not None and 0 < c.price.spot < c.price.on_demand


def test_speed_grows_from_one_tpu_to_the_next():
    # v5e follows v4 but is the smaller chip of its generation.
    flops = [CHIPS[name].bf16_flops for name in ("v5e", "v4", "v5p", "v6e", "v7x")]
    assert flops == sorted(flops)


@pytest.mark.parametrize(
    ("name", "canonical", "chips", "devices", "topology"),
    [
        ("v4-8", "v4-8", 4, 4, "v4:2x2x1"),
        ("v4-32", "v4-32", 16, 16, "v4:2x2x4"),
        ("v5litepod-1", "v5litepod-1", 1, 1, "v5e:1x1"),
        ("v5litepod-8", "v5litepod-8", 8, 8, "v5e:2x4"),
        ("v5e-8", "v5litepod-8", 8, 8, "v5e:2x4"),
        ("v5litepod-16", "v5litepod-16", 16, 16, "v5e:4x4"),
        ("V5P-8", "v5p-8", 4, 4, "v5p:2x2x1"),
        ("v5p-12288", "v5p-12288", 6144, 6144, None),
        ("v6e-1", "v6e-1", 1, 1, "v6e:1x1"),
        ("v6e-256", "v6e-256", 256, 256, "v6e:16x16"),
        ("tpu7x-8", "tpu7x-8", 4, 8, None),
        ("tpu7x-2", "tpu7x-2", 1, 2, None),
        ("2xv5litepod-64", "2xv5litepod-64", 128, 128, "2xv5e:8x8"),
        ("4xv5e:4x4", "4xv5litepod-16", 64, 64, "4xv5e:4x4"),
        ("2xv4-32", "2xv4-32", 32, 32, "2xv4:2x2x4"),
    ],
)
def test_slice_names(name, canonical, chips, devices, topology):
    found = find_slice(name, None)
    assert (found.name, found.chips, found.replicas, found.topology) == (canonical, chips, devices, topology)


def test_slices_have_hosts_and_a_network() -> None:
    hosts = {name: find_topology(name, 1)[1].hosts for name in ("v5e:2x4", "v5e:8x8", "2xv5e:8x8", "3xv4:2x2x4")}
    assert hosts == {"v5e:2x4": 1, "v5e:8x8": 16, "2xv5e:8x8": 32, "3xv4:2x2x4": 12}
    assert {c.name: c.dcn_bandwidth for c in TPUS if c.dcn_bandwidth} == {
        "v5e": 6.4e12 / 8 / 256, "v5p": 50e9 / 8, "v6e": 25.6e12 / 8 / 256, "v7x": 100e9 / 8
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"launch.num_replicas=20: 2xv5litepod-8 has 16 devices; use 1 to that many"):
        find_slice("2xv5litepod-8", 20)
    with pytest.raises(ValueError, match=r"'0xv5e-8' has 0 slices; write 2xv5e-8 for two slices"):
        find_slice("0xv5e-8", None)


@pytest.mark.parametrize("c", TPUS, ids=lambda c: c.name)
def test_every_slice_size_can_be_asked_for(c: Chip):
    assert all(parse_accelerator_type(c.slice_name(size)) == (c, size) for size in c.slice_sizes)


@pytest.mark.parametrize("c", TPUS, ids=lambda c: c.name)
def test_topologies_hold_as_many_chips_as_they_are_listed_for(c: Chip):
    assert bool(c.topologies) == (c.name != "v7x")
    assert set(c.topologies) <= set(c.slice_sizes)
    for chips, topology in c.topologies.items():
        assert topology.chips == chips
        assert topology.name.startswith(f"{c.name}:")
        sides = ([int(side) for side in topology.name.split(":")[1].split("x")] + [1])[:3]
        assert all(side % bound == 0 for side, bound in zip(sides, topology.chips_per_host_bounds, strict=True))
    if c.name == "v5e":
        assert c.topologies[8].chips_per_host_bounds == (2, 4, 1)
        assert c.topologies[16].chips_per_host_bounds == (2, 2, 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v5e", "v5e"),
        (" V5E ", "v5e"),
        ("v5litepod", "v5e"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("Trillium", "v6e"),
        ("TPU v6 lite", "v6e"),
        ("tpu7x", "v7x"),
        ("Ironwood", "v7x"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("a100_40gb", "a100-40gb"),
        ("Tesla T4", "t4"),
    ],
)
def test_chips_are_found_by_the_names_people_and_frameworks_use(name, expected):
    assert chip(name) is CHIPS[expected]


def test_no_two_chips_share_a_name():
    names = [name.lower() for c in CHIPS.values() for name in {c.name.lower(), *map(str.lower, c.aliases)}]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5", r"unknown chip 'v5': did you mean v5\w( or v\w+)*\? Known: v4, v5e, .*h200\."),
        ("trilium", r"did you mean v6e\?"),
        ("a100", r"did you mean .*a100-40gb"),
        ("quantum", r"unknown chip 'quantum': use one of the known names\. Known: v4"),
        ("NVIDIA H100 PCIe", r"did you mean .*h100"),  # slower than the SXM card, so not silently taken for it
    ],
)
def test_unknown_chips_name_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        chip(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v4-31", r"there is no v4-31: the number counts TensorCores, 2 a chip\. Nearest: v4-8, v4-16, v4-32\."),
        ("v4-4", r"there is no v4-4: .* Nearest: v4-8, v4-16, v4-32\."),
        ("v5litepod-2", r"the number counts chips\. Nearest: v5litepod-1, v5litepod-4, v5litepod-8\."),
        ("v6e-512", r"there is no v6e-512: .* v6e-256\."),
        ("v4", r"'v4' is not a TPU slice name: write <chip>-<count>"),
        ("h100-8", r"'h100-8' is not a TPU slice name: h100 is a GPU\."),
        ("v9-8", r"unknown chip 'v9'"),
        ("v4-0", r"there is no v4-0"),
    ],
)
def test_bad_slice_names_are_explained(name, message):
    with pytest.raises(ValueError, match=message):
        parse_accelerator_type(name)


def test_free_slices_exist():
    assert {name for names in FREE_SLICES.values() for name in names} == {"v5litepod-8", "v5litepod-1", "v6e-1"}
    assert all(parse_accelerator_type(name)[1] <= 8 for names in FREE_SLICES.values() for name in names)
    assert KAGGLE_HOURS_PER_WEEK == 20


def test_importing_needs_no_torch_and_no_other_module_of_ours():
    """Except modules that any import of the kit loads: the rooms' docstrings and the registry of names."""
    code = (
        "import sys, tpu_kit.machine.chips\n"
        "modules = (m for m, module in sys.modules.items() if not hasattr(module, '__path__'))\n"
        "print(*(m for m in modules if m.startswith(('torch', 'tpu_kit.'))))"
    )
    found = ["tpu_kit.config.registry", "tpu_kit.machine.chips", "tpu_kit.machine.surroundings"]
    assert sorted(run_python(code).stdout.split()) == found


ASK_LIBTPU = """
import json, sys
from jax.experimental import topologies
for name, bounds, config in json.loads(sys.argv[1]):
    options = {"chip_config_name": config} if config else {}
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=name, chips_per_host_bounds=bounds, **options
    ).devices
    print(json.dumps([name, len(devices), devices[0].device_kind]))
"""


def test_the_compiler_knows_the_topologies_and_agrees_on_devices():
    pytest.importorskip("libtpu")
    asked = [(c, t) for c in TPUS for t in c.topologies.values()]
    env = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    request = json.dumps([(t.name, t.chips_per_host_bounds, t.chip_config_name) for _, t in asked])
    lines = run_python(["-c", ASK_LIBTPU, request], env=env).stdout.splitlines()
    for (c, topology), line in zip(asked, lines, strict=True):
        name, devices, kind = json.loads(line)
        assert (name, devices) == (topology.name, topology.chips * c.devices_per_chip)
        assert chip(kind) is c
