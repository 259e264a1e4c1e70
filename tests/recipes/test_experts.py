"""Mixtures of experts train, answer and are exported on XLA like transformers' experts on the CPU."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.expert_functions import SIZES
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.exporting.export import export
from tpu_kit.generation.answers import generate
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.generation.prompts import PromptCodec
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.checks import Machine
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.recipes import sft

pytestmark = [
    pytest.mark.usefixtures("quick_xla"),
    pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]
WAYS: dict[str, dict[str, Any]] = {
    "replicas": {"device_type": "xla-cpu", "num_replicas": 2, "batch_size": 2},
    "fsdp": {"device_type": "xla-cpu", "mesh": "fsdp=2", "batch_size": 2},
    "fsdp of four": {"device_type": "xla-cpu", "mesh": "fsdp=4", "batch_size": 1},
    "data": {"device_type": "xla-cpu", "mesh": "data=2,fsdp=2", "batch_size": 1},
}


OWN: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "enable_moe_block": True, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
    },
    "qwen3_5_moe_text": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32, "vocab_size": 704,  # transformers gives its tokenizer another id
    },
}  # fmt: skip
"""Settings that make default configurations small, with two iterations of the loop."""


def mixture(world: Path, kind: str) -> Path:
    """A two-layer model with the tokenizer of `world`."""
    folder = world / kind
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(world / "model")
        ids = {name: tokenizer.eos_token_id for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
        sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        sizes["num_hidden_layers"] = 2
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            sizes = SIZES | sizes | ids | {"vocab_size": len(tokenizer), "first_k_dense_replace": 1} | OWN.get(kind, {})
            config = CONFIG_MAPPING[kind](**sizes)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def run(world: Path, kind: str, folder: Path, **changes: Any) -> TrainConfig:
    settings = {
        "model.name": str(mixture(world, kind)), "base_dtype": "fp32", "lora.r": 4, "source": str(world / "rows.jsonl"),
        "max_length": 96, "eval_rows": 4, "generate_rows": 2, "generate_tokens": 16, "max_steps": 3,
        "learning_rate": 1e-2, "global_batch_size": 4, "logging_steps": 1, "device_type": "cpu", "num_replicas": None,
        "output_dir": str(folder / kind), **changes,
    }  # fmt: skip
    config = load_config(None, settings)
    assert sft.train(config).status == "finished"
    return config


def seen(config: TrainConfig) -> tuple[torch.Tensor, Any]:
    """Returns the losses, and the answers of base and tuned model, if the run generated answers."""
    lines = map(json.loads, (config.output_path / "metrics.jsonl").read_text().splitlines())
    file = config.output_path / "eval.json"
    said = json.loads(file.read_text())["samples"] if file.exists() else []
    losses = torch.tensor([line["loss"] for line in lines if line["kind"] == "train"])
    return losses, [(one["base"]["answer"], one["tuned"]["answer"]) for one in said]


@pytest.mark.parametrize(
    ("kind", "ways"), [("qwen3_moe", WAYS), ("mixtral", ["replicas", "fsdp"]), ("glm4_moe", ["fsdp"])]
)
def test_training_and_answers_are_those_of_the_cpu(world: Path, tmp_path: Path, kind: str, ways: Any) -> None:
    losses, answers = seen(run(world, kind, tmp_path / "cpu", num_replicas=1, batch_size=4))
    for way in ways:
        ours, said = seen(run(world, kind, tmp_path / way, **WAYS[way]))
        torch.testing.assert_close(ours, losses, rtol=0, atol=2e-6)
        assert said == answers, way


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_thirty_updates_are_those_of_the_cpu(world: Path, tmp_path: Path, kind: str) -> None:
    # At twice this learning rate, another order of sums sends a token to another expert, which changes a loss by 1e-4.
    long = {"max_steps": 30, "generate_rows": 0, "eval_rows": 0, "learning_rate": 5e-3}
    losses, _ = seen(run(world, kind, tmp_path / "cpu", num_replicas=1, batch_size=4, **long))
    assert losses[-5:].mean() < losses[:5].mean() - 0.1
    for way in ("replicas", "fsdp of four"):
        ours, _ = seen(run(world, kind, tmp_path / way, **WAYS[way], **long))
        torch.testing.assert_close(ours, losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_train_are_resumed_answer_and_are_merged(
    world: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", ModuleType("sentencepiece"))
    sys.modules["sentencepiece"].__spec__ = ModuleSpec("sentencepiece", None)
    own = {"lora.experts": 2, "save_steps": 1}
    losses, answers = seen(run(world, kind, tmp_path / "cpu", num_replicas=1, batch_size=4, **own))
    mesh = run(world, kind, tmp_path / "mesh", **WAYS["fsdp"], **own)
    ours, said = seen(mesh)
    torch.testing.assert_close(ours, losses, rtol=0, atol=2e-6)
    assert said == answers
    with safe_open(mesh.output_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        before = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    shapes = {
        name.partition("experts.")[2]: tuple(one.shape) for name, one in before.items() if "0.mlp.experts" in name
    }
    assert len(shapes) == 4 and shapes["lora_A.weight"] == (16, 32) and shapes["lora_B.weight"] == (64, 16)
    export(mesh.output_path, "merged", tmp_path / "merged", dtype="fp32")  # compares it with the tuned model
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(world / kind, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base, str(mesh.output_path / "adapter"))
    ids = torch.arange(1, 25)[None]
    torch.testing.assert_close(merged(input_ids=ids).logits, tuned(input_ids=ids).logits, rtol=0, atol=1e-5)
    again = run(world, kind, tmp_path / "mesh", **WAYS["fsdp"], **own, max_steps=4)
    assert len(seen(again)[0]) == 4 and torch.equal(seen(again)[0][:3], ours)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN)
def test_whole_models_train_in_the_loop_answer_as_transformers_and_are_read_by_peft(
    world: Path, tmp_path: Path, kind: str
) -> None:
    # At a rate of 1e-2, gemma4's losses on the CPU differ by 1.4e-4 between one pass and four passes.
    own = {"num_replicas": 1, "batch_size": 4, "lora.experts": 2, "learning_rate": 1e-3}
    losses, answers = seen(run(world, kind, tmp_path / "cpu", **own))
    config = run(world, kind, tmp_path / "xla", device_type="xla-cpu", **own)
    ours, said = seen(config)
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=0)
    assert said == answers
    base = AutoModelForCausalLM.from_pretrained(world / kind, dtype=torch.float32)
    tuned: Any = PeftModel.from_pretrained(base, str(config.output_path / "adapter")).eval()
    ids = torch.arange(1, 25)[None]
    loaded = load_for_generation(config.model, config.output_path / "adapter")
    expected = tuned(input_ids=ids).logits
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
    (reply,) = generate(config, ["Tom has 3 pens."], Sampling(12), adapter_dir=config.output_path / "adapter")
    codec = PromptCodec(load_tokenizer(config.model), base, config.data)
    prompt = torch.tensor([codec.encode("Tom has 3 pens.")])
    greedy = tuned.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert list(reply.tokens) == greedy[: len(reply.tokens)] and len(reply.tokens) > 4


def test_merged_weights_have_the_names_of_the_family_and_gguf_is_refused(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", ModuleType("sentencepiece"))
    sys.modules["sentencepiece"].__spec__ = ModuleSpec("sentencepiece", None)
    config = run(world, "qwen3_moe", tmp_path, num_replicas=1, batch_size=4)
    export(config.output_path, "merged", tmp_path / "merged", dtype="fp32")
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file:
        assert "model.layers.1.mlp.experts.7.gate_proj.weight" in set(file.keys())
    with pytest.raises(ValueError, match="no GGUF file of qwen3_moe, a mixture of experts, was compared"):
        export(config.output_path, "gguf-f16")


def test_integers_are_kept_in_the_cache(world: Path, tmp_path: Path) -> None:
    changes = {"base_dtype": "int4", "quant_group": 16, "quant_cache": str(tmp_path / "cache"), "generate_rows": 0}
    runs = [run(world, "qwen3_moe", tmp_path / str(n), num_replicas=1, batch_size=4, **changes) for n in (1, 2)]
    assert len(list((tmp_path / "cache").glob("*int4-16*/config.json"))) == 1
    losses = [seen(one)[0] for one in runs]
    assert torch.equal(*losses)
    mesh = run(world, "qwen3_moe", tmp_path / "mesh", **WAYS["fsdp"], **changes)
    torch.testing.assert_close(seen(mesh)[0], losses[0], rtol=0, atol=5e-3)  # bf16 products


def test_all_weights_are_not_trained_on_xla(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora\.r=0 trains all weights, but on XLA the weights of experts are frozen"):
        run(world, "qwen3_moe", tmp_path, **{**WAYS["fsdp"], "lora.r": 0})
