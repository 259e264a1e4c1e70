"""Model families with tiny random weights and packed documents, against transformers on each document alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.support import layer_functions
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed.launch import launch
from tpu_kit.generation import reference_check
from tpu_kit.machine.checks import Machine

pytestmark = pytest.mark.usefixtures("quick_xla")
needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")

LOCAL, GLOBAL = "sliding_attention", "full_attention"
DEPTH = {"num_hidden_layers": 4}
MAMBA = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
GEMMA4 = {
    "num_hidden_layers": 8, "layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL] * 2, "hidden_size": 64, "head_dim": 16,
    "global_head_dim": 32, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16,
}  # fmt: skip
# model_type, and the settings of its default configuration that show its differences from other families.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 8, **DEPTH}),
    "mistral": ("mistral", DEPTH),
    "ministral3": ("ministral3", DEPTH),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, **DEPTH}),
    "qwen3": ("qwen3", DEPTH),
    "gemma2": ("gemma2", DEPTH),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 6}),
    "gemma4": ("gemma4_text", {**GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4 per-layer embeddings": ("gemma4_text", GEMMA4),
    "gemma4 shared keys": (
        "gemma4_text",
        {**GEMMA4, "num_kv_shared_layers": 4, "use_double_wide_mlp": True, "num_hidden_layers": 10,
         "layer_types": [LOCAL, LOCAL, GLOBAL] * 2 + [LOCAL, GLOBAL] * 2},
    ),
    "phi3": ("phi3", DEPTH),
    "smollm3": ("smollm3", {"num_hidden_layers": 8}),
    "olmo2": ("olmo2", DEPTH),
    "olmo3": ("olmo3", {"num_hidden_layers": 8}),
    "granite": ("granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.05, "logits_scaling": 2.0, **DEPTH}),
    "glm4": ("glm4", DEPTH),
    "exaone4": ("exaone4", {"num_hidden_layers": 8}),
    "cohere2": ("cohere2", {"num_hidden_layers": 8}),
    "ernie4_5": ("ernie4_5", DEPTH),
    "starcoder2": (
        "starcoder2",
        {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "residual_dropout": 0.0,
         "embedding_dropout": 0.0, **DEPTH},
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 128, **DEPTH}),
    "seed_oss": ("seed_oss", {"attention_dropout": 0.0, "residual_dropout": 0.0, **DEPTH}),
    "arcee": ("arcee", DEPTH),
    "lfm2": ("lfm2", {"full_attn_idxs": [2], **DEPTH}),
    "gpt_oss": ("gpt_oss", DEPTH),
    "qwen3_5": ("qwen3_5_text", {"num_hidden_layers": 6, "full_attention_interval": 3}),  # a loop within a loop
    "qwen3_next": ("qwen3_next", {"mlp_only_layers": [0, 1, 2, 3], **DEPTH}),
    "granitemoehybrid": ("granitemoehybrid", {"layer_types": MAMBA, "num_local_experts": 0, **DEPTH}),
    "bamba": ("bamba", {"attn_layer_indices": [2], **DEPTH}),
    "falcon_h1": ("falcon_h1", DEPTH),
    "nemotron_h": ("nemotron_h", {}),  # with experts
}  # fmt: skip
QUICK = ("gemma4 shared keys",)
STATES = ("lfm2", "qwen3_5", "qwen3_next", "granitemoehybrid", "bamba", "falcon_h1", "nemotron_h")
EXPERTS = ("gpt_oss", "nemotron_h")
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def configuration(family: str) -> PreTrainedConfig:
    name, changes = FAMILIES[family]
    return CONFIG_MAPPING[name](**changes)


def run(rank: int, **settings: Any) -> TrainConfig:
    return load_config(None, {"model.name": "embedded", "lora.r": rank, "remat": "full", **settings})


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "full"])
def test_in_a_loop_on_the_cpu_logits_and_gradients_are_those_of_transformers(family: str, rank: int) -> None:
    model, config = configuration(family), run(rank, scan_layers="on")
    found = reference_check.differences(config, model, "cpu", torch.device("cpu"))
    worst = max(found, key=found.__getitem__)
    print(f"{family:30} {rank} logits {found['logits']:.1e} gradients {found[worst]:.1e} {worst}")
    limit = 1e-4 if family in STATES else 1e-5
    if found[worst] > limit:  # sharp attention amplifies rounding, in transformers too
        own = max(layer_functions.rounding(config, model).values())
        print(f"{family:30} {rank} transformers in fp32 against fp64 {own:.1e}")
        assert found[worst] <= own


@pytest.mark.parametrize("family", EVERY)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    reference_check.check_generation(configuration(family))


@needs_xla
@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "full"])
def test_in_a_loop_on_xla_they_are_those_of_transformers_as_without_a_loop(
    tmp_path: Path, family: str, rank: int
) -> None:
    """In two replicas, and on a mesh of two devices."""
    if family in EXPERTS and not rank:
        pytest.skip("weights of experts are frozen on XLA, which test_experts.py tests")
    configuration(family).save_pretrained(tmp_path)
    settings = {"model.name": str(tmp_path), "device_type": "xla-cpu"}
    replicas = launch(layer_functions.with_and_without_loop, run(rank, num_replicas=2, **settings))
    sharded = launch(layer_functions.with_and_without_loop, run(rank, mesh="fsdp=2", **settings), sharded=True)
    (worst, most), (_, on_mesh), (_, own) = replicas["on"], sharded["on"], replicas["off"]
    print(f"{family:30} {rank} XLA loop {most:.1e} unrolled {own:.1e} fsdp=2 {on_mesh:.1e} {worst}")
    assert replicas["recompiles"] == sharded["recompiles"] == 0
    assert max(most, on_mesh) <= max(2 * own, 1e-5)
