from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

from tests.support.child_processes import run_python
from tests.support.tpu_program import ENVIRONMENT
from tpu_kit.models import attention
from tpu_kit.xla import pallas

LAYER = torch.nn.Module().eval()
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SEGMENTS = torch.tensor([[1] * 5 + [2] * 6 + [0] * 2, [1] * 13])


def reference(query, key, value, visible, scaling, softcap=None):
    """Attention one query at a time, over the keys that it sees."""
    output = torch.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    for batch, head, row in torch.cartesian_prod(*(torch.arange(size) for size in query.shape[:3])).tolist():
        seen = visible[batch, row]
        scores = key[batch, head // group, seen] @ query[batch, head, row] * scaling
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        output[batch, head, row] = scores.softmax(0) @ value[batch, head // group, seen]
    return output.transpose(1, 2)


def states(length=13, heads=4, pairs=2, head_dim=8, batch=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, count, length, head_dim, generator=generator) for count in (heads, pairs, pairs)]


def test_the_mask_is_block_diagonal_and_causal():
    mask = attention.block_diagonal_mask(torch.tensor([[1, 1, 2, 0, 0]]))
    assert mask.int().tolist() == [
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]]
    ]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 64])
def test_sdpa_equals_attention_written_out(window, softcap):
    query, key, value = states()
    index = torch.arange(13)
    visible = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (index[:, None] >= index)
    if window is not None:
        visible &= index[:, None] - index < window
    expected = reference(query, key, value, visible, 0.3, softcap)
    for arguments in ({"attention_mask": None}, attention.inputs(attention.SDPA, SEGMENTS)):
        output, weights = attention.sdpa_attention(
            LAYER, query, key, value, scaling=0.3, sliding_window=window, softcap=softcap,
            **{"segment_ids": SEGMENTS} | arguments,
        )  # fmt: skip
        assert weights is None
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


def test_the_pallas_implementation_falls_back_where_the_kernel_cannot():
    query, key, value = states()
    for options in ({"sliding_window": 4}, {"softcap": 3.0}):
        ours, expected = (
            function(LAYER, query, key, value, scaling=0.3, **options, **attention.inputs(name, SEGMENTS))[0]
            for name, function in (
                (attention.FLASH, attention.flash_attention),
                (attention.SDPA, attention.sdpa_attention),
            )
        )
        torch.testing.assert_close(ours, expected)


def test_padding_gives_no_nan_in_either_direction():
    inputs = [tensor.requires_grad_() for tensor in states()]
    segments = torch.zeros_like(SEGMENTS)
    segments[0, :4] = 1
    for softcap in (None, 5.0):
        output, _ = attention.sdpa_attention(LAYER, *inputs, None, softcap=softcap, segment_ids=segments)
        gradients = torch.autograd.grad(output.sum(), inputs)
        assert all(torch.isfinite(tensor).all() for tensor in (output, *gradients))


def test_query_and_key_take_the_dtype_of_the_value():
    query, key, value = states()
    output, _ = attention.sdpa_attention(LAYER, query, key, value.bfloat16(), None, segment_ids=SEGMENTS)
    assert output.dtype == torch.bfloat16


def test_with_a_cache_the_mask_of_the_caller_is_final():
    query, key, value = states()
    last = torch.zeros(2, 1, 1, 13, dtype=torch.bool)
    last[..., -3:] = True
    output, _ = attention.sdpa_attention(LAYER, query[:, :, -1:], key, value, last, scaling=0.3, sliding_window=2)
    expected = reference(query[:, :, -1:], key, value, last[:, 0], 0.3)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("asked", "device_type", "chosen"),
    [
        ("auto", "tpu", attention.SPLASH), ("splash", "tpu", attention.SPLASH), ("flash", "tpu", attention.FLASH),
        ("sdpa", "tpu", attention.SDPA),
        ("auto", "xla-cpu", attention.SDPA), ("auto", "cuda", attention.SDPA), ("sdpa", "cpu", attention.SDPA),
    ],
)  # fmt: skip
def test_choose(asked, device_type, chosen):
    assert attention.choose(asked, device_type) == chosen


def test_choose_refuses_flash_off_tpu_and_unknown_names():
    with pytest.raises(ValueError, match="attention=flash is a TPU kernel and this device is cuda: use attention=auto"):
        attention.choose("flash", "cuda")
    with pytest.raises(ValueError, match="attention is 'eager': use auto, splash, flash or sdpa"):
        attention.choose("eager", "cpu")


