"""Runs and merges a model whose weights stay in their safetensors files, so that the host need not hold them.

The model is built without weights. While a module runs, its own weights are read in fp32, and dropped after it.
Adapters are small, and are loaded. PEFT itself merges each weight.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tpu_kit.config.loader import ModelConfig
from tpu_kit.generation.service import ADAPTER_FILES, attach_adapter, is_whole
from tpu_kit.models import causal_lm as models
from tpu_kit.models.architecture import locate
from tpu_kit.models.loading import quantized_by

_INDEX = "model.safetensors.index.json"
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class _Slot(NamedTuple):
    """A parameter of a module, `module._parameters[leaf]`, and its weight's name in the files."""

    module: torch.nn.Module
    leaf: str
    name: str


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
        self._adapted: dict[tuple[int, str], Any] = {}
        units: dict[int, torch.nn.Module] = {}  # PEFT's wrapper of a base layer, or of experts the outermost of several
        for part in model.modules():
            if hasattr(part, "get_delta_weight"):
                base = id(part.get_base_layer())  # type: ignore[operator]  # of PEFT
                self._adapted[base, str(getattr(part, "parameter_name", "weight"))] = part
                units.setdefault(base, part)
        self._slots: dict[str, _Slot] = {}
        parents = {id(child): part for part in model.modules() for child in part.children()}
        for part in model.modules():
            slots = [
                _Slot(part, leaf, names[id(weight)])
                for leaf, weight in part._parameters.items()
                if weight is not None and id(weight) in names
            ]
            if slots:
                self._slots |= {slot.name: slot for slot in slots}
                unit = units.get(id(part), part)  # DoRA uses the weight outside the base layer, too
                # Layers with a state read the weight of their short convolution, and do not call it.
                unit = parents[id(part)] if isinstance(part, torch.nn.Conv1d) else unit
                unit.register_forward_pre_hook(lambda _, __, mine=slots: self._load(mine))
                unit.register_forward_hook(lambda _, __, ___, mine=slots: self._drop(mine))

    def _load(self, slots: list[_Slot]) -> None:
        from safetensors import safe_open

        for module, leaf, name in slots:
            with safe_open(self._files[name], framework="pt") as file:
                module._parameters[leaf] = _parameter(file.get_tensor(name).float())
            if self.merging and (adapted := self._adapted.get((id(module), leaf))):
                adapted.merge()  # which does not copy the weight

    def _drop(self, slots: list[_Slot]) -> None:
        for module, leaf, _ in slots:
            module._parameters[leaf] = _parameter(module.get_parameter(leaf).to("meta"))
            if (adapted := self._adapted.get((id(module), leaf))) is not None:
                adapted.merged_adapters.clear()

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes the settings, and one after the other the weights, merged if `merging`, to files of the same names."""
        causal: Any = models.base_model(self.model)
        causal.config.architectures = [type(causal).__name__]
        causal.config.save_pretrained(folder)
        causal.generation_config.save_pretrained(folder)
        files: dict[str, list[str]] = {}
        for name, path in sorted(self._files.items()):
            files.setdefault(path.name, []).append(name)
        sizes = [self._write_file(folder / file, names, dtype) for file, names in files.items()]
        if len(files) > 1:
            weight_map = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
            (folder / _INDEX).write_text(json.dumps(index, indent=2))

    def _write_file(self, path: Path, names: list[str], dtype: torch.dtype) -> int:
        """Writes the length of a JSON header in 8 bytes, the header, and the values; returns bytes of the values."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            module, leaf, _ = self._slots[name]
            shape = list(module.get_parameter(leaf).shape)
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for slot in (self._slots[name] for name in names):
                self._load([slot])
                weight = slot.module.get_parameter(slot.leaf).detach().to(dtype).contiguous()
                self._drop([slot])
                file.write(weight.flatten().view(torch.uint8).numpy().data)
                del weight  # before the next one is read
        return end


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def stream(config: ModelConfig, adapter: Path | None = None) -> StreamedModel | None:
    """Opens a base model in fp32, with the adapter that training wrote, or the whole model that it wrote in its place.

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
        files = _weights(folder)
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
    used = {name: files[name] for name in names.values()}
    if adapter is not None and not is_whole(adapter):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
            model = attach_adapter(model, adapter, config.name)
        _fill_adapter(model, adapter)
    return StreamedModel(model.eval(), used, names)


def _folder(config: ModelConfig) -> Path | None:
    from huggingface_hub import snapshot_download

    if config.gguf_file or config.trust_remote_code or quantized_by(config):
        return None
    name, wanted = locate(config), ["*.json", "*.safetensors"]
    with contextlib.suppress(OSError, ValueError):  # loading says what is wrong
        if not Path(name).is_dir():
            name = snapshot_download(name, revision=config.revision, allow_patterns=wanted)
        return Path(name)
    return None


def _weights(folder: Path) -> dict[str, Path]:
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / "model.safetensors")


def _names(model: torch.nn.Module, files: Mapping[str, Path]) -> dict[int, str] | None:
    """By the id of each weight its name in the files; None if the two do not fit."""
    aliases: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(weight), []).append(name)
    stored = {number: next((name for name in names if name in files), "") for number, names in aliases.items()}
    known = {name for names in aliases.values() for name in names}
    unknown = [name for name in files if name not in known and not name.endswith("rotary_emb.inv_freq")]  # of old files
    return None if not all(stored.values()) or unknown or set(model.state_dict()) - known else stored


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
