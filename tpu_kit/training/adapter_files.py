"""Files of the trained weights: an adapter that PEFT loads or a whole model, and the objective's head.

`save_adapter` writes them after training; `start_from` loads the adapter that training starts from.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tpu_kit.config.loader import TrainConfig
from tpu_kit.data.chat.chat_encoding import Encoder
from tpu_kit.machine.storage import atomic
from tpu_kit.model.base_model import base_model
from tpu_kit.model.causal_lm import trainable_parameters
from tpu_kit.model.states_head import StatesHead, file_names, find_head, title
from tpu_kit.model.weights import base_identity
from tpu_kit.model.weights.saved_adapter import read_adapter
from tpu_kit.model.weights.source import EMBEDDED, locate, modules_left_out
from tpu_kit.model.weights.trained_embeddings import names_in_files, tied_names
from tpu_kit.training.state import set_parameters


def _own(trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of the model, without the objective's."""
    return {name: value for name, value in trained.items() if not name.startswith("objective.")}


def adapter_tensors(model: torch.nn.Module, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Makes the tensors of adapter_model.safetensors, under PEFT's names, without the objective's own.

    The frozen matrix of an embedding with LoRA is not included. PEFT writes it unless `save_embedding_layers=False`,
    and does not need it to load the file.

    Args:
        model: the `PeftModel`.
        trained: CPU tensors by the names of `trainable_parameters`, one tensor per layer (no stacks).
    """
    own = _own(trained)
    names = names_in_files(own)
    tensors = {names[name]: value.contiguous() for name, value in own.items()}
    return tensors | {second: tensors[first].clone() for first, second in tied_names(model).items()}


def adapter_settings(model: Any, config: TrainConfig) -> dict[str, Any]:
    """Returns the contents of adapter_config.json, ready for JSON: a `PeftModel`'s settings and the base's name.

    The keys are the fields of PEFT's configuration, with inference_mode=true. base_model_name_or_path is model.name, or
    the folder of an embedded model. PEFT matches a list of targets by the end of a module's name. If the run does not
    load the image or sound tower, matching modules of that tower are added to exclude_modules; it is None if empty.
    """
    settings = {**model.peft_config["default"].to_dict(), "inference_mode": True}
    targets = settings["target_modules"]
    if not isinstance(targets, str):
        ends = tuple(f".{target}" for target in targets or ())
        excluded = [name for name in modules_left_out(config.model) if f".{name}".endswith(ends)] if ends else []
        settings["exclude_modules"] = sorted({*(settings["exclude_modules"] or ()), *excluded}) or None
    name = config.model.name
    settings["base_model_name_or_path"] = locate(config.model) if name in EMBEDDED else name
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}


def result_files(
    model: Any, trained: Mapping[str, torch.Tensor], config: TrainConfig
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Returns two dictionaries by file name without suffix: tensors by name, and JSON documents.

    For an adapter the first has "adapter_model", the second "adapter_config". If `model.objective` is a `StatesHead`,
    both also have the head's `name`. A whole model (lora.r=0) has no adapter, so both have only the head's entry, or
    are empty. Arguments as in `save_adapter`.
    """
    files, documents = {}, {}
    if hasattr(model, "peft_config"):
        files["adapter_model"] = adapter_tensors(model, trained)
        documents["adapter_config"] = adapter_settings(model, config)
    if isinstance(head := getattr(model, "objective", None), StatesHead):
        files[head.name], documents[head.name] = head.files(trained)
    return files, documents


def tokenizer_to_save(encoder: Encoder) -> Any:
    """Returns the encoder's tokenizer or, after training on plain text, a copy of it without a chat template.

    No tool then prompts the trained model with a template that it was not trained on.
    """
    if encoder.layout.turns_by != "none":
        return encoder.tokenizer
    tokenizer = copy.copy(encoder.tokenizer)
    tokenizer.chat_template = None
    return tokenizer


def save_adapter(
    folder: Path,
    model: torch.nn.Module,
    trained: Mapping[str, torch.Tensor],
    config: TrainConfig,
    tokenizer: Any,
    base: base_identity.Identity | None = None,
) -> None:
    """Replaces a folder by the trained weights: an adapter that PEFT loads, or a whole model if lora.r=0.

    An adapter has the files of `result_files`; a whole model has model.safetensors and transformers' configurations. A
    `StatesHead` is saved too. PEFT and transformers cannot save tensors on XLA, so this takes CPU tensors.

    Args:
        folder: `<output_dir>/adapter`; keeps its old content if an error occurs.
        model: the replica's model, on any device; only its names and settings are used.
        trained: CPU tensors by the names of `trainable_parameters`, one tensor per layer (no stacks).
        config: the run.
        tokenizer: from `tokenizer_to_save`, saved beside the weights; None if the run needed no tokenizer.
        base: identity of the base weights, written to base.json; None if unknown.

    Raises:
        OSError: the files cannot be written; the message names the next action.
    """
    try:
        with atomic.replacing(folder) as part:
            part.mkdir(parents=True)
            _write(part, model, trained, config, tokenizer, base)
    except Exception as error:  # safetensors and tokenizers (Rust) report OS errors by other exception types
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        code = atomic.error_number(error)
        advice = f"free disk space or fix this error, and {config.again}: the checkpoints are complete"
        raise OSError(
            code, f"the trained weights could not be written to {folder} ({os.strerror(code)}): {advice}"
        ) from error


def _write(
    part: Path,
    model: torch.nn.Module,
    trained: Mapping[str, torch.Tensor],
    config: TrainConfig,
    tokenizer: Any,
    base: base_identity.Identity | None,
) -> None:
    """Writes the files into `part`, an empty folder; other arguments as in `save_adapter`. Raises errors unchanged."""
    files, documents = result_files(model, trained, config)
    if not hasattr(model, "peft_config"):
        whole = base_model(model)
        whole.config.save_pretrained(part)
        if whole.generation_config is not None:
            whole.generation_config.save_pretrained(part)
        files["model"] = {name: value.contiguous() for name, value in _own(trained).items()}
    documents |= {base_identity.NAME: base} if base else {}
    for name, content in documents.items():
        (part / f"{name}.json").write_text(json.dumps(content, indent=2, sort_keys=True))
    for name, tensors in files.items():
        path = part / f"{name}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes the file readable by its owner only
    if tokenizer is not None:
        tokenizer.save_pretrained(part)


def start_from(model: torch.nn.Module, folder: Path) -> None:
    """Loads the adapter in `folder`, and its head, into a `PeftModel` on the CPU that has its objective attached.

    Parameters of the objective that the folder does not have keep their values.

    Raises:
        ValueError: the adapter is missing or damaged. Its rank, alpha, DoRA, rsLoRA, patterns or trained tokens differ
            from the model's, or its tensors have other names or shapes. Its initialization changes the base, as in
            PiSSA. Or the folder has a head, and `model.objective` is no `StatesHead` with that name.
    """
    settings, tensors = read_adapter(folder)
    theirs, ours = settings.to_dict(), model.peft_config["default"].to_dict()  # type: ignore[index,union-attr]  # of PEFT
    compared = ("lora_alpha", "r", "use_dora", "use_rslora", "alpha_pattern", "rank_pattern")
    differ = [name for name in compared if theirs.get(name) != ours[name]]
    # Token ids are compared here; `set_parameters` compares the names of whole matrices.
    indices = [one.get("trainable_token_indices") for one in (theirs, ours)]
    if len({tuple(next(iter(one.values())) if isinstance(one, dict) else one or ()) for one in indices}) > 1:
        differ.append("trainable_token_indices")
    if theirs.get("init_lora_weights") not in (True, False, "gaussian"):  # the others change the base when loaded
        differ.append("init_lora_weights")
    if differ:
        texts = (f"{name.removeprefix('lora_')}={theirs.get(name)} there, {ours[name]} now" for name in differ)
        raise ValueError(
            f"lora.adapter={folder} has other settings: {'; '.join(texts)}. Set lora's parameters to these values; if "
            "lora has no such parameter, merge the adapter into its base and start from the merged model"
        )
    params, own = trainable_parameters(model), getattr(model, "objective", None)
    if head := find_head(folder):
        if not isinstance(own, StatesHead) or own.name != head:
            raise ValueError(
                f"lora.adapter={folder} has an {title(head)}, which this run would drop: set optim.objective as in its "
                f"own run, or name a copy of the folder without {' and '.join(file_names(head))}"
            )
        tensors |= {f"objective.{name}": value for name, value in load_file(folder / file_names(head)[1]).items()}
    started = {name: param.detach() for name, param in params.items() if name.startswith("objective.")}
    names = {told: name for name, told in names_in_files(_own(params)).items()}
    for first, second in tied_names(model).items():
        if {first, second} <= tensors.keys() and torch.equal(tensors[first], tensors[second]):
            del tensors[second]
    started |= {names.get(name, name): tensor for name, tensor in tensors.items()}
    set_parameters(model, started, f"lora.adapter={folder}", "Set lora.targets as in the adapter's run")
