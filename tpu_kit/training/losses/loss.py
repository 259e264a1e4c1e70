"""Linear layer and cross-entropy over chunks of tokens, without the logits of a whole batch.

The forward pass processes `chunk` tokens at a time and also computes their gradient: with respect to the logits it is
softmax(logits) - target. Only the sum and a (chunk, H) gradient remain of a chunk, and nothing is computed twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.model.base_model import OutputHead
from tpu_kit.model.loop.activation_checkpointing import tiles_of
from tpu_kit.model.sharding import partition
from tpu_kit.xla.scan import Tensors, Tree, scan
from tpu_kit.xla.sharding import constrain, token_shards

IGNORE = -100
"""Label of a token that carries no loss (the value PyTorch and Hugging Face use)."""

ChunkLoss = Callable[[torch.Tensor, Tensors, Tensors, bool], tuple[Tensors, torch.Tensor | None]]
"""Takes the linear layer's outputs (chunk, V), the tokens' inputs (labels first), constants, and whether to compute the
gradient. Returns sums over the tokens (fp32 scalars, the loss first) and the gradient with respect to the outputs."""


@dataclass(frozen=True)
class Likelihood:
    """The negative log-likelihood of the labels: a `ChunkLoss`.

    An optional second input weights the tokens. An optional third input weights their entropies, which are subtracted.

    Attributes:
        head: the output layer, for its scale and soft cap.
        smoothing: weight e of the uniform distribution in the target: (1 - e) one-hot + e / V.
    """

    head: OutputHead
    smoothing: float = 0.0

    def __call__(
        self, logits: torch.Tensor, inputs: Tensors, constants: Tensors, grad: bool
    ) -> tuple[Tensors, torch.Tensor | None]:
        """See `ChunkLoss`."""
        (labels, *weights), dtype, logits = inputs, logits.dtype, at_least_fp32(logits)
        scale, softcap = self.head.scale, self.head.softcap
        if scale != 1.0:
            logits = logits * scale
        if softcap is not None:
            capped = torch.tanh(logits / softcap)
            logits = capped * softcap
        if not self.smoothing and not weights and softcap is None and scale == 1.0:
            return _in_one_pass(logits, labels, dtype, grad)
        log_p = F.log_softmax(logits, dim=-1)
        # XLA fuses a comparison into the loop over the vocabulary, unlike a gather or scatter.
        is_label = torch.arange(log_p.shape[-1], device=labels.device) == labels[:, None]
        carries = (labels != IGNORE)[:, None]
        uniform = self.smoothing / log_p.shape[-1]
        target = is_label * (1.0 - self.smoothing) + uniform
        losses = torch.where(carries, target * log_p, 0.0)
        loss = -(losses * weights[0][:, None] if weights else losses).sum()
        if weights[1:]:
            # The gradient of sum p log p with respect to the logits is p (log p + entropy).
            bonus, entropy = weights[1][:, None], -(log_p.exp() * log_p).sum(-1, keepdim=True)
            loss = loss - (bonus * entropy).sum()
        if not grad:
            return [loss], None
        slope = torch.where(carries, log_p.exp() - target, 0.0)
        if weights:
            slope = slope * weights[0][:, None]
        if weights[1:]:
            slope = slope + bonus * log_p.exp() * (log_p + entropy)
        if softcap is not None:
            slope = slope * (1.0 - capped * capped)
        if scale != 1.0:
            slope = slope * scale
        return [loss], slope.to(dtype)


@dataclass(frozen=True)
class SourcedLikelihood(Likelihood):
    """`Likelihood` that also returns, after the loss, the sum of the token losses of every source.

    The second input is the source number of every token, from 1. These sums have no label smoothing.

    Attributes:
        sources: number of sources.
    """

    sources: int = 1

    def __call__(
        self, logits: torch.Tensor, inputs: Tensors, constants: Tensors, grad: bool
    ) -> tuple[Tensors, torch.Tensor | None]:
        """See `ChunkLoss`."""
        labels, sources = inputs
        (loss,), slope = super().__call__(logits, [labels], constants, grad)
        scaled = self.head.scaled(logits)
        is_label = torch.arange(scaled.shape[-1], device=labels.device) == labels[:, None]
        losses = torch.logsumexp(scaled, -1) - torch.where(is_label, scaled, 0.0).sum(-1)
        of_source = ((labels != IGNORE) & (sources == number) for number in range(1, self.sources + 1))
        return [loss, *(torch.where(mine, losses, 0.0).sum() for mine in of_source)], slope


def _in_one_pass(
    logits: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype, grad: bool
) -> tuple[Tensors, torch.Tensor | None]:
    """Returns [the negative log-likelihood of the labels], and the logits' gradient in `dtype`, or None without `grad`.

    For logits without scale or soft cap. Tokens with the label `IGNORE` do not count.
    """
    is_label = torch.arange(logits.shape[-1], device=labels.device) == labels[:, None]
    carries = labels != IGNORE
    logits = logits - logits.amax(-1, keepdim=True)
    of_label = torch.where(is_label, logits, 0.0).sum(-1)
    log_sum = logits.exp().sum(-1, keepdim=True).log()  # XLA reads the logits once, and writes no log-probabilities
    loss = torch.where(carries, log_sum[:, 0] - of_label, 0.0).sum()
    if not grad:
        return [loss], None
    slope = torch.where(carries[:, None], (logits - log_sum).exp() - is_label * 1.0, 0.0)
    return [loss], slope.to(dtype)


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Converts a float tensor to fp32; fp64 stays fp64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def shift_labels(labels: torch.Tensor, segment_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Moves labels to the previous position, within each document.

    Args:
        labels: (B, S) integer labels, unshifted, `IGNORE` where a token carries no loss.
        segment_ids: (B, S) document number of every token, 0 = padding; None = one document per row.

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


def rows_in_chunks(chunk: int, tensors: Tensors) -> tuple[Tensors, int]:
    """Reorders tokens so that every chunk of the loss, of `chunk` tokens per device, has tokens of all batch shards.

    Returns the tensors and the chunk size. On one device both are the arguments. On a mesh, (B, S, ...) tensors become
    (S / c, B * c, ...), and the chunk size is B * c. A chunk has c tokens of every row; c divides S.
    """
    mesh = active_mesh()
    if mesh.size == 1:
        return tensors, chunk
    rows = tensors[0].shape[0] // mesh.batch_shards
    parts = tiles_of(tensors[0].shape[1] // token_shards(), max(1, chunk // rows))
    tiles = [partition.flat_tiles(tensor, parts) for tensor in tensors]
    return tiles, tiles[0].shape[1]


def chunked(
    function: ChunkLoss,
    hidden: torch.Tensor,
    head: OutputHead,
    inputs: Tensors,
    chunk: int,
    constants: Sequence[torch.Tensor] = (),
    sums: int = 1,
) -> Tensors:
    """Sums a loss of logits over tokens, with at most `chunk` x V logits in memory; differentiable once.

    The matrix products run in the dtype of `hidden`; the sums and the accumulated gradients of the head are fp32.

    Args:
        function: the loss.
        hidden: (T, H); gradients flow to it, and to the tensors of the head that require it.
        head: the output layer, of any float dtype.
        inputs: (T, ...) tensors; the first has the labels, already shifted. T is padded to a multiple of `chunk` with
            ignored tokens.
        chunk: number of tokens whose logits exist at once.
        constants: other tensors that `function` needs; no gradients flow to them.
        sums: number of sums that `function` returns.

    Returns:
        The sums, fp32 scalars; only the first has a gradient.
    """
    chunk = min(chunk, hidden.shape[0])  # a batch smaller than a chunk needs no padding
    # Under no_grad a Function's inputs may still require gradients, which evaluation must not compute.
    tensors = head.tensors
    wanted = {
        name for name, tensor in [("hidden", hidden), *tensors.items()]
        if torch.is_grad_enabled() and tensor.requires_grad
    }  # fmt: skip
    padding = -hidden.shape[0] % chunk
    if padding:
        hidden, inputs = F.pad(hidden, (0, 0, 0, padding)), [_padded(tensor, padding) for tensor in inputs]
    totals = _Chunked.apply(function, [*tensors], inputs, [*constants], chunk, sums, wanted, hidden, *tensors.values())
    return list(totals.unbind())


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Pads the first axis: labels with `IGNORE`, other tensors with zeros."""
    value = IGNORE if tensor.ndim == 1 else 0
    return F.pad(tensor, (*[0, 0] * (tensor.ndim - 1), 0, rows), value=value)


