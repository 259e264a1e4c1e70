"""Supervised fine-tuning, the same on all backends.

`train` runs in the calling process and launches `fine_tune` in every replica, which loads the model and trains it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict

from tpu_kit.config.loader import BatchPlan, ConfigError, TrainConfig, batch_arithmetic
from tpu_kit.config.schema import LEAST_UPDATES
from tpu_kit.data.chat.new_tokens import new_tokens
from tpu_kit.data.chat.untrained_tokens import describe_untrained
from tpu_kit.data.held_out import NONE, Questions
from tpu_kit.data.prepare import MappedData, Prepared, on_disk, prepare
from tpu_kit.data.rows.sources import SYNTHETIC, save_rows, saved_rows_path
from tpu_kit.distributed import detection
from tpu_kit.distributed.hosts import ONE, Hosts, find_hosts, keep_log
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.meeting import Meeting
from tpu_kit.distributed.output import safe_output
from tpu_kit.distributed.preemption import RESULT_TYPE, PreemptionGuard, stop_name, stops_raise
from tpu_kit.distributed.replica import runtime
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.evaluation.comparison import Comparison
from tpu_kit.generation.evaluation.evaluate import evaluate_adapter
from tpu_kit.generation.evaluation.held_out_answers import check_answers, count_correct
from tpu_kit.generation.evaluation.rewards import Rewards
from tpu_kit.generation.evaluation.verifiers import verifier_named
from tpu_kit.generation.reference_check import check_training
from tpu_kit.machine.chips import GIB
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.output_location import (
    make_output_folder,
    resolve_output_dir,
    set_results_aside,
    upload_results,
)
from tpu_kit.machine.storage.run_folder import adapter_at_hand, find_run
from tpu_kit.model import trainable as models
from tpu_kit.model.base_identity import base_of_adapter, fingerprint, identify
from tpu_kit.model.base_model import check_vocabulary, output_embedding
from tpu_kit.model.source import check_positions, load_tokenizer, read_config
from tpu_kit.planning.objective_check import check_objective
from tpu_kit.planning.oom_recovery import out_of_memory, suggestion
from tpu_kit.planning.preflight import Preflight, check_before_launch, predicted_bytes
from tpu_kit.training.adapter_files import save_adapter, start_from, tokenizer_to_save
from tpu_kit.training.checkpoint.manager import CheckpointManager, HostParts
from tpu_kit.training.losses.rollout import Rollouts
from tpu_kit.training.losses.teacher_files import prepare_files, read_columns
from tpu_kit.training.metrics import check_tracking, log_result, peak_memory
from tpu_kit.training.objectives import objective_of
from tpu_kit.training.outcome import MORE_UPDATES
from tpu_kit.training.resume import (
    check_resume,
    find_checkpoint,
    keep_run,
    refuse_early,
    training_tensors,
    versions,
)
from tpu_kit.training.step import prepare_model
from tpu_kit.training.trainer import Status, Trainer
from tpu_kit.training.updates import Updates

SHOWN_REPORT = "TPU_KIT_SHOWN_REPORT"
"""In the environment: the data report that a notebook has shown, which a run does not print again."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        status: "finished"; "stopped" (early stopping); "preempted", also by the user: run it again to continue.
        reason: of the early stop or the preemption; empty otherwise.
        step: updates done, of `total_steps`.
        metrics: see `fine_tune`.
        adapter_dir: an adapter for PEFT, or a whole model where lora.r=0; empty after a preemption, and on hosts other
            than host 0.
        checkpoint_dir: the newest checkpoint; None if there is none.
        output_dir: the run's folder.
        again: `TrainConfig.again`.
        warning: why the run seems to have taught nothing, by its held-out loss; empty where it has.
    """

    status: Status
    reason: str
    step: int
    total_steps: int
    metrics: dict[str, float]
    adapter_dir: str
    checkpoint_dir: str | None
    output_dir: str
    again: str = "run this again"
    warning: str = ""

    @property
    def ended(self) -> str:
        """How it ended, for its user: `status`, but "stopped" where the user stopped it."""
        return "stopped" if self.reason.startswith("SIGINT") else self.status

    def __str__(self) -> str:
        if self.status == "preempted":
            saved = f"its checkpoint is in {self.checkpoint_dir}" if self.checkpoint_dir else "it has saved nothing yet"
            text = f"{self.ended} at step {self.step} of {self.total_steps} ({self.reason}); {saved}"
            return f"{text}. To go on from there, {self.again}: the same cell, or the same command"
        adapter = self.adapter_dir or "the folder of host 0"
        lines = [f"finished at step {self.step}; adapter in {adapter}"]
        if self.status == "stopped":
            lines = [
                f"stopped early at step {self.step} of {self.total_steps}: {self.reason}; adapter in {adapter}",
                f"  To train on from there, raise optim.early_stop_patience or set it to null, and {self.again}",
            ]
        width = max(map(len, self.metrics), default=0) + 2
        for name, value in self.metrics.items():
            text = f"{value / GIB:.2f} GiB" if name.endswith("_bytes") else f"{value:.6g}"
            lines.append(f"  {name:<{width}}{text}")
        lines += [f"warning: {self.warning}"] if self.warning else []
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The output of a notebook cell, from which `python -m tpu_kit notebooks` reads the status."""
        return {
            "text/plain": str(self),
            RESULT_TYPE: {"status": self.status, "ended": self.ended, "reason": self.reason, "again": self.again},
        }


