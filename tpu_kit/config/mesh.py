"""A device mesh: named axes over which batches and weights are sharded, and how users write one.

`conflicts` refuses the settings that a mesh does not support.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

AXES = ("data", "fsdp", "context", "model")
BATCH = ("data", "fsdp")
"""The axes over which rows are sharded."""

Spec = tuple[str | tuple[str, ...] | None, ...]
"""A partition spec: for each dimension of a tensor the mesh axes that shard it; None for a whole dimension."""


@dataclass(frozen=True)
class Mesh:
    """The axis sizes of a device mesh. Device numbers increase along model first, then context, fsdp and data.

    Attributes:
        data: number of groups of devices; every group holds all weights.
        fsdp: devices over which weights, optimizer state and rows are sharded; weights are gathered for each layer.
        model: devices that split matrix products (heads, MLP columns, vocabulary) and have the same rows.
        context: devices that share the tokens of each row. Weights and optimizer state are sharded over them, too.
        rules: the user's sharding rules, as `parse_rules` returns them; they come before the built-in ones.
    """

    data: int = 1
    fsdp: int = 1
    model: int = 1
    context: int = 1
    rules: tuple[tuple[str, Spec], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis, in the order of `AXES`."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes.values())

    @property
    def weights(self) -> tuple[str, ...]:
        """The axes over which a weight is stored in shards and gathered for its product: fsdp, and context above 1."""
        return ("fsdp", "context") if self.context > 1 else ("fsdp",)

    @property
    def weight_shards(self) -> int:
        """The number of shards of a weight over `weights`, without the model axis."""
        return self.shards(self.weights)

    @property
    def batch_shards(self) -> int:
        """Number of shards with different rows: data x fsdp."""
        return self.shards(BATCH)

    def shards(self, axes: str | Sequence[str] | None) -> int:
        """Returns the number of shards of a dimension that is sharded over `axes`; 1 for None."""
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self.sizes[name] for name in names)

    def fitted(self, spec: Spec, shape: Sequence[int]) -> Spec:
        """Returns `spec` with None for dimensions of `shape` that their axes do not divide; both have equal lengths."""
        return tuple(axes if size % self.shards(axes) == 0 else None for axes, size in zip(spec, shape, strict=True))

    def shard_shape(self, spec: Spec, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a device's shard of a tensor of `shape`; `spec` must divide it, see `fitted`."""
        return tuple(size // self.shards(axes) for axes, size in zip(spec, shape, strict=True))

    def coordinates(self, device: int) -> dict[str, int]:
        """Returns the index of device number `device` on every axis, by axis."""
        places = {}
        for name, size in reversed(self.sizes.items()):
            device, places[name] = divmod(device, size)
        return places

    def layout(self) -> str:
        """Returns device numbers by axes above 1, such as "[[0, 1], [2, 3]] by data, fsdp"; for one "[0] by fsdp"."""
        import numpy as np  # a laptop that only reads a configuration may not have it

        used = [name for name in AXES if self.sizes[name] > 1] or ["fsdp"]
        numbers = np.arange(self.size).reshape([self.sizes[name] for name in used])
        return f"{numbers.tolist()} by {', '.join(used)}"

    def problems(self, heads: int, kv_heads: int) -> list[str]:
        """Returns a text for each head count that the model axis does not divide."""
        fix = f"do not divide by model={self.model}; use a smaller model axis, and fsdp for the rest"
        counts = {"attention heads": heads, "key-value heads": kv_heads}
        return [f"launch.mesh: {self}: {n} {name} {fix}" for name, n in counts.items() if n % self.model]

    def exchanges(self, kv_heads: int) -> bool:
        """Returns whether model x context divides `kv_heads`, to exchange heads for tokens; else keys are gathered."""
        return kv_heads % (self.model * self.context) == 0

    def over_weights(self, spec: Spec) -> Spec:
        """Returns a weight's spec with all axes of `weights` in place of "fsdp".

        With context above 1, ("fsdp", None) gives (("fsdp", "context"), None); otherwise the result is `spec`.
        """
        if self.context == 1:
            return spec
        named = (((axes,) if isinstance(axes, str) else axes or ()) for axes in spec)
        return tuple(
            tuple(other for name in names for other in (self.weights if name == "fsdp" else (name,))) or None
            for names in named
        )

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1) or "fsdp=1"


