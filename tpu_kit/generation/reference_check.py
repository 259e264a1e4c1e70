"""Checks for a model's architecture, before reading its weights, that the kit computes the same as transformers.

It builds a narrow copy of the model from its configuration, with few heads, few layers of every kind and random
weights. The copy runs with the kit's attention on two documents packed into a row, and with transformers' eager
attention on each document alone; and it generates with the kit's key/value cache. This takes seconds. It finds
arguments of attention that the kit does not implement, layers that carry a state from one document into the next, and
caches of another layout.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.backends import CpuRuntime
from tpu_kit.generation.decoder import Batch, Decoder, filled
from tpu_kit.generation.prompts import START
from tpu_kit.generation.sampling import Sampling
from tpu_kit.models import attention
from tpu_kit.models import causal_lm as models
from tpu_kit.models.architecture import FAMILIES
from tpu_kit.models.loading import brief, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_TOLERANCE = 1e-3  # relative to the largest logit; in fp32 another order of summation changes 1e-7 to 1e-5 of it
_DOCUMENTS, _ROW = (21, 13), 37  # tokens; each document is longer than a window of the copy
_PROMPTS, _REPLY = (11, 4), 12  # tokens
_OTHERS = f"Use a model of another family, such as {', '.join(FAMILIES)}"
_KERNELS = "tpu_kit_segments"

_verdicts: dict[tuple[str, str], list[str]] = {}
_lock = threading.Lock()  # replicas of XLA:CPU are threads


def check_training(config: TrainConfig, device_type: str) -> None:
    """Checks that a model can be trained as transformers defines it; takes up to 5 s, and reads no weights.

    Args:
        config: the run. A model without a readable configuration passes: loading it explains why.
        device_type: of the run; the kernels of a TPU get segment ids instead of a mask.

    Raises:
        ValueError: the logits differ from those of transformers, for a document alone, for packed documents or in rows
            of data.max_length; or the run generates, and the model cannot.
    """
    given = read_config(config.model)
    if given is None:
        return
    family, trusted = f"{given.model_type} (model.name={config.model.name})", config.model.trust_remote_code
    models.check_length(given.get_text_config(), config.data.max_length)
    alone, packed = _verdict("training", given, trusted)
    if alone:
        raise ValueError(f"{family} cannot be trained here: {alone}. {_OTHERS}")
    if config.data.packing and packed:
        raise ValueError(
            f"data.packing=true: {family} cannot be trained on packed documents: {packed}. Set data.packing=false, "
            "which puts one document in each row"
        )
    if attention.choose(config.model.attention, device_type) != attention.SDPA:
        alone, packed = _verdict("kernels", given, trusted)
        if problem := alone or (packed if config.data.packing else ""):
            raise ValueError(
                f"model.attention={config.model.attention}: {family} cannot be trained with the attention kernels of "
                f"TPUs: {problem}. Set model.attention=sdpa"
            )
    if config.tracking.generate_rows or config.tracking.eval_generate_rows:
        check_generation(given, trusted)


def check_generation(config: PreTrainedConfig, trust_remote_code: bool = False) -> None:
    """Checks that a model generates the same with the kit's key/value cache as transformers without a cache.

    Args:
        config: of the model.
        trust_remote_code: whether the model may run Python code of its own.

    Raises:
        ValueError: it does not.
    """
    (problem,) = _verdict("generation", config, trust_remote_code)
    if problem:
        raise ValueError(
            f"the kit cannot generate with {config.model_type}: {problem}. Export the model and call generate() of "
            "transformers; to train it set tracking.generate_rows=0 and tracking.eval_generate_rows=0"
        )


def _verdict(what: Literal["training", "kernels", "generation"], config: PreTrainedConfig, trusted: bool) -> list[str]:
    """Returns descriptions of the problems, empty texts for none; cached in the process by configuration."""
    key = (what, f"{config.model_type} {settings_of(config)}")
    with _lock:
        if key not in _verdicts:
            _verdicts[key] = _find(what, config, trusted)
        return _verdicts[key]


def _find(what: str, config: PreTrainedConfig, trusted: bool) -> list[str]:
    try:
        model = narrow_model(config, trusted)
    except ValueError as error:
        problem = f"it cannot be compared with transformers, as no narrow copy of it can be built ({error})"
        return [problem] if what == "generation" else [problem] * 2
    from transformers import AttentionInterface

    attention.register()
    AttentionInterface.register(_KERNELS, _attention_of_kernels)
    with torch.no_grad():
        if what == "generation":
            return [_compare_replies(model)]
        return _compare_documents(model, _KERNELS if what == "kernels" else attention.SDPA)


def _attention_of_kernels(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Computes attention from the inputs that the kernels of a TPU get."""
    if kwargs.get("segment_ids") is None:
        raise ValueError("the model does not pass its keyword arguments, the segment ids, on to its attention")
    return attention.sdpa_attention(module, query, key, value, None, **kwargs)


