"""The splash kernel: numbers in Pallas' interpreter, and compilation by the TPU compiler."""

from __future__ import annotations

import importlib.util
import json
import math
from typing import Any

import pytest
import torch

from tests.support.child_processes import run_loaded
from tests.support.tpu_program import ENVIRONMENT
from tpu_kit.model.loop.layer_inputs import Visibility
from tpu_kit.model.splash_attention import splash_attention
from tpu_kit.xla.splash_blocks import is_fused

needs_jax = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch_xla", "jax")), reason="needs torch_xla[pallas]"
)

# The same torch function, lowering and custom autograd as on a TPU; the kernel itself is interpreted on XLA:CPU.
IN_INTERPRET_MODE = """
import json, os
import torch, torch_xla
from tpu_kit.model import attention
from tpu_kit.model import splash_attention
from tpu_kit.model.loop.layer_inputs import Visibility
from tpu_kit.xla import pallas, sharding, splash_blocks

device = torch_xla.device()
kernel = splash_attention.splash_kernel
splash_attention.splash_kernel = lambda *args: kernel(*args[:4], args[4]._replace(interpret=True), *args[5:])
layer = torch.nn.Module()
errors, differences, unfused = [], [], []  # the last: in which backward pass the kernel of the queries was run
BOTH = "BOTH" in os.environ
if BOTH:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    of_queries = kernels._splash_attention_bwd_dq
    kernels._splash_attention_bwd_dq = lambda *args, **more: (
        unfused.append(splash_blocks.PARTIAL_BYTES == 0), of_queries(*args, **more))[1]
    splash_blocks.LARGEST_BLOCK, splash_blocks.PARTIAL_BYTES = 128, 0
MOST = 30  # tokens of an image, which see each other

def of_images(length):  # the image of each token of two rows; the second row has an image at another place
    images = torch.full((2, length), -1)
    images[0, 5:5 + MOST], images[0, length - 40:length - 20], images[1, 20:40] = 0, 1, 0
    return images

for batch, heads, pairs, length, head_dim, window, cap, prefixes, sinks, looks in json.loads(os.environ["CASES"]):
    torch.manual_seed(0)
    states = [torch.randn(batch, count, length, head_dim) for count in (heads, pairs, pairs)]
    states += [3 * torch.randn(heads)] * sinks
    upstream = torch.randn(batch, length, heads, head_dim)
    segments = torch.ones(batch, length, dtype=torch.int64)
    segments[:, length // 3:], segments[0, length // 2:], segments[:, -7:] = 2, 3, 0
    prefix_ids = torch.where(segments == 1, 1, -1) * (segments > 0) if prefixes else None
    mask, ahead, more = None, None, {}
    if looks == "everywhere":
        segments[:, -7:] = 2  # padding would see the padding of the kernel
    if looks:  # the mask by its definition
        query, key, images = torch.arange(length)[:, None], torch.arange(length), of_images(length)
        mask = segments[:, :, None] == segments[:, None]
        same = (images[:, :, None] == images[:, None]) & (images >= 0)[:, None]
        last = torch.where(same, key, query).amax(-1)
        more = {"causal": False}
        if looks == "ahead":
            ahead, more = last - torch.arange(length), {}
            mask = mask & ((key <= query) | same) & (key > query - (window or length))

    def run(function, device, mask=None, **more):
        inputs = [tensor.detach().to(device).requires_grad_() for tensor in states]
        ids = [None if each is None else each.to(device) for each in (segments, prefix_ids, ahead)]
        options = {"scaling": 0.3, "visibility": Visibility(*ids, MOST - 1 if ahead is not None else 0, window is None)}
        options |= {"sliding_window": window, "softcap": cap}
        options["s_aux"] = inputs[3] if sinks else None
        output, _ = function(layer, *inputs[:3], mask, **options | more)
        output.backward(upstream.to(device))
        return [output.detach().cpu(), *(tensor.grad.cpu() for tensor in inputs)]

    ours = run(splash_attention.splash_attention, device, **more)
    expected = run(attention.sdpa_attention, "cpu", mask if mask is None else mask[:, None])
    errors.append(max(float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True)))
    if BOTH:
        splash_blocks.PARTIAL_BYTES = 2**30
        pallas._lowered.cache_clear()
        fused = run(splash_attention.splash_attention, device, **more)
        differences.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, fused, strict=True)))
        splash_blocks.PARTIAL_BYTES = 0
if BOTH:
    print(json.dumps([unfused, differences]))
print(json.dumps(errors))
"""

