"""Runs are killed, stopped or moved, then restarted by the same command: nothing is lost or repeated."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.support import training_functions
from tests.support.child_processes import PYTHONPATH, QUICK_XLA_FLAGS, child_environment, run_python
from tests.training.test_resume import SETTINGS, ended, run_config
from tpu_kit.assets import embedded
from tpu_kit.config.loader import load_config
from tpu_kit.distributed.launch import LaunchError, launch
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.machine.checks import Machine
from tpu_kit.machine.storage.object_store import ObjectFolder
from tpu_kit.recipes import replica, sft
from tpu_kit.training.checkpoint import manager
from tpu_kit.training.metrics import read_metrics

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
# Long enough to be interrupted, with a log at each step to show a test the progress.
LONG: dict[str, Any] = {"max_steps": 16, "logging_steps": 1, "save_steps": 4, "eval_steps": 8}
XLA = {"device_type": "xla-cpu", "num_replicas": 2}
PREEMPTED = 75
begun: dict[str, float] = {}  # the newest start of the command, by output folder


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings for the embedded model's first layer only, which compiles in half the time."""
    folder = tmp_path_factory.mktemp("model")
    ignored = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(embedded.model_dir(), folder, ignore=ignored, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(embedded.model_dir(), num_hidden_layers=1)
    model.save_pretrained(folder)
    return {"model.name": str(folder)}


@pytest.fixture(autouse=True)
def sums_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # here and in child processes
    monkeypatch.setenv("XLA_FLAGS", QUICK_XLA_FLAGS)


def start(folder: Path, **changes: Any) -> subprocess.Popen[str]:
    """Starts the command."""
    values = {**SETTINGS, **LONG, "device_type": "cpu", **changes, "output_dir": str(folder)}
    command = [sys.executable, "-m", "tpu_kit", "train", "embedded-cot", *(f"{k}={v}" for k, v in values.items())]
    environment = {**child_environment({"PJRT_DEVICE": None}), "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    begun[str(folder)] = time.time()
    return subprocess.Popen(
        command, env=environment, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def reached(run: subprocess.Popen[str], folder: Path, step: int, patience: float = 300.0) -> int:
    """Waits until a run has logged a step; returns the newest step."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        file = folder / "metrics.jsonl"  # may be an earlier run's file until this run starts
        own = file.exists() and file.stat().st_mtime > begun[str(folder)]
        steps = [record["step"] for record in read_metrics(folder)] if own else []
        if steps and steps[-1] >= step:
            return int(steps[-1])
        if run.poll() is not None:
            raise AssertionError(f"it ended with status {run.returncode}:\n{run.stderr.read()}")  # type: ignore[union-attr]
        time.sleep(0.01)
    raise AssertionError("it does not get there")


def holder(run: subprocess.Popen[str]) -> int:
    """Returns the process of a launch that holds the replicas (XLA:CPU) or starts them."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == run.pid:
                return int(path.name)
        except (OSError, IndexError):
            continue
    raise AssertionError("no child")


def complete(folder: Path) -> list[int]:
    return [found.step for found in manager.list_checkpoints(folder / "checkpoints", verify=True)[0]]


@pytest.mark.parametrize(
    "where", [pytest.param({}, id="cpu"), pytest.param(XLA, id="xla-cpu", marks=[needs_xla, pytest.mark.slow])]
)
def test_killed_then_told_to_stop_then_finished(
    where: dict[str, Any], one_layer: dict[str, Any], tmp_path: Path
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    where = {**where, **one_layer}
    first = start(folder, **where)
    reached(first, folder, 6)
    while not complete(folder):  # the checkpoint of step 4 is written in the background
        time.sleep(0.01)
    os.kill(holder(first) if "device_type" in where else first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    assert first.returncode != 0
    (saved,) = complete(folder)[-1:]
    assert saved >= 4

    second = start(folder, **where)
    reached(second, folder, saved + 3)
    noticed = time.monotonic()
    second.terminate()
    out, err = second.communicate(timeout=120)
    assert second.returncode == PREEMPTED, err
    assert time.monotonic() - noticed < 60
    text = r"^preempted at step (\d+) of 16 \(SIGTERM received\); its checkpoint is in"
    (stopped,) = map(int, re.findall(text, out, re.M))
    assert "To go on from there, run this again: the same cell, or the same command" in out
    assert "saving a checkpoint at the next step; once more ends at once" in err
    assert complete(folder)[-1] == stopped == read_metrics(folder)[-1]["step"]  # 0 steps are lost
    assert not (folder / "adapter").exists()

    third = start(folder, **where)
    out, err = third.communicate(timeout=300)
    assert third.returncode == 0, err
    assert f"resumed          from step {stopped}," in out
    sft.train(run_config(whole, **{**LONG, **where}))
    assert ended(folder) == ended(whole)


def test_a_second_signal_ends_at_once_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder, max_steps=5000, save_steps=2, gradient_accumulation=1)
    reached(run, folder, 5)
    for _ in range(2):
        run.send_signal(signal.SIGINT)
        time.sleep(0.05)
    run.communicate(timeout=60)
    assert run.returncode != 0
    assert complete(folder)


def test_told_to_stop_while_held_out_rows_are_answered(tmp_path: Path) -> None:
    """The trained weights are kept, and the same command answers the held-out rows."""
    run = start(tmp_path / "run", max_steps=2, generate_rows=8, generate_tokens=400)
    told = ""
    assert run.stdout is not None
    while told.count("tpu_kit: device_type=cpu") < 2:  # the second launch answers
        line = run.stderr.readline()  # type: ignore[union-attr]
        assert line, told
        told += line
    run.terminate()
    out, _ = run.communicate(timeout=120)
    assert run.returncode == PREEMPTED, out
    assert "preempted at step 2 of 2 (SIGTERM received while held-out rows were answered)" in out
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file() and complete(tmp_path / "run") == [2]


def test_a_budget_that_is_used_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    result = sft.train(run_config(folder, **{**LONG, "max_steps": 100_000, "budget_minutes": 0.05}))
    assert result.status == "preempted" and 0 < result.step < 100_000
    assert complete(folder)[-1] == result.step
    assert result.reason == "the time budget of 0.05 min is used up"
    assert str(result).startswith(f"preempted at step {result.step} of 100000 ({result.reason}); its checkpoint is in")
    assert "the time budget of 0.05 min is used up: saving a checkpoint at the next step" in capfd.readouterr().err


def test_minutes_between_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sft.train(run_config(folder, **{**LONG, "save_steps": 1000, "save_minutes": 1e-6, "keep": 100}))
    assert complete(folder) == list(range(1, 17))


def test_another_machine_goes_on_from_the_object_store(
    bucket: str, one_layer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the object store remains of the first machine, with log, W&B run, weights and position in the data."""
    settings = {**LONG, **one_layer, "run_name": "run", "output_dir": f"{bucket}/run", "wandb": "offline"}
    values = {"device_type": "cpu", **SETTINGS, **settings}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    with monkeypatch.context() as noticed:  # at a fixed step, however fast this machine is
        noticed.setattr(PreemptionGuard, "should_run", lambda self, step: step <= 7)
        preempted = sft.train(load_config("embedded-cot", values))
    assert (preempted.status, preempted.step) == ("preempted", 7)
    wandb_run = (tmp_path / "one/runs/run/wandb_run_id").read_text()
    shutil.rmtree(tmp_path / "one")
    monkeypatch.chdir(tmp_path / "two")
    downloaded: list[str] = []
    finish = replica._finish

    def watched(*given: Any) -> Any:
        with monkeypatch.context() as watch:
            for name in ("read", "get"):
                plain = getattr(ObjectFolder, name)
                watch.setattr(ObjectFolder, name, lambda *one, plain=plain: downloaded.append(one[1]) or plain(*one))
            return finish(*given)

    monkeypatch.setattr(replica, "_finish", watched)
    finished = sft.train(load_config("embedded-cot", values))
    assert (finished.status, finished.step) == ("finished", 16)
    assert downloaded and not any(name.endswith((".safetensors", ".jsonl")) for name in downloaded)
    assert (tmp_path / "two/runs/run/wandb_run_id").read_text() == wandb_run
    whole = tmp_path / "whole"
    sft.train(run_config(whole, **{**LONG, **one_layer, "run_name": "run"}))
    assert ended(tmp_path / "two" / "runs" / "run") == ended(whole)

    import fsspec

    files = {path.rpartition("/run/")[2] for path in fsspec.filesystem("gs").find(f"{bucket}/run")}
    assert {"adapter/adapter_model.safetensors", "config.yaml", "metrics.jsonl", "questions.npz"} < files
    listed = run_python(["-m", "tpu_kit", "checkpoints", f"{bucket}/run", "--json"], env=dict(os.environ)).stdout
    assert [found["step"] for found in json.loads(listed)["complete"]][-1] == 16


def losses(folder: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["tokens"]) for r in read_metrics(folder) if r["kind"] == "train"]


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((("cpu", 2), ("cpu", 1)), id="cpu-2-1"),
        pytest.param(
            (("xla-cpu", 8), ("xla-cpu", 4), ("xla-cpu", 1)), id="xla-8-4-1", marks=[pytest.mark.slow, needs_xla]
        ),
    ],
)
@pytest.mark.usefixtures("quick_xla")
def test_another_number_of_devices(
    counts: tuple[tuple[str, int], ...], one_layer: dict[str, Any], tmp_path: Path
) -> None:
    """Equal rows in equal order, and losses equal to rounding."""
    # The learning rate is constant, because a schedule would end at each part's last step.
    common = {**LONG, **one_layer, "global_batch_size": 8, "dropout": 0.0, "batch_size": 1, "schedule": "constant"}
    whole, folder = tmp_path / "whole", tmp_path / "run"
    sft.train(run_config(whole, **{**common, "max_steps": 4 * len(counts)}))
    for number, (device_type, replicas) in enumerate(counts, 1):
        where = {"device_type": device_type, "num_replicas": replicas, "max_steps": 4 * number}
        assert sft.train(run_config(folder, **{**common, **where})).step == 4 * number
    for (step, mine, tokens), (other, theirs, same) in zip(losses(folder), losses(whole), strict=True):
        assert (step, tokens) == (other, same)
        assert mine == pytest.approx(theirs, rel=2e-4)


# ---------------------------------------------------------------------------------------------------------- campaigns

# Each life is a fork of a process that has loaded everything, and takes a second or two. That process never computes,
# because PyTorch's threads do not survive a fork.
LIVES = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from tpu_kit.training.checkpoint import manager; from tpu_kit.recipes import sft
from tpu_kit.config.loader import load_config
from tpu_kit.training.metrics import read_metrics
import peft, transformers, datasets

values, kills, seed = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance, longest, done = random.Random(seed), 3.0, 0
folder = values["output_dir"]

def life():
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        sft.train(load_config("embedded-cot", values))
        os._exit(0)
    return child

runs = 0
while done < kills:
    runs += 1
    values["output_dir"] = f"{folder}/{runs}"
    while True:
        before = [found.step for found in manager.list_checkpoints(Path(values["output_dir"], "checkpoints"))[0]]
        begun, child = time.monotonic(), life()
        killed = False
        if done < kills:
            time.sleep(chance.uniform(0.0, longest))
            os.kill(child, signal.SIGKILL)
            killed = True
        _, status = os.waitpid(child, 0)
        good, damaged = manager.list_checkpoints(Path(values["output_dir"], "checkpoints"), verify=True)
        assert not damaged, damaged
        now = [found.step for found in good]
        assert not before or now and now[-1] >= before[-1], (before, now)
        if status == 0:
            longest = min(longest, time.monotonic() - begun)
            break
        assert killed and os.WTERMSIG(status) == signal.SIGKILL, status
        done += 1
        seen = [record["step"] for record in read_metrics(values["output_dir"])]
        if seen and now:  # logged but unsaved steps: an interval, and the steps during a save
            assert seen[-1] - now[-1] <= 2 * values["save_steps"], (seen[-1], now)
print(json.dumps({"kills": done, "runs": runs}))
"""


def campaign(tmp_path: Path, kills: int, seed: int) -> dict[str, int]:
    values = {**SETTINGS, **LONG, "device_type": "cpu", "output_dir": str(tmp_path / "runs")}
    values |= {"save_steps": 2, "eval_rows": 2, "max_length": 128, "eval_steps": 8}
    command = ["-c", LIVES, json.dumps(values), str(kills), str(seed)]
    counted = json.loads(run_python(command, env={"OMP_NUM_THREADS": "1"}, timeout=3000).stdout.splitlines()[-1])
    whole = tmp_path / "whole"
    sft.train(run_config(whole, **{**values, "output_dir": str(whole)}))
    for number in range(1, counted["runs"] + 1):
        assert ended(tmp_path / "runs" / str(number)) == ended(whole), number
    return counted


def test_a_kill_of_a_run(tmp_path: Path) -> None:
    assert campaign(tmp_path, 1, seed=1)["kills"] == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hundreds_of_kills_of_a_run(tmp_path: Path) -> None:
    assert campaign(tmp_path, 200, seed=2)["kills"] == 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_xla
@pytest.mark.parametrize(("where", "count"), [(XLA, 20), ({"device_type": "xla-cpu", "mesh": "fsdp=2"}, 30)])
def test_faults_of_a_launch_on_xla(tmp_path: Path, where: dict[str, Any], count: int) -> None:
    """At random the caller is killed, or the process that holds the devices, or a step raises an exception."""
    where = {**where, "date": "2026-01-01"}  # `launch` by itself sets no date
    whole, chance, faults, number = tmp_path / "whole", random.Random(0), 0, 0
    sft.train(run_config(whole, **{**LONG, **where}))
    while faults < count:
        number += 1
        folder, status = tmp_path / f"run-{number}", -1
        while status != 0:
            saved = complete(folder)
            if faults < count and chance.random() < 0.3:
                config = run_config(folder, **{**LONG, **where, "run_name": f"fail-{chance.randint(1, 6)}"})
                with contextlib.suppress(LaunchError):  # it may have finished before
                    launch(training_functions.failing, config, sharded=True)
                    continue
                faults += 1
            else:
                run = start(folder, **where)
                if faults < count:
                    at = reached(run, folder, min(saved[-1] if saved else 0, 12) + chance.randint(1, 3))
                    victim = chance.choice([run.pid, holder(run)]) if at < 15 else 0
                    time.sleep(chance.uniform(0, 0.3))
                    if victim and run.poll() is None:
                        os.kill(victim, signal.SIGKILL)
                        faults += 1
                run.communicate(timeout=300)
                status = run.returncode
            after, damaged = manager.list_checkpoints(folder / "checkpoints", verify=True)
            assert not damaged
            assert not saved or after[-1].step >= saved[-1]
        assert ended(folder) == ended(whole)
