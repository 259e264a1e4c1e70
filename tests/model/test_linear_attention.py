"""The gated delta rule, Mamba 2 and short convolutions, against transformers on each document alone."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # the first model imports it, which takes seconds
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from tpu_kit.generation.kv_cache import Cache
from tpu_kit.model.families import linear_attention
from tpu_kit.model.loop.layer_inputs import LayerInputs, Visibility, bound

Tensors = list[torch.Tensor]
DOCUMENTS = {
    "several": [[21, 64, 1, 30], [100, 3, 20]],
    "one": [[150], [150]],
    "short": [[1, 2, 3, 4, 5] * 10, [5, 1] * 24],
}
OWN = {name: getattr(own, "_tpu_kit_replaces", own) for name, own in [
    ("delta", qwen.torch_chunk_gated_delta_rule), ("mamba", granite.mamba2_chunk_scan), ("conv", qwen.causal_conv1d_fn),
]}  # fmt: skip


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def segments_of(rows: list[list[int]], length: int = 150) -> torch.Tensor:
    """(B, S) numbers of documents; the rest of a row is padding, 0."""
    found = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, sizes in enumerate(rows):
        numbers = torch.repeat_interleave(torch.arange(1, len(sizes) + 1), torch.tensor(sizes))
        found[row, : len(numbers)] = numbers
    return found


def delta_inputs(repeat: bool, batch: int = 2, length: int = 150, width: int = 16) -> Tensors:
    """Query, key, value, decay and beta; with `repeat` all keys are nearly equal, as for a repeated token."""
    key = noise(batch, length, 2, width)
    decay = -torch.nn.functional.softplus(noise(batch, length, 4) - (6 if repeat else 1))
    beta = (noise(batch, length, 4, seed=1) + (3 if repeat else 0)).sigmoid()
    key = key[:, :1] + 1e-3 * key if repeat else key
    return [noise(batch, length, 2, width, seed=2), key, noise(batch, length, 4, width), decay, beta]


def delta_rule(*tensors: torch.Tensor) -> Any:
    *given, segments = tensors
    with bound(LayerInputs(Visibility(segments))):
        return linear_attention._delta(None, *given, use_qk_l2norm_in_kernel=True)


def alone(function: Callable[..., torch.Tensor], rows: Tensors, others: Tensors, segments: torch.Tensor) -> Any:
    """Runs a function on each document of `rows`, (B, S, ...), alone; zeros for padding."""
    parts = []
    for row in range(len(segments)):
        lengths = [int((segments[row] == n).sum()) for n in range(1, int(segments[row].max()) + 1)]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        found = [function(*(one[row : row + 1, end - n : end] for one in rows), *others)
                 for n, end in zip(lengths, ends, strict=True)]  # fmt: skip
        padding = segments.shape[1] - ends[-1]
        parts.append(torch.cat([*found, torch.zeros(1, padding, *found[0].shape[2:], dtype=found[0].dtype)], 1))
    return torch.cat(parts)


def largest_error(found: Callable[..., torch.Tensor], wanted: Callable[..., torch.Tensor], rows: Tensors,
                  others: Tensors, segments: torch.Tensor, dtype: torch.dtype) -> float:  # fmt: skip
    """The largest ||difference|| / ||reference|| of output and gradients; the reference runs in `dtype`, alone."""
    upstream = noise(*found(*rows, *others, segments).shape) * (segments > 0)[..., None, None]

    def run(kind: torch.dtype, compute: Callable[[Tensors, Tensors], torch.Tensor]) -> Tensors:
        leaves = [one.to(kind).requires_grad_() for one in (*rows, *others)]
        output = compute(leaves[: len(rows)], leaves[len(rows) :])
        output = output * (segments > 0)[..., None, None]
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(kind))]

    mine = run(torch.float32, lambda one, two: found(*one, *two, segments))
    theirs = run(dtype, lambda one, two: alone(wanted, one, two, segments))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(mine, theirs, strict=True))


def token_by_token(query: Any, key: Any, value: Any, decay: Any, beta: Any) -> torch.Tensor:
    """The rule by its definition, in the dtype of its inputs."""
    query, key = (torch.nn.functional.normalize(one, dim=-1).repeat_interleave(2, 2) for one in (query, key))
    state, outputs = value.new_zeros(len(value), 4, key.shape[3], value.shape[3]), []
    for q, k, v, g, b in zip(*(one.unbind(1) for one in (query, key, value, decay, beta)), strict=True):
        state = state * g.exp()[..., None, None]
        new = (v - (k[..., None] * state).sum(-2)) * b[..., None]
        state = state + k[..., None] * new[..., None, :]
        outputs.append((q[..., None] * state).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(
    "documents", ["several", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one", "short"))]
)
def test_the_delta_rule_is_that_of_transformers_on_each_document_alone(documents):
    def theirs(query: Any, key: Any, value: Any, decay: Any, beta: Any) -> Any:
        return OWN["delta"](query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    def ours(*tensors: torch.Tensor) -> torch.Tensor:
        return delta_rule(*tensors)[0]

    segments = segments_of(DOCUMENTS[documents])
    assert largest_error(ours, theirs, delta_inputs(False), [], segments, torch.float32) < 5e-6
    assert largest_error(ours, theirs, delta_inputs(True), [], segments, torch.float32) < 1e-4
    # With equal keys fp32 rounds the gradient of the decay, in transformers as here.
    assert largest_error(ours, token_by_token, delta_inputs(True), [], segments, torch.float64) < 1e-4


def test_equal_keys_do_not_cancel_in_the_inverse():
    """A product of powers of the matrix errs by 2e9 here."""
    strict = torch.full((64, 64), 0.9, dtype=torch.float64).tril(-1)
    exact = torch.linalg.inv(strict + torch.eye(64))
    found = linear_attention.unit_lower_inverse(strict.float())
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-6


def test_mamba_2_is_that_of_transformers_on_each_document_alone():
    def theirs(hidden: Any, dt: Any, key: Any, query: Any, rates: Any) -> Any:
        return OWN["mamba"](hidden, dt, rates, key, query, chunk_size=64)

    def ours(hidden: Any, dt: Any, key: Any, query: Any, rates: Any, segments: Any) -> torch.Tensor:
        with bound(LayerInputs(Visibility(segments))):
            return linear_attention._mamba2(None, hidden, dt, rates, key, query)

    dt = torch.nn.functional.softplus(noise(2, 150, 4))
    rows = [noise(2, 150, 4, 8), dt, noise(2, 150, 2, 16), noise(2, 150, 2, 16, seed=1)]
    assert largest_error(ours, theirs, rows, [-noise(4).exp()], segments_of(DOCUMENTS["several"]), torch.float32) < 2e-5


@pytest.mark.parametrize("taps", [3, 4])
def test_a_short_convolution_is_that_of_transformers_on_each_document_alone(taps):
    def theirs(hidden: Any, weight: Any, bias: Any) -> Any:
        return OWN["conv"](hidden.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)[..., None]

    def ours(hidden: Any, weight: Any, bias: Any, segments: Any) -> torch.Tensor:
        with bound(LayerInputs(Visibility(segments))):
            found = linear_attention._conv(None, hidden.transpose(1, 2), weight, bias, "silu")
        return found.transpose(1, 2)[..., None]

    rows, others = [noise(2, 150, 6)], [noise(6, taps), noise(6)]
    assert largest_error(ours, theirs, rows, others, segments_of(DOCUMENTS["short"]), torch.float32) < 1e-6


class _BfloatFactors(TorchDispatchMode):
    """Rounds the factors of products to bf16, a TPU's default for fp32."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            args = [one.bfloat16().float() for one in args]
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize(("repeat", "most"), [(False, 0.01), (True, 0.04)])
def test_the_error_of_bf16_factors(repeat, most):
    """A TPU's default for products of fp32: about 1 % of the largest output, and 2 to 3 % for equal keys."""
    inputs = delta_inputs(repeat, batch=1, length=512, width=128)
    exact = token_by_token(*(one.double() for one in inputs))
    with _BfloatFactors():
        found, _ = delta_rule(*inputs, torch.ones(1, 512, dtype=torch.int64))
    assert 0.002 < float((found - exact).abs().max() / exact.abs().max()) < most