def train(
    config: TrainConfig,
    dataset: Dataset | DatasetDict | None = None,
    *,
    exact: bool = False,
    reward_funcs: Sequence[Any] | None = None,
) -> TrainResult:
    """Fine-tunes a model on all devices, and returns when the result is on disk.

    On several hosts each calls this function; host 0 answers held-out rows, saves and uploads the result.

    Args:
        config: the run.
        dataset: rows in memory instead of `data.source`, copied to `<output_dir>/data`; `data.split` and
            `data.eval_split` select from a DatasetDict.
        exact: on a TPU, ask its compiler before the launch whether the batch fits; takes a minute or more.
        reward_funcs: of `grpo`.

    Raises:
        OutOfMemory: a device or the host had too little memory; the text names the next setting that fits.
        ValueError: the configuration, the data or the machine do not allow the run.
        LaunchError: a replica failed.
        HostError: another host failed, hangs, is lost, or has not come.
    """
    hosts = find_hosts()
    if hosts.count > 1:
        backend = detection.detect(config.launch, hosts=hosts)  # refuses devices before it waits for the others
        if backend.mesh is not None and (problems := detection.slice_problems(config)):
            raise ConfigError(problems)
    launched = config.launch
    meets = Meeting(hosts, launched.meeting_timeout, launched.hang_timeout)
    with safe_output(), meets as meeting, contextlib.ExitStack() as stack:
        if hosts.count > 1:
            print(f"hosts            {hosts.count}, by {hosts.source}; this is {hosts.name(hosts.index)}", flush=True)
            meeting.agree({"number of hosts": hosts.count, "packages": versions(config), **config.flat_values()})
        return _train(config, dataset, exact, reward_funcs, meeting, stack)


