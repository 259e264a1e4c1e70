"""Locates a model, and reads its configuration and tokenizer without its weights.

assets/shapes.json has the config.json of some hub models, to plan them without a network or before access is granted.
All errors become a `ValueError` with the next action, because transformers' own messages are long.
"""

from __future__ import annotations

import copy
import json
import os
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_kit.config.fields import closest, hide_secrets
from tpu_kit.config.loader import LoraConfig, ModelConfig
from tpu_kit.machine.hub import ask_hub_once
from tpu_kit.machine.storage.local_folder import is_lfs_pointer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
EMBEDDED = ("embedded", "embedded-images")
"""Values of model.name for the models that come with the kit; `locate` returns their folders."""
MIRRORS = ("unsloth", "NousResearch")
"""Organizations of the hub with copies of other models under the same names. Unsloth converts Phi to other families."""


@cache
def shipped_shapes() -> dict[str, dict[str, Any]]:
    """Returns the config.json of every model in assets/shapes.json, by its name on the hub."""
    found = json.loads((Path(__file__).parents[2] / "assets/shapes.json").read_text())
    return {name: shape for names, shape in found.items() for name in names.split()}  # models may share a shape


def _copied(name: str) -> str:
    """Returns a hub id's name without organization and "meta-", in lower case."""
    return name.partition("/")[2].lower().removeprefix("meta-")


def shipped_shape(model: ModelConfig) -> dict[str, Any] | None:
    """Returns a model's config.json from assets/shapes.json; None if it is not there, is a folder's, or has a revision.

    For a vision model, this is the text model's config.json or, with `model.images`, the whole with a "text_config". A
    copy by `MIRRORS` has its original's.
    """
    found = _shape_named(model)
    if found is None or "with_images" not in found:
        return found
    text = {name: value for name, value in found.items() if name != "with_images"}
    return {**found["with_images"], "text_config": text} if model.images else text


def _shape_named(model: ModelConfig) -> dict[str, Any] | None:
    """Like `shipped_shape`, but as in the file, with its "with_images"; ignores the case of the model's name."""
    if model.revision is not None or Path(model.name).is_dir():
        return None
    if model.name.partition("/")[0] in MIRRORS:
        originals = {_copied(name): name for name in shipped_shapes() if not name.startswith("microsoft/")}
        return shipped_shapes().get(originals.get(_copied(model.name), ""))
    return next((shape for name, shape in shipped_shapes().items() if name.lower() == model.name.lower()), None)


def did_you_mean(name: str) -> str:
    """Returns " did you mean NAME?" with the known model whose name is closest to `name`; "" if no other is close."""
    names = {known.lower(): known for known in shipped_shapes()}
    return "".join(f" did you mean {names[guess]}?" for guess in closest(name, names, 0.8) if names[guess] != name)


def locate(config: ModelConfig) -> str:
    """Returns the folder of a model, or its hub id; does not ask the hub whether it exists.

    The names "embedded" and "embedded-images" have folders, too. Before a hub id, calls `ask_hub_once`.

    Raises:
        ValueError: the name is a path, but the folder does not exist. The folder lacks config.json or the GGUF file, or
            has git-lfs pointers in place of files.
    """
    if config.name == "embedded":
        from tpu_kit.assets import embedded

        return str(embedded.model_dir())
    if config.name == "embedded-images":
        from tpu_kit.assets import pictures

        return str(pictures.model_dir())
    folder = Path(config.name).expanduser()
    if folder.is_dir():
        wanted = config.gguf_file or "config.json"
        if not (folder / wanted).is_file():
            have = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
            advice = ""
            if any((folder / name).exists() for name in ("adapter_config.json", "adapter")):  # an adapter, or a run
                advice = "; to use a tuned model, run `python -m tpu_kit export RUN format=merged` and give its folder"
            raise ValueError(f"model.name={config.name}: the folder has no {wanted} (it holds: {have}){advice}")
        if pointers := sorted(path.name for path in folder.iterdir() if path.is_file() and _is_pointer(path)):
            raise ValueError(
                f"model.name={config.name}: only a git-lfs pointer is there in place of {', '.join(pointers[:3])}: run "
                "`git lfs install && git lfs pull` in that folder, or `hf download`"
            )
        return str(folder)
    if config.name.startswith((".", "~", os.sep)) or config.name.count("/") > 1:
        raise ValueError(f"model.name={config.name}: there is no such folder. Give a folder, a hub id or embedded")
    ask_hub_once()
    return config.name


def _is_pointer(path: Path) -> bool:
    """Returns whether a file is a git-lfs pointer."""
    with path.open("rb") as file:
        return is_lfs_pointer(file.read(64))