# The same on a mesh whose devices share the tokens of a row; with two key-value heads they exchange heads for tokens,
# with one each device has all keys.
ON_A_MESH = """
import json, os
import torch, torch_xla
from tpu_kit.config.mesh import BATCH, Mesh
from tpu_kit.distributed.replica.mesh import put, read, start
from tpu_kit.model import attention, splash_attention
from tpu_kit.model.loop.layer_inputs import Visibility
from tpu_kit.xla import pallas, sharding, splash_blocks

start(Mesh(**json.loads(os.environ["MESH"])))
splash_blocks.LARGEST_BLOCK = 128
kernel = splash_attention.splash_kernel
splash_attention.splash_kernel = lambda *args: kernel(*args[:4], args[4]._replace(interpret=True), *args[5:])
layer = torch.nn.Module()
errors, specs = [], []
for heads, pairs, length, window, prefixes, sinks, partial in json.loads(os.environ["CASES"]):
    splash_blocks.PARTIAL_BYTES = partial
    torch.manual_seed(0)
    states = [torch.randn(2, count, length, 8) for count in (heads, pairs, pairs)] + [3 * torch.randn(heads)] * sinks
    upstream = torch.randn(2, length, heads, 8)
    segments = torch.ones(2, length, dtype=torch.int32)
    segments[:, length // 3:], segments[0, length // 2:], segments[:, -7:] = 2, 3, 0
    prefix_ids = (torch.where(segments == 1, 1, -1) * (segments > 0)).to(torch.int32) if prefixes else None

    def run(function, move):
        inputs = [move(tensor, (BATCH, "model", "context", None) if tensor.ndim == 4 else ("model",)).requires_grad_()
                  for tensor in states]
        ids = [None if each is None else move(each, (BATCH, None)) for each in (segments, prefix_ids)]
        output, _ = function(layer, *inputs[:3], None, scaling=0.3, visibility=Visibility(*ids, None, 0),
                             sliding_window=window, s_aux=inputs[3] if sinks else None)
        output.backward(move(upstream, (BATCH, "context", "model", None)))
        return [output.detach(), *(tensor.grad for tensor in inputs)]

    ours = run(splash_attention.splash_attention, put)
    torch_xla.sync()
    expected = run(attention.sdpa_attention, lambda tensor, spec: tensor.clone())
    errors.append(max(float((a - b).abs().max()) for a, b in zip(read(ours), expected, strict=True)))
    specs.append(sharding.training_spec(pairs) == sharding.PER_HEAD)
print(json.dumps([errors, specs]))
"""

# batch, heads, pairs, length, head_dim, window, cap, prefixes, sinks, looks
CASES = [
    (2, 4, 2, 150, 16, None, None, False, False, ""), (1, 2, 1, 256, 8, 50, None, False, True, ""),
    (2, 2, 2, 128, 8, None, 5.0, True, True, ""), (2, 2, 1, 150, 8, 24, None, False, False, "ahead"),
    (2, 2, 2, 150, 8, None, None, False, False, "everywhere"), (2, 2, 1, 150, 8, None, None, False, False, "ahead"),
]  # fmt: skip
MORE_CASES = [
    (1, 2, 2, 100, 8, 9, 2.0, False, False, ""), (2, 2, 2, 256, 8, 400, None, False, False, "ahead"),
]  # fmt: skip

# Two blocks of keys, to compare both backward passes.
PASS_CASES = [(1, 2, 1, 150, 8, None, None, True, False, "")]
MORE_PASS_CASES = [
    (2, 2, 1, 150, 8, 24, None, False, False, "ahead"), (1, 2, 1, 256, 8, 50, None, False, True, ""),
    (2, 4, 1, 256, 8, None, 5.0, True, True, ""),
    (2, 4, 2, 150, 8, None, None, False, False, "everywhere"),
]  # fmt: skip

KERNEL_FORMATS = """
import json
from dataclasses import replace
import jax, torch_xla
from jax._src import tpu_custom_call
from tpu_kit.machine.compatibility import PAIRINGS
from tpu_kit.xla import pallas, sharding

shapes = (((1, 1, 128, 64), "bfloat16"),) * 3 + (((1, 128), "int32"),)
chosen, serialize, written = tpu_custom_call.get_ir_version, tpu_custom_call._lower_mosaic_module_to_asm, []

def noted(*args, ir_version, **kwargs):
    written.append(ir_version)
    return serialize(*args, ir_version=ir_version, **kwargs)

tpu_custom_call._lower_mosaic_module_to_asm = noted
for kernel_format in (None, 4):
    pallas.find_pairing = lambda _: replace(PAIRINGS[0], kernel_format=kernel_format)
    pallas._lowered.cache_clear()
    specs = (sharding.PER_HEAD,) * 3 + (("data", None),)
    pallas._lowered(pallas._forward, (pallas.SplashSettings(),), shapes, specs, specs[:2], "tpu", None)
    jax.clear_caches()
assert tpu_custom_call.get_ir_version is chosen
print(json.dumps(written))
"""