def _train(
    config: TrainConfig,
    dataset: Dataset | DatasetDict | None,
    exact: bool,
    reward_funcs: Sequence[Any] | None,
    meeting: Meeting,
    stack: contextlib.ExitStack,
) -> TrainResult:
    hosts, several = meeting.hosts, meeting.hosts.count > 1
    check_tracking(config)
    verifier_named(config.tracking.verifier)
    backend = detection.detect(config.launch, hosts=hosts)
    if several and config.distill.files:
        raise ValueError("distill.files is not for several hosts: set it to null, so that each host runs the teacher")
    config = keep_run(resolve_output_dir(config), meeting.today)
    folder = make_output_folder(config)
    if several:
        stack.enter_context(keep_log(hosts, folder))
        if not config.remote:
            meeting.check_shared(folder)
    if dataset is not None:
        config = replace(config, data=replace(config.data, source=str(saved_rows_path(dataset, folder / "data"))))
    refuse_early(config)
    with _rows_saved(dataset, config.data.source):
        prepared, outlook = check_run(config, exact, hosts, reward_funcs)
        config = outlook.config
        rows = batch_arithmetic(config, outlook.room.replicas).global_batch_size if outlook.room else None
        refuse_early(config, rows, prepared)
    if several:
        batch = {"optim.batch_size": config.optim.batch_size, "replicas of a host": backend.num_replicas}
        facts = {f"base weights of {config.model.name}": fingerprint(identify(config.model)), "batch": batch}
        meeting.agree(facts | {"data (hash)": prepared.fingerprint, "device": backend.device_type})
    print(outlook, flush=True)
    if warning := suggestion(outlook):
        print(warning, file=sys.stderr, flush=True)
    prepare_files(config, prepared)
    try:
        with on_disk(prepared) as data:
            result = launch(
                functools.partial(fine_tune, data=data, reward_funcs=reward_funcs),
                config,
                sharded=True,
                meeting=meeting,
            )
    except (RuntimeError, MemoryError) as error:
        if explained := out_of_memory(error, outlook):
            raise explained from error
        raise
    assert result is not None, "the first replica of each host returns it"
    return result if hosts.index else _conclude(config, result, prepared)


def _conclude(config: TrainConfig, result: TrainResult, prepared: Prepared) -> TrainResult:
    """Uploads what a run has written, answers held-out rows, and logs, uploads and only then prints the comparison."""
    if config.remote:
        upload_results(config, result.adapter_dir)  # before the answers, which may take long
    result, compared = _answer_held_out(config, result, prepared)
    if result.status != "preempted":
        log_result(config, result.step, result.metrics, compared, result.adapter_dir)
    if config.remote and compared:
        upload_results(config)
    if compared:
        print(compared, flush=True)
    if config.remote:
        print(f"uploaded         {config.remote}", flush=True)
    return result


@contextlib.contextmanager
def _rows_saved(dataset: Dataset | DatasetDict | None, source: str) -> Iterator[None]:
    """Writes rows in memory to `source`, and removes them if the block raises: a refused run leaves no files."""
    fresh = dataset is not None and not os.path.exists(source)
    try:
        if dataset is not None:
            save_rows(dataset, Path(source).parent)
        yield
    except BaseException:
        if fresh:
            shutil.rmtree(source, ignore_errors=True)
            with contextlib.suppress(OSError):  # other rows are there
                Path(source).parent.rmdir()
        raise


def _answer_held_out(
    config: TrainConfig, result: TrainResult, prepared: Prepared
) -> tuple[TrainResult, Comparison | None]:
    """Compares the answers of both models, where the run asks for it; returns the result with their metrics."""
    if not config.tracking.generate_rows or result.status == "preempted":
        return result, None
    try:
        with stops_raise():
            compared = evaluate_adapter(config, result.adapter_dir, prepared)
    except (KeyboardInterrupt, SystemExit) as error:
        reason = f"{stop_name(error) or 'an end'} received while held-out rows were answered"
        return replace(result, status="preempted", reason=reason), None
    metrics = dict(result.metrics)
    for when, side in (("before", compared.base), ("after", compared.tuned)):
        metrics[f"accuracy_{when}"] = side.accuracy.share
        if side.perplexity is not None:
            metrics[f"perplexity_{when}"] = side.perplexity
    return replace(result, metrics=metrics), compared


def check_run(
    config: TrainConfig, exact: bool = False, hosts: Hosts = ONE, reward_funcs: Sequence[Any] | None = None
) -> tuple[Prepared, Preflight]:
    """Prepares the data and the batch in this process, so that errors appear before the launch.

    Raises:
        ValueError: the data or the batch cannot be used, or the model cannot be trained this way.
    """
    check_objective(config)
    if config.lora.adapter:
        _check_start(config, config.lora.adapter)
    prepared = prepare_run(config)
    check_answers(config, prepared)
    if prepared.tasks:
        check_rollouts(config, prepared.tasks.rows.rows, reward_funcs, hosts)
    rows = None if prepared.tasks else len(prepared.train)
    outlook = check_before_launch(config, exact, rows=rows, hosts=hosts)
    check_training(outlook.config, detection.detect(config.launch, hosts=hosts).device_type)
    return prepared, outlook


