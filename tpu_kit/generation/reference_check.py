"""Checks, before a model is downloaded, that training and generation with the kit match transformers.

A narrow copy of the model has all its layers, few heads and random weights, and is prepared as in the run. Its logits
and gradients must match transformers' eager attention, which processes each document alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.data.batching import Documents, PackedDataset
from tpu_kit.distributed.child_process import run_child, xla_cpu_environment
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.generation.decoder import Batch, Decoder, filled
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.compatibility import other_transformers
from tpu_kit.model import attention, preparation, rotary, trainable
from tpu_kit.model import causal_lm as models
from tpu_kit.model.loop import layer_calls
from tpu_kit.model.weights.source import brief, read_config
from tpu_kit.xla import traced_program

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_TOLERANCE = 1e-3  # share of the largest logit; another order of summation in fp32 changes 1e-7 to 1e-5
_GRADIENT_TOLERANCE = 2e-2  # share of the norm of a tensor's gradient; XLA:CPU changes up to 1.5e-3
_ROUNDING, _MOST = 2.0, 0.2  # the bound is this multiple of transformers' own difference, at most this for logits
_SMALL = 1e-3  # share of the largest gradient's norm; the gradient of a key's bias is only rounding
_MOST_PARAMETERS = 100_000_000  # in a narrow copy
_VOCABULARY, _WINDOW = 128, 8
_DOCUMENTS, _ROW = (21, 16, 13), 37  # lengths in tokens; all documents are longer than a window
_NOT_COMPARED = "it cannot be compared with transformers"
_QUICK_COMPILES = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
_NO_SIZES = ("quantization_config", "dtype", "torch_dtype", "architectures", "_name_or_path", "transformers_version")
_CAPS = {
    r".*token_id.*|(pad|eos|bos)_index": _VOCABULARY - 1,
    r".*vocab_size.*": _VOCABULARY,
    r".*(window|window_size|local_attention|attention_chunk_size)": _WINDOW,
    r"(num|n|moe_num)_((local|routed|moe|zero)_)?experts(_num)?|zero_expert_num": 16,
    r"(moe|expert|shared).*intermediate_size|.*expert.*(size|dim)": 32,
}
# Sizes proportional to the hidden size or the number of heads. Sizes of a head, a state or a low rank are not divided.
_DIVIDED = (
    r"(hidden_size|hidden_dim|d_model|n_embd|n_embed|dim_model|embedding_size|lru_width|conv_dim|residual_dim"
    r"|.*intermediate_size|.*ffn.*(dim|size)|.*mlp_(dim|size)|n_inner|inner_dim|d_ff|dim_ff|block_(ff_)?dim|mamba_d_ssm"
    r"|.*num_.*heads|.*num_query_groups|n_heads?|n_layer_heads|.*_n_heads|.*n_groups)"
)


def check_training(config: TrainConfig, device_type: str, model: PreTrainedConfig | None = None) -> None:
    """Checks that a run trains its model as transformers defines it; reads no weights.

    It takes a few seconds; for an unknown family on XLA, about a minute, as a child process also compares on XLA:CPU.

    Args:
        config: the run. A model without a readable configuration passes, because loading it explains the error.
        device_type: the run's device type; TPU kernels get segment ids instead of a mask.
        model: the model's configuration if already read; None reads it.

    Raises:
        ValueError: the model cannot be trained with these settings; the text names a setting that works, if there is
            one. Or `rotary.check_length` refuses data.max_length. Or the run generates, and `check_generation` fails.
    """
    model = model or read_config(config.model)
    if model is None:
        return
    rotary.check_length(model.get_text_config(), config.data.max_length)
    if problem := _training_problem(config, model, device_type):
        changes = ("model.attention=sdpa", "optim.scan_layers=off", "data.packing=false")
        advice = f"Or use a model of another family, such as {', '.join(trainable.COMPARED)}"
        for change in changes:
            with contextlib.suppress(ValueError):  # the run's other settings, such as a mesh, may forbid the change
                if not _training_problem(load_config(config.to_dict(), [change]), model, device_type):
                    why = ", which puts one document in each row" if change == changes[-1] else ""
                    advice = f"Set {change}{why}"
                    break
        family = f"{model.model_type} (model.name={config.model.name})"
        raise ValueError(f"{family} cannot be trained with these settings: {problem}. {advice}{other_transformers()}")
    if config.generates:
        check_generation(model, config.model.trust_remote_code, config.model.images)


def check_generation(model: PreTrainedConfig, trust_remote_code: bool = False, images: bool = False) -> None:
    """Checks that a narrow random copy of a model generates with the kit's cache as transformers without a cache.

    The log-probabilities of greedy replies are compared, once in a process for equal configurations.

    Args:
        model: the model's configuration.
        trust_remote_code: whether Python code from the model's repository may run.
        images: whether prompts may have images; then replies to prompts with images are compared, too.

    Raises:
        ValueError: the replies differ or cannot be compared.
    """
    compare = _Comparison(str(_sizes(model)), lambda: _compare_replies(narrow_model(model, trust_remote_code)))
    pictured = _Comparison(
        f"images {_sizes(model)}", lambda: _compare_replies(*_narrow_with_pictures(model, trust_remote_code))
    )
    if problem := ((_has_head(model) or not images) and _problem(compare)) or (images and _problem(pictured)):
        raise ValueError(
            f"the kit cannot generate with {model.model_type}: {problem}. Export the model and call generate() of "
            "transformers; to train it set tracking.generate_rows=0 and tracking.eval_generate_rows=0"
            f"{other_transformers()}"
        )


def _training_problem(config: TrainConfig, model: PreTrainedConfig, device_type: str) -> str:
    """Returns how training a copy differs from transformers, or why it fails; "" if it matches. Cached."""
    kernel = attention.choose(config.model.attention, device_type)
    way = (kernel, config.launch.mesh, config.optim.remat, config.optim.scan_layers, config.lora, config.data.packing)

    def compute() -> str:
        on_xla = device_type in ("tpu", "xla-cpu") and model.get_text_config().model_type not in trainable.COMPARED
        images = config.model.images
        problem = (
            ""
            if images and not _has_head(model)
            else _compare_training(config, model, device_type, torch.device("cpu"))
        )
        if images and not problem:
            pictured = _pictured(model, config.model.trust_remote_code)
            problem = _compare_training(config, model, device_type, torch.device("cpu"), pictured)
            problem = problem and f"with images, {problem}"
            on_xla = False  # all families with images are known
        return _on_xla(config, device_type) if on_xla and not problem else problem

    return _problem(_Comparison(f"{device_type} {way} {_sizes(model)}", compute))


@dataclass(frozen=True)
class _Comparison:
    """A comparison with transformers; `compute` returns the problem or "", and equal keys have equal results."""

    key: str
    compute: Callable[[], str] = field(compare=False)


@functools.cache  # it takes up to a minute
def _problem(comparison: _Comparison) -> str:
    """Returns the problem that a comparison finds, or ""; an exception is a problem, too. Computes a key once."""
    try:
        return comparison.compute()
    except Exception as error:  # a model's code may raise anything
        return _text(error)


def _text(error: Exception) -> str:
    """Returns the text of an error, with its class unless it is a ValueError from outside of transformers' models."""
    said = brief(error).rstrip(".").replace("`target_modules`", "lora.targets")  # PEFT's name
    own = isinstance(error, ValueError) and "modeling_" not in extract_tb(error.__traceback__)[-1].filename
    return said if own else f"{type(error).__name__}: {said}"


