"""The formats of llama.cpp and Ollama: a GGUF file and a Modelfile, compared in llama.cpp if it is installed.

A model that was trained with images gets a second file for its vision part; see `projector`.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tpu_kit.exporting import projector
from tpu_kit.exporting.converter import archive_at_hand, convert_adapter, convert_model, converter
from tpu_kit.exporting.equivalence import LogitComparison, compare_answers, run_llama_cpp
from tpu_kit.exporting.formats import merge, save_merged, save_model
from tpu_kit.exporting.streaming import stream
from tpu_kit.exporting.tuned_model import HERE, Format, TunedModel, Written, accept, adapter_of
from tpu_kit.model.base_model import base_model
from tpu_kit.model.families import experts
from tpu_kit.model.weights.loading import load_base


def _refuse_experts(tuned: TunedModel) -> None:
    """Raises ValueError if the model is a mixture of experts."""
    family = base_model(tuned.model).config.model_type
    if any(True for _ in experts.modules_of(tuned.model)):
        raise ValueError(
            f"no GGUF file of {family}, a mixture of experts, was compared with its model: use format=merged"
        )


def write_model(tuned: TunedModel, outtype: str) -> Written:
    """Merges the model (`merge`), and writes it as GGUF ("f16", "bf16" or "q8_0", rounded from fp32) with a Modelfile.

    All files go to `tuned.part`: `<served_name>-<outtype>.gguf`, and a second file for the vision part if the run has
    images. If llama.cpp is installed, its answers are compared. Raises ValueError for a mixture, if the merged logits
    or the answers differ from the tuned model's; also as `projector.refuse`, `converter` and `convert_model`.
    """
    _refuse_experts(tuned)
    sees = tuned.config.model.images
    if sees:
        projector.refuse(tuned, _has_llama_cpp())
    checks = [merge(tuned)]
    scratch = tuned.part / "fp32"
    save_merged(tuned, scratch, torch.float32)
    target = tuned.part / f"{tuned.config.served_name}-{outtype}.gguf"
    with converter() as tools:
        if sees:
            projector.complete_settings(scratch)
        convert_model(scratch, target, outtype, tools)
        seeing = projector.write(tuned, scratch, outtype, tools) if sees else None
    shutil.rmtree(scratch)
    _write_modelfile(tuned, target.name, projector=seeing.file.name if seeing else "")
    more, notes = _in_llama_cpp(tuned, target, outtype)
    checks += more
    if seeing:
        notes.append(seeing.note)
        more, told = projector.compare_pictures(tuned, target, seeing.file) if _has_llama_cpp() else ([], [])
        checks, notes = checks + more, notes + told
    near = "its own template that is nearest to the file's chat template"
    notes.append(f"Ollama was not run: it uses {near if tuned.tokenizer.chat_template else 'the prompt as it is'}")
    options = projector.server_options(tuned, f"{HERE}/{seeing.file.name}") if seeing else ""
    name = tuned.config.served_name
    use = f"llama-server -m {HERE}/{target.name}{options} --jinja\nollama create {name} -f {HERE}/Modelfile"
    return Written(f"merged weights as GGUF ({outtype})", checks, notes, f"```sh\n{use}\n```")


def write_adapter(tuned: TunedModel) -> Written:
    """Writes the adapter as GGUF (`<served_name>-lora-f16.gguf`), and a Modelfile for it on base.gguf, to `tuned.part`.

    If llama.cpp is installed, compares its answers on the base model in f16; that file is deleted afterwards, so the
    user adds base.gguf. Raises ValueError for a whole model, a mixture, trained weights of the vision part, if the
    comparison fails, or as `converter`, `convert_adapter` and `convert_model`.
    """
    source, sees = adapter_of(tuned, "gguf-f16"), tuned.config.model.images
    _refuse_experts(tuned)
    if sees and tuned.config.lora.vision:
        raise ValueError(
            "GGUF adapters hold no weights of the vision part, but lora.vision=true trained some: export the merged "
            "model (gguf-f16), or format=adapter for PEFT"
        )
    scratch = tuned.part / "base"
    settings = replace(tuned.config.model, trust_remote_code=False)
    base = stream(settings) or load_base(settings, torch.float32)
    save_model(base, tuned.tokenizer, scratch, torch.float32)
    if sees:
        projector.complete_settings(scratch)
    target = tuned.part / f"{tuned.config.served_name}-lora-f16.gguf"
    plain = scratch / "base.gguf"
    with converter() as tools:
        convert_adapter(source, scratch, target, tools)
        if _has_llama_cpp():
            convert_model(scratch, plain, "f16", tools)
    more, notes = _in_llama_cpp(tuned, plain, "f16", target)
    shutil.rmtree(scratch)
    _write_modelfile(tuned, "base.gguf", target.name)
    notes.append("the Modelfile expects the base model's own GGUF file beside it, as base.gguf")
    if sees:
        notes.append("for pictures add the base model's own mmproj file; the adapter was compared on text alone")
    options = projector.server_options(tuned, "mmproj-base.gguf") if sees else ""
    use = f"```sh\nllama-server -m base.gguf{options} --lora {HERE}/{target.name} --jinja\n```"
    return Written("a LoRA adapter as GGUF", more, notes, use)


def _write_modelfile(tuned: TunedModel, source: str, adapter: str = "", projector: str = "") -> None:
    """Writes Modelfile into `tuned.part`; the arguments are file names, as in `modelfile`."""
    stops = [tuned.tokenizer.convert_ids_to_tokens(token) for token in tuned.stops]
    text = modelfile(source, stops, tuned.config.data.system_prompt, adapter, projector)
    (tuned.part / "Modelfile").write_text(text)


def modelfile(
    source: str, stops: Sequence[str], system_prompt: str | None, adapter: str = "", projector: str = ""
) -> str:
    """Returns the text of an Ollama Modelfile. Ollama picks its template nearest to the GGUF file's chat template.

    Args:
        source: name of the GGUF file in the same folder.
        stops: texts of the tokens that end an answer.
        system_prompt: the system prompt of training; None or "": none. If it contains three quotes, a comment replaces
            it.
        adapter: name of the GGUF file of a LoRA adapter, if `source` is its base model; empty: none.
        projector: name of the GGUF file of the vision part, which Ollama takes as a second source; empty: none.
    """
    lines = [f"FROM ./{source}", *([f"FROM ./{projector}"] if projector else [])]
    lines += [f"ADAPTER ./{adapter}"] if adapter else []
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    if system_prompt and '"""' in system_prompt:
        lines.append('# No SYSTEM: Ollama would end the system prompt at its """. Send it with every request')
    elif system_prompt:
        lines.append(f'SYSTEM """{system_prompt}"""')
    return "\n".join(lines) + "\n"


