"""Rotation by halves against transformers' functions."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

from tests.support.child_processes import run_loaded
from tpu_kit.model import rotary
from tpu_kit.model.rotary import rotate_halves


def function(family: str) -> Any:
    found = importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    return getattr(found, "_tpu_kit_replaces", found)


def example(dtype: torch.dtype, angles: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 5, 8, generator=generator).to(dtype).requires_grad_() for heads in (4, 2))
    angle = (5 * torch.randn(2, 5, 4, generator=generator)).repeat(1, 1, 2)
    return [query, key], [angle.cos().to(angles), angle.sin().to(angles)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "phi", "phi3", "smollm3", "mistral"])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
def test_results_are_those_of_transformers_bit_for_bit(family: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    given, angles = example(*dtypes)
    assert rotary._rotates_halves(function(family))
    theirs, ours = function(family)(*given, *angles), rotate_halves(*given, *angles)
    assert all(map(torch.equal, ours, theirs))
    upstream = [torch.randn_like(one) for one in theirs]
    found, expected = (torch.autograd.grad(one, given, upstream) for one in (ours, theirs))
    tolerance = 0.0 if dtypes[0] == dtypes[1] else 2e-2  # transformers rounds both terms of the gradient to bf16
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["cohere", "glm", "gpt_oss", "gemma4"])
def test_functions_that_rotate_otherwise_are_left_alone(family: str) -> None:
    """Interleaved pairs, partial rotation, half of the angles, one tensor at a time."""
    assert not rotary._rotates_halves(function(family))


ON_XLA = """
import torch, torch_xla
import transformers.models.llama.modeling_llama as module
from transformers import LlamaConfig, LlamaForCausalLM
from tests.model.test_rotary import example
from tpu_kit.model.rotary import connect

own = module.apply_rotary_pos_emb
sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
with torch.device("meta"):  # as the planner makes models
    connect(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)))
assert module.apply_rotary_pos_emb._tpu_kit_replaces is own
tensors, angles = example(torch.float32, torch.float32)
device, found, texts = torch_xla.device(), [], []
for function in (own, module.apply_rotary_pos_emb):
    given = [one.detach().to(device).requires_grad_() for one in tensors]
    results = function(*given, *(one.to(device) for one in angles))
    results = [*results, *torch.autograd.grad([one.square().sum() for one in results], given)]
    texts.append(torch_xla._XLAC._get_xla_tensors_hlo(results))
    found.append([one.detach().cpu() for one in results])
print(max(float((one - other).abs().max()) for one, other in zip(*found)), *(text.count(" pad(") for text in texts))
"""


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_on_xla_the_layers_of_a_family_rotate_halves_without_padding_gradients_to_whole_heads() -> None:
    error, before, now = run_loaded(ON_XLA).stdout.split()[-3:]
    assert float(error) < 1e-6 and int(before) > 0 and now == "0"
