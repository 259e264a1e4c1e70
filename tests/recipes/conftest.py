"""A tiny model, its teacher and rows for the runs of these tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tpu_kit.assets import embedded
from tpu_kit.config.loader import load_config
from tpu_kit.model.weights.source import load_tokenizer

ROWS = 48


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with the embedded tokenizer, and rows whose answers have very different lengths."""
    folder = tmp_path_factory.mktemp("world")
    load = load_config(None, {"model.name": "embedded"})
    tokenizer = load_tokenizer(load.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
            )
        )  # fmt: skip
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [
        {"prompt": f"{row['question']}\n", "completion": row["answer"] if number % 2 else row["reasoning"]}
        for number, row in enumerate(embedded.cot_rows("train", ROWS + 8))
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def teacher(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider three-layer Llama with three padding ids in its vocabulary."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer) + 3, hidden_size=64, intermediate_size=64, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.05,
            )
        )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
