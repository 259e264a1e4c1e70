"""GGUF files by llama.cpp's own converter, which comes from a pinned source archive and is kept in the user's cache.

llama.cpp publishes no package of its converter; the source archive of llama_cpp_python holds it, of one commit with its
gguf library. pip fetches that archive once and checks its SHA-256 before anything in it is run, and the files taken out
of it are checked again whenever they are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from tpu_kit.distributed.child_process import run_child
from tpu_kit.storage import atomic

VERSION = "0.3.36"  # of llama_cpp_python
ARCHIVE = f"llama_cpp_python-{VERSION}.tar.gz"
ARCHIVE_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
FILES_SHA256 = "6884850c6fec1892b78839518b5b9a8610852d667af5ea71e603d6e7f1901755"  # of `fingerprint`

_INSIDE = "vendor/llama.cpp/"
_SCRIPTS = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "LICENSE")
_FOLDERS = ("conversion/", "gguf-py/gguf/")
_UNKNOWN_TOKENIZER = "BPE pre-tokenizer was not recognized"


def cache_folder() -> Path:
    """Where the converter is kept: ~/.cache/tpu_kit, or below XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tpu_kit"


def converter() -> Path:
    """The folder of llama.cpp's converters; fetched if it is not in the cache.

    Raises:
        ValueError: the archive cannot be fetched, or it is not the one that is expected.
    """
    folder = cache_folder() / f"llama.cpp-{VERSION}"
    if folder.is_dir() and fingerprint(folder) == FILES_SHA256:
        return folder
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="llama.cpp-", dir=cache_folder()) as scratch:
        archive = cache_folder() / ARCHIVE  # put there by hand, where there is no network
        if not archive.is_file():
            archive = _fetch(Path(scratch))
        with atomic.replacing(folder, shared=True) as part:
            unpack(archive, part)
    return folder


def _fetch(folder: Path) -> Path:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"llama-cpp-python=={VERSION} --hash=sha256:{ARCHIVE_SHA256}\n")
    command = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "llama-cpp-python", "--require-hashes", "-r", str(wanted), "-d", str(folder)]
    done = run_child(command, os.environ)
    if done.status or not (folder / ARCHIVE).is_file():
        said = [line for line in done.errors.splitlines() if "ERROR" in line] or [done.last_lines(1)]
        raise ValueError(
            f"llama.cpp's converter cannot be fetched ({said[-1].strip()[:200]}). It is needed once: run this where "
            f"there is a network, or put {ARCHIVE} of the Python package index into {cache_folder()}"
        )
    return folder / ARCHIVE


def unpack(archive: Path, folder: Path) -> None:
    """Takes the converter's files out of the source archive.

    Raises:
        ValueError: the archive, or what is in it, is not the one that is expected.
    """
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != ARCHIVE_SHA256:
        raise ValueError(
            f"{archive} has the SHA-256 {found} and should have {ARCHIVE_SHA256}: it is damaged or another version. "
            "Delete it and run this again"
        )
    with tarfile.open(archive) as files:
        for member in files:
            name = member.name.partition(f"/{_INSIDE}")[2]
            if member.isfile() and (name in _SCRIPTS or name.startswith(_FOLDERS)):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                source = files.extractfile(member)
                assert source is not None
                target.write_bytes(source.read())
    assert fingerprint(folder) == FILES_SHA256, f"{archive} is the expected one, but not what was taken out of it"


def fingerprint(folder: Path) -> str:
    """SHA-256 over the names and contents of all files of a folder, those that Python made left out."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    total = hashlib.sha256()
    for name in names:
        if "__pycache__" not in name:
            total.update(f"{name}\0{hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def convert_model(folder: Path, target: Path, outtype: str, tools: Path) -> None:
    """Writes a model that transformers saved, with its tokenizer, as GGUF in f16, bf16 or q8_0.

    Raises:
        ValueError: llama.cpp's converter refuses the model or its tokenizer.
    """
    _run([str(tools / "convert_hf_to_gguf.py"), str(folder), "--outfile", str(target), "--outtype", outtype], target)


def convert_adapter(adapter: Path, base: Path, target: Path, tools: Path) -> None:
    """Writes a LoRA adapter that PEFT saved as GGUF in f16; `base` has the base model's config and tokenizer.

    Raises:
        ValueError: GGUF cannot hold such an adapter, or the converter refuses it.
    """
    settings = json.loads((adapter / "adapter_config.json").read_text())
    if settings.get("use_dora"):
        raise ValueError("GGUF adapters have no place for DoRA's magnitudes: export the merged model (gguf-f16)")
    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as scratch:
        plain = Path(scratch)
        shutil.copy(adapter / "adapter_model.safetensors", plain)
        if settings.get("use_rslora"):
            # llama.cpp scales by alpha / r alone, and rank-stabilised adapters by alpha / sqrt(r).
            settings["lora_alpha"] *= math.sqrt(settings["r"])
        (plain / "adapter_config.json").write_text(json.dumps(settings))
        script = str(tools / "convert_lora_to_gguf.py")
        _run([script, str(plain), "--base", str(base), "--outfile", str(target), "--outtype", "f16"], target)


def _run(arguments: list[str], target: Path) -> None:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1"}
    environment.pop("NO_LOCAL_GGUF", None)  # it would take another version of the gguf library
    done = run_child(arguments, environment)
    if _UNKNOWN_TOKENIZER in done.errors:
        raise ValueError(
            "llama.cpp does not know how this tokenizer cuts a text into words, so a GGUF file would read other tokens "
            "than the model was trained with. Models on a tokenizer of the known families convert; this one runs in "
            "transformers and vLLM (format=merged, format=vllm)"
        )
    if done.status or not target.is_file():
        raise ValueError(f"llama.cpp's converter refuses the model: {done.last_lines(4)}")
