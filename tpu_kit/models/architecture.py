"""The shapes of models, read from their config.json alone: sizes, linear layers, layers with adapters.

It needs no torch, no transformers and no weights, so that planning is quick. assets/shapes.json has the sizes of some
models of the hub, to plan them without a network, and before access is granted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from tpu_kit.config.fields import closest
from tpu_kit.config.loader import LoraConfig, ModelConfig
from tpu_kit.hardware.host import ask_hub_once

ALONE = 2**24
"""Number of elements from which on the squares of a gradient are summed by themselves; see `training.step`.
64 MiB are more than a stack of adapters of rank 16, and less than a stack of a whole model's matrices."""


MIRRORS = ("unsloth", "NousResearch")
"""Organizations of the hub with copies of other models under the same names. Unsloth converts Phi to other families."""


@cache
def shipped_shapes() -> dict[str, dict[str, Any]]:
    """Returns the config.json of every model in assets/shapes.json, by its name on the hub."""
    found = json.loads((Path(__file__).parents[1] / "assets/shapes.json").read_text())
    return {name: shape for names, shape in found.items() for name in names.split()}  # several models may share one


@cache
def _mirrored() -> dict[str, dict[str, Any]]:
    return {_copied(name): shape for name, shape in shipped_shapes().items() if not name.startswith("microsoft/")}


def _copied(name: str) -> str:
    """Returns the part of a model's name that its copies share."""
    return name.partition("/")[2].lower().removeprefix("meta-")


def shipped_shape(model: ModelConfig) -> dict[str, Any] | None:
    """Returns the config.json of a model; None if it is unknown, a folder has its name, or config has a revision."""
    if model.revision is not None or Path(model.name).is_dir():
        return None
    if model.name.partition("/")[0] in MIRRORS:
        return _mirrored().get(_copied(model.name))
    return shipped_shapes().get(model.name)


def did_you_mean(name: str) -> str:
    """Returns a question with the known model whose name is closest to a misspelled one; empty if none is close."""
    names = {known.lower(): known for known in shipped_shapes()}
    return "".join(f" did you mean {names[guess]}?" for guess in closest(name, names, 0.8))


def known_models() -> str:
    """Formats the names of `shipped_shapes`, with a line for each organization."""
    lines = []
    for owner, names in groupby(sorted(shipped_shapes(), key=str.lower), key=lambda name: name.partition("/")[0]):
        lines.append(f"{owner}/: {', '.join(name.partition('/')[2] for name in names)}")
    return "\n".join([*lines, f"and their copies of {' and '.join(f'{name}/' for name in MIRRORS)}"])


class UnknownFamilyError(ValueError):
    """The formula does not know the architecture; the TPU compiler may compile it."""


FEW_TILES = 4
"""Tiles of an MLP up to which its backward pass is unrolled: a loop copies the weights that it carries, and with more
tiles the program would grow."""
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Family:
    """The layers of an architecture, and transformers' defaults for values that its config.json may omit.

    Attributes:
        linears: of a layer, "module: inputs outputs" in letters: H hidden, Q all query heads, K all key-value heads, I
            intermediate size; "+b" for a bias.
        norms: of a layer, the lengths of its vectors: H, or D for the size of a head.
        last: vectors after the last layer.
        kv_heads: default of key-value heads; None for as many as heads.
        head_dim: default; None for hidden_size / heads.
        tied: default of tied input and output embeddings.
        positions: default.
        head_bias: whether the output layer has a bias.
    """

    linears: str
    norms: str
    last: str = "H"
    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    positions: int = 2048
    head_bias: bool = False


_GATED = "mlp.gate_proj: H I, mlp.up_proj: H I, mlp.down_proj: I H"
_LLAMA = f"self_attn.q_proj: H Q, self_attn.k_proj: H K, self_attn.v_proj: H K, self_attn.o_proj: Q H, {_GATED}"
_QWEN2 = (
    f"self_attn.q_proj: H Q +b, self_attn.k_proj: H K +b, self_attn.v_proj: H K +b, self_attn.o_proj: Q H, {_GATED}"
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_LLAMA, "H H"),
    "mistral": Family(_LLAMA, "H H", kv_heads=8, positions=131072),
    "qwen2": Family(_QWEN2, "H H", kv_heads=32, positions=32768),
    "qwen3": Family(_LLAMA, "H H D D", kv_heads=32, head_dim=128, positions=32768),
    "gemma2": Family(_LLAMA, "H H H H", kv_heads=4, head_dim=256, tied=True, positions=8192),
    "gemma3_text": Family(_LLAMA, "H H H H D D", kv_heads=4, head_dim=256, tied=True, positions=131072),
    "phi": Family(
        "self_attn.q_proj: H Q +b, self_attn.k_proj: H K +b, self_attn.v_proj: H K +b, self_attn.dense: Q H +b, "
        "mlp.fc1: H I +b, mlp.fc2: I H +b",
        "H H", last="H H", head_bias=True,
    ),
    "phi3": Family(
        "self_attn.qkv_proj: H QKK, self_attn.o_proj: Q H, mlp.gate_up_proj: H II, mlp.down_proj: I H",
        "H H", positions=4096,
    ),
}  # fmt: skip
"""By model_type. Sources: the modeling_*.py and configuration_*.py files of transformers 5.23."""


