"""Linear layer and cross-entropy over chunks of tokens, without the logits of a whole batch.

For T tokens and a vocabulary of V the logits are T x V floats (2.3 GiB in fp32 for 4 x 1024 tokens of Qwen2.5), and a
backward pass needs several of them. Here the forward pass processes `chunk` tokens at a time and computes the gradient
at once: with respect to the logits it is softmax(logits) - target. Each chunk leaves one number and a (chunk, H)
gradient, and nothing is computed twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpu_kit.distributed.mesh import current_mesh
from tpu_kit.models import partition
from tpu_kit.models.activation_checkpointing import tiles_of
from tpu_kit.xla.scan import Tensors, scan
from tpu_kit.xla.sharding import constrain

IGNORE = -100
"""Label of a token that carries no loss (the value PyTorch and Hugging Face use)."""


class _Head(NamedTuple):
    """The operations between the linear layer and the loss."""

    softcap: float | None
    scale: float
    smoothing: float


def shift_labels(labels: torch.Tensor, segment_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Moves labels to the previous position, within each document.

    Args:
        labels: (B, S) integer labels, unshifted, `IGNORE` where a token carries no loss.
        segment_ids: (B, S) number of the document of each token, 0 = padding; None = one document a row.

    Returns:
        (B, S) labels; `IGNORE` at the last token of a document and at padding.
    """
    ignored = torch.full_like(labels[:, :1], IGNORE)
    shifted = torch.cat([labels[:, 1:], ignored], dim=1)
    if segment_ids is None:
        return shifted
    following = torch.cat([segment_ids[:, 1:], torch.zeros_like(segment_ids[:, :1])], dim=1)
    inside = (following == segment_ids) & (segment_ids != 0)
    return torch.where(inside, shifted, torch.full_like(shifted, IGNORE))


