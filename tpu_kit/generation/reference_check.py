"""Checks for a model's architecture, before its download, that the kit trains and generates as transformers does.

It builds a narrow copy of the model from its configuration, with all its layers, few heads and random weights. The copy
is prepared as the run prepares the model (attention, adapters, recomputation, loops), and runs documents as the run
does, packed into rows or not. Logits and gradients are compared with those of transformers' eager attention on each
document alone. For an unknown family on XLA, a child process does this again on XLA:CPU.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpu_kit.config.loader import TrainConfig, from_dict
from tpu_kit.distributed.backends import CpuRuntime
from tpu_kit.distributed.child_process import run_child, xla_cpu_environment
from tpu_kit.generation.decoder import Batch, Decoder, filled
from tpu_kit.generation.narrow_copy import narrow_model, quiet, settings_of
from tpu_kit.generation.prompts import START
from tpu_kit.generation.sampling import Sampling
from tpu_kit.models import attention, layer_scan
from tpu_kit.models import causal_lm as models
from tpu_kit.models.architecture import FAMILIES
from tpu_kit.models.loading import brief, read_config
from tpu_kit.xla import program

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_TOLERANCE = 1e-3  # relative to the largest logit; in fp32 another order of summation changes 1e-7 to 1e-5 of it
_GRADIENT_TOLERANCE = 2e-2  # relative to the norm of the tensor's gradient; XLA:CPU changes up to 1.5e-3 of it
_SMALL = 1e-3  # of the largest gradient's norm; some gradients are 0 but for rounding, such as that of a key's bias
_DOCUMENTS, _ROW = (21, 13), 37  # tokens; each document is longer than a window of the copy
_PROMPTS, _REPLY = (11, 4), 12  # tokens
_KERNELS = "tpu_kit_segments"
_XLA = ("tpu", "xla-cpu")
_QUICK_COMPILES = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}

_verdicts: dict[str, str] = {}
_lock = threading.Lock()  # replicas of XLA:CPU are threads


def check_training(config: TrainConfig, device_type: str) -> None:
    """Checks that a run trains its model as transformers defines it; reads no weights.

    It takes a few seconds, and for an unknown family on XLA about a minute.

    Args:
        config: the run. A model without a readable configuration passes: loading it explains why.
        device_type: of the run; the kernels of a TPU get segment ids instead of a mask.

    Raises:
        ValueError: the model cannot be trained this way; the text names the settings with which it can be, if there
            are any. Or the run generates, and the model cannot.
    """
    given = read_config(config.model)
    if given is None:
        return
    models.check_length(given.get_text_config(), config.data.max_length)
    if problem := _training_problem(config, given, device_type):
        family = f"{given.model_type} (model.name={config.model.name})"
        raise ValueError(f"{family} cannot be trained this way: {problem}. {_remedy(config, given, device_type)}")
    if config.tracking.generate_rows or config.tracking.eval_generate_rows:
        check_generation(given, config.model.trust_remote_code)


def _remedy(config: TrainConfig, given: PreTrainedConfig, device_type: str) -> str:
    """Returns what to do: the first change of settings with which the model can be trained, or another model."""
    changes: dict[str, dict[str, dict[str, Any]]] = {
        "optim.remat=none and optim.scan_layers=off": {"optim": {"remat": "none", "scan_layers": "off"}},
        "data.packing=false, which puts one document in each row": {"data": {"packing": False}},
    }
    if attention.choose(config.model.attention, device_type) != attention.SDPA:
        changes = {"model.attention=sdpa": {"model": {"attention": "sdpa"}}, **changes}
    for text, sections in changes.items():
        changed = replace(config, **{name: replace(getattr(config, name), **new) for name, new in sections.items()})
        if changed != config and not _training_problem(changed, given, device_type):
            return f"Set {text}"
    return f"Otherwise use a model of another family, such as {', '.join(FAMILIES)}"


def check_generation(config: PreTrainedConfig, trust_remote_code: bool = False) -> None:
    """Checks that a model generates the same with the kit's key/value cache as transformers without a cache.

    Args:
        config: of the model.
        trust_remote_code: whether the model may run Python code of its own.

    Raises:
        ValueError: it does not.
    """
    problem = _cached(f"generation {settings_of(config)}", lambda: _generation_problem(config, trust_remote_code))
    if problem:
        raise ValueError(
            f"the kit cannot generate with {config.model_type}: {problem}. Export the model and call generate() of "
            "transformers; to train it set tracking.generate_rows=0 and tracking.eval_generate_rows=0"
        )


def _cached(key: str, find: Callable[[], str]) -> str:
    with _lock:
        if key not in _verdicts:
            _verdicts[key] = find()
        return _verdicts[key]


def _generation_problem(config: PreTrainedConfig, trusted: bool) -> str:
    try:
        model = narrow_model(config, trusted)
    except ValueError as error:
        return f"it cannot be compared with transformers, as no narrow copy of it can be built ({error})"
    attention.register()
    with torch.no_grad():
        return _compare_replies(model)


def _training_problem(config: TrainConfig, given: PreTrainedConfig, device_type: str) -> str:
    """Describes why a run does not train as transformers does; an empty text if it does."""
    optim, lora = config.optim, config.lora
    way = (config.launch.mesh, optim.remat, optim.scan_layers, lora, config.data.packing, config.model.attention)

    def find() -> str:
        if problem := compare_training(config, given, device_type, torch.device("cpu")):
            return problem
        known = given.get_text_config().model_type in FAMILIES
        return "" if known or device_type not in _XLA else _compare_on_xla(config, device_type)

    return _cached(f"training {device_type} {way} {settings_of(given)}", find)


def _compare_on_xla(config: TrainConfig, device_type: str) -> str:
    """Runs `compare_training` on XLA:CPU, in a process that a crash of the compiler may end."""
    with tempfile.TemporaryDirectory() as folder:
        result, operations = Path(folder, "result"), Path(folder, "operations")
        request = {"config": config.to_dict(), "device_type": device_type, "folder": folder}
        done = run_child(
            ["-m", "tpu_kit.generation.reference_check"], xla_cpu_environment() | _QUICK_COMPILES,
            given=json.dumps(request),
        )  # fmt: skip
        if result.is_file():
            return result.read_text()
        if done.status < 0:
            return done.crash(operations)
        return f"the process that compares it on XLA:CPU ended with {done.how}: {done.last_lines(1)}"


def main() -> None:
    """Compares on XLA:CPU, in the child: writes `result`."""
    request = json.loads(sys.stdin.read())
    folder, config, device = Path(request["folder"]), from_dict(request["config"]), program.device()
    (torch.ones(2, device=device, requires_grad=True) * 2).sum().backward()  # before the CPU's engine starts
    given = read_config(config.model)
    assert given is not None, "the caller has read it"
    with program.recording_operations(folder / "operations"):
        problem = compare_training(config, given, request["device_type"], device)
    (folder / "result").write_text(problem)
    os._exit(0)


def compare_training(config: TrainConfig, given: PreTrainedConfig, device_type: str, device: torch.device) -> str:
    """Describes how logits or gradients of the narrow copy differ from those of transformers; an empty text if not.

    Args:
        config: the run.
        given: the configuration of its model.
        device_type: of the run.
        device: of this comparison; on the CPU the copy is prepared as for training on a CPU.

    Raises:
        ValueError: the adapters do not fit the model.
    """
    try:
        narrow = narrow_model(given, config.model.trust_remote_code)
    except ValueError as error:
        return f"it cannot be compared with transformers, as no narrow copy of it can be built ({error})"
    from transformers import AttentionInterface

    attention.register()
    AttentionInterface.register(_KERNELS, _attention_of_kernels)
    model = _adapted(narrow, config)
    reference, documents = copy.deepcopy(model).eval(), _ids(narrow, _DOCUMENTS)
    wanted, weights = [], []
    try:
        stock = models.base_model(reference)
        stock.set_attn_implementation("eager")
        for number, ids in enumerate(documents):
            logits = stock(input_ids=ids[None], use_cache=False).logits[0]
            wanted.append(logits.detach())
            random = torch.Generator().manual_seed(number)
            weights.append(torch.randn(logits.shape, generator=random))
            (logits * weights[-1]).sum().backward()
    except Exception as error:
        return f"it cannot be compared with transformers, whose eager attention fails: {_told(error)}"
    try:
        found, gradients = _trained(model, config, device_type, device, documents, weights)
    except Exception as error:
        return _told(error)
    share = _share([one - two for one, two in zip(found, wanted, strict=True)], wanted)
    if not share <= _TOLERANCE:
        return (
            f"logits differ by {share:.1%} of the largest one from those of transformers' eager attention on each "
            "document alone"
        )
    return _compare_gradients(gradients, _read(wanted[0], reference)[1])


def _adapted(narrow: PreTrainedModel, config: TrainConfig) -> torch.nn.Module:
    """Adds the run's adapters to a narrow copy, with random values."""
    with quiet():
        model = models.adapt(narrow, replace(config.lora, init="default", dropout=0.0), "fp32").train()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
    return model


