"""Tokens that a model was never trained on, by the weights of its output layer."""

from __future__ import annotations

import numpy as np
from transformers import AutoModelForCausalLM

from tests.support.given_rows import prepare_rows
from tpu_kit.assets.embedded import cot_rows, model_dir
from tpu_kit.config.loader import DataConfig, load_config
from tpu_kit.data.chat.untrained_tokens import describe_untrained, untrained_tokens
from tpu_kit.model.weights.source import load_tokenizer


def test_rows_with_characters_of_the_embedded_models_blind_spot_are_told() -> None:
    weight = AutoModelForCausalLM.from_pretrained(model_dir()).get_output_embeddings().weight
    tokenizer = load_tokenizer(load_config(None).model)
    letters = {text: tokenizer.convert_tokens_to_ids(text) for text in ("<", "=", "%", "b", "1", ".")}
    found = untrained_tokens(weight, np.array([*letters.values()]))
    assert [text for text, number in letters.items() if number in found] == ["<", "=", "%"]

    known, rows = cot_rows("train", 40), [{"question": "Who?", "answer": f"{number} = <b>"} for number in range(40)]
    assert describe_untrained(prepare_rows(DataConfig(eval_rows=0), tokenizer, known), weight, frozen=True) == ""
    unknown = prepare_rows(DataConfig(eval_rows=0), tokenizer, rows)
    said = describe_untrained(unknown, weight, frozen=True)
    assert "% of the tokens with loss are " in said and "'<', '>'" in said
    assert "the base model was never trained on. Adapters do not train its output layer. Remove them from" in said
    assert "lora.tokens" not in describe_untrained(unknown, weight, frozen=False)
