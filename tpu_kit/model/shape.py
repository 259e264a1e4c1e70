"""The shapes of models: sizes, parameters, linear layers of each kind of layer, layers with adapters.

`meta_model` derives a shape from the model itself, and `shape_cache` caches it on disk.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, cached_property
from typing import Any, get_args, get_origin, get_type_hints

from tpu_kit.config.loader import LoraConfig
from tpu_kit.config.mesh import Mesh
from tpu_kit.model.loop.loop_structure import Loop, in_blocks, loops, stacks
from tpu_kit.model.sharding.sharding_rules import Embedding

_PROJECTOR = re.compile(r"\.(embed_vision|connector|multi_modal_projector|visual\.(merger|deepstack_merger_list))\.")
_TOWER = re.compile(r"\.(vision_tower|vision_model|visual)\.")
WITHOUT_ADAPTER = dict.fromkeys(("falcon_h1", "nemotron_h"), ("out_proj",))
"""model_type -> linear layers that lora.targets=all-linear omits: PEFT (0.17) refuses adapters there, because fused
CUDA kernels read these weights without their module."""


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    Attributes:
        path: path in the decoder layer, such as "self_attn.q_proj"; for experts, path in their module.
        inputs: columns of the weight.
        outputs: rows of the weight.
        bias: whether the layer has a bias.
    """

    path: str
    inputs: int
    outputs: int
    bias: bool

    @property
    def parameters(self) -> int:
        """Number of elements of weight and bias."""
        return self.outputs * (self.inputs + self.bias)