def test_attention_dropout_is_refused_in_training_only():
    query, key, value = states()
    with pytest.raises(ValueError, match=r"attention_dropout=0.1: set it to 0"):
        attention.sdpa_attention(torch.nn.Module().train(), query, key, value, None, dropout=0.1)
    attention.sdpa_attention(LAYER, query, key, value, None, dropout=0.1)


@pytest.mark.parametrize(
    ("length", "padded"), [(1, 128), (128, 128), (129, 256), (300, 512), (513, 1024), (1025, 2048)]
)
def test_padded_length(length, padded):
    assert attention.padded_length(length) == padded


def model(config, implementation):
    attention.register()
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    return built.requires_grad_(False)


class HostReads(TorchDispatchMode):
    """Counts what would stop a device for the host: `.item()`, `if tensor`, `.nonzero()`."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal"):
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def kernel_stand_in(query, key, value, segment_ids, scaling):
    assert segment_ids.dtype == torch.int32 and query.shape[2] % 128 == 0 and query.shape == key.shape == value.shape
    mask = attention.block_diagonal_mask(segment_ids)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), Gemma2Config(head_dim=8, sliding_window=4, **SMALL)])
def test_a_packed_forward_reads_nothing_on_the_host(config, monkeypatch):
    monkeypatch.setattr(pallas, "flash_attention", kernel_stand_in)
    built = model(config, attention.SDPA)
    ids = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[*range(5), *range(6), 0, 0], [*range(13)]])
    arguments = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    logits = []
    for implementation in (attention.SDPA, attention.FLASH):
        built.set_attn_implementation(implementation)
        with HostReads() as reads:
            logits.append(built(**arguments, **attention.inputs(implementation, SEGMENTS)).logits)
        assert reads.names == []
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-4)
    with HostReads() as reads:
        built(**arguments)
    assert reads.names  # the trap is still there: position_ids alone are read


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), MistralConfig(sliding_window=4, **SMALL)])
def test_a_padding_mask_is_honoured_in_forward_and_generation(config):
    ours, eager = model(config, attention.SDPA), model(config, "eager")
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    arguments = {"input_ids": ids, "attention_mask": mask}
    seen = mask.bool()
    torch.testing.assert_close(ours(**arguments).logits[seen], eager(**arguments).logits[seen], atol=1e-5, rtol=1e-4)
    ours_tokens, eager_tokens = (
        built.generate(**arguments, max_new_tokens=6, do_sample=False) for built in (ours, eager)
    )
    assert ours_tokens.tolist() == eager_tokens.tolist()


# torch_xla traces a kernel to a payload and passes it to a TPU custom call. Here the payload is the kernel itself, and
# the custom call runs it in Pallas' interpreter on the operands it was given. So all but the TPU's code is tested.
INTERPRETER = """
import functools, json
import jax, jax.numpy as jnp, numpy, torch, torch_xla
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu import flash_attention as kernels
import torch_xla.experimental.custom_kernel as custom_kernel
from tpu_kit.xla import pallas as lowering
from tpu_kit.models import attention

kernels.pl.pallas_call = functools.partial(pallas.pallas_call, interpret=True)
calls = []

def trace_pallas(kernel, *args, static_argnums=None, static_argnames=None, use_cache=False, **kwargs):
    return (kernel, args, kwargs), [arg for arg in args if torch.is_tensor(arg)]

def custom_call(operands, payload, shapes, dtypes):
    kernel, args, kwargs = payload
    calls.append(kernel.__name__)
    query, key, value, q_segments, kv_segments, *rest = [jnp.asarray(tensor.cpu().numpy()) for tensor in operands]
    segments = kernels.SegmentIds(q_segments[..., 0], kv_segments[:, 0])
    if rest:
        l, m, output_gradient, inner = rest
        rest = [l[..., 0], m[..., 0], output_gradient, inner[..., 0]]
    else:
        rest = args[5:]
    results = jax.tree.leaves(kernel(query, key, value, None, segments, *rest, **kwargs))
    made = []
    for result, shape, dtype in zip(results, shapes, dtypes, strict=True):
        tensor = torch.from_numpy(numpy.array(result))
        tensor = tensor[..., None].expand(*shape) if tensor.ndim < len(shape) else tensor
        assert tensor.shape == torch.Size(shape), (kernel.__name__, tensor.shape, shape)
        made.append(tensor.to(dtype).to(operands[0].device))
    return made

