"""Runs and merges a model whose weights stay in their safetensors files, so that the host need not hold them.

The model is built without weights. While a module runs, its own weights are read in fp32, and dropped after it; the
host holds those of one module at a time. Adapters are small, and are loaded. PEFT itself merges each weight.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tpu_kit.config.loader import ModelConfig
from tpu_kit.generation.service import ADAPTER_FILES, attach_adapter, is_whole
from tpu_kit.models import causal_lm as models
from tpu_kit.models.loading import locate, quantized_by

_INDEX = "model.safetensors.index.json"
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class _Place(NamedTuple):
    """The module that holds a weight, under which name, and the weight's name in the files."""

    module: torch.nn.Module
    leaf: str
    name: str

    @property
    def weight(self) -> torch.Tensor:
        found = self.module._parameters[self.leaf]
        assert found is not None
        return found


class StreamedModel:
    """A model in evaluation mode whose weights are read as it runs.

    Args:
        model: of transformers or PEFT; its base weights are on the meta device.
        files: the file of each base weight, by name.
        names: by the id of each of the model's base weights, its name in `files`.

    Attributes:
        model: runs like any other.
        merging: whether adapters are merged into the weights as these are read.
    """

    def __init__(self, model: torch.nn.Module, files: Mapping[str, Path], names: Mapping[int, str]) -> None:
        self.model, self.merging, self._files = model, False, files
        self._adapted: dict[int, Any] = {
            id(part.get_base_layer()): part  # type: ignore[operator]  # of PEFT
            for part in model.modules()
            if hasattr(part, "get_delta_weight")
        }
        self._places: dict[str, _Place] = {}
        for part in model.modules():
            places = [
                _Place(part, leaf, names[id(weight)])
                for leaf, weight in part._parameters.items()
                if weight is not None and id(weight) in names
            ]
            if places:
                self._places |= {place.name: place for place in places}
                unit = self._adapted.get(id(part), part)  # DoRA uses the weight outside the base layer, too
                unit.register_forward_pre_hook(lambda _, __, mine=places: self._load(mine))
                unit.register_forward_hook(lambda _, __, ___, mine=places: self._drop(mine))

    def _load(self, places: list[_Place]) -> None:
        for place in places:
            place.module._parameters[place.leaf] = _parameter(self._read(place.name).float())
            if self.merging and place.leaf == "weight" and (adapted := self._adapted.get(id(place.module))):
                adapted.merge()  # which does not copy the weight

    def _drop(self, places: list[_Place]) -> None:
        for place in places:
            place.module._parameters[place.leaf] = _parameter(place.weight.to("meta"))
            if (adapted := self._adapted.get(id(place.module))) is not None:
                adapted.merged_adapters.clear()

    def _read(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes the settings, and one after the other the weights, merged if `merging`, to files of the same names."""
        causal: Any = models.base_model(self.model)
        causal.config.architectures = [type(causal).__name__]
        causal.config.save_pretrained(folder)
        causal.generation_config.save_pretrained(folder)
        by_file: dict[str, list[str]] = {}
        for name, path in self._files.items():
            by_file.setdefault(path.name, []).append(name)
        for file, names in by_file.items():
            self._write_file(folder / file, sorted(names), dtype)
        if len(by_file) > 1:
            size = sum(place.weight.numel() for place in self._places.values())
            index = {
                "metadata": {"total_size": size * dtype.itemsize},
                "weight_map": {name: path.name for name, path in sorted(self._files.items())},
            }
            (folder / _INDEX).write_text(json.dumps(index, indent=2))

    def _write_file(self, path: Path, names: list[str], dtype: torch.dtype) -> None:
        """Writes a safetensors file: the length of a JSON header in 8 bytes, the header, and the values."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            shape = list(self._places[name].weight.shape)
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                file.write(self._weight(name, dtype).flatten().view(torch.uint8).numpy().data)

    def _weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        place = self._places[name]
        if not self.merging or place.leaf != "weight" or id(place.module) not in self._adapted:
            return self._read(name).to(dtype).contiguous()
        self._load([place])
        merged = place.weight.detach().to(dtype).contiguous()
        self._drop([place])
        return merged


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def stream(config: ModelConfig, adapter: Path | None = None) -> StreamedModel | None:
    """Opens a model, with an adapter or a whole tuned model in its place, in fp32.

    Args:
        config: the base model.
        adapter: the output of training.

    Returns:
        None if the weights are not those of safetensors files with the model's own names; then it must be loaded.

    Raises:
        ValueError: the adapter is missing, damaged or of another model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = _folder(config) if adapter is None or not is_whole(adapter) else adapter
    if folder is None:
        return None
    try:
        files = dict(_weights(folder))
        settings = AutoConfig.from_pretrained(folder)
        with init_empty_weights():
            model: Any = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        model.tie_weights()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # loading says what is wrong
        return None
    if (names := _names(model, files)) is None:
        return None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = model.config.name_or_path = str(folder)
    kept = {name: files[name] for name in names.values()}
    if adapter is not None and not is_whole(adapter):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
            model = attach_adapter(model, adapter, config.name)
        _fill_adapter(model, adapter)
    return StreamedModel(model.eval(), kept, names)


def _folder(config: ModelConfig) -> Path | None:
    """The folder of a model's files; those of the hub are fetched."""
    if config.gguf_file or config.trust_remote_code or quantized_by(config):
        return None
    name = locate(config)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=config.revision, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError):
        return None


def _weights(folder: Path) -> Iterator[tuple[str, Path]]:
    """The names of all weights in a folder with their files."""
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        places = json.loads((folder / _INDEX).read_text())["weight_map"]
        yield from ((name, folder / file) for name, file in places.items())
        return
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        yield from ((name, path) for name in file.keys())  # noqa: SIM118  the file is no mapping


def _names(model: torch.nn.Module, files: Mapping[str, Path]) -> dict[int, str] | None:
    """By the id of each weight its name in the files; None if the two do not fit."""
    from safetensors import safe_open

    aliases: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(weight), []).append(name)
    found = {number: next((name for name in names if name in files), "") for number, names in aliases.items()}
    known = {name for names in aliases.values() for name in names}
    unknown = [name for name in files if name not in known and not name.endswith("rotary_emb.inv_freq")]  # of old files
    if not all(found.values()) or unknown or set(model.state_dict()) - known:
        return None
    shapes = {found[id(weight)]: list(weight.shape) for weight in model.parameters()}
    for path in set(files.values()):
        with safe_open(path, framework="pt") as file:
            there = [name for name in file.keys() if name in shapes]  # noqa: SIM118  the file is no mapping
            if any(file.get_slice(name).get_shape() != shapes[name] for name in there):
                return None
    return found


def _fill_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Gives the model its adapter's values, which PEFT has put on the device of the base, "meta"."""
    from safetensors.torch import load_file

    named = {}
    for name, tensor in load_file(folder / ADAPTER_FILES[1]).items():
        start, dot, leaf = name.rpartition(".")
        full = f"{start}.default{dot}{leaf}" if leaf == "weight" else f"{name}.default.weight"
        named[full] = _parameter(tensor.float())
    left = model.load_state_dict(named, strict=False, assign=True)
    assert not left.unexpected_keys, left.unexpected_keys
