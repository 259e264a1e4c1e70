"""Reads the shapes of models: `meta_model` derives them, and they stay on disk.

Deriving a shape loads torch and transformers, so a process that has not loaded transformers starts another one for it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import ModelConfig
from tpu_kit.distributed.child_process import run_child, xla_cpu_environment
from tpu_kit.models.architecture import Shape, known_models, locate, shipped_shape, unreachable
from tpu_kit.storage import atomic

CACHE = Path("~/.cache/tpu_kit/shapes")
_SECONDS = 300.0


def read_shape(model: ModelConfig) -> Shape:
    """Derives the shape of a model from its config.json, or reads it from disk if it was derived before.

    Raises:
        ValueError: there is no config.json, or transformers cannot build a decoder from it.
    """
    return read_shapes([model])[0]


def read_shapes(models: Sequence[ModelConfig]) -> list[Shape]:
    """As `read_shape` for several models, with one process for those that were not derived before."""
    texts = [_read(model) for model in models]
    paths = [CACHE.expanduser() / f"{shape_key(model, text)}.json" for model, text in zip(models, texts, strict=True)]
    shapes = {path: shape for path in {*paths} if (shape := _load(path))}
    missing = {path: number for number, path in enumerate(paths) if path not in shapes}
    derived = _derive([{**asdict(models[number]), "config": texts[number]} for number in missing.values()])
    for path, values in zip(missing, derived, strict=True):
        shapes[path] = _loaded[path] = Shape.from_dict(values)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, json.dumps(values), shared=True)
        except OSError:  # the next call derives it again
            pass
    return [shapes[path] for path in paths]


_loaded: dict[Path, Shape] = {}


def _load(path: Path) -> Shape | None:
    try:
        if path not in _loaded:
            _loaded[path] = Shape.from_dict(json.loads(path.read_text()))
        return _loaded[path]
    except (OSError, ValueError, TypeError, KeyError):  # no file, or half of one
        return None


def shape_key(model: ModelConfig, text: str | None = None) -> str:
    """Hashes what determines a shape: its config.json, the code that derives it, and transformers.

    Raises:
        ValueError: there is no config.json.
    """
    text = _read(model) if text is None else text
    own = Path(model.name).expanduser()
    code = sorted(own.glob("*.py")) if model.trust_remote_code and own.is_dir() else []
    code += [Path(__file__), Path(__file__).with_name("meta_model.py"), Path(__file__).with_name("layer_calls.py")]
    parts = [text.encode(), str(model.trust_remote_code and model.name).encode(), version("transformers").encode()]
    return hashlib.sha256(b"\0".join([*parts, *(path.read_bytes() for path in code)])).hexdigest()[:32]


def _derive(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not requests:
        return []
    if "transformers" in sys.modules:
        from tpu_kit.models import meta_model

        return [meta_model.derive(request) for request in requests]
    arguments = ["-W", "ignore", "-m", "tpu_kit.models.meta_model"]
    try:
        ended = run_child(arguments, xla_cpu_environment(), given=json.dumps(requests), seconds=_SECONDS)
        answer: dict[str, Any] = json.loads(ended.output.splitlines()[-1])
    except (TimeoutError, ValueError, IndexError) as error:
        reason = str(error) if isinstance(error, TimeoutError) else ended.last_lines(3)
        raise ValueError(f"model.name={requests[0]['name']}: its shape cannot be derived: {reason}") from error
    if "problem" in answer:
        raise ValueError(answer["problem"])
    shapes: list[dict[str, Any]] = answer["shapes"]
    return shapes


def _read(model: ModelConfig) -> str:
    name = f"model.name={model.name}"
    if model.gguf_file:
        raise ValueError(
            f"{name}: planning reads a config.json, not a GGUF file; give the original model's folder or id"
        )
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


def _find(model: ModelConfig) -> Path:
    folder = Path(locate(model))
    if folder.is_dir():
        return folder / "config.json"
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model.name, "config.json", revision=model.revision))
    except (OSError, ValueError) as error:
        raise ValueError(f"{unreachable(model, error)}; known without a network:\n{known_models()}") from error