PARAMETERS = {
    "torch_chunk_gated_delta_rule": "query, key, value, g, beta, ",
    "mamba2_chunk_scan": "hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states, dt_softplus, dt_limit, ",
    "causal_conv1d_fn": "hidden_states, weight, bias, activation, kwargs",
    "mamba2_selective_state_update": "state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, kwargs",
}


@pytest.mark.parametrize(
    ("family", "function"),
    [
        *((family, "torch_chunk_gated_delta_rule") for family in ("qwen3_5", "qwen3_next")),
        *(
            (family, function)
            for family in ("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h")
            for function in ("mamba2_chunk_scan", "mamba2_selective_state_update")
        ),
        ("lfm2", "causal_conv1d_fn"),
    ],
)
def test_transformers_layers_call_the_functions_that_the_kit_replaces(family, function):
    """Fails if a new version moves or renames them; `reference_check` checks that they get segment ids."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for name in (function, "causal_conv1d_fn"):
        own = getattr(module, name)
        found = ", ".join(inspect.signature(getattr(own, "_tpu_kit_replaces", own)).parameters)
        assert found.startswith(PARAMETERS[name]), f"{family}.{name} has the parameters {found}"


def test_without_segments_transformers_own_function_runs():
    config = GraniteMoeHybridConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, mamba_n_heads=4,
        mamba_d_head=16, mamba_d_state=8, layer_types=["mamba"], num_local_experts=0, vocab_size=32, pad_token_id=0,
    )  # fmt: skip
    model = granite.GraniteMoeHybridForCausalLM(config).eval()
    ids = torch.randint(1, 32, (1, 9))
    before = model(input_ids=ids, use_cache=False).logits
    linear_attention.connect(model)
    replaced = granite.mamba2_chunk_scan
    linear_attention.connect(model)
    assert granite.mamba2_chunk_scan is replaced, "registered twice"
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    with bound(LayerInputs(Visibility(torch.ones_like(ids)))):
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, before, atol=1e-5)


def test_a_decode_step_keeps_the_limits_of_the_time_step():
    """transformers' own code leaves them out, and 0.1 is above most of these steps."""
    hidden, dt, key, query = noise(2, 4, 8), noise(2, 4) - 3, noise(2, 1, 6), noise(2, 1, 6, seed=1)
    rates, skip, bias = -noise(4).exp(), noise(4, seed=1), noise(4, seed=2)
    rows = [one[:, None] for one in (hidden, dt)], [one[:, None] for one in (key, query)]
    settings = {"chunk_size": 4, "D": skip, "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, float("inf"))}
    expected, last = OWN["mamba"](*rows[0], rates, *rows[1], return_final_states=True, **settings)
    cache, state = Cache({}), torch.zeros(2, 4, 8, 6)
    cache.time_limits = settings["dt_limit"]
    wide = [one[..., None].expand(*one.shape, 8) for one in (dt, rates, skip, bias)]
    own = getattr(granite.mamba2_selective_state_update, "_tpu_kit_replaces", granite.mamba2_selective_state_update)
    with bound(LayerInputs(cache=cache)):
        found = linear_attention._mamba2_step(
            own, state, hidden, wide[0], wide[1][..., None].expand(4, 8, 6), key, query, wide[2], dt_bias=wide[3],
            dt_softplus=True,
        )  # fmt: skip
    torch.testing.assert_close(found, expected[:, 0])
    torch.testing.assert_close(state, last)
