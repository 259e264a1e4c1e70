"""Functions that the tests of the training core run in replicas (processes or threads): models, rows, probes."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.mapped_files import files_of
from tpu_kit.config.loader import LoraConfig, OptimConfig, TrainConfig
from tpu_kit.data.prepare import MappedData
from tpu_kit.distributed.detection import Backend
from tpu_kit.distributed.replica import runtime
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.distributed.replica.mesh import Box
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.model import causal_lm as models
from tpu_kit.model import preparation, trainable
from tpu_kit.model.loop import layer_calls, layer_scan
from tpu_kit.recipes import replica, sft
from tpu_kit.recipes.run_plan import RunPlan
from tpu_kit.training import objectives, step, trainer
from tpu_kit.training.checkpoint import host_parts
from tpu_kit.training.objectives import Sums, SupervisedObjective
from tpu_kit.training.optimizer import OPTIMIZERS
from tpu_kit.training.state import TrainState, UpdateSums, sections
from tpu_kit.training.step import train_step

OPTIM = OptimConfig(learning_rate=1e-2, weight_decay=0.1, beta2=0.99, max_grad_norm=1.0, loss_chunk=16)

# The error of libtpu 0.0.21 for a program of 17 GiB on a v5e.
OUT_OF_MEMORY = (
    "Bad StatusOr access: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.00G of 15.75G hbm. "
    "Exceeded hbm capacity by 1.25G.\n\nTotal hbm usage >= 17.25G:\n    reserved        258.00M \n"
    "    program          16.0K \n    arguments        17.00G \n"
)

# Replicas of XLA:CPU are threads, and share torch's generator.
_generator = threading.Lock()


def tiny(dropout: float = 0.0, layers: int = 2) -> torch.nn.Module:
    """Builds a Llama with LoRA in training mode; the weights are always the same."""
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    with _generator:
        torch.manual_seed(0)
        model = trainable.adapt(LlamaForCausalLM(config), LoraConfig(r=4, dropout=dropout), "fp32")
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)  # if these were zero, half of the gradients would be zero
    return model.train()


def rows(count: int = 8, width: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Makes rows with very different numbers of loss tokens: 1 in the first row, nearly all in the last."""
    ids = torch.randint(1, 61, (count, width), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(count):
        labels[row, : max(2, width - 1 - row * width // count)] = -100
    positions = torch.arange(width).repeat(count, 1)
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "segment_ids": torch.ones_like(ids)}


def control(rate: float, step: int, window_open: float = 1.0) -> torch.Tensor:
    """Makes the control tensor of `train_step`."""
    return torch.tensor([rate, window_open, float(step)])


def dealt(rank: int, replicas: int, step: int) -> list[dict[str, torch.Tensor]]:
    """Returns a replica's one-row passes of an update of eight rows."""
    everything = rows(seed=step)
    return [{n: v[index : index + 1] for n, v in everything.items()} for index in range(rank, 8, replicas)]


def contents(state: TrainState) -> dict[str, torch.Tensor]:
    """Everything an update may change, except the sums for the log."""
    found = {name: tensor.detach().clone() for name, tensor in state.tensors().items() if name != "report"}
    return found | {"usual": torch.tensor(report_of(state).usual)}


def report_of(state: TrainState) -> UpdateSums:
    """Returns the numbers of a state's report."""
    return UpdateSums.unpack(state.report.tolist())


def _sent(rt: Runtime, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(rt.local_device) for name, value in tensors.items()}


def split(config: TrainConfig) -> dict[str, list[float]]:
    """Three updates of eight rows, split among the replicas; returns rank 0's whole state, as lists."""
    rt = runtime.current()
    model = models.to_device(tiny(), rt.local_device)
    state = TrainState(model, rt.local_device, replace(OPTIM, ema_decay=0.9))
    rt.sync()
    optim = replace(OPTIM, ema_decay=0.9)
    for number in (1, 2, 3):
        mine = [_sent(rt, batch) for batch in dealt(rt.rank, rt.world_size, number)]
        scalars = control(1e-2, number, float(number > 1)).to(rt.local_device)
        train_step(model, state, mine, scalars, SupervisedObjective(optim), optim, rt)
        rt.sync()
    ended = state.tensors()
    return {n: v.reshape(-1).tolist() for n, v in zip(ended, rt.to_host(list(ended.values())), strict=True)}


# ---------------------------------------------------------------------------------------- the real loop, watched


class Watched:
    """A mixin for a replica's runtime, added by `watch`: records reads from the device, and the end of set-up."""

    def __init__(self, base: Runtime) -> None:
        super().__init__(base.rank, base.world_size, base.local_device)
        self.shared = base.shared
        self.syncs = 0
        self.reads: list[tuple[int, int]] = []  # earlier syncs, tensors
        self.set_up: int | None = None
        self.state: TrainState | None = None

    def sync(self) -> None:
        super().sync()
        self.syncs += 1

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.reads.append((self.syncs, len(tensors)))
        return super().to_host(tensors)

    def begin(self, state: TrainState) -> None:
        """Counts the programs of set-up before the first step, while all replicas wait here."""
        self.state = state
        self.barrier()
        self.set_up = self.counters().get("compiles", 0)
        self.barrier()


def watch(base: Runtime) -> Any:
    """Returns a runtime of the same kind that is also `Watched`."""
    return type("WatchedRuntime", (Watched, type(base)), {})(base)


def _watched_step(model: torch.nn.Module, state: TrainState, *rest: Any) -> None:
    rt = runtime.current()
    if isinstance(rt, Watched) and rt.state is None:  # the runtime stays in place for later runs of an inline process
        rt.begin(state)
    step.train_step(model, state, *rest)


def watched(config: TrainConfig) -> dict[str, Any]:
    """Runs `sft.fine_tune`; returns rank 0's result and a record of every rank's final state."""
    rt = watch(runtime.current())
    runtime.enter(rt)
    trainer.train_step = _watched_step
    result = sft.fine_tune(config)
    assert rt.state is not None
    if rt.is_xla:
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()  # executions are counted when they end
    rt.barrier()
    counters = rt.counters()
    rt.barrier()
    kept = {name: one for name, one in rt.state.tensors().items() if name.startswith(("parameters/", "moments/"))}
    own = dict(zip(kept, Runtime.to_host(rt, list(kept.values())), strict=True))
    digest = hashlib.blake2b(b"".join(tensor.numpy().tobytes() for tensor in own.values())).hexdigest()
    note = {"hash": digest, "reads": rt.reads, "syncs": rt.syncs}
    (config.output_path / f"rank-{rt.rank}.json").write_text(json.dumps(note))
    rt.barrier()
    notes = [json.loads((config.output_path / f"rank-{rank}.json").read_text()) for rank in range(rt.world_size)]
    parameters = {name: own[f"parameters/{name}"] for name in rt.state.params}
    parameters = layer_calls.unstacked(rt.state.stacks, parameters)
    return {
        "result": asdict(result) if result is not None else None, "ranks": notes, "counters": counters,
        "set_up": rt.set_up, "parameters": {name: value.tolist() for name, value in parameters.items()},
    }  # fmt: skip


def resumed(config: TrainConfig) -> None:
    """Runs `sft.fine_tune`, then once more from its checkpoint of step 3, in a second folder."""
    sft.fine_tune(config)
    again = replace(config, output_dir=f"{config.output_path}-again")
    checkpoint = Path("checkpoints", "step-00000003")
    shutil.copytree(config.output_path / checkpoint, again.output_path / checkpoint)
    sft.fine_tune(again)


def prepared_data(config: TrainConfig, data: MappedData) -> None:
    """Loads the data as `sft.fine_tune` does; each rank records its data and whether the arrays are mapped."""
    rt = runtime.current()
    replica.prepare_run = None  # a replica that prepares data fails
    plan, objective = RunPlan(config, Backend(rt.device_type, 1, "")), objectives.objective_of(config)
    _, prepared = runtime.load_once(rt, lambda: replica.read(plan, objective, data))
    tensors = prepared.train.tensors(np.arange(len(prepared.train)))
    digest = hashlib.blake2b(b"".join(tensor.numpy().tobytes() for tensor in tensors.values())).hexdigest()
    note = {
        "hash": digest, "fingerprint": prepared.fingerprint, "eval": prepared.eval_prompts,
        "mapped": files_of(prepared.train) == {"arrays"}, "report": str(prepared.report),
    }  # fmt: skip
    (config.output_path / f"rank-{rt.rank}.json").write_text(json.dumps(note))
    rt.barrier()


def late_steps(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """By optimizer: the compiles of each step, while the number of updates jumps to the limits of float32."""
    return {name: _late_steps(runtime.current(), name) for name in OPTIMIZERS}


def _late_steps(rt: Runtime, optimizer: str) -> dict[str, Any]:
    model = models.to_device(tiny(), rt.local_device)
    optim = replace(OPTIM, ema_decay=0.9, beta2=0.999, optimizer=optimizer)  # type: ignore[arg-type]  # a valid name
    state = TrainState(model, rt.local_device, optim)
    rt.sync()
    compiled, applied = [], []
    for number, jump in enumerate((None, None, 324, None, 16_600, None, 19_998, None, None, 2_000_000, None), 1):
        if jump is not None:
            state.applied.copy_(torch.tensor([0.0, jump]).to(rt.local_device)[1])
            rt.sync()
        before = rt.counters()["compiles"]
        scalars = control(0.0 if number == 1 else 1e-2, number, float(number > 1)).to(rt.local_device)
        train_step(model, state, [_sent(rt, rows(2, seed=number))], scalars, SupervisedObjective(optim), optim, rt)
        rt.sync()
        compiled.append(rt.counters()["compiles"] - before)
        applied.append(float(rt.to_host([state.applied])[0]))
    ended = torch.cat([part.flatten() for part in sections(state.to_host(rt))["parameters"].values()])
    return {"compiled": compiled, "applied": applied, "parameters": ended.tolist()}


class WithExtraSums(SupervisedObjective):
    """Logs twice the loss, and its weight divided by its weight."""

    extra = ("doubled", "one")

    def __call__(self, model: torch.nn.Module, batch: Any) -> Sums:
        loss, tokens, _ = super().__call__(model, batch)
        return Sums(loss, tokens, (2 * loss.detach(), tokens))


def with_extra_sums(config: TrainConfig) -> dict[str, Any]:
    """`watched` with an objective that has extra sums."""
    objectives.SupervisedObjective = WithExtraSums  # type: ignore[misc]  # in a process of this launch
    return watched(config)


def shapes_of_step(config: TrainConfig) -> dict[int, dict[str, list[list[int]]]]:
    """All shapes in the HLO of an evaluation and of a train step on (3, 16) tokens, vocabulary 61; by `loss_chunk`."""
    return {chunk: _shapes_of_step(replace(config.optim, loss_chunk=chunk)) for chunk in (16, 48)}


def recomputed(model: torch.nn.Module, rt: Runtime) -> torch.nn.Module:
    """Moves a model to the device; its layers are recomputed in the backward pass, and none is in a loop."""
    decoder = models.base_model(model).get_decoder()
    if layer_scan.scan_layers(decoder, OptimConfig(scan_layers="off"), rt.device_type) is None:
        preparation.enable_remat(model)
    return models.to_device(model, rt.local_device)


def _shapes_of_step(optim: OptimConfig) -> dict[str, list[list[int]]]:
    import torch_xla

    rt = runtime.current()
    model = recomputed(tiny(), rt)
    state = TrainState(model, rt.local_device, OPTIM)
    sums = torch.zeros(2).to(rt.local_device)
    rt.sync()
    batch, scalars = _sent(rt, rows(3)), control(1e-2, 1).to(rt.local_device)
    found = {}
    step.eval_step(model, batch, sums, SupervisedObjective(optim), rt)
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([sums])
    found["eval"] = _shapes(hlo)
    rt.sync()
    train_step(model, state, [batch], scalars, SupervisedObjective(optim), optim, rt)
    hlo = torch_xla._XLAC._get_xla_tensors_hlo(list(state.tensors().values()))
    found["train"] = _shapes(hlo)
    rt.sync()
    return found


def _shapes(hlo: str) -> list[list[int]]:
    texts = set(re.findall(r"\b(?:f32|bf16|f64|s32|s64|pred)\[([\d,]+)\]", hlo))
    return sorted([int(size) for size in text.split(",")] for text in texts)


def dropout_draws(config: TrainConfig) -> list[Any]:
    """Each rank's dropout mask at steps 1, 2 and 3, and at step 1 again."""
    rt = runtime.current()
    masks = []
    for number in (1, 2, 3, 1):
        trainer.seed_dropout(rt, config, number)
        masks.append(torch.nn.functional.dropout(torch.ones(64, device=rt.local_device), 0.5) != 0)
        rt.sync()
    own = ["".join(str(int(value)) for value in mask) for mask in rt.to_host(masks)]
    (config.output_path / f"masks-{rt.rank}.json").write_text(json.dumps(own))
    rt.barrier()
    return [json.loads((config.output_path / f"masks-{rank}.json").read_text()) for rank in range(rt.world_size)]


def draws_and_extra_sums(config: TrainConfig) -> dict[str, Any]:
    """`dropout_draws` and `with_extra_sums`, in one launch."""
    dropped = replace(config, lora=replace(config.lora, dropout=0.5))
    return {"draws": dropout_draws(dropped), "extra": with_extra_sums(config)}


class SavesParts(CpuRuntime):
    """A host that saves a part of each checkpoint; host 0 holds all tensors."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.shares_state = True

    def pieces(self, tensors: Sequence[torch.Tensor]) -> list[list[tuple[Box, torch.Tensor]]]:
        return [
            [(tuple(slice(0, size) for size in one.shape), one)] * (self.rank == 0) for one in self.to_host(tensors)
        ]


def saves_by_two_clocks(config: TrainConfig) -> None:
    """`sft.fine_tune` on two hosts; by host 0's clock a checkpoint is always due, by the other's never."""
    rt = runtime.current()
    runtime.enter(SavesParts(rt.rank, rt.world_size, rt.local_device, rt.world_size))
    host_parts.PATIENCE = 10.0
    minutes = 1e-6 if rt.rank == 0 else 1e6
    sft.fine_tune(replace(config, checkpoint=replace(config.checkpoint, save_minutes=minutes)))


poisoned_steps = (3, 3)  # the first and the last


def poisoned(config: TrainConfig) -> dict[str, Any] | None:
    """`sft.fine_tune` with NaN gradients in the steps of `poisoned_steps`."""
    trainer.train_step = _poisoned_step
    result = sft.fine_tune(config)
    return asdict(result) if result is not None else None


def failing(config: TrainConfig) -> None:
    """`sft.fine_tune` in which rank 1, or a mesh, raises in step n; `run_name` is "fail-n"."""
    calls, fail = 0, int(config.run_name.removeprefix("fail-"))

    def failing_step(*given: Any) -> None:
        nonlocal calls
        if config.launch.mesh or runtime.current().rank == 1:
            calls += 1
            if calls == fail:
                raise RuntimeError("a fault")
        step.train_step(*given)

    trainer.train_step = failing_step
    sft.fine_tune(config)


def out_of_memory(config: TrainConfig, **given: Any) -> None:
    """`sft.fine_tune` in which rank 1's third step raises the TPU compiler's out-of-memory error."""
    calls = 0

    def failing_step(*given: Any) -> None:
        nonlocal calls
        calls += runtime.current().rank == 1
        if calls == 3:
            time.sleep(1)  # the previous step's checkpoint is written meanwhile
            raise RuntimeError(OUT_OF_MEMORY)
        step.train_step(*given)

    trainer.train_step = failing_step
    sft.fine_tune(config, **given)


def _poisoned_step(model: torch.nn.Module, state: TrainState, batches: Any, control: torch.Tensor, *rest: Any) -> None:
    parameter = next(iter(state.params.values()))
    first, last = poisoned_steps
    bad = (control[2] >= first) & (control[2] <= last)
    hook = parameter.register_hook(lambda grad: torch.where(bad, torch.full_like(grad, float("nan")), grad))
    step.train_step(model, state, batches, control, *rest)
    hook.remove()
