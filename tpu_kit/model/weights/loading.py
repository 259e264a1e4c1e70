"""Loads a base model's weights on the CPU, from a folder, the hub, a GGUF file or the embedded model.

With base_dtype int8 or int4, transformers maps weights from their files, and each is quantized from there: a layer's
experts when they are merged. So the host needs memory for the quantized model and two layers, not for the original
model. (Mapped files are in the page cache, which the system frees when it needs memory.) The quantized weights are
cached on disk.
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
"""Methods that transformers undoes as it loads, on any machine."""


def load_base(
    config: ModelConfig, dtype: torch.dtype | Literal["auto"], settings: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """Loads the causal language model on the CPU, its weights in `dtype`, also where they are saved quantised.

    "auto" is the dtype of the files; such weights are mapped from the files and take no memory. `settings` are those of
    `read_config`, if they were read before.

    Raises:
        ValueError: it cannot be read, the checkpoint lacks some of the weights, or another tool has quantised them in a
            way that transformers does not undo here.
    """
    options: dict[str, Any] = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    method = None if config.gguf_file else quantized_by(config)
    if method and method not in UNDONE_IN_LOADING:
        return _undo(config, dtype, method)
    if settings is not None and not config.gguf_file:
        options["config"] = copy.deepcopy(settings)  # which is changed here, and by transformers
    elif (method or dtype == "auto") and (read := read_config(config)) is not None:
        options["config"] = read
    if method and "config" in options:
        options["config"].quantization_config["dequantize"] = True
    elif dtype == "auto" and "config" in options:
        options["config"].dtype = None  # or transformers would cast to it
    model = read_model(config, dtype, **options)
    forget_quantizer(model)
    return model


def read_model(config: ModelConfig, dtype: torch.dtype | Literal["auto"], /, **options: Any) -> PreTrainedModel:
    """Calls from_pretrained with `options`; errors say what to do, as in `load_base`."""
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
        if Path(name).is_dir() or isinstance(error, SafetensorError | RuntimeError):  # damaged, or of other shapes
            raise ValueError(f"model.name={config.name}: transformers cannot load it: {brief(error)}") from error
        raise ValueError(unreachable(config, error)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"model.name={config.name}: {len(missing)} weights of {type(model).__name__} are not in the checkpoint "
            f"({', '.join(missing[:3])}...) and would be random. Is it a causal language model, saved whole?"
        )
    return model


def forget_quantizer(model: PreTrainedModel) -> None:
    """Lets transformers train and save a model whose weights are plain now, or ours; else it refuses to."""
    from transformers.quantizers import HfQuantizer

    quantizer: Any = getattr(model, "hf_quantizer", None)  # none of a GGUF file, and the method needs none
    HfQuantizer.remove_quantization_config(quantizer, model)


def _undo(config: ModelConfig, dtype: torch.dtype | Literal["auto"], method: str) -> PreTrainedModel:
    """Loads a model with the tool that quantised it, if it is installed, and makes plain weights of it."""
    try:
        model = read_model(config, dtype)
        plain: PreTrainedModel = model.dequantize(dtype=dtype)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"model.name={config.name}: its weights are quantised by {method}, which cannot be undone here "
            f"({brief(error.__cause__ or error)}). Use the model that it was made from: model.base_dtype=int8 or int4 "
            "makes it as small"
        ) from error
    forget_quantizer(plain)
    return plain


_METHOD = "tpu_kit"  # in config.json, where other methods have their names
_VERSION = 3  # of what is stored; another one is quantised anew
_FILE_BYTES = GIB
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_frozen(config: ModelConfig, settings: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Loads the base model on the CPU as it is stored under adapters: in `config.base_dtype`; see `load_base`.

    Raises:
        ValueError: as `loading.load_base`; or its weights cannot be quantised that way.
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
    """Rounds each weight as it is read, and merges a layer's experts just before; but what `load_base` undoes after."""
    method = None if config.gguf_file else quantized_by(config)
    if config.gguf_file or method not in (None, "mxfp4"):
        model = load_base(config, torch.bfloat16)
        quantize_model(model, scheme)
        return model
    settings, options = _settings()(scheme.bits, scheme.group), {}
    settings.reading = reading = reading or _Reading(scheme)
    if method and (given := read_config(config)) is not None:
        del given.quantization_config  # or transformers would take its own method
        options["config"], reading.errors = given, []
    model = read_model(config, torch.bfloat16, quantization_config=settings, **options)
    forget_quantizer(model)
    if reading.errors:
        about = f"{max(reading.errors):.1%} at most, of the first expert of each of {len(reading.errors)} stacks"
        print(f"quantised        {method} is rounded again to {scheme}: relative error {about}", flush=True)
    return model


