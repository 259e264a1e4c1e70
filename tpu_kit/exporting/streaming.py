"""Runs and merges a model whose weights stay in their safetensors files, to save host memory.

The model is built on the meta device. Before a module runs, its own weights are read in fp32; after it they are
dropped. Adapters are small and stay loaded. PEFT merges the weights.
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tpu_kit.config.loader import ModelConfig
from tpu_kit.model import causal_lm as models
from tpu_kit.model.weights.loading import UNDONE_IN_LOADING
from tpu_kit.model.weights.saved_adapter import ADAPTER_FILES, attach_adapter, is_whole, read_adapter
from tpu_kit.model.weights.source import locate, model_class, quantized_by
from tpu_kit.model.weights.trained_embeddings import described

_INDEX = "model.safetensors.index.json"
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class _Source(NamedTuple):
    """The tensors in the files that make a weight of the model.

    Attributes:
        conversion: transformers' conversion of several tensors to the weight; None for a single tensor.
        names: names of the tensors, with their patterns in the conversion.
    """

    conversion: Any
    names: list[tuple[str, str | None]]


class _Slot(NamedTuple):
    """A parameter of a module, `module._parameters[leaf]`, and its name in the model without adapters."""

    module: torch.nn.Module
    leaf: str
    name: str


class StreamedModel:
    """A model in evaluation mode whose weights are read while it runs.

    Args:
        model: of transformers or PEFT, with base weights on the meta device.
        plain: the model without adapters; its weights stay on the meta device.
        files: the file of every tensor, by the tensor's name.
        sources: the tensors of the weights of `plain`, by the weight's name.
        names: the name in `plain` of every base weight and buffer of `model`, by its id().

    Attributes:
        model: can be called like a loaded model.
        merging: whether adapters are merged into weights when these are read.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plain: Any,
        files: Mapping[str, Path],
        sources: Mapping[str, _Source],
        names: Mapping[int, str],
    ) -> None:
        self.model, self.merging, self._plain = model, False, plain
        self._files, self._sources = files, sources
        self._adapted: dict[tuple[int, str], Any] = {}
        units: dict[int, torch.nn.Module] = {}  # PEFT's wrapper of a base layer; for experts the outermost wrapper
        for part in model.modules():
            if hasattr(part, "get_delta_weight"):
                base = id(part.get_base_layer())  # type: ignore[operator]  # of PEFT
                self._adapted[base, str(getattr(part, "parameter_name", "weight"))] = part
                units.setdefault(base, part)
        self._slots: dict[str, _Slot] = {}
        self._buffers = {names[id(buffer)]: buffer for buffer in model.buffers() if id(buffer) in names}
        for name, buffer in self._buffers.items():
            buffer.copy_(self._read(name))
        causal: Any = models.base_model(model)
        whole = getattr(causal, causal.base_model_prefix, causal)
        if whole is not causal.get_decoder():  # a model for images reads a row of the embedding's weight itself
            units[id(causal.get_input_embeddings())] = whole
            # Idefics3 moves its inputs to the device of its first weight.
            first = next(part for part in whole.modules() if next(part.parameters(recurse=False), None) is not None)
            units.setdefault(id(first), whole)
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
                # Layers with a state read the weight of their short convolution, SigLIP 2 its table: neither is called.
                owner = parents.get(id(part))
                table = getattr(owner, "position_embedding", None)
                unit = owner if owner is not None and (isinstance(part, torch.nn.Conv1d) or part is table) else unit
                unit.register_forward_pre_hook(lambda _, __, mine=slots: self._load(mine))
                unit.register_forward_hook(lambda _, __, ___, mine=slots: self._drop(mine))

    def _read(self, name: str) -> torch.Tensor:
        """Reads a weight, or a buffer, from its files in fp32, without adapters, by its name in `plain`."""
        from safetensors import safe_open

        conversion, names = copy.deepcopy(self._sources[name])
        opened = {path: safe_open(path, framework="pt") for path in {self._files[source] for source, _ in names}}
        tensors = [opened[self._files[source]].get_tensor(source) for source, _ in names]
        if conversion is None:
            return tensors[0].float()
        for (source, pattern), tensor in zip(names, tensors, strict=True):
            conversion.add_tensor(name, source, pattern, tensor)
        del tensors  # so that the conversion can free them early
        (made,) = conversion.convert(name, model=self._plain, config=self._plain.config).values()
        return (made[0] if isinstance(made, list) else made).float()

    def _load(self, slots: list[_Slot]) -> None:
        """Reads the weights of slots into their modules; if `merging`, merges their adapters into them."""
        for module, leaf, name in slots:
            module._parameters[leaf] = _parameter(self._read(name))
            if self.merging and (adapted := self._adapted.get((id(module), leaf))):
                adapted.merge()  # in place, without a copy

    def _drop(self, slots: list[_Slot]) -> None:
        """Moves the weights of slots back to the meta device; their adapters count as not merged."""
        for module, leaf, _ in slots:
            module._parameters[leaf] = _parameter(module.get_parameter(leaf).to("meta"))
            if (adapted := self._adapted.get((id(module), leaf))) is not None:
                adapted.merged_adapters.clear()

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes config, generation config, and the weights one at a time (merged if `merging`) in `dtype` to `folder`.

        Weights go to safetensors files with the names of the model's own files, and an index if there are several.
        Names and shapes of tensors are transformers' saved ones, such as a tensor per expert. Buffers keep their type.
        """
        causal: Any = models.base_model(self.model)
        causal.config.architectures = [type(causal).__name__]
        causal.config.save_pretrained(folder)
        causal.generation_config.save_pretrained(folder)
        files: dict[str, list[str]] = {}
        for name, source in self._sources.items():
            files.setdefault(self._files[source.names[0][0]].name, []).append(name)
        headers = {file: self._write_file(folder / file, names, dtype) for file, names in sorted(files.items())}
        if len(files) > 1:
            sizes = [max(each["data_offsets"][1] for each in header.values()) for header in headers.values()]
            weight_map = {name: file for file, header in headers.items() for name in header}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
            (folder / _INDEX).write_text(json.dumps(index, indent=2))

    def _write_file(self, path: Path, names: list[str], dtype: torch.dtype) -> dict[str, Any]:
        """Writes weights in `dtype`, and buffers in theirs, to a safetensors file.

        `names` are the names in `plain`. Returns type, shape and offsets of the file's tensors by their names in it.
        """
        from transformers.core_model_loading import revert_weight_conversion

        header: dict[str, Any] = {}
        end = 0
        for name in names:
            weight = self._buffers[name].to("meta") if name in self._buffers else self._now(name).to(dtype)
            for stored, tensor in revert_weight_conversion(self._plain, {name: weight}).items():
                start, end = end, end + tensor.nbytes
                shape = list(tensor.shape)
                header[stored] = {"dtype": _TYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                if name in self._buffers:
                    weight = self._buffers[name]
                else:
                    self._load([self._slots[name]])
                    weight = self._now(name).detach().to(dtype)
                    self._drop([self._slots[name]])
                for tensor in revert_weight_conversion(self._plain, {name: weight}).values():
                    file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
                del weight, tensor  # before the next weight is read
        return header

    def _now(self, name: str) -> torch.Tensor:
        """Returns a weight of `model` by its name in `plain`; it is on the meta device unless it is loaded."""
        return self._slots[name].module.get_parameter(self._slots[name].leaf)


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """Returns a parameter without gradient that shares the tensor's memory."""
    return torch.nn.Parameter(tensor, requires_grad=False)


