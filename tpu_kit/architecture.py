"""Whether the kit computes what transformers computes, for the architecture of a model, before its weights are read.

A narrow copy of the model (`narrow`) runs with the kit's attention, on two documents packed into a row, and with
transformers' eager attention on each document alone; and it generates over the kit's key/value cache. This finds
arguments of attention that the kit does not implement, layers that carry a state from one document into the next, and
caches of another layout.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal

import torch

from tpu_kit import attention
from tpu_kit import model as models
from tpu_kit.config import TrainConfig
from tpu_kit.decoding import Decoder
from tpu_kit.narrow import narrow_model, settings_of
from tpu_kit.padding import Batch, filled
from tpu_kit.pretrained import brief, read_config
from tpu_kit.rope import check_length
from tpu_kit.runtime import Runtime
from tpu_kit.sampling import START, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_TOLERANCE = 1e-3  # of the largest logit; in fp32 another order of summation changes 1e-7 to 1e-5 of it
_DOCUMENTS, _ROW = (21, 13), 37  # tokens; each document is longer than a window of the copy
_PROMPTS, _REPLY = (11, 4), 12  # tokens
_OTHERS = "Use a model of another family, such as llama, mistral, qwen2, qwen3, gemma2, gemma3 or phi3"
_KERNELS = "tpu_kit_segments"

_verdicts: dict[tuple[str, str], list[str]] = {}
_lock = threading.Lock()  # replicas of XLA:CPU are threads


def check_training(config: TrainConfig, device_type: str) -> None:
    """Checks that a model can be trained as transformers defines it; takes up to 5 s, and reads no weights.

    Args:
        config: the run. A model whose configuration cannot be read passes: loading it explains why.
        device_type: where it is to run; a TPU's kernels see the segment ids alone, not the mask.

    Raises:
        ValueError: the logits differ from those of transformers, for a document alone or for packed documents, or they
            would in rows of data.max_length; or the run generates, and the model cannot.
    """
    given = read_config(config.model)
    if given is None:
        return
    family, trusted = f"{given.model_type} (model.name={config.model.name})", config.model.trust_remote_code
    check_length(given.get_text_config(), config.data.max_length)
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
    """Checks that a model generates with the kit's key/value cache what transformers gives without a cache.

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
    """What is wrong, an empty text for nothing; found once in a process for each configuration."""
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
    """Attention that knows what the kernels of a TPU know."""
    if kwargs.get("segment_ids") is None:
        raise ValueError("the model does not pass its keyword arguments, the segment ids, on to its attention")
    return attention.sdpa_attention(module, query, key, value, None, **kwargs)


def _compare_documents(model: PreTrainedModel, implementation: str) -> list[str]:
    """What is wrong with documents alone in their rows, and with packed ones."""
    documents = _ids(model, _DOCUMENTS)
    try:
        expected = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in documents]
    except Exception as error:
        return [f"it cannot be compared with transformers, whose eager attention fails: {_told(error)}"] * 2
    model.set_attn_implementation(implementation)
    model._tpu_kit_compute_dtype = torch.float32
    found = []
    for rows in ([[0], [1]], [[0, 1], [1, 0]]):
        try:
            logits = models.logits(model, _batch([[documents[place] for place in row] for row in rows]))
            wanted = [torch.cat([expected[place] for place in row]) for row in rows]
            share = _share([logits[row, : len(one)] - one for row, one in enumerate(wanted)], wanted)
            found.append("" if share <= _TOLERANCE else f"logits differ by {share:.1%} of the largest one")
        except Exception as error:
            found.append(_told(error))
    alone, packed = found
    if alone.startswith("logits"):
        alone = f"for one document alone, {alone} from those of transformers' eager attention"
    if packed.startswith("logits"):
        packed = f"they change each other, as {packed} from those of each document alone"
    return [alone, packed]


def _batch(rows: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of documents, as `packing` makes them."""
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
    """What is wrong with greedy replies to two prompts of different lengths."""
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
    """(2, reply, prompts): greedy tokens, and their log-probabilities."""
    count, width = len(prompts), max(map(len, prompts)) - 1
    decoder = Decoder(model, Runtime("cpu", 0, 1, torch.device("cpu")), _REPLY, width + _REPLY)
    ids, lengths = filled([prompt[:-1] for prompt in prompts], width, count)
    batch, sampling = Batch(ids, lengths, torch.tensor([prompt[-1] for prompt in prompts])), Sampling(_REPLY)
    never = torch.full((8 * decoder.vocabulary,), START, dtype=torch.int32)
    with decoder.ready():
        cache = decoder.prefill(batch, 1, _REPLY)
        uniforms, knobs = (
            sampling.uniforms(_REPLY, [(row, 0) for row in range(count)]),
            sampling.knobs(decoder.vocabulary),
        )
        state = decoder.begin(batch, 1, [False] * count, uniforms, knobs, never, None)
        return decoder.decode(sampling.kind, state, cache, _REPLY)


def _ids(model: PreTrainedModel, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    random, most = torch.Generator().manual_seed(2), model.get_input_embeddings().weight.shape[0]
    return [torch.randint(3, most, (length,), generator=random) for length in lengths]


def _share(differences: list[torch.Tensor], scale: list[torch.Tensor]) -> float:
    """The largest difference as a share of the largest number; NaN if there is one."""
    largest, whole = (
        torch.cat([part.flatten().float().abs() for part in parts]).max() for parts in (differences, scale)
    )
    return float(largest / whole)


def _told(error: Exception) -> str:
    return brief(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {brief(error)}"
