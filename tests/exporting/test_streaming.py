"""A merge of one weight at a time equals PEFT's merge, with little memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.exporting.test_export import in_process, make_run
from tests.support.child_processes import run_python
from tests.support.expert_functions import write_fp8, write_mixture
from tests.support.generation_functions import MIXED, QUICK_FAMILIES, make
from tests.support.quantize_functions import write_model
from tpu_kit.config.loader import ModelConfig
from tpu_kit.exporting.equivalence import logits
from tpu_kit.exporting.export import export
from tpu_kit.exporting.streaming import stream
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.model.weights.loading import load_base

__all__ = ["in_process"]  # a fixture
MEMORY = """
import sys
from pathlib import Path
import torch
from tests.support.peak_memory import PeakMemory
from tpu_kit.config.loader import ModelConfig
from tpu_kit.exporting.equivalence import logits
from tpu_kit.exporting.streaming import stream

def use(name, adapter, out):
    streamed = stream(ModelConfig(name=name, base_dtype="fp32"), Path(adapter))
    Path(out).mkdir()
    for streamed.merging in (False, True):
        logits(streamed.model, [[1, 2, 3, 4]])
    streamed.save(Path(out), torch.bfloat16)

use(*sys.argv[4:6], sys.argv[3] + "-first")  # the libraries
with PeakMemory() as peak:
    use(*sys.argv[1:4])
