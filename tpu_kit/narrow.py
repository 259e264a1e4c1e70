"""A narrow copy of a model's architecture: few heads, few layers, random weights; every kind of layer is kept.

It computes what the model computes, in milliseconds, and is made of the model's configuration alone.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

WINDOW = 8
"""Tokens that a windowed layer of the copy sees."""
VOCABULARY = 128

_EXPERT, _EXPERTS_KEPT = 32, 16  # the size within an expert, and their number
_ALIGNED = 16  # of which products of many experts want the hidden size to be a multiple
_LARGEST = 100_000_000  # parameters of a copy: 0.4 GB, filled in a second
_LEAST_HIDDEN = 64
# Sizes that belong to the hidden size and to the number of heads, so that all are divided by one number. The size of a
# head, of a state and of a low rank stay as they are.
_SCALED = re.compile(
    r"(hidden_size|hidden_dim|d_model|n_embd|n_embed|dim_model|embedding_size|lru_width|conv_dim|residual_dim"
    r"|.*intermediate_size|.*ffn.*(dim|size)|.*mlp_(dim|size)|n_inner|inner_dim|d_ff|dim_ff|block_(ff_)?dim|mamba_d_ssm"
    r"|.*num_.*heads|.*num_query_groups|n_heads?|n_layer_heads|.*_n_heads|.*n_groups)"
)
_WINDOWS = re.compile(r".*(window|window_size|local_attention|attention_chunk_size)")
_EXPERT_COUNTS = re.compile(r"(num|n|moe_num)_((local|routed|moe|zero)_)?experts(_num)?|zero_expert_num")
_EXPERT_SIZES = re.compile(r"(moe|expert|shared).*intermediate_size|.*expert.*(size|dim)")


def narrow_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Builds the narrow copy of a language model.

    Args:
        config: of the real model; of one that is part of a larger model, the language model's own is taken.
        trust_remote_code: whether the model may run Python code of its own.

    Returns:
        A causal language model in fp32 on the CPU, in evaluation mode, with transformers' eager attention. Every
        parameter has random values; the global random state is left as it was.

    Raises:
        ValueError: the architecture cannot be built from a narrower configuration.
    """
    failures: list[str] = []
    with _noted(failures):
        full = config.get_text_config()
        for divisor in _divisors(full):
            with _noted(failures):
                deep = _build(full, _narrowed(full, divisor), trust_remote_code, "meta")
                kinds = layer_kinds(deep)
                for layers in _selections(kinds):
                    with _noted(failures):
                        settings = _cut(deep.config, layers)
                        bare = _build(full, settings, trust_remote_code, "meta")
                        if (count := sum(parameter.numel() for parameter in bare.parameters())) > _LARGEST:
                            raise ValueError(f"the narrowest copy has {count:,} parameters")
                        if set(layer_kinds(bare)) == set(kinds):
                            return _randomized(_build(full, settings, trust_remote_code, "cpu"))
    raise ValueError("; ".join(dict.fromkeys(failures)) or "no copy with fewer layers has all kinds of them")


@contextlib.contextmanager
def _noted(failures: list[str]) -> Iterator[None]:
    """Notes what a model's own code raises: it may be anything, for sizes that do not fit together."""
    try:
        yield
    except Exception as error:
        failures.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}")


def layer_kinds(model: PreTrainedModel) -> list[Any]:
    """A value for each layer of a decoder, equal for layers that compute the same with other weights."""
    depth = model.config.num_hidden_layers
    lists = [part for part in model.get_decoder().modules() if isinstance(part, torch.nn.ModuleList)]
    layers = next((part for part in lists if len(part) == depth), [()] * depth)
    return [_kind(layer) if isinstance(layer, torch.nn.Module) else layer for layer in layers]


def _kind(layer: torch.nn.Module) -> Any:
    """The modules of a layer, and what they are told; of numbers, which may go on from layer to layer, the type."""
    return tuple(
        (name, type(part).__qualname__, tuple(sorted((key, _told(value)) for key, value in vars(part).items())))
        for name, part in layer.named_modules()
    )


def _told(value: object) -> str:
    return repr(value) if value is None or isinstance(value, (bool, str)) else type(value).__name__


