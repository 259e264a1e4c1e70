"""The formats of `export`: each writes its files into a folder, reads them again and says what it found."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tpu_kit.assets.embedded import model_dir
from tpu_kit.config.loader import ModelConfig, TrainConfig
from tpu_kit.exporting import gguf
from tpu_kit.exporting.equivalence import Check, compare, compare_llama_cpp, logits, reload, run_llama_cpp
from tpu_kit.exporting.options import DTYPES
from tpu_kit.generation.prompts import stop_ids
from tpu_kit.generation.service import ADAPTER_FILES
from tpu_kit.models.loading import load_base

HERE = "path/of/this/folder"  # in texts that travel with the files
BYTES = {"fp32": 4.0, "bf16": 2.0, "f16": 2.0, "q8_0": 34 / 32}  # of a weight


@dataclass
class Work:
    """What the formats share: the tuned model in fp32 on the CPU, and what it says.

    Attributes:
        config: the run.
        run_dir: its folder.
        part: where the files go.
        dtype: of merged weights, a key of `DTYPES`.
        base_id: the base model's name on the hub, if it has one.
        model: with its adapter, until it is merged.
        tokenizer: the run's.
        prompts: chats up to the answer, as token ids.
        whole: the same with the tuned model's answers, where the run kept them.
        texts: the questions alone.
        tuned: logits of `whole`.
        effect: mean difference of those from the base model's.
    """

    config: TrainConfig
    run_dir: Path
    part: Path
    dtype: str
    base_id: str | None
    model: Any
    tokenizer: Any
    prompts: list[list[int]]
    whole: list[list[int]]
    texts: list[str]
    tuned: list[torch.Tensor]
    effect: float

    @property
    def causal(self) -> Any:
        """The model of transformers, without PEFT's wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def stops(self) -> list[int]:
        """Ids of the tokens that end an answer."""
        return sorted(stop_ids(self.causal, self.tokenizer))


Parts = tuple[str, list[Check], list[str], str]  # what it is, what was checked, what else to know, how to use it


def _accept(check: Check) -> Check:
    if check.problems:
        raise ValueError(f"the export is not the tuned model ({check.by}): {'; '.join(check.problems)}. It was removed")
    return check


def adapter(work: Work) -> Parts:
    """The adapter for PEFT, naming its base model as others find it."""
    source = work.run_dir / "adapter"
    if not (source / ADAPTER_FILES[0]).is_file():
        raise ValueError(f"{source} is a whole model, as lora.r=0 trains: format=merged exports it")
    shutil.copytree(source, work.part, dirs_exist_ok=True)
    model = work.config.model
    named = work.base_id or model.name
    path = work.part / ADAPTER_FILES[0]
    settings = json.loads(path.read_text()) | {"base_model_name_or_path": named, "revision": model.revision}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True))
    place = _base_arguments(model)
    check = _accept(compare(work.tuned, reload(work.part, work.whole, place), work.effect, "fp32", "PEFT, on the base"))
    notes = []
    if not work.base_id:
        notes.append(
            f"the base model {Path(model.name).name} has no name on the hub: give base=owner/name to share this"
        )
    use = (
        "```python\nfrom peft import AutoPeftModelForCausalLM\n"
        f'model = AutoPeftModelForCausalLM.from_pretrained("{HERE}")\n```'
    )
    return "a LoRA adapter", [check], notes, use


def _merge(work: Work) -> Check:
    """Makes `work.model` the merged one, in fp32."""
    if hasattr(work.model, "merge_and_unload"):
        work.model = work.model.merge_and_unload(safe_merge=True)
    check = compare(work.tuned, logits(work.model, work.whole), work.effect, "fp32", "merged in fp32, in memory")
    return _accept(check)


def _save(work: Work, folder: Path, dtype: torch.dtype) -> None:
    """Writes the merged model with its tokenizer; a cast copies the weights one by one."""
    work.model.generation_config.eos_token_id = work.stops or None
    _save_model(work.model, work.tokenizer, folder, dtype)
    _check_tokenizer(folder, work.tokenizer, work.texts)


def merged(work: Work, format: str) -> Parts:
    """A folder for transformers, or for vLLM with the command that serves it."""
    checks = [_merge(work)]
    _save(work, work.part, getattr(torch, DTYPES[work.dtype]))
    found = reload(work.part, work.whole)
    checks.append(_accept(compare(work.tuned, found, work.effect, work.dtype, f"transformers, from {work.dtype}")))
    if format == "merged":
        use = (
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
            f'model = AutoModelForCausalLM.from_pretrained("{HERE}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{HERE}")\n```'
        )
        return f"merged weights in {work.dtype}", checks, [], use
    options = f"--served-model-name {_plain_name(work.config.run_name)} --dtype {DTYPES[work.dtype]}"
    (work.part / "serve.sh").write_text(f'#!/bin/sh\nexec vllm serve "$(dirname "$0")" {options} "$@"\n')
    (work.part / "serve.sh").chmod(0o755)
    command = f"vllm serve {HERE} {options}"
    notes = [f"serve it with: {command}", "vLLM itself was not run: its files were read by transformers"]
    return f"merged weights in {work.dtype} for vLLM", checks, notes, f"```sh\n{command}\n```"