def _check_start(config: TrainConfig, adapter: str) -> None:
    """Raises ValueError if `lora.adapter` was trained on other weights, or does not fit the model and its objective."""
    from tpu_kit.model.meta_model import empty_model  # it loads the compiler of torch, which takes a second

    with adapter_at_hand(adapter) as folder:
        assert folder is not None
        base_of_adapter(config.model, folder)
        with torch.device("meta"):
            model = models.adapt(empty_model(config), config.lora, config.model.base_dtype)
            objective_of(config).attach(model, lambda one: empty_model(replace(config, model=one)))
        start_from(model, folder)


def check_rollouts(
    config: TrainConfig, rows: Sequence[Mapping[str, Any]], reward_funcs: Sequence[Any] | None, hosts: Hosts
) -> None:
    """Raises ValueError if the rewards of a run are not there, or none can judge its rows, or it has several hosts."""
    name = "distill.on_policy" if config.distill.on_policy else "grpo"
    if hosts.count > 1:
        raise ValueError(f"{name} on {hosts.count} hosts: completions are exchanged within one host; use one host")
    if not config.distill.on_policy:
        Rewards(config, reward_funcs).check(rows)


def prepare_run(config: TrainConfig) -> Prepared:
    """Prepares the data of a run for the tokenizer, the vocabulary and the positions of its model."""
    model, max_prompt = read_config(config.model), None
    if config.on_policy:
        max_prompt = config.rl.longest_prompt(config.data.max_length)
    start = Questions.read(find_run(config.lora.adapter).folder) if config.lora.adapter else None
    text = model.get_text_config() if model else None  # loading a model explains why its configuration cannot be read
    tokenizer = None if config.data.source == SYNTHETIC else load_tokenizer(config.model)
    check_positions(config.data.max_length, getattr(text, "max_position_embeddings", None))
    check_vocabulary(len(tokenizer or ()), getattr(text, "vocab_size", None))
    prepared = prepare(
        config.data,
        tokenizer,
        vocab_size=getattr(text, "vocab_size", None),
        learned=start.trained if start else NONE,
        max_prompt=max_prompt,
    )
    if tokenizer is None or not config.lora.r:  # full fine-tuning trains the embeddings
        return prepared
    return replace(prepared, new_tokens=new_tokens(config.model, text, tokenizer, prepared.train.documents.input_ids))


# ------------------------------------------------------------------------------------------------------- in a replica


def _read(config: TrainConfig, data: MappedData | None) -> tuple[torch.nn.Module, Prepared]:
    model = models.load_model(config.model, config.lora, seed=config.optim.seed)
    objective_of(config).attach(model, models.load_frozen)
    if config.lora.adapter:
        with adapter_at_hand(config.lora.adapter) as folder:
            assert folder is not None
            start_from(model, folder)
    prepared = data.read() if data else prepare_run(config)
    return model, prepared


def fine_tune(
    config: TrainConfig, data: MappedData | None = None, reward_funcs: Sequence[Any] | None = None
) -> TrainResult | None:
    """Trains in one replica; the first replica of each host returns the result.

    Its metrics: loss (of the last window) and eval_loss (of the weights in adapter_dir), nats per loss token;
    eval_accuracy with tracking.eval_generate_rows; eval_step, the step of both; train_seconds of all launches, with
    evaluations and checkpoints; skipped_updates; compiles on XLA and a GPU; and `metrics.peak_memory`.

    Args:
        config: the run.
        data: prepared by the process that launches; None prepares them here.
        reward_funcs: of reinforcement learning, in place of `rl.reward_funcs`.
    """
    with trainer(config, data, reward_funcs) as (loop, agreement):
        status = loop.run(agreement)
        reason = loop.evaluations.reason if status == "stopped" else agreement.reason or ""
        result = _finish(loop, status, reason) if loop.rt.local_rank == 0 else None
        if loop.rt.num_hosts > 1:
            loop.rt.barrier()  # a host that ends early could make its engine stop host 0, which saves
        return result