lowering._trace_pallas, torch_xla._XLAC._xla_tpu_custom_call = trace_pallas, custom_call
"""

KERNEL_ALONE = """
layer = torch.nn.Module()
errors = []
for batch, heads, pairs, length, head_dim in ((3, 4, 2, 150, 16), (1, 1, 1, 1030, 8)):
    torch.manual_seed(0)
    query, key, value = (torch.randn(batch, count, length, head_dim) for count in (heads, pairs, pairs))
    upstream = torch.randn(batch, length, heads, head_dim)
    segments = torch.ones(batch, length, dtype=torch.int64)
    segments[:, length // 3:], segments[0, length // 2:], segments[:, -7:] = 2, 3, 0

    def run(function, device):
        inputs = [tensor.to(device).requires_grad_() for tensor in (query, key, value)]
        output, _ = function(layer, *inputs, None, scaling=0.3, segment_ids=segments.to(device))
        output.backward(upstream.to(device))
        return [output.detach().cpu(), *(tensor.grad.cpu() for tensor in inputs)]

    ours = run(attention.flash_attention, torch_xla.device())
    expected = run(attention.sdpa_attention, "cpu")
    errors += [float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True)]
blocks = {length: attention.padded_length(length) for length in range(1, 5000, 37)}
sizes = {name: size for name, size in custom_kernel.FlashAttention.DEFAULT_BLOCK_SIZES.items() if name != "block_b"}
uneven = [(name, length) for length in blocks.values() for name, size in sizes.items() if length % min(size, length)]
print(json.dumps({"error": max(errors), "calls": calls, "uneven": uneven}))
"""


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax (torch_xla[pallas])")
def test_the_kernel_gives_the_numbers_of_the_reference_forward_and_backward():
    found = json.loads(run_python(INTERPRETER + KERNEL_ALONE, env={"JAX_PLATFORMS": "cpu"}).stdout.splitlines()[-1])
    # Both in fp32. The reference itself is compared with attention written out above.
    assert found["error"] < 1e-5
    assert found["calls"] == 2 * ["_flash_attention_impl", "_flash_attention_bwd_dq", "_flash_attention_bwd_dkv"]
    assert found["uneven"] == []  # a block that does not divide the row is wrong without a word


KERNEL_IN_A_MODEL = """
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from tpu_kit.config.loader import LoraConfig
from tpu_kit.training.loss import shift_labels
from tpu_kit.models.causal_lm import (
    adapt,
    hidden_states,
    output_embedding,
    to_device,
    trainable_parameters,
    use_attention,
)

device = torch_xla.device()  # before the first backward pass: autograd makes its threads for the devices there are
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=61, initializer_range=0.2))
model = adapt(model, LoraConfig(r=4, alpha=8.0), "fp32").train()
parameters = trainable_parameters(model)
for name, parameter in parameters.items():
    if "lora_B" in name:
        parameter.data.normal_(std=0.2)
lengths = (40, 41, 1, 30)
documents = [torch.randint(0, 61, (length,)) for length in lengths]
padding = 16
packed = {
    "input_ids": torch.cat([*documents, torch.zeros(padding, dtype=torch.int64)])[None],
    "segment_ids": torch.tensor([sum(([i + 1] * n for i, n in enumerate(lengths)), []) + [0] * padding]),
    "position_ids": torch.tensor([sum((list(range(n)) for n in lengths), []) + [0] * padding]),
}

def losses(batch, device):
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    head = output_embedding(model)
    logits = F.linear(hidden_states(model, batch), head.weight, head.bias)[0]
    labels = shift_labels(batch["input_ids"], batch.get("segment_ids"))[0]
    each = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    grads = torch.autograd.grad(each.sum(), list(trainable_parameters(model).values()))
    return each.detach().cpu(), torch.cat([grad.cpu().flatten() for grad in grads])