# ---------------------------------------------------------------------------------------------------------- the copy


def _has_head(config: PreTrainedConfig) -> bool:
    """Whether transformers has a class for the text model alone; it has none for Qwen2.5-VL."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as CLASSES

    text = config.get_text_config()
    return type(text) in CLASSES or bool(getattr(text, "auto_map", None))


def narrow_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Builds a copy of a language model with all its layers, few heads, small sizes and random weights.

    It is in fp32 on the CPU, in evaluation mode, with eager attention and a vocabulary of 128. It has no output head if
    transformers has no class for the text model alone. The global random state does not change.

    Raises:
        ValueError: no copy of the model can be built, or only copies of more than 1e8 parameters.
    """
    import torch._dynamo  # transformers' models import it, which fails in torch 2.8 under `torch.device`
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if trust_remote_code or _has_head(config) else AutoModel
    attention.register()
    full, failures = config.get_text_config(), {}
    for divisor in _divisors(full):
        try:
            narrow = type(full)(**_narrowed(full, divisor))
            narrow._name_or_path = full._name_or_path  # the place of the model's own code
            for device in ("meta", "cpu"):
                with torch.random.fork_rng(devices=[]), torch.device(device), warnings.catch_warnings(action="ignore"):
                    torch.manual_seed(0)
                    model: PreTrainedModel = kind.from_config(
                        copy.deepcopy(narrow), attn_implementation="eager", dtype=torch.float32,
                        trust_remote_code=trust_remote_code,
                    )  # fmt: skip
                if model.num_parameters() > _MOST_PARAMETERS:
                    raise ValueError(f"the narrowest copy has {model.num_parameters():,} parameters")
            return _randomize(model.eval())
        except Exception as error:  # for incompatible sizes, a model's code may raise anything
            failures[f"{type(error).__name__}: {brief(error)}"] = error
    raise ValueError(f"{_NOT_COMPARED}, because no narrow copy of it can be built ({'; '.join(failures)})")


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns a configuration as a dictionary without names, versions, dtype and quantization."""
    return {name: value for name, value in config.to_dict().items() if name not in _NO_SIZES}


def _size(config: PreTrainedConfig, name: str) -> Any:
    """Returns a size from a configuration; if it differs by layer, as in Gemma 4 12B, the size of most layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers needs a layer if the size differs by layer
        return config.to_dict().get(name)