def scale_groups(inputs: int, group: int) -> int:
    """Returns the number of scale groups of int4 experts, with each half padded to a multiple of 8.

    With 92 groups, the TPU compiler copies the scales of all layers into another layout: 1.2 GiB a chip for
    gpt-oss-120b. If padding would add more than an eighth, the groups stay as they are.
    """
    half = inputs // group // 2
    full = -(-half // 8) * 8
    return 2 * (full if 8 * full <= 9 * half else half)


@dataclass(frozen=True)
class Experts:
    """A layer's experts: their path, their number, the number that a token chooses, and the products of one expert.

    `padding` is the number of elements of an expert's weights that only fill tiles.
    """

    path: str
    count: int
    chosen: int
    linears: tuple[Linear, ...]
    padding: int

    @property
    def weights(self) -> int:
        """Number of elements of an expert's matrices."""
        return sum(one.inputs * one.outputs for one in self.linears)

    def rows(self, tokens: int) -> int:
        """Returns the rows of `xla.grouped`, padding included, for the given tokens of a device."""
        pairs = tokens * self.chosen
        tile = tile_rows(pairs, self.count)
        return (pairs + self.count * (tile - 1)) // tile * tile

    def read(self, tokens: int) -> float:
        """Returns the expected number of distinct experts that `tokens` tokens choose, if all are equally likely."""
        return float(self.count * (1 - (1 - self.chosen / self.count) ** tokens))


def tile_rows(pairs: int, experts: int) -> int:
    """Returns the rows of a tile of `xla.grouped`: the power of 2 up to half of an expert's average, in 16 to 256."""
    return 1 << max(4, min(8, (pairs // (2 * experts)).bit_length() - 1))


Alive = tuple[tuple[float, float], ...]
"""Peaks of live bytes per token: (outside of an MLP's tiles, inside). No pair exceeds another in both."""


def most(alive: Alive, tokens: int, tile: int) -> float:
    """Returns the peak of live bytes for `tokens` tokens, of which `tile` are in a tile of the MLP."""
    return max(outside * tokens + within * tile for outside, within in alive)


@dataclass(frozen=True)
class Layer:
    """A kind of decoder layer.

    Attributes:
        linears: linear layers, in the order of their calls.
        others: (path, shape) of the other parameters.
        mlp: path of the module with the most weights besides attention, "" if there is none.
        heads: query heads, 0 without attention.
        kv_heads: key-value heads.
        head_dim: size of a head.
        norm_follows: whether the MLP's output has a norm before the residual addition.
        experts: at most one mixture; its parameters are in neither `linears` nor `others`.
        state: elements of a row's state in `linear_attention`, H K V; 0 without a state.
        products: FLOPs per token of its matrix products, without attention's kernel and experts: forward, for gradients
            of activations, and for gradients of weights.
        forward: live bytes in bf16 during the forward pass, without values that only a backward pass reads.
        backward: live bytes while the layer is recomputed and its gradients are computed.
        saved: bytes per token that a forward pass saves for the backward pass.
    """

    linears: tuple[Linear, ...]
    others: tuple[tuple[str, tuple[int, ...]], ...]
    mlp: str
    heads: int
    kv_heads: int
    head_dim: int
    norm_follows: bool
    experts: tuple[Experts, ...]
    state: int
    products: tuple[float, ...]
    forward: Alive
    backward: Alive
    saved: float

    @cached_property
    def mlp_linears(self) -> tuple[Linear, ...]:
        """The MLP's linear layers."""
        return tuple(one for one in self.linears if self.mlp and one.path.startswith(f"{self.mlp}."))

    @cached_property
    def attention_linears(self) -> tuple[Linear, ...]:
        """All other linear layers, which count as attention."""
        return tuple(one for one in self.linears if one not in self.mlp_linears)

    @property
    def intermediate(self) -> int:
        """Intermediate size of the MLP: the inputs of its last linear layer."""
        return self.mlp_linears[-1].inputs if self.mlp_linears else 0

    @property
    def cached_heads(self) -> int:
        """Key-value heads in the KV cache; 0 if the layer reads keys and values of an earlier layer."""
        parents = [one.path.rpartition(".")[0] for one in self.attention_linears]
        made = [one.outputs for one, of in zip(self.attention_linears, parents, strict=True) if of == parents[0]]
        # The last layer is the output. A layer that reads another layer's keys makes only queries.
        return self.kv_heads if sum(made[:-1]) > self.heads * self.head_dim else 0

    @cached_property
    def parameters(self) -> int:
        """Number of parameters, all experts included."""
        mixed = sum(each.count * one.parameters for each in self.experts for one in each.linears)
        return sum(one.parameters for one in self.linears) + _elements(self.others) + mixed

    def weights(self, tokens: int | None = None) -> float:
        """Returns the number of elements of the matrices; with `tokens`, only of the average experts they choose."""
        mixed = sum(each.weights * (each.read(tokens) if tokens else each.count) for each in self.experts)
        return sum(one.inputs * one.outputs for one in self.linears) + mixed


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder-only model.

    Attributes:
        family: the model_type.
        vocabulary: rows of the embedding.
        hidden: hidden size.
        tied: whether input and output embedding share a weight.
        ends: paths of the input and the output embedding, "" if absent.
        positions: maximum length of a sequence; 2**30 if config.json does not limit it.
        layers_path: path of the list of layers, such as "model.layers".
        outside: (name, shape) of the parameters outside of layers; a tied embedding counts once.
        linears_outside: linear layers of the decoder outside of layers, by their paths in the model.
        kinds: the kinds of layers.
        order: per layer, the index of its kind.
        equal: per layer, a number; layers with the same number can be iterations of a loop.
        sees_all: whether all tokens see all earlier tokens, so that documents may share a prefix.
    """

    family: str
    vocabulary: int
    hidden: int
    tied: bool
    ends: tuple[str, str]
    positions: int
    layers_path: str
    outside: tuple[tuple[str, tuple[int, ...]], ...]
    linears_outside: tuple[Linear, ...]
    kinds: tuple[Layer, ...]
    order: tuple[int, ...]
    equal: tuple[int, ...]
    sees_all: bool

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Shape:
        """Makes a shape from the result of `asdict`, which may have passed through JSON."""
        return _read(cls, values)

    @property
    def embedding(self) -> Embedding:
        """The sizes that sharding rules need."""
        return Embedding(self.hidden, self.tied)

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.order)

    @cached_property
    def counted(self) -> tuple[tuple[Layer, int], ...]:
        """The kinds of layers, with the number of layers of every kind."""
        counts = Counter(self.order)
        return tuple((kind, counts[number]) for number, kind in enumerate(self.kinds))

    @property
    def projector(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of the projectors' matrices, which map image features into the text model."""
        return [(name, size) for name, size in self.outside if len(size) == 2 and _PROJECTOR.search(name)]

    @property
    def tower(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of the vision tower's matrices, which multiply patches of images before the projector."""
        found = [(name, size) for name, size in self.outside if len(size) == 2 and _TOWER.search(name)]
        return [(name, size) for name, size in found if "pos" not in name and not _PROJECTOR.search(name)]

    def adapted_projector(self, lora: LoraConfig) -> list[Linear]:
        """Returns the matrices of the projector that have adapters, by paths in the model; [] without lora.vision."""
        pairs = self.projector if lora.vision else []
        return [Linear(name.removesuffix(".weight"), width, rows, False) for name, (rows, width) in pairs]

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The distinct linear layers of all kinds of layers, and linear layers outside of layers."""
        return tuple(dict.fromkeys([one for kind in self.kinds for one in kind.linears] + [*self.linears_outside]))

    @cached_property
    def linear_weights(self) -> int:
        """Number of elements of the layers' matrices, including all experts."""
        return int(sum(kind.weights() * count for kind, count in self.counted))

    def flops(self, *times: float) -> float:
        """Returns FLOPs per token of all layers, experts included; `times` weights the parts of `Layer.products`."""
        return sum(
            count * number * (part + 2 * sum(each.weights * each.chosen for each in kind.experts))
            for kind, count in self.counted for number, part in zip(times, kind.products, strict=True)
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        """Number of all parameters; a tied embedding counts once."""
        return sum(kind.parameters * count for kind, count in self.counted) + _elements(self.outside)

    @cached_property
    def loops(self) -> list[Loop]:
        """The loops over layers."""
        return loops(self.equal)

    @cached_property
    def blocks(self) -> list[Loop]:
        """The loops over layers with optim.remat=blocks."""
        return in_blocks(self.loops)

    @property
    def recomputed_twice(self) -> float:
        """Share, 0 to 1, of layers that optim.remat=blocks recomputes twice: all but the last layer of every block."""
        return sum(loop.turns * (loop.period - 1) for loop in self.blocks) / self.layers

    @property
    def program_layers(self) -> int:
        """Number of layers in the program; equal neighbours in a block of a loop count once."""
        return sum(len(loop.neighbours) for loop in self.loops)

    def mesh_problems(self, mesh: Mesh) -> list[str]:
        """Returns the reasons why the axes of a mesh cannot shard the model, as texts; [] if they can.

        The model axis must divide the attention and key-value heads. With a context axis, all layers must have
        attention, and no layer may have a state or experts.
        """
        found = [text for kind in self.kinds for text in mesh.problems(kind.heads, kind.kv_heads)]
        if mesh.context > 1:
            start, fix = f"launch.mesh: {mesh}: ", "is not supported with an axis that shards tokens; use fsdp instead"
            if any(kind.state or not kind.heads for kind in self.kinds):
                found.append(f"{start}a layer that reads its tokens one after the other (a state, a convolution) {fix}")
            if any(kind.experts for kind in self.kinds):
                found.append(f"{start}a mixture of experts {fix}")
        return list(dict.fromkeys(found))

    def stacks(self, *, scanned: bool = True) -> Iterator[tuple[str, list[int]]]:
        """Yields (path in the model, numbers of its layers) per stack or, if not `scanned`, per layer."""
        found = stacks(self.loops) if scanned else ((str(number), [number]) for number in range(self.layers))
        yield from ((f"{self.layers_path}.{path}", layers) for path, layers in found)

    def has_adapter(self, lora: LoraConfig, layer: int | None, linear: Linear) -> bool:
        """Returns whether a linear layer has an adapter; `layer`: number of its decoder layer, None if outside."""
        if not lora.r or lora.targets == "all-linear":
            left_out = WITHOUT_ADAPTER.get(self.family, ())
            return bool(lora.r) and linear.path.rpartition(".")[2] not in left_out
        return self.is_target(lora, linear.path if layer is None else f"{self.layers_path}.{layer}.{linear.path}")

    @staticmethod
    def is_target(lora: LoraConfig, path: str) -> bool:
        """Returns whether `lora.targets`, not all-linear, names the linear layer at a path in the model by its end."""
        wanted = [lora.targets] if isinstance(lora.targets, str) else lora.targets
        return any(f".{path}".endswith(f".{one}") for one in wanted)

    def check_targets(self, lora: LoraConfig) -> None:
        """Raises ValueError if the adapters do not fit this model; see the function `check_targets`."""
        paths = [f".{one.path}" for one in self.linears_outside]
        paths += [
            f".{self.layers_path}.{layer}.{one.path}"
            for layer, kind in enumerate(self.order)
            for one in self.kinds[kind].linears
        ]
        check_targets(lora, paths, self.family, self.ends)

    @property
    def widths(self) -> list[tuple[str, int]]:
        """Names and input sizes of linear layers and products of experts, for `check_groups`."""
        linears = [*self.linears, *(one for kind in self.kinds for each in kind.experts for one in each.linears)]
        return [(one.path.rpartition(".")[2], one.inputs) for one in linears]

    def adapted(self, lora: LoraConfig, kind: Layer) -> list[Linear]:
        """Returns the linear layers of a kind that have adapters in at least one layer."""
        layers = [layer for layer, number in enumerate(self.order) if self.kinds[number] == kind]
        return [one for one in kind.linears if any(self.has_adapter(lora, layer, one) for layer in layers)]


def undivided(widths: Iterable[tuple[str, int]], group: int) -> list[str]:
    """Returns "name (inputs)" of the `Shape.widths` for which half of the inputs is not a multiple of an int4 group."""
    return list(dict.fromkeys(f"{name} ({width})" for name, width in widths if width % (2 * group)))


def check_groups(widths: Sequence[tuple[str, int]], group: int) -> None:
    """Raises ValueError if the int4 group size `group` does not divide half of the inputs of every layer.

    `widths` are `Shape.widths`. The text names these layers, and advises the largest size from 16 to 256 that fits all
    layers, or int8 if none fits.
    """
    if wrong := undivided(widths, group):
        fitting = [size for size in (256, 128, 64, 32, 16) if not undivided(widths, size)]
        advice = f"set it to {fitting[0]}" if fitting else "use model.base_dtype=int8"
        raise ValueError(
            f"model.quant_group={group} does not divide half of the inputs of {', '.join(wrong)}: {advice}"
        )


def check_targets(lora: LoraConfig, paths: Sequence[str], model: str, ends: tuple[str, str]) -> None:
    """Checks `lora.targets`, `lora.full` and `lora.tokens` against the layers of a model; returns at once for lora.r=0.

    A name matches a whole path, or the end of a path after a dot.

    Args:
        lora: the adapters.
        paths: paths of the linear layers that may have adapters, with a leading dot.
        model: name of the model in messages.
        ends: paths of the input and the output embedding; tied embeddings have two paths, too; "" if absent.

    Raises:
        ValueError: a name in `lora.full` is no embedding. A target is an embedding, and `lora.full`, `lora.tokens` or
            `lora.dora` is set. A target is the output embedding, and `lora.dropout` is not 0. A target is neither a
            linear layer nor an embedding, unless it is "all-linear". The list of targets is empty.
    """
    if not lora.r:
        return
    embeddings = [f".{path}" for path in ends]
    names = " and ".join(path.rpartition(".")[2] for path in embeddings)
    if wrong := [one for one in lora.full or () if not any(path.endswith(f".{one}") for path in embeddings)]:
        raise ValueError(f"lora.full: {', '.join(wrong)} is not an embedding of {model}: name {names} only")
    wanted = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
    adapted = [one for one in wanted if any(path.endswith(f".{one}") for path in embeddings)]
    for name, given in (("tokens", lora.tokens), ("full", lora.full)):
        if given and adapted:
            raise ValueError(
                f"lora.{name} and lora.targets={','.join(adapted)} both train the embeddings of {model}: keep one"
            )
    if adapted and lora.dora:
        raise ValueError(
            f"lora.dora does not support the embeddings {', '.join(adapted)} in lora.targets: remove either"
        )
    if lora.dropout and any(f".{ends[1]}".endswith(f".{one}") for one in adapted):
        raise ValueError(
            f"lora.dropout={lora.dropout:g}: the chunked loss has no dropout for an adapter of the output embedding: "
            f"set it to 0, or take {ends[1].rpartition('.')[2]} out of lora.targets"
        )
    if lora.targets == "all-linear":
        return
    missing = [one for one in wanted if one not in adapted and not any(path.endswith(f".{one}") for path in paths)]
    if missing or not wanted:
        known = ", ".join(sorted({path.rpartition(".")[2] for path in paths}))
        raise ValueError(
            f"lora.targets: {', '.join(missing) or 'an empty list'} matched nothing in {model}; its linear layers are "
            f"{known}, and its embeddings {names}. Name some of these, or use all-linear"
        )


_hints = cache(get_type_hints)


def _read(kind: Any, value: Any) -> Any:
    """Converts dictionaries and lists from JSON to a type of dataclasses and tuples."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{name: _read(_hints(kind)[name], one) for name, one in value.items()})
    if get_origin(kind) is not tuple:
        return value
    first, *others = get_args(kind)
    kinds = itertools.repeat(first) if others == [...] else (first, *others)
    return tuple(_read(of, one) for of, one in zip(kinds, value, strict=False))


def _elements(parameters: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Returns the number of elements of (name, shape) parameters."""
    return sum(math.prod(shape) for _, shape in parameters)
