"""Folders with models in them: written so that older readers understand them, put in place whole, sent to the hub."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tpu_kit.config import ModelConfig
from tpu_kit.embedded import model_dir

MARKER = "export.json"  # what tells a folder that may be replaced

_GIB = 2**30
_SPARE = 64 * 2**20  # tokenizer, card and what the file system needs


def plain_name(name: str) -> str:
    """A run's name as a file's."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"


def check_replaceable(folder: Path) -> None:
    """Makes sure that an export may be written there.

    Raises:
        ValueError: it is a file, or a folder with something else in it.
    """
    if folder.exists() and not (folder / MARKER).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"out={folder} exists and is no earlier export: give a folder that does not exist yet")


def check_room(folder: Path, need: float) -> None:
    """Makes sure that the disk has room.

    Raises:
        ValueError: it has not.
    """
    above = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())
    free = shutil.disk_usage(above).free
    if free < need + _SPARE:
        raise ValueError(
            f"no room for the export in {folder}: it needs {(need + _SPARE) / _GIB:.2f} GiB and {free / _GIB:.2f} are "
            "free. Give out= a folder on a larger disk, or delete what is not needed"
        )


def put_in_place(part: Path, target: Path) -> None:
    """Renames a finished folder to its place; an earlier export there goes only then."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def base_arguments(config: ModelConfig) -> dict[str, Any]:
    """What transformers' own `from_pretrained` loads the base model with."""
    name = str(model_dir()) if config.name == "embedded" else config.name
    found = {"pretrained_model_name_or_path": name, "revision": config.revision, "gguf_file": config.gguf_file}
    return {option: value for option, value in found.items() if value}


def save_model(model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Writes model, generation config, tokenizer and chat template, as transformers 4 reads them, too.

    The model is cast in place. transformers 5 has other names for a few settings, and programs that come with
    transformers 4 pass over the new ones without a word: Qwen2.5 would then turn its positions 100 times too fast.
    """
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors lets none but the owner read
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if "dtype" in part:
            part["dtype"] = part["torch_dtype"] = str(dtype).removeprefix("torch.")
        rope = part.get("rope_parameters") or {}
        if "rope_theta" in rope:
            part["rope_theta"] = rope["rope_theta"]
            if rope.get("rope_type", "default") != "default":
                part["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    for name in ("is_local", "local_files_only"):  # of where it was read
        settings.pop(name, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False))


def check_tokenizer(folder: Path, tokenizer: Any, texts: Sequence[str]) -> None:
    """Reads the tokenizer again and compares tokens, template and special ids.

    Raises:
        ValueError: they differ.
    """
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": texts[0]}]
    differ = [repr(text) for text in texts if saved(text)["input_ids"] != tokenizer(text)["input_ids"]]
    if saved.chat_template != tokenizer.chat_template:
        differ.append("the chat template")
    elif saved.chat_template and len({t.apply_chat_template(chat, tokenize=False) for t in (saved, tokenizer)}) > 1:
        differ.append("a rendered chat")
    if saved.eos_token_id != tokenizer.eos_token_id:
        differ.append("the token that ends a text")
    if differ:
        raise ValueError(f"the tokenizer is another one after it was saved and read again: {', '.join(differ[:3])}")


def push(folder: Path, repository: str) -> str:
    """Sends a folder to the hub, into a private repository if there is none yet; returns its address.

    Raises:
        ValueError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=os.environ["HF_TOKEN"])  # and no token that an earlier login has left
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export by tpu_kit")
    except Exception as error:  # the hub's own, the network's, and those of names that it refuses
        text = str(error).strip().split("\n")[0][:200]
        raise ValueError(
            f"push={repository}: the hub refuses or cannot be reached ({type(error).__name__}: {text}). The export "
            f"itself is complete in {folder}"
        ) from error
    return f"{api.endpoint}/{repository}"
