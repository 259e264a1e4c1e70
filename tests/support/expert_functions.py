"""Compares experts modules of transformers' families: the kit on XLA:CPU against transformers' eager code on the CPU.

`main(kinds, interpret, group)` prints, by family, the largest relative error of the output, the gradient of the hidden
states and the gradient of the router's weights, in fp32.
"""

from __future__ import annotations

import copy
import importlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

EXPERTS, CHOSEN = 8, 3
SIZES = {
    "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts_per_tok": CHOSEN,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "moe_k": CHOSEN, "top_k_experts": CHOSEN,
}  # fmt: skip


def module(kind: str, **sizes: int) -> Any:
    """Builds the experts module of a family with random, frozen weights."""
    from transformers import CONFIG_MAPPING

    family = kind.removesuffix("_text")
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    (found,) = [value for name, value in vars(code).items() if name.endswith("Experts") and isinstance(value, type)]
    config = CONFIG_MAPPING[kind](**SIZES | sizes)
    config._experts_implementation = "eager"
    made = found(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.requires_grad_(False)


def routing(tokens: int, skewed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws the experts and weights of each token; if `skewed`, expert 0 gets every token and some experts none."""
    scores = torch.randn(tokens, EXPERTS)
    if skewed:
        scores[:, 0] += 9
        scores[:, 5:] -= 99
    weights, index = torch.topk(scores.softmax(-1), CHOSEN)
    return weights / weights.sum(-1, keepdim=True), index


def computed(experts: Any, device: Any, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Returns the output and the gradients of hidden states and router weights, moved to the CPU."""
    experts = experts.to(device)
    hidden, weights, index, upstream = (one.detach().clone().to(device) for one in given)
    hidden.requires_grad_(), weights.requires_grad_()
    output = experts(hidden, index, weights)
    gradients = torch.autograd.grad(output, [hidden, weights], upstream)
    return [each.detach().cpu() for each in (output, *gradients)]


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


def ours_of(plain: Any, scheme: Any = None) -> Any:
    """Returns a copy of `plain` that the kit computes, quantized if `scheme` is given."""
    from tpu_kit.model.families import experts
    from tpu_kit.model.weights.quantization import rounded

    ours = copy.deepcopy(plain)
    ours.config = copy.deepcopy(plain.config)
    experts.connect(ours, frozen=True)
    experts.prepare(ours)
    if scheme is not None:
        weights = {name: getattr(ours, name) for name in experts.names_of(ours)}
        experts.replace(ours, scheme)
        for name, weight in weights.items():
            for end, stack in zip(("", "_scale"), rounded(scheme, weight), strict=True):
                setattr(ours, name + end, stack)
    return ours


def main(kinds: Sequence[str], interpret: bool, group: int, cases: tuple[str, ...] = ("",), **sizes: int) -> None:
    """Prints the largest error by family and case; `cases`: prefixes of case names, `group`: int4's group size."""
    import torch_xla

    from tpu_kit.model.families import experts
    from tpu_kit.model.weights.quantization import Scheme

    device, chosen, found = torch_xla.device(), experts.tiles_for, {}
    if interpret:
        experts.tiles_for = lambda *args: chosen(*args)._replace(kernel=True, interpret=True)
    for kind in kinds:
        torch.manual_seed(0)
        plain = module(kind, **sizes)
        every = {"random": None, "skewed": None, "int8": Scheme(8), "int4": Scheme(4, group)}
        for case, scheme in every.items():
            if not case.startswith(cases):
                continue
            ours, reference = ours_of(plain, scheme), ours_of(plain, scheme) if scheme else copy.deepcopy(plain)
            weights, index = routing(40, case == "skewed")
            hidden, upstream = torch.randn(2, 40, plain.down_proj.shape[1 + plain.is_transposed])
            given = hidden, weights, index, upstream
            expected = computed(reference, "cpu", given)
            found[f"{kind} {case}"] = max(map(error, computed(ours, device, given), expected))
    print(json.dumps(found))


def adapted_errors(kinds: Sequence[str], kind_of_device: str = "xla-cpu") -> dict[str, float]:
    """Prints and returns the largest relative errors of logits and gradients of tiny models with all kinds of adapters.

    The kit computes them on XLA:CPU or the CPU. The reference is PEFT on transformers' eager experts, with the adapter
    as the kit saves it.
    """
    from peft import PeftModel
    from safetensors.torch import save_file
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from tpu_kit.config.loader import LoraConfig, load_config
    from tpu_kit.model import causal_lm, preparation, trainable
    from tpu_kit.training.adapter_files import adapter_settings, adapter_tensors

    device, found = torch.device("cpu"), {}
    if kind_of_device == "xla-cpu":
        import torch_xla

        device = torch_xla.device()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "vocab_size": 64, "hidden_size": 160, "moe_intermediate_size": 144, "intermediate_size": 144,
             "shared_expert_intermediate_size": 32}  # fmt: skip
    for kind in kinds:
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**SIZES | sizes)
        base = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
        ours: Any = trainable.adapt(copy.deepcopy(base), LoraConfig(r=4, alpha=6.0, experts=2), "fp32").train()
        for name, weight in causal_lm.trainable_parameters(ours).items():
            torch.nn.init.normal_(weight, std=0.2 if "lora_B" in name else 0.1)
        with tempfile.TemporaryDirectory() as folder:
            trained = {name: one.detach().clone() for name, one in causal_lm.trainable_parameters(ours).items()}
            save_file(adapter_tensors(ours, trained), f"{folder}/adapter_model.safetensors")
            settings = adapter_settings(ours, load_config(None, {"model.name": "some/model"}))
            Path(folder, "adapter_config.json").write_text(json.dumps(settings))
            reference = PeftModel.from_pretrained(base, folder, is_trainable=True)
        ids = torch.randint(64, (2, 24))
        upstream = torch.randn(2, 24, 64)
        expected = reference(input_ids=ids).logits
        (expected * upstream).sum().backward()
        wanted = {name: one.grad for name, one in reference.named_parameters() if one.requires_grad}
        preparation.use_attention(ours, "sdpa", kind_of_device)
        ours = causal_lm.to_device(ours, device)
        logits = causal_lm.logits(ours, {"input_ids": ids.to(device)})
        (logits * upstream.to(device)).sum().backward()
        gradients = {name: one.grad.cpu() for name, one in causal_lm.trainable_parameters(ours).items()}
        assert gradients.keys() == wanted.keys(), gradients.keys() ^ wanted.keys()
        found[f"{kind} logits"] = error(logits.detach().cpu(), expected.detach())
        for part, count in (("experts", 8), ("self_attn", 16), ("shared_expert", 12)):
            errors = {name: error(gradients[name], wanted[name]) for name in wanted if f".{part}." in name}
            assert len(errors) in (count, 0), list(errors)
            found |= {f"{kind} {part}": max(errors.values())} if errors else {}
    print(json.dumps(found))
    return found