print("figures", peak.most - peak.before)
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("tied", "changes"), [(True, {"lora.dora": True}), (False, {"lora.rslora": True, "base_dtype": "int8"})]
)
def test_a_merge_is_peft_s_bit_for_bit_in_the_files_of_the_base(
    tmp_path: Path, tied: bool, changes: dict[str, Any]
) -> None:
    base = write_model(tmp_path / "base", shards="100KB", tie_word_embeddings=tied)
    config = make_run(tmp_path / "run", str(base), **changes)
    done = export(tmp_path / "run", "merged", tmp_path / "merged")
    files = {path.name for path in base.glob("model*")}
    assert len(files) > 2 and files <= set(done.files)
    settings = replace(config.model, base_dtype="fp32")
    peft: Any = load_for_generation(settings, tmp_path / "run" / "adapter")
    wanted = peft.merge_and_unload(safe_merge=True).to(torch.bfloat16).state_dict()
    found = weights(tmp_path / "merged")
    assert set(found) == set(wanted) - ({"lm_head.weight"} if tied else set())
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("kind", "experts", "stored"),
    [("qwen3_moe", 2, "7.gate_proj.weight"), ("gpt_oss", 2, "gate_up_proj"), ("glm4_moe", 0, "7.up_proj.weight")],
)
def test_experts_are_merged_and_written_as_the_family_s_files_have_them(
    tmp_path: Path, kind: str, experts: int, stored: str
) -> None:
    """Files of Qwen3-MoE and GLM-4 have matrices per expert; files of gpt-oss have MXFP4."""
    base = write_mixture(kind, tmp_path / "base", shards="40KB", intermediate_size=32, vocab_size=512)
    config = make_run(tmp_path / "run", str(base), **{"lora.r": 4, "lora.experts": experts})
    assert stream(config.model, tmp_path / "run" / "adapter") is not None
    done = export(tmp_path / "run", "merged", tmp_path / "merged", dtype="fp32")
    assert kind == "gpt_oss" or sum(name.endswith(".safetensors") for name in done.files) > 2
    found = weights(tmp_path / "merged")
    assert f"model.layers.1.mlp.experts.{stored}" in found
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not hasattr(merged.config, "quantization_config")
    plain = load_base(config.model, torch.float32).float()  # transformers 5.15 makes bf16 of MXFP4
    tuned = PeftModel.from_pretrained(plain, tmp_path / "run" / "adapter")
    for ours, theirs in zip(*(logits(model, [[*range(5, 60)]]) for model in (merged, tuned)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    if kind == "gpt_oss":  # in bf16 it sends the token of one position to other experts
        rounded = export(tmp_path / "run", "merged", tmp_path / "rounded")
        assert "at 90% of the positions" in str(rounded)


def test_fp8_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
    config = ModelConfig(name=str(write_fp8(write_mixture("qwen3_moe", tmp_path, **sizes))), base_dtype="fp32")
    streamed, whole = stream(config), load_base(config, torch.float32).float()
    assert streamed is not None
    streamed.save(tmp_path / "merged", torch.float32)
    assert torch.equal(logits(streamed.model, [[*range(40)]])[0], logits(whole, [[*range(40)]])[0])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in merged.state_dict().items())


@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_a_family_says_the_same_from_its_files(tmp_path: Path, family: str) -> None:
    model = make(family)
    model.save_pretrained(tmp_path / "model")
    streamed = stream(ModelConfig(name=str(tmp_path / "model"), base_dtype="fp32"))
    assert streamed is not None
    assert torch.equal(logits(streamed.model, MIXED[:1])[0], logits(model, MIXED[:1])[0])
    assert all(weight.device.type == "meta" for weight in streamed.model.parameters())


@pytest.mark.usefixtures("in_process")
def test_a_base_with_other_names_is_loaded_instead(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    config = make_run(tmp_path / "run", str(base))
    assert stream(config.model, tmp_path / "run" / "adapter") is not None
    model = AutoModelForCausalLM.from_pretrained(base)
    (base / "model.safetensors").unlink()
    torch.save(model.state_dict(), base / "pytorch_model.bin")
    (tmp_path / "run" / "adapter" / "base.json").unlink()  # which knows the weights by the old files
    assert stream(config.model, tmp_path / "run" / "adapter") is None
    assert "merged in fp32" in str(export(tmp_path / "run", "merged"))


@pytest.mark.slow
def test_a_merge_takes_the_memory_of_two_layers_and_one_weight(tmp_path: Path) -> None:
    sizes = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 8, "num_attention_heads": 8}
    base = write_model(tmp_path / "base", shards="30MB", vocab_size=4096, tie_word_embeddings=False, **sizes)
    make_run(tmp_path / "run", str(base))
    small = write_model(tmp_path / "small")
    make_run(tmp_path / "first", str(small))
    env = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    runs = (base, tmp_path / "run" / "adapter", tmp_path / "out", small, tmp_path / "first" / "adapter")
    done = run_python(["-c", MEMORY, *map(str, runs)], env=env)
    most = int(next(line for line in done.stdout.splitlines() if line.startswith("figures")).split()[1])
    found = weights(base)
    layer = sum(tensor.nbytes for name, tensor in found.items() if ".layers.0." in name)
    adapter = sum(tensor.nbytes for tensor in weights(tmp_path / "run" / "adapter").values())
    largest = max(tensor.nbytes for tensor in found.values())
    print(f"{most} bytes; two layers {2 * layer}, the largest weight {largest}, the adapter {adapter}")
    assert most < 2 * layer + largest + adapter
    assert 2 * layer + largest + adapter < 0.25 * 4 * sum(tensor.numel() for tensor in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_merge_of_experts_takes_the_memory_of_a_layer_s_twice(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8}
    base = write_mixture(kind, tmp_path / "base", shards="30MB", vocab_size=512, **sizes)
    small = write_mixture(kind, tmp_path / "small", intermediate_size=32, vocab_size=512)
    for folder, run in ((base, "run"), (small, "first")):
        make_run(tmp_path / run, str(folder), **{"lora.experts": 2})
    env = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    runs = (base, tmp_path / "run" / "adapter", tmp_path / "out", small, tmp_path / "first" / "adapter")
    done = run_python(["-c", MEMORY, *map(str, runs)], env=env)
    most = int(next(line for line in done.stdout.splitlines() if line.startswith("figures")).split()[1])
    layer = 8 * 3 * 512 * 512 * 4  # its experts in fp32
    adapter = sum(tensor.nbytes for tensor in weights(tmp_path / "run" / "adapter").values())
    print(f"{most} bytes; the experts of a layer {layer}, the adapter {adapter}")
    assert most < 2.5 * layer + adapter < 0.5 * 8 * layer
