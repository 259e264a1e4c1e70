"""Writes the formats of `export` into a folder, reads the files again and compares them with the tuned model.

llama.cpp's own converter makes the GGUF files. llama.cpp publishes no package of it; the source archive of
llama_cpp_python holds it, with the gguf library of the same commit. pip fetches the pinned archive once into the user's
cache. Its SHA-256 is checked before every use.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tpu_kit.assets.embedded import model_dir
from tpu_kit.config.loader import ModelConfig, TrainConfig
from tpu_kit.distributed.child_process import run_child
from tpu_kit.exporting.equivalence import Check, compare, compare_llama_cpp, logits, reload, run_llama_cpp
from tpu_kit.exporting.options import DTYPES
from tpu_kit.exporting.streaming import StreamedModel, stream
from tpu_kit.model.base_model import base_model
from tpu_kit.model.causal_lm import cast
from tpu_kit.model.families import experts
from tpu_kit.model.loading import load_base
from tpu_kit.model.saved_adapter import ADAPTER_FILES
from tpu_kit.model.source import locate

HERE = "path/of/this/folder"  # in the texts beside the files, which may move
_PROCESSOR_FILES = ("PROCESSOR_NAME", "IMAGE_PROCESSOR_NAME", "VIDEO_PROCESSOR_NAME", "FEATURE_EXTRACTOR_NAME",
                    "AUDIO_TOKENIZER_NAME")  # fmt: skip  # of transformers.utils
BYTES = {"fp32": 4.0, "bf16": 2.0, "f16": 2.0, "q8_0": 34 / 32}  # per weight


@dataclass
class Work:
    """The tuned model in fp32, and its outputs, which all formats share.

    Attributes:
        config: the run.
        run_dir: its folder.
        part: the folder of the files.
        dtype: of merged weights, a key of `DTYPES`.
        base_id: the base model's name on the hub, if it has one.
        model: the tuned model, with its adapter until it is merged.
        streamed: what reads its weights from their files as it runs; None if it is in memory.
        tokenizer: of the run.
        prompts: token ids of chats up to the answer.
        whole: the same with the tuned model's answers, where the run kept them.
        texts: the questions alone.
        stops: ids of the tokens that end an answer.
        tuned: the tuned model's logits of `whole`.
        effect: mean difference between these and the base model's logits.
    """

    config: TrainConfig
    run_dir: Path
    part: Path
    dtype: str
    base_id: str | None
    model: Any
    streamed: StreamedModel | None
    tokenizer: Any
    prompts: list[list[int]]
    whole: list[list[int]]
    texts: list[str]
    stops: list[int]
    tuned: list[torch.Tensor]
    effect: float

    @property
    def name(self) -> str:
        """The run's name as a file name."""
        return re.sub(r"[^\w.-]+", "-", self.config.run_name).strip("-.") or "model"


Parts = tuple[str, list[Check], list[str], str]  # kind of export, checks, notes, how to use it


def _accept(check: Check) -> Check:
    if check.problems:
        raise ValueError(f"the export is not the tuned model ({check.by}): {'; '.join(check.problems)}. It was removed")
    return check


def _adapter_of(work: Work, instead: str) -> Path:
    source = work.run_dir / "adapter"
    if not (source / ADAPTER_FILES[0]).is_file():
        raise ValueError(f"{source} is a whole model, as lora.r=0 trains: format={instead} exports it")
    return source


def adapter(work: Work) -> Parts:
    """Writes the adapter for PEFT, with the public name of its base model."""
    source = _adapter_of(work, "merged")
    shutil.copytree(source, work.part, dirs_exist_ok=True)
    model = work.config.model
    named = work.base_id or model.name
    path = work.part / ADAPTER_FILES[0]
    settings = json.loads(path.read_text()) | {"base_model_name_or_path": named, "revision": model.revision}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True))
    unfetched = copy_processor(model, work.part)
    base = {"revision": model.revision, "gguf_file": model.gguf_file} | {
        "pretrained_model_name_or_path": str(model_dir()) if model.name == "embedded" else model.name
    }
    exported = reload(work.part, work.whole, {option: value for option, value in base.items() if value})
    check = _accept(compare(work.tuned, exported, work.effect, "fp32", "PEFT, on the base"))
    unnamed = f"the base model {Path(model.name).name} has no name on the hub: give base=owner/name to share this"
    notes = unfetched + ([] if work.base_id else [unnamed])
    if (note := _other_class(work)) is not None:
        notes.append(note)
    if work.config.lora.experts:
        notes.append(_adapters_of_experts_in_vllm(work))
    use = (
        "```python\nfrom peft import AutoPeftModelForCausalLM\n"
        f'model = AutoPeftModelForCausalLM.from_pretrained("{HERE}")\n```'
    )
    return "a LoRA adapter", [check], notes, use


