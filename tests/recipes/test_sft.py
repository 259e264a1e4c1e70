"""The training loop: its compiles, executions and reads; agreement of the backends; how runs end and their files."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support import training_functions
from tests.support.child_processes import run_python
from tpu_kit.config.loader import BatchPlan, TrainConfig, load_config
from tpu_kit.data import batching, prepare
from tpu_kit.distributed.detection import Backend
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.distributed.replica.backends import CudaRuntime
from tpu_kit.generation.evaluation import evaluate
from tpu_kit.machine.checks import Machine
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.planning import oom_recovery, preflight
from tpu_kit.planning.cost import model_flops
from tpu_kit.recipes import sft
from tpu_kit.recipes.result import TrainResult
from tpu_kit.recipes.run_data import data_report
from tpu_kit.recipes.run_plan import RunPlan, resumed, with_model
from tpu_kit.training import objectives, step, trainer
from tpu_kit.training.checkpoint import manager
from tpu_kit.training.checkpoint.local_store import FolderStore
from tpu_kit.training.objectives import SupervisedObjective

pytestmark = pytest.mark.usefixtures("quick_xla")
needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")

Configure = Callable[..., TrainConfig]
LENGTH = 96


def settings(world: Path, folder: Path, **changes: Any) -> TrainConfig:
    config = load_config(None, {
        "model.name": str(world / "model"), "base_dtype": "fp32", "lora.r": 4, "source": str(world / "rows.jsonl"),
        "max_length": LENGTH, "eval_rows": 8, "max_steps": 6, "learning_rate": 1e-2, "loss_chunk": 64,
        "logging_steps": 3, "batch_size": 2, "output_dir": str(folder), "device_type": "cpu",
        "num_replicas": 1, "save_steps": 1000, "optim.seed": 0, **changes,
    })  # fmt: skip
    config.output_path.mkdir(parents=True, exist_ok=True)
    return config


@pytest.fixture
def configure(world: Path, tmp_path: Path) -> Configure:
    return lambda name="run", **changes: settings(world, tmp_path / name, **changes)


def records(config: TrainConfig, kind: str) -> list[dict[str, Any]]:
    lines = (config.output_path / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


# Every feature that the limits require. The batch grows from 1 pass to 2, and the rate is 0 in the first step.
EVERYTHING: dict[str, Any] = {
    "max_steps": 10, "warmup_steps": 3, "ema_decay": 0.9, "eval_steps": 5, "remat": "full", "logging_steps": 5,
    "batch_growth_factor": 2.0, "batch_growth_steps": 5, "packing": True, "weight_decay": 0.01,
}  # fmt: skip


@pytest.fixture(scope="module")
def backends(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """Runs of the same rows and updates on several backends, each launched at its first use."""
    folder, made = tmp_path_factory.mktemp("backends"), {}

    def get(device_type: str, replicas: int) -> dict[str, Any]:
        key = (device_type, replicas)
        if key not in made:
            config = load_config(
                None,
                {
                    "model.name": str(world / "model"), "base_dtype": "fp32", "lora.r": 4,
                    "source": str(world / "rows.jsonl"), "max_length": LENGTH, "eval_rows": 6, "learning_rate": 1e-2,
                    "loss_chunk": 64, "batch_size": "auto", "global_batch_size": 4,
                    "output_dir": str(folder / f"{device_type}{replicas}"),
                    "device_type": device_type, "num_replicas": replicas, "save_steps": 1000, **EVERYTHING,
                },
            )  # fmt: skip
            config.output_path.mkdir(parents=True)
            config = preflight.check_before_launch(config).config
            ended = launch(training_functions.watched, config)
            ended["batch_size"] = config.optim.batch_size
            made[key] = {**ended, "train": records(config, "train"), "eval": records(config, "eval")}
        return made[key]

    return get


@pytest.mark.slow  # quick sibling: test_layer_scan.py, updates_are_those_of_the_unrolled_layers
def test_layers_as_a_loop_save_the_adapter_of_unrolled_layers(configure: Configure) -> None:
    files = {}
    for loop in ("on", "off"):
        config = configure(loop, max_steps=2, remat="full", scan_layers=loop, ema_decay=0.9)
        result = sft.train(config)
        assert result.checkpoint_dir is not None
        for folder in (result.adapter_dir, result.checkpoint_dir):
            files[loop, folder == result.adapter_dir] = load_file(Path(folder) / "adapter_model.safetensors")
    assert len(files["off", True]) == 2 * 2 * 7
    for found in files.values():
        torch.testing.assert_close(found, files["off", True], rtol=1e-4, atol=1e-5)


@needs_xla
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_one_program_for_each_kind_of_update_and_one_for_evaluation(
    backends: Callable[[str, int], dict[str, Any]], replicas: int
) -> None:
    ended = backends("xla-cpu", replicas)
    assert ended["set_up"] <= 3 + 1  # plus the evaluation before the first update; later evaluations use its program
    assert ended["counters"]["compiles"] == ended["set_up"] + 2  # accumulation 1, accumulation 2
    assert [record["compiles"] for record in ended["train"]] == [ended["set_up"] + 1, ended["set_up"] + 2]


@needs_xla
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_execution_for_each_update_and_no_reading_between_logs(
    backends: Callable[[str, int], dict[str, Any]], replicas: int
) -> None:
    ended = backends("xla-cpu", replicas)
    counters, batches = ended["counters"], 1  # the held-out rows fill four packed rows
    syncs = 1 + 10 + 3 * batches  # set-up, updates, three evaluations
    assert [note["syncs"] for note in ended["ranks"]] == [syncs] * replicas
    assert counters["executions"] == syncs * replicas
    assert counters["host_syncs"] == counters["fallbacks"] == 0
    # Only the loop reads the device: at logs, at evaluations, and at the end.
    assert counters["device_reads"] == sum(tensors for note in ended["ranks"] for _, tensors in note["reads"])
    logs = {1 + batches, 1 + batches + 5, 1 + 5 + 2 * batches, 1 + 10 + 2 * batches, syncs}  # syncs before them
    assert {before for note in ended["ranks"] for before, _ in note["reads"]} == logs
    for record in ended["train"]:
        assert record["host_syncs_per_step"] == record["fallbacks_per_step"] == 0


@needs_xla
def test_replicas_end_bit_for_bit_equal(backends: Callable[[str, int], dict[str, Any]]) -> None:
    assert len({note["hash"] for note in backends("xla-cpu", 2)["ranks"]}) == 1


def assert_agree(a: dict[str, Any], b: dict[str, Any]) -> None:
    for kind in ("train", "eval"):
        assert [r["step"] for r in a[kind]] == [r["step"] for r in b[kind]] == [5, 10]
        assert [r["loss"] for r in a[kind]] == pytest.approx([r["loss"] for r in b[kind]], abs=1e-5)
    assert a["parameters"].keys() == b["parameters"].keys()
    for name, value in a["parameters"].items():
        torch.testing.assert_close(torch.tensor(b["parameters"][name]), torch.tensor(value), rtol=0, atol=1e-5)


@needs_xla
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_xla_and_the_plain_cpu_agree(backends: Callable[[str, int], dict[str, Any]], replicas: int) -> None:
    assert_agree(backends("xla-cpu", replicas), backends("cpu", 1))
    losses = [record["loss"] for record in backends("cpu", 1)["train"]]
    assert losses[1] < losses[0] - 0.05  # the backends agree on a model that has learned


@pytest.mark.slow
def test_two_processes_agree_with_one(backends: Callable[[str, int], dict[str, Any]]) -> None:
    assert_agree(backends("cpu", 1), backends("cpu", 2))
    assert len({note["hash"] for note in backends("cpu", 2)["ranks"]}) == 1


@pytest.mark.slow  # quick sibling: test_loss.py, no_tensor_is_larger_than_one_chunk_of_logits_or_the_weight
@needs_xla
def test_the_logits_of_a_batch_never_exist(configure: Configure) -> None:
    def of_all_tokens(shape: list[int]) -> bool:
        return 61 in shape and math.prod(shape) >= 3 * 16 * 61

    shapes = launch(training_functions.shapes_of_step, configure(device_type="xla-cpu"))
    for kind in ("eval", "train"):
        assert [16, 61] in shapes[16][kind]
        assert not list(filter(of_all_tokens, shapes[16][kind]))
    # With all tokens in one chunk they exist, so the test can detect them.
    assert list(filter(of_all_tokens, shapes[48]["train"]))


@pytest.fixture(scope="module")
def two_replicas(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[TrainConfig, Any]]:
    """The configuration and the result of `draws_and_extra_sums`, launched at the first use."""
    folder = tmp_path_factory.mktemp("two")

    @functools.cache
    def get() -> tuple[TrainConfig, Any]:
        changes = {"device_type": "xla-cpu", "num_replicas": 2, "global_batch_size": 8, "eval_rows": 0}
        config = settings(world, folder, **changes)
        return config, launch(training_functions.draws_and_extra_sums, config)

    return get


@pytest.mark.slow  # quick sibling: test_resume.py, where a resumed run draws the same numbers
@needs_xla
def test_dropout_draws_by_rank_and_step(two_replicas: Callable[[], tuple[TrainConfig, Any]]) -> None:
    (first, second, third, again), other = two_replicas()[1]["draws"]
    assert len({first, second, third, *other[:3]}) == 6
    assert first == again
    assert other[0] == other[3]
    assert 10 < first.count("1") < 54


@pytest.mark.slow
@needs_xla
def test_dropout_compiles_nothing_more(configure: Configure) -> None:
    config = configure(device_type="xla-cpu", num_replicas=2, eval_rows=0, **{"lora.dropout": 0.5})
    ended = launch(training_functions.watched, config)
    assert ended["counters"]["compiles"] == ended["set_up"] + 1
    assert ended["counters"]["host_syncs"] == 0
    assert len({note["hash"] for note in ended["ranks"]}) == 1


# ------------------------------------------------------------------------------------------------ on the plain CPU


def test_what_a_run_says_and_writes(configure: Configure) -> None:
    config = configure(eval_steps=3, warmup_steps=2)
    result = sft.train(config)
    assert result.status == "finished"
    assert result.step == 6
    assert str(result).startswith(f"finished at step 6; adapter in {config.output_path}/adapter\n")
    assert Path(result.adapter_dir) == config.output_path / "adapter"
    trained, evaluated = records(config, "train"), records(config, "eval")
    assert [record["step"] for record in trained] == [record["step"] for record in evaluated] == [3, 6]
    last = trained[-1]
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert evaluated[-1]["perplexity"] == pytest.approx(math.exp(evaluated[-1]["loss"]))
    prepared = prepare.prepare(config.data, load_tokenizer(config.model))
    taken = prepared.train.tensors(batching.permutation(len(prepared.train), 0, 0)[: 6 * 2])
    assert last["tokens"] == int((taken["segment_ids"] > 0).sum()) < 6 * 2 * LENGTH
    assert last["rows_per_update"] == 2
    assert 0 < last["epoch"] < 1
    assert last["skipped"] == 0
    assert last["grad_norm"] > 0
    assert last["lr"] == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * 3 / 4)))
    assert result.metrics["loss"] == last["loss"]
    assert result.metrics["eval_loss"] == min(record["loss"] for record in evaluated)
    planned = with_model(resumed(RunPlan(config, Backend("cpu", 1, "")), ""))[0].config
    chosen = replace(planned, optim=replace(planned.optim, remat="full"))  # `auto` on a CPU
    assert load_config(config.output_path / "config.yaml") == chosen


def test_the_held_out_loss_before_training_is_told_once(
    configure: Configure, capfd: pytest.CaptureFixture[str]
) -> None:
    config = configure(max_steps=2, save_steps=1, eval_steps=0.5)
    sft.train(config)
    assert [record["step"] for record in records(config, "eval")] == [1, 2], "a share of all updates"
    (start,) = records(config, "start")
    said = capfd.readouterr().out
    assert (start["step"], start["uniform"]) == (0, pytest.approx(math.log(640)))
    assert f"held-out loss    {start['loss']:.4g} before training; 6.461 is a uniform guess among 640 tokens" in said
    assert "2 updates are too few to learn much: raise optim.max_steps or optim.epochs, or lower optim.bat" in said
    longer = sft.train(replace(config, optim=replace(config.optim, max_steps=4)))
    assert longer.step == 4 and records(config, "start") == [start]
    assert "before training" not in capfd.readouterr().out
    unchanged = sft.train(configure("frozen", learning_rate=1e-12, max_steps=1))
    assert unchanged.metrics["eval_loss"] == pytest.approx(start["loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_steps": 2, "learning_rate": 1e-4}, r"\. 2 updates are few: raise optim.max_steps or optim.epochs"),
        ({"learning_rate": 1000.0, "max_steps": 4}, r"such rows at random\. Try a third of optim.learning_rate"),
        ({"max_steps": 25, "batch_size": 8}, ""),
    ],
)  # fmt: skip
def test_a_run_that_teaches_nothing_says_so(configure: Configure, changes: dict[str, Any], expected: str) -> None:
    result = sft.train(configure(**changes))
    assert bool(result.warning) == bool(expected) and re.search(expected, result.warning), result.warning
    assert (f"\nwarning: the held-out loss {result.warning[18:30]}" in str(result)) == bool(expected)


@pytest.mark.parametrize("remat", ["full", pytest.param("outputs", marks=pytest.mark.slow)])
def test_compiled_layers_train_alike(monkeypatch: pytest.MonkeyPatch, remat: str) -> None:
    """The setting of CUDA, on the CPU: torch.compile traces the whole layer without a break, once for all layers."""
    from torch._dynamo.utils import counters

    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **given: compile_layer(layer, backend="aot_eager", **given)
    )
    rt = CudaRuntime(0, 1, torch.device("cpu"))
    ended = {}
    for compiled in (False, True):
        config = load_config(None, {"torch_compile": compiled, "remat": remat})
        model = training_functions.tiny()
        counters.clear()
        state = step.prepare_model(model, config, rt)
        for number in (1, 2, 3):
            batch, scalars = training_functions.rows(4, seed=number), training_functions.control(1e-2, number)
            step.train_step(model, state, [batch], scalars, SupervisedObjective(config.optim), config.optim, rt)
        ended[compiled] = (state.report, dict(counters["stats"]), dict(counters["graph_break"]))
    torch.testing.assert_close(ended[True][0], ended[False][0], rtol=1e-3, atol=1e-3)
    assert ended[False][1] == {} and ended[True][1]["unique_graphs"] == 1
    assert ended[True][2] == {}


def test_a_log_is_read_while_the_next_step_runs(configure: Configure) -> None:
    ended = launch(training_functions.watched, configure(eval_rows=0, logging_steps=2, max_steps=7))
    syncs = [before for before, _ in ended["ranks"][0]["reads"]]
    set_up, last = 1, 7  # the log of the last step cannot wait
    assert syncs[:4] == [set_up + 3, set_up + 5, set_up + 7, set_up + last]


def test_a_log_counts_the_time_of_its_own_steps(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes at least 0.05 s, and no log may say less, even the last or before an evaluation or a save."""
    slowly = trainer.train_step

    def train_step(*given: Any) -> None:
        time.sleep(0.05)
        slowly(*given)

    monkeypatch.setattr(trainer, "train_step", train_step)
    config = configure(logging_steps=3, max_steps=10, eval_steps=6, save_steps=4)
    sft.train(config)
    logged = records(config, "train")
    assert [record["step"] for record in logged] == [3, 6, 9, 10]
    assert all(record["step_seconds"] >= 0.05 for record in logged), logged
    spent = sum(record["step_seconds"] * steps for record, steps in zip(logged, (3, 3, 3, 1), strict=True))
    assert spent <= logged[-1]["seconds"]


