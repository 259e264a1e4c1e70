"""The families of layers in a model, and the facts that each family states."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from tests.model.test_families import configuration
from tpu_kit.model.families import linear_attention
from tpu_kit.model.families import registry as families

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "vocab_size": 32, "pad_token_id": 0}  # fmt: skip
MIXTURE = Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **SIZES)


def build(config: PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (LlamaConfig(**SIZES), []),
        (configuration("lfm2"), ["families.linear_attention"]),
        (MIXTURE, ["families.experts"]),
    ],
    ids=["llama", "lfm2", "qwen3_moe"],
)
def test_a_model_needs_the_modules_of_its_own_families(config: PreTrainedConfig, more: list[str]) -> None:
    found = [module.__name__ for module in families._modules_for(build(config))]
    assert found == [f"tpu_kit.model.{name}" for name in ("attention", "splash_attention", "rotary", *more)]


def test_a_family_is_found_by_each_function_that_it_replaces() -> None:
    """A function that the family's line does not name would stay transformers' own."""
    by_module = {family.module: set(family.functions) for family in families.FAMILIES}
    assert by_module["tpu_kit.model.families.linear_attention"] == linear_attention._FUNCTIONS.keys()


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.module)
def test_each_family_can_be_connected(family: families.Family) -> None:
    module = importlib.import_module(family.module)
    assert list(inspect.signature(module.connect).parameters) == ["model", "frozen"]


def test_experts_are_connected_once_and_not_trained_on_xla() -> None:
    model = build(MIXTURE)
    for _ in range(2):
        families.connect(model, frozen=False)
    assert MIXTURE._experts_implementation_internal == "tpu_kit"
    families.check_trained(model, "cpu")
    with pytest.raises(ValueError, match=r"lora\.r=0 trains all weights, but on XLA the weights of experts are frozen"):
        families.check_trained(model, "xla-cpu")
    families.check_trained(model.requires_grad_(False), "xla-cpu")
