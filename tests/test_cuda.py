"""The kit on an NVIDIA GPU, compared with the CPU and with transformers; skipped where there is none.

`python -m pytest tests/test_cuda.py -s` prints the figures; tests/README.md has them for an H100.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen2Config

from tests.integration.test_interruption import LONG, complete, reached, start
from tests.model.test_families import STATES, configuration, run
from tests.support.compiler_models import QWEN2_500M, write_config
from tests.support.quantize_functions import dense_of
from tests.training.test_resume import ended, run_config
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed.detection import seen_on
from tpu_kit.distributed.replica.backends import CudaRuntime
from tpu_kit.generation import reference_check
from tpu_kit.generation.answers import generate
from tpu_kit.model import causal_lm as models
from tpu_kit.model import preparation, trainable
from tpu_kit.model.weights.quantization import QuantizedLinear, Scheme
from tpu_kit.planning.memory.memory_estimate import estimate
from tpu_kit.planning.oom_recovery import OutOfMemory
from tpu_kit.recipes.distillation import distill
from tpu_kit.recipes.grpo import grpo
from tpu_kit.recipes.sft import train
from tpu_kit.training.metrics import read_metrics
from tpu_kit.training.objectives import SupervisedObjective
from tpu_kit.training.step import prepare_model, train_step

if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no NVIDIA GPU here", allow_module_level=True)
GPU = torch.device("cuda", 0)
GIB = 2**30
QUESTION = "Tom has 12 apples and gives 5 of them to Mia. How many apples does Tom have now?"


@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_5", "gpt_oss", "qwen3_moe"])
def test_logits_and_gradients_of_packed_documents_are_those_of_transformers(family: str, rank: int) -> None:
    model = CONFIG_MAPPING[family](num_hidden_layers=4) if family == "qwen3_moe" else configuration(family)
    found = reference_check.differences(run(rank), model, "cuda", GPU)
    worst = max(found, key=found.__getitem__)
    print(f"FIGURE {family} {rank}: logits {found['logits']:.1e}, gradients {found[worst]:.1e} ({worst})")
    assert found[worst] <= (1e-4 if family in STATES else 5e-5)


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 32)], ids=str)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_a_layer_of_integers_multiplies_with_what_they_stand_for(
    scheme: Scheme, dtype: torch.dtype, limit: float
) -> None:
    layer = QuantizedLinear(512, 384, scheme)
    layer.weight, layer.scale = scheme.quantize(torch.randn(384, 512) * 0.05)
    dense = dense_of(scheme, layer.weight, layer.scale, torch.float32).double()
    given = torch.randn(2, 24, 512).to(dtype)
    upstream = torch.randn(2, 24, 384).to(dtype)
    here = given.to(GPU).requires_grad_()
    output = layer.to(GPU)(here)
    output.backward(upstream.to(GPU))
    expected = given.double() @ dense.T, upstream.double() @ dense
    for name, result, right in zip(("output", "gradient"), (output, here.grad), expected, strict=True):
        difference = ((result.cpu().double() - right).norm() / right.norm()).item()
        print(f"FIGURE {scheme} {dtype} {name} {difference:.1e}")
        assert difference < limit


@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_a_packed_document_has_the_states_that_it_has_alone(dtype: str, limit: float) -> None:
    config = load_config("embedded-cot", {"base_dtype": dtype})
    model = models.to_device(trainable.load_model(config.model, config.lora).eval(), GPU)
    preparation.use_attention(model, "auto", "cuda")
    lengths = (200, 50, 130)
    ids = torch.randint(1, 300, (1, sum(lengths)), device=GPU)
    positions, segments = (
        torch.cat([f(n, length) for n, length in enumerate(lengths, 1)])[None].to(GPU)
        for f in (lambda n, length: torch.arange(length), lambda n, length: torch.full((length,), n))
    )
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.no_grad(), torch.profiler.profile(activities=activities) as profile:
        packed = models.hidden_states(model, {"input_ids": ids, "position_ids": positions, "segment_ids": segments})
        torch.cuda.synchronize()
    with torch.no_grad():
        alone = [models.hidden_states(model, {"input_ids": part}) for part in ids.split(lengths, dim=1)]
    expected = torch.cat(alone, dim=1).float()
    difference = ((packed.float() - expected).norm() / expected.norm()).item()
    used = sorted({e.key for e in profile.key_averages() if "attention" in e.key or "fmha" in e.key})
    print(f"FIGURE packed {dtype} {difference:.1e}; {used}")
    assert difference < limit
    assert any(
        f"_{kind}_attention" in name for kind in ("efficient", "cudnn") for name in used
    )  # no scores of all pairs


@pytest.mark.parametrize(
    "changes",
    [
        {"remat": "full"}, {"remat": "outputs"}, {"remat": "none"}, {"torch_compile": False},
        {"optimizer": "adafactor"},
        {"r": 0, "learning_rate": 1e-3}, {"base_dtype": "int8"}, {"base_dtype": "int4", "quant_group": 64},
        {"base_dtype": "bf16"}, {"gradient_accumulation": 2, "remat": "none"},
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()),
)  # fmt: skip
def test_updates_are_those_of_the_cpu(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = {}
    for device in ("cuda", "cpu"):
        settings = {"dropout": 0.0, "logging_steps": 1, "max_steps": 6, "eval_steps": None, **changes}
        train(run_config(tmp_path / device, device_type=device, **settings))
        found[device] = [r["loss"] for r in read_metrics(tmp_path / device) if r["kind"] == "train"]
    worst = max(abs(a / b - 1) for a, b in zip(found["cuda"], found["cpu"], strict=True))
    print(f"FIGURE {changes}: {found['cuda'][0]:.5f} -> {found['cuda'][-1]:.5f}, difference to the CPU {worst:.1e}")
    assert worst < (4e-2 if "base_dtype" in changes else 1e-4)  # their products are in bf16


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    first = start(folder, device_type="cuda")
    reached(first, folder, 6)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    assert complete(folder)[-1] in (4, 8, 12)
    out, err = start(folder, device_type="cuda").communicate(timeout=300)
    assert "resumed          from step" in out, err
    train(run_config(whole, **LONG, device_type="cuda"))
    assert ended(folder) == ended(whole)


def test_when_memory_runs_out_the_setting_that_is_named_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real error of CUDA's allocator, which has a hundredth of the GPU's memory."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.01")
    changes: dict[str, Any] = {
        "device_type": "cuda", "batch_size": 64, "max_length": 256, "remat": "none", "loss_chunk": 16384,
        "eval_rows": 0, "eval_steps": None, "dropout": 0.0, "logging_steps": 1, "torch_compile": False,
    }  # fmt: skip
    tried = []
    while True:
        try:
            train(run_config(tmp_path / "run", **changes))
            break
        except OutOfMemory as error:
            tried.append(error.overrides)
            print(f"FIGURE out of memory: {error.overrides} {str(error).splitlines()[0][:300]}")
            assert "CUDA out of memory" in str(error) and "The next setting that fits is" in str(error)
            assert error.overrides and len(tried) < 9
            changes |= error.overrides
    assert tried
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    train(run_config(tmp_path / "roomy", **{**changes, "batch_size": 64, "remat": "none", "loss_chunk": 16384,
                                            "gradient_accumulation": 1, "global_batch_size": None}))  # fmt: skip
    losses = [[r["loss"] for r in read_metrics(tmp_path / name) if r["kind"] == "train"] for name in ("run", "roomy")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_greedy_answers_are_those_of_the_cpu() -> None:
    texts = []
    for device in ("cuda", "cpu"):
        config = load_config("embedded-cot", {"base_dtype": "fp32", "device_type": device, "num_replicas": 1})
        texts.append([each.text for each in generate(config, [QUESTION, "Leo has 3 trays of 6 coins.", "Mia has"])])
    assert texts[0] == texts[1] and any(texts[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rewards_and_a_teacher(tmp_path: Path, dtype: str, capfd: pytest.CaptureFixture[str]) -> None:
    common = {"device_type": "cuda", "base_dtype": dtype, "max_steps": 3, "eval_steps": None, "logging_steps": 1}
    config = load_config("embedded-grpo", {
        **common, "eval_rows": 0, "eval_generate_rows": 0, "warmup_steps": 1,
        "reward_funcs": ["tests.support.reward_functions:random"], "output_dir": str(tmp_path / "grpo"),
    })  # fmt: skip
    assert grpo(config).step == 3
    out, err = capfd.readouterr()
    assert "recompile_limit" not in out + err, "all of its shapes are compiled"
    gaps = [r["sampler_gap"] for r in read_metrics(tmp_path / "grpo") if r["kind"] == "train"]
    print(f"FIGURE grpo {dtype}: sampler_gap {max(gaps):.1e}")
    assert max(gaps) < (1e-4 if dtype == "fp32" else 5e-2)
    config = load_config("embedded-cot", {
        **common, "teacher": "embedded", "eval_rows": 0, "generate_rows": 0, "warmup_steps": 1,
        "output_dir": str(tmp_path / "distill"),
    })  # fmt: skip
    assert distill(config).step == 3


def _peak(config: TrainConfig) -> int:
    """The peak of allocated bytes over three updates of a model with random weights."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    rt = CudaRuntime(0, 1, GPU)
    torch.manual_seed(0)
    with GPU:
        base = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN2_500M), dtype=torch.bfloat16)
    model = trainable.adapt(base, config.lora, config.model.base_dtype).train()
    state = prepare_model(model, config, rt)
    rows, length = int(config.optim.batch_size), config.data.max_length
    ids = torch.randint(1, 151936, (rows, length), device=GPU)
    positions = torch.arange(length, device=GPU).repeat(rows, 1)
    segments = torch.ones_like(ids)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "segment_ids": segments}
    for step in (1, 2, 3):
        control = torch.tensor([1e-4, float(step > 1), float(step)], device=GPU)
        train_step(model, state, [batch], control, SupervisedObjective(config.optim), config.optim, rt)
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("remat", ["full", "outputs", "none"])
def test_the_memory_of_a_step_is_what_the_formula_says(tmp_path: Path, remat: str) -> None:
    folder = write_config(tmp_path / "model", QWEN2_500M)
    config = load_config(None, {"name": str(folder), "max_length": 1024, "batch_size": 8, "remat": remat, "r": 16})
    found, said = _peak(config), estimate(seen_on("cuda", config)).total_bytes
    print(f"FIGURE memory remat={remat}: {found / GIB:.2f} GiB, by formula {said / GIB:.2f}, {found / said - 1:+.0%}")
    assert 0.5 < found / said < 1.3
