"""Caches the shapes of models on disk, because `meta_model`, which derives them, loads torch and transformers."""

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
"""The modules whose code determines a shape."""


def read_shape(model: ModelConfig) -> Shape:
    """Returns the shape of a model, from the cache on disk or derived from its config.json.

    Raises:
        ValueError: config.json or the GGUF file is missing, or transformers cannot build a decoder from it.
    """
    return _read_or_derive(CACHE.expanduser() / f"{shape_key(model)}.json", model)


@cache
def shape_of(model: ModelConfig) -> Shape:
    """Like `read_shape`, but at most once per process: later changes on disk have no effect."""
    return read_shape(model)


@cache
def _read_or_derive(path: Path, model: ModelConfig) -> Shape:
    """Reads a shape from `path`, or derives it and tries to write it there; once per process for equal arguments."""
    try:
        return Shape.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # no file, or a partial file
        pass
    from tpu_kit.model import meta_model

    shape = meta_model.derive(model)
    with contextlib.suppress(OSError):  # the next process derives it again
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps(asdict(shape)), shared=True)
    return shape


def shape_key(model: ModelConfig) -> str:
    """Hashes a shape's inputs to 32 hex digits: config.json, the code that derives it, and transformers' version.

    Also hashes `model.images` and, for trusted code, the model's name and its folder's code. Downloads an unknown hub
    model's config.json.

    Raises:
        ValueError: config.json is missing or cannot be read.
    """
    own = Path(model.name).expanduser()
    code = sorted(own.glob("*.py")) if model.trust_remote_code and own.is_dir() else []
    code += [Path(__file__).parent / f"{name}.py" for name in _DERIVING]
    parts = [_read(model), str(model.trust_remote_code and model.name), version("transformers")]
    parts += ["images"] * model.images
    every = [*map(str.encode, parts), *(path.read_bytes() for path in code)]
    return hashlib.sha256(b"\0".join(every)).hexdigest()[:32]


def _read(model: ModelConfig) -> str:
    """Returns the text of a model's config.json: GGUF metadata, else assets/shapes.json, else folder or hub.

    Raises ValueError if it cannot be read, or holds no object.
    """
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
        raise ValueError(f"{name}: its config.json holds no object; use the file of the original model")
    return text


@cache
def _gguf_config(model: ModelConfig) -> str:
    """Returns transformers' configuration from the metadata of a GGUF file, as the text of a config.json."""
    return str(settings_of(model).to_json_string())


def _find(model: ModelConfig) -> Path:
    """Returns the path of a model's config.json, downloaded if it is on the hub; ValueError if it cannot be."""
    folder = Path(locate(model))
    if folder.is_dir():
        return folder / "config.json"
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model.name, "config.json", revision=model.revision))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.name={model.name}: not a folder or a known model (`python -m tpu_kit plan --models` lists them), "
            f"and the hub gave no config.json;{did_you_mean(model.name)} give a folder with its config.json, as from "
            f"`hf download {model.name} config.json --local-dir FOLDER`"
        ) from error