def write_mixture(kind: str, folder: Path, *, shards: str = "1GB", **sizes: Any) -> Path:
    """Saves a random bf16 model of two layers; gpt-oss's experts are MXFP4, in the layout of its published files."""
    from safetensors.torch import save_file
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from tests.support.tiny_tokenizer import tiny_tokenizer

    torch.manual_seed(0)
    tiny_tokenizer().save_pretrained(folder)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    sizes = layers | {"moe_intermediate_size": sizes["intermediate_size"]} | heads | sizes
    config = CONFIG_MAPPING[kind](**SIZES | sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shards if kind != "gpt_oss" else "1GB")
    if kind != "gpt_oss":
        return folder
    tensors = {}
    for name, weight in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            size = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, size, dtype=torch.uint8)
        else:
            tensors[name] = weight
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_fp8(folder: Path) -> Path:
    """Converts a saved model to fp8 weights with a scale per block of 128 x 128, the layout of published models."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name].float()
        blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        rounded = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors |= {name: rounded.reshape(weight.shape), f"{name}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": method}))
    return folder


LOADING_MEMORY = """
import gc, sys
from tests.support.peak_memory import PeakMemory
from tpu_kit.config.loader import ModelConfig
from tpu_kit.model.weights.loading import load_frozen

load_frozen(ModelConfig(name="embedded", base_dtype="int8", quant_cache=None))  # loads the libraries
for name in sys.argv[1:]:
    with PeakMemory() as peak:
        model = load_frozen(ModelConfig(name=name, base_dtype="int8", quant_cache=None))
    print("figures", sum(one.nbytes for one in [*model.parameters(), *model.buffers()]), peak.most - peak.before)
    del model
    gc.collect()
"""
"""A program that prints, for each model name in its arguments, its quantized bytes and the peak memory of loading."""