@dataclass
class _Reading:
    """Rounds the weights of a model one by one, as transformers reads them.

    Attributes:
        scheme: how they are stored.
        folder: where they are written and mapped from, so that they take no memory; None keeps them in memory.
        problem: why the folder does not have all of them.
        errors: relative errors of experts whose files have MXFP4; None where they have not.
    """

    scheme: Scheme
    folder: Path | None = None
    problem: OSError | None = None
    errors: list[float] | None = None

    def start(self, model: PreTrainedModel) -> None:
        """Makes room for the integers of a model on "meta"; notes if the folder lacks it."""
        replace_layers(model, self.scheme)
        self.places, self.mixtures = places(model), dict(experts.modules_of(model))
        size = sum(tensor.nbytes for tensor in model.state_dict().values())
        if self.folder is not None and (free := shutil.disk_usage(self.folder).free) < 1.05 * size:
            about = f"it takes {size / GIB:.1f} GiB, and {free / GIB:.1f} are free in {self.folder.parent}"
            self.problem = OSError(errno.ENOSPC, about)
        for owner, (leaf, _) in self.places.values():  # transformers 5.15 casts what it reads to this dtype
            setattr(owner, leaf, getattr(owner, leaf).to(torch.bfloat16))

    def changes(self, name: str) -> bool:
        """Whether `stored` is for this weight."""
        path, _, leaf = name.rpartition(".")
        return name in self.places or (path in self.mixtures and leaf in experts.shaped_names(self.mixtures[path]))

    def stored(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tensors that the model has for a weight of the files, or for a bias of experts."""
        path, _, leaf = name.rpartition(".")
        shaped = partial(experts.shaped, self.mixtures[path], leaf) if path in self.mixtures else None
        if name not in self.places:
            return {name: shaped(tensor) if shaped else tensor}
        owner, leaves = self.places[name]
        found = rounded(self.scheme, tensor, shaped)
        if [one.shape for one in found] != [getattr(owner, one).shape for one in leaves]:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, which does not fit config.json")
        if self.errors is not None and shaped:
            weight = shaped(tensor[:1])[0].float()
            difference = experts.floats_of(self.scheme, found[0][0], found[1][0], torch.float32) - weight
            self.errors.append(float(difference.norm() / weight.norm()))
        return self._kept(name, {f"{path}.{leaf}": one for leaf, one in zip(leaves, found, strict=True)})

    def _kept(self, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Writes the tensors of a weight to a file, and returns them as it maps them into memory."""
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
    """Loads what an earlier run has kept, or quantises and keeps it; one process of a machine does, the others wait."""
    if (key := _key(config, scheme)) is None:
        return _quantized(config, scheme)
    model: PreTrainedModel | None = None
    place = folder / f"{Path(config.name).name}-{'int8' if scheme.bits == 8 else f'int4-{scheme.group}'}-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{place.name}.lock", "w") as lock:
            with contextlib.suppress(ImportError):  # Windows, where each process may write its own
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
                print(f"quantised        kept for the next run: {place}, {size / GIB:.2f} GiB", flush=True)
                return model
    except OSError as error:
        print(f"quantised        not kept: {folder} ({error.strerror})", flush=True)
        return model or _quantized(config, scheme)
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
    name, base = locate(config), None
    if Path(name).is_dir():
        files = sorted(path for path in Path(name).iterdir() if path.suffix in (".json", ".safetensors", ".bin"))
        base = repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])
    elif (base := getattr(read_config(config), "_commit_hash", None)) is None:
        return None
    return hashlib.sha256(repr((base, name, scheme, _VERSION)).encode()).hexdigest()[:16]


def _write(model: PreTrainedModel, scheme: Scheme, folder: Path) -> int:
    """Adds to a folder of integers and scales all else that `from_pretrained` needs; returns the bytes of all."""
    from safetensors import safe_open

    stored = {f"{name.rpartition('.')[0]}.{leaf}" for name, (_, leaves) in places(model).items() for leaf in leaves}
    rest = {name: tensor for name, tensor in model.state_dict().items() if name not in stored}
    # Without a variant a single file would be model.safetensors, which transformers prefers to an index.
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


# ----------------------------------------------------------------------------------- what transformers asks of a method


@cache
def _settings() -> Any:
    """Makes our method known to transformers; returns the class of its settings."""
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
        """Makes bf16 (E, I, O) of blocks and scales of MXFP4, which loading has cast: bf16 holds any byte."""

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