def rows_in_chunks(hidden: torch.Tensor, labels: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Orders tokens so that each chunk of the loss has some of every row, and is spread over all shards of the rows.

    Args:
        hidden: (B, S, H) last hidden states.
        labels: (B, S), already shifted.
        chunk: tokens of a device's rows in a chunk; S is divided into equal parts.

    Returns:
        (S / c, B * c, H) hidden states, (S / c, B * c) labels, and B * c.
    """
    mesh = current_mesh()
    assert mesh is not None
    rows = hidden.shape[0] // mesh.batch_shards
    parts = tiles_of(hidden.shape[1], max(1, chunk // rows))
    states, targets = (partition.tiles(tensor, parts).flatten(1, 2) for tensor in (hidden, labels))
    return states, targets, targets.shape[1]


def chunked_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk: int,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums the negative log-likelihood of `labels` with at most `chunk` x V logits in memory.

    The matrix products run in the dtype of `hidden`; the softmax, the sum and the accumulated gradient of the weight
    are fp32. Gradients flow to `hidden`, and to `weight` and `bias` where they require it. Differentiable once.

    Args:
        hidden: (T, H) last hidden states.
        weight: (V, H) output embedding, of any float dtype.
        labels: (T,) integer targets, already shifted (`shift_labels`); `IGNORE` carries no loss.
        chunk: tokens whose logits exist at once; T is padded to a multiple of it with ignored tokens.
        softcap: c in c * tanh(logits / c) (Gemma 2, arXiv:2408.00118), None for none.
        label_smoothing: weight e of the uniform distribution in the target: (1 - e) one-hot + e / V.
        bias: (V,) bias of the output layer.
        logit_scale: factor on the logits before the soft cap (Cohere, Granite).

    Returns:
        The fp32 scalars (sum over tokens of the loss, in nats; number of tokens that carry loss).

    Raises:
        ValueError: if `chunk` or `label_smoothing` is out of range, or the shapes do not fit.
    """
    if chunk < 1:
        raise ValueError(f"loss_chunk is {chunk}: give the number of tokens per chunk, 1 or more (512 is usual)")
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}: give a value from 0 (none) to below 1")
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} do not fit: "
            "they must be (T, H), (V, H) and (T,)"
        )
    chunk = min(chunk, hidden.shape[0])  # a batch smaller than a chunk needs no padding
    count = (labels != IGNORE).sum().float()
    head = _Head(softcap, logit_scale, label_smoothing)
    # Under no_grad inputs of a Function may still require gradients, which evaluation must not compute.
    wanted = tuple(
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    padding = -hidden.shape[0] % chunk
    if padding:
        hidden, labels = F.pad(hidden, (0, 0, 0, padding)), F.pad(labels, (0, padding), value=IGNORE)
    return _ChunkedNLL.apply(hidden, weight, bias, labels, chunk, head, wanted), count


def _chunk_nll(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, head: _Head, grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # On a mesh each device has the logits of all tokens of its data group, for its part of the vocabulary.
    hidden = constrain(hidden, ("data", None))
    logits = constrain(F.linear(hidden, weight, bias), ("data", ("model", "fsdp"))).float()
    """Returns the loss of a chunk (fp32 scalar), and if `grad` its gradient (chunk, V) at the linear layer's output."""
    if head.scale != 1.0:
        logits = logits * head.scale
    if head.softcap is not None:
        capped = torch.tanh(logits / head.softcap)
        logits = capped * head.softcap
    log_p = F.log_softmax(logits, dim=-1)
    # XLA fuses a comparison into the loop over the vocabulary, unlike a gather or scatter.
    is_label = torch.arange(log_p.shape[-1], device=labels.device) == labels[:, None]
    carries = (labels != IGNORE)[:, None]
    uniform = head.smoothing / log_p.shape[-1]
    target = is_label * (1.0 - head.smoothing) + uniform
    loss = -torch.where(carries, target * log_p, 0.0).sum()
    if not grad:
        return loss, None
    slope = torch.where(carries, log_p.exp() - target, 0.0)
    if head.softcap is not None:
        slope = slope * (1.0 - capped * capped)
    if head.scale != 1.0:
        slope = slope * head.scale
    return loss, slope.to(hidden.dtype)


class _ChunkedNLL(torch.autograd.Function):
    """Sums the loss over chunks; computes gradients in the forward pass and scales them in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        chunk: int,
        head: _Head,
        wanted: tuple[bool, ...],
    ) -> torch.Tensor:
        to_hidden, to_weight, to_bias = wanted
        compute_weight = weight.to(hidden.dtype)
        compute_bias = None if bias is None else bias.to(hidden.dtype)

        # The carry: [loss, weight, bias?, weight gradient?, bias gradient?]. It has the weight because the body of a
        # scan must not use outer tensors.
        carry = [torch.zeros((), device=hidden.device), compute_weight]
        carry += [compute_bias] if compute_bias is not None else []
        first_gradient = len(carry)
        carry += [torch.zeros_like(weight, dtype=torch.float32)] if to_weight else []
        carry += [torch.zeros_like(bias, dtype=torch.float32)] if to_bias and bias is not None else []

        def body(carry: Tensors, chunk_inputs: Tensors) -> tuple[Tensors, Tensors]:
            states, targets = chunk_inputs
            chunk_bias = None if bias is None else carry[2]
            loss, slope = _chunk_nll(states, carry[1], chunk_bias, targets, head, grad=any(wanted))
            new = [carry[0] + loss, *carry[1:]]
            if slope is None:
                return new, []
            if to_weight:
                new[first_gradient] = carry[first_gradient] + (slope.t() @ states).float()
            if to_bias:
                new[-1] = carry[-1] + slope.float().sum(0)
            return new, [slope @ carry[1]] if to_hidden else []

        chunks = hidden.shape[0] // chunk
        inputs = [hidden.detach().reshape(chunks, chunk, -1), labels.reshape(chunks, chunk)]
        # Unrolled, all chunks would be in memory at once. The compiler for a v5e reports (4096 tokens, H 896, V 151936,
        # bf16, chunk 512) 149 MiB of temporaries as a loop, 1191 unrolled, and 1187 for the plain loss.
        carry, outputs = scan(body, carry, inputs)

        gradients = carry[first_gradient:]
        ctx.save_for_backward(
            outputs[0].reshape(hidden.shape) if to_hidden else None,
            gradients[0].to(weight.dtype) if to_weight else None,
            gradients[-1].to(bias.dtype) if to_bias and bias is not None else None,
        )
        return carry[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In fp32, as bf16 would round the factor 1 / tokens.
        gradients = (
            None if saved is None else (saved.float() * upstream).to(saved.dtype) for saved in ctx.saved_tensors
        )
        return (*gradients, None, None, None, None)
