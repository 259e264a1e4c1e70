"""Loads a base model's weights on the CPU, from a folder, the hub, a GGUF file or the embedded model.

With base_dtype int8 or int4, transformers maps weights from their files, and the kit quantizes them one by one; a
layer's experts are merged first. So the host needs memory for the quantized model and two layers, not for the original
model. (Mapped files are in the page cache.) The quantized weights are cached on disk.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from tpu_kit.machine.chips import GIB
from tpu_kit.machine.storage import atomic
from tpu_kit.model.families import experts
from tpu_kit.model.weights.quantization import Scheme, places, quantize_model, replace_layers, rounded, stacked
from tpu_kit.model.weights.source import (
    brief,
    leave_out_towers,
    locate,
    model_class,
    quantized_by,
    read_config,
    refuse,
    unreachable,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from tpu_kit.config.loader import ModelConfig

UNDONE_IN_LOADING = ("fp8", "mxfp4", "mxfp8")
"""Quantization methods that transformers can dequantize while loading, on any machine."""


def load_base(
    config: ModelConfig, dtype: torch.dtype | Literal["auto"], settings: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """Loads the causal language model on the CPU with weights in `dtype`; dequantizes weights that are saved quantized.

    Args:
        config: the model.
        dtype: "auto" is the dtype of the files; these weights are memory-mapped and take no memory.
        settings: result of `read_config`, if the caller has it; it is not changed.

    Raises:
        ValueError: the model cannot be read, lacks weights, or has quantized weights that cannot be dequantized here.
    """
    options: dict[str, Any] = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    method = None if config.gguf_file else quantized_by(config)
    if method and method not in UNDONE_IN_LOADING:
        return _undo(config, dtype, method)
    if settings is not None and not config.gguf_file:
        options["config"] = copy.deepcopy(settings)  # changed below, and by transformers
    elif (method or dtype == "auto") and (read := read_config(config)) is not None:
        options["config"] = read
    if method and "config" in options:
        options["config"].quantization_config["dequantize"] = True
    elif dtype == "auto" and "config" in options:
        options["config"].dtype = None  # otherwise transformers casts to it
    model = read_model(config, dtype, **options)
    forget_quantizer(model)
    return model


def read_model(config: ModelConfig, dtype: torch.dtype | Literal["auto"], /, **options: Any) -> PreTrainedModel:
    """Calls from_pretrained with arguments `options`, without towers that the run does not use; returns the model.

    Sets unused towers in a configuration in `options` to None, in place. Raises ValueError as `load_base` does.
    """
    from safetensors import SafetensorError

    name, settings = locate(config), options.get("config") or read_config(config)
    if settings is not None and leave_out_towers(settings, config.images):
        options["config"] = settings
    try:
        model, info = model_class(config).from_pretrained(
            name,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    except ImportError as error:
        raise ValueError(f"model.name={config.name}: {brief(error)}") from error
    except (SafetensorError, RuntimeError, OSError, ValueError, KeyError) as error:
        refuse(config, error)
        if Path(name).is_dir() or isinstance(error, SafetensorError | RuntimeError):  # damaged, or other shapes
            raise ValueError(f"model.name={config.name}: transformers cannot load it: {brief(error)}") from error
        raise ValueError(unreachable(config, error)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"model.name={config.name}: {len(missing)} weights of {type(model).__name__} are not in the checkpoint "
            f"({', '.join(missing[:3])}...) and would be random. Give a complete causal language model"
        )
    return model


def forget_quantizer(model: PreTrainedModel) -> None:
    """Removes a model's quantization settings, in place; with them, transformers would refuse to train and save it."""
    from transformers.quantizers import HfQuantizer

    quantizer: Any = getattr(model, "hf_quantizer", None)  # may be None, as for a GGUF file
    HfQuantizer.remove_quantization_config(quantizer, model)


def _undo(config: ModelConfig, dtype: torch.dtype | Literal["auto"], method: str) -> PreTrainedModel:
    """Loads a model by the tool of its quantization `method`, and dequantizes it; ValueError if it cannot here."""
    try:
        model = read_model(config, dtype)
        plain: PreTrainedModel = model.dequantize(dtype=dtype)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"model.name={config.name}: its weights are quantized by {method} and cannot be dequantized here "
            f"({brief(error.__cause__ or error)}). Use the original model: model.base_dtype=int8 or int4 makes it as "
            "small"
        ) from error
    forget_quantizer(plain)
    return plain


