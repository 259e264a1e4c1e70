"""A model's generation config changes greedy decoding as it changes transformers' `generate`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.generation_functions import MIXED, NEW, generator, make, prompts_of, stock, tokens
from tpu_kit.assets.embedded import model_dir
from tpu_kit.cli import main
from tpu_kit.config.loader import DataConfig, ModelConfig
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.generation.generation_rules import GenerationRules, ModelDefaults
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.sampling import Sampling
from tpu_kit.model.weights.loading import load_base
from tpu_kit.model.weights.source import load_tokenizer

SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "a small repetition_penalty": {"repetition_penalty": 1.1},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "no token twice": {"no_repeat_ngram_size": 1},
    "min_new_tokens": {"min_new_tokens": 12},
    "min_length": {"min_length": 30},
    "suppress_tokens": {"suppress_tokens": [225, 434, 600]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [323, 434]},
    "bad_words_ids": {"bad_words_ids": [[18], [225, 23], [600, 601, 602]]},
    "sequence_bias": {"sequence_bias": [[[323], -40.0], [[225, 23], -40.0], [[434, 547, 225], 3.0]]},
    "all": {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 6, "suppress_tokens": [18],
        "bad_words_ids": [[225, 23], [33]], "sequence_bias": [[[31], 2.0]], "begin_suppress_tokens": [323],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def embedded() -> tuple[Any, list[list[int]]]:
    """The model, and questions whose reasoning is opened, so that it writes long texts."""
    config = ModelConfig(base_dtype="fp32")
    model, tokenizer = load_base(config, torch.float32).eval(), load_tokenizer(config)
    asked = ("Tom has 3 pens and buys 4.", "Ann has 12 apples, eats 5 and then finds 3. How many are left?", "A")
    rendered = [f"<|user|>{text}<|end|><|assistant|><think>\n" for text in asked]
    return model, [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]


def with_settings(model: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        monkeypatch.setattr(model.generation_config, name, value)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_greedy_tokens_are_those_of_transformers(
    embedded: tuple[Any, list[list[int]]], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model, prompts = embedded
    plain = stock(model, prompts)
    with_settings(model, monkeypatch, settings)
    wanted = stock(model, prompts)
    mine = Generator(
        model,
        load_tokenizer(ModelConfig()),
        CpuRuntime(0, 1, torch.device("cpu")),
        data=DataConfig(),
        max_new_tokens=NEW,
        batch_size=2,
    )
    assert tokens(mine.generate(prompts, Sampling(NEW))) == wanted != plain
    told = capsys.readouterr().err
    assert told.count("decoding         the model's generation_config applies ") == 1
    assert all(name in told for name in settings)
    assert tokens(mine.generate(prompts, Sampling(NEW, model_defaults=False))) == plain
    assert "is not applied: samples are from the model's own distribution" in capsys.readouterr().err
    if "repetition_penalty" in settings and len(settings) == 1:
        assert tokens(mine.generate(prompts, Sampling(NEW, repetition_penalty=1))) == plain


@pytest.mark.parametrize("seed", range(3))
def test_rules_of_a_model_that_says_anything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights, with prompts of one token and of several in a batch."""
    model = make("qwen2")
    words = prompts_of(1, 2, 3, 1, 2, seed=seed)
    settings = {"no_repeat_ngram_size": 2 + seed % 2, "bad_words_ids": words, "repetition_penalty": 1.1 + seed / 5,
                "min_length": 20}  # fmt: skip
    with_settings(model, monkeypatch, settings)
    assert tokens(generator(model).generate(MIXED, Sampling(NEW))) == stock(model, MIXED)


def test_samples_take_the_model_s_options_unless_they_are_given() -> None:
    config = make("llama").generation_config
    config.update(top_k=20, top_p=0.8, temperature=0.7, repetition_penalty=1.05, do_sample=True, typical_p=0.9)
    defaults = ModelDefaults.of(config)
    found = defaults.fill(Sampling(8, temperature=0.5, top_p=1.0))
    assert (found.temperature, found.top_k, found.top_p, found.min_p, found.repetition_penalty) == (
        0.5, 20, 1.0, 0.0, 1.05,
    )  # fmt: skip
    assert found.kind == "filtered" and found.penalises
    assert defaults.describe(Sampling(8, temperature=0.5, top_p=1.0)) == (
        "decoding         the model's generation_config applies repetition_penalty=1.05, top_k=20; has typical_p=0.9, "
        "which transformers applies and the kit does not"
    )
    assert defaults.describe(Sampling(8)).endswith("applies repetition_penalty=1.05")
    config.update(num_beams=4, stop_strings=["END"], top_k=None)
    said = ModelDefaults.of(config).describe(Sampling(8, repetition_penalty=1.0))
    assert said.endswith(
        "applies stop_strings=['END']; has num_beams=4, which transformers applies and the kit does not"
    )
    assert ModelDefaults.of(config).fill(Sampling(stop=("a",))).stop == ("a", "END")
    assert ModelDefaults.of(make("llama").generation_config).describe(Sampling(8)) == ""


def test_a_generation_config_that_cannot_be_used() -> None:
    config = make("llama").generation_config
    config.bad_words_ids = [["a"]]
    with pytest.raises(ValueError, match=r"the model's generation_config\.json cannot be used: "):
        GenerationRules.of(config)
    with pytest.raises(ValueError, match=r"generation_config\.json names token 640 of 640; correct it"):
        GenerationRules(biases=(((640,), -1.0),)).tensors(640, torch.zeros(640))


def test_generate_and_evaluate_decode_as_the_base_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = shutil.copytree(model_dir(), tmp_path / "base")
    file = base / "generation_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(settings | {"suppress_tokens": list(range(5, 60)), "min_new_tokens": 3}))
    here = [f"name={base}", "base_dtype=fp32", "device_type=cpu"]
    assert main(["generate", *here, "prompt=What is 2 + 3?", "max_new_tokens=8", "--json"]) == 0
    printed = capsys.readouterr()
    (reply,) = json.loads(printed.out)
    assert len(reply["tokens"]) >= 4 and not set(reply["tokens"]) & {*range(5, 60)}
    assert "applies suppress_tokens (55 entries), min_new_tokens=3\n" in printed.err
    assert main(["evaluate", *here, "eval_rows=2", "generate_rows=2", "generate_tokens=8", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["base"]["mean_tokens"] >= 4
    assert "applies suppress_tokens (55 entries), min_new_tokens=3\n" in printed.err
