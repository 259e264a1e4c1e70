"""Loading a base model straight into integers, and keeping these on disk for the next time.

transformers reads the files, tensor by tensor; each weight is rounded when it comes and then let go. So the host needs
memory for the quantised model and one tensor, not for the model that was saved. (What transformers has of a file mapped
in memory is the page cache's, which the system takes back when it needs it.)
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpu_kit.pretrained import brief, forget_quantizer, load_base, locate, quantized_by, read_model
from tpu_kit.quantize import QuantizedLinear, Scheme, quantize_model, replace_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tpu_kit.config import ModelConfig

_METHOD = "tpu_kit"  # in config.json, where other methods have their names
_VERSION = 2  # of what is stored; another one is quantised anew
_FILE_BYTES = 2**30
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_frozen(config: ModelConfig) -> PreTrainedModel:
    """Loads the base model on the CPU as it is stored under adapters: in `config.base_dtype`.

    Raises:
        ValueError: as `pretrained.load_base`; or its weights cannot be quantised that way.
    """
    scheme = Scheme.of(config)
    if scheme is None:
        return load_base(config, _DTYPES[config.base_dtype])
    if config.gguf_file or quantized_by(config):
        model = load_base(config, torch.bfloat16)
        quantize_model(model, scheme)
        return model
    if config.quant_cache is None or config.trust_remote_code or config.name == "embedded":
        return _read(config, scheme)
    return _through_cache(config, scheme, Path(config.quant_cache).expanduser())


def _read(config: ModelConfig, scheme: Scheme) -> PreTrainedModel:
    """Loads what is saved in floating-point numbers, and rounds it on the way."""
    model = read_model(config, torch.bfloat16, quantization_config=_settings()(scheme.bits, scheme.group))
    forget_quantizer(model)
    return model


# ------------------------------------------------------------------------------------------------------------ the cache


def _through_cache(config: ModelConfig, scheme: Scheme, folder: Path) -> PreTrainedModel:
    """Loads what an earlier run has kept, or quantises and keeps it; one process of a machine does, the others wait."""
    if (key := _key(config, scheme)) is None:
        return _read(config, scheme)
    place = folder / f"{Path(config.name).name}-{'int8' if scheme.bits == 8 else f'int4-{scheme.group}'}-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{place.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "config.json").is_file():
                model = _read(config, scheme)
                _keep(model, scheme, place)
                return model
    except OSError as error:
        print(f"quantised        not kept: {folder} ({error.strerror})", flush=True)
        return _read(config, scheme)
    _settings()
    try:
        model = read_model(replace(config, name=str(place), revision=None), torch.bfloat16)
    except ValueError as error:
        print(f"quantised        anew: {place} is damaged ({brief(error)})", flush=True)
        shutil.rmtree(place, ignore_errors=True)
        return _through_cache(config, scheme, folder)
    forget_quantizer(model)
    model.name_or_path = model.config.name_or_path = locate(config)
    return model


def _key(config: ModelConfig, scheme: Scheme) -> str | None:
    """Names the weights and how they are stored; None where it cannot be told whether weights are the same ones."""
    from transformers import AutoConfig

    name = locate(config)
    base: str | None
    if Path(name).is_dir():
        files = sorted(path for path in Path(name).iterdir() if path.suffix in (".json", ".safetensors", ".bin"))
        base = repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])
    else:
        try:
            base = getattr(AutoConfig.from_pretrained(name, revision=config.revision), "_commit_hash", None)
        except (OSError, ValueError, KeyError):  # loading says why
            return None
    if base is None:
        return None
    return hashlib.sha256(repr((base, name, scheme, _VERSION)).encode()).hexdigest()[:16]


def _keep(model: PreTrainedModel, scheme: Scheme, place: Path) -> None:
    """Saves a quantised model as a folder that transformers loads, once it knows the method."""
    tensors = _tensors(model)
    size = sum(tensor.nbytes for tensor in tensors.values())
    if (free := shutil.disk_usage(place.parent).free) < 1.05 * size:
        about = f"it takes {size / 2**30:.1f} GiB, and {free / 2**30:.1f} are free in {place.parent}"
        print(f"quantised        not kept: {about}", flush=True)
        return
    part = Path(tempfile.mkdtemp(prefix=".", dir=place.parent))
    try:
        _write(model, tensors, scheme, part)
        os.rename(part, place)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        print(f"quantised        not kept: {place.parent} ({error.strerror})", flush=True)
    else:
        print(f"quantised        kept for the next run: {place}, {size / 2**30:.2f} GiB", flush=True)


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All that is saved; of tied weights the first."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor
    return found


def _write(model: PreTrainedModel, tensors: dict[str, torch.Tensor], scheme: Scheme, folder: Path) -> None:
    from safetensors.torch import save_file

    files: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(each.nbytes for each in files[-1].values()) + tensor.nbytes > _FILE_BYTES and files[-1]:
            files.append({})
        files[-1][name] = tensor.contiguous()
    places: dict[str, str] = {}
    for number, named in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(named, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(named, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    settings = model.config.to_dict() | {"quantization_config": _settings()(scheme.bits, scheme.group).to_dict()}
    (folder / "config.json").write_text(json.dumps(settings, default=str))  # the last: with it the folder is whole


# ----------------------------------------------------------------------------------- what transformers asks of a method


@cache
def _settings() -> Any:
    """Makes our method known to transformers; returns the class of its settings."""
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(_METHOD)
    class Settings(QuantizationConfigMixin):
        def __init__(self, bits: int, group: int = 0, **_: Any) -> None:
            self.quant_method, self.bits, self.group = _METHOD, bits, group

    class Rounding(ConversionOps):
        def __init__(self, scheme: Scheme) -> None:
            self.scheme = scheme

        def convert(self, input_dict: dict[str, Any], full_layer_name: str = "", **_: Any) -> dict[str, torch.Tensor]:
            (weight,) = input_dict.values()
            integers, scale = self.scheme.quantize(weight[0] if isinstance(weight, list) else weight)
            return {full_layer_name: integers, f"{full_layer_name.removesuffix('weight')}scale": scale}

    @register_quantizer(_METHOD)
    class Quantizer(HfQuantizer):
        @property
        def scheme(self) -> Scheme:
            return Scheme(self.quantization_config.bits, self.quantization_config.group)

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            replace_layers(model, self.scheme)

        def param_needs_quantization(self, model: Any, param_name: str, **rest: Any) -> bool:
            owner, _, leaf = param_name.rpartition(".")
            return leaf == "weight" and isinstance(model.get_submodule(owner), QuantizedLinear)

        def get_quantize_ops(self) -> Rounding:
            return Rounding(self.scheme)

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    return Settings
