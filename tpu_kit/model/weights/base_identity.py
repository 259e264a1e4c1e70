"""Identifies the weights of a base model, so that a run or an adapter does not silently continue with other weights.

An identity is a JSON document, base.json in checkpoints and adapters. It has the sizes of weight files, digests of
samples of local files, and the rotary positions of config.json. For a model of the hub, it also has the repository, the
commit and the hub's hashes. It names no folder: the same weights in another folder have the same identity.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import ModelConfig
from tpu_kit.machine.storage.local_folder import open_folder
from tpu_kit.machine.storage.object_store import is_url
from tpu_kit.model.weights.source import locate

Identity = Mapping[str, Any]

NAME = "base"
_SAMPLE, _SAMPLES = 4096, 256  # bytes of a sample, samples of a file
_COMMIT = "[0-9a-f]{40}"
_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")  # transformers prefers the first


def identify(model: ModelConfig) -> Identity | None:
    """Returns the identity of a base model; None for a model of the hub that is neither cached nor reachable.

    The key "files" maps the name of a weight file to "bytes" and digests: "sampled" of a local file, "hub" of the hub.
    A model of the hub also has "repo" and "commit". A local config.json, if it can be read, gives "settings" and
    "rope". Asks the hub, unless the model is a folder or `model.revision` is a cached commit; without an answer, the
    cache is used.

    Raises:
        ValueError: from `source.locate`.
    """
    name = locate(model)
    if Path(name).is_dir():
        return {"files": _local_files(Path(name), model), **_settings(Path(name))}
    from huggingface_hub import HfApi, try_to_load_from_cache

    file, cached = model.gguf_file or "config.json", None
    if isinstance(path := try_to_load_from_cache(name, file, revision=model.revision), str):
        snapshot = Path(path.removesuffix(file))
        cached = {"repo": name, "commit": snapshot.name, "files": _local_files(snapshot, model), **_settings(snapshot)}
        if snapshot.name == model.revision and cached["files"]:  # a commit does not change
            return cached
    try:
        info = HfApi().model_info(name, revision=model.revision, timeout=10, files_metadata=True)
    except Exception:  # errors of the hub or network: loading reports them
        return cached
    there = {one.rfilename: one for one in info.siblings or ()}
    files = {
        name: {"bytes": there[name].size, "hub": lfs.sha256 if (lfs := there[name].lfs) else there[name].blob_id}
        for name in _weights(there, model)
        if name in there
    }
    return {"repo": name, "commit": info.sha, "files": files}


def pin(model: ModelConfig, began: Identity | None = None) -> tuple[ModelConfig, Identity | None]:
    """Sets the revision of a hub model to a commit.

    If `model.revision` is null, this is the commit of `began` or, without `began`, the newest commit. If it is set,
    this is its present commit, or the commit of `began` if the weights have not changed since.

    Args:
        model: the base model.
        began: the identity at the start of a training. None, or another repository's identity, counts as absent.

    Returns:
        A copy of the settings (unchanged for a folder or an unknown commit), and its identity as in `identify`.

    Raises:
        ValueError: from `source.locate`.
    """
    ours = began if began and began.get("repo") == model.name else None
    if ours and model.revision is None:
        model = replace(model, revision=ours["commit"])
        return model, identify(model)
    now = identify(model)
    if now is None or "commit" not in now:
        return model, now
    found = now if ours is None or differences(ours, now) else ours
    return replace(model, revision=found["commit"]), found


def differences(began: Identity | None, now: Identity | None) -> list[str]:
    """Returns differences of weight files and rotary positions, as texts; [] for equal commits or unknown weights.

    A file that only one identity has is a difference; a digest or a rotary position of only one identity is not.
    Weights are unknown if an identity is None or has no files.
    """
    if not began or not now or not (then := began["files"]) or not (here := now["files"]):
        return []
    if "commit" in began and began["commit"] == now.get("commit"):
        return []
    found = [f"{name} is missing" for name in then if name not in here]
    found += [f"{name} is new" for name in here if name not in then]
    for name in [name for name in then if name in here]:
        old, new = then[name], here[name]
        if old["bytes"] != new["bytes"]:
            found.append(f"{name} has {new['bytes']:,} bytes, and had {old['bytes']:,}")
        elif any(old[kind] != new[kind] for kind in old.keys() & new.keys()):
            found.append(f"{name} has other content")
    old, new = began.get("rope", {}), now.get("rope", {})  # an adapter does not store them
    found += [
        f"config.json has {name}={new[name]} for its rotary positions, and had {old[name]}"
        for name in old
        if name in new and old[name] != new[name]
    ]
    return found


def other_place(began: Identity | None, now: Identity | None) -> list[str]:
    """Returns differences of a model at another location, or why they are unknown, as texts; empty for equal models.

    Returns `differences`, if there are any. Then compares config.json, unless the commits are equal. A file cannot be
    compared if the identities have no common kind of digest: a folder and its copy have, or the hub's cache and its
    copy.
    """
    if not began or not now or not began["files"] or not now["files"]:
        return ["their files cannot be compared"]
    if found := differences(began, now):
        return found
    if "commit" in began and began["commit"] == now.get("commit"):
        return []
    if "settings" in began and "settings" in now and began["settings"] != now["settings"]:
        return ["config.json has other content"]
    pairs = ((name, one.keys() & now["files"][name].keys()) for name, one in began["files"].items())
    return [f"{name} cannot be compared: download the model first" for name, kinds in pairs if kinds <= {"bytes"}]


def identify_adapter(place: str) -> Identity:
    """Returns {"files": {name: {"bytes", "md5"}}} of the safetensors files in an adapter's folder or URL.

    Raises:
        OSError: the object store cannot be read.
    """
    folder = open_folder(place if is_url(place) else Path(place).expanduser())
    files = {name: file for name, file in folder.list().items() if name.endswith(".safetensors") and "/" not in name}
    digests = {name: digest or _md5(Path(folder.place(name))) for name, (_, digest) in files.items()}
    return {"files": {name: {"bytes": size, "md5": digests[name]} for name, (size, _) in files.items()}}


def _md5(path: Path) -> str:
    """Returns the hexadecimal MD5 digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()


