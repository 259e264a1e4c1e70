"""Saved adapters and models hold the trained weights; stock PEFT and transformers load them, without the kit too."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tpu_kit.assets import embedded
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.model.causal_lm import trainable_parameters
from tpu_kit.model.trainable import adapt, load_model
from tpu_kit.model.weights.base_identity import identify
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.training.adapter_files import adapter_settings, adapter_tensors, save_adapter, start_from

IDS = torch.arange(5, 37)[None]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(load_config().model)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A model on disk, with tied or untied embeddings."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                tie_word_embeddings=request.param,
            )
        )
    model.save_pretrained(tmp_path / "base")
    yield tmp_path / "base"


def configure(name: str, **changes: Any) -> TrainConfig:
    return load_config(None, {"model.name": name, "base_dtype": "fp32", **changes})


def trained(config: TrainConfig) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns a run's model and its trained weights, all changed as if by training."""
    model = load_model(config.model, config.lora, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval(), {name: value.detach().clone() for name, value in trainable_parameters(model).items()}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize(
    "lora",
    [
        {"lora.r": 4},
        {"lora.r": 4, "lora.rslora": True, "lora.alpha": 7.0, "lora.dropout": 0.2},
        {"lora.r": 4, "lora.dora": True},
        {"lora.r": 2, "lora.targets": ["q_proj", "down_proj"]},
        {"lora.r": 4, "lora.init": "gaussian"},
    ],
    ids=["plain", "rslora", "dora", "some targets", "gaussian"],
)
def test_stock_peft_loads_the_adapter_with_the_same_logits(
    folder: Path, tmp_path: Path, tokenizer: Any, lora: dict[str, Any]
) -> None:
    config = configure(str(folder), **lora)
    model, values = trained(config)
    save_adapter(tmp_path / "adapter", model, values, config, tokenizer)
    assert load_file(tmp_path / "adapter/adapter_model.safetensors").keys() == get_peft_model_state_dict(model).keys()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = logits(base)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)
    assert (logits(loaded) - plain).abs().max() > 1e-2  # the base model would answer differently
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder)
    assert settings["inference_mode"] is True
    started = load_model(config.model, config.lora)
    start_from(started, tmp_path / "adapter")
    assert all(torch.equal(values[name], value) for name, value in trainable_parameters(started).items())
    merged = logits(loaded.merge_and_unload())
    torch.testing.assert_close(merged, logits(model), rtol=1e-4, atol=1e-4)


def test_what_is_saved_is_what_is_given_not_what_the_model_has(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    """The saved values are a run's best or averaged weights, which are kept beside the model."""
    config = configure(str(folder), **{"lora.r": 4})
    model, values = trained(config)
    expected = logits(model)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.zero_()
    save_adapter(tmp_path / "adapter", model, values, config, tokenizer)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-5)


def test_views_of_one_flat_vector_are_saved(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    config = configure(str(folder), **{"lora.r": 4})
    model, values = trained(config)
    flat = torch.cat([value.reshape(-1) for value in values.values()])
    parts = flat.split([value.numel() for value in values.values()])
    views = {name: part.view_as(values[name]) for name, part in zip(values, parts, strict=True)}
    save_adapter(tmp_path / "adapter", model, views, config, tokenizer)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)


def test_transformers_loads_a_whole_model(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    config = configure(str(folder), **{"lora.r": 0})
    model, values = trained(config)
    save_adapter(tmp_path / "adapter", model, values, config, tokenizer)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "adapter", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied is loaded.config.tie_word_embeddings
    assert (logits(AutoModelForCausalLM.from_pretrained(folder)) - logits(loaded)).abs().max() > 1e-2


def test_the_base_of_the_embedded_model_for_pictures_is_its_folder() -> None:
    config = configure("embedded")
    model, _ = trained(config)
    config = replace(config, model=replace(config.model, name="embedded-images"))
    assert Path(adapter_settings(model, config)["base_model_name_or_path"], "config.json").is_file()


def test_the_embedded_models_adapter(tmp_path: Path, tokenizer: Any) -> None:
    config = configure("embedded")
    model, values = trained(config)
    save_adapter(tmp_path / "adapter", model, values, config, tokenizer)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(embedded.model_dir())
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"], dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=5e-5)
    own = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    chat = [{"role": "user", "content": "How many?"}]
    assert own.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)


def test_the_folder_is_written_anew(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    config = configure(str(folder), **{"lora.r": 4})
    model, values = trained(config)
    for name in ("adapter", ".adapter.part"):  # from an earlier run, and from a killed run
        (tmp_path / name).mkdir()
        (tmp_path / name / "old.txt").write_text("old")
    save_adapter(tmp_path / "adapter", model, values, config, tokenizer, identify(config.model))
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not (tmp_path / ".adapter.part").exists()


def test_the_whole_model_of_a_bf16_run_is_kept_in_fp32(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    config = load_config(None, {"model.name": str(folder), "lora.r": 0})
    model, values = trained(config)
    save_adapter(tmp_path / "adapter", model, values, config, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def test_adapted_from_a_model_that_was_never_on_disk() -> None:
    """`adapter_settings` and tensor names need only the model."""
    config = configure("some/model", **{"lora.r": 4})
    model = adapt(LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                               num_attention_heads=2, num_key_value_heads=2)),
                  config.lora, "fp32")  # fmt: skip
    names = adapter_tensors(model, {name: value.detach() for name, value in trainable_parameters(model).items()})
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert adapter_settings(model, config)["base_model_name_or_path"] == "some/model"
    assert isinstance(adapter_settings(model, config)["target_modules"], list)


def test_a_full_disk_is_told_with_what_to_do(folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Covers weights, written by safetensors, and the tokenizer's files, written by tokenizers; both are in Rust."""
    config = configure(str(folder), **{"lora.r": 64})
    model, weights = trained(config)
    save_adapter(tmp_path / "adapter", model, weights, config, tokenizer)
    before = (tmp_path / "adapter/adapter_model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most, given in ((4096, None), (len(before) + 4096, tokenizer)):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most if given is None else 20_000, limits[1]))
            small = weights if given is None else {}
            told = (
                rf"the trained weights could not be written to {tmp_path}/adapter \(File too large\): free disk space"
            )
            with pytest.raises(OSError, match=told) as raised:
                save_adapter(tmp_path / "adapter", model, small, config, given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(raised.value).endswith("and run this again: the checkpoints are complete")
        assert (tmp_path / "adapter/adapter_model.safetensors").read_bytes() == before
