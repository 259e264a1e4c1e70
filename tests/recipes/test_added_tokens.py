"""Runs on rows with tokens that a user added: they learn as with plain PEFT, resume bit for bit and are exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tpu_kit.assets.embedded import model_dir
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.data.batching import learning_rate
from tpu_kit.exporting.converter import convert_adapter
from tpu_kit.exporting.export import export
from tpu_kit.recipes import sft
from tpu_kit.recipes.run_data import prepare_run
from tpu_kit.training.metrics import read_metrics

NEW = [f"<place{number}>" for number in range(6)]
ROWS, HELD_OUT = 24, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with new tokens, whose embeddings are random, and rows that answer with them."""
    path = tmp_path_factory.mktemp("added")
    tokenizer, model = (kind.from_pretrained(model_dir()) for kind in (AutoTokenizer, AutoModelForCausalLM))
    tokenizer.add_tokens(NEW)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for each in (tokenizer, model):
        each.save_pretrained(path / "model")
    rows = [
        {"question": f"Where are {n} pens?", "answer": f"In {NEW[n % 3]} and {NEW[3 + n % 2]}, not in {NEW[5]}."}
        for n in range(ROWS + HELD_OUT)
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def configure(folder: Path, run: Path, **changes: Any) -> TrainConfig:
    values = {
        "model.name": str(folder / "model"), "base_dtype": "fp32", "source": str(folder / "rows.jsonl"), "lora.r": 8,
        "eval_rows": HELD_OUT, "max_length": 64, "packing": False, "batch_size": ROWS, "epochs": None,
        "learning_rate": 5e-3, "device_type": "cpu", "num_replicas": 1, "generate_rows": 0, "output_dir": str(run),
        **changes,
    }  # fmt: skip
    return load_config(None, values)


def held_out_loss_of_peft(config: TrainConfig, numbers: list[int] | None) -> float:
    """Trains all rows in each update with plain PEFT and torch's AdamW; returns the loss of the held-out rows."""
    prepared, optim = prepare_run(config), config.optim
    assert prepared.eval is not None and config.lora.targets == "all-linear"
    base = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32)
    settings = PeftLoraConfig(
        r=config.lora.r, lora_alpha=int(config.lora.alpha), target_modules="all-linear", task_type="CAUSAL_LM",
        trainable_token_indices=numbers,
    )  # fmt: skip
    torch.manual_seed(optim.seed)
    model = get_peft_model(base, settings)

    def loss(packed: Any) -> torch.Tensor:
        batch = packed.tensors(np.arange(len(packed)))
        seen = (batch["segment_ids"] > 0).long()
        found: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=seen, labels=batch["labels"]).loss
        return found

    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    assert optim.max_steps is not None
    for step in range(1, optim.max_steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, optim.max_steps, optim)
        optimizer.zero_grad()
        loss(prepared.train).backward()
        torch.nn.utils.clip_grad_norm_(trained, optim.max_grad_norm)
        optimizer.step()
    with torch.no_grad():
        return float(loss(prepared.eval))


@pytest.mark.slow
def test_added_tokens_learn_as_with_peft(folder: Path, tmp_path: Path) -> None:
    found = {}
    for tokens in (None, "added"):
        config = configure(folder, tmp_path / str(tokens), max_steps=30, **({"tokens": tokens} if tokens else {}))
        result = sft.train(config)
        numbers = None if tokens is None else AutoTokenizer.from_pretrained(folder / "model").convert_tokens_to_ids(NEW)
        found[tokens] = result.metrics["eval_loss"], held_out_loss_of_peft(config, numbers)
    print(found)  # on 2026-11-29: 2.0530 and 2.0529 without, 1.5707 and 1.5722 with the tokens
    assert all(abs(ours - theirs) < 0.02 for ours, theirs in found.values())
    assert found["added"][0] < found[None][0] - 0.3


def test_a_run_with_added_tokens_resumes_bit_for_bit(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rates = {
        "tokens": "added", "plus": 4, "embedding_learning_rate": 1e-2, "schedule": "constant", "logging_steps": 1,
        "batch_size": 2,
    }  # fmt: skip
    whole, parts = configure(folder, tmp_path / "whole", max_steps=4, **rates), tmp_path / "parts"
    sft.train(whole)
    told = capfd.readouterr().out
    assert "new tokens       6 token ids of the rows had no text in pre-training (<place0>, <place1>" in told
    assert "the run trains their embeddings" in told and "WARNING: 6 token" not in told
    sft.train(configure(folder, parts, max_steps=2, **rates))
    sft.train(configure(folder, parts, max_steps=4, **rates))
    files = [load_file(run / "adapter/adapter_model.safetensors") for run in (tmp_path / "whole", parts)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())
    (rows,) = (value for name, value in files[0].items() if "trainable_tokens_delta" in name)
    assert rows.shape[0] == len(NEW)
    assert load_config(tmp_path / "whole/config.yaml").lora.tokens == tuple(NEW)
    logged = [record for record in read_metrics(tmp_path / "whole") if record["kind"] == "train"]
    assert all(record["lr_embeddings"] == pytest.approx(2 * record["lr"]) for record in logged)
    assert all(record["lr_b"] == pytest.approx(4 * record["lr"]) for record in logged)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "tied", "named"),
    [
        ({"tokens": "added"}, True, "trained rows of tokens"),
        ({"full": ["embed_tokens"]}, True, "trained copies of embed_tokens"),
        ({"lora.targets": ["q_proj", "embed_tokens", "lm_head"]}, False, "LoRA on embed_tokens, lm_head"),
    ],
    ids=["tokens", "full", "LoRA"],
)
def test_a_run_with_trained_embeddings_is_exported(
    folder: Path, tmp_path: Path, changes: dict[str, Any], tied: bool, named: str
) -> None:
    run = tmp_path / "run"
    sft.train(configure(folder, run, max_steps=20, **changes))
    adapter, merged = (export(run, format=form) for form in ("adapter", "merged"))  # each compares its logits
    assert f"vLLM takes no adapters with {named}: export format=vllm" in adapter.notes
    settings = json.loads((Path(merged.folder) / "config.json").read_text())
    assert settings["tie_word_embeddings"] is tied
    with pytest.raises(ValueError, match=f"GGUF adapters cannot hold {named}: export the merged model"):
        convert_adapter(run / "adapter", folder / "model", tmp_path / "adapter.gguf", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"tokens": "added"}, {"full": ["embed_tokens"]}, {"lora.targets": ["q_proj", "embed_tokens", "lm_head"]}],
    ids=["tokens", "full", "LoRA"],
)
def test_replicas_and_a_mesh_train_embeddings_like_one_device(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    on_xla: dict[str, Any] = {"device_type": "xla-cpu", "batch_size": 4}
    places = [{"batch_size": 8}, {**on_xla, "num_replicas": 2}]
    places += [{**on_xla, "num_replicas": None, "mesh": "fsdp=2"}]
    places += [{**on_xla, "num_replicas": None, "mesh": "context=2", "batch_size": 8}]
    losses = []
    for number, place in enumerate(places):
        run = tmp_path / str(number)
        sft.train(configure(folder, run, max_steps=3, logging_steps=1, **place, **changes))
        losses.append([record["loss"] for record in read_metrics(run) if record["kind"] == "train"])
    print(losses)
    assert losses[0][2] < losses[0][0] - 1
    assert all(found == pytest.approx(losses[0], abs=2e-5) for found in losses[1:])
