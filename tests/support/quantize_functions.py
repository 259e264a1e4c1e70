"""Functions that the tests of quantized bases run in other processes and in replicas."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.training_functions import watched
from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.replica.runtime import current
from tpu_kit.model.weights.quantization import QuantizedLinear, Scheme
from tpu_kit.recipes import replica


def dense_of(scheme: Scheme, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight (O, I) that integers and scales represent."""
    return torch.cat(scheme.parts(weight, scale, dtype), dim=1)


def dequantized(layer: QuantizedLinear) -> torch.Tensor:
    """Returns a layer's weight (O, I) in fp32."""
    return dense_of(layer.scheme, layer.weight, layer.scale, torch.float32)


def write_model(folder: Path, *, shards: str = "1GB", **changes: Any) -> Path:
    """Saves a random two-layer Llama in bf16, and its tokenizer."""
    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes | changes)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shards)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def fingerprint(model: torch.nn.Module) -> str:
    """Hashes all integers and scales of a model on the CPU; equal bases give equal hashes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, part in model.named_modules():
        if isinstance(part, QuantizedLinear):
            digest.update(name.encode())
            for tensor in (part.weight, part.scale):
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def noted(config: TrainConfig) -> dict[str, Any]:
    """`training_functions.watched`; also records the hash of each replica's base, and checks a layer's gradients."""
    place = replica.prepare_model

    def hashed(model: torch.nn.Module, *rest: Any) -> Any:
        note = config.output_path / f"base-{current().rank}.json"
        note.write_text(json.dumps(fingerprint(model)))
        return place(model, *rest)

    replica.prepare_model = hashed
    ended = watched(config)
    return ended | {"errors": _errors()}


def _errors() -> dict[str, list[float]]:
    """By scheme: the largest errors of a layer's output and gradient on the device, against its dequantized weight."""
    rt, found = current(), {}
    for scheme in (Scheme(8), Scheme(4, 32)):
        random = torch.Generator().manual_seed(0)
        layer = QuantizedLinear(64, 48, scheme)
        layer.weight, layer.scale = scheme.quantize(torch.randn(48, 64, generator=random))
        dense, states = dequantized(layer), torch.randn(5, 64, generator=random)
        layer = layer.to(rt.local_device)
        given = states.to(rt.local_device).requires_grad_()
        rt.sync()
        output = layer(given)
        output.sum().backward()
        assert given.grad is not None
        rt.sync()
        output, gradient = rt.to_host([output.detach(), given.grad])
        expected = dense.sum(0).expand(5, 64)
        found[str(scheme)] = [float((output - states @ dense.T).abs().max()), float((gradient - expected).abs().max())]
    return found


MEMORY = """
import sys
import torch
from dataclasses import replace
from tests.support.peak_memory import PeakMemory
from tpu_kit.model import attention; from tpu_kit.model.loop import layer_scan as stacking
from tpu_kit.config.loader import ModelConfig
from tpu_kit.model.weights.loading import load_frozen

config = ModelConfig(base_dtype=sys.argv[2], quant_group=32, quant_cache=sys.argv[3] if len(sys.argv) > 3 else None)
load_frozen(replace(config, name="embedded"))  # loads the libraries
with PeakMemory() as peak:
    model = load_frozen(replace(config, name=sys.argv[1]))
    attention.register()
    model.set_attn_implementation(attention.SDPA)
    stacking.stack(model.get_decoder())
size = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
print("figures", size, peak.most - peak.before)
"""
"""Prints the bytes of a quantized model, and the peak memory of loading and stacking."""

SHARDED_MEMORY = """
import gc, json, sys, time
import torch, torch_xla
from tests.support.peak_memory import PeakMemory, held
from tpu_kit.config.loader import LoraConfig, ModelConfig
from tpu_kit.config.mesh import Mesh
from tpu_kit.distributed.replica.mesh import read, start
from tpu_kit.model import causal_lm, preparation, trainable
from tpu_kit.model.loop import layer_scan

def place(name, base_dtype, r):
    config = ModelConfig(name=name, base_dtype=base_dtype, quant_group=32, quant_cache=sys.argv[2])
    model = trainable.load_model(config, LoraConfig(r=r))
    preparation.use_attention(model, "sdpa", "xla-cpu")
    layer_scan.stack(model.get_decoder())
    stacked = held()
    return causal_lm.to_device(model, torch_xla.device()), stacked

start(Mesh(1, 4, 1))
place("embedded", "int8", 4)  # loads the libraries
for base_dtype, r in (("int4", 4), ("int4", 4), ("bf16", 4), ("bf16", 0)):
    gc.collect()
    with PeakMemory() as peak:
        model, stacked = place(sys.argv[1], base_dtype, r)
        torch_xla.sync(wait=True)
        time.sleep(0.3)  # the shards on the host are freed once they are copied
    tensors = [*model.parameters(), *model.buffers()]
    stacks = [one.nbytes for one in tensors if one.ndim > 2]
    print("figures", json.dumps([stacked - peak.before, peak.most - held(), sum(stacks), max(stacks)]))
    del model, tensors
"""
"""Prints four byte counts for several ways to load a model on a mesh.

They are: the host's memory before the first tensor moves, its peak beyond the devices' memory, the sum of all stacks,
and the largest stack.
"""
