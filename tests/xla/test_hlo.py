"""Facts read from the compiler's texts: loops, collectives, FLOPs and bytes, out-of-memory messages."""

from __future__ import annotations

from typing import Any

import pytest

from tpu_kit.xla import hlo
from tpu_kit.xla.hlo import Module, origin, parse_out_of_memory

# As the TPU compiler prints it: a 64-bit counter is two 32-bit ones, and a loop within a loop.
LOOPS = """HloModule step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%adding (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %ab = f32[]{:T(128)} add(%a, %b)
}

%inner_body (inner.p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %inner.p = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %inner.i = s32[]{:T(128)} get-tuple-element(%inner.p), index=0
  %two = s32[]{:T(128)} constant(2)
  %inner.next = s32[]{:T(128)} add(%inner.i, %two)
  %inner.x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%inner.p), index=1
  %inner.y = f32[8,128]{1,0:T(8,128)} negate(%inner.x)
  %big = f32[64,128]{1,0:T(8,128)} broadcast(%inner.y), dimensions={0,1}, metadata={op_name="model.2/mlp.11/aten__mm" source_file="/x/site-packages/transformers/models/llama/modeling_llama.py" source_line=66}
  %inner.z = f32[8,128]{1,0:T(8,128)} slice(%big), slice={[0:8], [0:128]}
  ROOT %inner.t = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%inner.next, %inner.z)
}

%inner_condition (inner.c: (s32[], f32[8,128])) -> pred[] {
  %inner.c = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %inner.ci = s32[]{:T(128)} get-tuple-element(%inner.c), index=0
  %six = s32[]{:T(128)} constant(6)
  ROOT %inner.less = pred[]{:T(512)} compare(%inner.ci, %six), direction=LT
}

%body (p: (u32[], u32[], f32[8,128])) -> (u32[], u32[], f32[8,128]) {
  %p = (u32[]{:T(128)}, u32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %one = u32[]{:T(128)} constant(1)
  %low = u32[]{:T(128)} get-tuple-element(%p), index=0
  %high = u32[]{:T(128)} get-tuple-element(%p), index=1
  %next = u32[]{:T(128)} add(%low, %one)
  %carry = pred[]{:T(512)} compare(%next, %low), direction=LT
  %more = u32[]{:T(128)} add(%high, %one)
  %up = u32[]{:T(128)} select(%carry, %more, %high)
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p), index=2
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%zero, %x)
  %inner = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%start), condition=%inner_condition, body=%inner_body
  %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%inner), index=1
  %sum = f32[8,128]{1,0:T(8,128)} all-reduce(%y), replica_groups={}, to_apply=%adding
  ROOT %t = (u32[]{:T(128)}, u32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%next, %up, %sum)
}

%condition (c: (u32[], u32[], f32[8,128])) -> pred[] {
  %c = (u32[]{:T(128)}, u32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %c.low = u32[]{:T(128)} get-tuple-element(%c), index=0
  %c.high = u32[]{:T(128)} get-tuple-element(%c), index=1
  %none = u32[]{:T(128)} constant(0)
  %five = u32[]{:T(128)} constant(5)
  %flat = pred[]{:T(512)} compare(%c.high, %none), direction=EQ
  %less = pred[]{:T(512)} compare(%c.low, %five), direction=LT
  ROOT %both = pred[]{:T(512)} and(%flat, %less)
}

ENTRY %main (w: f32[8,128], v: f32[16,128]) -> (f32[8,128], f32[16,128]) {
  %w = f32[8,128]{1,0:T(8,128)} parameter(0)
  %v = f32[16,128]{1,0:T(8,128)} parameter(1)
  %nil = u32[]{:T(128)} constant(0)
  %nil.copy = u32[]{:T(128)} copy(%nil)
  %w.copy = f32[8,128]{1,0:T(8,128)} copy(%w)
  %begin = (u32[]{:T(128)}, u32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%nil.copy, %nil, %w.copy)
  %loop = (u32[]{:T(128)}, u32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%begin), condition=%condition, body=%body
  %end = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=2
  %new = f32[16,128]{1,0:T(8,128)} negate(%v), metadata={op_name="aten__neg" source_file="/home/me/tpu_kit/training/step.py" source_line=7}
  ROOT %result = (f32[8,128]{1,0:T(8,128)}, f32[16,128]{1,0:T(8,128)}) tuple(%end, %new)
}
"""  # noqa: E501  the compiler's text