def _other_class(work: Work) -> str | None:
    """Says for which class an adapter is, where config.json of the base names another one."""
    loaded = type(base_model(work.model)).__name__
    named = next(iter(_settings(work.config.model).get("architectures") or ()), loaded)
    if named == loaded:
        return None
    return (
        f"PEFT loads it on {loaded}, as AutoPeftModelForCausalLM does, and not on {named}, which the base's "
        "config.json names: its layers have other names, and PEFT would leave the adapter out with a warning"
    )


def _adapters_of_experts_in_vllm(work: Work) -> str:
    """Says how vLLM 0.33 serves PEFT's layout of adapters of experts, which it splits into those of gates and ups."""
    if not all(part.has_gate for _, part in experts.modules_of(work.model)):
        return "vLLM takes no adapters of experts without gates in PEFT's layout: export format=vllm"
    name = json.dumps({"name": work.name, "path": HERE, "is_3d_lora_weight": True})
    return (
        f"vLLM, which was not run, serves it on its base with --enable-lora --enable-mixed-moe-lora-format "
        f"--lora-modules '{name}'; format=vllm needs none of these"
    )


def _merge(work: Work) -> Check:
    if work.streamed:
        work.streamed.merging = True
    elif hasattr(work.model, "merge_and_unload"):
        work.model = work.model.merge_and_unload(safe_merge=True)
    check = compare(work.tuned, logits(work.model, work.whole), work.effect, "fp32", "merged in fp32, in memory")
    return _accept(check)


def _save(work: Work, folder: Path, dtype: torch.dtype) -> None:
    """Writes the merged model with its tokenizer; the cast copies the weights one by one."""
    from transformers import AutoTokenizer

    base_model(work.model).generation_config.eos_token_id = work.stops or None
    _save_model(work.streamed or work.model, work.tokenizer, folder, dtype)
    saved, texts = AutoTokenizer.from_pretrained(folder), work.texts
    same = saved(texts)["input_ids"] == work.tokenizer(texts)["input_ids"]
    if not same or saved.chat_template != work.tokenizer.chat_template:
        raise ValueError("the tokenizer has other tokens or another template after it was saved and read again")


def merged(work: Work, format: str) -> Parts:
    """Writes a folder for transformers, or for vLLM with the command that serves it."""
    checks = [_merge(work)]
    _save(work, work.part, getattr(torch, DTYPES[work.dtype]))
    whole = reads_more_than_text(base_model(work.model))
    unfetched = copy_processor(work.config.model, work.part) if whole else []
    exported = reload(work.part, work.whole)
    by, mixture = f"transformers, from {work.dtype}", any(True for _ in experts.modules_of(work.model))
    checks.append(_accept(compare(work.tuned, exported, work.effect, work.dtype, by, mixture)))
    if format == "merged":
        use = (
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
            f'model = AutoModelForCausalLM.from_pretrained("{HERE}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{HERE}")\n```'
        )
        return f"merged weights in {work.dtype}", checks, unfetched, use
    command = f"vllm serve {HERE} --served-model-name {work.name} --dtype {DTYPES[work.dtype]}"
    notes = [*unfetched, f"serve it with: {command}", "vLLM itself was not run: transformers read the files"]
    return f"merged weights in {work.dtype} for vLLM", checks, notes, f"```sh\n{command}\n```"


def _refuse_experts(work: Work) -> None:
    family = base_model(work.model).config.model_type
    if any(True for _ in experts.modules_of(work.model)):
        raise ValueError(
            f"no GGUF file of {family}, a mixture of experts, was compared with its model: use format=merged"
        )


def gguf_model(work: Work, outtype: str, tools: Path) -> Parts:
    """Writes one GGUF file and a Modelfile; each weight is rounded once, from fp32."""
    _refuse_experts(work)
    checks = [_merge(work)]
    scratch = work.part / "fp32"
    _save(work, scratch, torch.float32)
    target = work.part / f"{work.name}-{outtype}.gguf"
    convert_model(scratch, target, outtype, tools)
    shutil.rmtree(scratch)
    _write_modelfile(work, target.name)
    more, notes = _in_llama_cpp(work, target, outtype)
    near = "its own template that is nearest to the file's chat template"
    notes.append(f"Ollama was not run: it uses {near if work.tokenizer.chat_template else 'the prompt as it is'}")
    use = f"```sh\nllama-server -m {target.name} --jinja\nollama create {work.config.run_name} -f Modelfile\n```"
    return f"merged weights as GGUF ({outtype})", checks + more, notes, use


