"""Functions that the tests of torch_tpu run in a replica, on any backend."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import torch
from transformers import AutoTokenizer

from tpu_kit.assets.embedded import ASSETS
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.replica import runtime
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.sampling import Sampling
from tpu_kit.model.trainable import load_model
from tpu_kit.recipes import replica
from tpu_kit.training.state import UpdateSums
from tpu_kit.training.step import prepare_model


def counts() -> list[int]:
    """Returns the programs compiled and executed by the shim in this process; zeros without the shim."""
    found = (ctypes.c_long * 2)()
    if "SHIM_REAL" in os.environ:
        ctypes.CDLL(os.environ["TPU_LIBRARY_PATH"]).shim_counts(found)
    return list(found)


def make_updates(config: TrainConfig) -> dict[str, Any]:
    """Continues a run up to the step UPTO and saves there; returns each update's loss, norm and program counts."""
    last, made = int(os.environ["UPTO"]), []
    if os.environ.get("NO_DONATION"):
        from torch_tpu._internal.compile.compiler import StaticCompiler

        compiles = StaticCompiler.__call__

        def moved(self: Any, *given: Any, **named: Any) -> Any:
            if "donated_inputs" in named:
                raise TypeError("an unexpected argument")
            return compiles(self, *given, **named)

        StaticCompiler.__call__ = moved
    with replica.trainer(config) as (loop, agreement):
        rt, state, first = loop.rt, loop.state, loop.step
        loop.model.train()
        before = counts()
        for update, tokens, tensors in loop.updates.after(loop.step, agreement):
            loop.step = update.step
            loop._dispatch(update, tensors, window_open=False)
            loop._rows, loop._tokens = loop._rows + update.rows, loop._tokens + tokens
            sums = UpdateSums.unpack(rt.to_host([state.report])[0].tolist())
            compiled, executed = (now - then for now, then in zip(counts(), before, strict=True))
            before, loop.metrics["loss"] = counts(), sums.loss / sums.weight
            made.append({"step": update.step, "loss": sums.loss / sums.weight, "norm": sums.grad_norm, "tokens": tokens,
                         "compiled": compiled, "executed": executed})  # fmt: skip
            if update.step == last:
                break
        loop._save(anyway=True)
        loop.checkpoints.wait()
        saved = {name: tensor.double().norm().item() for name, tensor in state.to_host(rt).items() if "/" in name}
        return {"first": first, "updates": made, "fingerprint": loop.prepared.fingerprint, "saved": saved}


def draw_dropout(config: TrainConfig) -> list[float]:
    """The losses of updates with learning rate 0 on the same rows, for the seeds 1, 1, 2 and 3.

    An update that learns comes first, because a new adapter adds zero whatever is dropped.
    """
    losses = []
    with replica.trainer(config) as (loop, agreement):
        rt = loop.rt
        loop.model.train()
        _, _, tensors = next(iter(loop.updates.after(0, agreement)))
        for rate, seed in ((0.1, 0), (0.0, 1), (0.0, 1), (0.0, 2), (0.0, 3)):
            *batches, sent = rt.to_device([*tensors, {"control": torch.tensor([rate, 0.0, 1.0])}])
            rt.seed(seed)
            loop._traced.train_step(batches, sent["control"])
            sums = UpdateSums.unpack(rt.to_host([loop.state.report])[0].tolist())
            losses.append(sums.loss / sums.weight)
    return losses[1:]


def sampled_tokens(config: TrainConfig) -> list[list[int]]:
    """Like `greedy_tokens`, but sampled. The CPU plugin aborts in cumulative sums, so they are matrix products here."""
    if "SHIM_REAL" in os.environ:
        from torch_tpu._internal.compile import _backend

        def summed(values: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
            assert dim % values.ndim == values.ndim - 1 and dtype is None
            places = torch.arange(values.shape[-1], device=values.device)
            return values @ (places[:, None] <= places).to(values.dtype)

        _backend._TPU_DECOMPOSITIONS[vars(torch)["ops"].aten.cumsum.default] = (
            summed  # pickle does not follow `torch.ops`
        )
    return greedy_tokens(config, Sampling(32, temperature=0.8, top_p=1.0, seed=7))


def greedy_tokens(config: TrainConfig, sampling: Sampling | None = None) -> list[list[int]]:
    """The greedy tokens of the embedded model for a few prompts of different lengths."""
    rt = runtime.current()
    model = load_model(config.model, config.lora, 0)
    prepare_model(model, config, rt)
    one = Generator(model, AutoTokenizer.from_pretrained(ASSETS), rt, data=config.data, max_prompt=128,
                    max_new_tokens=32, batch_size=4)  # fmt: skip
    prompts = [f"Ann has {number} pens. " * (1 + number % 3) + "How many?" for number in range(3, 10)]
    return [list(reply.tokens) for reply in one.generate(prompts, sampling)]


def meet(config: TrainConfig) -> dict[str, Any]:
    """Returns a sum over replicas in processes, and every replica's rank variables and assigned chip."""
    rt = runtime.current()
    total = torch.tensor([rt.rank + 1.0])
    rt.all_reduce([total])
    rt.barrier()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCH_TPU_TOPOLOGY", "TORCH_TPU_SLICEBUILDER_ADDRESSES")
    return {"total": total.item(), "places": rt.exchange({name: os.environ.get(name) for name in names})}


def main() -> None:
    """Launches a function of this module: NAME, then key=value settings."""
    name, *changes = sys.argv[1:]
    config = load_config("embedded-cot", ["base_dtype=fp32", "generate_rows=0", "eval_steps=null", *changes])
    print("found", json.dumps(launch(globals()[name], config)))


if __name__ == "__main__":
    main()