def test_kernels_of_torch_tpu_are_named_by_their_settings() -> None:
    """As libtpu 0.0.52 writes them, on lines of their own."""
    call = 'custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={'
    settings = '"xprof_metadata":"{\\"block_q_dkv\\": 256, \\"q_layout\\": 1}"'
    text = (
        "HloModule one\n\nENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        f"  %custom-call.3 = f32[8]{{0}} {call}\n{settings}\n}}}}\n"
        "  ROOT %copy = f32[8]{0} copy(%custom-call.3)\n}\n"
    )
    names = Module(text).computations["main"]
    assert list(names) == ["p", "splash_mha_dkv.custom-call.3", "copy"]
    assert names["copy"].operands == ["splash_mha_dkv.custom-call.3"]
    assert origin('metadata={op_name="create_scan_op/custom_kernel" source_file="-" source_line=3}') == {
        "operation": "",
        "source": "",
    }


@pytest.mark.parametrize("named", ["true_computation=%body, false_computation=%other",
                                   "branch_computations={%body, %other}"])  # fmt: skip
def test_branches_of_a_conditional_are_called(named: str) -> None:
    text = (
        "HloModule one\n\n%body (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8]{0} parameter(0)\n}\n\n"
        "%other (q: f32[8]) -> f32[8] {\n  ROOT %q = f32[8]{0} parameter(0)\n}\n\n"
        "ENTRY %main (a: pred[], b: f32[8]) -> f32[8] {\n  %a = pred[] parameter(0)\n  %b = f32[8]{0} parameter(1)\n"
        f"  ROOT %c = f32[8]{{0}} conditional(%a, %b, %b), {named}\n}}\n"
    )
    assert Module(text).computations["main"]["c"].called == ["body", "other"]


def test_loops_are_followed_and_collectives_counted_at_every_turn() -> None:
    module = Module(LOOPS)
    assert module.entry == "main" and len(module.computations) == 6
    assert module.trips == {"loop": 5, "inner": 3}
    assert module.runs["inner_body"] == 15
    size = 5 * 8 * 128 * 4
    assert module.collectives() == [
        {"kind": "all-reduce", "count": 5, "bytes": size, "moved": size, "synchronous": size, "over_dcn": False}
    ]


COLLECTIVES = """HloModule step

%all-reduce-scatter.1 (input: bf16[16,128]) -> bf16[2,128] {
  %input = bf16[16,128]{1,0} parameter(0)
  %all-reduce.1 = bf16[16,128]{1,0} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%a
  %zero = u32[] constant(0)
  ROOT %part = bf16[2,128]{1,0} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={2,128}
}

%async_collective_fusion.1 (shard: bf16[2,128]) -> bf16[16,128] {
  %shard = bf16[2,128]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[16,128]{1,0} all-gather(%shard), channel_id=2, replica_groups=[1,8]<=[8], dimensions={0}
}

%async_collective_fusion.2 (shard.2: bf16[2,128]) -> bf16[16,128] {
  %shard.2 = bf16[2,128]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[16,128]{1,0} all-gather(%shard.2), channel_id=2, replica_groups=[1,8]<=[8], dimensions={0}
}

%turn (p: (s32[], bf16[2,128])) -> (s32[], bf16[2,128]) {
  %p = (s32[], bf16[2,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = bf16[2,128]{1,0} get-tuple-element(%p), index=1
  %beside = bf16[16,128]{1,0} fusion(%x), kind=kCustom, calls=%async_collective_fusion.2
  ROOT %t = (s32[], bf16[2,128]{1,0}) tuple(%next, %x)
}

%condition (c: (s32[], bf16[2,128])) -> pred[] {
  %c = (s32[], bf16[2,128]{1,0}) parameter(0)
  %c.i = s32[] get-tuple-element(%c), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%c.i, %four), direction=LT
}

ENTRY %main (w: bf16[2,128], v: bf16[2,128]) -> bf16[2,128] {
  %w = bf16[2,128]{1,0} parameter(0)
  %v = bf16[2,128]{1,0} parameter(1)
  %nil = s32[] constant(0)
  %begin = (s32[], bf16[2,128]{1,0}) tuple(%nil, %v)
  %start = bf16[16,128]{1,0} fusion(%w), kind=kCustom, calls=%async_collective_fusion.1
  %loop = (s32[], bf16[2,128]{1,0}) while(%begin), condition=%condition, body=%turn
  %done = bf16[16,128]{1,0} fusion(%w), kind=kCustom, calls=%async_collective_fusion.2
  %at-once = bf16[16,128]{1,0} all-gather(%v), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %scattered = bf16[2,128]{1,0} fusion(%done), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_collectives_in_fusions_are_counted_once_and_a_reduce_scatter_is_one() -> None:
    """A gather is in each fusion of its chain, also in a loop; a device sends (g - 1) / g of its result."""
    assert Module(COLLECTIVES).trips == {"loop": 4}
    whole, eighth = 16 * 128 * 2, 16 * 128 * 2 / 8
    scattered = 7 * eighth
    assert [tuple(row.values()) for row in Module(COLLECTIVES).collectives()] == [
        ("all-gather", 2, 2 * whole, 13 * eighth, 6 * eighth, False),
        ("reduce-scatter", 1, eighth, scattered, scattered, False),
    ]


BETWEEN_SLICES = """
HloModule between, is_scheduled=true

