"""The run plan: all facts of a run on this machine, found once in the calling process and passed to the replicas.

    machine -> resumed from -> model -> data -> memory and time -> batch

Each step adds facts to the plan and needs the steps before it; memory decides the batch of `auto`. `plan_run` makes all
steps, and raises the problems of a step together (`problems`). Replicas do not find these facts again: rank 0 only
confirms the checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset, DatasetDict

from tpu_kit.config.loader import BatchPlan, ConfigError, ModelConfig, TrainConfig, batch_arithmetic
from tpu_kit.data.prepare import Prepared
from tpu_kit.data.rows.sources import save_rows
from tpu_kit.distributed import detection
from tpu_kit.distributed.detection import Backend
from tpu_kit.distributed.hosts import ONE, Hosts
from tpu_kit.machine.storage.run_folder import adapter_of
from tpu_kit.model.weights.base_identity import NAME, fingerprint, identify_adapter, pin
from tpu_kit.model.weights.loading import read_config
from tpu_kit.planning.preflight import Preflight, check_before_launch
from tpu_kit.recipes import problems
from tpu_kit.recipes.run_data import SHOWN_REPORT, data_report, prepare_run, with_tokens
from tpu_kit.training.losses.sampled_updates import planned_updates
from tpu_kit.training.losses.teacher_files import TeacherFiles, prepare_files, read_columns
from tpu_kit.training.objectives import Objective, objective_of
from tpu_kit.training.resume import START, TEACHER, Record, ResumePoint, find_resume_point, rows_digest, versions

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class RunPlan:
    """The facts of a run on this machine. It is picklable and has no tensors: weights are a location and a commit.

    Fields of steps that were not made are None.

    Attributes:
        config: the run; complete after the last step.
        backend: the device, the replicas or the mesh, and the hosts.
        resume_point: the checkpoint from which the run resumes; None for a new run.
        settings: transformers' configuration of the model; None if it cannot be read (loading the model says why).
        teacher: the teacher with its commit; None without distillation.
        record: identities of the weights and versions; later steps add data and batch.
        rows: packed rows of an epoch, or prompts of a run that samples; None for a stream.
        teacher_files: the files of `distill.files`; None without them.
        outlook: memory and time of a replica.
        batch: rows and passes of an update; None if only the TPU's runtime knows the number of replicas.
        updates: number of updates.
        rows_done: number of rows in the updates up to the checkpoint.
        report: description of rows and batches, which rank 0 prints.
    """

    config: TrainConfig
    backend: Backend
    resume_point: ResumePoint | None = None
    settings: PreTrainedConfig | None = field(default=None, repr=False)
    teacher: ModelConfig | None = None
    record: Record = field(default=Record({}, {}), repr=False)
    rows: int | None = None
    teacher_files: TeacherFiles | None = None
    outlook: Preflight | None = None
    batch: BatchPlan | None = None
    updates: int | None = None
    rows_done: int | None = None
    report: str = field(default="", repr=False)

    def pinned(self, model: ModelConfig) -> ModelConfig:
        """Returns the plan's teacher, with its commit, for the configured teacher; other models unchanged."""
        return self.teacher if self.teacher is not None and model == self.config.teacher else model

    def columns(self) -> dict[str, Callable[[np.ndarray], torch.Tensor]]:
        """Returns the columns of batches that come from files, by name; raises ValueError if files are missing."""
        return read_columns(self.config, self.teacher_files) if self.teacher_files else {}

    def facts(self) -> dict[str, Any]:
        """Returns the facts that must be equal on all hosts, as JSON values by the names that an error prints.

        The names are "KIND weights of NAME" for the model, the teacher and the initial adapter, "batch", "data (hash)",
        "files of data.source", "device", "checkpoint" and "updates". Unknown values are None.
        """
        config, point, names = self.config, self.resume_point, {NAME: self.config.model.name}
        names |= {TEACHER: str(config.distill.teacher), START: str(config.lora.adapter)}
        weights = {NAME: None, **self.record.identities}
        return {
            **{f"{kind} weights of {names[kind]}": fingerprint(identity) for kind, identity in weights.items()},
            "batch": {
                "optim.batch_size": config.optim.batch_size,
                "optim.remat": config.optim.remat,
                "replicas of a host": self.backend.num_replicas,
            },
            "data (hash)": self.record.fingerprint,
            "files of data.source": self.record.shards and versions_digest(self.record.shards),
            "device": self.backend.device_type,
            "checkpoint": point and {"step": point.step, "files": digest_of(point)},
            "updates": self.updates,
        }

    def __str__(self) -> str:
        config, point, outlook = self.config, self.resume_point, self.outlook
        start = f"{config.checkpoint.source}, fetched by `train`" if config.checkpoint.source else "nothing: a new run"
        commit = f" at commit {config.model.revision}" if config.model.revision else ""
        lines = [
            f"machine          {self.backend}",
            f"output           {config.output_dir or config.output_path}",
            f"resumed from     {f'step {point.step}, {point.checkpoint.path}' if point else start}",
            f"model            {config.model.name}{commit}, {config.model.base_dtype}",
            *([f"teacher          {self.teacher.name}"] if self.teacher else []),
            f"objective        {objective_name(config)}",
            *self.report.splitlines(),
        ]
        if outlook is not None:
            lines += str(outlook).splitlines()
            if self.updates is not None:
                lines.append(f"time             {outlook.duration(self.left)}")
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Returns the output of a notebook cell."""
        return {"text/plain": str(self)}

    @property
    def shown(self) -> bool:
        """Whether a cell of the training notebook has shown the plan, so that it is not printed again."""
        return os.environ.get(SHOWN_REPORT) == self.report

    @property
    def left(self) -> int:
        """Number of remaining updates."""
        return max(0, (self.updates or 0) - (self.resume_point.step if self.resume_point else 0))

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `train --dry-run --json` prints: JSON values of the plan, None for unknown values.

        The keys are "device_type", "hosts", "replicas_of_a_host", "mesh", "output_dir", "resumed_from", "model",
        "weights", "objective", "rows", "data" (hash), "batch", "updates", "updates_left", "memory", "step_seconds",
        "notes", "versions" and "config".
        """
        config, point, outlook = self.config, self.resume_point, self.outlook
        one = outlook.setting if outlook else None
        time = outlook.time if outlook else None
        return {
            "device_type": self.backend.device_type, "hosts": self.backend.hosts.count,
            "replicas_of_a_host": self.backend.num_replicas, "mesh": config.launch.mesh,
            "output_dir": config.output_dir or str(config.output_path),
            "resumed_from": point and {"step": point.step, "path": str(point.checkpoint.path)},
            "model": {"name": config.model.name, "revision": config.model.revision,
                      "model_type": self.settings and self.settings.model_type},
            "weights": {name: fingerprint(identity) for name, identity in self.record.identities.items()},
            "objective": objective_name(config), "rows": self.rows, "data": self.record.fingerprint,
            "batch": self.batch and asdict(self.batch), "updates": self.updates, "updates_left": self.left,
            "memory": one and {"peak_bytes": one.peak_bytes, "limit_bytes": one.where.limit, "fits": one.fits,
                               "parts": one.parts},
            "step_seconds": time.seconds if time else None,
            "notes": list(outlook.notes) if outlook else [], "versions": self.record.versions,
            "config": config.to_dict(),
        }  # fmt: skip


