"""Runs llama.cpp's converter, which writes GGUF files.

llama.cpp publishes no package of the converter. The source archive of llama_cpp_python holds it, with the gguf library
of the same commit. pip fetches the pinned archive once into the user's cache; its SHA-256 is checked before every use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tpu_kit.distributed.child_process import run_child
from tpu_kit.model.weights.trained_embeddings import described

VERSION = "0.3.36"  # of llama_cpp_python
ARCHIVE = f"llama_cpp_python-{VERSION}.tar.gz"
ARCHIVE_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"

_INSIDE = "vendor/llama.cpp/"
_SCRIPTS = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "LICENSE")
_FOLDERS = ("conversion/", "gguf-py/gguf/")
_UNKNOWN_TOKENIZER = "BPE pre-tokenizer was not recognized"


def archive_at_hand() -> Path:
    """Returns the path of the converters' archive in ~/.cache/tpu_kit; pip downloads it if it is missing.

    XDG_CACHE_HOME replaces ~/.cache.

    Raises:
        ValueError: pip cannot fetch it, or the file there has a wrong checksum, which every call computes.
    """
    archive = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tpu_kit" / ARCHIVE
    if not archive.is_file():
        _fetch(archive)
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != ARCHIVE_SHA256:
        raise ValueError(
            f"{archive} has the SHA-256 {digest} instead of {ARCHIVE_SHA256}: it is damaged or another version. "
            "Delete it and run this again"
        )
    return archive


@contextlib.contextmanager
def converter() -> Iterator[Path]:
    """Yields a temporary folder with llama.cpp's converters, deleted after the body; raises as `archive_at_hand`."""
    archive = archive_at_hand()
    with tempfile.TemporaryDirectory(prefix="llama.cpp-") as folder, tarfile.open(archive) as files:
        for member in files:
            name = member.name.partition(f"/{_INSIDE}")[2]
            if member.isfile() and (name in _SCRIPTS or name.startswith(_FOLDERS)):
                content, path = files.extractfile(member), Path(folder, name)
                assert content is not None, "it is a file"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())  # Python before 3.11.4 has no filter to extract with
        yield Path(folder)


def _fetch(archive: Path) -> None:
    """Downloads the pinned archive with pip, and writes it to the path `archive`; raises ValueError if pip fails."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"llama-cpp-python=={VERSION} --hash=sha256:{ARCHIVE_SHA256}\n")
        command = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", "llama-cpp-python", "--require-hashes", "-r", str(wanted), "-d", folder]
        done = run_child(command, os.environ)
        fetched = Path(folder) / ARCHIVE
        if done.status or not fetched.is_file():
            errors = [line for line in done.errors.splitlines() if "ERROR" in line] or [done.last_lines(1)]
            raise ValueError(
                f"llama.cpp's converter cannot be fetched ({errors[-1].strip()[:200]}). It is needed once: run this "
                f"with a network, or put {ARCHIVE} of the Python package index into {archive.parent}"
            )
        fetched.replace(archive)


def convert_model(folder: Path, target: Path, outtype: str, tools: Path, *, projector: bool = False) -> None:
    """Converts a folder of transformers, with model and tokenizer, to a GGUF file.

    Args:
        folder: folder of the model.
        target: the file to write; its folder must exist.
        outtype: f16, bf16 or q8_0.
        tools: the folder of `converter`.
        projector: True writes the vision part (mmproj), for which `folder` also needs the processor's files; False
            writes the language model.

    Raises:
        ValueError: llama.cpp's converter refuses the model or its tokenizer, or writes no file.
    """
    command = [str(tools / "convert_hf_to_gguf.py"), str(folder), "--outfile", str(target), "--outtype", outtype]
    if projector:
        _run([*command, "--mmproj"], target)
        return
    try:  # transformers does not save the layers that predict further tokens, but the converter expects them
        _run([*command, "--no-mtp"], target)
    except ValueError as error:
        if "--no-nextn are not supported for" not in str(error):
            raise
        _run(command, target)


def convert_adapter(adapter: Path, base: Path, target: Path, tools: Path) -> None:
    """Converts a LoRA adapter of PEFT in the folder `adapter` to the GGUF file `target` in f16.

    The folder `base` has the base model's config and tokenizer; `tools` is the folder of `converter`. The folders stay
    unchanged.

    Raises:
        ValueError: the adapter has DoRA, LoRA on embeddings, or trained tokens or modules; or the converter refuses it.
    """
    settings = json.loads((adapter / "adapter_config.json").read_text())
    if settings.get("use_dora"):
        raise ValueError("GGUF adapters cannot hold DoRA's magnitudes: export the merged model (gguf-f16)")
    if found := described(settings):
        raise ValueError(f"GGUF adapters cannot hold {' and '.join(found)}: export the merged model (gguf-f16)")
    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as scratch:
        plain = Path(scratch)
        shutil.copy(adapter / "adapter_model.safetensors", plain)
        if settings.get("use_rslora"):
            # llama.cpp scales by alpha / r; rank-stabilised adapters are scaled by alpha / sqrt(r).
            settings["lora_alpha"] *= math.sqrt(settings["r"])
        (plain / "adapter_config.json").write_text(json.dumps(settings))
        script = str(tools / "convert_lora_to_gguf.py")
        _run([script, str(plain), "--base", str(base), "--outfile", str(target), "--outtype", "f16"], target)


def _run(arguments: list[str], target: Path) -> None:
    """Runs `arguments`, a script of llama.cpp and its arguments, offline; ValueError if it does not write `target`."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1"}
    environment.pop("NO_LOCAL_GGUF", None)  # it selects another version of the gguf library
    done = run_child(arguments, environment)
    if _UNKNOWN_TOKENIZER in done.errors:
        raise ValueError(
            "llama.cpp does not know how this tokenizer splits a text into words, so a GGUF file would produce other "
            "tokens than in training. Use format=merged (transformers) or format=vllm"
        )
    if done.status or not target.is_file():
        raise ValueError(f"llama.cpp's converter refuses the model: {' '.join(done.last_lines(4).split())}")