def spans(keys: Sequence[Any]) -> list[tuple[int, int]]:
    """Divides a sequence into runs (period, turns) of equal blocks, with the least sum of (items of a block + 1)."""
    best = [(0, 0, 0)]  # of the items up to each place: the sum, and the last run
    for end in range(1, len(keys) + 1):
        least = (best[-1][0] + 2, 1, 1)
        for period in range(1, end + 1):
            if period + 1 >= least[0]:
                break
            turns, start, block = 1, end - 2 * period, keys[end - period : end]
            while start >= 0 and keys[start : start + period] == block:
                turns += 1
                least = min(least, (best[start][0] + period + 1, period, turns), key=lambda one: one[0])
                start -= period
        best.append(least)
    found, end = [], len(keys)
    while end:
        _, period, turns = best[end]
        found.append((period, turns))
        end -= period * turns
    return found[::-1]


@dataclass(frozen=True)
class Linear:
    """A linear layer of a decoder layer: its path in the layer, such as "self_attn.q_proj", and its shape."""

    path: str
    inputs: int
    outputs: int
    bias: bool

    @property
    def parameters(self) -> int:
        """Number of elements of weight and bias."""
        return self.outputs * (self.inputs + self.bias)


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder-only model.

    Attributes:
        family: the model_type.
        vocabulary: rows of the embedding.
        hidden: size of the hidden states.
        intermediate: size within the MLP.
        layers: number of decoder layers.
        heads: query heads.
        kv_heads: key-value heads.
        head_dim: size of a head.
        tied: whether the output layer is the embedding.
        positions: longest sequence.
        linears: the linear layers of each decoder layer.
        norms: lengths of the other vectors of each layer.
        last_norms: lengths of the vectors after the last layer.
        kinds: the attention of each layer ("full", "sliding"); layers of two kinds are not in one block of a loop.
        softcap: whether attention caps its scores, which then exist in memory.
    """

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    positions: int
    linears: tuple[Linear, ...]
    norms: tuple[int, ...]
    last_norms: tuple[int, ...]
    kinds: tuple[str, ...]
    softcap: bool

    @property
    def known(self) -> Family:
        """The family of the model."""
        return FAMILIES[self.family]

    @property
    def norm_follows(self) -> bool:
        """Whether the results of attention and MLP have a norm before the residual addition."""
        return self.norms.count(self.hidden) >= 4

    @cached_property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer."""
        return sum(linear.parameters for linear in self.linears) + sum(self.norms)

    @cached_property
    def head_parameters(self) -> int:
        """Number of parameters of an output layer that is not tied, and of its bias."""
        return (0 if self.tied else self.vocabulary * self.hidden) + (self.vocabulary if self.known.head_bias else 0)

    @property
    def parameters(self) -> int:
        """Number of all parameters; a tied embedding counts once."""
        embedding = self.vocabulary * self.hidden
        return embedding + self.head_parameters + self.layers * self.layer_parameters + sum(self.last_norms)

    def runs(self) -> list[tuple[int, int]]:
        """Returns (layers of a block, turns) of each loop over layers."""
        return spans(self.kinds)

    def adapted(self, lora: LoraConfig) -> list[tuple[Linear, int]]:
        """Returns the linear layers with adapters, and the number of decoder layers in which they have them.

        Raises:
            ValueError: a target matches nothing.
        """
        if not lora.r:
            return []
        if lora.targets == "all-linear":
            return [(linear, self.layers) for linear in self.linears]
        wanted = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
        paths = {(linear, i): f".model.layers.{i}.{linear.path}" for linear in self.linears for i in range(self.layers)}
        missing = [one for one in wanted if not any(path.endswith(f".{one}") for path in paths.values())]
        if missing or not wanted:
            names = ", ".join(sorted(linear.path.rpartition(".")[2] for linear in self.linears))
            raise ValueError(
                f"lora.targets: {', '.join(missing) or 'an empty list'} matched nothing in {self.family}; its linear "
                f"layers are {names}. Name some of these, or use all-linear"
            )
        hits = [key for key, path in paths.items() if any(path.endswith(f".{one}") for one in wanted)]
        counts = {linear: sum(1 for other, _ in hits if other is linear) for linear in self.linears}
        return [(linear, count) for linear, count in counts.items() if count]