def plan_run(
    config: TrainConfig,
    dataset: Dataset | DatasetDict | None = None,
    *,
    exact: bool = False,
    reward_funcs: Sequence[Any] | None = None,
    backend: Backend | None = None,
    today: str | None = None,
) -> tuple[RunPlan, Prepared]:
    """Returns the plan of a run, and its prepared data; trains nothing, opens no device, makes no output folder.

    Args:
        config: the run; its `output_dir` stays as it is, so `resolve_output_dir` comes before.
        dataset: rows in memory. They are saved to `data.source`, which must be their `saved_rows_path`. If the run is
            refused, newly saved rows are removed.
        exact: whether, on a TPU, its compiler checks that the batch fits.
        reward_funcs: the rewards of `grpo` to check, in place of `rl.reward_funcs`.
        backend: the result of `find_machine`, whose problems and `problems.of_machine` were checked; None checks here.
        today: the date of a new run, as YYYY-MM-DD; None: today on this machine.

    Raises:
        ValueError: the text has all problems of the first part of the planning that finds any.
        RuntimeError: as `check_before_launch`, only with `exact`.
    """
    if backend is None:
        backend, wrong = find_machine(config)
        problems.tell([*wrong, *problems.of_machine(config, ONE)])
        assert backend is not None, "or its problem was told"
    plan = resumed(RunPlan(config, backend), today or date.today().isoformat())
    plan, objective = with_model(plan)
    problems.tell(problems.of_model(plan, objective))
    with _rows_saved(dataset, str(plan.config.data.source)):
        prepared = prepare_run(plan.config, plan.settings)
        plan = with_data(plan, prepared)
        problems.tell(problems.of_data(plan, prepared, reward_funcs))
        plan = with_memory(plan, exact)
        if (shards := batch_shards(plan)) is not None:
            plan = with_batch(plan, prepared, shards)
        problems.tell(problems.of_batch(plan))
    return plan, prepared


