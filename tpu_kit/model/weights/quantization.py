"""Linear layers whose frozen weights are stored as integers: int8 with a scale for each output, or int4 in groups.

An 8B model in bf16 does not fit a chip of 16 GB; in int8 or int4 it does, with adapters to train on top. TPUs multiply
bf16, so a layer converts its integers to bf16 in the forward pass and again in the backward pass. Autograd keeps only
the integers and the scales, which exist anyway. PyTorch's own int4 does not exist on XLA, and torch_xla's quantized
linear layer does not propagate gradients.

Storage of a weight W of (O, I), as buffers of a `QuantizedLinear`:

    int8   weight  int8 (O, I)        W is about weight * scale[:, None]
           scale   bf16 (O,)
    int4   weight  uint8 (I / 2, O)   a byte holds two values from 0 to 15: the low four bits are input j, the high
                                      ones input j + I / 2; 2 G divides I
           scale   bf16 (2, I / G, O) a step and an offset for the inputs j with the same j // G; W is about
                                      value * step + offset

G is the group size. A weight takes 1 + 2 / I bytes in int8, and 1/2 + 4 / G bytes in int4. The layout of int4 is chosen
for the TPU compiler. If a byte holds adjacent inputs, the compiler takes many times the memory or never ends. If the
inputs are the last dimension, which the TPU stores in tiles of 128 lanes, a group is not a whole part of a tile. Then,
unless the number of groups is a multiple of 8, the integers of all layers are copied into another layout. GGUF files of
4 bits also have groups of 32 with offsets, so groups of 32 lose almost nothing of them. Embeddings, norms, biases and
the output head are not quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.model.families import experts
from tpu_kit.model.shape import check_groups
from tpu_kit.xla.scan import after

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tpu_kit.config.loader import ModelConfig

_AT_ONCE = 2**18  # weights: what rounding needs beside them stays in a processor's cache
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


@dataclass(frozen=True)
class Scheme:
    """How weights are stored.

    Attributes:
        bits: 8 or 4.
        group: columns that share a scale; for 4 bits only.
    """

    bits: int
    group: int = 0

    @classmethod
    def of(cls, config: ModelConfig) -> Scheme | None:
        """What `model.base_dtype` asks for; None where weights stay floating-point numbers."""
        if config.base_dtype == "int8":
            return cls(8)
        return cls(4, config.quant_group) if config.base_dtype == "int4" else None

    def __str__(self) -> str:
        return "int8" if self.bits == 8 else f"int4 in groups of {self.group}"

    def stored(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the buffers of a layer."""
        if self.bits == 8:
            return {"weight": ((outputs, inputs), torch.int8), "scale": ((outputs,), torch.bfloat16)}
        return {
            "weight": ((inputs // 2, outputs), torch.uint8),
            "scale": ((2, inputs // self.group, outputs), torch.bfloat16),
        }

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds a weight (O, I), of any floating-point type: its integers and scales, as they are stored."""
        assert weight.is_floating_point(), f"{weight.dtype} is no weight to round: was it cast before?"
        rows = max(1, _AT_ONCE // weight.shape[1])
        found = [self._quantize(part.detach().to(torch.float32)) for part in weight.split(rows)]
        integers, scales = zip(*found, strict=True)
        if self.bits == 8:
            return torch.cat(integers), torch.cat(scales)
        return torch.cat(integers).T.contiguous(), torch.cat(scales, dim=1).mT.contiguous()

    def _quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.bits == 8:
            scale = (weight.abs().amax(1) / 127).to(torch.bfloat16)  # less by 0.2 % at most: nothing exceeds 127
            return torch.round(weight / _divisor(scale.float())[:, None]).to(torch.int8), scale
        groups = weight.view(weight.shape[0], -1, self.group)
        scale = _least_squares(groups)
        low, high = _four_bits(groups, scale).view(weight.shape).to(torch.uint8).chunk(2, dim=1)
        return low | high << 4, scale

    def parts(self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """The weight (O, I) in `dtype`, of what `quantize` returned, as blocks of columns: one, or two halves of int4.

        A product with each half needs no dequantised copy on a TPU, which the compiler would make to join them.
        """
        if self.bits == 8:
            return [weight.to(dtype) * scale.to(dtype)[:, None]]
        halves = (weight & 15).to(dtype), (weight >> 4).to(dtype)
        steps, offsets = (each.chunk(2) for each in scale.to(dtype).unbind())
        if active_mesh().size == 1:
            return [
                (half.view(-1, self.group, half.shape[1]) * step[:, None] + offset[:, None]).flatten(0, 1).T
                for half, step, offset in zip(halves, steps, offsets, strict=True)
            ]
        # In a sharded program the compiler writes each broadcast to memory, in fp32. A product with a matrix of zeros
        # and ones gives the same numbers, and is fused with the others: 40 % less traffic for a 70B model.
        groups = torch.arange(steps[0].shape[0], device=weight.device)
        of_group = (torch.arange(weight.shape[0], device=weight.device)[:, None] // self.group == groups).to(dtype)
        return [
            (half * (of_group @ step) + of_group @ offset).T
            for half, step, offset in zip(halves, steps, offsets, strict=True)
        ]


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """A row of zeros has scale 0."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _four_bits(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values from 0 to 15 of groups (O, I / G, G), by steps and offsets (2, O, I / G)."""
    step, offset = scale.float()[..., None].unbind()
    return torch.round((groups - offset) / _divisor(step)).clamp(0, 15)


def _least_squares(groups: torch.Tensor) -> torch.Tensor:
    """Steps and offsets that leave each group (O, I / G, G) the smallest sum of squared errors, out of seven.

    From its smallest value to its largest, or a range about the same middle that cuts both off.
    """
    low, high = groups.aminmax(dim=-1)
    best = torch.full(low.shape, float("inf"), dtype=torch.float64)
    found = torch.zeros(2, *low.shape, dtype=torch.bfloat16)
    for share in _SHARES:
        offset = (low + high) / 2 - share * (high - low) / 2
        scale = torch.stack([share * (high - low) / 15, offset]).to(torch.bfloat16)
        step, offset = scale.float()[..., None].unbind()
        # Sums in double precision do not depend on how a processor sums; so every machine rounds alike.
        error = (_four_bits(groups, scale) * step + offset - groups).square().sum(-1, dtype=torch.float64)
        found = torch.where(error < best, scale, found)
        best = torch.minimum(error, best)
    return found


class QuantizedLinear(torch.nn.Linear):
    """A linear layer with a frozen weight of integers. PEFT takes it for what it is: a linear layer.

    Its output and the gradients have the dtype of the products: autocast's, or else that of the input.
    """

    scale: torch.Tensor

    def __init__(self, inputs: int, outputs: int, scheme: Scheme, bias: torch.nn.Parameter | None = None) -> None:
        """Makes an empty one, on the device that is PyTorch's default now."""
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.scheme = inputs, outputs, scheme
        for name, (shape, dtype) in scheme.stored(outputs, inputs).items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype))
        self.register_parameter("bias", bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)."""
        kind = input.device.type
        mixed = kind != "meta" and torch.is_autocast_enabled(kind)  # which raises for "meta"
        dtype = torch.get_autocast_dtype(kind) if mixed else input.dtype
        weight, scale = self.weight, self.scale
        if not self.training and input.shape[-2] == 1:
            # In a loop of decode steps the compiler would convert all layers' integers once, before the loop.
            weight, scale = after([input], [weight, scale])
        output: torch.Tensor = _Product.apply(input.to(dtype), weight, scale, self.scheme)
        return output if self.bias is None else output + self.bias.to(dtype)

    @property
    def count(self) -> int:
        """Number of weights that its integers stand for; where it is a stack of layers, those of all."""
        return self.weight.numel() * 8 // self.scheme.bits


class _Product(torch.autograd.Function):
    """input @ W.T, which keeps nothing but the integers and scales of W."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> Any:
        ctx.save_for_backward(weight, scale)
        ctx.scheme = scheme
        if scheme.bits == 8:
            # int8 is exact in bf16, and a row's scale can as well be the output's.
            return torch.nn.functional.linear(input, weight.to(input.dtype)) * scale.to(input.dtype)
        parts = scheme.parts(weight, scale, input.dtype)
        low, high = (
            torch.nn.functional.linear(block, part) for block, part in zip(input.chunk(2, dim=-1), parts, strict=True)
        )
        return low + high

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        weight, scale = ctx.saved_tensors
        # Of int8, too, the scale goes to the weight: times the upstream gradient it would make a copy of that.
        parts = ctx.scheme.parts(weight, scale, upstream.dtype)
        return torch.cat([upstream @ part for part in parts], dim=-1), None, None, None


def layers_of(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """The linear layers of a model's decoder, by name: those whose weights are quantised, or are already."""
    text, head, routers = {*model.get_decoder().modules()}, model.get_output_embeddings(), experts.routers_of(model)
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and part in text and part is not head and name not in routers
    }


def replace_layers(model: PreTrainedModel, scheme: Scheme) -> None:
    """Puts empty quantised layers in the place of a decoder's linear layers, whose weights are dropped.

    Raises:
        ValueError: there are none, or the size of a group does not divide half of their inputs.
    """
    layers = layers_of(model)
    if not layers:
        raise ValueError(
            f"model.base_dtype={'int8' if scheme.bits == 8 else 'int4'}: {type(model).__name__} has no linear layers "
            "to quantise; set it to bf16"
        )
    mixtures = dict(experts.modules_of(model))
    for part in mixtures.values():
        experts.prepare(part)
    if scheme.bits == 4:
        widths = [(name.rpartition(".")[2], layer.in_features) for name, layer in layers.items()]
        stacks = [(name, part) for part in mixtures.values() for name in experts.names_of(part)]
        widths += [(f"experts.{name}", getattr(part, name).shape[2]) for name, part in stacks]
        check_groups(widths, scheme.group)
    for part in mixtures.values():
        experts.replace(part, scheme)
    for name, layer in layers.items():
        with layer.weight.device:
            quantized = QuantizedLinear(layer.in_features, layer.out_features, scheme, layer.bias)
        model.set_submodule(name, quantized.train(layer.training))


def places(model: PreTrainedModel) -> dict[str, tuple[torch.nn.Module, list[str]]]:
    """The quantised weights of a model by name: whose they are, and the names of their integers and scales there."""
    found: dict[str, tuple[torch.nn.Module, list[str]]] = {
        f"{name}.weight": (layer, ["weight", "scale"]) for name, layer in layers_of(model).items()
    }
    for path, part in experts.modules_of(model):
        found |= {f"{path}.{name}": (part, [name, f"{name}_scale"]) for name in experts.names_of(part)}
    return found


def quantize_model(model: PreTrainedModel, scheme: Scheme) -> None:
    """Quantises a loaded model on the CPU, in place, one layer after the other.

    Raises:
        ValueError: as `replace_layers`.
    """
    for _, part in experts.modules_of(model):
        experts.prepare(part)
    weights = {name: getattr(owner, leaves[0]).data for name, (owner, leaves) in places(model).items()}
    replace_layers(model, scheme)
    for name, (owner, leaves) in places(model).items():
        for leaf, tensor in zip(leaves, rounded(scheme, weights.pop(name)), strict=True):
            setattr(owner, leaf, tensor)


def rounded(scheme: Scheme, weight: torch.Tensor, shaped: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Rounds a weight (O, I), or those of experts (E, O, I) one by one, to a list of its integers and scales.

    Args:
        scheme: how they are stored.
        weight: floats.
        shaped: brings one expert, (1, ...), to (1, O, I); None if it has this form.
    """
    if weight.ndim == 2:
        return [*scheme.quantize(weight)]
    return stacked(
        len(weight), (experts.quantize(scheme, (shaped(part) if shaped else part)[0]) for part in weight.split(1))
    )


def stacked(count: int, parts: Iterable[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Stacks the tensors of `count` experts, which are made one after the other."""
    found: list[torch.Tensor] = []
    for place, part in enumerate(parts):
        found = found or [tensor.new_empty((count, *tensor.shape)) for tensor in part]
        for stack, tensor in zip(found, part, strict=True):
            stack[place] = tensor
    return found
