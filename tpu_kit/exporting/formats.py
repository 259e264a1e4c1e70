"""The formats of transformers, PEFT and vLLM: a folder, which is read again and compared with the tuned model."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tpu_kit.config.loader import ModelConfig
from tpu_kit.exporting.equivalence import LogitComparison, compare, logits, reload
from tpu_kit.exporting.options import DTYPES
from tpu_kit.exporting.streaming import StreamedModel
from tpu_kit.exporting.tuned_model import HERE, Format, TunedModel, Written, accept, adapter_of
from tpu_kit.exporting.vllm.check import RANKS, Served, check_in_vllm
from tpu_kit.model.base_model import base_model
from tpu_kit.model.causal_lm import cast
from tpu_kit.model.families import experts
from tpu_kit.model.weights.saved_adapter import ADAPTER_FILES
from tpu_kit.model.weights.source import EMBEDDED, locate
from tpu_kit.model.weights.trained_embeddings import described, untie

_PROCESSOR_FILES = ("PROCESSOR_NAME", "IMAGE_PROCESSOR_NAME", "VIDEO_PROCESSOR_NAME", "FEATURE_EXTRACTOR_NAME",
                    "AUDIO_TOKENIZER_NAME")  # fmt: skip  # of transformers.utils


def adapter(tuned: TunedModel) -> Written:
    """Copies the run's adapter for PEFT to `tuned.part`, with its base model's name, generation config and processor.

    Compares it on the base in PEFT, and in vLLM as `check_in_vllm`. Raises ValueError for a whole model, or if the
    results differ from the tuned model's; also as `reload` and `check_in_vllm`.
    """
    source = adapter_of(tuned, "merged")
    shutil.copytree(source, tuned.part, dirs_exist_ok=True)
    model = tuned.config.model
    named = tuned.base_id or model.name
    path = tuned.part / ADAPTER_FILES[0]
    settings = json.loads(path.read_text()) | {"base_model_name_or_path": named, "revision": model.revision}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True))
    rules = copy.deepcopy(base_model(tuned.model).generation_config)  # servers read the end tokens from it
    rules.eos_token_id = tuned.stops or None
    rules.save_pretrained(tuned.part)
    unfetched = copy_processor(model, tuned.part)
    base = {"revision": model.revision, "gguf_file": model.gguf_file} | {
        "pretrained_model_name_or_path": locate(model) if model.name in EMBEDDED else model.name
    }
    exported = reload(tuned.part, tuned.whole, {option: value for option, value in base.items() if value})
    check = accept(compare(tuned.logits, exported, tuned.effect, "fp32", "PEFT, on the base"))
    unnamed = f"the base model {Path(model.name).name} has no name on the hub: give base=owner/name to share this"
    notes = unfetched + ([] if tuned.base_id else [unnamed])
    if (note := _other_class(tuned)) is not None:
        notes.append(note)
    check_of_vllm, told = _in_vllm(tuned, settings, named)
    notes += told
    use = (
        "```python\nfrom peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n"
        f'model = AutoPeftModelForCausalLM.from_pretrained("{HERE}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{HERE}")\n```'
    )
    if model.images:
        use = (
            "```python\nfrom peft import PeftModel\n"
            "from transformers import AutoModelForImageTextToText, AutoProcessor\n"
            f'model = AutoModelForImageTextToText.from_pretrained("{named}")\n'
            f'model = PeftModel.from_pretrained(model, "{HERE}")\n'
            f'processor = AutoProcessor.from_pretrained("{HERE}")\n```'
        )
    return Written("a LoRA adapter", [check, *check_of_vllm], notes, use)


def _other_class(tuned: TunedModel) -> str | None:
    """Returns a note on the adapter's model class if config.json of the base names a different class."""
    loaded = type(base_model(tuned.model)).__name__
    named = next(iter(_settings(tuned.config.model).get("architectures") or ()), loaded)
    if named == loaded:
        return None
    return (
        f"PEFT loads it on {loaded}, as AutoPeftModelForCausalLM does, but not on {named}, which the base's "
        "config.json names: that class names its layers otherwise, and PEFT would warn and ignore the adapter"
    )


