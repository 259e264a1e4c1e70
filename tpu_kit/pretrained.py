"""Reading a model and its tokenizer: from a folder, the hub, a GGUF file, or the embedded one.

Whatever goes wrong becomes a `ValueError` that says what to do next; transformers' own texts run over pages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tpu_kit.config import ModelConfig


def load_tokenizer(config: ModelConfig, adapter: str | Path | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that belongs to the model; a missing pad token becomes the end-of-text token.

    Padding carries segment 0 and no label, so which id fills it does not matter.

    Args:
        config: the model.
        adapter: what training wrote: with a tokenizer in it, that is taken, and with it the chat template of the
            training.

    Raises:
        ValueError: if the folder or hub repository cannot be read, or holds no tokenizer.
    """
    from transformers import AutoTokenizer

    own = adapter is not None and Path(adapter, "tokenizer_config.json").is_file()
    name = str(adapter) if own else locate(config)
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if not own:
        options["revision"] = config.revision
    if config.gguf_file and not (Path(name) / "tokenizer_config.json").is_file():
        options["gguf_file"] = config.gguf_file
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if Path(name).is_dir():
            raise ValueError(
                f"model.name={config.name}: the folder has no tokenizer that transformers reads ({brief(error)}). "
                "Copy the tokenizer's files of the original model into it (tokenizer.json, tokenizer_config.json)"
            ) from error
        raise ValueError(unreachable(config, error)) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_base(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Loads the causal language model on the CPU, its weights in `dtype`.

    Raises:
        ValueError: if it cannot be read, or the checkpoint lacks some of the weights.
    """
    from transformers import AutoModelForCausalLM

    name = locate(config)
    options: dict[str, Any] = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    except ImportError as error:
        raise ValueError(f"model.name={config.name}: {brief(error)}") from error
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"model.name={config.name}: the model comes with Python code of its own. Read that code; if you trust "
                "it, set model.trust_remote_code=true"
            ) from error
        if Path(name).is_dir():
            raise ValueError(f"model.name={config.name}: transformers cannot load it: {brief(error)}") from error
        raise ValueError(unreachable(config, error)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"model.name={config.name}: {len(missing)} weights of {type(model).__name__} are not in the checkpoint "
            f"({', '.join(missing[:3])}...) and would be random. Is it a causal language model, saved whole?"
        )
    if config.gguf_file:
        # The weights are dequantised now, yet transformers goes on to refuse to train or save a "quantised" model.
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    return model


def locate(config: ModelConfig) -> str:
    """The folder of a model, or its hub id; raises ValueError if it is a folder without one."""
    if config.name == "embedded":
        from tpu_kit import embedded

        return str(embedded.model_dir())
    folder = Path(config.name).expanduser()
    if folder.is_dir():
        wanted = config.gguf_file or "config.json"
        if not (folder / wanted).is_file():
            have = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
            raise ValueError(f"model.name={config.name}: the folder has no {wanted} (it holds: {have})")
        return str(folder)
    if config.name.startswith((".", "~", os.sep)) or config.name.count("/") > 1:
        raise ValueError(f"model.name={config.name}: there is no such folder. Give a folder, a hub id or embedded")
    return config.name


def unreachable(config: ModelConfig, error: Exception) -> str:
    """What to tell the user of a model that is no folder and that the hub did not give."""
    kind = type(error.__cause__ or error).__name__
    if "Gated" in kind or "gated repo" in str(error):
        action = "its owner grants access by request: ask on its page, then run `hf auth login`"
    else:
        action = (
            "check the spelling and the network; or run `hf download` where there is one and give the folder; "
            "or use model.name=embedded, which needs no network"
        )
    return (
        f"model.name={config.name}: it is no folder here and cannot be fetched from the hub ({brief(error)}): {action}"
    )


def brief(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).strip().split("\n")[0][:300]
