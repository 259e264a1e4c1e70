"""A run with adapters reports before it starts that it does not train tokens added to the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tpu_kit.assets.embedded import model_dir
from tpu_kit.config.loader import load_config
from tpu_kit.recipes.run_data import prepare_run


@pytest.mark.parametrize("way", ["mean", "drawn", "zeros", "trained"])
def test_added_tokens_of_the_rows_are_told(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer, model = (kind.from_pretrained(model_dir()) for kind in (AutoTokenizer, AutoModelForCausalLM))
    tokenizer.add_tokens(["<tray>", "<box>", "<unused>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=way == "mean")
    rows = model.get_input_embeddings().weight.data
    if way in ("zeros", "trained"):
        rows[-3:] = 0 if way == "zeros" else rows[100:103].flip(0)
    for each in (tokenizer, model):
        each.save_pretrained(tmp_path / "model")
    written = [{"question": f"Where are {i} pens?", "answer": f"In a <tray> and a <box>, {i}."} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    given = {"name": str(tmp_path / "model"), "source": str(tmp_path / "rows.jsonl"), "eval_rows": 0, "max_length": 128}
    made = prepare_run(load_config(None, given))
    if way == "trained":
        assert made.new_tokens == () and "new tokens" not in str(made)
        return
    assert made.new_tokens == ("<tray>", "<box>")
    text = "new tokens       WARNING: 2 token ids of the rows had no text in pre-training (<tray>, <box>), so their"
    assert text in str(made) and "LoRA does not train them; lora.tokens=added does" in str(made)
    whole = prepare_run(load_config(None, {**given, "tokens": "added"}))
    assert whole.new_tokens == whole.learned_tokens and "WARNING: 2 token ids" not in str(whole)
    left = prepare_run(load_config(None, {**given, "tokens": ["<tray>"]}))
    assert "WARNING: 1 token id of the rows had no text in pre-training (<box>), so" in str(left)
    assert prepare_run(load_config(None, {**given, "r": 0})).new_tokens == ()
    assert prepare_run(load_config(None, {**given, "name": "embedded"})).new_tokens == ()