@contextlib.contextmanager
def trainer(
    config: TrainConfig, data: MappedData | None = None, reward_funcs: Sequence[Any] | None = None
) -> Iterator[tuple[Trainer, PreemptionGuard]]:
    """Loads the run in one replica; yields its loop, ready to run, and what stops it; arguments as in `fine_tune`."""
    rt = runtime.current()
    model, prepared = runtime.load_once(rt, lambda: _read(config, data))
    plan = batch_arithmetic(config, rt.data_size)
    keep = (config.checkpoint.keep, config.checkpoint.keep_every)
    with contextlib.ExitStack() as stack:
        agreement = stack.enter_context(PreemptionGuard(rt))
        checkpoints = stack.enter_context(CheckpointManager(config.checkpoints_place, *keep)) if rt.rank == 0 else None
        checkpoint = find_checkpoint(config, checkpoints)
        rt.barrier()  # rank 0 has moved damaged checkpoints aside
        checkpoint = checkpoint if checkpoints else find_checkpoint(config, None)
        if rt.num_hosts > 1:
            _check_same(config, rt, checkpoint.step if checkpoint else 0, model)
        parts = stack.enter_context(_parts(config, rt, checkpoints)) if rt.shares_state else None
        saved, objective = None, objective_of(config)
        source = Updates(config, prepared, plan, rt)
        if config.on_policy:
            rewards = None if config.distill.on_policy else stack.enter_context(Rewards(config, reward_funcs))
            source = Rollouts(config, prepared, plan, rt, model, objective, rewards)
        if checkpoint:
            total = sum(1 for _ in source.all())
            check_resume(checkpoint, config, plan.global_batch_size, prepared, total, quiet=rt.rank != 0)
            saved = training_tensors(checkpoint)
        prepared.train.columns = read_columns(config, prepared)
        untrained = ""
        if rt.rank == 0:
            head = output_embedding(model).weight  # before it leaves the CPU
            untrained = describe_untrained(prepared, head, adapters=bool(config.lora.r))
        state = prepare_model(model, config, rt, saved, len(objective.extra))
        rt.sync()
        rt.barrier()

        predicted = predicted_bytes(config, rt)
        loop = Trainer(
            config, rt, model, objective, state, prepared, plan, source,
            lambda: count_correct(model, config, prepared, rt, source.generator), checkpoints, predicted, parts,
        )  # fmt: skip
        if checkpoint:
            loop.resume(checkpoint)
        if rt.rank == 0:
            # After all checks: a refused run must not replace the files of an earlier one.
            if loop.step < loop.total and not loop.evaluations.stopped:
                set_results_aside(config)
            atomic.write_text(config.output_path / "config.yaml", config.to_yaml())
            if prepared.questions:
                prepared.questions.write(config.output_path)
            report = data_report(prepared, plan, loop.total, config)
            if os.environ.get(SHOWN_REPORT) != report:
                print(report)
            print(f"model            {models.count_parameters(model)}")
            if untrained:
                print(f"unknown tokens   {untrained}")
            if loop.evaluations.stopped:
                print(f"stopped          at step {loop.step} before; nothing is trained: {loop.evaluations.reason}")
            sys.stdout.flush()
        stack.enter_context(loop)
        yield loop, agreement


TEMPLATES = {
    "none": [
        "chat template    none is used: the rows are plain text. The adapter is saved without one, so generate, search "
        "and evaluate ask it as plain text"
    ],
    "text": ["chat template    not applied: most rows have its turns in their text already; prompts are asked by it"],
}
"""Lines of the report for each `Layout.turns_by` but "template"."""


