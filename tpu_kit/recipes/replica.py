"""The code of a replica: `fine_tune` loads the planned run and trains it."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.data.chat.untrained_tokens import describe_untrained
from tpu_kit.data.prepare import MappedData, Prepared
from tpu_kit.distributed.detection import Backend
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.distributed.replica import runtime
from tpu_kit.distributed.replica.runtime import Outdated, Runtime
from tpu_kit.generation.evaluation.held_out_answers import count_correct
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.output_location import set_results_aside
from tpu_kit.machine.storage.run_folder import adapter_at_hand
from tpu_kit.model import trainable as models
from tpu_kit.model.base_model import output_embedding
from tpu_kit.model.weights.base_identity import NAME
from tpu_kit.model.weights.loading import load_frozen
from tpu_kit.recipes import problems
from tpu_kit.recipes.result import TrainResult
from tpu_kit.recipes.run_data import prepare_run
from tpu_kit.recipes.run_plan import RunPlan, resumed, with_batch, with_data, with_model
from tpu_kit.training.adapter_files import save_adapter, start_from, tokenizer_to_save
from tpu_kit.training.checkpoint.manager import CheckpointManager, HostParts
from tpu_kit.training.losses.sampled_updates import source_of_updates
from tpu_kit.training.metrics import peak_memory
from tpu_kit.training.objectives import Objective, objective_of
from tpu_kit.training.step import prepare_model
from tpu_kit.training.trainer import Status, Trainer


def fine_tune(
    config: TrainConfig,
    plan: RunPlan | None = None,
    data: MappedData | None = None,
    reward_funcs: Sequence[Any] | None = None,
) -> TrainResult | None:
    """Trains in one replica; the first replica of each host returns the result, the others None.

    Metrics of training: loss (last window) in nats per loss token; skipped_updates; train_seconds of all launches, with
    evaluations and checkpoints; and reward in a run with rewards. Rank 0 adds compiles (XLA and GPU) and
    `metrics.peak_memory`. Metrics of evaluation: eval_loss of the weights in adapter_dir; eval_accuracy with
    tracking.eval_generate_rows; for a mix, eval_loss/NAME and eval_accuracy/NAME per source; and eval_step, their step.

    Args:
        config: the run; with a `plan`, the plan's configuration replaces it.
        plan: the plan of the launching process; None plans here, without the checks of `train`.
        data: the data that the launching process prepared; None prepares it here.
        reward_funcs: rewards for reinforcement learning, in place of `rl.reward_funcs`.

    Raises:
        Outdated: another checkpoint than planned is the newest.
        ValueError: the plan is for other devices, the run may not resume, or training diverges. Or the hosts do not
            start with the same weights and checkpoint.
    """
    with trainer(config, plan, data, reward_funcs) as (loop, agreement):
        status = loop.run(agreement)
        reason = loop.evaluations.reason if status == "stopped" else agreement.reason or ""
        result = _finish(loop, status, reason) if loop.rt.local_rank == 0 else None
        if loop.rt.num_hosts > 1:
            loop.rt.barrier()  # if a host ends early, its engine may stop host 0 while it saves
        return result


@contextlib.contextmanager
def trainer(
    config: TrainConfig,
    plan: RunPlan | None = None,
    data: MappedData | None = None,
    reward_funcs: Sequence[Any] | None = None,
) -> Iterator[tuple[Trainer, PreemptionGuard]]:
    """Loads the run in one replica; yields (loop, guard): the ready training loop and its preemption guard.

    Arguments and errors are as in `fine_tune`. Rank 0 first sets damaged checkpoints aside; with resume=never, it moves
    all checkpoints to `<place>.previous`. Later it moves results of an earlier training aside, writes config.yaml and
    prints data and model.
    """
    rt = runtime.current()
    given = plan or _planned_here(config, rt)
    config, objective = given.config, objective_of(given.config)
    model, prepared = runtime.load_once(rt, lambda: read(given, objective, data))
    plan = _completed(given, prepared, rt)
    assert plan.batch is not None and plan.updates is not None
    keep = (config.checkpoint.keep, config.checkpoint.keep_every)
    with contextlib.ExitStack() as stack:
        agreement = stack.enter_context(PreemptionGuard(rt))
        checkpoints = stack.enter_context(CheckpointManager(config.checkpoints_place, *keep)) if rt.rank == 0 else None
        _confirm(plan, rt, checkpoints)
        rt.barrier()  # rank 0 has moved damaged checkpoints aside
        if rt.num_hosts > 1:
            _check_same(plan, rt, model)
        parts = stack.enter_context(_parts(config, rt, checkpoints)) if rt.shares_state else None
        source = stack.enter_context(
            source_of_updates(config, prepared, plan.batch, rt, model, objective, reward_funcs, plan.updates)
        )
        prepared.train.columns = {**plan.columns(), **prepared.columns(objective.columns)}
        untrained = ""
        if rt.rank == 0:
            for line in plan.resume_point.described(config, plan.record) if plan.resume_point else ():
                print(line, flush=True)
            head = output_embedding(model).weight  # before the model leaves the CPU
            frozen = bool(config.lora.r) and not (config.lora.full or config.lora.adapts_embeddings)
            untrained = describe_untrained(prepared, head, frozen, models.token_numbers(config.model, config.lora))
        checkpoint = plan.resume_point.checkpoint if plan.resume_point else None
        state = prepare_model(model, config, rt, checkpoint, len(objective.extra))
        rt.sync()
        rt.barrier()

        predicted, flops = (plan.outlook.device_bytes, plan.outlook.flops_per_token) if plan.outlook else (None, None)
        loop = Trainer(
            config, rt, model, objective, state, prepared, plan.batch, source, plan.updates, plan.record,
            lambda: count_correct(model, config, prepared, rt, source.generator), checkpoints, predicted, parts, flops,
        )  # fmt: skip
        if plan.resume_point:
            loop.resume(plan.resume_point)
        if rt.rank == 0:
            _begin(plan, loop, untrained)
        stack.enter_context(loop)
        yield loop, agreement


def read(plan: RunPlan, objective: Objective, data: MappedData | None) -> tuple[torch.nn.Module, Prepared]:
    """Returns (model, prepared): the model on the CPU, with its objective and initial adapter, and the run's data.

    The data is read from `data` or, if that is None, prepared here.
    """
    config = plan.config
    model = models.load_model(config.model, config.lora, config.optim.seed, plan.settings)
    objective.attach(model, lambda one: load_frozen(plan.pinned(one)))
    if config.lora.adapter:
        with adapter_at_hand(config.lora.adapter) as folder:
            assert folder is not None
            start_from(model, folder)
    return model, data.read() if data else prepare_run(config, plan.settings)


def _planned_here(config: TrainConfig, rt: Runtime) -> RunPlan:
    """Plans a run up to the model, in a replica that was launched without a plan; `_completed` adds the data."""
    backend = Backend(rt.device_type, rt.world_size // rt.num_hosts, "this replica")
    return with_model(resumed(RunPlan(config, backend), date.today().isoformat()))[0]


def _completed(plan: RunPlan, prepared: Prepared, rt: Runtime) -> RunPlan:
    """Adds data and batch if the plan has no batch for the replicas of `rt`; some TPUs give their number only here.

    Raises:
        ValueError: the plan is for other devices, the rows do not fill an update, or the run may not resume.
    """
    backend, batch = plan.backend, plan.batch
    if backend.device_type != rt.device_type or (
        batch and backend.num_replicas is not None and batch.num_replicas != rt.data_size
    ):
        shards = f", {batch.num_replicas} shards of a batch" if batch else ""
        raise ValueError(
            f"the run was planned for device_type={backend.device_type}{shards}, and is on {rt.device_type} with "
            f"{rt.data_size}: plan it on the machine that trains it"
        )
    if batch is not None and batch.num_replicas == rt.data_size:
        return plan
    plan = with_batch(with_data(plan, prepared), prepared, rt.data_size)
    problems.tell(problems.of_resuming(plan))
    return plan


def _confirm(plan: RunPlan, rt: Runtime, checkpoints: CheckpointManager | None) -> None:
    """Checks on rank 0, which alone has `checkpoints`, that the run resumes from the planned checkpoint.

    With resume=never, all checkpoints first move to `<place>.previous`. Otherwise damaged checkpoints are set aside.
    Raises Outdated (with several hosts on all ranks) if another checkpoint is the newest that is not damaged.
    """
    text, point = "", plan.resume_point
    if checkpoints is not None:
        if plan.config.checkpoint.resume == "never":
            checkpoints.restart()
        found = None if plan.config.checkpoint.resume == "never" else checkpoints.newest()
        if found is not None if point is None else not point.is_of(found):
            before, now = (f"step {one.step}" if one else "none" for one in (point, found))
            text = f"{before} was planned, and now the newest good checkpoint is {now}"
    outdated = torch.tensor([float(bool(text))])
    if rt.num_hosts > 1:
        rt.all_reduce([outdated])
    if outdated.item():
        place = plan.config.checkpoints_place
        raise Outdated(
            f"{place} has changed since the run was planned: {text or 'host 0 has found another checkpoint'}"
        )


def _begin(plan: RunPlan, loop: Trainer, untrained: str) -> None:
    """Writes config.yaml and the questions of a run, and prints its data and model, on rank 0.

    If updates remain, it moves results of an earlier training aside. It runs after all checks, because a refused run
    must not replace the files of an earlier run. `untrained` is a text about tokens with untrained embeddings, printed
    unless it is empty.
    """
    config, prepared = plan.config, loop.prepared
    if loop.step < loop.total and not loop.evaluations.stopped:
        set_results_aside(config)
    atomic.write_text(config.output_path / "config.yaml", config.to_yaml())
    if prepared.questions:
        prepared.questions.write(config.output_path)
    if not plan.shown:
        print(plan.report)
    print(f"model            {models.count_parameters(loop.model)}")
    if untrained:
        print(f"unknown tokens   {untrained}")
    if loop.evaluations.stopped:
        print(f"stopped          at step {loop.step} before; nothing is trained: {loop.evaluations.reason}")
    sys.stdout.flush()


def _check_same(plan: RunPlan, rt: Runtime, model: torch.nn.Module) -> None:
    """Raises ValueError unless all hosts resume from the same checkpoint and start with the same weights."""
    config, step = plan.config, plan.resume_point.step if plan.resume_point else 0
    table = torch.zeros(rt.world_size, 3)
    table[rt.rank] = torch.tensor([step, *_weights_digest(model)])
    rt.all_reduce([table])
    rows = [tuple(map(int, row)) for row in table.tolist()]
    if len(set(rows)) > 1:
        shown = ", ".join(f"step {step}, {high:06x}{low:06x}" for step, high, low in rows)
        raise ValueError(
            f"the hosts do not start with the same weights of model.name={config.model.name} and checkpoint in "
            f"{config.checkpoints_place}: they have {shown} (by rank; 0: no checkpoint). Set output_dir to an object "
            "store (gs://bucket/run) or a shared folder, and use the same files, packages and processor on all hosts"
        )


def _weights_digest(model: torch.nn.Module) -> tuple[int, int]:
    """Returns a hash of samples of all weights, as two integers that fp32 represents exactly."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sample = tensor.reshape(-1)[:: max(1, tensor.numel() // 64)].contiguous()
        digest.update(name.encode() + sample.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:3]), int.from_bytes(digest.digest()[3:6])


