"""Shards activations and the key/value cache while a model on a mesh generates.

A decode step has few tokens, so its activations are much smaller than the weights. Each device multiplies with its
shard of a weight, and the activations are gathered. Training gathers the weights instead: see `partition`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.model.base_model import base_model, text_config
from tpu_kit.model.sharding.partition import embedding_of, spec_of
from tpu_kit.model.sharding.sharding_rules import FIRST, cache_spec, is_column
from tpu_kit.xla.sharding import constrain, in_place


@contextlib.contextmanager
def weights_in_place(model: torch.nn.Module, stacks: Iterable[str]) -> Iterator[None]:
    """Context manager in which a model on a mesh multiplies without gathering its weights.

    The input of a linear layer is sharded like the columns of its weight, and the output like the rows. Outputs are
    then gathered, unless each device continues with its own heads or its own columns of the MLP. A mesh of one device
    changes nothing.

    Args:
        model: a model whose weights are on the active mesh.
        stacks: prefixes of the names of stacked tensors, from `layer_calls.stacked_prefixes`; empty without stacks.
    """
    if active_mesh().size == 1:
        yield
        return
    prefixes, embedding, head = tuple(stacks), embedding_of(model), base_model(model).get_output_embeddings()
    config, hooks = text_config(model), []
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    by_heads = cache_spec(active_mesh(), (1, heads, 1, 1))[1] == ("model", *active_mesh().weights)
    for path, part in model.named_modules():
        leaf = path.rpartition(".")[2]
        if isinstance(part, torch.nn.Linear):
            stacked = path.startswith(prefixes)
            spec = spec_of(f"{path}.weight", part.weight, embedding, stacked)[stacked:]
            rows, columns = (spec[1], None) if part.weight.dtype == torch.uint8 else spec
            hooks.append(part.register_forward_pre_hook(lambda _, given, last=columns: (_ending(given[0], last),)))
            hooks.append(part.register_forward_hook(lambda _, __, output, last=rows: _ending(output, last)))
        outputs = getattr(part, "out_features", 0) if "lora_" not in path and leaf != "base_layer" else 0
        row = outputs and not is_column(path, outputs, 0, embedding.hidden)
        if part is head or isinstance(part, torch.nn.Embedding) or row:
            hooks.append(part.register_forward_hook(lambda _, __, output: _ending(output, None)))
        elif leaf in FIRST and not by_heads:
            hooks.append(part.register_forward_hook(lambda _, __, output: _ending(output, "model")))
    token = in_place.set(True)
    try:
        yield
    finally:
        in_place.reset(token)
        for hook in hooks:
            hook.remove()


def _ending(tensor: torch.Tensor, last: str | tuple[str, ...] | None) -> torch.Tensor:
    """Returns activations (B, ..., features) with rows sharded over the axis "data", features over the axes `last`."""
    return constrain(tensor, ("data", *[None] * (tensor.ndim - 2), last))
