"""Supervised fine-tuning on all backends.

`train` runs in the calling process: it plans the run, launches `fine_tune` in every replica, which loads the model and
trains it, and evaluates and uploads the result.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset, DatasetDict

from tpu_kit.config.loader import TrainConfig
from tpu_kit.data.prepare import Prepared
from tpu_kit.data.rows.sources import saved_rows_path
from tpu_kit.distributed.hosts import find_hosts, keep_log
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.meeting import Meeting
from tpu_kit.distributed.output import safe_output
from tpu_kit.distributed.preemption import stop_name, stops_raise
from tpu_kit.distributed.replica.runtime import Outdated
from tpu_kit.exporting.hub.checkpoint_uploads import CheckpointUploads, fetch_checkpoint
from tpu_kit.exporting.hub.publish import describe_push, push_result
from tpu_kit.generation.evaluation.evaluate import Comparison, evaluate_adapter
from tpu_kit.machine.storage.output_location import make_output_folder, resolve_output_dir, upload_results
from tpu_kit.planning.oom_recovery import out_of_memory, suggestion
from tpu_kit.recipes import problems
from tpu_kit.recipes.replica import fine_tune
from tpu_kit.recipes.result import TrainResult
from tpu_kit.recipes.run_data import for_replicas
from tpu_kit.recipes.run_plan import RunPlan, before_fetch, find_machine, plan_run, prepare_columns
from tpu_kit.training.metrics import log_result
from tpu_kit.training.resume import versions


def configured(config: TrainConfig) -> TrainConfig:
    """Returns the configuration that `train` trains: `config` unchanged."""
    return config


def dry_run(config: TrainConfig, *, exact: bool = False) -> RunPlan:
    """Plans a run like `train`, and launches nothing; on several hosts, it plans for this host.

    Arguments are as in `train`. Checkpoints in a notebook's input are copied to the working folder, like there;
    checkpoint.source is not fetched. A plan that may not fit the memory is returned, too.

    Raises:
        ValueError: the configuration, the data or the machine do not allow the run.
    """
    hosts = find_hosts()
    backend, wrong = find_machine(config, hosts)
    problems.tell([*wrong, *problems.of_machine(config, hosts)])
    config = resolve_output_dir(config)
    make_output_folder(config, dry=True)
    return plan_run(before_fetch(config), exact=exact, backend=backend)[0]


def train(
    config: TrainConfig,
    dataset: Dataset | DatasetDict | None = None,
    *,
    exact: bool = False,
    reward_funcs: Sequence[Any] | None = None,
) -> TrainResult:
    """Fine-tunes a model on all devices, and returns when the result is on disk.

    On several hosts, call it on every host; host 0 answers held-out rows, and saves and uploads the result. After a
    first stop signal in training it saves a checkpoint, and the result's status is "preempted".

    Args:
        config: the run.
        dataset: rows in memory instead of `data.source`, copied to `<output_dir>/data`; `data.split` and
            `data.eval_split` select from a DatasetDict.
        exact: whether, on a TPU, its compiler checks before the launch that the batch fits; takes a minute or more.
        reward_funcs: the rewards of `grpo`, in place of `rl.reward_funcs`.

    Raises:
        OutOfMemory: a device or the host had too little memory; the text names the next setting to try, if any.
        ValueError: the configuration, the data or the machine do not allow the run.
        LaunchError: a replica failed.
        HostError: another host failed, hangs, is lost, or did not join.
    """
    hosts = find_hosts()
    several, launched = hosts.count > 1, config.launch
    backend, wrong = find_machine(config, hosts)
    if several:
        problems.tell(wrong)  # before it waits for the other hosts
    meets = Meeting(hosts, launched.meeting_timeout, launched.hang_timeout)
    with safe_output(), meets as meeting, contextlib.ExitStack() as stack:
        if several:
            print(f"hosts            {hosts.count}, by {hosts.source}; this is {hosts.name(hosts.index)}", flush=True)
            meeting.agree({"number of hosts": hosts.count, "packages": versions(config), **config.flat_values()})
        problems.tell([*wrong, *problems.of_machine(config, hosts)])
        config = resolve_output_dir(config)
        fetch_checkpoint(config)
        folder = make_output_folder(config)
        if several:
            stack.enter_context(keep_log(hosts, folder))
            if not config.remote:
                meeting.check_shared(folder)
        if dataset is not None:
            config = replace(config, data=replace(config.data, source=str(saved_rows_path(dataset, folder / "data"))))
        for attempt in ("", " (planned again)"):
            plan, prepared = plan_run(
                config, dataset, exact=exact, reward_funcs=reward_funcs, backend=backend, today=meeting.today
            )
            if several:
                meeting.agree({f"{name}{attempt}": value for name, value in plan.facts().items()})
            try:
                result = _launch(plan, prepared, reward_funcs, meeting)
                break
            except Outdated as error:
                if attempt:
                    raise
                print(f"planned again    {error}", flush=True)
        return result if hosts.index else _conclude(plan.config, result, prepared)


def _launch(plan: RunPlan, prepared: Prepared, reward_funcs: Sequence[Any] | None, meeting: Meeting) -> TrainResult:
    """Prints the plan, trains in the replicas and returns their result; raises as `train`.

    Raises Outdated if the replicas find another checkpoint than planned.
    """
    config, outlook = plan.config, plan.outlook
    assert outlook is not None
    if not plan.shown:
        if mixed := "".join(f"{line}\n" for line in prepared.report.mixed):  # also in the report
            print(mixed, end="")
            plan = replace(plan, report=plan.report.removeprefix(mixed))
        print(outlook, flush=True)
    if pushed := describe_push(config):
        print(pushed, flush=True)
    if warning := suggestion(outlook):
        print(warning, file=sys.stderr, flush=True)
    prepare_columns(plan, prepared)
    try:
        with for_replicas(plan, prepared) as data, CheckpointUploads(config, on=not meeting.hosts.index):
            function = functools.partial(fine_tune, plan=plan, data=data, reward_funcs=reward_funcs)
            result = launch(function, config, sharded=True, meeting=meeting, backend=plan.backend)
    except (RuntimeError, MemoryError) as error:
        if explained := out_of_memory(error, outlook):
            raise explained from error
        raise
    assert result is not None, "the first replica of each host returns it"
    return result


def _conclude(config: TrainConfig, result: TrainResult, prepared: Prepared) -> TrainResult:
    """Uploads the results, answers held-out rows, logs and prints the comparison, and pushes to the hub, as asked for.

    Returns the result with the comparison's metrics and `pushed`.
    """
    if config.remote:
        upload_results(config, result.adapter_dir)  # before the answers, which may be slow
    result, compared = _answer_held_out(config, result, prepared)
    if result.status != "preempted":
        log_result(config, result.step, result.metrics, compared, result.adapter_dir)
    if config.remote and compared:
        upload_results(config)
    if compared:
        print(compared, flush=True)
    if config.remote:
        print(f"uploaded         {config.remote}", flush=True)
    if config.hub.model_id and result.status != "preempted" and (pushed := push_result(config, config.output_path)):
        result = replace(result, pushed=pushed.url)
    return result


def _answer_held_out(
    config: TrainConfig, result: TrainResult, prepared: Prepared
) -> tuple[TrainResult, Comparison | None]:
    """Returns the result with metrics of the answers of both models, and their comparison, if the run asks for them.

    Otherwise the comparison is None; so it is after a stop signal, which makes the result "preempted".
    """
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
