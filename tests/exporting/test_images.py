"""Exports of models that read images: their processor's files, and adapters that PEFT loads beside the towers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from tests.exporting.test_export import make_run
from tests.support.vision_models import save_model
from tpu_kit.config.loader import ModelConfig
from tpu_kit.exporting import equivalence
from tpu_kit.exporting.export import export
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.model import attention, causal_lm
from tpu_kit.model.base_model import base_model
from tpu_kit.model.families import registry as families
from tpu_kit.model.families import vision_reference
from tpu_kit.model.weights.source import load_tokenizer, modules_left_out

TEXT: dict[str, Any] = {
    "vocab_size": 640, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "patch_size": 4}
_LAYERS = ["sliding_attention", "full_attention"] * 2
_GEMMA4 = {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16, "sliding_window": 8,
           "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 640, "layer_types": _LAYERS}  # fmt: skip
_GEMMA3 = {**TEXT, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
_DELTA = {**TEXT, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
          "linear_value_head_dim": 16}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "gemma4": lambda: Gemma4ForConditionalGeneration(
        Gemma4Config(
            text_config=Gemma4TextConfig(**_GEMMA4),
            vision_config=Gemma4VisionConfig(**VISION, num_hidden_layers=2, num_key_value_heads=2, head_dim=8),
        )
    ),
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=Gemma3TextConfig(**_GEMMA3), mm_tokens_per_image=4,
            vision_config=VISION | {"num_hidden_layers": 1, "image_size": 16},
        )
    ),
    "qwen3_5": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=_DELTA, vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16,
                                                         "num_heads": 2, "patch_size": 4, "out_hidden_size": 32})
    ),
}  # fmt: skip
IDS = torch.arange(5, 37)[None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A run on a model of random weights, with the processor's files and an unrelated file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        MODELS[request.param]().save_pretrained(tmp_path / "base")
    load_tokenizer(ModelConfig()).save_pretrained(tmp_path / "base")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "notes.json"):
        (tmp_path / "base" / name).write_text("{}")
    make_run(tmp_path / "run", str(tmp_path / "base"), **{"lora.r": 4, "data.max_length": 128})
    here = lambda job: equivalence.logits(equivalence._stock(job), job["prompts"])  # noqa: E731  a process takes seconds
    monkeypatch.setattr(equivalence, "in_child", here)
    return tmp_path / "run"


def logits(kind: Any, base: Path, adapter: Path | None = None) -> torch.Tensor:
    model = kind.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        return (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()(input_ids=IDS).logits


@pytest.mark.parametrize("run", ["gemma4", "gemma3"], indirect=True)
def test_an_adapter_loads_on_the_whole_model_and_merges_into_it(run: Path, tmp_path: Path) -> None:
    settings = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert all("vision" in name for name in settings["exclude_modules"])
    assert any(name.endswith("q_proj") for name in settings["exclude_modules"])
    done = export(run, "adapter", tmp_path / "adapter")
    tuned = logits(AutoModelForImageTextToText, tmp_path / "base", tmp_path / "adapter")
    assert torch.equal(tuned, logits(AutoModelForCausalLM, tmp_path / "base", run / "adapter"))
    assert (tuned - logits(AutoModelForCausalLM, tmp_path / "base")).abs().max() > 1
    merged = export(run, "merged", tmp_path / "merged", dtype="fp32")
    torch.testing.assert_close(logits(AutoModelForImageTextToText, tmp_path / "merged"), tuned, atol=1e-3, rtol=1e-3)
    base, written = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    towers = [name for name in base if "vision" in name]
    assert towers and all(torch.equal(base[name], written[name]) for name in towers)
    for files in (done.files, merged.files):
        assert {"preprocessor_config.json", "video_preprocessor_config.json"} < {*files} and "notes.json" not in files


@pytest.mark.parametrize("run", ["qwen3_5"], indirect=True)
def test_an_adapter_of_another_class_than_the_base_names(run: Path, tmp_path: Path) -> None:
    done = export(run, "adapter", tmp_path / "adapter")
    assert (
        "PEFT loads it on Qwen3_5ForCausalLM, as AutoPeftModelForCausalLM does, but not on "
        "Qwen3_5ForConditionalGeneration, which the base's config.json names"
    ) in str(done)


def test_a_model_of_text_has_no_towers() -> None:
    assert modules_left_out(ModelConfig()) == ()


@pytest.mark.parametrize(
    "family",
    [
        "gemma4_unified",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("gemma4", "smolvlm", "idefics3", "gemma3", "lfm2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl")
        ),
    ],
)
def test_a_run_on_pictures_is_exported_and_compared_with_pictures(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_model(tmp_path / "base", family)
    config = make_run(
        tmp_path / "run", str(base), **{"lora.r": 4, "model.images": True, "lora.vision": True, "data.max_length": 256}
    )
    jobs = []

    def here(job: dict[str, Any]) -> Any:  # a process takes seconds
        jobs.append(job := json.loads(json.dumps(job)))
        return equivalence._read(job)

    monkeypatch.setattr(equivalence, "in_child", here)
    done = [export(tmp_path / "run", name, tmp_path / name, dtype="fp32") for name in ("adapter", "merged", "vllm")]
    assert all("pictures" in job for job in jobs) and len(jobs) == 3
    for one in done:
        assert all(check.largest < 1e-3 for check in one.checks)
        assert {"preprocessor_config.json", "chat_template.jinja"} <= {*one.files}
    assert "AutoModelForImageTextToText.from_pretrained" in (tmp_path / "adapter" / "README.md").read_text()

    stock = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    ours = load_for_generation(config.model, tmp_path / "run" / "adapter")
    families.set_attention(base_model(ours), attention.SDPA)
    ours._tpu_kit_compute_dtype = torch.float32  # type: ignore[assignment]  # mypy expects a tensor or a module
    one, settings = vision_reference.documents(stock.config)[0], stock.config
    batch = {"input_ids": one.ids[None]} | vision_reference.images_of(settings, [one], [0], len(one.ids))
    with torch.no_grad():
        seen = causal_lm.logits(ours, batch)[0]
        for model in (
            PeftModel.from_pretrained(stock, tmp_path / "adapter"),
            *(AutoModelForImageTextToText.from_pretrained(tmp_path / name) for name in ("merged", "vllm")),
        ):
            found = vision_reference.logits(base_model(model.eval()), one)
            assert float((found - seen).abs().max() / seen.abs().max()) < 1e-4
