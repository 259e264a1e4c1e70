"""The fused products of LoRA layers against PEFT's own."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear

from tests.support.child_processes import run_loaded
from tpu_kit.config.loader import load_config
from tpu_kit.model.causal_lm import hidden_states
from tpu_kit.model.loop.activation_checkpointing import _on_the_cpu, fuse_lora
from tpu_kit.model.preparation import prepare_layers
from tpu_kit.model.trainable import load_model


class Layers(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = torch.nn.Linear(24, 40, dtype=dtype)
        self.second = torch.nn.Linear(40, 24, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.silu(self.first(x)))


def models(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[Any, Any]:
    """A model with an adapter that is not 0, as PEFT computes it and with fused products."""
    pair = []
    for fused in (False, True):
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=12, target_modules=["first", "second"], **settings)
        model = get_peft_model(Layers(dtype), config, autocast_adapter_dtype=False)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        if fused:
            fuse_lora(model, "cpu")
        pair.append(model)
    return pair[0], pair[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: None,
        lambda model: model.disable_adapter_layers(),
        lambda model: model.merge_adapter(),
        lambda model: model.base_model.model.first.base_layer.weight.requires_grad_(True),
        lambda model: model.add_adapter("more", model.peft_config["default"]),
    ],
    ids=["plain", "switched off", "merged", "base trained", "second adapter"],
)
def test_results_and_gradients_are_those_of_peft(change: Any) -> None:
    x = torch.randn(3, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for model in models():
        change(model)
        given = x.clone().requires_grad_()
        output = model(given)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(output.square().sum(), [given, *trained], allow_unused=True)
        results.append([output, *(torch.zeros(()) if each is None else each for each in gradients)])
    for ours, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["dropout", "autocast", "adapter in fp32"])
def test_other_layers_compute_as_those_of_peft(case: str) -> None:
    x, outputs = torch.randn(3, 24, generator=torch.Generator().manual_seed(1)).bfloat16(), []
    for model in models(torch.bfloat16, lora_dropout=0.5 if case == "dropout" else 0.0):
        if case == "adapter in fp32":
            for name, parameter in model.named_parameters():
                parameter.data = parameter.float() if "lora_" in name else parameter.data
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            outputs.append(model(x))
    assert torch.equal(*outputs)


def test_checkpointed_layers_have_the_same_gradients() -> None:
    found = []
    for remat in ("none", "outputs", "full"):
        config = load_config(None, {"model.name": "embedded", "base_dtype": "fp32", "r": 4, "remat": remat})
        model = load_model(config.model, config.lora, seed=0).train()
        prepare_layers(model, config, "cpu")
        rows = {"input_ids": torch.arange(40).view(2, 20), "segment_ids": torch.ones(2, 20, dtype=torch.int32)}
        hidden_states(model, rows).square().mean().backward()
        found.append([each.grad for each in model.parameters() if each.grad is not None])
    for gradients in zip(*found, strict=True):
        for other in gradients[1:]:
            torch.testing.assert_close(other, gradients[0])


@pytest.mark.parametrize(
    ("settings", "fused"), [({"remat": "none"}, True), ({"remat": "full"}, False), ({"scan_layers": "on"}, False)]
)
def test_layers_that_are_recomputed_are_not_fused(settings: dict[str, str], fused: bool) -> None:
    config = load_config(None, {"model.name": "embedded", "base_dtype": "fp32", "r": 4, **settings})
    model = load_model(config.model, config.lora, seed=0).train()
    prepare_layers(model, config, "cpu")
    taken = [getattr(layer, "takes", None) for layer in model.modules() if isinstance(layer, Linear)]
    assert any(one is _on_the_cpu for one in taken) == fused


ON_XLA = """
import json, torch, torch_xla
from tests.model.test_fused_lora import models
from tpu_kit.model.loop.activation_checkpointing import chunk_mlp
device, answers = torch_xla.device(), {}
for case in ("plain", "few tokens", "switched off", "evaluation", "autocast"):
    found, texts = [], []
    for tiled in (False, True):
        dtype = torch.float32 if case == "autocast" else torch.float64
        model = models(dtype)[0].to(device).train(case != "evaluation")
        if tiled:
            chunk_mlp(model.base_model.model, 2 if case == "few tokens" else 48)
        if case == "switched off":
            model.disable_adapter_layers()
        shape = (3, 2 if case == "few tokens" else 32, 24)
        x = torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
        given = x.to(device).requires_grad_()
        with torch.autocast("xla", torch.bfloat16, enabled=case == "autocast", cache_enabled=False):
            output = model(given)
        trained = [one for one in model.parameters() if one.requires_grad and case != "switched off"]
        results = [output, *torch.autograd.grad(output.double().square().sum(), [given, *trained])]
        texts.append(torch_xla._XLAC._get_xla_tensors_hlo(results))
        found.append([one.detach().cpu().double() for one in results])
    errors = [float((one - other).abs().max() / other.abs().max()) for other, one in zip(*found)]
    answers[case] = max(errors), texts[1].count(" concatenate(")
print(json.dumps(answers))
"""


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_in_tiles_on_xla_a_layer_is_one_product_and_others_compute_as_those_of_peft() -> None:
    found = json.loads(run_loaded(ON_XLA).stdout.splitlines()[-1])
    tiles = found["switched off"][1]  # which are concatenated
    assert all(found[case][1] > tiles for case in ("plain", "evaluation", "autocast"))
    assert max(found[case][0] for case in ("plain", "evaluation", "few tokens", "switched off")) < 1e-12
    assert found["autocast"][0] < 2e-2