ENTRY %main (w: bf16[16,128]) -> bf16[16,128] {
  %w = bf16[16,128]{1,0} parameter(0)
  %token = token[] after-all()
  %send = (bf16[16,128]{1,0}, u32[], token[]) send(%w, %token), channel_id=8, TO_HOST "{1,2}x{0:7}", TYPE="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=8, is_host_transfer=true
  %gather = (bf16[16,128]{1,0}, u32[], token[]) send(%w, %sent), channel_id=9, TO_HOST "{1:4}x{0}", TYPE="ALL_GATHER"}
  %gathered = token[] send-done(%gather), channel_id=9, is_host_transfer=true
  ROOT %out = bf16[16,128]{1,0} copy(%w)
}
""".replace(", TYPE=", ",_xla_megascale_transfer_type=").replace(
    "TO_HOST ", "is_host_transfer=true, frontend_attributes={_xla_megascale_target="
)


def test_what_a_device_sends_to_its_host_goes_between_slices() -> None:
    size = 16 * 128 * 2
    assert [tuple(row.values()) for row in Module(BETWEEN_SLICES).collectives()] == [
        (f"{kind} between slices", 1, size, moved, moved, True)
        for kind, moved in (("all-reduce", 2 * size / 2), ("all-gather", size * 3 / 4))
    ]


def test_a_loop_without_a_known_end_counts_once() -> None:
    module = Module(LOOPS.replace("%nil.copy = u32[]{:T(128)} copy(%nil)", "%nil.copy = u32[]{:T(128)} rng(%nil)"))
    assert module.trips == {"loop": None, "inner": 3}
    assert module.runs["inner_body"] == 3


def test_operation_and_source_are_those_of_the_model() -> None:
    big = Module(LOOPS).computations["inner_body"]["big"]
    assert origin(big.rest) == {
        "operation": "model/mlp/aten__mm", "source": "transformers/models/llama/modeling_llama.py:66",
    }  # fmt: skip
    in_loop = origin('op_name="a/xla__scan/call.944/aten__mm/jit(f)/g" source_file="/x/loss.py" source_line=4')
    assert in_loop == {"operation": "a/xla__scan/call/aten__mm", "source": ""}
    own = origin('op_name="a" source_file="/home/me/tpu_kit/training/step.py" source_line=7')
    assert own["source"] == "tpu_kit/training/step.py:7"


# --------------------------------------------------------------------------------------------------------------- costs


def costs(text: str, accessed_once: float = 1.0) -> dict[str, Any]:
    """The costs with XLA's own analysis; operations by kind."""
    xla_client = pytest.importorskip("jaxlib.xla_client")
    client = xla_client.make_cpu_client()

    def analyse(text: str) -> dict[str, float]:
        return dict(xla_client._xla.hlo_module_cost_analysis(client, xla_client._xla.hlo_module_from_text(text)))

    module = Module(text)
    found = hlo.costs(module, hlo.instruction_costs(module, analyse), analyse, accessed_once)
    kinds: dict[str, tuple[float, float]] = {}
    for row in found["operations"]:
        flops, size = kinds.get(row["kind"], (0.0, 0.0))
        kinds[row["kind"]] = flops + row["flops"], size + row["bytes"]
    return found | {"operations": kinds}


