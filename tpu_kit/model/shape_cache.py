"""Reads the shapes of models: `meta_model` derives them, which loads torch and transformers, and they stay on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

from tpu_kit.config.loader import ModelConfig
from tpu_kit.machine.storage import atomic
from tpu_kit.model.shape import Shape
from tpu_kit.model.weights.source import did_you_mean, locate, settings_of, shipped_shape

CACHE = Path("~/.cache/tpu_kit/shapes")
_DERIVING = ("shape_cache", "meta_model", "loop/layer_calls", "weights/source", "weights/trained_embeddings", "shape")
"""The modules whose code makes a shape."""


def read_shape(model: ModelConfig) -> Shape:
    """Derives the shape of a model from its config.json, or reads it from disk if it was derived before.

    Raises:
        ValueError: there is no config.json and no GGUF file, or transformers cannot build a decoder from it.
    """
    return _read_or_derive(CACHE.expanduser() / f"{shape_key(model)}.json", model)


@cache
def shape_of(model: ModelConfig) -> Shape:
    """As `read_shape`, once in a process: what changes on disk is not seen."""
    return read_shape(model)


@cache
def _read_or_derive(path: Path, model: ModelConfig) -> Shape:
    try:
        return Shape.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # no file, or half of one
        pass
    from tpu_kit.model import meta_model

    shape = meta_model.derive(model)
    with contextlib.suppress(OSError):  # the next process derives it again
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps(asdict(shape)), shared=True)
    return shape


def shape_key(model: ModelConfig) -> str:
    """Hashes what determines a shape: its config.json, the code that derives it, and transformers.

    Raises:
        ValueError: there is no config.json.
    """
    own = Path(model.name).expanduser()
    code = sorted(own.glob("*.py")) if model.trust_remote_code and own.is_dir() else []
    code += [Path(__file__).parent / f"{name}.py" for name in _DERIVING]
    parts = [_read(model), str(model.trust_remote_code and model.name), version("transformers")]
    parts += ["images"] * model.images
    every = [*map(str.encode, parts), *(path.read_bytes() for path in code)]
    return hashlib.sha256(b"\0".join(every)).hexdigest()[:32]


def _read(model: ModelConfig) -> str:
    name = f"model.name={model.name}"
    if model.gguf_file:
        return _gguf_config(model)
    if (shipped := shipped_shape(model)) is not None:
        return json.dumps(shipped)
    path = _find(model)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: its config.json cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name}: its config.json holds no object; take the file of the original model")
    return text


@cache
def _gguf_config(model: ModelConfig) -> str:
    """Returns what transformers makes of the metadata of a GGUF file, as the text of a config.json."""
    return str(settings_of(model).to_json_string())


def _find(model: ModelConfig) -> Path:
    folder = Path(locate(model))
    if folder.is_dir():
        return folder / "config.json"
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model.name, "config.json", revision=model.revision))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.name={model.name}: no folder, no known model (`python -m tpu_kit plan --models` lists them), and "
            f"the hub gave no config.json of it;{did_you_mean(model.name)} give a folder with its config.json, as from "
            f"`hf download {model.name} config.json --local-dir FOLDER`"
        ) from error
