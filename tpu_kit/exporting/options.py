"""The options of an export; importing them loads no torch."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_kit.config.fields import knob
from tpu_kit.machine.storage.object_store import is_url

if TYPE_CHECKING:
    from tpu_kit.exporting.tuned_model import Format

FORMATS = {
    "adapter": "tpu_kit.exporting.formats:ADAPTER",
    "merged": "tpu_kit.exporting.formats:MERGED",
    "vllm": "tpu_kit.exporting.formats:VLLM",
    "gguf-f16": "tpu_kit.exporting.gguf:F16",
    "gguf-bf16": "tpu_kit.exporting.gguf:BF16",
    "gguf-q8_0": "tpu_kit.exporting.gguf:Q8_0",
    "gguf-lora": "tpu_kit.exporting.gguf:LORA",
}
"""Each format and the `tuned_model.Format` that writes it; a new one is a line here and an object there."""
DTYPES = {"bf16": "bfloat16", "f16": "float16", "fp32": "float32"}  # their names in torch


@dataclass(frozen=True)
class ExportOptions:
    """How a run is exported.

    Raises:
        ValueError: the format or the dtype is unknown, a package is missing, or the place cannot be written to.
    """

    format: str = knob(
        "merged",
        f"{', '.join([*FORMATS][:-1])} or {[*FORMATS][-1]}. GGUF needs the extra tpu_kit[export], and a tokenizer that "
        "llama.cpp knows; the tokenizer of the embedded model is not one.",
    )
    out: str | None = knob(None, "The folder; null = RUN_DIR/export/FORMAT. An earlier export there is replaced.")
    dtype: str = knob("bf16", f"The type of merged weights: {', '.join(DTYPES)}.")
    base: str | None = knob(None, "The base model's name on the hub, if training read it from a folder.")
    push: str | None = knob(None, "The repository on the Hugging Face hub to push the export to, such as ann/my-model.")
    private: bool = knob(True, "Whether a repository that push creates is private.")

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format}: there are {', '.join(FORMATS)}")
        if self.format.startswith("gguf") and importlib.util.find_spec("sentencepiece") is None:
            raise ValueError(
                f"format={self.format} needs llama.cpp's converter, which needs sentencepiece: pip install "
                "sentencepiece xllamacpp (the extra tpu_kit[export]; the second checks what was written)"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype}: there are {', '.join(DTYPES)}")
        if self.out and is_url(self.out):
            raise ValueError(f"out={self.out}: an export is written to a local folder; copy it from there")


def format_named(name: str) -> Format:
    """Returns a format of `FORMATS`."""
    module, _, value = FORMATS[name].partition(":")
    found: Format = getattr(importlib.import_module(module), value)
    return found