COPY = """HloModule copying, is_scheduled=true

ENTRY %main {{
  %x = {shape} parameter(0)
  ROOT %y = {shape} copy(%x)
}}
"""


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[4,100]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
        ("f32[256,16]{0,1:T(8,128)}", 256 * 16 * 4),  # the first dimension is the minor-most
        ("f32[256,16]{1,0:T(8,128)}", 256 * 128 * 4),
        ("f32[]{:T(128)}", 512),
        ("s64[4,256]{1,0:T(4,128)}", 4 * 256 * 8),
        ("pred[300]{0:T(512)(128)(4,1)}", 512),
        ("bf16[2,3,5,64]{3,2,1,0:T(8,128)(2,1)}", 2 * 3 * 8 * 128 * 2),
        ("bf16[2048,256]{1,0:T(8,128)(2,1)S(1)}", 0),  # on-chip memory
        ("bf16[2,3]", 12),
    ],
)
def test_bytes_with_the_padding_of_tiles(shape: str, size: int) -> None:
    assert costs(COPY.format(shape=shape))["hbm_bytes"] == 2 * size


# A row is read from a table, kept on the chip, added to a prefetched array, and written into a stack in place.
ROWS = """HloModule rows, is_scheduled=true

%taking (t.p: f32[64,128], t.i: s32[]) -> f32[8,128] {
  %t.p = f32[64,128]{1,0:T(8,128)} parameter(0)
  %t.i = s32[]{:T(128)} parameter(1)
  %t.zero = s32[]{:T(128)} constant(0)
  ROOT %t.s = f32[8,128]{1,0:T(8,128)} dynamic-slice(%t.p, %t.i, %t.zero), dynamic_slice_sizes={8,128}
}

%adding (a.p: f32[8,128], a.q: f32[8,128]) -> f32[8,128] {
  %a.p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %a.q = f32[8,128]{1,0:T(8,128)} parameter(1)
  ROOT %a.s = f32[8,128]{1,0:T(8,128)} add(%a.p, %a.q)
}

%storing (s.p: f32[64,128], s.u: f32[8,128], s.i: s32[]) -> f32[64,128] {
  %s.p = f32[64,128]{1,0:T(8,128)} parameter(0)
  %s.u = f32[8,128]{1,0:T(8,128)} parameter(1)
  %s.i = s32[]{:T(128)} parameter(2)
  %s.zero = s32[]{:T(128)} constant(0)
  ROOT %s.r = f32[64,128]{1,0:T(8,128)} dynamic-update-slice(%s.p, %s.u, %s.i, %s.zero)
}

ENTRY %main (table: f32[64,128], x: f32[8,128], stack: f32[64,128], i: s32[]) -> f32[64,128] {
  %table = f32[64,128]{1,0:T(8,128)} parameter(0)
  %x = f32[8,128]{1,0:T(8,128)} parameter(1)
  %stack = f32[64,128]{1,0:T(8,128)} parameter(2)
  %i = s32[]{:T(128)S(6)} parameter(3)
  %begin = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %row = f32[8,128]{1,0:T(8,128)S(1)} fusion(%table, %i), kind=kLoop, calls=%taking
  %near = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%begin)
  %sum = f32[8,128]{1,0:T(8,128)} fusion(%row, %near), kind=kLoop, calls=%adding
  ROOT %new = f32[64,128]{1,0:T(8,128)} fusion(%stack, %sum, %i), kind=kLoop, calls=%storing
}
"""


