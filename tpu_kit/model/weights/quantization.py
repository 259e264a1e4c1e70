"""Linear layers with frozen integer weights: int8 with a scale per output, or int4 in groups.

An 8B model in bf16 does not fit on a 16 GB chip; in int8 or int4 it does, with trained adapters on top. TPUs multiply
bf16, so a layer converts its integers to bf16 in the forward pass and again in the backward pass. Autograd saves only
the integers and the scales, which exist anyway. PyTorch's own int4 does not exist on XLA, and torch_xla's quantized
linear layer does not propagate gradients.

Storage of a weight W of shape (O, I), as buffers of a `QuantizedLinear`:

    int8   weight  int8 (O, I)        W is about weight * scale[:, None]
           scale   bf16 (O,)
    int4   weight  uint8 (I / 2, O)   a byte holds two values from 0 to 15: the low four bits are input j, the high
                                      four bits input j + I / 2; 2 G divides I
           scale   bf16 (2, I / G, O) a step and an offset for the inputs j with the same j // G; W is about
                                      value * step + offset

G is the group size. A weight takes 1 + 2 / I bytes in int8, and 1/2 + 4 / G bytes in int4. The int4 layout suits the
TPU compiler. With adjacent inputs in a byte, the compiler takes many times the memory or never ends. With inputs as the
last dimension, which the TPU stores in tiles of 128 lanes, a group is not a whole part of a tile. Then the compiler
copies the integers of all layers into another layout, unless the number of groups is a multiple of 8. GGUF files of
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

_AT_ONCE = 2**18  # weights rounded at once, so that temporary values stay in a processor's cache
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


@dataclass(frozen=True)
class Scheme:
    """A storage format of quantized weights.

    Attributes:
        bits: 8 or 4.
        group: number of columns that share a scale; only for 4 bits.
    """

    bits: int
    group: int = 0

    @classmethod
    def of(cls, config: ModelConfig) -> Scheme | None:
        """Returns the scheme of `model.base_dtype`; None for floating-point weights."""
        if config.base_dtype == "int8":
            return cls(8)
        return cls(4, config.quant_group) if config.base_dtype == "int4" else None

    def __str__(self) -> str:
        return "int8" if self.bits == 8 else f"int4 in groups of {self.group}"

    def stored(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns {"weight": (shape, dtype), "scale": (shape, dtype)} of a layer's buffers.

        int8 has int8 (O, I) and bf16 (O,); int4 has uint8 (I / 2, O) and bf16 (2, I / group, O), steps and offsets.
        """
        if self.bits == 8:
            return {"weight": ((outputs, inputs), torch.int8), "scale": ((outputs,), torch.bfloat16)}
        return {
            "weight": ((inputs // 2, outputs), torch.uint8),
            "scale": ((2, inputs // self.group, outputs), torch.bfloat16),
        }

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantizes a floating-point weight (O, I); returns integers and scales, with the shapes of `stored`."""
        assert weight.is_floating_point(), f"{weight.dtype} is not a floating-point weight: was it cast before?"
        rows = max(1, _AT_ONCE // weight.shape[1])
        found = [self._quantize(part.detach().to(torch.float32)) for part in weight.split(rows)]
        integers, scales = zip(*found, strict=True)
        if self.bits == 8:
            return torch.cat(integers), torch.cat(scales)
        return torch.cat(integers).T.contiguous(), torch.cat(scales, dim=1).mT.contiguous()

    def _quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantizes fp32 rows (O, I) to (O, I) and (O,) or, in int4, to (O, I / 2) and (2, O, I / G): untransposed."""
        if self.bits == 8:
            scale = (weight.abs().amax(1) / 127).to(torch.bfloat16)  # at most 0.2 % smaller: no value exceeds 127
            return torch.round(weight / _divisor(scale.float())[:, None]).to(torch.int8), scale
        groups = weight.view(weight.shape[0], -1, self.group)
        scale = _least_squares(groups)
        low, high = _four_bits(groups, scale).view(weight.shape).to(torch.uint8).chunk(2, dim=1)
        return low | high << 4, scale

    def parts(self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Dequantizes integers and scales from `quantize` to `dtype`: [(O, I)] for int8, [(O, I / 2)] * 2 for int4.

        The halves are the first and the last I / 2 inputs. Separate products with the halves need no dequantized copy;
        joining the halves would make the compiler write it.
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
        # In a sharded program, the compiler writes broadcasts to memory in fp32. A one-hot product gives the same
        # numbers and is fused with the others: 40 % less traffic for a 70B model.
        groups = torch.arange(steps[0].shape[0], device=weight.device)
        of_group = (torch.arange(weight.shape[0], device=weight.device)[:, None] // self.group == groups).to(dtype)
        return [
            (half * (of_group @ step) + of_group @ offset).T
            for half, step, offset in zip(halves, steps, offsets, strict=True)
        ]


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """Replaces scales of 0, which rows of zeros have, by 1."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _four_bits(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rounds groups (O, I / G, G) to values from 0 to 15, as floats, given steps and offsets (2, O, I / G)."""
    step, offset = scale.float()[..., None].unbind()
    return torch.round((groups - offset) / _divisor(step)).clamp(0, 15)


def _least_squares(groups: torch.Tensor) -> torch.Tensor:
    """Returns bf16 steps and offsets (2, O, I / G) with the smallest squared error of the groups (O, I / G, G).

    The seven candidates are the range from a group's minimum to its maximum, and narrower ranges with the same center.
    """
    low, high = groups.aminmax(dim=-1)
    best = torch.full(low.shape, float("inf"), dtype=torch.float64)
    found = torch.zeros(2, *low.shape, dtype=torch.bfloat16)
    for share in _SHARES:
        offset = (low + high) / 2 - share * (high - low) / 2
        scale = torch.stack([share * (high - low) / 15, offset]).to(torch.bfloat16)
        step, offset = scale.float()[..., None].unbind()
        # Sums in double precision do not depend on the order of summation, so all machines round alike.
        error = (_four_bits(groups, scale) * step + offset - groups).square().sum(-1, dtype=torch.float64)
        found = torch.where(error < best, scale, found)
        best = torch.minimum(error, best)
    return found


class QuantizedLinear(torch.nn.Linear):
    """A linear layer with a frozen integer weight; for PEFT, it is a linear layer.

    Outputs and gradients have autocast's dtype, or without autocast the input's dtype.
    """

    scale: torch.Tensor

    def __init__(self, inputs: int, outputs: int, scheme: Scheme, bias: torch.nn.Parameter | None = None) -> None:
        """Makes a layer with uninitialized buffers, on PyTorch's default device; `bias` is used as it is."""
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.scheme = inputs, outputs, scheme
        for name, (shape, dtype) in scheme.stored(outputs, inputs).items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype))
        self.register_parameter("bias", bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps (..., I) to (..., O)."""
        kind = input.device.type
        mixed = kind != "meta" and torch.is_autocast_enabled(kind)  # raises for "meta"
        dtype = torch.get_autocast_dtype(kind) if mixed else input.dtype
        weight, scale = self.weight, self.scale
        if not self.training and input.shape[-2] == 1:
            # In a loop of decode steps, the compiler would convert all layers' integers once, before the loop.
            weight, scale = after([input], [weight, scale])
        output: torch.Tensor = _Product.apply(input.to(dtype), weight, scale, self.scheme)
        return output if self.bias is None else output + self.bias.to(dtype)

    @property
    def count(self) -> int:
        """Number of weights in the integers, including all layers of a stack."""
        return self.weight.numel() * 8 // self.scheme.bits


class _Product(torch.autograd.Function):
    """Computes input @ W.T, and saves only the integers and scales of W; the gradient is for input only."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> Any:
        ctx.save_for_backward(weight, scale)
        ctx.scheme = scheme
        if scheme.bits == 8:
            # int8 is exact in bf16, and a row's scale can be applied to the output.
            return torch.nn.functional.linear(input, weight.to(input.dtype)) * scale.to(input.dtype)
        parts = scheme.parts(weight, scale, input.dtype)
        low, high = (
            torch.nn.functional.linear(block, part) for block, part in zip(input.chunk(2, dim=-1), parts, strict=True)
        )
        return low + high

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        weight, scale = ctx.saved_tensors
        # The scale of int8 is applied to the weight: applied to the upstream gradient, it would copy the gradient.
        parts = ctx.scheme.parts(weight, scale, upstream.dtype)
        return torch.cat([upstream @ part for part in parts], dim=-1), None, None, None


def layers_of(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """Returns a decoder's linear layers, without head and routers, to quantize or quantized, by names in the model."""
    text, head, routers = {*model.get_decoder().modules()}, model.get_output_embeddings(), experts.routers_of(model)
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and part in text and part is not head and name not in routers
    }


def replace_layers(model: PreTrainedModel, scheme: Scheme) -> None:
    """Replaces a decoder's linear layers and experts, in place, by uninitialized quantized layers; keeps biases only.

    Raises:
        ValueError: the decoder has no linear layers, or the group size does not divide half of their inputs.
    """
    layers = layers_of(model)
    if not layers:
        raise ValueError(
            f"model.base_dtype={'int8' if scheme.bits == 8 else 'int4'}: {type(model).__name__} has no linear layers "
            "to quantize; set it to bf16"
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
    """Returns the weights to quantize or quantized: name -> (module, names of integers and scales in this module)."""
    found: dict[str, tuple[torch.nn.Module, list[str]]] = {
        f"{name}.weight": (layer, ["weight", "scale"]) for name, layer in layers_of(model).items()
    }
    for path, part in experts.modules_of(model):
        found |= {f"{path}.{name}": (part, [name, f"{name}_scale"]) for name in experts.names_of(part)}
    return found


def quantize_model(model: PreTrainedModel, scheme: Scheme) -> None:
    """Quantizes the linear layers and experts of a loaded model on the CPU, in place, one by one.

    Raises:
        ValueError: from `replace_layers`.
    """
    for _, part in experts.modules_of(model):
        experts.prepare(part)
    weights = {name: getattr(owner, leaves[0]).data for name, (owner, leaves) in places(model).items()}
    replace_layers(model, scheme)
    for name, (owner, leaves) in places(model).items():
        for leaf, tensor in zip(leaves, rounded(scheme, weights.pop(name)), strict=True):
            setattr(owner, leaf, tensor)


def rounded(scheme: Scheme, weight: torch.Tensor, shaped: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Quantizes a weight (O, I), or experts (E, O, I) one by one; returns [integers, scales], (E, ...) for experts.

    Args:
        scheme: storage of the weights.
        weight: floats.
        shaped: converts an expert (1, ...) to (1, O, I); None if no conversion is needed. Ignored for a matrix.
    """
    if weight.ndim == 2:
        return [*scheme.quantize(weight)]
    return stacked(
        len(weight), (experts.quantize(scheme, (shaped(part) if shaped else part)[0]) for part in weight.split(1))
    )


def stacked(count: int, parts: Iterable[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Returns stacks (count, ...) of tensors of `count` experts; `parts` yields a tuple of tensors for an expert."""
    found: list[torch.Tensor] = []
    for place, part in enumerate(parts):
        found = found or [tensor.new_empty((count, *tensor.shape)) for tensor in part]
        for stack, tensor in zip(found, part, strict=True):
            stack[place] = tensor
    return found