def _parts(config: TrainConfig, rt: Runtime, checkpoints: CheckpointManager | None) -> HostParts:
    """Returns the writer of this host's part of each checkpoint; all hosts share a random number from host 0.

    `checkpoints`, which only rank 0 has, makes room for the parts of all hosts.
    """

    def make_room(step: int, size: int) -> None:
        if checkpoints is not None:
            checkpoints.make_room(step, rt.num_hosts * size)  # the other hosts' parts have about the same size
        rt.barrier()

    token = torch.tensor([secrets.randbits(62) if rt.rank == 0 else 0])
    rt.all_reduce([token])
    return HostParts(config.checkpoints_place, rt.rank, rt.num_hosts, int(token), make_room)


def _finish(loop: Trainer, status: Status, reason: str) -> TrainResult:
    """Returns the result, with `status` and its `reason`, when the last checkpoint is durable.

    Rank 0 saves the adapter unless the run was preempted; other ranks save nothing.
    """
    config, folder, adapter, metrics = loop.config, loop.config.output_path, "", loop.results()
    checkpoint: str | None = str(config.checkpoints_place)
    if loop.parts is not None:
        loop.parts.wait()
    if loop.checkpoints is not None:
        loop.checkpoints.wait()
        if status != "preempted":
            adapter, encoder = str(folder / "adapter"), loop.prepared.encoder
            tokenizer, base = encoder and tokenizer_to_save(encoder), loop.record.identities.get(NAME)
            save_adapter(folder / "adapter", loop.model, loop.weights(), config, tokenizer, base)
        metrics |= {name: float(count) for name, count in loop.rt.counters().items() if name == "compiles"}
        metrics |= peak_memory(loop.rt, loop.predicted_bytes)
        complete = loop.checkpoints.complete()
        checkpoint = str(complete[-1].path) if complete else None
    warning = "" if status == "preempted" else loop.warning(metrics)
    ended = status, reason, loop.step, loop.total, metrics, adapter, checkpoint, str(folder), config.again
    return TrainResult(*ended, warning)