def _trained(
    model: torch.nn.Module, config: TrainConfig, device_type: str, device: torch.device,
    documents: list[torch.Tensor], weights: list[torch.Tensor],
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    """Returns the logits of each document and the gradients of the trained parameters, as the run computes them."""
    rows = [[0, 1], [1, 0]] if config.data.packing else [[0], [1]]
    batch = _batch([[documents[number] for number in row] for row in rows])
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        models.hidden_states(model, batch)  # refuses dropout of attention
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    way = replace(config, model=replace(config.model, attention="sdpa"))
    if config.launch.mesh is not None:  # there the layers are always loops
        way = replace(way, optim=replace(way.optim, scan_layers="on"))
    models.prepare_layers(model, way, device_type if device.type == "xla" else "cpu")
    if attention.choose(config.model.attention, device_type) != attention.SDPA:
        models.base_model(model).set_attn_implementation(_KERNELS)
    models.to_device(model, device)
    state = torch.get_rng_state()
    logits = models.logits(model, {name: tensor.to(device) for name, tensor in batch.items()})
    scale, spans = torch.zeros(logits.shape), {}
    for row, numbers in enumerate(rows):
        start = 0
        for number in numbers:
            span = spans[number] = row, slice(start, start := start + len(documents[number]))
            scale[span] = weights[number] / (sum(map(len, rows)) / len(documents))
    (logits * scale.to(device)).sum().backward()
    if not torch.equal(state, torch.get_rng_state()):
        raise ValueError(
            "its code draws random numbers in training, and a layer that is recomputed would draw others; set the "
            "dropout in its config.json to 0"
        )
    found, gradients = _read(logits.detach(), model)
    return [found[spans[number]] for number in range(len(documents))], gradients


def _read(logits: torch.Tensor, model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns logits and gradients on the CPU; as one tensor, because XLA compiles a program for each that is read."""
    trained = models.trainable_parameters(model)
    tensors = [logits, *(torch.zeros_like(one) if one.grad is None else one.grad for one in trained.values())]
    flat = torch.cat([one.reshape(-1) for one in tensors]).cpu().split([one.numel() for one in tensors])
    first, *rest = (part.view(one.shape) for part, one in zip(flat, tensors, strict=True))
    return first, layer_scan.unstacked(layer_scan.stacked_names(model), dict(zip(trained, rest, strict=True)))


def _compare_gradients(gradients: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str:
    least = _SMALL * max(float(one.norm()) for one in wanted.values())
    shares = {
        name: float((gradients[name] - one).norm()) / max(float(one.norm()), least) for name, one in wanted.items()
    }
    wrong = {name: share for name, share in shares.items() if not share <= _GRADIENT_TOLERANCE}
    if not wrong:
        return ""
    worst = max(wrong, key=wrong.__getitem__)
    return (
        f"{len(wrong)} of {len(shares)} gradients differ from those of transformers, most that of {worst}, by "
        f"{wrong[worst]:.0%} of its norm"
    )


def _attention_of_kernels(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Computes attention from the inputs that the kernels of a TPU get."""
    if kwargs.get("segment_ids") is None:
        raise ValueError("the model does not pass its keyword arguments, the segment ids, on to its attention")
    return attention.sdpa_attention(module, query, key, value, None, **kwargs)


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


if __name__ == "__main__":
    main()