def token_logprobs(
    hidden: torch.Tensor, head: OutputHead, labels: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes log-probabilities of labels, without a gradient and with at most `chunk` x V logits in memory.

    Args:
        hidden: (B, S, H).
        head: the output layer.
        labels: (B, S), already shifted; `IGNORE` without a label.
        chunk: number of tokens whose logits exist at once.

    Returns:
        (B, S) log-probabilities of the labels, 0 without a label, and (B, S) entropies of the distributions at all
        positions; both in nats, fp32 (or fp64).
    """
    (states, targets), chunk = rows_in_chunks(chunk, [hidden.detach(), labels])
    shape, count = targets.shape, targets.numel()
    states, targets, chunk = states.flatten(0, 1), targets.flatten(), min(chunk, count)
    states, targets = F.pad(states, (0, 0, 0, -count % chunk)), _padded(targets, -count % chunk)

    def body(carry: Tensors, chunk_inputs: Tensors) -> tuple[Tensors, Tensors]:
        logits = head.scaled(head_outputs(chunk_inputs[0], **dict(zip(names, carry, strict=True))))
        log_p = F.log_softmax(logits, dim=-1)
        is_label = torch.arange(log_p.shape[-1], device=logits.device) == chunk_inputs[1][:, None]
        return carry, [torch.where(is_label, log_p, 0.0).sum(-1), -(log_p.exp() * log_p).sum(-1)]

    names = [*head.tensors]
    weights = [each.detach().to(hidden.dtype) for each in head.tensors.values()]
    _, outputs = scan(body, weights, [tensor.reshape(-1, chunk, *tensor.shape[1:]) for tensor in (states, targets)])
    logprobs, entropies = (each.flatten()[:count].view(shape) for each in outputs)
    if active_mesh().size == 1:
        return logprobs, entropies
    return partition.unflattened(logprobs, len(labels)), partition.unflattened(entropies, len(labels))


def head_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    down: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the linear layer's outputs for a chunk, (chunk, V), in the dtype of `hidden`, (chunk, H).

    They are hidden @ weight.T + bias + hidden @ down.T @ up.T, without scale and soft cap. The other tensors, as in
    `OutputHead`, must have the dtype of `hidden`. On a mesh a device has the logits of all tokens of its data group,
    for its part of the vocabulary. The last parts may be shorter.
    """
    hidden = constrain(hidden, ("data", None))
    outputs = F.linear(hidden, _in_parts(weight), bias)
    if down is not None and up is not None:
        outputs = outputs + F.linear(F.linear(hidden, down), _in_parts(up))
    return constrain(outputs, ("data", _vocabulary()), uneven=True)


def _in_parts(weight: torch.Tensor) -> torch.Tensor:
    """Shards a head's (V, H) by its outputs if the axes do not divide V; otherwise it is stored so."""
    odd = weight.shape[0] % active_mesh().shards(_vocabulary())
    return constrain(weight, (_vocabulary(), None), uneven=True) if odd else weight


def _vocabulary() -> tuple[str, ...]:
    """Returns the mesh axes over which the vocabulary of the logits is sharded."""
    return ("model", *active_mesh().weights)


@functools.cache
def _fused() -> Callable[..., Any]:
    """Returns a compiled call of a `ChunkLoss` with its arguments; else each operation on a GPU writes (chunk, V)."""
    return torch.compile(lambda function, *arguments: function(*arguments), dynamic=False)


class _Chunked(torch.autograd.Function):
    """Sums the loss over chunks; computes gradients in the forward pass and scales them in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        function: ChunkLoss,
        names: list[str],
        inputs: Tensors,
        constants: Tensors,
        chunk: int,
        sums: int,
        wanted: set[str],
        hidden: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the (sums,) sums of `function`; tensors in `wanted` (names of the head's, or "hidden") get gradients.

        `names` are the names of the head's `tensors`, in order. Other arguments are as in `chunked`, without padding.
        """
        given = dict(zip(names, tensors, strict=True))
        # The head is in the carry because the body of a scan must not use outer tensors.
        carry: Tree = {
            "sums": torch.zeros(sums, device=hidden.device),
            "head": {name: tensor.to(hidden.dtype) for name, tensor in given.items()},
            "constants": constants,
            "to": {name: torch.zeros_like(given[name], dtype=torch.float32) for name in names if name in wanted},
        }

        def body(carry: Tree, chunk_inputs: Tensors) -> tuple[Tree, Tensors]:
            states, *others = chunk_inputs
            head, to = carry["head"], dict(carry["to"])
            added, slope = compute(head_outputs(states, **head), others, carry["constants"], bool(wanted))
            new = carry | {"sums": carry["sums"] + torch.stack(added)}
            if slope is None:
                return new, []
            low = slope @ head["up"] if "up" in head else None
            if "weight" in to:
                to["weight"] = _in_parts(to["weight"] + (slope.t() @ states).float())
            if "bias" in to:
                to["bias"] = to["bias"] + slope.float().sum(0)
            if "down" in to and low is not None:
                to["down"] = to["down"] + (low.t() @ states).float()
            if "up" in to:
                to["up"] = _in_parts(to["up"] + (slope.t() @ F.linear(states, head["down"])).float())
            if "hidden" not in wanted:
                return new | {"to": to}, []
            back = slope @ head["weight"]
            return new | {"to": to}, [back if low is None else back + low @ head["down"]]

        compute = functools.partial(_fused(), function) if hidden.is_cuda and wanted else function
        chunks = hidden.shape[0] // chunk
        rows = [tensor.detach().reshape(chunks, chunk, *tensor.shape[1:]) for tensor in (hidden, *inputs)]
        carry, outputs = scan(body, carry, rows)  # a loop keeps a single chunk in memory

        ctx.save_for_backward(
            outputs[0].reshape(hidden.shape) if "hidden" in wanted else None,
            *(carry["to"][name].to(tensor.dtype) if name in wanted else None for name, tensor in given.items()),
        )
        return carry["sums"]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In fp32, because bf16 would round the factor 1 / tokens.
        gradients = (
            None if saved is None else (at_least_fp32(saved) * upstream[0]).to(saved.dtype)
            for saved in ctx.saved_tensors
        )
        return (*[None] * 7, *gradients)
