"""The options of an export; importing them loads no torch."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_kit.config.fields import knob
from tpu_kit.config.hub import check_branch
from tpu_kit.config.named_values import EXPORT_FORMATS
from tpu_kit.machine.storage.object_store import is_url

if TYPE_CHECKING:
    from tpu_kit.exporting.tuned_model import Format

DTYPES = {"bf16": "bfloat16", "f16": "float16", "fp32": "float32"}  # their names in torch


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Raises:
        ValueError: the format or the dtype is unknown, a package is missing, or the options contradict each other.
    """

    format: tuple[str, ...] = knob(
        ("merged",),
        f"{', '.join([*EXPORT_FORMATS][:-1])} or {[*EXPORT_FORMATS][-1]}; may be repeated. GGUF needs the extra "
        "tpu_kit[export], and a tokenizer that llama.cpp knows; it does not know the embedded model's tokenizer.",
    )
    out: str | None = knob(None, "Folder to write; null = RUN_DIR/export/FORMAT. An earlier export there is replaced.")
    dtype: str = knob("bf16", f"Type of merged weights: {', '.join(DTYPES)}.")
    base: str | None = knob(None, "The base model's name on the hub, if training read it from a folder.")
    vllm: str | None = knob(
        None, "Python interpreter of an environment with vLLM, to compare the formats vllm and adapter with the tuned "
        "model; null = this environment, if it has vLLM; off = no comparison.",
    )  # fmt: skip
    push: str | None = knob(None, "Repository on the Hugging Face hub to push the export to, such as ann/my-model.")
    private: bool = knob(True, "Whether a repository that push creates is private.")
    revision: str | None = knob(None, "Branch that push commits to; null = main.", check=check_branch)

    def __post_init__(self) -> None:
        for format in self.format:
            if format not in EXPORT_FORMATS:
                raise ValueError(f"format={format}: the formats are {', '.join(EXPORT_FORMATS)}")
        if len({*self.format}) < len(self.format):
            raise ValueError(f"format={', '.join(self.format)}: a format is given twice")
        gguf = [format for format in self.format if format.startswith("gguf")]
        if gguf and importlib.util.find_spec("sentencepiece") is None:
            raise ValueError(
                f"format={gguf[0]} needs llama.cpp's converter, which needs sentencepiece: pip install "
                "sentencepiece xllamacpp (the extra tpu_kit[export]; xllamacpp checks the written file)"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype}: the types are {', '.join(DTYPES)}")
        if self.vllm and {"vllm", "adapter"}.isdisjoint(self.format):
            raise ValueError(f"vllm={self.vllm}: format={', '.join(self.format)} is not for vLLM; use vllm or adapter")
        if not self.push and (self.revision or not self.private):
            given = f"revision={self.revision}" if self.revision else "private=false"
            raise ValueError(f"{given}: it has no effect without push=owner/name")
        if self.out and len(self.format) > 1:
            raise ValueError(f"out={self.out}: a folder holds a single format, but {len(self.format)} are given")
        if self.out and is_url(self.out):
            raise ValueError(f"out={self.out}: an export is written to a local folder; copy it from there")


def format_named(name: str) -> Format:
    """Imports and returns a format by its key in `config.named_values.EXPORT_FORMATS`; KeyError for another name."""
    module, _, value = EXPORT_FORMATS[name].partition(":")
    found: Format = getattr(importlib.import_module(module), value)
    return found
