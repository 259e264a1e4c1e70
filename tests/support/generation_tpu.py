"""Prefill and decode of generation as programs of the real TPU compiler: `python -m tests.support.generation_tpu JOB`.

The decoder runs as it does on a TPU, over placeholders in place of tensors: nothing is computed, and where it would
read the device, the graph that a TPU would get is taken and compiled.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch

from tpu_kit.config.loader import load_config
from tpu_kit.distributed.backends import TpuRuntime
from tpu_kit.generation.decoder import Batch, Decoder
from tpu_kit.generation.sampling import Sampling
from tpu_kit.hardware.slices import find_topology
from tpu_kit.models import attention
from tpu_kit.planning import trace
from tpu_kit.xla import program
from tpu_kit.xla.program import compile_program

BLOCK = 16


class OnPaper(TpuRuntime):
    """A replica of a TPU that is not there."""

    def place_batch(
        self, batches: Sequence[Mapping[str, torch.Tensor]], *_: Any, **__: Any
    ) -> list[dict[str, torch.Tensor]]:
        """Placeholders of the same shapes."""
        return [
            {name: program.placeholder(tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}
            for batch in batches
        ]

    def sync(self, *_: Any, **__: Any) -> None:
        """The graph is cut by `lower`."""

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keeps what is read; zeros in its place."""
        object.__setattr__(self, "read", list(tensors))
        return [torch.zeros(tensor.shape) for tensor in tensors]


def lower(before: Mapping[int, str], outputs: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> Any:
    """The program of a cut: new tensors and those that were changed in place, whose old buffers it may take."""
    replaced = {number for number, name in before.items() if name == "cache"}
    left = [tensor for tensor in changed if any(program.is_input(tensor, number) for number in replaced)]
    assert not left, f"{len(left)} buffers were left as they were"
    return program.lower([*outputs, *changed], replaced, dict(before))


def compile_both(model: str, rows: int, width: int, slots: int, *changes: str) -> dict[str, Any]:
    """What the compiler says of prefill and decode for one v5e: bytes, aliases, and the bytes of the cache."""
    import torch_xla

    config = load_config(None, [f"model.name={model}", *changes])
    with torch.device("meta"):
        empty = trace.empty_model(config).eval()
    inputs = trace.fill(empty, SimpleNamespace())  # type: ignore[arg-type]
    rt = OnPaper(0, 1, torch_xla.device())
    decoder = Decoder(empty, rt, BLOCK, slots)
    vocabulary = decoder.vocabulary
    batch = Batch(
        torch.zeros(rows, width, dtype=torch.int64), torch.full((rows,), width), torch.zeros(rows, dtype=torch.int64)
    )
    _, topology = find_topology("v5e", 1)
    request = {"num_replicas": 1, "effort": "full", "topology": asdict(topology)}
    named = {program.tensor_number(tensor): name for name, tensor in inputs.items()}
    found: dict[str, Any] = {}
    with decoder.ready(), attention.lowering_for_tpu():
        for part in ("prefill", "decode"):
            cache = decoder._prompt_cache = decoder._buffers(None, rows)
            buffers = [*cache.keys, *cache.values]
            found["cache_bytes"] = sum(tensor.nbytes for tensor in buffers)
            before = named | {program.tensor_number(tensor): "cache" for tensor in buffers}
            outputs: list[torch.Tensor] = []
            if part == "prefill":
                decoder.prefill(batch, 1, BLOCK)
            else:
                sampling = Sampling(slots - width, temperature=0.7, top_p=0.9)
                knobs = sampling.knobs(vocabulary)
                table = rt.place_batch([{"": torch.zeros(8 * vocabulary).int()}])[0][""]
                uniforms = torch.zeros(sampling.max_new_tokens, rows)
                state = decoder.begin(batch, 1, [False] * rows, uniforms, knobs, table, None)
                decoder.decode(sampling.kind, state, cache, BLOCK)
                outputs = [*rt.read, *state.carried]  # type: ignore[attr-defined]
            found[part] = compile_program(lower(before, outputs, buffers), request)
    return found


if __name__ == "__main__":
    said = json.dumps(compile_both(*json.loads(sys.argv[1])))
    print(said, flush=True)
    os._exit(0)  # libtpu hangs at times on its way out