def before_fetch(config: TrainConfig) -> TrainConfig:
    """Returns the configuration for a plan before `checkpoint.source` is fetched: with it, checkpoint.resume=auto."""
    if config.checkpoint.source is None:
        return config
    return replace(config, checkpoint=replace(config.checkpoint, resume="auto"))


def find_machine(config: TrainConfig, hosts: Hosts = ONE) -> tuple[Backend | None, list[ValueError]]:
    """Returns the backend on which the run trains, and the run's problems on it; opens no device.

    If the backend is not found, returns None and the reason. `hosts` are all hosts of the run.
    """
    try:
        backend = detection.detect(config.launch, hosts=hosts)
    except ValueError as error:
        return None, [error]
    return backend, [ConfigError(found)] if (found := detection.run_problems(config, backend)) else []


def resumed(plan: RunPlan, today: str) -> RunPlan:
    """Adds the checkpoint to resume from, and the settings that it keeps; to a new run only data.date.

    The date is `today` (YYYY-MM-DD), unless data.date is set. Raises ValueError as `find_resume_point`.
    """
    config, point = plan.config, find_resume_point(plan.config)
    if point is not None:
        return replace(plan, resume_point=point, config=point.kept(config))
    data = replace(config.data, date=config.data.date or today)
    return replace(plan, config=replace(config, data=data))


def with_model(plan: RunPlan) -> tuple[RunPlan, Objective | None]:
    """Adds the model's configuration, and the commits and identities of all weights; also returns the objective.

    The objective is None if it cannot be made; `problems.of_model` reports why. Raises ValueError as `pin` and
    `read_config`.
    """
    config, began = plan.config, plan.resume_point.identities if plan.resume_point else {}
    model, identity = pin(config.model, began.get(NAME))
    config = replace(config, model=model)
    identities = {NAME: identity}
    if (teacher := config.teacher) is not None:
        with contextlib.suppress(ValueError):  # the objective's check reports problems of its teacher
            teacher, identities[TEACHER] = pin(teacher, began.get(TEACHER))
    if config.lora.adapter:
        with contextlib.suppress(ValueError):  # `problems.of_model` reports why there is no adapter
            identities[START] = identify_adapter(str(adapter_of(config.lora.adapter)))
    record = Record({name: found for name, found in identities.items() if found}, {})
    plan = replace(plan, config=config, settings=read_config(model), teacher=teacher, record=record)
    with contextlib.suppress(ValueError):
        objective = objective_of(config)
        return replace(plan, record=record._replace(versions=versions(config))), objective
    return plan, None


def with_data(plan: RunPlan, prepared: Prepared) -> RunPlan:
    """Adds the hashes of the data, the number of rows (None for a stream) and the teacher's files.

    In the configuration, it sets data.images_per_row for rows with images, and lora.tokens as `with_tokens`, which may
    raise ValueError.
    """
    config, tasks = with_tokens(plan.config, prepared), prepared.tasks
    if prepared.images_per_row:
        config = replace(config, data=replace(config.data, images_per_row=prepared.images_per_row))
    files = TeacherFiles.of(config, prepared, plan.record.identities.get(TEACHER))
    record = plan.record._replace(fingerprint=prepared.fingerprint, rows_digest=rows_digest(prepared))
    rows: int | None = len(tasks.numbers) if tasks else len(prepared.train)
    if prepared.stream is not None:
        rows, record = None, record._replace(shards=prepared.stream.shards.versions())
    return replace(plan, config=config, record=record, rows=rows, teacher_files=files)


