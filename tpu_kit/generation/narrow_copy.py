"""Builds a narrow copy of a model from its configuration: all its layers, few heads, random weights."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tpu_kit.models.loading import brief

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

WINDOW = 8
"""Window of the copy's layers, in tokens."""
VOCABULARY = 128

_EXPERT, _EXPERTS_KEPT = 32, 16  # the intermediate size of an expert, and the number of experts
_ALIGNED = 16  # grouped products of experts need a hidden size that is a multiple of it
_LARGEST = 100_000_000  # parameters of a copy: 0.4 GB, initialised in a second
_LEAST_HIDDEN = 64
# Sizes that are proportional to the hidden size or to the number of heads; all are divided by one number. The sizes of
# a head, of a state and of a low rank do not change.
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
        config: of the real model; of a larger model, its language model is copied.
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
                settings = _narrowed(full, divisor)
                bare = _build(full, settings, trust_remote_code, "meta")
                if (count := sum(parameter.numel() for parameter in bare.parameters())) > _LARGEST:
                    raise ValueError(f"the narrowest copy has {count:,} parameters")
                return _randomized(_build(full, settings, trust_remote_code, "cpu"))
    raise ValueError("; ".join(dict.fromkeys(failures)))


@contextlib.contextmanager
def _noted(failures: list[str]) -> Iterator[None]:
    """Records what a model's code raises: for sizes that do not fit together it may be anything."""
    try:
        yield
    except Exception as error:
        failures.append(f"{type(error).__name__}: {brief(error)}")


def _divisors(config: PreTrainedConfig) -> list[int]:
    """Returns divisors of the sizes, the best first: two heads remain, or four in two groups."""
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
    return list(
        dict.fromkeys([best[0], divisors[-1], *best[1:2]])
    )  # the narrowest is for models with many large layers


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the settings of a model's architecture."""
    left_out = ("quantization_config", "dtype", "torch_dtype", "architectures", "_name_or_path", "transformers_version")
    return {name: value for name, value in config.to_dict().items() if name not in left_out}


def _narrowed(config: PreTrainedConfig, divisor: int) -> dict[str, Any]:
    """Returns the settings with divided sizes."""
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


def _token(value: Any) -> Any:
    if isinstance(value, list):
        return [_token(one) for one in value]
    return min(value, VOCABULARY - 1) if isinstance(value, int) else value


def _build(config: PreTrainedConfig, settings: dict[str, Any], trust_remote_code: bool, device: str) -> PreTrainedModel:
    import torch._dynamo  # transformers' models import it, and torch 2.8 cannot do that under `torch.device`
    from transformers import AutoModelForCausalLM

    narrow = type(config)(**copy.deepcopy(settings))
    narrow._name_or_path = config._name_or_path  # where a model's own code is
    with torch.random.fork_rng(devices=[]), torch.device(device), quiet():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            narrow, attn_implementation="eager", dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    return model.eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings of libraries while it is open."""
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
    """Sets random parameters, large enough for sharp attention; neutral values could hide a difference."""
    generator = torch.Generator().manual_seed(1)
    embeddings = {id(model.get_input_embeddings().weight)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(0.1 * noise)  # with large ones, rounding of tanh on XLA changes the gradient of GELU
            elif parameter.dim() > 1:
                parameter.copy_(noise * 1.5 / math.sqrt(parameter[0].numel() / max(1, parameter.dim() - 2) or 1))
            else:
                parameter.copy_(torch.nan_to_num(parameter) + 0.5 * noise)
    return model