_METHOD = "tpu_kit"  # name of the quantization method in config.json
_VERSION = 3  # version of cached weights; other versions are quantized again
_FILE_BYTES = GIB
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_frozen(config: ModelConfig, settings: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Loads the base model of adapters on the CPU in `config.base_dtype`; see `load_base`.

    Quantized weights are read from the folder `config.quant_cache`, or written to it if they are not there. null caches
    nothing. The embedded model, GGUF files, trusted code and files quantized other than by MXFP4 are not cached. Prints
    whether they are cached. `settings` is only used for floating-point weights.

    Raises:
        ValueError: from `load_base`, or the weights cannot be quantized to this dtype.
    """
    scheme = Scheme.of(config)
    if scheme is None:
        return load_base(config, _DTYPES[config.base_dtype], settings)
    cache = config.quant_cache
    passing = config.name == "embedded" or config.trust_remote_code or config.gguf_file
    if cache is None or passing or quantized_by(config) not in (None, "mxfp4"):
        return _quantized(config, scheme)
    return _through_cache(config, scheme, Path(cache).expanduser())


def _quantized(config: ModelConfig, scheme: Scheme, reading: _Reading | None = None) -> PreTrainedModel:
    """Loads a model and quantizes its weights while they are read, or after `load_base` has dequantized them.

    `reading` receives the weights while they are read; None keeps them in memory. Prints the rounding error for MXFP4.
    """
    method = None if config.gguf_file else quantized_by(config)
    if config.gguf_file or method not in (None, "mxfp4"):
        model = load_base(config, torch.bfloat16)
        quantize_model(model, scheme)
        return model
    settings, options = _settings()(scheme.bits, scheme.group), {}
    settings.reading = reading = reading or _Reading(scheme)
    if method and (given := read_config(config)) is not None:
        del given.quantization_config  # otherwise transformers uses its own method
        options["config"], reading.errors = given, []
    model = read_model(config, torch.bfloat16, quantization_config=settings, **options)
    forget_quantizer(model)
    if reading.errors:
        about = f"at most {max(reading.errors):.1%}, measured on the first expert of {len(reading.errors)} stacks"
        print(f"quantized        {method} is rounded again to {scheme}: relative error {about}", flush=True)
    return model


@dataclass
class _Reading:
    """Quantizes the weights of a model one by one while transformers reads them.

    Attributes:
        scheme: storage of the weights.
        folder: folder to write weights to and map them from, so that they take no memory; None keeps them in memory.
        problem: the error that kept weights from being written, or None.
        errors: relative errors of experts if files have MXFP4, otherwise None.
    """

    scheme: Scheme
    folder: Path | None = None
    problem: OSError | None = None
    errors: list[float] | None = None

    def start(self, model: PreTrainedModel) -> None:
        """Replaces the layers of a model on "meta" by quantized layers; sets `problem` if the disk has no room."""
        replace_layers(model, self.scheme)
        self.places, self.mixtures = places(model), dict(experts.modules_of(model))
        size = sum(tensor.nbytes for tensor in model.state_dict().values())
        if self.folder is not None and (free := shutil.disk_usage(self.folder).free) < 1.05 * size:
            about = f"it takes {size / GIB:.1f} GiB, but {free / GIB:.1f} are free in {self.folder.parent}"
            self.problem = OSError(errno.ENOSPC, about)
        for owner, (leaf, _) in self.places.values():  # transformers 5.15 casts weights to this dtype
            setattr(owner, leaf, getattr(owner, leaf).to(torch.bfloat16))

    def changes(self, name: str) -> bool:
        """Returns whether `stored` converts the tensor `name`: a weight to quantize, or a bias of experts."""
        path, _, leaf = name.rpartition(".")
        return name in self.places or (path in self.mixtures and leaf in experts.shaped_names(self.mixtures[path]))

    def stored(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the model's tensors, by name, for a weight `name` from the files: integers and scales.

        A bias of experts is only brought to the prepared layout. Raises ValueError if a weight's shape does not fit.
        """
        path, _, leaf = name.rpartition(".")
        shaped = partial(experts.shaped, self.mixtures[path], leaf) if path in self.mixtures else None
        if name not in self.places:
            return {name: shaped(tensor) if shaped else tensor}
        owner, leaves = self.places[name]
        found = rounded(self.scheme, tensor, shaped)
        if [one.shape for one in found] != [getattr(owner, one).shape for one in leaves]:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, which does not match config.json")
        if self.errors is not None and shaped:
            weight = shaped(tensor[:1])[0].float()
            difference = experts.floats_of(self.scheme, found[0][0], found[1][0], torch.float32) - weight
            self.errors.append(float(difference.norm() / weight.norm()))
        return self._kept(name, {f"{path}.{leaf}": one for leaf, one in zip(leaves, found, strict=True)})

    def _kept(self, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Writes a weight's tensors to `folder`, and returns them memory-mapped; unchanged without folder or room.

        If writing fails, sets `problem` and returns them unchanged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save_file

        if self.folder is None or self.problem:
            return tensors
        file = self.folder / f"{name}.safetensors"
        try:
            save_file(tensors, file, metadata={"format": "pt"})
        except (SafetensorError, OSError) as error:
            self.problem = OSError(errno.EIO, str(error))
            return tensors
        return load_file(file)


# ------------------------------------------------------------------------------------------------------------ the cache


def _through_cache(config: ModelConfig, scheme: Scheme, folder: Path) -> PreTrainedModel:
    """Loads quantized weights from the cache, or quantizes and caches them; a lock admits one process of a machine.

    Prints a line to stdout if it caches them, if it cannot, or if it replaces a damaged entry.
    """
    if (key := _key(config, scheme)) is None:
        return _quantized(config, scheme)
    model: PreTrainedModel | None = None
    place = folder / f"{Path(config.name).name}-{'int8' if scheme.bits == 8 else f'int4-{scheme.group}'}-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{place.name}.lock", "w") as lock:
            with contextlib.suppress(ImportError):  # Windows: all processes may write
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "config.json").is_file():
                with atomic.replacing(place) as part:
                    part.mkdir()
                    reading = _Reading(scheme, part)
                    model = _quantized(config, scheme, reading)
                    if reading.problem:
                        raise reading.problem
                    size = _write(model, scheme, part)
                print(f"quantized        cached for the next run: {place}, {size / GIB:.2f} GiB", flush=True)
                return model
    except OSError as error:
        print(f"quantized        not cached: {folder} ({error.strerror})", flush=True)
        return model or _quantized(config, scheme)
    _settings()
    try:
        model = read_model(replace(config, name=str(place), revision=None), torch.bfloat16)
    except ValueError as error:
        print(f"quantized        again: {place} is damaged ({brief(error)})", flush=True)
        shutil.rmtree(place, ignore_errors=True)
        if place.exists():  # it is another user's
            print(f"quantized        not cached: {place} cannot be deleted", flush=True)
            return _quantized(config, scheme)
        return _through_cache(config, scheme, folder)
    forget_quantizer(model)
    model.name_or_path = model.config.name_or_path = locate(config)
    return model


