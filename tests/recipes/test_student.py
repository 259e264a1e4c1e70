"""A student made of some of a model's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, SmolLM3Config

from tpu_kit.assets.embedded import model_dir
from tpu_kit.config.loader import ModelConfig
from tpu_kit.recipes.distillation import derive_student


def test_a_student_has_layers_of_its_model(tmp_path: Path) -> None:
    folder = derive_student(ModelConfig(), tmp_path / "student", 2)
    whole, student = (AutoModelForCausalLM.from_pretrained(one) for one in (model_dir(), folder))
    assert student.config.num_hidden_layers == 2
    for mine, theirs in ((0, 0), (1, 3)):
        wanted = whole.model.layers[theirs].state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in student.model.layers[mine].state_dict().items())
    assert torch.equal(student.lm_head.weight, whole.lm_head.weight)
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_each_layer_keeps_its_entry_in_the_lists_of_the_config(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = SmolLM3Config(vocab_size=640, num_hidden_layers=8, pad_token_id=0, **sizes)
    assert config.no_rope_layers == [1, 1, 1, 0, 1, 1, 1, 0]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "whole")
    AutoTokenizer.from_pretrained(model_dir()).save_pretrained(tmp_path / "whole")
    folder = derive_student(ModelConfig(name=str(tmp_path / "whole")), tmp_path / "student", 3)
    assert AutoConfig.from_pretrained(folder).no_rope_layers == [1, 1, 0]


@pytest.mark.parametrize("layers", [0, 4])
def test_too_many_or_no_layers_are_refused(tmp_path: Path, layers: int) -> None:
    with pytest.raises(ValueError, match=rf"layers={layers}: model.name=embedded has 4; choose from 1 to 3"):
        derive_student(ModelConfig(), tmp_path / "student", layers)