def gguf_adapter(work: Work, tools: Path) -> Parts:
    """Writes the adapter as GGUF and a Modelfile, and tries it on the base model in f16."""
    source = _adapter_of(work, "gguf-f16")
    _refuse_experts(work)
    scratch = work.part / "base"
    settings = replace(work.config.model, trust_remote_code=False)
    base = stream(settings) or load_base(settings, torch.float32)
    _save_model(base, work.tokenizer, scratch, torch.float32)
    target = work.part / f"{work.name}-lora-f16.gguf"
    convert_adapter(source, scratch, target, tools)
    plain = scratch / "base.gguf"
    if _has_llama_cpp():
        convert_model(scratch, plain, "f16", tools)
    more, notes = _in_llama_cpp(work, plain, "f16", target)
    shutil.rmtree(scratch)
    _write_modelfile(work, "base.gguf", target.name)
    notes.append("the Modelfile expects the base model's own GGUF file beside it, as base.gguf")
    use = f"```sh\nllama-server -m base.gguf --lora {target.name} --jinja\n```"
    return "a LoRA adapter as GGUF", more, notes, use


def _write_modelfile(work: Work, source: str, adapter: str = "") -> None:
    stops = [work.tokenizer.convert_ids_to_tokens(token) for token in work.stops]
    (work.part / "Modelfile").write_text(modelfile(source, stops, work.config.data.system_prompt, adapter))


def modelfile(source: str, stops: Sequence[str], system_prompt: str | None, adapter: str = "") -> str:
    """Returns the text of an Ollama Modelfile; Ollama chooses the chat template by the one in the GGUF file.

    Args:
        source: the GGUF file beside it.
        stops: tokens that end an answer.
        system_prompt: the system prompt of training.
        adapter: the GGUF file of a LoRA adapter, if `source` is its base model.
    """
    lines = [f"FROM ./{source}", *([f"ADAPTER ./{adapter}"] if adapter else [])]
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    if system_prompt and '"""' in system_prompt:
        lines.append('# No SYSTEM: Ollama would end the system prompt at its """. Send it in each request')
    elif system_prompt:
        lines.append(f'SYSTEM """{system_prompt}"""')
    return "\n".join(lines) + "\n"


def _has_llama_cpp() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def _in_llama_cpp(work: Work, model: Path, stored: str, adapter: Path | None = None) -> tuple[list[Check], list[str]]:
    """Loads the file in llama.cpp, if it is installed, and compares its answers."""
    if not _has_llama_cpp():
        return [], ["not checked in llama.cpp, which is not installed: pip install xllamacpp, and export again"]
    answers, lengths = run_llama_cpp(model, work.prompts, work.texts, adapter)
    check = _accept(compare_llama_cpp(work.model, work.prompts, answers, work.effect, stored))
    counts = [len(work.tokenizer(text)["input_ids"]) for text in work.texts]
    if counts != lengths:
        raise ValueError(
            f"llama.cpp makes {lengths} tokens of texts where the tokenizer makes {counts}: the model was trained "
            "with other tokens. The export was removed; use format=merged"
        )
    return [check], [f"the tokenizers of llama.cpp and transformers make as many tokens of {len(counts)} texts"]


# -------------------------------------------------------------------------------------------- model folders


def reads_more_than_text(model: Any) -> bool:
    """Whether a model has parts for images or sound."""
    decoder = {*model.get_decoder().modules(), model.get_output_embeddings()}
    return any(isinstance(part, torch.nn.Linear) and part not in decoder for part in model.modules())