def _in_vllm(tuned: TunedModel, settings: Mapping[str, Any], base: str) -> tuple[list[LogitComparison], list[str]]:
    """Compares an adapter in vLLM, and notes the command that serves it; see `check_in_vllm`.

    Args:
        tuned: the run.
        settings: the content of adapter_config.json.
        base: the base model's name on the hub, or its folder.

    Returns:
        Comparisons, none if vLLM is not run, and notes; only a note if vLLM does not take such adapters.
    """
    rank = max([settings["r"], *(settings.get("rank_pattern") or {}).values()])
    gateless = not all(part.has_gate for _, part in experts.modules_of(tuned.model))
    reasons = {
        "adapters with DoRA": settings.get("use_dora"),
        f"adapters with {' and '.join(described(settings))}": described(settings),
        "adapters on a base in a GGUF file": tuned.config.model.gguf_file,
        f"adapters of a rank above {RANKS[-1]} (this adapter has {rank})": rank > RANKS[-1],
        "adapters of experts without gates in PEFT's layout": tuned.config.lora.experts and gateless,
    }  # fmt: skip
    if refused := [reason for reason, holds in reasons.items() if holds]:
        return [], [f"vLLM takes no {' and no '.join(refused)}: export format=vllm"]
    model = tuned.config.model
    engine: dict[str, Any] = {"revision": model.revision} if model.revision else {}
    engine |= {"tokenizer": HERE, "generation_config": HERE, "dtype": DTYPES[tuned.dtype], "enable_lora": True}
    engine |= {"max_lora_rank": next(size for size in RANKS if size >= rank)}
    request: dict[str, Any] = {}
    if tuned.config.lora.experts:  # PEFT's layout has their gates and ups in one tensor
        engine, request = engine | {"enable_mixed_moe_lora_format": True}, {"is_3d_lora_weight": True}
    embedded = model.name in EMBEDDED  # the folder depends on where the kit is installed
    folder = "$(python -c 'from tpu_kit.assets.embedded import model_dir; print(model_dir())')"
    served = Served(folder if embedded else base, tuned.config.served_name, engine, request)
    checks, notes = check_in_vllm(tuned, served, locate(model) if embedded else model.name)
    return checks, [f"vLLM serves it on its base with: {served.command}", *notes]


def merge(tuned: TunedModel) -> LogitComparison:
    """Replaces `tuned.model` by the model with its adapter merged in fp32; a whole model stays as it is.

    For a streamed model, it sets `tuned.streamed.merging`: adapters are merged when weights are read. Returns the
    comparison of the merged logits with `tuned.logits`; raises ValueError if they are not within its limits.
    """
    if tuned.streamed:
        tuned.streamed.merging = True
    elif hasattr(tuned.model, "merge_and_unload"):
        untie(tuned.model)
        tuned.model = tuned.model.merge_and_unload(safe_merge=True)
    check = compare(tuned.logits, logits(tuned.model, tuned.whole), tuned.effect, "fp32", "merged in fp32, in memory")
    return accept(check)


def save_merged(tuned: TunedModel, folder: Path, dtype: torch.dtype) -> None:
    """Writes the model and its tokenizer to `folder` by `save_model`, with the end tokens `tuned.stops`.

    `merge` must have merged the model. The written weights have the type `dtype`; a model that is not streamed is cast
    in place. Raises ValueError if the written tokenizer, when it is read again, has another chat template, or makes
    other tokens of `tuned.texts`.
    """
    from transformers import AutoTokenizer

    base_model(tuned.model).generation_config.eos_token_id = tuned.stops or None
    save_model(tuned.streamed or tuned.model, tuned.tokenizer, folder, dtype)
    saved, texts = AutoTokenizer.from_pretrained(folder), tuned.texts
    same = saved(texts)["input_ids"] == tuned.tokenizer(texts)["input_ids"]
    if not same or saved.chat_template != tuned.tokenizer.chat_template:
        raise ValueError("the saved tokenizer differs when it is read again: other tokens, or another chat template")