def _divisors(config: PreTrainedConfig) -> list[int]:
    """Returns divisors for the sizes, best first: the largest that leaves two heads, or four with grouped keys."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    hidden, heads, pairs = (n if isinstance(n := _size(config, name), int) else 0 for name in names)
    common, least = math.gcd(hidden, heads), min(heads, 4 if 1 < pairs < heads else 2)
    divisors = [n for n in range(1, common + 1) if common % n == 0 and hidden // n >= 64] or [1]
    # Grouped matrix products of experts need a hidden size that is a multiple of 16.
    return sorted(divisors, key=lambda n: (heads // n >= least, hidden // n % 16 == 0, n), reverse=True)


def _narrowed(config: PreTrainedConfig, divisor: int) -> dict[str, Any]:
    """Returns `_sizes` with sizes and numbers of heads divided, and the vocabulary, windows and experts limited."""

    def narrow(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [narrow(name, each) for each in value]
        if isinstance(value, bool) or not isinstance(value, int) or not value:
            return value
        caps = [most for pattern, most in _CAPS.items() if re.fullmatch(pattern, name)]
        return min([value, *caps]) if caps or not re.fullmatch(_DIVIDED, name) else max(1, value // divisor)

    sizes = {name: narrow(name, value) for name, value in copy.deepcopy(_sizes(config)).items()}
    sizes["vocab_size"] = _VOCABULARY  # even if the model has fewer: all compared ids are below it
    heads, pairs = sizes.get("num_attention_heads"), _size(config, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(pairs, int) and pairs > 1:
        most = max(2, pairs // divisor)
        sizes["num_key_value_heads"] = max(n for n in range(1, most + 1) if heads % n == 0)
    return sizes


def _randomize(model: Any) -> Any:
    """Sets random parameters, large enough for sharp attention to show differences; returns the same model."""
    generator, embedding = torch.Generator().manual_seed(1), model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter is embedding or "lora_B" in name:
                parameter.copy_(0.1 * noise)  # for large values, XLA's rounding of tanh changes the gradient of GELU
            elif parameter.dim() > 1:
                parameter.copy_(noise * 1.5 / math.sqrt(parameter[0].numel() / max(1, parameter.dim() - 2) or 1))
            else:
                parameter.copy_(torch.nan_to_num(parameter) + 0.5 * noise)
    return model


def _random_ids(*lengths: int) -> list[torch.Tensor]:
    """Returns a row of token ids from 3 to 127, (length,) int64, for every length; always the same ids."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, _VOCABULARY, (length,), generator=generator) for length in lengths]


