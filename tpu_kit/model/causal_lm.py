"""The forward pass of a causal language model up to its output head, and its move to a device.

Precision: LoRA stores the frozen base in `base_dtype` (int8 and int4: see `quantization`), and adapters in fp32. Full
fine-tuning (lora.r=0) stores all weights in fp32, because a bf16 weight (8 bits of mantissa) loses updates of relative
size 1e-3 or less. Autocast runs matrix products in bf16 unless base_dtype=fp32. LoRA needs autocast too: without it,
PEFT converts the activations to fp32 before every adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from tpu_kit.config.mesh import Spec
from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.model import attention
from tpu_kit.model.base_model import OutputHead as OutputHead
from tpu_kit.model.base_model import base_model as base_model
from tpu_kit.model.base_model import output_embedding as output_embedding
from tpu_kit.model.base_model import text_config as text_config
from tpu_kit.model.base_model import tied_layers
from tpu_kit.model.families import registry as families
from tpu_kit.model.loop.layer_calls import stacked_parts, stacked_prefixes
from tpu_kit.model.loop.layer_inputs import Visibility
from tpu_kit.model.sharding import partition


def to_device(model: torch.nn.Module, device: torch.device | str) -> torch.nn.Module:
    """Moves a model, and its teacher, to a torch device, in place, and returns the model; tied embeddings stay tied.

    On XLA with a mesh of several devices, `partition.to_mesh` moves the model in shards, and may raise ValueError.

    In other cases, a move to XLA makes a new parameter per module, so tied embeddings would silently become two. So
    afterwards, output layers get the weights of `tied_layers` again. This function does not call `tie_weights`, because
    transformers replaces it process-wide while another replica loads a model.
    """
    if active_mesh().size > 1 and torch.device(device).type == "xla":
        return partition.to_mesh(model, stacked_prefixes(model), stacked_parts(model))
    bases = filter(None, (base_model(model), getattr(model, "teacher", None)))
    tied = [pair for base in bases for pair in tied_layers(base)]
    model.to(device)
    for embedding, head in tied:
        head.weight = embedding.weight
    return model


def tensor_specs(model: torch.nn.Module) -> dict[str, Spec]:
    """Returns the partition specs of a model's parameters and buffers on the mesh of this process, by name."""
    embedding, stacks = partition.embedding_of(model), tuple(stacked_prefixes(model))
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: partition.spec_of(name, tensor, embedding, name.startswith(stacks)) for name, tensor in tensors}


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Casts a model's floats in place, except persistent buffers (saved in its files), such as routers' fp32 biases."""
    saved = model.state_dict().keys()
    kept = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    model.to(dtype)
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)


def hidden_states(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Runs the model up to its output head, so that the loss can compute the logits in chunks.

    Args:
        model: from `load_model`, on the batch's device.
        batch: input_ids (B, S) and, optionally, position_ids (default: from 0), segment_ids (default: a row is one
            document) and prefix_ids; see `Visibility`. A family may read further columns, such as images.

    Returns:
        Last hidden states (B, S, H) in the compute dtype, after the final norm, on the batch's device.
    """
    base = base_model(model)
    ids = batch["input_ids"]
    dtype = compute_dtype(model)
    with autocast(ids.device.type, dtype), partition.embedding_by_columns(base):
        given, seen, additions = families.decoder_inputs(base, batch)
        implementation = base.config._attn_implementation
        with attention.bound(implementation, Visibility.of(batch, **seen), additions) as mask:
            named: dict[str, Any] = {"position_ids": batch.get("position_ids"), **given}  # images set their own
            output = base.get_decoder()(**named, use_cache=False, attention_mask=mask)
    return partition.by_rows(output.last_hidden_state.to(dtype))


def compute_dtype(model: torch.nn.Module) -> torch.dtype:
    """Returns the dtype of the matrix products of a model from `load_model`, `adapt` or `freeze`."""
    return model._tpu_kit_compute_dtype  # type: ignore[return-value]  # mypy expects a tensor or a module


def autocast(device_type: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Returns a context of autocast to a 16-bit `dtype`, without a cache of cast weights; for fp32 it does nothing.

    `device_type` is torch's, such as "xla". For fp32, an outer autocast stays in effect.
    """
    if dtype.itemsize > 2:  # fp32, or fp64 in tests; torch 2.11 would warn about fp64
        return contextlib.nullcontext()
    # All threads share the cache of cast weights. If replicas are threads, cache hits would depend on timing, and the
    # replicas' graphs would differ.
    return torch.autocast(device_type, dtype=dtype, cache_enabled=False)


def logits(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Computes all logits (B, S, V), fp32, like the chunked loss; for the arguments see `hidden_states`."""
    return output_embedding(model).logits(hidden_states(model, batch))


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the trained parameters by name, in the model's order; a tied weight appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