def gguf_model(work: Work, outtype: str, tools: Path) -> Parts:
    """One GGUF file and a Modelfile; each weight is rounded once, from fp32."""
    checks = [_merge(work)]
    scratch = work.part / "fp32"
    _save(work, scratch, torch.float32)
    target = work.part / f"{_plain_name(work.config.run_name)}-{outtype}.gguf"
    gguf.convert_model(scratch, target, outtype, tools)
    shutil.rmtree(scratch)
    stops = [work.tokenizer.convert_ids_to_tokens(id_) for id_ in work.stops]
    text = modelfile(target.name, stops, work.config.data.system_prompt)
    (work.part / "Modelfile").write_text(text)
    found, notes = _in_llama_cpp(work, target, outtype, None)
    notes.append("Ollama was not run: it takes that of its own templates which is nearest to the file's chat template")
    use = f"```sh\nllama-server -m {target.name} --jinja\nollama create {work.config.run_name} -f Modelfile\n```"
    return f"merged weights as GGUF ({outtype})", checks + found, notes, use


def gguf_adapter(work: Work, tools: Path) -> Parts:
    """The adapter as GGUF, and a Modelfile; tried on the base model in f16."""
    source = work.run_dir / "adapter"
    if not (source / ADAPTER_FILES[0]).is_file():
        raise ValueError(f"{source} is a whole model, as lora.r=0 trains: format=gguf-f16 exports it")
    scratch = work.part / "base"
    base = load_base(replace(work.config.model, trust_remote_code=False), torch.float32)
    _save_model(base, work.tokenizer, scratch, torch.float32)
    target = work.part / f"{_plain_name(work.config.run_name)}-lora-f16.gguf"
    gguf.convert_adapter(source, scratch, target, tools)
    plain = scratch / "base.gguf"
    if _has_llama_cpp():
        gguf.convert_model(scratch, plain, "f16", tools)
    found, notes = _in_llama_cpp(work, plain, "f16", target)
    shutil.rmtree(scratch)
    stops = [work.tokenizer.convert_ids_to_tokens(id_) for id_ in work.stops]
    text = modelfile("base.gguf", stops, work.config.data.system_prompt, target.name)
    (work.part / "Modelfile").write_text(text)
    notes.append("the Modelfile expects the base model's own GGUF file beside it, as base.gguf")
    use = f"```sh\nllama-server -m base.gguf --lora {target.name} --jinja\n```"
    return "a LoRA adapter as GGUF", found, notes, use


def modelfile(source: str, stops: Sequence[str], system_prompt: str | None, adapter: str = "") -> str:
    """The text of an Ollama Modelfile, without a chat template: Ollama chooses one by the template in the GGUF file.

    Args:
        source: the GGUF file beside it.
        stops: tokens that end an answer.
        system_prompt: what training put before each chat.
        adapter: the GGUF file of a LoRA adapter, if `source` is its base model.
    """
    lines = [f"FROM ./{source}", *([f"ADAPTER ./{adapter}"] if adapter else [])]
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    lines += [f'SYSTEM """{system_prompt}"""'] if system_prompt else []
    return "\n".join(lines) + "\n"


def _has_llama_cpp() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def _in_llama_cpp(work: Work, model: Path, stored: str, adapter: Path | None) -> tuple[list[Check], list[str]]:
    """Loads the file in llama.cpp, where that is installed."""
    if not _has_llama_cpp():
        return [], ["not loaded in llama.cpp, which is not installed here: pip install xllamacpp, and export again"]
    said = run_llama_cpp(model, work.prompts, work.texts, adapter)
    check = _accept(compare_llama_cpp(work.model, work.prompts, said.answers, work.effect, stored))
    own = [len(work.tokenizer(text)["input_ids"]) for text in work.texts]
    if own != said.lengths:
        raise ValueError(
            f"llama.cpp makes {said.lengths} tokens of texts of which the tokenizer makes {own}: it would read other "
            "tokens than the model was trained with. It was removed"
        )
    return [check], [f"llama.cpp's own tokenizer makes as many tokens of {len(own)} texts as transformers' does"]


# -------------------------------------------------------------------------------------------- model folders


def _plain_name(name: str) -> str:
    """A run's name as a file's."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"


def _base_arguments(config: ModelConfig) -> dict[str, Any]:
    """What transformers' own `from_pretrained` loads the base model with."""
    name = str(model_dir()) if config.name == "embedded" else config.name
    found = {"pretrained_model_name_or_path": name, "revision": config.revision, "gguf_file": config.gguf_file}
    return {option: value for option, value in found.items() if value}


def _save_model(model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
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


def _check_tokenizer(folder: Path, tokenizer: Any, texts: Sequence[str]) -> None:
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