def test_of_hbm_the_parts_that_move_are_counted() -> None:
    row = 8 * 128 * 4
    taken, prefetched, written, stored = row, row, row, 2 * row
    index = 2 * 512  # in HBM in the second text
    assert costs(ROWS)["hbm_bytes"] == taken + prefetched + written + stored
    # Nothing on the chip: the row is written and read, the prefetch and its copy, too.
    everywhere = ROWS.replace("S(1)", "").replace("S(6)", "")
    assert costs(everywhere)["hbm_bytes"] == taken + 2 * prefetched + written + stored + 3 * row + index


ALLOCATION = """HloModule allocation, is_scheduled=true

ENTRY %main {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %free = f32[8,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="AllocateBuffer"
  ROOT %y = f32[8,128]{1,0:T(8,128)} copy(%free)
}
"""


def test_memory_that_is_taken_as_it_is_costs_nothing() -> None:
    found = costs(ALLOCATION)
    assert found["operations"].keys() == {"copy"} and found["hbm_bytes"] == 2 * 8 * 128 * 4


SPLASH = """HloModule splash, is_scheduled=true

ENTRY %main {{
  %m = s8[1,{rows},{width}]{{2,1,0}} parameter(0)
  %q = bf16[4,14,2048,64]{{3,2,1,0:T(8,128)(2,1)}} parameter(1)
  ROOT %{name}.1 = bf16[4,14,2048,64]{{3,2,1,0:T(8,128)(2,1)}} custom-call(%m, %q), custom_call_target="tpu_custom_call"
}}
"""
QUERIES = "bf16[4,14,2048,64]{{3,2,1,0:T(8,128)(2,1)}}"
# The results of the kernel for keys and values: both gradients' sums, of queries per block, and of keys.
UNFUSED = "(f32[512,64], f32[512,64], bf16[4,2,2048,64], bf16[4,2,2048,64])"
FUSED = "(f32[512,64], f32[512,64], bf16[4,4,14,2048,64], bf16[4,2,2048,64], bf16[4,2,2048,64])"


def test_splash_counts_the_blocks_that_a_mask_leaves() -> None:
    product = 2 * 4 * 14 * 512 * 512 * 64

    def flops(name: str, rows: int, width: int, results: str = QUERIES) -> float:
        found = costs(SPLASH.replace(f"= {QUERIES} c", f"= {results} c").format(name=name, rows=rows, width=width))
        return float(found["operations"]["kernel"][0]) / product

    assert flops("splash_mha_fwd_segmented_residuals_block_kv_512", 4, 4) == 2 * (1 + 2 + 3 + 4)
    assert flops("splash_mha_fwd_segmented_residuals_block_kv_512", 4, 2) == 2 * (1 + 2 + 2 + 2)  # a window
    # The unfused pass has two kernels, which both compute scores and the gradient of weights.
    assert flops("splash_mha_dq_segmented_block_q_dq_512", 4, 4) == 3 * (1 + 2 + 3 + 4)
    assert flops("splash_mha_dkv_segmented_block_kv_dkv_512", 4, 4, UNFUSED) == 4 * (1 + 2 + 3 + 4)
    assert flops("vmap_splash_mha_dkv_segmented_block_kv_dkv_512", 4, 4, FUSED) == 5 * (1 + 2 + 3 + 4)
    estimate = SPLASH.replace('_call"\n', '_call", backend_config={{"cost_estimate":{{"flops":77}}}}\n')
    assert costs(estimate.format(name="other", rows=4, width=4))["flops"] == 77


PRODUCT = """HloModule product, is_scheduled=true

%multiplying (m.p: f32[8,128], m.q: f32[128,128]) -> f32[8,128] {
  %m.p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %m.q = f32[128,128]{1,0:T(8,128)} parameter(1)
  ROOT %m.r = f32[8,128]{1,0:T(8,128)} dot(%m.p, %m.q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,128], w: f32[128,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %w = f32[128,128]{1,0:T(8,128)} parameter(1)
  %n = f32[8,128]{1,0:T(8,128)} negate(%x)
  %y = f32[8,128]{1,0:T(8,128)} fusion(%x, %w), kind=kOutput, calls=%multiplying, control-predecessors={%n}
  ROOT %z = f32[8,128]{1,0:T(8,128)} negate(%y)
}
"""