FOR_THE_TPU_COMPILER = """
import json, os
import torch, torch_xla
from tests.support.tpu_program import compile_graph
from torch_xla.core.xla_builder import create_placeholder_tensor
from tpu_kit.model import splash_attention
from tpu_kit.model.loop.layer_inputs import Visibility
from tpu_kit.xla.traced_program import lowering_for_tpu

found = []
for batch, heads, pairs, length, head_dim, window, cap, prefixes, sinks in json.loads(os.environ["CASES"]):
    inputs = [create_placeholder_tensor((batch, count, length, head_dim), torch.bfloat16).requires_grad_()
              for count in (heads, pairs, pairs)]
    inputs += [create_placeholder_tensor((heads,), torch.float32).requires_grad_()] * sinks
    segments = create_placeholder_tensor((batch, length), torch.int64)
    shared = create_placeholder_tensor((batch, length), torch.int64) if prefixes else None
    options = {"scaling": 0.1, "visibility": Visibility(segments, shared), "sliding_window": window, "softcap": cap}
    options["s_aux"] = inputs[3] if sinks else None
    with lowering_for_tpu():
        output, _ = splash_attention.splash_attention(torch.nn.Module(), *inputs[:3], None, **options)
    gradients = torch.autograd.grad(output, inputs, create_placeholder_tensor(output.shape, output.dtype))
    program = compile_graph([output, *gradients])
    text = program.hlo_modules()[0].to_string()
    found.append(text.count("tpu_custom_call"))
print(json.dumps(found), flush=True)
os._exit(0)  # libtpu hangs at times on its way out
"""


@pytest.fixture(scope="module")
def found() -> tuple[list[float], list[int]]:
    """The output of one child: errors of each case, and formats of the kernels."""
    environment = {"JAX_PLATFORMS": "cpu", "CASES": json.dumps(CASES)}
    printed = run_loaded(IN_INTERPRET_MODE + KERNEL_FORMATS, env=environment).stdout
    errors, formats = map(json.loads, printed.splitlines()[-2:])
    return errors, formats


@needs_jax
def test_the_kernel_gives_the_numbers_of_the_reference_forward_and_backward(
    found: tuple[list[float], list[int]],
) -> None:
    errors = found[0]
    assert len(errors) == len(CASES) and max(errors) < 1e-5, errors  # both in fp32


@pytest.mark.slow
@needs_jax
def test_the_kernel_gives_the_numbers_of_the_reference_for_more_shapes() -> None:
    printed = run_loaded(IN_INTERPRET_MODE, env={"JAX_PLATFORMS": "cpu", "CASES": json.dumps(MORE_CASES)}).stdout
    errors = json.loads(printed.splitlines()[-1])
    assert len(errors) == len(MORE_CASES) and max(errors) < 1e-5, errors


