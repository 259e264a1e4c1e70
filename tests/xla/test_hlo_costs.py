"""What is counted of the compiler's texts: FLOPs, and bytes by where they lie."""

from __future__ import annotations

import pytest

from tests.xla.test_hlo import LOOPS
from tpu_kit.xla.hlo import Cost, Module, later_trips, operations, splash_flops

# A row is taken from a table and kept on the chip, added to what is prefetched, and written into a stack in place.
ROWS = """HloModule rows, is_scheduled=true

%taking (t.p: f32[64,128], t.i: s32[]) -> f32[8,128] {
  %t.p = f32[64,128]{1,0:T(8,128)} parameter(0)
  %t.i = s32[]{:T(128)} parameter(1)
  %t.b = f32[8,8,128]{2,1,0:T(8,128)} bitcast(%t.p)
  %t.zero = s32[]{:T(128)} constant(0)
  %t.s = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%t.b, %t.i, %t.zero, %t.zero), dynamic_slice_sizes={1,8,128}
  ROOT %t.r = f32[8,128]{1,0:T(8,128)} bitcast(%t.s)
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
SPLASH = """HloModule splash, is_scheduled=true

ENTRY %main (q: bf16[4,14,2048,64]) -> bf16[4,14,2048,64] {{
  %q = bf16[4,14,2048,64]{{3,2,1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %{name}.1 = bf16[4,14,2048,64]{{3,2,1,0:T(8,128)(2,1)}} custom-call(%q), custom_call_target="tpu_custom_call", operand_layout_constraints={{s8[1,{rows},{width}]{{2,1,0}}, s8[1,{rows},{width}]{{2,1,0}}, bf16[4,14,2048,64]{{3,2,1,0}}, bf16[4,2,2048,64]{{3,2,1,0}}}}, backend_config={{}}
}}
"""  # noqa: E501  the compiler's text


def test_costs_count_each_turn() -> None:
    def analyse(text: str) -> dict[str, float]:
        # What XLA's analysis does: everything once, the bodies of loops too.
        parts = {"%main": 1.0, "%body": 10.0, "%inner_body": 100.0}
        entry = text[text.index("ENTRY ") :].split()[1]
        total = sum(value for name, value in parts.items() if list(parts).index(name) >= list(parts).index(entry))
        return {"flops": total, "bytes accessed": 2 * total}

    later = 1 + 5 * (10 + 3 * 100.0) - 111.0
    assert later_trips(Module(LOOPS), analyse) == Cost(later, 2 * later)


def hbm_bytes(text: str) -> float:
    return sum(cost.bytes for _, _, cost in operations(Module(text), lambda _: {"flops": 0.0}))


def test_of_hbm_the_parts_that_move_are_counted() -> None:
    row = 8 * 128 * 4
    taken, prefetched, written, stored = row, row, row, 2 * row
    assert hbm_bytes(ROWS) == taken + prefetched + written + stored
    # Nothing on the chip: the row is written and read, the prefetch and its copy, too.
    assert hbm_bytes(ROWS.replace("S(1)", "")) == taken + 2 * prefetched + written + stored + 3 * row


def test_splash_counts_the_blocks_that_a_mask_leaves() -> None:
    forward = "splash_mha_fwd_segmented_residuals_block_kv_512_block_kv_compute_512_block_kv_dkv_512_block_q_512"
    backward = "vmap_splash_mha_dkv_segmented_block_kv_dkv_512_block_kv_dkv_compute_512_block_q_dkv_512_k_layout_1_"
    product = 2 * 4 * 14 * 512 * 512 * 64

    def flops(name: str, rows: int, width: int) -> float:
        module = Module(SPLASH.format(name=name, rows=rows, width=width))
        return sum(map(splash_flops, module.computations["main"])) / product

    assert flops(forward, 4, 4) == 2 * (1 + 2 + 3 + 4)
    assert flops(backward, 4, 4) == 5 * (1 + 2 + 3 + 4)
    assert flops(forward, 4, 2) == 2 * (1 + 2 + 2 + 2)  # a window


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


def test_operations_count_each_turn() -> None:
    rows = {one.name: (kind, cost) for one, kind, cost in operations(Module(LOOPS), lambda _: {"flops": 0.0})}
    assert rows["sum"][0] == "collective"
    turn = (8 * 128 + 64 * 128) * 4
    assert rows["big"] == ("elementwise", Cost(0.0, 5 * 3 * turn))  # in the inner loop of the outer one


def test_xlas_own_analysis_reads_an_instruction_alone() -> None:
    xla_client = pytest.importorskip("jaxlib.xla_client")
    client = xla_client.make_cpu_client()

    def analyse(text: str) -> dict[str, float]:
        return dict(xla_client._xla.hlo_module_cost_analysis(client, xla_client._xla.hlo_module_from_text(text)))

    found = {one.name: (kind, cost.flops) for one, kind, cost in operations(Module(PRODUCT), analyse)}
    assert found.pop("n") == ("elementwise", 0.0)
    assert found == {"y": ("matrix product", 2 * 8 * 128 * 128), "z": ("elementwise", 0.0)}
