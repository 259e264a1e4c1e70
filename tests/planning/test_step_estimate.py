"""The time of a step by the compiler's cost model, from a text in the compiler's format."""

from __future__ import annotations

import pytest

from tpu_kit.machine.chips import CHIPS
from tpu_kit.planning.compiler.step_estimate import Sizes, estimated_seconds
from tpu_kit.xla import hlo

# A loop of five iterations with a base product, an adapter's product and a copy; then a kernel without cycles and the
# loss.
STEP = """HloModule step, is_scheduled=true

%base (b.x: bf16[256,128], b.w: bf16[128,128]) -> bf16[256,128] {
  %b.x = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(0)
  %b.w = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %b.y = bf16[256,128]{1,0:T(8,128)(2,1)} dot(%b.x, %b.w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%adapter (a.x: bf16[256,128], a.w: bf16[128,16]) -> bf16[256,16] {
  %a.x = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(0)
  %a.w = bf16[128,16]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %a.y = bf16[256,16]{1,0:T(8,128)(2,1)} dot(%a.x, %a.w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%take (t.s: bf16[5,128,128], t.i: s32[]) -> bf16[128,128] {
  %t.s = bf16[5,128,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %t.i = s32[]{:T(128)} parameter(1)
  %t.o = s32[]{:T(128)} constant(0)
  %t.d = bf16[1,128,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%t.s, %t.i, %t.o, %t.o), dynamic_slice_sizes={1,128,128}
  ROOT %t.r = bf16[128,128]{1,0:T(8,128)(2,1)} bitcast(%t.d)
}

%body (p: (s32[], bf16[256,128], bf16[5,128,128], bf16[128,16])) -> (s32[], bf16[256,128], bf16[5,128,128], bf16[128,16]) {
  %p = (s32[]{:T(128)}, bf16[256,128]{1,0:T(8,128)(2,1)}, bf16[5,128,128]{2,1,0:T(8,128)(2,1)}, bf16[128,16]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[256,128]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %s = bf16[5,128,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%p), index=2
  %a = bf16[128,16]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=3
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one), backend_config={"estimated_cycles":"150"}
  %w = bf16[128,128]{1,0:T(8,128)(2,1)} fusion(%s, %i), kind=kLoop, calls=%take, backend_config={"flag_configs":[],"estimated_cycles":"1500"}
  %begin = (bf16[256,128]{1,0:T(8,128)(2,1)S(1)}, bf16[256,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %low = bf16[256,16]{1,0:T(8,128)(2,1)} fusion(%x, %a), kind=kOutput, calls=%adapter, backend_config={"estimated_cycles":"15"}
  %near = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%begin)
  %y = bf16[256,128]{1,0:T(8,128)(2,1)} fusion(%near, %w), kind=kOutput, calls=%base, backend_config={"estimated_cycles":"3000"}
  ROOT %t = (s32[]{:T(128)}, bf16[256,128]{1,0:T(8,128)(2,1)}, bf16[5,128,128]{2,1,0:T(8,128)(2,1)}, bf16[128,16]{1,0:T(8,128)(2,1)}) tuple(%next, %y, %s, %a)
}

%condition (c: (s32[], bf16[256,128], bf16[5,128,128], bf16[128,16])) -> pred[] {
  %c = (s32[]{:T(128)}, bf16[256,128]{1,0:T(8,128)(2,1)}, bf16[5,128,128]{2,1,0:T(8,128)(2,1)}, bf16[128,16]{1,0:T(8,128)(2,1)}) parameter(0)
  %c.i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %five = s32[]{:T(128)} constant(5)
  ROOT %less = pred[]{:T(512)} compare(%c.i, %five), direction=LT
}

ENTRY %main (x0: bf16[256,128], s0: bf16[5,128,128], a0: bf16[128,16], m: s8[1,2,2], q: bf16[1,2,256,64]) -> (bf16[256,1024], bf16[1,2,256,64], f32[2048]) {
  %x0 = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(0)
  %s0 = bf16[5,128,128]{2,1,0:T(8,128)(2,1)} parameter(1)
  %a0 = bf16[128,16]{1,0:T(8,128)(2,1)} parameter(2)
  %m = s8[1,2,2]{2,1,0:T(8,128)} parameter(3)
  %q = bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)} parameter(4)
  %zero = s32[]{:T(128)} constant(0)
  %first = (s32[]{:T(128)}, bf16[256,128]{1,0:T(8,128)(2,1)}, bf16[5,128,128]{2,1,0:T(8,128)(2,1)}, bf16[128,16]{1,0:T(8,128)(2,1)}) tuple(%zero, %x0, %s0, %a0)
  %loop = (s32[]{:T(128)}, bf16[256,128]{1,0:T(8,128)(2,1)}, bf16[5,128,128]{2,1,0:T(8,128)(2,1)}, bf16[128,16]{1,0:T(8,128)(2,1)}) while(%first), condition=%condition, body=%body
  %h = bf16[256,128]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
  %splash_mha_fwd.1 = bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)} custom-call(%m, %q), custom_call_target="tpu_custom_call"
  %logits = bf16[256,1024]{1,0:T(8,128)(2,1)} broadcast(%h), dimensions={0,1}, backend_config={"estimated_cycles":"6000"}
  %plain = f32[2048]{0:T(1024)} broadcast(%zero), dimensions={}
  ROOT %result = (bf16[256,1024]{1,0:T(8,128)(2,1)}, bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)}, f32[2048]{0:T(1024)}) tuple(%logits, %splash_mha_fwd.1, %plain)
}
"""  # noqa: E501  the compiler's format