def _compare_documents(model: PreTrainedModel, implementation: str) -> list[str]:
    """Describes the problem with documents alone in their rows, and with packed ones; empty texts for none."""
    documents = _ids(model, _DOCUMENTS)
    try:
        expected = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in documents]
    except Exception as error:
        return [f"it cannot be compared with transformers, whose eager attention fails: {_told(error)}"] * 2
    model.set_attn_implementation(implementation)
    model._tpu_kit_compute_dtype = torch.float32
    problems = (
        "for one document alone, logits differ by {} of the largest one from those of transformers' eager attention",
        "they change each other, as logits differ by {} of the largest one from those of each document alone",
    )
    found = []
    for rows, problem in zip(([[0], [1]], [[0, 1], [1, 0]]), problems, strict=True):
        try:
            logits = models.logits(model, _batch([[documents[place] for place in row] for row in rows]))
            wanted = [torch.cat([expected[place] for place in row]) for row in rows]
            share = _share([logits[row, : len(one)] - one for row, one in enumerate(wanted)], wanted)
            found.append("" if share <= _TOLERANCE else problem.format(f"{share:.1%}"))
        except Exception as error:
            found.append(_told(error))
    return found


def _batch(rows: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Makes rows of documents as `data.packing` does."""
    batch = {
        name: torch.zeros(len(rows), _ROW, dtype=torch.int64) for name in ("input_ids", "segment_ids", "position_ids")
    }
    for row, documents in enumerate(rows):
        start = 0
        for number, ids in enumerate(documents, 1):
            span = slice(start, start + len(ids))
            batch["input_ids"][row, span] = ids
            batch["segment_ids"][row, span] = number
            batch["position_ids"][row, span] = torch.arange(len(ids))
            start += len(ids)
    return batch


def _compare_replies(model: PreTrainedModel) -> str:
    """Describes the problem with greedy replies to two prompts of different lengths; an empty text for none."""
    prompts = [ids.tolist() for ids in _ids(model, _PROMPTS)]
    try:
        tokens, logprobs = _replies(model, prompts)
    except Exception as error:
        return f"its layers do not work with the kit's key/value cache ({_told(error)})"
    wrong, scale = [], []
    for prompt, reply, told in zip(prompts, tokens.long().T, logprobs.T, strict=True):
        ids = torch.tensor([[*prompt, *reply.tolist()]])
        try:
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        except Exception as error:
            return f"it cannot be compared with transformers, whose eager attention fails: {_told(error)}"
        expected = logits.log_softmax(-1)
        chosen = expected.gather(-1, reply[:, None])[:, 0]
        wrong += [chosen - told, expected.amax(-1) - chosen]
        scale.append(logits)
    share = _share(wrong, scale)
    if share <= _TOLERANCE:
        return ""
    return f"log-probabilities of its replies differ by {share:.1%} of the largest logit from those of transformers"


def _replies(model: PreTrainedModel, prompts: list[list[int]]) -> Any:
    """Generates greedily; returns (2, reply, prompts): tokens and their log-probabilities."""
    count, width = len(prompts), max(map(len, prompts)) - 1
    decoder = Decoder(model, CpuRuntime(0, 1, torch.device("cpu")), _REPLY, width + _REPLY)
    ids, lengths = filled([prompt[:-1] for prompt in prompts], width, count)
    batch, sampling = Batch(ids, lengths, torch.tensor([prompt[-1] for prompt in prompts])), Sampling(_REPLY)
    never = torch.full((8 * decoder.vocabulary,), START, dtype=torch.int32)
    with decoder.ready():
        cache = decoder.prefill(batch, 1, _REPLY)
        uniforms = sampling.uniforms(_REPLY, [(row, 0) for row in range(count)])
        knobs = sampling.knobs(decoder.vocabulary)
        state = decoder.begin(batch, 1, [False] * count, uniforms, knobs, never, None)
        return decoder.decode(sampling.kind, state, cache, _REPLY)


def _ids(model: PreTrainedModel, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    random, most = torch.Generator().manual_seed(2), model.get_input_embeddings().weight.shape[0]
    return [torch.randint(3, most, (length,), generator=random) for length in lengths]


def _share(differences: list[torch.Tensor], scale: list[torch.Tensor]) -> float:
    """Returns the largest difference relative to the largest number; NaN if there is a NaN."""
    largest, whole = (
        torch.cat([part.flatten().float().abs() for part in parts]).max() for parts in (differences, scale)
    )
    return float(largest / whole)


def _told(error: Exception) -> str:
    return brief(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {brief(error)}"


# ------------------------------------------------------------------------------------------------------ the narrow copy

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
    """Records what a model's code raises: for sizes that do not fit together it may be anything."""
    try:
        yield
    except Exception as error:
        failures.append(f"{type(error).__name__}: {brief(error)}")


def layer_kinds(model: PreTrainedModel) -> list[Any]:
    """Returns a value for each layer of a decoder, equal for layers that differ only in the values of weights."""
    depth = model.config.num_hidden_layers
    lists = [part for part in model.get_decoder().modules() if isinstance(part, torch.nn.ModuleList)]
    layers = next((part for part in lists if len(part) == depth), [()] * depth)
    return [_kind(layer) if isinstance(layer, torch.nn.Module) else layer for layer in layers]


def _kind(layer: torch.nn.Module) -> Any:
    """Returns the modules of a layer and their settings; of numbers, which may count layers, only the type."""

    def told(value: object) -> str:
        return repr(value) if value is None or isinstance(value, (bool, str)) else type(value).__name__

    return tuple(
        (name, type(part).__qualname__, tuple(sorted((key, told(value)) for key, value in vars(part).items())))
        for name, part in layer.named_modules()
    )


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
    """Returns the settings with all layers and with divided sizes."""
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
    """Returns the settings with these layers alone."""
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
    """Yields layers to keep: the first of each kind, at least two; the shortest prefix with all kinds; all."""
    first = [place for place, kind in enumerate(kinds) if kind not in kinds[:place]]
    yield sorted({*first, *range(min(2, len(kinds)))}) if len(first) < 2 else first
    prefix = list(range(max(first[-1] + 1, min(2, len(kinds)))))
    yield prefix
    if len(prefix) < len(kinds):
        yield list(range(len(kinds)))


def _build(config: PreTrainedConfig, settings: dict[str, Any], trust_remote_code: bool, device: str) -> PreTrainedModel:
    import torch._dynamo  # transformers' models import it, and torch 2.8 cannot do that under `torch.device`
    from transformers import AutoModelForCausalLM

    narrow = type(config)(**copy.deepcopy(settings))
    narrow._name_or_path = config._name_or_path  # where a model's own code is
    with torch.random.fork_rng(devices=[]), torch.device(device), _quiet():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            narrow, attn_implementation="eager", dtype=torch.float32, trust_remote_code=trust_remote_code
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
    """Sets random parameters, large enough for sharp attention; neutral values could hide a difference."""
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