alone = [losses({"input_ids": document[None]}, "cpu") for document in documents]
expected = torch.cat([each for each, _ in alone] + [torch.zeros(padding)])
gradient = sum(grad for _, grad in alone)
to_device(model, device)
attention.SplashSettings = functools.partial(
    attention.SplashSettings, interpret=True
)
use_attention(model, KERNEL, "tpu")
each, grad = losses(packed, device)
print(json.dumps({"error": float((each - expected).abs().max()), "tokens": int((expected != 0).sum()),
                  "gradient": float((grad - gradient).abs().max() / gradient.abs().max()), "calls": sorted(calls)}))
"""


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax (torch_xla[pallas])")
@pytest.mark.parametrize("kernel", ["flash", pytest.param("splash", marks=pytest.mark.slow)])
def test_packed_with_a_kernel_each_token_has_the_loss_that_it_has_alone(kernel):
    """A real model, its attention by the kernel; each document alone by sdpa on the CPU. All in fp32."""
    script = f"KERNEL = {kernel!r}{INTERPRETER}{KERNEL_IN_A_MODEL}"
    found = json.loads(run_python(script, env={"JAX_PLATFORMS": "cpu"}, timeout=900).stdout.splitlines()[-1])
    assert found["tokens"] == 40 + 41 + 1 + 30 - 4
    assert found["error"] < 1e-5
    assert found["gradient"] < 1e-5
    passes = ["_flash_attention_bwd_dkv", "_flash_attention_bwd_dq", "_flash_attention_impl"]
    assert found["calls"] == (sorted(2 * passes) if kernel == "flash" else [])


FOR_THE_TPU_COMPILER = """
import json, os
import torch, torch_xla
from tests.support.tpu_program import compile_graph
from torch_xla.core.xla_builder import create_placeholder_tensor
from tpu_kit.models import attention

found = []
for shape in ((2, 4, 2, 200, 64), (1, 2, 1, 256, 96)):
    batch, heads, pairs, length, head_dim = shape
    inputs = [create_placeholder_tensor((batch, count, length, head_dim), torch.bfloat16).requires_grad_()
              for count in (heads, pairs, pairs)]
    segments = create_placeholder_tensor((batch, length), torch.int64)
    with attention.lowering_for_tpu():
        assert attention.choose("flash", "xla-cpu") == attention.FLASH
        output, _ = attention.flash_attention(torch.nn.Module(), *inputs, None, scaling=0.1, segment_ids=segments)
        gradients = torch.autograd.grad(output, inputs, create_placeholder_tensor(output.shape, output.dtype))
        results = [output, *gradients]
        text = torch_xla._XLAC._get_xla_tensors_hlo(results)
        program = compile_graph(results)
    found.append([text.count("tpu_custom_call"), program.get_compiled_memory_stats().generated_code_size_in_bytes])
print(json.dumps(found), flush=True)
os._exit(0)  # libtpu hangs at times on its way out
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
def test_the_tpu_compiler_accepts_the_kernel_forward_and_backward():
    for calls, code_bytes in json.loads(run_python(FOR_THE_TPU_COMPILER, env=ENVIRONMENT).stdout.splitlines()[-1]):
        assert calls == 3  # forward, dq, dk and dv
        assert code_bytes > 0


@pytest.mark.parametrize("function", [attention.sdpa_attention, attention.flash_attention, attention.splash_attention])
def test_an_argument_that_attention_does_not_know_is_an_error(function):
    query, key, value = states()
    neutral = {"position_ids": SEGMENTS, "use_cache": False, "output_attentions": False, "is_causal": True,
               "s_aux": None, "cu_seq_lens_q": None}  # fmt: skip
    attention.sdpa_attention(LAYER, query, key, value, None, **neutral)
    for unknown, text in (({"s_aux": torch.zeros(4)}, "s_aux"), ({"is_causal": False}, "is_causal=False"),
                          ({"position_bias": value, "indices": value}, "position_bias, indices")):  # fmt: skip
        with pytest.raises(ValueError) as refusal:
            function(LAYER, query, key, value, None, segment_ids=SEGMENTS, **neutral | unknown)
        assert str(refusal.value) == (
            f"the model passes {text} to its attention, and the kit's attention does not implement that"
        )


@pytest.mark.parametrize("function", [attention.flash_attention, attention.splash_attention])
def test_the_view_of_the_segment_ids_is_never_taken_for_a_mask(function):
    given = attention.inputs(attention.SPLASH, SEGMENTS)
    with pytest.raises(ValueError, match="the model does not pass its keyword arguments, the segment ids"):
        function(LAYER, *states(), given["attention_mask"])