def _settings(model: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of a base model as it is written; empty if it cannot be read. It runs no code."""
    from transformers import PretrainedConfig

    with contextlib.suppress(OSError, ValueError):
        return dict(PretrainedConfig.get_config_dict(locate(model), revision=model.revision)[0])
    return {}


def copy_processor(model: ModelConfig, folder: Path) -> list[str]:
    """Copies the files with which transformers prepares images and sound for a model, those that the base has.

    Returns:
        A note if the hub was not reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError
    from transformers import utils

    name = locate(model)
    if "text_config" not in _settings(model):  # it reads text alone
        return []
    for file in sorted({getattr(utils, constant) for constant in _PROCESSOR_FILES}):
        try:
            source = (
                Path(name) / file if Path(name).is_dir() else Path(hf_hub_download(name, file, revision=model.revision))
            )
            if source.is_file():
                shutil.copyfile(source, folder / file)
        except EntryNotFoundError as error:
            if isinstance(error, FileNotFoundError):  # it is not in the cache, and the hub cannot be asked
                return [
                    f"the files of the base's processor, such as {file}, are not in the hub's cache: copy them here"
                ]
        except OSError as error:
            return [f"the files of the base's processor could not be fetched ({error}): copy them here"]
    return []


def _save_model(model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Writes model, generation config, tokenizer and chat template so that transformers 4 reads them too.

    A model in memory is cast in place. transformers 5 renamed a few settings, and transformers 4 ignores the new names:
    the positions of Qwen2.5 would rotate 100 times too fast there.
    """
    if isinstance(model, StreamedModel):
        model.save(folder, dtype)
    else:
        cast(model, dtype)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors makes them readable for the owner alone
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
    for name in ("is_local", "local_files_only"):  # of the place where it was read
        settings.pop(name, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False))


# ------------------------------------------------------------------------------------------ the converter of llama.cpp

VERSION = "0.3.36"  # of llama_cpp_python
ARCHIVE = f"llama_cpp_python-{VERSION}.tar.gz"
ARCHIVE_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"

_INSIDE = "vendor/llama.cpp/"
_SCRIPTS = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "LICENSE")
_FOLDERS = ("conversion/", "gguf-py/gguf/")
_UNKNOWN_TOKENIZER = "BPE pre-tokenizer was not recognized"


@contextlib.contextmanager
def converter() -> Iterator[Path]:
    """Yields a folder with llama.cpp's converters while the body runs; fetches their archive if it is not in the cache.

    Raises:
        ValueError: the archive cannot be fetched, or its checksum is wrong.
    """
    archive = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tpu_kit" / ARCHIVE
    if not archive.is_file():
        _fetch(archive)
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != ARCHIVE_SHA256:
        raise ValueError(
            f"{archive} has the SHA-256 {digest} and should have {ARCHIVE_SHA256}: it is damaged or another version. "
            "Delete it and run this again"
        )
    with tempfile.TemporaryDirectory(prefix="llama.cpp-") as folder, tarfile.open(archive) as files:
        for member in files:
            name = member.name.partition(f"/{_INSIDE}")[2]
            if member.isfile() and (name in _SCRIPTS or name.startswith(_FOLDERS)):
                files.extract(member.replace(name=name), folder, filter="data")
        yield Path(folder)


def _fetch(archive: Path) -> None:
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


def convert_model(folder: Path, target: Path, outtype: str, tools: Path) -> None:
    """Writes a model that transformers saved, with its tokenizer, as GGUF in f16, bf16 or q8_0.

    Raises:
        ValueError: llama.cpp's converter refuses the model or its tokenizer.
    """
    command = [str(tools / "convert_hf_to_gguf.py"), str(folder), "--outfile", str(target), "--outtype", outtype]
    try:  # transformers leaves out the layers that predict further tokens, and the converter would expect them
        _run([*command, "--no-mtp"], target)
    except ValueError as error:
        if "--no-nextn are not supported for" not in str(error):
            raise
        _run(command, target)


def convert_adapter(adapter: Path, base: Path, target: Path, tools: Path) -> None:
    """Writes a LoRA adapter that PEFT saved as GGUF in f16; `base` has the base model's config and tokenizer.

    Raises:
        ValueError: GGUF cannot hold such an adapter, or the converter refuses it.
    """
    settings = json.loads((adapter / "adapter_config.json").read_text())
    if settings.get("use_dora"):
        raise ValueError("GGUF adapters cannot hold DoRA's magnitudes: export the merged model (gguf-f16)")
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
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1"}
    environment.pop("NO_LOCAL_GGUF", None)  # it selects another version of the gguf library
    done = run_child(arguments, environment)
    if _UNKNOWN_TOKENIZER in done.errors:
        raise ValueError(
            "llama.cpp does not know how this tokenizer splits a text into words, so a GGUF file would give other "
            "tokens than in training. Use format=merged (transformers) or format=vllm"
        )
    if done.status or not target.is_file():
        raise ValueError(f"llama.cpp's converter refuses the model: {' '.join(done.last_lines(4).split())}")