def stream(config: ModelConfig, adapter: Path | None = None) -> StreamedModel | None:
    """Opens a base model in fp32, with the trained `adapter` if given, or the whole model if `adapter` holds one.

    May download the base model. `adapter` is a local folder; `config.base_dtype` is ignored. Returns None if the model
    must be loaded: its weights are not in safetensors files, cannot be found, or do not match the model's names; it
    needs its own code; or the adapter trains embeddings.

    Raises:
        ValueError: the adapter is missing, damaged or of another model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, GenerationConfig

    folder = _folder(config) if adapter is None or not is_whole(adapter) else adapter
    if folder is None:
        return None
    saved = None if adapter is None or is_whole(adapter) else read_adapter(adapter)
    if saved is not None and described(saved[0].to_dict()):
        return None
    try:
        files = _weights(folder)
        settings = AutoConfig.from_pretrained(folder)
        quantizer = _quantizer(settings)
        with init_empty_weights():
            model: Any = model_class(config).from_config(settings, dtype=torch.float32)
        model.tie_weights()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # loading reports the problem
        return None
    if (sources := _sources(model, files, quantizer)) is None:
        return None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    plain = copy.deepcopy(model)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    names = {id(tensor): name for name, tensor in tensors if name in sources}
    if adapter is not None and saved is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
            model = attach_adapter(model, adapter, *saved, config.name)
        _fill_adapter(model, adapter)
    return StreamedModel(model.eval(), plain, files, sources, names)


def _quantizer(settings: Any) -> Any:
    """Returns transformers' dequantizer of the files, and removes its entry in `settings`; None for plain weights."""
    from transformers.quantizers import AutoHfQuantizer

    if (given := getattr(settings, "quantization_config", None)) is None:
        return None
    del settings.quantization_config
    return AutoHfQuantizer.from_config({**given, "dequantize": True}, pre_quantized=True)


