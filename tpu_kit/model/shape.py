"""The shapes of models: sizes, parameters, linear layers of each kind of layer, layers with adapters.

`meta_model` derives a shape from the model itself, and `shape_cache` keeps it.
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
"""By model_type, the linear layers that lora.targets=all-linear leaves out: PEFT (0.17) refuses adapters there, because
fused kernels of CUDA read these weights without their module."""


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    Attributes:
        path: in the decoder layer, such as "self_attn.q_proj"; of a product of experts, in their module.
        inputs: its columns.
        outputs: its rows.
        bias: whether it has one.
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
    """Groups of the scales of int4 experts: those of the inputs, and some that fill each half up to a multiple of 8.

    With 92 groups the TPU compiler copies the scales of all layers into another layout: of gpt-oss-120b 1.2 GiB a chip.
    Where many would have to be added, none are.
    """
    half = inputs // group // 2
    full = -(-half // 8) * 8
    return 2 * (full if 8 * full <= 9 * half else half)


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: their path in it, their number, those that a token chooses, and an expert's products."""

    path: str
    count: int
    chosen: int
    linears: tuple[Linear, ...]

    @property
    def weights(self) -> int:
        """Number of elements of an expert's matrices."""
        return sum(one.inputs * one.outputs for one in self.linears)

    def rows(self, tokens: int) -> int:
        """Rows of `xla.grouped` for so many tokens of a device."""
        pairs = tokens * self.chosen
        tile = tile_rows(pairs, self.count)
        return (pairs + self.count * (tile - 1)) // tile * tile

    def read(self, tokens: int) -> float:
        """Mean number of experts that so many tokens choose, if all are equally likely."""
        return float(self.count * (1 - (1 - self.chosen / self.count) ** tokens))


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile of `xla.grouped`: half the rows that an expert has on average, 16 (of bf16) to 256."""
    return 1 << max(4, min(8, (pairs // (2 * experts)).bit_length() - 1))


Alive = tuple[tuple[float, float], ...]
"""Bytes for each token that are alive at once: outside of an MLP's tiles, and within. None has more of both."""


def most(alive: Alive, tokens: int, tile: int) -> float:
    """Returns the most bytes that are alive at once."""
    return max(outside * tokens + within * tile for outside, within in alive)