def unreachable(config: ModelConfig, error: Exception) -> str:
    """Returns the error text for a model that is not a folder and cannot be fetched from the hub."""
    kind = type(error.__cause__ or error).__name__
    if "Gated" in kind or "gated repo" in str(error):
        action = "its owner grants access by request: ask on its page, then run `hf auth login`"
    else:
        action = (
            "check the spelling and the network; or run `hf download` on a machine with a network and give the folder; "
            "or use model.name=embedded, which needs no network"
        )
    return (
        f"model.name={config.name}: it is not a folder here and cannot be fetched from the hub ({brief(error)});"
        f"{did_you_mean(config.name)} {action}"
    )


def brief(error: BaseException) -> str:
    """Returns the first line of an error's text, at most 300 characters, without secrets."""
    return hide_secrets(str(error)).strip().split("\n")[0][:300]


def known_models() -> str:
    """Formats the names of `shipped_shapes`, one line per organization."""
    lines = []
    for owner, names in groupby(sorted(shipped_shapes(), key=str.lower), key=lambda name: name.partition("/")[0]):
        lines.append(f"{owner}/: {', '.join(name.partition('/')[2] for name in names)}")
    return "\n".join([*lines, f"and their copies of {' and '.join(f'{name}/' for name in MIRRORS)}"])


# ------------------------------------------------------------------------------------- configuration and tokenizer


def load_tokenizer(config: ModelConfig, adapter: str | Path | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that belongs to the model.

    Args:
        config: the model. A GGUF file's own tokenizer is loaded, unless there is a tokenizer_config.json beside it.
        adapter: folder that training wrote. If it has a tokenizer, that is loaded, with the chat template of the
            training, or without a template after training on plain text. A checkpoint has no tokenizer; the model's is
            loaded, and its template is dropped after training on plain text.

    Raises:
        ValueError: if the folder or hub repository cannot be read, or has no tokenizer.
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
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
        if adapter is not None and not own and _saw_plain_text(Path(adapter)):
            tokenizer.chat_template = None
        return tokenizer
    except (OSError, ValueError, TypeError, KeyError) as error:
        if Path(name).is_dir():
            raise ValueError(
                f"model.name={config.name}: the folder has no tokenizer that transformers reads ({brief(error)}). "
                "Copy the original model's tokenizer files into it (tokenizer.json, tokenizer_config.json)"
            ) from error
        raise ValueError(unreachable(config, error)) from error


def _saw_plain_text(checkpoint: Path) -> bool:
    """Returns whether a checkpoint's run trained on plain text; False for other folders."""
    state = checkpoint / "state.json"
    return state.is_file() and json.loads(state.read_text()).get("turns") == "none"


def refuse(config: ModelConfig, error: Exception) -> None:
    """Raises ValueError if `error` is transformers' refusal of a model's code or unknown family; else does nothing."""
    from transformers import PreTrainedConfig

    if "trust_remote_code" in str(error):
        raise ValueError(
            f"model.name={config.name}: the model comes with its own Python code. Read that code; if you trust it, "
            "set model.trust_remote_code=true"
        ) from error
    if "does not recognize this architecture" in str(error):
        given, _ = PreTrainedConfig.get_config_dict(locate(config), revision=config.revision)
        family, writer = given.get("model_type"), given.get("transformers_version")
        raise ValueError(absent_family(config, family, writer)) from error


def absent_family(config: ModelConfig, family: str | None, writer: str | None = None) -> str:
    """Returns the error text for a family that transformers lacks; `writer` is the version that wrote config.json."""
    from transformers import __version__

    wanted = f"{writer} wrote its config.json: pip install 'transformers>={writer}'"
    return (
        f"model.name={config.name}: transformers {__version__} has no family {family}; "
        f"{wanted if writer else 'install a newer one'}"
    )


def read_config(config: ModelConfig, needed: bool = False) -> PreTrainedConfig | None:
    """Reads a model's configuration; None if it cannot be read, which loading then reports.

    Raises:
        ValueError: the model has its own code and `trust_remote_code` is off; transformers lacks its family; or the
            configuration breaks its class's own rules. With `needed`, also if it cannot be read.
    """
    from transformers import AutoConfig

    options: dict[str, Any] = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            locate(config), revision=config.revision, trust_remote_code=config.trust_remote_code, **options
        )
    except Exception as error:  # strict configurations raise their own classes
        refuse(config, error)
        if not needed and isinstance(error, OSError | ValueError | KeyError | ImportError):
            return None
        if isinstance(error, OSError):
            raise ValueError(unreachable(config, error)) from error
        raise ValueError(f"model.name={config.name}: its config.json cannot be used: {brief(error)}") from error
    return found