def _key(config: ModelConfig, scheme: Scheme) -> str | None:
    """Hashes the weights' identity and storage to 16 hex digits; None if a hub model's commit is unknown."""
    name, base = locate(config), None
    if Path(name).is_dir():
        files = sorted(path for path in Path(name).iterdir() if path.suffix in (".json", ".safetensors", ".bin"))
        base = repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])
    elif (base := getattr(read_config(config), "_commit_hash", None)) is None:
        return None
    return hashlib.sha256(repr((base, name, scheme, _VERSION)).encode()).hexdigest()[:16]


def _write(model: PreTrainedModel, scheme: Scheme, folder: Path) -> int:
    """Completes a folder of integers and scales for `from_pretrained`; returns the bytes of the folder."""
    from safetensors import safe_open

    stored = {f"{name.rpartition('.')[0]}.{leaf}" for name, (_, leaves) in places(model).items() for leaf in leaves}
    rest = {name: tensor for name, tensor in model.state_dict().items() if name not in stored}
    # Without a variant, a single file would be named model.safetensors, which transformers prefers to an index.
    model.save_pretrained(
        folder, state_dict=rest, max_shard_size=_FILE_BYTES, save_original_format=False, variant="others"
    )
    there: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            there |= dict.fromkeys(file.keys(), path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": there}))
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = _settings()(scheme.bits, scheme.group).to_dict()
    (folder / "config.json").write_text(json.dumps(settings))
    return sum(path.stat().st_size for path in folder.iterdir())


# ------------------------------------------------------------------------------ the quantization method in transformers


@cache
def _settings() -> Any:
    """Registers the kit's quantization method in transformers; returns the class of its settings (bits, group)."""
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(_METHOD)
    class Settings(QuantizationConfigMixin):
        def __init__(self, bits: int, group: int = 0, **_: Any) -> None:
            self.quant_method, self.bits, self.group = _METHOD, bits, group

    class Dequantize(ConversionOps):
        """Converts blocks and scales of MXFP4 to bf16 (E, I, O). Loading has cast their bytes to bf16, without loss."""

        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
            given = [input_dict[name][0] for name in source_patterns]
            each = zip(*(tensor.split(1) for tensor in given), strict=True)
            floats = (convert_moe_packed_tensors(*(one.to(torch.uint8) for one in pair)) for pair in each)
            return {target_patterns[0]: stacked(len(given[0]), floats)[0]}

    class Rounding(ConversionOps):
        def __init__(self, reading: _Reading) -> None:
            self.reading = reading

        def convert(self, input_dict: Any, **_: Any) -> Any:
            found: dict[str, torch.Tensor] = {}
            for name, tensor in input_dict.items():
                found |= self.reading.stored(name, tensor[0] if isinstance(tensor, list) else tensor)
            return found

    @register_quantizer(_METHOD)
    class Quantizer(HfQuantizer):
        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            if self.pre_quantized:
                replace_layers(model, Scheme(self.quantization_config.bits, self.quantization_config.group))
            else:
                self.quantization_config.reading.start(model)

        def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
            return not self.pre_quantized and self.quantization_config.reading.changes(param_name)

        def get_quantize_ops(self) -> Any:
            return Rounding(self.quantization_config.reading)

        def get_weight_conversions(self) -> Any:
            if self.pre_quantized or self.quantization_config.reading.errors is None:
                return []
            names = ("gate_up_proj", "down_proj")
            return [WeightConverter([f"{name}_blocks", f"{name}_scales"], name, [Dequantize()]) for name in names]

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    return Settings