def merged(tuned: TunedModel) -> Written:
    """Merges the model (`merge`), and writes it in `tuned.dtype` for transformers to `tuned.part`.

    A model with parts for images or sound gets the base's processor files. Raises ValueError as `merge`, `save_merged`
    and `reload`, or if the written model's logits differ from the tuned model's.
    """
    checks, notes = _write_merged(tuned)
    use = (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f'model = AutoModelForCausalLM.from_pretrained("{HERE}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{HERE}")\n```'
    )
    if tuned.config.model.images:
        use = use.replace("AutoModelForCausalLM", "AutoModelForImageTextToText")
        use = use.replace("AutoTokenizer", "AutoProcessor").replace("tokenizer =", "processor =")
    return Written(f"merged weights in {tuned.dtype}", checks, notes, use)


def for_vllm(tuned: TunedModel) -> Written:
    """Writes a folder as `merged`, compares it as `check_in_vllm` too, and notes the command that serves it.

    Raises ValueError as `merged` and `check_in_vllm`. If vLLM is not found, a note replaces the comparison.
    """
    checks, notes = _write_merged(tuned)
    served = Served(HERE, tuned.config.served_name, {"dtype": DTYPES[tuned.dtype]})
    compared, told = check_in_vllm(tuned, served)
    notes += [f"serve it with: {served.command}", *told]
    use = f"```sh\n{served.command}\n```"
    return Written(f"merged weights in {tuned.dtype} for vLLM", checks + compared, notes, use)


def _write_merged(tuned: TunedModel) -> tuple[list[LogitComparison], list[str]]:
    """Merges the model and writes it to `tuned.part`; returns comparisons, and a note if the hub was not reached.

    Raises ValueError if the merged or the written model is not the tuned model.
    """
    checks = [merge(tuned)]
    save_merged(tuned, tuned.part, getattr(torch, DTYPES[tuned.dtype]))
    whole = reads_more_than_text(base_model(tuned.model))
    unfetched = copy_processor(tuned.config.model, tuned.part) if whole else []
    exported = reload(tuned.part, tuned.whole)
    by, mixture = f"transformers, from {tuned.dtype}", any(True for _ in experts.modules_of(tuned.model))
    checks.append(accept(compare(tuned.logits, exported, tuned.effect, tuned.dtype, by, mixture)))
    return checks, unfetched


ADAPTER = Format(adapter, 0.0, on_base=True, keeps_head=True, relation="adapter")
MERGED = Format(merged)
VLLM = Format(for_vllm)


# -------------------------------------------------------------------------------------------- model folders


def reads_more_than_text(model: Any) -> bool:
    """Returns whether a model has parts for images or sound."""
    decoder = {*model.get_decoder().modules(), model.get_output_embeddings()}
    return any(isinstance(part, torch.nn.Linear) and part not in decoder for part in model.modules())


def _settings(model: ModelConfig) -> dict[str, Any]:
    """Returns a base model's config.json unchanged, without running its code; empty if it cannot be read."""
    from transformers import PretrainedConfig

    with contextlib.suppress(OSError, ValueError):
        return dict(PretrainedConfig.get_config_dict(locate(model), revision=model.revision)[0])
    return {}


def copy_processor(model: ModelConfig, folder: Path) -> list[str]:
    """Copies the base model's processor files, with which transformers prepares images and sound, to `folder`.

    Files that the base does not have are skipped. A model that reads text alone has none. Raises nothing if a file
    cannot be fetched.

    Returns:
        A list with a note if a file could not be fetched or copied; else an empty list.
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
            if isinstance(error, FileNotFoundError):  # not in the cache, and the hub is not reachable
                return [
                    f"the files of the base's processor, such as {file}, are not in the hub's cache: copy them here"
                ]
        except OSError as error:
            return [f"the files of the base's processor could not be fetched ({error}): copy them here"]
    return []


def save_model(model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Writes a model in `dtype`, generation config, tokenizer and chat template to `folder`, also for transformers 4.

    A `StreamedModel` is saved merged if `merging` is set; a model of transformers is cast in place. Version 5 renamed
    some settings, and version 4 ignores the new names: the rotary base (rope_theta) of Qwen2.5 would be 100 times too
    small. So the files have both names.
    """
    if isinstance(model, StreamedModel):
        model.save(folder, dtype)
    else:
        cast(model, dtype)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors makes them readable only for the owner
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
    for name in ("is_local", "local_files_only"):  # they describe how it was read
        settings.pop(name, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False))
