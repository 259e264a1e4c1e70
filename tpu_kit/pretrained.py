"""Reading a model and its tokenizer: from a folder, the hub, a GGUF file, or the embedded one.

Whatever goes wrong becomes a `ValueError` that says what to do next; transformers' own texts run over pages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpu_kit.quantize import SchemeError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from tpu_kit.config import ModelConfig

_UNDONE_IN_LOADING = ("fp8", "mxfp4", "mxfp8")
"""Methods that transformers undoes as it loads, on any machine."""


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
    """Loads the causal language model on the CPU, its weights in `dtype`, also where they are saved quantised.

    Raises:
        ValueError: it cannot be read, the checkpoint lacks some of the weights, or another tool has quantised them in a
            way that transformers does not undo here.
    """
    options: dict[str, Any] = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    method = None if config.gguf_file else quantized_by(config)
    if method in _UNDONE_IN_LOADING:
        options["config"] = _dequantizing(config)
    elif method:
        return _undo(config, dtype, method)
    model = read_model(config, dtype, **options)
    forget_quantizer(model)
    return model


def read_model(config: ModelConfig, dtype: torch.dtype, /, **options: Any) -> PreTrainedModel:
    """Calls from_pretrained with `options`; errors say what to do, as in `load_base`."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    name = locate(config)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    except SchemeError:
        raise
    except ImportError as error:
        raise ValueError(f"model.name={config.name}: {brief(error)}") from error
    except (SafetensorError, RuntimeError) as error:  # a file that is damaged, weights of other shapes
        raise ValueError(f"model.name={config.name}: transformers cannot load it: {brief(error)}") from error
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
    return model


def read_config(config: ModelConfig) -> PreTrainedConfig | None:
    """Reads a model's configuration, without its weights; None where it cannot be read, which loading explains."""
    from transformers import AutoConfig

    options: dict[str, Any] = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            locate(config), revision=config.revision, trust_remote_code=config.trust_remote_code, **options
        )
    except (OSError, ValueError, KeyError, ImportError):
        return None
    return found


def forget_quantizer(model: PreTrainedModel) -> None:
    """Lets transformers train and save a model whose weights are plain now, or ours; else it refuses to."""
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def quantized_by(config: ModelConfig) -> str | None:
    """The method that a model's config.json says its weights are quantised by; None for plain weights.

    What cannot be read counts as plain: loading it says why it cannot.
    """
    from transformers import PretrainedConfig

    try:
        given, _ = PretrainedConfig.get_config_dict(locate(config), revision=config.revision)
    except (OSError, ValueError):
        return None
    settings = given.get("quantization_config") or given.get("text_config", {}).get("quantization_config")
    if not settings:
        return None
    return str(settings.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in settings else "unknown"))


def _dequantizing(config: ModelConfig) -> Any:
    """The model's configuration, which asks transformers to make plain weights of the quantised ones as they come."""
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(
        locate(config), revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    settings.quantization_config["dequantize"] = True
    return settings


def _undo(config: ModelConfig, dtype: torch.dtype, method: str) -> PreTrainedModel:
    """Loads a model with the tool that quantised it, if it is installed, and makes plain weights of it."""
    try:
        model = read_model(config, dtype)
        plain: PreTrainedModel = model.dequantize(dtype=dtype)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"model.name={config.name}: its weights are quantised by {method}, which cannot be undone here "
            f"({brief(error.__cause__ or error)}). Use the model that it was made from: model.base_dtype=int8 or int4 "
            "makes it as small"
        ) from error
    forget_quantizer(plain)
    return plain


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


def brief(error: BaseException) -> str:
    """The first line of an error's text."""
    return str(error).strip().split("\n")[0][:300]
