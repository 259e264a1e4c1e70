"""How likely the tokens of given rows are, without ever holding all their logits."""

from __future__ import annotations

from typing import Any

import torch

from tpu_kit.model import output_embedding

_AT_ONCE = 64  # positions of a row whose logits exist at a time


def token_scores(model: torch.nn.Module, causal: Any, ids: torch.Tensor, device_type: str) -> torch.Tensor:
    """How likely each next token of some rows is.

    Args:
        model: what `decoding.Decoder` was given, in its care.
        causal: the model of transformers in it.
        ids: (B, W) int64, filled up behind, on the device.
        device_type: "tpu", "xla-cpu", "cuda" or "cpu".

    Returns:
        (2, B, W) fp32: at i the log-probability, in nats, of token i + 1 after those up to i; and 1 where it is the
        likeliest. At the last place there is nothing to be read.

    Raises:
        ValueError: the output head is not a plain linear layer.
    """
    head = output_embedding(model)
    positions = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
    output = causal.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False, device_type=device_type)
    wanted = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    parts = []
    for hidden, targets in zip(output.last_hidden_state.split(_AT_ONCE, 1), wanted.split(_AT_ONCE, 1), strict=True):
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float() * head.scale
        if head.softcap is not None:
            logits = torch.tanh(logits / head.softcap) * head.softcap
        chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        likeliest = (logits.argmax(-1) == targets).float()
        parts.append(torch.stack([chosen - torch.logsumexp(logits, -1), likeliest]))
    return torch.cat(parts, -1)