def _has_llama_cpp() -> bool:
    """Whether xllamacpp, llama.cpp's Python package, is installed."""
    return importlib.util.find_spec("xllamacpp") is not None


def _in_llama_cpp(
    tuned: TunedModel, model: Path, stored: str, adapter: Path | None = None
) -> tuple[list[LogitComparison], list[str]]:
    """Compares the file's answers and its counts of tokens in llama.cpp; returns ([comparison], notes).

    If llama.cpp is not installed, returns ([], [note]). `model` is the file, of the base model if `adapter` is a file.
    Raises ValueError if the answers exceed the limits of `stored`, the file's type, or the counts differ.
    """
    if not _has_llama_cpp():
        return [], ["not checked in llama.cpp, which is not installed: pip install xllamacpp, and export again"]
    prompts = projector.without_pictures(tuned) if tuned.config.model.images else tuned.prompts
    answers, lengths = run_llama_cpp(model, prompts, tuned.texts, adapter)
    check = accept(compare_answers(tuned.model, prompts, answers, tuned.effect, stored))
    counts = [len(tuned.tokenizer(text)["input_ids"]) for text in tuned.texts]
    if counts != lengths:
        raise ValueError(
            f"llama.cpp makes {lengths} tokens of texts of which the tokenizer makes {counts}: the model was trained "
            "with other tokens. The export was removed; use format=merged"
        )
    return [check], [f"the tokenizers of llama.cpp and transformers make equally many tokens of {len(counts)} texts"]


_FP32 = 4  # bytes per weight in the folder that the converter reads

F16 = Format(partial(write_model, outtype="f16"), _FP32 + 2, prepare=archive_at_hand)
BF16 = Format(partial(write_model, outtype="bf16"), _FP32 + 2, prepare=archive_at_hand)
Q8_0 = Format(partial(write_model, outtype="q8_0"), _FP32 + 34 / 32, relation="quantized", prepare=archive_at_hand)
# The base is compared in f16.
LORA = Format(write_adapter, _FP32 + 2, on_base=True, relation="adapter", prepare=archive_at_hand)