def test_products_are_counted_in_fusions() -> None:
    found = costs(PRODUCT)
    moved = {"elementwise": 4 * 8 * 128 * 4, "matrix product": (2 * 8 * 128 + 128 * 128) * 4}
    assert {kind: cost[1] for kind, cost in found["operations"].items()} == moved
    assert found["operations"]["matrix product"][0] == 2 * 8 * 128 * 128
    assert found["hbm_bytes"] == sum(moved.values())


def test_costs_count_each_turn() -> None:
    found = costs(LOOPS, accessed_once=1000.0)
    row = 8 * 128 * 4
    assert found["operations"]["collective"] == (5 * 8 * 128, 5 * 2 * row)
    # The inner loop runs 3 times in each of 5 iterations: it negates x, writes big, and reads a part of big.
    inner = 5 * 3 * (2 + 9 + 2) * row
    # Counters: each reads and writes rows of 512 bytes.
    scalars = 5 * (3 * 3 + 3 + 3 + 3 + 4) * 512
    assert found["operations"]["elementwise"][1] == inner + 4 * row + scalars
    assert 1000.0 < found["bytes_accessed"] < 15 * 1000.0


# A message of libtpu 0.0.21, shortened to three allocations.
OUT_OF_MEMORY = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 28.62G of 15.75G hbm. Exceeded hbm capacity by 12.87G.

Total hbm usage >= 28.87G:
    reserved        258.00M 
    program           9.54G 
    arguments        19.08G 

Output size 1.50M; shares 1.50M with arguments.

Program hbm requirement 9.54G:
    HLO temp          9.54G (100.0% utilization: Unpadded (9.54G) Padded (9.54G), 0.0% fragmentation (0B))

  Largest program allocations in hbm:

  1. Size: 9.54G
     Operator: op_name="loss.4/aten__mm" source_file="/x/tpu_kit/training/losses/loss.py" source_line=107 source_end_line=107
     Shape: bf16[128,40000000]{1,0:T(8,128)(2,1)}
     Unpadded size: 9.54G
     XLA label: fusion.590.remat = fusion(Arg_26.129, bitcast.12), kind=kOutput, calls=fused_computation.31.clone
     Allocation type: HLO temp
     ==========================

  2. Size: 64.0K
     Operator: op_name="model.1/layers-0.3/self_attn.2/xla__cast" source_file="/x/site-packages/transformers/models/llama/modeling_llama.py" source_line=147
     Shape: f32[128,64]{1,0:T(8,128)}
     Unpadded size: 32.0K
     Extra memory due to padding: 32.0K (2.0x expansion)
     XLA label: fusion.283 = fusion(Arg_3.1), kind=kLoop, calls=fused_computation.1
     Allocation type: HLO temp
     ==========================

  3. Size: 64.0K
     Shape: pred[1,4,128,64]{3,2,1,0:T(32,128)(4,1)}
     Unpadded size: 32.0K
     XLA label: constant literal
     Allocation type: global
     ==========================
"""  # noqa: E501  the compiler's text


def test_an_out_of_memory_text() -> None:
    found = parse_out_of_memory(OUT_OF_MEMORY)
    assert found == {"used_bytes": round(28.62 * 2**30), "argument_bytes": round(19.08 * 2**30)}


def test_other_out_of_memory_texts() -> None:
    short = OUT_OF_MEMORY.replace("program           9.54G", "program      unknown size").replace("19.08G", "0B")
    found = parse_out_of_memory(short)
    assert found is not None and found["argument_bytes"] == 0
    one = "RESOURCE_EXHAUSTED: Allocation (size=52428800000) would exceed memory (size=17179869184) :: #allocation299"
    assert parse_out_of_memory(one) == {"used_bytes": 52428800000, "argument_bytes": None}
    newer = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (24.36G) exceeds available HBM (15.75G). HLO module: tt_jit_export."
    )
    assert parse_out_of_memory(newer) == {"used_bytes": round(24.36 * 2**30), "argument_bytes": None}
    assert parse_out_of_memory("INTERNAL: Mosaic failed to compile TPU kernel") is None
    vmem = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20M of 16M vmem."
    assert parse_out_of_memory(vmem) is None, "a kernel's fault, which no smaller batch mends"