def fingerprint(identity: Identity | None) -> str:
    """Returns a text that is equal for equal weights: commit, else hash of the sampled digests; "unknown" for None."""
    if identity is None:
        return "unknown"
    digests = sorted((name, one.get("sampled")) for name, one in identity["files"].items())
    return str(identity.get("commit") or hashlib.sha256(repr(digests).encode()).hexdigest()[:16])


def base_of_adapter(model: ModelConfig, adapter: Path | None, identity: Identity | None = None) -> ModelConfig:
    """Returns the base of an adapter, or of a run's whole model, pinned to the hub's commit of the training; see `pin`.

    With `model.trust_remote_code`, it is pinned to the newest commit instead, whose weights must be the same. With
    `identity`, it is not pinned: `model` is returned unchanged. So it is if there is no base.json, as in a folder of
    another tool; then a line on stderr, once per process, says that the weights are not compared. Nothing is printed or
    compared if the folder has neither adapter_config.json nor config.json, or if `adapter` is None.

    Args:
        model: the base model.
        adapter: folder of the adapter or whole model, or None.
        identity: identity of the base, if it is already pinned; None identifies the base.

    Raises:
        ValueError: the folder was trained on other weights, or its base.json is damaged; or from `pin`.
    """
    if adapter is None or not any((adapter / name).is_file() for name in ("adapter_config.json", "config.json")):
        return model  # loading reports missing files
    path = adapter / f"{NAME}.json"
    if not path.is_file() and not (adapter / "adapter_config.json").is_file():
        _tell(f"warning: {adapter} is a whole model of unknown origin, not an adapter; it replaces {model.name}")
        return model
    if not path.is_file():
        named = None
        with contextlib.suppress(ValueError, AttributeError):  # loading reports the damaged file
            named = json.loads((adapter / "adapter_config.json").read_text()).get("base_model_name_or_path")
        kind = "note" if named in (model.name, locate(model)) else "warning"
        _tell(
            f"{kind}: {adapter} names the base {named} but does not identify its weights; they are not compared with "
            f"model.name={model.name}"
        )
        return model
    try:
        began = json.loads(path.read_text())
        sound = all(isinstance(one["bytes"], int) for one in began["files"].values())
        sound = sound and bool(re.fullmatch(_COMMIT, began.get("commit", "0" * 40)))
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise ValueError(f"{path} is damaged: give an earlier or a complete folder")
    # The adapter may be someone else's, and anyone can add a commit to a repository of the hub by a pull request.
    if identity is None:
        model, identity = pin(model, None if model.trust_remote_code else began)
    if found := differences(began, identity):
        own = "the folder with the base weights of the training"
        if "repo" in began:
            own = f"{began['repo']} and model.revision={began['commit']}"
        raise ValueError(
            f"{adapter} was trained on other base weights than model.name={model.name}: "
            f"{'; '.join(found)}. Set model.name={own}"
        )
    return model