def _divisors(config: PreTrainedConfig) -> list[int]:
    """What to divide the sizes by, the largest number first: two heads stay, or four in two groups."""
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not isinstance(hidden, int):
        return [1]
    common = math.gcd(hidden, heads) if isinstance(heads, int) and heads > 0 else hidden
    divisors = [n for n in range(1, common + 1) if common % n == 0 and hidden // n >= _LEAST_HIDDEN] or [1]

    pairs = getattr(config, "num_key_value_heads", None)
    grouped = isinstance(heads, int) and isinstance(pairs, int) and 1 < pairs < heads
    wanted = min(heads, 4 if grouped else 2) if isinstance(heads, int) else 1

    def worth(divisor: int) -> tuple[bool, bool, int]:
        heads_stay = not isinstance(heads, int) or heads // divisor >= wanted
        return heads_stay, hidden // divisor % _ALIGNED == 0, divisor

    best = sorted(divisors, key=worth, reverse=True)
    return list(dict.fromkeys([best[0], divisors[-1], *best[1:2]]))  # the narrowest is there for many large layers


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of a model's architecture."""
    left_out = ("quantization_config", "dtype", "torch_dtype", "architectures", "_name_or_path", "transformers_version")
    return {name: value for name, value in config.to_dict().items() if name not in left_out}


def _narrowed(config: PreTrainedConfig, divisor: int) -> dict[str, Any]:
    """The settings with all layers, narrow ones."""
    found = copy.deepcopy(settings_of(config))
    for name, value in found.items():
        if "token_id" in name or name in ("pad_index", "eos_index", "bos_index"):
            found[name] = _token(value)
        elif isinstance(value, list) and _SCALED.fullmatch(name):  # a size for each layer
            found[name] = [max(1, one // divisor) if isinstance(one, int) else one for one in value]
        elif isinstance(value, bool) or not isinstance(value, int) or not value:
            continue
        elif "vocab_size" in name:
            found[name] = min(value, VOCABULARY)
        elif _WINDOWS.fullmatch(name):
            found[name] = min(value, WINDOW)
        elif _EXPERT_COUNTS.fullmatch(name):
            found[name] = min(value, _EXPERTS_KEPT)
        elif _EXPERT_SIZES.fullmatch(name):
            found[name] = _EXPERT
        elif _SCALED.fullmatch(name):
            found[name] = max(1, value // divisor)
    heads, pairs = found.get("num_attention_heads"), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(pairs, int) and pairs > 1:
        most = max(2, pairs // divisor)
        found["num_key_value_heads"] = max(n for n in range(1, most + 1) if heads % n == 0)
    return found


def _cut(config: PreTrainedConfig, layers: list[int]) -> dict[str, Any]:
    """The settings with these layers alone."""
    found, depth = copy.deepcopy(settings_of(config)), config.num_hidden_layers
    for name, value in found.items():
        if isinstance(value, (list, tuple)) and len(value) == depth:
            found[name] = [value[place] for place in layers]
        elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value):  # by number of the layer
            by_layer = {int(key): one for key, one in value.items()}
            found[name] = {new: by_layer[old] for new, old in enumerate(layers) if old in by_layer}
    found[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    return found


def _token(value: Any) -> Any:
    if isinstance(value, list):
        return [_token(one) for one in value]
    return min(value, VOCABULARY - 1) if isinstance(value, int) else value


def _selections(kinds: list[Any]) -> Iterator[list[int]]:
    """Layers to keep: the first of each kind, two at least; or as many of the first as have all kinds; or all."""
    first = [place for place, kind in enumerate(kinds) if kind not in kinds[:place]]
    yield sorted({*first, *range(min(2, len(kinds)))}) if len(first) < 2 else first
    prefix = list(range(max(first[-1] + 1, min(2, len(kinds)))))
    yield prefix
    if len(prefix) < len(kinds):
        yield list(range(len(kinds)))


def _build(config: PreTrainedConfig, settings: dict[str, Any], trust_remote_code: bool, device: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    narrow = type(config)(**copy.deepcopy(settings))
    narrow._name_or_path = config._name_or_path  # where a model's own code is
    with torch.random.fork_rng(devices=[]), torch.device(device), _quiet():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            narrow,
            attn_implementation="eager",
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
        )
    return model.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Gives each parameter random values of a size that makes attention sharp; a neutral one would hide its use."""
    generator = torch.Generator().manual_seed(1)
    embeddings = {id(model.get_input_embeddings().weight)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(noise)
            elif parameter.dim() > 1:
                parameter.copy_(noise * 1.5 / math.sqrt(parameter[0].numel() / max(1, parameter.dim() - 2) or 1))
            else:
                parameter.copy_(torch.nan_to_num(parameter) + 0.5 * noise)
    return model