def _eager(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns the logits (S, V) of transformers' model for a row of token ids (S,); ValueError if it fails."""
    try:
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    except Exception as error:
        raise ValueError(f"{_NOT_COMPARED}, because its eager attention fails: {_text(error)}") from error
    return logits


# ---------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class _Texts:
    """The documents of a comparison, made of random tokens.

    Attributes:
        model: builds the narrow copy.
    """

    model: Callable[[], Any]

    def reference(self, stock: Any) -> torch.Tensor:
        """Returns transformers' logits (tokens, V) for each document alone, concatenated."""
        return torch.cat([_eager(stock, ids) for ids in self.documents])

    @property
    def documents(self) -> list[torch.Tensor]:
        """The token ids of the documents."""
        return _random_ids(*_DOCUMENTS)

    def rows(self, packing: bool) -> dict[str, torch.Tensor]:
        """Returns a batch that has the documents in order; without `packing`, a row per document."""
        return _packed(self.documents, _ROW, packing)


def _texts(config: TrainConfig, model: PreTrainedConfig) -> _Texts:
    """Returns the documents without images for a model."""
    return _Texts(lambda: narrow_model(model, config.model.trust_remote_code))


@dataclass(frozen=True)
class _Pictured(_Texts):
    """The documents of a comparison with images, in one row; `reference_of`: `model.families.vision_reference`."""

    config: Any
    reference_of: Any

    def reference(self, stock: Any) -> torch.Tensor:
        """See `_Texts.reference`."""
        return torch.cat([self.reference_of.logits(stock, one) for one in self.reference_of.documents(self.config)])

    def rows(self, packing: bool) -> dict[str, torch.Tensor]:
        """Returns a batch of one row with all documents and their images; `packing` has no effect."""
        held = self.reference_of.documents(self.config)
        lengths = [len(one.ids) for one in held]
        length, starts = sum(lengths) + 3, np.cumsum([0, *lengths[:-1]]).tolist()
        order = np.arange(len(held)), np.array([len(held)])
        batch = _packed([one.ids for one in held], length, packing=True, order=order)
        return batch | self.reference_of.images_of(self.config, held, starts, length)


def _packed(documents: list[torch.Tensor], length: int, packing: bool, order: Any = None) -> dict[str, torch.Tensor]:
    """Returns the documents as a batch of rows of `length` tokens; without `packing`, a row per document."""
    tokens, lengths = torch.cat(documents).numpy(), np.array([len(ids) for ids in documents])
    held = Documents(tokens, tokens > 0, lengths, np.arange(len(lengths)))
    rows = PackedDataset(held, length, packing=packing, order=order)
    return rows.tensors(np.arange(len(rows)))


def _pictured(model: PreTrainedConfig, trust_remote_code: bool) -> _Pictured:
    """Returns documents with images, and a builder of the narrow copy of the whole model."""
    from transformers import AutoModelForImageTextToText

    from tpu_kit.model.families import vision_reference

    whole = vision_reference.narrow_config(model, narrow_model(model, trust_remote_code).config)

    def build() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            copied = AutoModelForImageTextToText.from_config(
                copy.deepcopy(whole), attn_implementation="eager", dtype=torch.float32
            )
        return copied.eval()

    return _Pictured(build, whole, vision_reference)


def _compare_training(
    config: TrainConfig, model: PreTrainedConfig, device_type: str, device: torch.device, held: _Texts | None = None
) -> str:
    """Describes how the copy's logits or gradients on `device` differ from transformers'; "" if they match.

    Arguments and errors are as in `differences`; a `held` of None compares random tokens.
    """
    shares = differences(config, model, device_type, device, held)
    most, gradient = _TOLERANCE, _GRADIENT_TOLERANCE
    if not (shares["logits"] <= most and max(shares.values()) <= gradient):
        most, gradient = _with_rounding(config, model, held)
    if not (share := shares.pop("logits")) <= most:
        whose = "transformers' eager attention on each document alone"
        return f"logits differ by {share:.1%} of the largest logit from {whose}"
    wrong = {name: share for name, share in shares.items() if not share <= gradient}
    if not wrong:
        return ""
    worst = max(wrong, key=wrong.__getitem__)
    whose = f"transformers, the most {worst}, by {wrong[worst]:.0%} of its norm"
    return f"{len(wrong)} of {len(shares)} gradients differ from {whose}"


def _with_rounding(config: TrainConfig, model: PreTrainedConfig, held: _Texts | None) -> tuple[float, float]:
    """Returns bounds (logits, gradients) for a copy that amplifies rounding, such as a copy with many layers.

    They follow from the difference between transformers' eager and SDPA attention. For all 48 layers of Gemma 4 12B,
    logits differ by 1 % and gradients by 100 %, which makes them meaningless; for its first 12 layers, by 0.003 %.
    """
    held = held or _texts(config, model)
    adapted = _adapted_copy(config, held)
    try:
        shares = _shares(_of_transformers(adapted, held, "sdpa"), _of_transformers(adapted, held))
    except ValueError:  # transformers has only one attention for the family
        return _TOLERANCE, _GRADIENT_TOLERANCE
    logits = _ROUNDING * shares.pop("logits")
    gradients = _ROUNDING * max(shares.values())
    return max(_TOLERANCE, min(_MOST, logits)), max(_GRADIENT_TOLERANCE, gradients)


def differences(
    config: TrainConfig, model: PreTrainedConfig, device_type: str, device: torch.device, held: _Texts | None = None
) -> dict[str, float]:
    """Compares a narrow copy of a model, prepared as in the run, with transformers on each document alone.

    Args:
        config: the run.
        model: the model's configuration.
        device_type: the run's device type.
        device: the device of the copy; on a mesh, any of its devices.
        held: the documents; None for random tokens.

    Returns:
        For the gradient of each trained tensor, by its name, ||difference|| / ||reference||. A very small ||reference||
        counts as a thousandth of the largest. For "logits", the larger of this ratio and the largest difference as a
        share of the largest logit, which finds errors at few tokens.

    Raises:
        ValueError: the copy cannot be built or cannot be trained with these settings.
    """
    held = held or _texts(config, model)
    adapted = _adapted_copy(config, held)
    expected = _of_transformers(adapted, held)
    batch = _prepare(adapted, config, device_type, held)
    models.to_device(adapted, device)
    used, state = batch["segment_ids"].flatten().nonzero()[:, 0].to(device), torch.get_rng_state()
    logits = models.logits(adapted, {name: tensor.to(device) for name, tensor in batch.items()})
    result = _backward(adapted, logits.flatten(0, 1)[used])
    if not torch.equal(state, torch.get_rng_state()):
        raise ValueError(
            "its code draws random numbers in training, and a recomputed layer would draw different numbers; set the "
            "dropout in its config.json to 0"
        )
    return _shares(result, expected)


def _shares(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the result of `differences`, by name of the tensor, for a result of `_backward` and the reference."""
    least = _SMALL * max(float(gradient.norm()) for name, gradient in expected.items() if name != "logits")
    shares = {name: float((result[name] - wanted).norm()) / max(float(wanted.norm()), least)
              for name, wanted in expected.items()}  # fmt: skip
    apart = (result["logits"] - expected["logits"]).abs().max() / expected["logits"].abs().max()
    return shares | {"logits": max(shares["logits"], float(apart))}


def _adapted_copy(config: TrainConfig, held: _Texts) -> torch.nn.Module:
    """Builds the copy with random parameters and the run's adapters, in training mode, without dropout in adapters."""
    # Large adapters, such as rank 2 with alpha=32, sharpen attention so much that rounding changes logits by 0.1 %.
    lora = replace(config.lora, init="default", dropout=0.0, alpha=max(1, math.isqrt(config.lora.r)))
    lora = replace(lora, vision=lora.vision and isinstance(held, _Pictured))
    with warnings.catch_warnings(action="ignore"):
        adapted = _randomize(trainable.adapt(held.model(), lora, "fp32").train())
    if isinstance(held, _Pictured):
        held.reference_of.soften(models.base_model(adapted))
    return adapted


def _of_transformers(adapted: torch.nn.Module, held: _Texts, attends: str = "eager") -> dict[str, torch.Tensor]:
    """Returns `_backward` for the same weights with transformers' attention `attends`, each document alone."""
    reference = copy.deepcopy(adapted).eval()
    stock = models.base_model(reference)
    stock.set_attn_implementation(attends)
    return _backward(reference, held.reference(stock))


def _prepare(model: torch.nn.Module, config: TrainConfig, device_type: str, held: _Texts) -> dict[str, torch.Tensor]:
    """Prepares a copy in place as in the run, without dropout; returns a batch that has the documents in order."""
    batch = held.rows(config.data.packing)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        models.hidden_states(model, batch)  # raises for attention dropout
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    preparation.prepare_layers(model, config, device_type)
    return batch


def _backward(model: torch.nn.Module, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns, on the CPU, "logits" and the gradients of their randomly weighted sum, by parameter name."""
    generator = torch.Generator().manual_seed(4)
    (logits * torch.randn(logits.shape, generator=generator).to(logits.device)).sum().backward()
    trained = models.trainable_parameters(model)
    tensors = [logits.detach()]
    tensors += [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in trained.values()]
    # XLA compiles a program for each read tensor, so all are read as one.
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu().split([tensor.numel() for tensor in tensors])
    first, *rest = (part.view(tensor.shape) for part, tensor in zip(flat, tensors, strict=True))
    gradients = dict(zip(trained, rest, strict=True))
    return {"logits": first} | layer_calls.unstacked(layer_calls.stacked_names(model), gradients)


def _on_xla(config: TrainConfig, device_type: str) -> str:
    """Returns the problem that `_compare_training` finds on XLA:CPU, or "", from a process that may crash."""
    request = json.dumps({"config": config.to_dict(), "device_type": device_type})
    environment = xla_cpu_environment() | _QUICK_COMPILES
    done = run_child(["-m", "tpu_kit.generation.reference_check"], environment, given=request)
    if done.status == 0:
        return str(json.loads(done.output.splitlines()[-1]))
    if done.status < 0:
        return f"the compiler or torch_xla crashed on this model with {done.how}"
    return f"the process that compares it on XLA:CPU ended with {done.how}: {done.last_lines(1)}"


def main() -> None:
    """Compares on XLA:CPU, in a child process, and ends the process with exit code 0.

    Stdin is {"config": `TrainConfig.to_dict`, "device_type": ...} as JSON. The last line of stdout is the problem as
    JSON, "" if the model matches.
    """
    request = json.loads(sys.stdin.read())
    config, device = load_config(request["config"]), traced_program.device()
    (torch.ones(2, device=device, requires_grad=True) * 2).sum().backward()  # before autograd's CPU engine starts
    model = read_config(config.model)
    assert model is not None, "the caller has read it"
    with traced_program.refusing():
        problem = _problem(_Comparison("", lambda: _compare_training(config, model, request["device_type"], device)))
    print(json.dumps(problem), flush=True)
    os._exit(0)


# -------------------------------------------------------------------------------------------------------- generation


def _narrow_with_pictures(model: PreTrainedConfig, trust_remote_code: bool) -> tuple[PreTrainedModel, _Pictured]:
    """Returns the narrow copy of the whole model with random parameters, and the documents with images."""
    held = _pictured(model, trust_remote_code)
    built: PreTrainedModel = _randomize(held.model())
    held.reference_of.soften(built)
    return built, held


def _compare_replies(model: PreTrainedModel, held: _Pictured | None = None) -> str:
    """Describes how greedy replies differ from transformers'; "" if they match.

    The prompts are two rows of random tokens, or the documents of `held`.
    """
    asked = held.reference_of.documents(held.config) if held else []
    prompts = [one.ids for one in asked] or _random_ids(11, 4)
    images = held.reference_of.images_of_each(held.config, asked, max(map(len, prompts)) - 1) if held else {}
    try:
        tokens, logprobs = replies(model, [ids.tolist() for ids in prompts], images=images)
    except Exception as error:
        return f"its layers do not work with the kit's key/value cache ({_text(error)})"
    pairs = list(zip(prompts, tokens.long().T, strict=True))

    def of_transformers(attends: str) -> list[torch.Tensor]:
        """Returns transformers' logits at the tokens of each reply."""
        model.set_attn_implementation(attends)
        found = []
        with torch.no_grad():
            for number, (ids, reply) in enumerate(pairs):
                seen = torch.cat([ids, reply])
                logits = held.reference_of.logits(model, asked[number], reply) if held else _eager(model, seen)
                found.append(logits[len(ids) - 1 : -1])
        return found

    known, wrong = of_transformers("eager"), []
    largest = max(float(logits.abs().max()) for logits in known)
    for logits, (_, reply), chosen in zip(known, pairs, logprobs.T, strict=True):
        expected = logits.log_softmax(-1)
        wrong += [expected.gather(-1, reply[:, None])[:, 0] - chosen, expected.amax(-1) - chosen]
    share, most = float(torch.cat(wrong).abs().max()) / largest, _TOLERANCE
    if not share <= most:
        with contextlib.suppress(ValueError):  # transformers has only one attention for the family
            apart = [one - other for one, other in zip(of_transformers("sdpa"), known, strict=True)]
            most = max(most, min(_MOST, _ROUNDING * float(torch.cat(apart).abs().max()) / largest))
    if share <= most:
        return ""
    return f"log-probabilities of its replies differ from transformers by {share:.1%} of the largest logit"


def replies(
    model: PreTrainedModel, prompts: list[list[int]], steps: int = 12, images: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """Generates `steps` tokens greedily with the kit's cache; returns (2, steps, prompts) fp32 as `Decoder.decode`.

    The model is on the CPU. The prompts are token ids, and `images` are as in `decoder.Batch`. No token ends a reply.
    """
    width, sampling = max(map(len, prompts)) - 1, Sampling(steps)
    decoder = Decoder(model, CpuRuntime(0, 1, torch.device("cpu")), steps, width + steps)
    ids, lengths = filled([prompt[:-1] for prompt in prompts], width, len(prompts))
    batch = Batch(ids, lengths, torch.tensor([prompt[-1] for prompt in prompts]), images or {})
    uniforms = torch.zeros(steps, len(prompts))
    with decoder.ready():
        cache = decoder.prefill(batch, 1, steps)
        state = decoder.begin(batch, 1, [False] * len(prompts), uniforms, sampling)
        return decoder.decode(state, cache, steps)


if __name__ == "__main__":
    main()