def with_memory(plan: RunPlan, exact: bool = False) -> RunPlan:
    """Chooses values for "auto", also the mesh in `backend`, and adds the prediction of memory and time.

    `exact` is whether, on a TPU, its compiler verifies batch size and remat.

    Raises:
        ValueError, RuntimeError: as `check_before_launch`.
    """
    point, began = plan.resume_point, None
    if point is not None:
        began = {"batch_size": point.config["optim.batch_size"], "global_batch_size": point.state["global_batch_size"]}
    outlook = check_before_launch(plan.config, exact, rows=plan.rows, backend=plan.backend, began=began)
    backend, mesh = plan.backend, outlook.room.mesh if outlook.room else None
    if mesh is not None and backend.mesh is None and mesh.size > 1:  # chosen by launch.mesh=auto
        backend = replace(backend, num_replicas=1, mesh=mesh)
    return replace(plan, config=outlook.config, backend=backend, outlook=outlook)


def batch_shards(plan: RunPlan) -> int | None:
    """Returns the number of shards of a batch on all hosts; None if only the TPU's runtime knows it."""
    backend, room = plan.backend, plan.outlook.room if plan.outlook else None
    if backend.mesh is not None:
        return backend.mesh.batch_shards
    if room is not None:
        return room.replicas
    return backend.num_replicas and backend.num_replicas * backend.hosts.count


def with_batch(plan: RunPlan, prepared: Prepared, shards: int) -> RunPlan:
    """Adds the batch, the number of updates, the rows done and the report.

    Raises:
        ValueError: the rows do not fill an update, or the update cannot be split over the shards.
    """
    batch = batch_arithmetic(plan.config, shards)
    record = plan.record._replace(global_batch_size=batch.global_batch_size)
    plan = replace(plan, batch=batch, record=record)
    total, rows, done = 0, 0, plan.resume_point.step if plan.resume_point else 0
    for update in planned_updates(plan.rows or 0, batch, plan.config):
        total += 1
        rows += update.rows if update.step <= done else 0
    report = data_report(prepared, batch, total, plan.config)
    return replace(plan, updates=total, rows_done=rows, report=report)


def prepare_columns(plan: RunPlan, prepared: Prepared) -> None:
    """Computes the missing files of `RunPlan.columns` in a separate launch, if there are any; see `prepare_files`."""
    if plan.teacher_files is not None and plan.teacher is not None:
        prepare_files(plan.config, prepared, plan.teacher_files, plan.teacher)


def objective_name(config: TrainConfig) -> str:
    """Returns the name of the objective for the user."""
    return config.optim.objective if config.distill.teacher is None else "distillation"


def versions_digest(shards: Mapping[str, str]) -> dict[str, Any]:
    """Returns the number of a stream's files, and a short hash of their names, order and versions."""
    digest = hashlib.blake2b(repr([*shards.items()]).encode(), digest_size=8)
    return {"count": len(shards), "hash": digest.hexdigest()}


def digest_of(point: ResumePoint) -> str:
    """Returns a short hash of a checkpoint's files."""
    return hashlib.blake2b(repr(sorted(point.checkpoint.files.items())).encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def _rows_saved(dataset: Dataset | DatasetDict | None, source: str) -> Iterator[None]:
    """Writes rows in memory, if any, to `source`, their `saved_rows_path`.

    If the block raises, it removes rows that were not there before.
    """
    fresh = dataset is not None and not os.path.exists(source)
    try:
        if dataset is not None:
            save_rows(dataset, Path(source).parent)
        yield
    except BaseException:
        if fresh:
            shutil.rmtree(source, ignore_errors=True)
            with contextlib.suppress(OSError):  # the folder has other rows
                Path(source).parent.rmdir()
        raise
