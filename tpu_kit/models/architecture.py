"""What a model is made of, read from its config.json alone: sizes, linear layers, which of them get adapters.

One picture for all families, so that `memory` and `roofline` know none. No torch, no transformers, no weights.

The shapes of some models of the hub, so that they are planned without a network, and before access is granted.

assets/shapes.json has of each what its config.json says of sizes; no weights.
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
"""Numbers of a trained tensor from which on it is updated by itself, not as part of a vector; see `training.optimizer`.
64 MiB are more than a stack of adapters of rank 16, and less than a stack of a whole model's matrices."""


MIRRORS = ("unsloth", "NousResearch")
"""Organizations of the hub that copy models of others under the same names. Unsloth turns Phi into other families."""


@cache
def shipped_shapes() -> dict[str, dict[str, Any]]:
    """The config.json of every model that is known here, by its name on the hub."""
    found = json.loads((Path(__file__).parents[1] / "assets/shapes.json").read_text())
    return {name: shape for names, shape in found.items() for name in names.split()}  # of models that share it


@cache
def _mirrored() -> dict[str, dict[str, Any]]:
    return {_copied(name): shape for name, shape in shipped_shapes().items() if not name.startswith("microsoft/")}


def _copied(name: str) -> str:
    """The part of a model's name that its copies share."""
    return name.partition("/")[2].lower().removeprefix("meta-")


def shipped_shape(model: ModelConfig) -> dict[str, Any] | None:
    """The config.json of a model; None where it is not known here, a folder has that name, or a revision is wanted."""
    if model.revision is not None or Path(model.name).is_dir():
        return None
    if model.name.partition("/")[0] in MIRRORS:
        return _mirrored().get(_copied(model.name))
    return shipped_shapes().get(model.name)


def did_you_mean(name: str) -> str:
    """A question for the known model whose name is nearest to a misspelled one; empty if none is near."""
    names = {known.lower(): known for known in shipped_shapes()}
    return "".join(f" did you mean {names[guess]}?" for guess in closest(name, names, 0.8))


def known_models() -> str:
    """The names of `shipped_shapes` as text, a line for each organization."""
    lines = []
    for owner, names in groupby(sorted(shipped_shapes(), key=str.lower), key=lambda name: name.partition("/")[0]):
        lines.append(f"{owner}/: {', '.join(name.partition('/')[2] for name in names)}")
    return "\n".join([*lines, f"and their copies of {' and '.join(f'{name}/' for name in MIRRORS)}"])


class UnknownFamilyError(ValueError):
    """An architecture that the formula does not know; the compiler may."""


FEW_TILES = 4
"""Tiles of an MLP up to which its backward pass has no loop (`tiles`): a loop copies the weights that it carries, and
of more tiles the program would grow."""
_LONGEST = 12  # layers in a block that is repeated
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Family:
    """How an architecture is built, and what transformers puts in where its config.json is silent.

    Attributes:
        linears: of a layer, "module: from -> to" in letters: H hidden, Q all query heads, K all key-value heads, I
            intermediate size; a factor before a letter; "+b" where it has a bias.
        norms: of a layer, the lengths of its vectors: H, or D for the size of a head.
        last: vectors after the last layer.
        kv_heads: key-value heads by default; None for as many as heads.
        head_dim: by default; None for hidden_size / heads.
        tied: whether input and output embedding are one by default.
        positions: by default.
        head_bias: whether the output layer has a bias.
        scans: whether `scan_layers=auto` makes a loop of its layers, which the tests compare with the unrolled layers.
    """

    linears: str
    norms: str
    last: str = "H"
    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    positions: int = 2048
    head_bias: bool = False
    scans: bool = True


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
        "H H", last="H H", head_bias=True, scans=False,
    ),
    "phi3": Family(
        "self_attn.qkv_proj: H QKK, self_attn.o_proj: Q H, mlp.gate_up_proj: H II, mlp.down_proj: I H",
        "H H", positions=4096,
    ),
}  # fmt: skip
"""By model_type. Sources: the modeling_*.py and configuration_*.py files of transformers 5.23."""


def spans(keys: Sequence[Any]) -> list[tuple[int, int]]:
    """Cuts a sequence into runs (period, turns) of equal blocks: each as long as can be, of the shortest block."""
    found, start = [], 0
    while start < len(keys):
        best = (1, 1)
        for period in range(1, min(_LONGEST, len(keys) - start) + 1):
            turns, block = 1, keys[start : start + period]
            while keys[start + turns * period : start + (turns + 1) * period] == block:
                turns += 1
            if turns > 1 and period * turns > best[0] * best[1]:
                best = (period, turns)
        found.append(best)
        start += best[0] * best[1]
    return found


@dataclass(frozen=True)
class Linear:
    """A linear layer of a decoder layer: its path there, such as "self_attn.q_proj", and its shape."""

    path: str
    inputs: int
    outputs: int
    bias: bool

    @property
    def parameters(self) -> int:
        """Weight and bias."""
        return self.outputs * (self.inputs + self.bias)


@dataclass(frozen=True)
class Shape:
    """A decoder-only model.

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
        positions: the longest sequence.
        linears: the linear layers of each decoder layer.
        norms: lengths of the other vectors of each layer.
        last_norms: those after the last layer.
        kinds: for each layer what it attends with ("full", "sliding"): layers of two kinds are no one loop.
        softcap: whether scores are capped, for which sdpa makes them itself.
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
        """The family's ways."""
        return FAMILIES[self.family]

    @property
    def norm_follows(self) -> bool:
        """Whether what attention and MLP give goes through a norm before it is added to the stream."""
        return self.norms.count(self.hidden) >= 4

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return sum(linear.parameters for linear in self.linears) + sum(self.norms)

    @cached_property
    def head_parameters(self) -> int:
        """Parameters of the output layer where it is not the embedding, and its bias."""
        return (0 if self.tied else self.vocabulary * self.hidden) + (self.vocabulary if self.known.head_bias else 0)

    @property
    def parameters(self) -> int:
        """All, a tied embedding counted once."""
        embedding = self.vocabulary * self.hidden
        return embedding + self.head_parameters + self.layers * self.layer_parameters + sum(self.last_norms)

    def runs(self) -> list[tuple[int, int]]:
        """(layers of a block, turns) of the loops that scanned layers become."""
        return spans(self.kinds)

    def adapted(self, lora: LoraConfig) -> list[tuple[Linear, int]]:
        """The linear layers that get adapters, and in how many decoder layers.

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
    """The shape of the model of a run.

    Args:
        model: a hub id, of which config.json alone is fetched, a folder with one, or "embedded".

    Raises:
        ValueError: there is no config.json, it lacks what is needed, or the architecture is not among `FAMILIES`.
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