@needs_jax
@pytest.mark.parametrize(
    ("mesh", "cases"),  # heads, pairs, length, window, prefixes, sinks, PARTIAL_BYTES
    [
        ({"context": 2}, [(2, 1, 512, None, True, False, 2**30), (2, 2, 256, None, False, False, 2**30)]),
        pytest.param({"fsdp": 2, "context": 4}, [
            (4, 2, 2048, None, False, False, 2**30), (3, 1, 2000, 600, False, True, 0),
            (4, 2, 1024, None, True, True, 0),
        ], marks=pytest.mark.slow),
        pytest.param({"context": 3, "model": 2}, [(4, 2, 1536, None, True, False, 0), (6, 6, 384, 50, False, True, 0)],
                     marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_devices_that_share_the_tokens_of_a_row_get_the_numbers_of_the_reference(mesh: Any, cases: Any) -> None:
    devices = str(math.prod(mesh.values()))
    environment = {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": devices, "MESH": json.dumps(mesh)}
    printed = run_loaded(ON_A_MESH, env={**environment, "CASES": json.dumps(cases)}).stdout
    errors, exchanged = json.loads(printed.splitlines()[-1])
    shards = mesh["context"] * mesh.get("model", 1)
    assert exchanged == [pairs % shards == 0 for _, pairs, *_ in cases]
    assert len(errors) == len(cases) and max(errors) < 1e-5, errors


@needs_jax
@pytest.mark.parametrize("cases", [PASS_CASES, pytest.param(MORE_PASS_CASES, marks=pytest.mark.slow)])
def test_the_unfused_backward_pass_gives_the_gradients_of_the_fused_one(cases: Any) -> None:
    environment = {"JAX_PLATFORMS": "cpu", "CASES": json.dumps(cases), "BOTH": "1"}
    printed = run_loaded(IN_INTERPRET_MODE, env=environment).stdout
    (unfused, differences), errors = map(json.loads, printed.splitlines()[-2:])
    assert unfused == [True] * sum(1 + prefixes for *_, prefixes, _, _ in cases)
    assert len(errors) == len(cases) and max(errors) < 1e-5, errors
    assert len(differences) == len(cases) and max(differences) < 1e-6, differences


@needs_jax
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
@pytest.mark.parametrize(
    ("cases", "calls"),  # forward, and all of the backward; of prefixes again
    [
        ([(1, 14, 2, 1024, 64, None, None, True, False), (1, 4, 2, 1024, 256, 512, 50.0, False, False)], [4, 2]),
        pytest.param(
            [(1, 64, 8, 2048, 64, 128, None, False, True), (1, 8, 1, 1024, 512, None, None, False, False)], [2, 2],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_the_tpu_compiler_takes_it_with_windows_soft_caps_sinks_and_head_sizes(cases: Any, calls: list[int]) -> None:
    environment = ENVIRONMENT | {"CASES": json.dumps(cases)}
    found = json.loads(run_loaded(FOR_THE_TPU_COMPILER, env=environment).stdout.splitlines()[-1])
    assert found == calls


@needs_jax
def test_kernels_are_written_as_an_older_libtpu_reads_them(found: tuple[list[float], list[int]]) -> None:
    """Kaggle's libtpu 0.0.17 reads format 4 at most. It fails where JAX moves the function that chooses the format."""
    assert found[1] == [7, 4]


# Blocks as JAX makes them of its own masks, and how many of 131,072 tokens are computed.
BLOCKS_OF_MASKS = """
import json
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as infos
from tpu_kit.xla.pallas import causal_masks

causal, windowed = causal_masks()
shape, different = (1024, 1024), 0
theirs = [masks.CausalMask(shape), *(masks.LocalMask(shape, (size - 1, 0), 0) for size in (1, 100, 128, 300, 1024))]
ours = [causal(shape, None), *(windowed(shape, size) for size in (1, 100, 128, 300, 1024))]
for pair in zip(theirs, ours):
    for process in (infos.process_mask, infos.process_mask_dkv):
        (one, _), (other, _) = (process(masks.MultiHeadMask((mask,) * 2), (128, 128)) for mask in pair)
        different += not all(map(np.array_equal, one, other))
plain, computed = masks._ComputableMask.__getitem__, []
masks._ComputableMask.__getitem__ = lambda *args: computed.append(1) or plain(*args)
for mask in (causal((2**17,) * 2, None), windowed((2**17,) * 2, 4096)):
    infos.process_mask(masks.MultiHeadMask((mask,)), (1024, 1024))
print(json.dumps([different, len(computed)]))
"""


@needs_jax
def test_masks_of_long_rows_are_those_of_jax_without_their_booleans() -> None:
    different, computed = json.loads(run_loaded(BLOCKS_OF_MASKS).stdout.splitlines()[-1])
    assert not different and computed == 2 * 128 + 2 * (128 + 124)  # the diagonal twice, and the window's end


@pytest.mark.parametrize(
    ("fused", "sizes"),  # rows, heads, length, head_dim, bytes of a value, window
    [
        (True, (1, 32, 8192, 128, 2, None)), (False, (1, 32, 16384, 128, 2, None)),  # 0.5 and 2 GiB
        (False, (1, 4, 32768, 256, 2, None)), (True, (64, 32, 1024, 128, 2, None)),  # 4 GiB in blocks of 512; one block
        (True, (1, 2, 8192, 128, 2, 1024)), (False, (1, 2, 16384, 128, 2, 1024)),  # 8 and 16 blocks, 2 seen
    ],
)  # fmt: skip
def test_the_backward_pass_is_fused_where_gradients_of_blocks_are_few(fused: bool, sizes: Any) -> None:
    assert is_fused(*sizes) == fused


def test_sinks_are_not_left_out_where_tokens_look_ahead() -> None:
    """The kernel would ignore them; no family has both."""
    states, ids = torch.zeros(1, 2, 128, 8), torch.zeros(1, 128, dtype=torch.int32)
    ahead = Visibility(ids, ahead=ids, most_ahead=3)
    with pytest.raises(AssertionError):
        splash_attention(
            torch.nn.Module(), states, states, states, None, sliding_window=9, visibility=ahead, s_aux=torch.zeros(2)
        )
