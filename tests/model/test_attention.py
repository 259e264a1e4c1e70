from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, Lfm2Config, LlamaConfig, Mamba2Config, MistralConfig

from tests.model.test_causal_lm import splash_stand_in
from tests.support.child_processes import run_loaded
from tpu_kit.model import attention, splash_attention
from tpu_kit.model.attention import sees_all
from tpu_kit.model.loop.layer_inputs import Visibility
from tpu_kit.xla import splash_blocks
from tpu_kit.xla.splash_blocks import padded_length

LAYER = torch.nn.Module().eval()
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SEGMENTS = torch.tensor([[1] * 5 + [2] * 6 + [0] * 2, [1] * 13])


def reference(query, key, value, visible, scaling, softcap=None):
    """Attention of one query at a time over its visible keys."""
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
    mask = Visibility(torch.tensor([[1, 1, 2, 0, 0]])).mask()
    assert mask.int().tolist() == [
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]]
    ]


def test_documents_see_the_prefix_they_share():
    prefixes = torch.tensor([[1, -1, -1, 2, -2]])
    mask = Visibility(torch.tensor([[1, 2, 3, 4, 5]]), prefixes).mask()[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(), True),
        (MistralConfig(sliding_window=4), False),
        (Gemma2Config(), False),
        (Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2), False),
        (Mamba2Config(), False),
    ],
)
def test_prefixes_are_shared_where_every_token_sees_all_earlier_ones(config, expected):
    with torch.device("meta"):
        assert sees_all(AutoModelForCausalLM.from_config(config)) is expected


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 64])
def test_sdpa_equals_attention_written_out(window, softcap):
    query, key, value = states()
    index = torch.arange(13)
    visible = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (index[:, None] >= index)
    if window is not None:
        visible &= index[:, None] - index < window
    expected = reference(query, key, value, visible, 0.3, softcap)
    for mask in (None, Visibility(SEGMENTS).mask()):
        options = {"scaling": 0.3, "sliding_window": window, "softcap": softcap, "visibility": Visibility(SEGMENTS)}
        output, weights = attention.sdpa_attention(LAYER, query, key, value, mask, **options)
        assert weights is None
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("window", "softcap", "special"),
    [(None, None, "prefixes"), (None, 2.0, "sinks"), (37, None, "ahead"), (None, None, "not causal"), (150, 1.5, "")],
)
def test_in_blocks_of_queries_attention_and_its_gradients_are_those_of_whole_rows(
    window, softcap, special, monkeypatch
):
    generator = torch.Generator().manual_seed(1)
    segments = torch.randint(0, 5, (2, 300), generator=generator).sort(descending=True)[0].int()
    prefixes = torch.where(segments == 4, 1, torch.where(segments == 3, -1, 0)) if special == "prefixes" else None
    ahead = torch.randint(0, 4, (2, 300), generator=generator) if special == "ahead" else None
    upstream, found = torch.randn(2, 300, 4, 8, generator=generator), []
    for whole in (4096, 128):
        monkeypatch.setattr(splash_blocks, "WHOLE", whole)
        leaves = [one.requires_grad_() for one in states(300)] + [torch.ones(4, requires_grad=True)]
        options = {"scaling": 0.3, "sliding_window": window, "softcap": softcap, "causal": special != "not causal"}
        options |= {"s_aux": leaves[3]} if special == "sinks" else {}
        visibility = Visibility(segments, prefixes, ahead, 3)
        with attention.bound(attention.SDPA, visibility) as mask:
            given = mask if whole == 128 else None  # in blocks a view that is not used
            output, _ = attention.sdpa_attention(LAYER, *leaves[:3], given, visibility=visibility, **options)
        used = leaves if special == "sinks" else leaves[:3]
        found.append([output, *torch.autograd.grad((output * upstream).sum(), used)])
    assert given.shape == (2, 1, 1, 300)
    for of_blocks, of_rows in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(of_blocks, of_rows, atol=2e-6, rtol=1e-5)


def test_a_block_of_queries_of_any_row_has_as_many_scores():
    sizes = [splash_blocks.query_block(length) for length in (8, 4096, 4097, 8192, 16_384, 32_768, 131_072)]
    assert sizes == [8, 4096, 512, 512, 256, 128, 128] and splash_blocks.WHOLE**2 == 131_072 * 128


