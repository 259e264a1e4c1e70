"""Lowers traced functions to StableHLO without a TPU, although TorchTPU's kernels and collectives need a device.

libtpu temporarily makes a PJRT client for a topology instead of chips. The client describes its devices and runs
nothing. For several replicas on such devices, this process alone forms a process group "tpu_dist".
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

PJRT_MINOR = 90
"""The minor version of PJRT's C API that the client reports; later functions are hidden."""

FUNCTIONS = {
    "Plugin_Initialize": 3, "Client_Create": 10, "Client_PlatformName": 12, "Client_PlatformVersion": 14,
    "Client_Devices": 15, "Client_AddressableDevices": 16, "Client_AddressableMemories": 19,
    "Device_GetDescription": 29, "Device_AddressableMemories": 32, "Memory_AddressableByDevices": 39,
    "TopologyDescription_Create": 82, "TopologyDescription_GetDeviceDescriptions": 86,
    "Client_TopologyDescription": 95,
}  # fmt: skip
"""Indices of functions in the table `PJRT_Api`, which has `COUNT` functions in that version."""
COUNT = 128

_HEAD = 40  # bytes before the functions: size and extensions of the table; size, extensions and numbers of the version
_WORD, _STRING, _LONGS = 8, 0, 2  # bytes of a field; types of options
_Fields = ctypes.POINTER(ctypes.c_uint64)  # a call's structure: its size, extensions, the object, then results
_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, _Fields)


@contextlib.contextmanager
def topology_as_device(name: str, bounds: Sequence[int], chip_config: str | None = None) -> Iterator[torch.device]:
    """Context manager that yields TorchTPU's device "tpu:0", which stands for the first device of a topology.

    Programs can be traced and lowered on it, but not run. The process must not have opened a device. Raises
    AssertionError if libtpu refuses the topology.

    Args:
        name: name of the topology, such as "v5e:2x2".
        bounds: chips of a host along each axis, such as (2, 2, 1).
        chip_config: `machine.chips.Topology.chip_config_name`; None for the default.
    """
    import libtpu

    plugin = ctypes.CDLL(libtpu.get_library_path())
    plugin.GetPjrtApi.restype = ctypes.c_void_p
    table = plugin.GetPjrtApi()
    size = ctypes.c_uint64.from_address(table).value
    before, kept = ctypes.string_at(table, size), list[Any]()  # objects that libtpu reads
    _make_writable(table, size)
    ctypes.c_uint64.from_address(table).value = _HEAD + COUNT * _WORD
    ctypes.c_int.from_address(table + _HEAD - 4).value = PJRT_MINOR

    def entry(function: str) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(table + _HEAD + FUNCTIONS[function] * _WORD)

    def words(*values: int) -> int:
        kept.append((ctypes.c_uint64 * len(values))(*values))
        return ctypes.addressof(kept[-1])

    def text(value: str) -> tuple[int, int]:
        kept.append(ctypes.create_string_buffer(value.encode()))
        return ctypes.addressof(kept[-1]), len(value)

    def ask(function: str, *given: int, results: int = 0) -> list[int]:
        fields = (ctypes.c_uint64 * (2 + len(given) + results))(0, 0, *given)
        fields[0] = ctypes.sizeof(fields)
        assert not _Function(entry(function).value)(fields), f"libtpu refuses {function} for {name}"
        return list(fields[2 + len(given) :])

    def answer(function: str, *values: int, at: int = 3) -> None:
        respond(function, lambda _: values, at)

    def respond(function: str, results: Callable[[int], Sequence[int]], at: int = 3) -> None:
        def run(fields: Any) -> None:
            for number, value in enumerate(results(fields[2])):
                fields[at + number] = value

        kept.append(_Function(run))
        entry(function).value = ctypes.cast(kept[-1], ctypes.c_void_p).value or 0

    ask("Plugin_Initialize")
    options = [7 * _WORD, 0, *text("chips_per_host_bounds"), _LONGS, words(*bounds), len(bounds)]
    options += [7 * _WORD, 0, *text("chip_config_name"), _STRING, *text(chip_config)] if chip_config else []
    (topology,) = ask("TopologyDescription_Create", *text(name), words(*options), len(options) // 7, results=1)
    start, count = ask("TopologyDescription_GetDeviceDescriptions", topology, results=2)
    devices = {words(0): ctypes.c_uint64.from_address(start + number * _WORD).value for number in range(count)}
    client, memories, listed = words(0), words(words(0)), words(*devices)
    answer("Client_Create", client, at=8)
    answer("Client_PlatformName", *text("tpu"))
    answer("Client_PlatformVersion", *text("a topology"))
    answer("Client_TopologyDescription", topology)
    answer("Client_Devices", listed, count)
    for owner in ("Client_AddressableDevices", "Memory_AddressableByDevices"):
        answer(owner, listed, 1)  # the first device belongs to this process
    for owner in ("Client_AddressableMemories", "Device_AddressableMemories"):
        answer(owner, memories, 1)
    respond("Device_GetDescription", lambda device: [devices[device]])
    try:
        import torch_tpu._loader as loader

        loader._init_device("tpu")  # the first tensor makes the client
        yield torch.device("tpu", 0)
    finally:
        ctypes.memmove(table, before, size)


def _make_writable(start: int, size: int) -> None:
    """Makes the pages of `size` bytes from the address `start` on writable."""
    page = os.sysconf("SC_PAGESIZE")
    first = start // page * page
    read_and_write = 1 | 2  # PROT_READ, PROT_WRITE
    length = ctypes.c_size_t(start + size - first)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(first), length, read_and_write) == 0, "libtpu's table is locked"


def lower(graph: torch.fx.GraphModule, example: Sequence[torch.Tensor]) -> str:
    """Lowers a traced function within `topology_as_device`; returns the text of the StableHLO module.

    The module is the same as in TorchTPU's compiler, except for random integers, whose state is on a chip: they become
    1. `graph` itself is changed in the same way.

    Args:
        graph: from `program.trace`.
        example: all arguments of the graph, in order, as for `program.trace`.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch_tpu._internal.compile import scan, tpu_torch_compile
    from torch_tpu._internal.compile.compiler import StaticCompiler
    from torch_tpu._internal.export import export

    def module_of(graph: torch.fx.GraphModule, args: Sequence[torch.Tensor], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(module=scan._build_body_mlir(graph, args))

    class Lowering(StaticCompiler):
        def _compile(self, graph: torch.fx.GraphModule, example: Sequence[torch.Tensor], *_: Any) -> str:
            with unset_fake_temporarily():
                inputs = [tpu_torch_compile.placeholder_like(tensor, False) for tensor in example]
                module = module_of(graph, inputs).module
                return str(tpu_torch_compile.serialize_mlir_text(module, enable_debug_info=True))

    drawn = torch.ops.aten.randint
    for node in [node for node in graph.graph.nodes if node.target in (drawn.default, drawn.low)]:
        node.args, node.target = (node.args[-1], 1), torch.ops.aten.full.default
    kept, export.fx_to_mlir = export.fx_to_mlir, module_of  # the original would also compile the bodies of loops
    try:
        return str(Lowering()(graph, example, True))
    finally:
        export.fx_to_mlir = kept