def _folder(config: ModelConfig) -> Path | None:
    """Returns a model's local folder, downloaded if needed; None if it cannot be streamed or found."""
    from huggingface_hub import snapshot_download

    if config.gguf_file or config.trust_remote_code or quantized_by(config) not in (None, *UNDONE_IN_LOADING):
        return None
    name, wanted = locate(config), ["*.json", "*.safetensors"]
    with contextlib.suppress(OSError, ValueError):  # loading reports the problem
        if not Path(name).is_dir():
            name = snapshot_download(name, revision=config.revision, allow_patterns=wanted)
        return Path(name)
    return None


def _weights(folder: Path) -> dict[str, Path]:
    """Returns the file of every tensor by name, from the index or model.safetensors; may raise OSError."""
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / "model.safetensors")


def _sources(model: Any, files: Mapping[str, Path], quantizer: Any) -> dict[str, _Source] | None:
    """Returns the tensors of every weight, tied ones once, by transformers' rules; None if files do not match them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    rules, weights = get_model_conversion_mapping(model, hf_quantizer=quantizer), model.state_dict()
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, _Source] = {}
    for name in sorted(files, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, weights)
        if target in weights:
            conversion = None if pattern is None else by_pattern[pattern]
            found.setdefault(target, _Source(conversion, [])).names.append((name, pattern))
        elif not name.endswith("rotary_emb.inv_freq"):  # of old files
            return None
    tied: dict[int, list[str]] = {}
    for name, weight in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if name in weights:
            tied.setdefault(id(weight), []).append(name)
    first = [next((name for name in names if name in found), "") for names in tied.values()]
    return {name: found[name] for name in first} if all(first) else None


def _fill_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Loads the adapter's values in fp32 from `folder` into `model`; PEFT has put them on the base's device, "meta"."""
    from safetensors.torch import load_file

    named = {}
    for name, tensor in load_file(folder / ADAPTER_FILES[1]).items():
        start, dot, leaf = name.rpartition(".")
        full = f"{start}.default{dot}{leaf}" if leaf == "weight" else f"{name}.default.weight"
        named[full] = _parameter(tensor.float())
    left = model.load_state_dict(named, strict=False, assign=True)
    assert not left.unexpected_keys, left.unexpected_keys
