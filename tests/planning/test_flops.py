"""FLOPs of traced layers against torch's own counter over whole models, forward and backward."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tpu_kit.config.loader import ModelConfig, TrainConfig, load_config
from tpu_kit.model.families.linear_attention import CHUNK
from tpu_kit.model.meta_model import shape_of
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.planning.cost import model_flops

LENGTH = 128
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
          "global_head_dim": 64}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "gemma4_text": WINDOWS | GEMMA4, "gpt_oss": EXPERTS | WINDOWS,
    "qwen3_moe": EXPERTS,
}  # fmt: skip


def build(family: str, device: str = "cpu", **changed: Any) -> Any:
    sizes = SIZES | {"num_hidden_layers": 2} | FAMILIES.get(family, {}) | changed
    config = CONFIG_MAPPING[family](**sizes, attn_implementation="eager", experts_implementation="eager")
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


def run(*settings: str) -> TrainConfig:
    return load_config(None, ["base_dtype=fp32", f"max_length={LENGTH}", *settings])


def counted(model: Any) -> float:
    """FLOPs per token of a forward and backward pass, counted by torch per operator."""
    model.enable_input_require_grads()  # else the first layer makes none
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(96, (1, LENGTH))).logits.sum().backward()
    return counter.get_total_flops() / LENGTH


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_for_mfu_are_those_of_the_whole_model(family: str) -> None:
    """Windows count as the whole row, and experts by the share that a token is sent to."""
    shape, model = shape_of(build(family, "meta"), family), build(family)
    assert model_flops(run("r=0"), shape) == pytest.approx(counted(model), rel=2e-3)
    targets = sorted({one.path.rpartition(".")[2] for one in shape.linears})
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    assert model_flops(run("r=4"), shape) == pytest.approx(counted(adapted), rel=2e-3)


def test_flops_for_mfu_of_an_8b_model_and_of_trained_embeddings() -> None:
    """Four per number in Llama 3.1 8B's matrices (6.98e9 in layers, 0.53e9 in the head), plus attention."""
    shape = read_shape(ModelConfig(name="meta-llama/Llama-3.1-8B-Instruct"))
    layer, head = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336, 128256 * 4096
    adapters = 32 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    frozen = 4 * (32 * layer + head) + 6 * adapters + 12 * 32 * 4096 * LENGTH
    for dtype in ("fp32", "int4"):
        assert model_flops(run("r=1", f"base_dtype={dtype}"), shape) == frozen
    assert model_flops(run("r=1", "lora.full=[lm_head]"), shape) == frozen + 2 * head
    assert model_flops(run("r=1", "lora.full=[embed_tokens]"), shape) == frozen  # a token looks up a row
    assert model_flops(run("r=0"), shape) == frozen + 2 * (32 * layer + head) - 6 * adapters


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_padding_of_experts_does_not_count_for_mfu(family: str) -> None:
    """A step multiplies with it, from 144 to 256; three of eight experts are chosen, and their adapters."""
    sizes = {"hidden_size": 160, "intermediate_size": 144, "moe_intermediate_size": 144}
    shape = shape_of(build(family, "meta", **sizes), family)
    attention = 2 * 160 * 4 * 32 + 2 * 160 * 2 * 32
    weights = 96 * 160 + 2 * (attention + 160 * 8 + 3 * 3 * 160 * 144)
    frozen = 4 * weights + 12 * 2 * 4 * 32 * LENGTH
    adapters = 2 * (2 * (160 + 4 * 32) + 2 * (160 + 2 * 32))
    assert model_flops(run("r=1"), shape) == pytest.approx(frozen + 6 * adapters, rel=1e-9)
    of_experts = model_flops(run("r=1", "lora.experts=2"), shape) - model_flops(run("r=1"), shape)
    assert of_experts == 6 * 2 * 3 * 2 * (256 + 2 * 256 + 256 + 256)
    assert shape.flops(1, 0, 0) == pytest.approx(2 * 2 * (attention + 160 * 8 + 3 * 3 * 256 * 256), rel=1e-9)


def test_flops_of_the_delta_rule_are_those_of_its_chunks() -> None:
    """With the chunks that the backward pass computes again, and 5 levels of an inverse whose gradient is 2 products.

    Before them the layer has linear layers alone.
    """
    shape = read_shape(ModelConfig(name="Qwen/Qwen3.5-4B"))
    layer = next(kind for kind in shape.kinds if kind.state)
    forward, backward, weights = layer.products
    heads, keys, values = 32, 128, 128
    products = 3 * keys * values + 2 * CHUNK * (keys + values)
    assert layer.state == heads * keys * values
    assert weights == 2 * sum(one.inputs * one.outputs for one in layer.linears)
    assert forward - weights == pytest.approx(2 * heads * (products + 10 * CHUNK**2))
    assert backward - forward == pytest.approx(2 * heads * (2 * products + 2 * CHUNK**2))