@cache
def _tell(text: str) -> None:
    """Prints a line to stderr, once per text in a process."""
    print(text, file=sys.stderr, flush=True)


def _weights(names: Iterable[str], model: ModelConfig) -> list[str]:
    """Returns the sorted weight files among a model's files: the GGUF file, else safetensors, else .bin files."""
    names = sorted(name for name in names if "/" not in name)
    matching = ([name for name in names if fnmatch(name, pattern)] for pattern in _PATTERNS)
    return [model.gguf_file] if model.gguf_file else next(filter(None, matching), [])


def _local_files(folder: Path, model: ModelConfig) -> dict[str, dict[str, Any]]:
    """Returns weight file -> "bytes", "sampled" and, in the hub's cache, "hub"; skips unreadable files."""
    files: dict[str, dict[str, Any]] = {}
    for name in _weights((path.name for path in folder.iterdir()), model):
        with contextlib.suppress(OSError):  # loading reports errors
            path, stat = (folder / name).resolve(), (folder / name).stat()
            digest = _sampled(folder / name, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            files[name] = {"bytes": stat.st_size, "sampled": digest}
            if path.parent.name == "blobs" and re.fullmatch(f"{_COMMIT}|[0-9a-f]{{64}}", path.name):
                files[name]["hub"] = path.name  # the hub's cache names files by their hashes
    return files


def _settings(folder: Path) -> dict[str, Any]:
    """Returns "settings", a digest of config.json without location and version, and "rope", its rotary positions.

    Without a readable config.json, returns an empty dictionary.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # loading reports errors
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for name in ("_name_or_path", "transformers_version"):
            settings.pop(name, None)
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        return {"settings": digest, "rope": _rope(settings.get("text_config") or settings)}
    return {}


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns "rope_type" and, if known, "factor" and "rope_theta"; transformers 5 writes them as `rope_parameters`.

    Empty for parameters per kind of layer, as in Gemma, because older files name them in several ways.
    """
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if any(isinstance(one, Mapping) for one in given.values()):
        return {}
    found = {"rope_type": given.get("rope_type") or given.get("type") or "default", "factor": given.get("factor")}
    found["rope_theta"] = given.get("rope_theta", settings.get("rope_theta"))
    return {name: value for name, value in found.items() if value is not None}


@lru_cache(1024)
def _sampled(path: Path, inode: int, size: int, modified: int) -> str:
    """Returns a digest of evenly spaced samples of a file, and of a safetensors header; cached by all arguments."""
    found = hashlib.sha256()
    last, step = size - _SAMPLE, max(_SAMPLE, (size - _SAMPLE) // (_SAMPLES - 1))
    with path.open("rb", buffering=0) as file:
        if path.suffix == ".safetensors":
            found.update(file.read(min(size, int.from_bytes(file.read(8), "little"))))
        for start in [*range(0, last, step), max(0, last)]:
            file.seek(start)
            found.update(file.read(_SAMPLE))
    return found.hexdigest()