SIZES = Sizes(1024, 128, 16, frozenset({2}), frozenset({64}), frozenset({384}))
FLOPS, BANDWIDTH, CLOCK = 197e12, 819e9, 1.5e9


def estimate(text: str, chip: str = "v5e") -> dict[str, float]:
    xla_client = pytest.importorskip("jaxlib.xla_client")
    client = xla_client.make_cpu_client()

    def analyse(text: str) -> dict[str, float]:
        return dict(xla_client._xla.hlo_module_cost_analysis(client, xla_client._xla.hlo_module_from_text(text)))

    module = hlo.Module(text)
    return estimated_seconds(module, hlo.instruction_costs(module, analyse), SIZES, CHIPS[chip])


def test_cycles_count_each_trip_by_kind_of_work_and_the_rest_by_formula() -> None:
    found = estimate(STEP)
    copied = 256 * 128 * 2 / BANDWIDTH - 15 / CLOCK  # beyond the concurrent product
    written = (2048 * 4 + 512) / BANDWIDTH  # an instruction without cycles, which reads a padded number
    heads = 2 * 2 * 256 * 128 * 2  # read and written, with their 64 columns padded to 128
    assert found == pytest.approx({
        "base products": 5 * 3000 / CLOCK, "slices and stacks": 5 * 1500 / CLOCK, "adapters": 5 * 15 / CLOCK,
        "loss": 6000 / CLOCK, "other": 5 * 150 / CLOCK + written, "copies that are waited for": 5 * copied,
        "attention kernel": (heads + 8 * 128) / BANDWIDTH,
    })  # fmt: skip
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_a_copy_beside_enough_work_costs_nothing() -> None:
    found = estimate(STEP.replace('"estimated_cycles":"15"', '"estimated_cycles":"1500"'))
    assert found["copies that are waited for"] == 0


def test_a_copy_beside_a_loop_is_covered_by_all_of_its_trips() -> None:
    """A copy of 8 MiB takes 10 us, an iteration 3 us and the loop 16 us."""
    array, near = "f32[2048,1024]{1,0:T(8,128)}", "f32[2048,1024]{1,0:T(8,128)S(1)}"
    begin = f"  %far = {array} parameter(5)\n  %begun = ({near}, {array}, u32[]{{:S(2)}}) copy-start(%far)\n"
    end = f"  %here = {near} copy-done(%begun)\n"
    text = STEP.replace("q: bf16[1,2,256,64])", "q: bf16[1,2,256,64], far: f32[2048,1024])")
    text = text.replace("  %loop = ", f"{begin}  %loop = ").replace("  %h = ", f"{end}  %h = ")
    name = "copies that are waited for"
    assert estimate(text)[name] == pytest.approx(estimate(STEP)[name])
    once = text.replace("constant(5)\n", "constant(1)\n")
    assert estimate(once)[name] > 5e-6 > estimate(STEP)[name]


def test_heads_narrower_than_a_matrix_unit_cost_more() -> None:
    """The kernel's FLOPs use half of the unit's columns, if its bytes do not take longer."""
    wide = estimate(STEP.replace("[1,2,256,64]", "[1,2,4096,64]"))
    flops = 2 * 2 * (2 * 2048 * 2048 * 64) * 3
    assert wide["attention kernel"] == pytest.approx(2 * flops / FLOPS)
    larger = estimate(STEP.replace("[1,2,256,64]", "[1,2,4096,64]"), "v6e")  # with 256 columns
    assert larger["attention kernel"] == pytest.approx(4 * flops / 918e12)
    assert larger["base products"] == pytest.approx(5 * 3000 / 1.75e9)


def test_the_queries_of_one_row_have_no_dimension_of_rows() -> None:
    one = STEP.replace("bf16[1,2,256,64]{3,2,1,0", "bf16[2,256,64]{2,1,0").replace("bf16[1,2,256,64]", "bf16[2,256,64]")
    assert estimate(one)["attention kernel"] == pytest.approx(estimate(STEP)["attention kernel"])