def leave_out_towers(settings: Any, images: bool = False) -> bool:
    """Sets optional audio and, unless `images`, vision configs to None, in place; returns whether there were any."""
    parts = ("audio_config",) if images else ("vision_config", "audio_config")
    names = [name for name in parts if getattr(settings, name, None) is not None]
    found = [name for name in names if getattr(type(settings)(), name) is None]
    for name in found:
        setattr(settings, name, None)
    return bool(found)


@cache
def modules_left_out(config: ModelConfig) -> tuple[str, ...]:
    """Returns sorted paths of modules that loading leaves out, towers that a run does not use; () if there are none."""
    import torch

    settings = read_config(config)
    text = copy.deepcopy(settings)
    if settings is None or not leave_out_towers(text, config.images):
        return ()
    with torch.device("meta"):
        whole, loaded = (
            {name for name, _ in model_class(config).from_config(each).named_modules()} for each in (settings, text)
        )
    return tuple(sorted(whole - loaded))


def quantized_by(config: ModelConfig) -> str | None:
    """Returns the quantization method in a model's config.json, such as "mxfp4", or "unknown"; None for plain weights.

    None also if config.json cannot be read, which loading then reports.
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


def model_class(config: ModelConfig) -> Any:
    """Returns the transformers class that builds and loads the model, with or without its vision modules."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.images else AutoModelForCausalLM


def settings_of(config: ModelConfig) -> Any:
    """Returns a model's transformers configuration, without optional towers that the run does not use.

    A hub model without a revision is looked up in assets/shapes.json first; others come from their folder or the hub.

    Raises:
        ValueError: the configuration is missing or lacks sizes, or transformers lacks its family.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    settings: Any
    if (given := shipped_shape(config)) is not None:
        if given["model_type"] not in CONFIG_MAPPING:
            raise ValueError(absent_family(config, given["model_type"]))
        settings = CONFIG_MAPPING[given["model_type"]].from_dict(given)
        if config.images and getattr(settings, "vision_config", None) is None:  # the file has only the text part
            settings.vision_config = _default_vision(settings)
        return settings
    settings = read_config(config, needed=True)
    if config.gguf_file:
        return settings
    given, _ = PreTrainedConfig.get_config_dict(locate(config), revision=config.revision)
    leave_out_towers(settings, config.images)
    # transformers replaces missing sizes by its defaults, which would silently plan another model.
    text, given = settings.get_text_config(), given.get("text_config", given)
    known = text.to_dict()  # without sizes that a family computes or does not have
    names = {name: getattr(text, "attribute_map", {}).get(name, name) for name in _SIZES}
    missing = [own for name, own in names.items() if own in known and name not in given and own not in given]
    if missing:
        raise ValueError(
            f"model.name={config.name}: its config.json lacks {', '.join(missing)}; take the whole file of the "
            "original model"
        )
    return settings


def _default_vision(settings: Any) -> Any:
    """Returns transformers' default vision configuration of a family, or None."""
    spec = getattr(type(settings), "sub_configs_defaults", {}).get("vision_config")
    return None if spec is None else getattr(spec, "config_class", spec)()


def check_positions(length: int, positions: int | None, whose: str = "the model") -> None:
    """Raises ValueError if rows of `data.max_length` tokens exceed a model's positions; None means no limit.

    `whose` names the model in the text.
    """
    if positions is not None and length > positions:
        raise ValueError(
            f"data.max_length={length} is longer than the {positions} positions of {whose}; set it to {positions} or "
            "less, or use a model with more: an adapter cannot store another scaling of rotary positions"
        )


def token_numbers(config: ModelConfig, lora: LoraConfig) -> list[int]:
    """Returns the ids of `lora.tokens` in order, without repetitions; [] for null. Loads the tokenizer.

    Raises ValueError for "added", or for a name that is neither a token nor "id:NUMBER" of a token.
    """
    if lora.tokens is None:
        return []
    if lora.finds_tokens:
        raise ValueError(
            "lora.tokens=added: the new tokens of the rows are found when a run is planned; name the tokens here"
        )
    names = lora.token_names
    vocabulary = load_tokenizer(config).get_vocab()
    by_number = {f"id:{number}": number for number in vocabulary.values()}
    vocabulary = by_number | vocabulary
    if wrong := [name for name in names if name not in vocabulary]:
        raise ValueError(
            f"lora.tokens: {', '.join(map(repr, wrong))} is not a token of model.name={config.name}. Add it first, "
            "and name the folder: tokenizer.add_tokens([...]); model.resize_token_embeddings(len(tokenizer)); "
            "save_pretrained of both"
        )
    return [vocabulary[name] for name in names]