def mesh_text(value: Mapping[str, object]) -> str:
    """Returns a mesh from YAML's mapping, such as {fsdp: 8}, as the configuration's text, fsdp=8; checks nothing."""
    return ",".join(f"{name}={size}" for name, size in value.items())


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the sizes of the axes that a text such as "data=2,fsdp=4" names; -1 stands for the remaining devices.

    The result is in the text's order and lacks the axes that are not named. Spaces around names and sizes are ignored.

    Raises:
        ValueError: an axis is not in `AXES` or is named twice, a size is neither -1 nor above 0, or two sizes are -1.
            The message continues a sentence that begins with the parameter and its value.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES or not equals:
            raise ValueError(f"has {part.strip()[:40]!r}; write {', '.join(f'{axis}=N' for axis in AXES)}")
        if name in sizes:
            raise ValueError(f"names {name} twice; remove one")
        if not re.fullmatch(r"-1|0*[1-9][0-9]*", size):
            raise ValueError(f"gives {name} the size {size!r}; use 1 or more, or -1 for the rest of the devices")
        sizes[name] = int(size)
    if list(sizes.values()).count(-1) > 1:
        raise ValueError("has -1 twice, but only one axis can take the remaining devices; give the other axis a size")
    return sizes


def parse_rules(rules: Mapping[str, str] | None) -> tuple[tuple[str, Spec], ...]:
    """Reads rules as pairs (glob of tensor names, spec), in order; globs are not checked. None gives ().

    A rule's text has the axes of each dimension. {"*.q_proj": "model+fsdp,None"} gives (("*.q_proj", (("model",
    "fsdp"), None)),), and "None" leaves a dimension whole.

    Raises:
        ValueError: an entry is neither fsdp, model nor None, or a rule names an axis twice.
    """
    specs = []
    for glob, text in (rules or {}).items():
        entries = [[name.strip() for name in entry.split("+")] for entry in text.split(",")]
        axes = [name for entry in entries for name in entry if entry != ["None"]]
        if wrong := [name for name in axes if name not in ("fsdp", "model")]:
            raise ValueError(f"{glob}: {text!r} has {wrong[0]!r}; a dimension is fsdp, model, model+fsdp or None")
        if len(set(axes)) < len(axes):
            raise ValueError(f"{glob}: {text!r} has {max(axes, key=axes.count)} twice; an axis shards one dimension")
        specs.append((glob, tuple(None if entry == ["None"] else tuple(entry) for entry in entries)))
    return tuple(specs)


def mesh_size(text: str) -> int | None:
    """Returns the number of devices of a mesh (`parse_mesh`); None if an axis is -1."""
    sizes = parse_mesh(text).values()
    return None if -1 in sizes else math.prod(sizes)


def resolve_mesh(text: str, devices: int, rules: Mapping[str, str] | None = None) -> Mesh:
    """Returns the mesh of `devices` devices that `text` (see `parse_mesh`) means, with the rules of `parse_rules`.

    Raises:
        ValueError: the sizes' product is not `devices` or, beside -1, does not divide it; or as `parse_mesh` and
            `parse_rules`.
    """
    sizes = parse_mesh(text)
    fixed = math.prod(size for size in sizes.values() if size > 0)
    near = f"fsdp={devices}" + (f", or data=2,fsdp={devices // 2}" if devices % 2 == 0 and devices > 2 else "")
    if -1 in sizes.values():
        if devices % fixed:
            problem = f"{fixed} does not divide the {devices} devices, so nothing is left for -1"
            raise ValueError(f"launch.mesh={text}: {problem}; use {near}")
        sizes = {name: devices // fixed if size == -1 else size for name, size in sizes.items()}
    elif fixed != devices:
        raise ValueError(f"launch.mesh={text} is a mesh of {fixed} devices, and there are {devices}; use {near}")
    return Mesh(**sizes, rules=parse_rules(rules))


def environment_mesh(environ: Mapping[str, str]) -> str | None:
    """Returns TPU_MESH_CONFIG="4,2" with TPU_AXIS_NAMES="data,fsdp" as "data=4,fsdp=2"; None if both are unset.

    Raises:
        ValueError: only one variable is set (an empty value counts as unset), their lengths differ, or `parse_mesh`
            refuses the result.
    """
    sizes, names = environ.get("TPU_MESH_CONFIG"), environ.get("TPU_AXIS_NAMES")
    if not sizes and not names:
        return None
    variables, advice = f"TPU_MESH_CONFIG={sizes} with TPU_AXIS_NAMES={names}", "unset both and use launch.mesh"
    pairs = list(zip_longest((names or "").split(","), (sizes or "").split(",")))
    if not all(name and size for name, size in pairs):
        example = '"1,8,1" and "data,fsdp,model"'
        raise ValueError(f"{variables}: both are needed, with a size for each name, as {example}; or {advice}")
    text = ",".join(f"{name.strip()}={size.strip()}" for name, size in pairs)
    try:
        parse_mesh(text)
    except ValueError as error:
        raise ValueError(f"{variables}: the mesh {error}") from error
    return text