def data_report(prepared: Prepared, plan: BatchPlan, total: int, config: TrainConfig) -> str:
    """Describes the rows and the batches of a run of `total` updates."""
    warmup, rl = config.optim.warmup_steps, config.rl
    long = f"warning          optim.warmup_steps={warmup} is more than the {total:,} updates; lower it or raise epochs"
    turns = TEMPLATES.get(prepared.encoder.layout.turns_by, []) if prepared.encoder else []
    if prepared.tasks:
        each = f"{config.num_generations} completions of up to {rl.max_completion_length} tokens"
        batch = f"rollout          {rl.prompts_per_rollout} prompts x {each}; {total:,} updates"
    else:
        left = len(prepared.train) % plan.global_batch_size
        batch = f"batch            {plan}; {total:,} updates; {left} rows of each epoch are left over"
    few = f"warning          {total:,} updates are few, and teach little: {MORE_UPDATES}"
    if prepared.tasks:
        few = few.replace("optim.batch_size or data.max_length", "rl.prompts_per_update")
    return "\n".join([str(prepared), *turns, batch, *[long] * (warmup > total), *[few] * (total < LEAST_UPDATES)])


def _check_same(config: TrainConfig, rt: Runtime, step: int, model: torch.nn.Module) -> None:
    """Checks that all hosts continue from the same checkpoint and begin with the same weights."""
    table = torch.zeros(rt.world_size, 3)
    table[rt.rank] = torch.tensor([step, *_weights_digest(model)])
    rt.all_reduce([table])
    rows = [tuple(map(int, row)) for row in table.tolist()]
    if len(set(rows)) > 1:
        shown = ", ".join(f"step {step}, {high:06x}{low:06x}" for step, high, low in rows)
        raise ValueError(
            f"the hosts do not begin with the same weights of model.name={config.model.name} and checkpoint in "
            f"{config.checkpoints_place}: they have {shown} (by rank; 0: no checkpoint). Set output_dir to an object "
            "store (gs://bucket/run) or a folder that all share, and give all the same files, packages and processor"
        )


def _weights_digest(model: torch.nn.Module) -> tuple[int, int]:
    """Returns a hash of samples of all weights as two numbers that fp32 holds exactly."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sample = tensor.reshape(-1)[:: max(1, tensor.numel() // 64)].contiguous()
        digest.update(name.encode() + sample.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:3]), int.from_bytes(digest.digest()[3:6])


def _parts(config: TrainConfig, rt: Runtime, checkpoints: CheckpointManager | None) -> HostParts:
    """What writes this host's part of each checkpoint; all hosts get the number that host 0 draws."""

    def make_room(step: int, size: int) -> None:
        if checkpoints is not None:
            checkpoints.make_room(step, rt.num_hosts * size)  # the others' parts are about as large
        rt.barrier()

    token = torch.tensor([secrets.randbits(62) if rt.rank == 0 else 0])
    rt.all_reduce([token])
    return HostParts(config.checkpoints_place, rt.rank, rt.num_hosts, int(token), make_room)


def _finish(loop: Trainer, status: Status, reason: str) -> TrainResult:
    """Waits until the last checkpoint is durable, and saves the adapter of a run that has ended, on rank 0 alone."""
    config, folder, adapter, metrics = loop.config, loop.config.output_path, "", loop.results()
    checkpoint: str | None = str(config.checkpoints_place)
    if loop.parts is not None:
        loop.parts.wait()
    if loop.checkpoints is not None:
        loop.checkpoints.wait()
        if status != "preempted":
            adapter, encoder = str(folder / "adapter"), loop.prepared.encoder
            save_adapter(folder / "adapter", loop.model, loop.weights(), config, encoder and tokenizer_to_save(encoder))
        metrics |= {name: float(count) for name, count in loop.rt.counters().items() if name == "compiles"}
        metrics |= peak_memory(loop.rt, loop.predicted_bytes)
        complete = loop.checkpoints.complete()
        checkpoint = str(complete[-1].path) if complete else None
    warning = "" if status == "preempted" else loop.warning(metrics)
    ended = status, reason, loop.step, loop.total, metrics, adapter, checkpoint, str(folder), config.again
    return TrainResult(*ended, warning)