def test_padding_gives_no_nan_in_either_direction():
    inputs = [tensor.requires_grad_() for tensor in states()]
    segments = torch.zeros_like(SEGMENTS)
    segments[0, :4] = 1
    for softcap in (None, 5.0):
        output, _ = attention.sdpa_attention(LAYER, *inputs, None, softcap=softcap, visibility=Visibility(segments))
        gradients = torch.autograd.grad(output.sum(), inputs)
        assert all(torch.isfinite(tensor).all() for tensor in (output, *gradients))


def test_query_and_key_take_the_dtype_of_the_value():
    query, key, value = states()
    output, _ = attention.sdpa_attention(LAYER, query, key, value.bfloat16(), None, visibility=Visibility(SEGMENTS))
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
        ("auto", "tpu", attention.SPLASH), ("splash", "tpu", attention.SPLASH), ("sdpa", "tpu", attention.SDPA),
        ("auto", "xla-cpu", attention.SDPA), ("auto", "cuda", attention.SDPA), ("sdpa", "cpu", attention.SDPA),
    ],
)  # fmt: skip
def test_choose(asked, device_type, chosen):
    assert attention.choose(asked, device_type) == chosen


def test_choose_refuses_splash_off_tpu_and_unknown_names():
    with pytest.raises(
        ValueError, match="attention=splash is a TPU kernel and this device is cuda: use attention=auto"
    ):
        attention.choose("splash", "cuda")
    with pytest.raises(ValueError, match="attention is 'eager': use auto, splash or sdpa"):
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
    assert padded_length(length) == padded


def model(config, implementation):
    attention.register()
    splash_attention.register()
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    return built.requires_grad_(False)


class HostReads(TorchDispatchMode):
    """Counts operations for which the device waits for the host: `.item()`, `if tensor`, `.nonzero()`."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal"):
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), Gemma2Config(head_dim=8, sliding_window=4, **SMALL)])
def test_a_packed_forward_reads_nothing_on_the_host(config, monkeypatch):
    monkeypatch.setattr(splash_attention, "splash_kernel", splash_stand_in)
    built = model(config, attention.SDPA)
    ids = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[*range(5), *range(6), 0, 0], [*range(13)]])
    arguments = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    logits = []
    for implementation in (attention.SDPA, attention.SPLASH):
        built.set_attn_implementation(implementation)
        with HostReads() as reads, attention.bound(implementation, Visibility(SEGMENTS)) as mask:
            logits.append(built(**arguments, attention_mask=mask).logits)
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


KERNEL_IN_A_MODEL = """
import functools, json
import torch, torch_xla
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from tpu_kit.config.loader import LoraConfig
from tpu_kit.model import attention
from tpu_kit.training.losses.loss import shift_labels
from tpu_kit.model.trainable import adapt
from tpu_kit.model.causal_lm import hidden_states, to_device, trainable_parameters
from tpu_kit.model.base_model import output_embedding
from tpu_kit.model.preparation import use_attention

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
use_attention(model, "splash", "tpu")
each, grad = losses(packed, device)
print(json.dumps({"error": float((each - expected).abs().max()), "tokens": int((expected != 0).sum()),
                  "gradient": float((grad - gradient).abs().max() / gradient.abs().max())}))
"""


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax (torch_xla[pallas])")
@pytest.mark.slow
def test_packed_with_the_kernel_each_token_has_the_loss_that_it_has_alone():
    """A real model with the kernel, against each document alone with sdpa on the CPU. All in fp32."""
    found = json.loads(run_loaded(KERNEL_IN_A_MODEL, env={"JAX_PLATFORMS": "cpu"}, timeout=900).stdout.splitlines()[-1])
    assert found["tokens"] == 40 + 41 + 1 + 30 - 4
    assert found["error"] < 1e-5
    assert found["gradient"] < 1e-5


@pytest.mark.parametrize("function", [attention.sdpa_attention, splash_attention.splash_attention])
def test_an_argument_that_attention_does_not_know_is_an_error(function):
    query, key, value = states()
    neutral = {"position_ids": SEGMENTS, "use_cache": False, "output_attentions": False, "is_causal": True,
               "s_aux": None, "cu_seq_lens_q": None}  # fmt: skip
    attention.sdpa_attention(LAYER, query, key, value, None, **neutral)
    for unknown, text in (({"bias": torch.zeros(4)}, "bias"), ({"is_causal": False}, "is_causal=False"),
                          ({"position_bias": value, "indices": value}, "position_bias, indices")):  # fmt: skip
        with pytest.raises(ValueError) as refusal:
            function(LAYER, query, key, value, None, visibility=Visibility(SEGMENTS), **neutral | unknown)
        assert str(refusal.value) == (
            f"the model passes {text} to its attention, and the kit's attention does not implement that"
        )