def read_shape(model: ModelConfig) -> Shape:
    """Reads the shape of the model of a run.

    Args:
        model: a hub id, whose config.json is fetched, a folder with one, or "embedded".

    Raises:
        ValueError: there is no config.json, it lacks a needed value, or the architecture is not among `FAMILIES`.
    """
    name = f"model.name={model.name}"
    given = _read(model)
    values = {**given, **given["text_config"]} if isinstance(given.get("text_config"), dict) else given
    family = {"gemma3": "gemma3_text"}.get(kind := str(values.get("model_type")), kind)
    if family not in FAMILIES:
        raise UnknownFamilyError(
            f"{name}: the formula knows {', '.join(FAMILIES)}, and this is {kind}; --exact asks the TPU compiler, "
            "which takes any causal language model that traces"
        )
    wrong = [key for key in NEEDED if not isinstance(values.get(key), int) or values[key] < 1]
    if wrong:
        raise ValueError(
            f"{name}: its config.json does not say {', '.join(wrong)} (whole numbers from 1 on); take the whole file "
            "of the original model"
        )
    return _shape(family, values, name)


def _shape(family: str, values: Mapping[str, Any], name: str) -> Shape:
    ways = FAMILIES[family]
    hidden, heads, layers = (values[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads = values.get("num_key_value_heads") or ways.kv_heads or heads
    head_dim = values.get("head_dim") or ways.head_dim or hidden // heads
    if heads % kv_heads:
        raise ValueError(
            f"{name}: {heads} heads cannot share {kv_heads} key-value heads; correct num_key_value_heads in its "
            "config.json"
        )
    sizes = {"H": hidden, "Q": heads * head_dim, "K": kv_heads * head_dim, "I": values["intermediate_size"]}
    linears = []
    for text in ways.linears.split(", "):
        path, _, rest = text.partition(": ")
        inputs, outputs, *bias = rest.split()
        attends = path.startswith("self_attn")
        has = bool(bias) or bool(values.get("attention_bias" if attends else "mlp_bias", False))
        linears.append(Linear(path, sizes[inputs], sum(sizes[letter] for letter in outputs), has))
    return Shape(
        family=family, vocabulary=values["vocab_size"], hidden=hidden, intermediate=values["intermediate_size"],
        layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        tied=bool(values.get("tie_word_embeddings", ways.tied)),
        positions=int(values.get("max_position_embeddings") or ways.positions), linears=tuple(linears),
        norms=tuple(hidden if letter == "H" else head_dim for letter in ways.norms.split()),
        last_norms=tuple(hidden for _ in ways.last.split()),
        kinds=_kinds(family, values, layers), softcap=bool(values.get("attn_logit_softcapping")),
    )  # fmt: skip


def _kinds(family: str, values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    given = values.get("layer_types")
    if isinstance(given, list) and len(given) == layers:
        return tuple(map(str, given))
    period = {"gemma2": 2, "gemma3_text": int(values.get("sliding_window_pattern") or 6)}.get(family)
    if period:
        return tuple("full" if (i + 1) % period == 0 else "sliding" for i in range(layers))
    if family in ("qwen2", "qwen3") and values.get("use_sliding_window"):
        first = int(values.get("max_window_layers", 28))
        return tuple("sliding" if i >= first else "full" for i in range(layers))
    return ("full",) * layers


def _read(model: ModelConfig) -> dict[str, Any]:
    name = f"model.name={model.name}"
    if model.gguf_file:
        raise ValueError(f"{name}: the formula reads a config.json, not a GGUF file; --exact asks the TPU compiler")
    if (shipped := shipped_shape(model)) is not None:
        return shipped
    path = _find(model)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: its config.json cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name}: its config.json holds no object; take the file of the original model")
    return values


def _find(model: ModelConfig) -> Path:
    name = f"model.name={model.name}"
    if model.name == "embedded":
        from tpu_kit.assets import embedded

        return embedded.model_dir() / "config.json"
    folder = Path(model.name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{name}: the folder has no config.json")
        return folder / "config.json"
    if model.name.startswith((".", "~", os.sep)) or model.name.count("/") > 1:
        raise ValueError(f"{name}: there is no such folder. Give a folder, a hub id or embedded")
    from huggingface_hub import hf_hub_download

    ask_hub_once()
    try:
        return Path(hf_hub_download(model.name, "config.json", revision=model.revision))
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ValueError(
            f"{name}: it is no folder here and its config.json cannot be fetched from the hub ({reason}): check the "
            f"spelling and the network, or give a folder that has the file;{did_you_mean(model.name)} known without a "
            f"network:\n{known_models()}"
        ) from error