def test_the_mfu_is_of_the_flops_of_the_plan(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "chips_of", lambda *_: ("v5e", 1))
    config = configure()
    sft.train(config)
    flops = model_flops(config, read_shape(config.model))
    for record in records(config, "train"):
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / 197e12)


def test_extra_sums_of_an_objective_are_logged(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = configure("plain")
    sft.train(plain)
    monkeypatch.setattr(objectives, "SupervisedObjective", training_functions.WithExtraSums)
    config = configure("extra")
    sft.train(config)
    for record, other in zip(records(config, "train"), records(plain, "train"), strict=True):
        assert record["loss"] == other["loss"] and record["grad_norm"] == other["grad_norm"]
        assert record["doubled"] == pytest.approx(2 * record["loss"], rel=1e-6) and record["one"] == 1


@pytest.mark.slow
@needs_xla
def test_extra_sums_are_those_of_all_replicas_and_passes(
    two_replicas: Callable[[], tuple[TrainConfig, Any]],
) -> None:
    config, found = two_replicas()
    ended = found["extra"]
    assert ended["counters"]["compiles"] == ended["set_up"] + 1
    assert len(ended["ranks"][0]["reads"]) == 4  # two logs, the checkpoint and the weights
    for record in records(config, "train"):
        assert record["doubled"] == pytest.approx(2 * record["loss"], rel=1e-6) and record["one"] == 1


def test_a_second_run_in_the_process_begins_anew(configure: Configure) -> None:
    """On one CPU the run is in the calling process; it must not get the model that the last run trained."""
    first, second = configure("first", max_steps=3), configure("second", max_steps=3)
    sft.train(first)
    sft.train(second)
    assert records(first, "train")[0]["loss"] == records(second, "train")[0]["loss"]


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_an_output_folder_that_cannot_be_written_to(configure: Configure, tmp_path: Path, kind: str) -> None:
    (tmp_path / "taken").write_text("")
    config = configure()
    folder = tmp_path / ("taken" if kind == "a file" else "taken/run")
    bad = load_config(None, config.to_dict() | {"output_dir": str(folder)})
    with pytest.raises(
        ValueError, match=r"output_dir=.*taken.* cannot be written to \(.*\): set output_dir to a folder"
    ):
        sft.train(bad)


def test_too_little_data_is_told_before_training(configure: Configure) -> None:
    with pytest.raises(ValueError, match="data set smaller than one global batch"):
        sft.train(configure(batch_size=64, gradient_accumulation=4))


def test_the_names_of_a_result_stand_apart_from_their_values() -> None:
    metrics = {"loss": 1.5, "predicted_peak_bytes": 2.0**30, "device_peak_difference": 0.25}
    shown = str(TrainResult("finished", "", 1, 1, metrics, "a", None, "b")).splitlines()[1:]
    assert [line.split() for line in shown] == [
        ["loss", "1.5"], ["predicted_peak_bytes", "1.00", "GiB"], ["device_peak_difference", "0.25"]
    ]  # fmt: skip


def test_a_warm_up_longer_than_the_epochs_is_told() -> None:
    prepared: Any = SimpleNamespace(tasks=None, train=range(8), encoder=None, stream=None)
    plan = BatchPlan(2, 1, 1, 2, 128)
    for steps, told in ((4, False), (5, True)):
        config = load_config(None, ["max_steps=null", "epochs=1", f"warmup_steps={steps}"])
        found = data_report(prepared, plan, 4, config)
        assert (f"optim.warmup_steps={steps} is more than the 4 updates; lower it or raise epochs" in found) is told


def test_bad_updates_are_skipped_and_named(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    config = configure()
    result = run_poisoned(config)
    assert result["step"] == 6
    assert result["metrics"]["skipped_updates"] == 1
    trained = records(config, "train")
    assert [record["skipped"] for record in trained] == [1, 0]
    assert all(math.isfinite(record["loss"]) for record in trained)
    said = capsys.readouterr().err
    assert "1 of 3 updates had a loss or gradient that is not finite or explodes (more than 5 above the mean" in said
    assert ", the first at step 3 with the rows " in said
    assert "they were skipped" in said
    from safetensors.torch import load_file

    kept = load_file(config.output_path / "adapter" / "adapter_model.safetensors")
    assert all(torch.isfinite(value).all() for value in kept.values())


def test_a_run_that_does_not_recover_ends_and_leaves_no_poisoned_checkpoint(configure: Configure) -> None:
    """Every loss from step 5 on is bad: update 4 may be the cause, so later checkpoints are poisoned too."""
    config = configure(max_steps=40, save_steps=2, keep=9)
    with pytest.raises(ValueError, match="training has diverged") as caught:
        run_poisoned(config, from_step=5)
    assert "and the last 11 updates, from step 5 on, were all skipped" in str(caught.value)
    assert "lower optim.learning_rate" in str(caught.value)
    good, _ = manager.list_checkpoints(config.output_path / "checkpoints")
    assert [found.step for found in good] == [2]


def test_a_short_run_whose_updates_are_all_skipped_has_not_finished(configure: Configure) -> None:
    config = configure(max_steps=3)
    with pytest.raises(ValueError, match=r"nothing was learned: .* and all were skipped from step 1 on\. Look at"):
        run_poisoned(config, from_step=1)
    assert not (config.output_path / "adapter").exists()


def test_a_checkpoint_waits_for_an_update_that_is_applied(configure: Configure) -> None:
    config = configure(save_steps=3, keep=9)
    run_poisoned(config)
    good, _ = manager.list_checkpoints(config.output_path / "checkpoints")
    assert [found.step for found in good] == [4, 6]


def test_a_preemption_after_a_skipped_update_saves_and_loses_nothing(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, config = configure("whole"), configure()
    run_poisoned(whole)
    with monkeypatch.context() as told:
        told.setattr(PreemptionGuard, "should_run", lambda self, step: step <= 3)
        preempted = run_poisoned(config)
    assert (preempted["status"], preempted["step"]) == ("preempted", 3)
    assert [found.step for found in manager.list_checkpoints(config.output_path / "checkpoints")[0]] == [3]
    assert run_poisoned(config)["metrics"]["skipped_updates"] == 1
    adapters = [load_file(one.output_path / "adapter" / "adapter_model.safetensors") for one in (config, whole)]
    torch.testing.assert_close(*adapters, rtol=0, atol=0)


@pytest.mark.slow  # quick sibling: tests/training/test_host_parts.py
def test_hosts_that_save_parts_follow_the_clock_of_host_0(configure: Configure) -> None:
    """By the other host's clock, `save_minutes` never pass."""
    config = configure(num_replicas=2, batch_size=1, max_steps=3, keep=9, eval_rows=0)
    launch(training_functions.saves_by_two_clocks, config)
    good, damaged = manager.list_checkpoints(config.output_path / "checkpoints", verify=True)
    assert [found.step for found in good] == [1, 2, 3] and not damaged
    assert {"training-0.safetensors", "training-1.safetensors"} < good[0].files.keys()


def test_bad_updates_stop_the_run_with_step_and_rows(configure: Configure) -> None:
    config = configure(on_nan="stop")
    with pytest.raises(ValueError, match=r"first at step 3 with the rows (\d+, )*\d+ of .*rows.jsonl") as caught:
        run_poisoned(config)
    named = {int(row) for row in str(caught.value).split("with the rows ")[1].split(" of ")[0].split(", ")}
    prepared = prepare.prepare(config.data, load_tokenizer(config.model))
    third = list(batching.permutation(len(prepared.train), 0, 0))[4:6]  # two rows per update
    assert named == {row for packed in third for row in prepared.train.source_rows(packed)}
    assert not (config.output_path / "adapter").exists()


def run_poisoned(config: TrainConfig, from_step: int | None = None) -> dict[str, Any]:
    kept = trainer.train_step
    training_functions.poisoned_steps = (3, 3) if from_step is None else (from_step, 1000)
    try:
        result = launch(training_functions.poisoned, config)
    finally:
        trainer.train_step = kept  # a launch on one CPU replica is in this process
    assert result is not None
    return result


@pytest.mark.slow
@needs_xla
def test_bad_updates_stop_all_replicas(configure: Configure) -> None:
    config = configure(on_nan="stop", device_type="xla-cpu", num_replicas=2)
    with pytest.raises(ValueError, match="the first at step 3 with the rows"):
        launch(training_functions.poisoned, config)


def test_a_run_that_gets_worse_stops_early_and_keeps_its_best(configure: Configure) -> None:
    changes = {"max_steps": 40, "learning_rate": 0.3, "schedule": "constant", "max_grad_norm": 0}
    config = configure(eval_steps=1, early_stop_patience=2, logging_steps=1, **changes)
    result = sft.train(config)
    losses = [record["loss"] for record in records(config, "eval")]
    best = losses.index(min(losses))
    assert result.status == "stopped"
    assert result.step == len(losses) == best + 3 < 40
    assert result.metrics["eval_loss"] == min(losses)
    # The saved weights come from the best evaluation, not from the end of the run.
    assert eval_loss(config, result.adapter_dir) == pytest.approx(min(losses), rel=1e-5)


def eval_loss(config: TrainConfig, adapter_dir: str) -> float:
    """The held-out loss per token of the saved weights, by stock PEFT and transformers."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter_dir).eval() if config.lora.r else base
    held = prepare.prepare(config.data, load_tokenizer(config.model)).eval
    assert held is not None
    total = count = 0.0
    for number in range(8):
        ids, mask = held.document(number)
        labels = torch.where(torch.from_numpy(mask), torch.from_numpy(ids).long(), -100)[None]
        tokens = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            loss = model(input_ids=torch.from_numpy(ids).long()[None], labels=labels).loss
        total, count = total + float(loss) * tokens, count + tokens
    return total / count


def test_the_average_is_what_is_evaluated_and_saved(configure: Configure) -> None:
    config = configure(ema_decay=0.7)
    result = sft.train(config)
    assert eval_loss(config, result.adapter_dir) == pytest.approx(result.metrics["eval_loss"], rel=1e-5)


# --------------------------------------------------------------------------------------------------------------- memory


@needs_xla
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_auto_chose_the_batch_of_these_replicas(backends: Callable[[str, int], dict[str, Any]], replicas: int) -> None:
    assert backends("xla-cpu", replicas)["batch_size"] == 4 // replicas


def test_a_run_keeps_the_batch_that_auto_chose(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"batch_size": "auto", "logging_steps": 1, "save_steps": 1}
    first = sft.train(configure(**settings, max_steps=1, global_batch_size=8))
    assert load_config(Path(first.output_dir) / "config.yaml").optim.batch_size == 8
    assert "optim.batch_size=auto is 8: the largest that leaves 50% of " in capfd.readouterr().out
    assert first.metrics["host_peak_bytes"] > 2**28
    # A continued run keeps its rows, whatever memory there is now.
    monkeypatch.setattr(preflight, "best_setting", lambda *_: pytest.fail("chosen anew"))
    config = configure(**settings, max_steps=2)
    assert sft.train(config).step == 2
    printed = capfd.readouterr().out
    assert "optim.batch_size=8, as in the resumed run" in printed
    assert "resumed          from step 1" in printed
    assert load_config(config.output_path / "config.yaml").optim.global_batch_size == 8
    assert records(config, "train")[-1]["host_peak_bytes"] > 2**28


@pytest.mark.slow  # quick sibling: tests/planning/test_oom_recovery.py
def test_a_run_that_ran_out_of_memory_goes_on_with_what_it_proposes(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of a real launch raises a TPU compiler's error after the checkpoint of step 2."""
    settings = {"global_batch_size": 8, "save_steps": 2, "logging_steps": 1}
    whole = sft.train(configure("whole", **settings, batch_size=4))
    config = configure("run", **settings, batch_size=4, num_replicas=2)
    with monkeypatch.context() as patch, pytest.raises(oom_recovery.OutOfMemory) as caught:
        patch.setattr(sft, "fine_tune", training_functions.out_of_memory)
        sft.train(config)
    error = caught.value
    assert error.rank == 1 and "Used 17.00G of 15.75G hbm" in error.traceback
    assert error.overrides == {"batch_size": 2}
    for text in ("The next setting that fits is\n  batch_size=2\n", "An update keeps its rows, and ",
                 "the run resumes from step 2.\n", "the parameters cell\n  batch_size = 2\nand run it"):  # fmt: skip
        assert text in str(error)
    ended = sft.train(configure("run", **settings | error.overrides))
    assert ended.step == 6 and ended.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-3)
    assert [record["step"] for record in records(config, "train")] == [1, 2, 3, 4, 5, 6]


STARVED = """
import resource, sys
from pathlib import Path
from tpu_kit.planning import oom_recovery as rescue; from tpu_kit.recipes import sft
from tpu_kit.recipes.run_data import data_report
from tpu_kit.recipes.run_plan import RunPlan, resumed, with_model
from tpu_kit.config.loader import load_config

config = load_config("embedded-cot", sys.argv[1:])
pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + 2**30
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    sft.train(config)
except rescue.OutOfMemory as error:
    print(type(error.__cause__).__name__, error.overrides, error, sep="\\n")
"""


@pytest.mark.slow  # quick sibling: tests/planning/test_oom_recovery.py
def test_host_memory_that_runs_out_is_explained(tmp_path: Path) -> None:
    """Memory really runs out: a process may allocate 1 GiB more, and an update needs several."""
    settings = ["device_type=cpu", "batch_size=256", "max_steps=1", "warmup_steps=0", "eval_steps=null", "eval_rows=0",
                "generate_rows=0", f"output_dir={tmp_path}"]  # fmt: skip
    printed = run_python(["-c", STARVED, *settings], env={"OMP_NUM_THREADS": "1", "PJRT_DEVICE": None}).stdout
    # The failed allocation is torch's, whose text says "allocate", or Python's.
    assert "allocate" in printed or "\nMemoryError\n{" in printed, printed
    assert "{'batch_size': 128, 'global_batch_size': 256}" in printed
    assert "  batch_size=128 global_batch_size=256\n" in printed and "it starts anew, because nothing" in printed


def test_rows_in_memory(configure: Configure) -> None:
    config = configure(max_steps=3)
    rows = Dataset.from_json(config.data.source)
    result = sft.train(config, rows)
    assert result.step == 3
    ran = load_config(config.output_path / "config.yaml")
    assert Path(ran.data.source).is_dir() and ran.data.source.startswith(f"{config.output_path}/data/")
    assert sft.train(config, rows).step == 3  # the same rows are the same run
    from_file = configure("file", max_steps=3)
    assert sft.train(from_file).metrics["loss"] == result.metrics["loss"]
    with pytest.raises(ValueError, match=r"the data must be a datasets.Dataset, not list"):
        sft.train(config, [{"prompt": "a", "completion": "b"}])  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"device_type": "cpu", "num_replicas": 1}, id="cpu"),
        pytest.param({"device_type": "xla-cpu", "num_replicas": 2}, id="xla-cpu", marks=[pytest.mark.slow, needs_xla]),
    ],
)
def test_the_accuracy_of_answers_while_training(where: dict[str, Any], tmp_path: Path) -> None:
    """The accuracy is the saved adapter's, and training is the same without it."""
    common = {"max_steps": 4, "eval_steps": 2, "eval_rows": 4, "generate_rows": 0, "logging_steps": 1,
              "warmup_steps": 0, "max_length": 128, "generate_tokens": 6, "ema_decay": 0.5, "base_dtype": "fp32",
              "batch_size": 2, **where}  # fmt: skip
    asked = load_config("embedded-cot", {**common, "eval_generate_rows": 4, "output_dir": str(tmp_path / "asked")})
    plain = load_config("embedded-cot", {**common, "output_dir": str(tmp_path / "plain")})
    result = sft.train(asked)
    sft.train(plain)
    shares = [record["accuracy"] for record in records(asked, "eval")]
    assert len(shares) == 2 and all(share is not None and 0 <= share <= 1 for share in shares)
    assert result.metrics["eval_accuracy"] == shares[-1]
    for kind in ("train", "eval"):
        assert [r["loss"] for r in records(asked, kind)] == [r["loss"] for r in records(plain, kind)]
    prepared = prepare.prepare(asked.data, load_tokenizer(asked.model))
    saved = evaluate.evaluate(asked, prepared, result.adapter_dir)
    if min(losses := [r["loss"] for r in records(asked, "eval")]) == losses[-1]:  # then the last weights are saved
        assert saved.accuracy.share == shares[-1]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_once(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only at the next checkpoint or the end, because updates until then could be lost too."""

    def full(self: FolderStore, about: dict[str, Any], *_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FolderStore, "write", full)
    config = configure(save_steps=2, max_steps=2000, logging_steps=1)
    with pytest.raises(OSError, match="No space left on device: the checkpoint of step 2 could not be written to"):
        sft.train(config)
    assert records(config, "train")[-1]["step"] < 200