@dataclass(frozen=True)
class Layer:
    """A kind of decoder layer.

    Attributes:
        linears: its linear layers, in the order of their calls.
        others: (path, shape) of its other parameters.
        mlp: path of the module with the most weights beside attention, "" if there is none.
        heads: query heads, 0 without attention.
        kv_heads: key-value heads.
        head_dim: size of a head.
        norm_follows: whether the result of the MLP has a norm before the residual addition.
        experts: at most one mixture; its parameters are in neither `linears` nor `others`.
        state: elements of the state of a row that `linear_attention` computes, H K V; 0 without one.
        forward: what is alive in bf16 while the layer is computed, without what only a backward pass reads.
        backward: while it is recomputed and its gradients are computed.
        saved: bytes for each token that a forward pass leaves for the backward pass.
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
    forward: Alive
    backward: Alive
    saved: float

    @cached_property
    def mlp_linears(self) -> tuple[Linear, ...]:
        """The MLP's linear layers."""
        return tuple(one for one in self.linears if self.mlp and one.path.startswith(f"{self.mlp}."))

    @cached_property
    def attention_linears(self) -> tuple[Linear, ...]:
        """All other linear layers, which are counted as attention's."""
        return tuple(one for one in self.linears if one not in self.mlp_linears)

    @property
    def intermediate(self) -> int:
        """Size within the MLP: the inputs of its last linear layer."""
        return self.mlp_linears[-1].inputs if self.mlp_linears else 0

    @property
    def cached_heads(self) -> int:
        """Key-value heads whose keys and values generation keeps; 0 where the layer reads those of an earlier one."""
        parents = [one.path.rpartition(".")[0] for one in self.attention_linears]
        made = [one.outputs for one, of in zip(self.attention_linears, parents, strict=True) if of == parents[0]]
        # The output is the last. A layer that reads others' keys makes queries alone.
        return self.kv_heads if sum(made[:-1]) > self.heads * self.head_dim else 0

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        mixed = sum(each.count * one.parameters for each in self.experts for one in each.linears)
        return sum(one.parameters for one in self.linears) + _elements(self.others) + mixed

    def weights(self, tokens: int | None = None) -> float:
        """Number of elements of its matrices: of all experts, or of those that so many tokens choose, on average."""
        mixed = sum(each.weights * (each.read(tokens) if tokens else each.count) for each in self.experts)
        return sum(one.inputs * one.outputs for one in self.linears) + mixed

    @cached_property
    def active_weights(self) -> int:
        """Number of elements of the matrices that a token is multiplied with."""
        chosen = sum(each.weights * each.chosen for each in self.experts)
        return sum(one.inputs * one.outputs for one in self.linears) + chosen


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder-only model.

    Attributes:
        family: the model_type.
        vocabulary: rows of the embedding.
        hidden: size of the hidden states.
        tied: whether the output layer is the embedding.
        ends: paths of the input and the output embedding.
        positions: longest sequence.
        layers_path: of the list of layers, such as "model.layers".
        outside: (name, shape) of the parameters that are in no layer; a tied embedding counts once.
        linears_outside: linear layers of the decoder that are in no layer, by their paths in the model.
        kinds: the kinds of layers.
        order: the kind of each layer.
        equal: a number for each layer; layers with the same number can be turns of one loop.
        sees_all: whether each token sees all earlier ones, so that documents may share a prefix.
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
        """Reads the result of `asdict`, also from JSON."""
        return _read(cls, values)

    @property
    def embedding(self) -> Embedding:
        """What sharding rules need to know."""
        return Embedding(self.hidden, self.tied)

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.order)

    @cached_property
    def counted(self) -> tuple[tuple[Layer, int], ...]:
        """The kinds of layers, and how many layers are of each."""
        counts = Counter(self.order)
        return tuple((kind, counts[number]) for number, kind in enumerate(self.kinds))

    @property
    def projector(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of the matrices that bring images into the text model."""
        return [(name, size) for name, size in self.outside if len(size) == 2 and _PROJECTOR.search(name)]

    @property
    def tower(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of the matrices that patches of images are multiplied with before the projector."""
        found = [(name, size) for name, size in self.outside if len(size) == 2 and _TOWER.search(name)]
        return [(name, size) for name, size in found if "pos" not in name and not _PROJECTOR.search(name)]

    def adapted_projector(self, lora: LoraConfig) -> list[Linear]:
        """The matrices of the projector, where they have adapters."""
        pairs = self.projector if lora.vision else []
        return [Linear(name.removesuffix(".weight"), width, rows, False) for name, (rows, width) in pairs]

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The different linear layers of all kinds of layers, and those that are in no layer."""
        return tuple(dict.fromkeys([one for kind in self.kinds for one in kind.linears] + [*self.linears_outside]))

    @cached_property
    def linear_weights(self) -> int:
        """Number of elements of the layers' matrices, with those of all experts."""
        return int(sum(kind.weights() * count for kind, count in self.counted))

    @cached_property
    def active_weights(self) -> int:
        """Number of elements of the layers' matrices that a token is multiplied with."""
        return sum(kind.active_weights * count for kind, count in self.counted)

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
        """The share of layers that optim.remat=blocks recomputes twice: all but the last of each block; 0 without."""
        return sum(loop.turns * (loop.period - 1) for loop in self.blocks) / self.layers

    @property
    def program_layers(self) -> int:
        """Layers of the program: one for all equal neighbours in the blocks of a loop."""
        return sum(len(loop.neighbours) for loop in self.loops)

    def mesh_problems(self, mesh: Mesh) -> list[str]:
        """Returns why the axes of a mesh cannot shard the model, a text for each reason."""
        found = [text for kind in self.kinds for text in mesh.problems(kind.heads, kind.kv_heads)]
        if mesh.context > 1:
            start, fix = f"launch.mesh: {mesh}: ", "is not supported with an axis that shards tokens; use fsdp instead"
            if any(kind.state or not kind.heads for kind in self.kinds):
                found.append(f"{start}a layer that reads its tokens one after the other (a state, a convolution) {fix}")
            if any(kind.experts for kind in self.kinds):
                found.append(f"{start}a mixture of experts {fix}")
        return list(dict.fromkeys(found))

    def stacks(self, *, scanned: bool = True) -> Iterator[tuple[str, list[int]]]:
        """Yields the path in the model of each layer, or of each stack of layers, and the layers that are in it."""
        found = stacks(self.loops) if scanned else ((str(number), [number]) for number in range(self.layers))
        yield from ((f"{self.layers_path}.{path}", layers) for path, layers in found)

    def has_adapter(self, lora: LoraConfig, layer: int | None, linear: Linear) -> bool:
        """Whether a linear layer has an adapter; `layer` is the number of its layer, None for one in no layer."""
        if not lora.r or lora.targets == "all-linear":
            left_out = WITHOUT_ADAPTER.get(self.family, ())
            return bool(lora.r) and linear.path.rpartition(".")[2] not in left_out
        return self.is_target(lora, linear.path if layer is None else f"{self.layers_path}.{layer}.{linear.path}")

    @staticmethod
    def is_target(lora: LoraConfig, path: str) -> bool:
        """Whether `lora.targets` names the layer of a path in the model."""
        wanted = [lora.targets] if isinstance(lora.targets, str) else lora.targets
        return any(f".{path}".endswith(f".{one}") for one in wanted)

    def check_targets(self, lora: LoraConfig) -> None:
        """As the function `check_targets`."""
        paths = [f".{one.path}" for one in self.linears_outside]
        paths += [
            f".{self.layers_path}.{layer}.{one.path}"
            for layer, kind in enumerate(self.order)
            for one in self.kinds[kind].linears
        ]
        check_targets(lora, paths, self.family, self.ends)

    @property
    def widths(self) -> list[tuple[str, int]]:
        """Names and inputs of its linear layers and products of experts, for `check_groups`."""
        linears = [*self.linears, *(one for kind in self.kinds for each in kind.experts for one in each.linears)]
        return [(one.path.rpartition(".")[2], one.inputs) for one in linears]

    def adapted(self, lora: LoraConfig, kind: Layer) -> list[Linear]:
        """Returns the linear layers of a kind that have adapters in at least one layer."""
        layers = [layer for layer, number in enumerate(self.order) if self.kinds[number] == kind]
        return [one for one in kind.linears if any(self.has_adapter(lora, layer, one) for layer in layers)]


def undivided(widths: Iterable[tuple[str, int]], group: int) -> list[str]:
    """Returns the linear layers, with their inputs, of which half are no multiple of a group of int4 weights."""
    return list(dict.fromkeys(f"{name} ({width})" for name, width in widths if width % (2 * group)))


def check_groups(widths: Sequence[tuple[str, int]], group: int) -> None:
    """Raises ValueError for layers that are `undivided`."""
    if wrong := undivided(widths, group):
        fitting = [size for size in (256, 128, 64, 32, 16) if not undivided(widths, size)]
        advice = f"set it to {fitting[0]}" if fitting else "use model.base_dtype=int8"
        raise ValueError(
            f"model.quant_group={group} does not divide half of the inputs of {', '.join(wrong)}: {advice}"
        )


def check_targets(lora: LoraConfig, paths: Sequence[str], model: str, ends: tuple[str, str]) -> None:
    """Checks which layers are trained.

    Args:
        lora: the adapters.
        paths: of the linear layers that may have adapters, which begin with a dot.
        model: for messages.
        ends: paths of the input and the output embedding.

    Raises:
        ValueError: a target matches no layer, `lora.full` names none of the embeddings, or two settings train one.
    """
    if not lora.r:
        return
    embeddings = [f".{path}" for path in ends]
    names = " and ".join(path.rpartition(".")[2] for path in embeddings)
    if wrong := [one for one in lora.full or () if not any(path.endswith(f".{one}") for path in embeddings)]:
        raise ValueError(f"lora.full: {', '.join(wrong)} is no embedding of {model}, which are {names}; name these")
    wanted = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
    adapted = [one for one in wanted if any(path.endswith(f".{one}") for path in embeddings)]
    for name, given in (("tokens", lora.tokens), ("full", lora.full)):
        if given and adapted:
            raise ValueError(
                f"lora.{name} and lora.targets={','.join(adapted)} both train the embeddings of {model}: keep one"
            )
    if adapted and lora.dora:
        raise ValueError(
            f"lora.dora is not for the embeddings {', '.join(adapted)} in lora.targets: remove one of them"
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
    """Makes a value of a type, of dataclasses and tuples, of the dictionaries and lists that JSON has for it."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{name: _read(_hints(kind)[name], one) for name, one in value.items()})
    if get_origin(kind) is not tuple:
        return value
    first, *others = get_args(kind)
    kinds = itertools.repeat(first) if others == [...] else (first, *others)
    return tuple(_read(of, one) for of, one in zip(kinds, value, strict=False))


def _elements(parameters: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    return sum(math.prod(shape) for _, shape in parameters)
