"""Runs on several hosts: separate processes that meet, train, save, stop and fail together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import hosts_campaign
from tests.support.host_processes import Rehearsal, steps
from tests.support.hub import NAME, TOKEN, run_hub
from tpu_kit.assets import embedded
from tpu_kit.config.loader import load_config


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Rehearsal]:
    made = Rehearsal(tmp_path, 2)
    yield made
    made.close()


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "machine-0" / "runs" / "default" / "adapter" / "adapter_model.safetensors")


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_two_hosts_stop_together_and_one_goes_on_alike(two: Rehearsal, bucket: str, tmp_path: Path) -> None:
    """SIGTERM to host 1: both save the same step and end as preempted; one host continues to the undisturbed result."""
    settings = {"max_steps": 400, "save_steps": 1000, "schedule": "constant", "warmup_ratio": 0}
    first, second = two.start(f"{bucket}/run", **settings)
    first.wait_for_step(3)
    os.kill(second.process.pid, signal.SIGTERM)
    assert two.wait() == [75, 75], first.text + second.text
    (saved,) = steps(f"{bucket}/run")
    for host in (first, second):
        assert f"preempted at step {saved} of 400 (SIGTERM received on host 1 of 2, machine-1)" in host.text
    assert "hosts            2, by TPU_KIT_HOST_INDEX and TPU_KIT_HOSTS; this is host 1 of 2, machine-1" in second.text
    kept = (tmp_path / "machine-1" / "runs" / "default" / "logs" / "host-1.log").read_text()
    assert "[host 1] " in kept and "[host 0] rows " in first.text
    two.close()
    alone = Rehearsal(tmp_path / "alone", 1)
    more = {**settings, "max_steps": saved + 4, "num_replicas": 1, "gradient_accumulation": 2}
    (resumed,) = alone.start(f"{bucket}/run", **more)
    assert alone.wait() == [0], resumed.text
    assert f"resumed          from step {saved}" in resumed.text
    (whole,) = (undisturbed := Rehearsal(tmp_path / "undisturbed", 1)).start(f"{bucket}/other", **more)
    assert undisturbed.wait() == [0], whole.text
    assert_equal(adapter(tmp_path / "alone"), adapter(tmp_path / "undisturbed"), 1e-5)


RUN = {"max_steps": 4000, "save_steps": 5, "schedule": "constant", "warmup_ratio": 0, "checkpoint.keep": 3}


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_killed_host_is_named_and_all_go_on_from_its_last_checkpoint(
    two: Rehearsal, bucket: str, shared: bool
) -> None:
    """The hosts have separate homes and working folders, or share them."""
    two.shared = shared
    first, second = two.start(f"{bucket}/run", num_replicas=1 + shared, **RUN)
    first.wait_for_step(12)
    second.signal(signal.SIGKILL)
    start = time.monotonic()
    first.process.wait(two.lost + 30)
    assert first.process.returncode == 75 and time.monotonic() - start < two.lost + 10
    assert "host 1 of 2, machine-1, has given no sign of life for 8 s" in first.text
    saved = steps(f"{bucket}/run")[-1]
    assert saved >= 5
    first, second = two.start(f"{bucket}/run", num_replicas=1 + shared, **RUN | {"max_steps": saved + 3})
    assert two.wait() == [0, 0], first.text + second.text
    assert f"resumed          from step {saved}" in first.text


@pytest.mark.slow
@pytest.mark.parametrize(("which", "how", "seconds"), [(0, "Hanging", 15), (1, "ComputingForEver", 8)])
def test_a_host_that_hangs_is_named_with_its_stack(
    two: Rehearsal, bucket: str, which: int, how: str, seconds: int
) -> None:
    """Its replica sleeps or computes in a step; the other host waits for it in the step's collective."""
    hang = {"objective": f"tests.support.own_objectives:{how}", "hang_timeout": seconds}
    hosts = two.start(f"{bucket}/run", env={"TPU_KIT_TEST_HANG": str(which)}, **RUN | hang)
    assert two.wait() == [75, 75], hosts[0].text + hosts[1].text
    for host in hosts:
        told = host.text.partition(f"host {which} of 2, machine-{which}, hangs, and the others wait for it")[2]
        assert f"rank {which}:" in told and "hang_here" in told, host.text[-4000:]
        assert f"host {1 - which} of 2, machine-{1 - which}, hangs" not in host.text


@pytest.mark.slow
def test_a_failure_of_one_host_is_told_by_all(two: Rehearsal, bucket: str) -> None:
    """The disk of host 0, which stages checkpoints, is full: no file may exceed a few kilobytes."""
    first, second = two.start(f"{bucket}/run", env={"TPU_KIT_TEST_FULL": "0"}, **RUN)
    assert two.wait() == [1, 1], first.text + second.text
    assert "cannot be written to" in first.text and "host 0 of 2, machine-0, failed:" in second.text
    assert steps(f"{bucket}/run") == []


@pytest.mark.slow
def test_hosts_that_share_no_folder_are_told(two: Rehearsal, tmp_path: Path) -> None:
    """If output_dir is in a local folder of each machine, only host 0 would have the checkpoints."""
    first, second = two.start("mine", **RUN)
    assert two.wait() == [1, 1], first.text + second.text
    told = "output_dir=mine of host 1 of 2, machine-1, lacks a file that host 0 wrote there 90 s ago: set output_dir to"
    assert told in first.text and told in second.text and "Traceback" not in first.text + second.text
    assert not (second.folder / "mine" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "replicas"), [(4, 1), (1, 2)])
def test_all_hosts_and_replicas_make_one_commit(hosts: int, replicas: int, tmp_path: Path) -> None:
    """Only host 0 contacts the hub; its address is the only difference from a run without a push."""
    with run_hub() as hub:
        hub.roles[TOKEN] = "write"
        made = Rehearsal(tmp_path, hosts)
        away = {"HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        pushed = {"model_id": NAME, "strategy": "checkpoint", "max_steps": 4, "num_replicas": replicas}
        started = made.start(str(tmp_path / "run"), env=away, **pushed)
        assert made.wait() == [0] * hosts, "".join(host.text for host in started)
        made.close()
    repository = hub.repositories[NAME]
    assert repository.messages == ["Checkpoint of step 4", "Export by tpu_kit"]
    assert f"pushed to {hub.url}/{NAME}/commit/{repository.head}" in started[0].text
    assert not any("pushed to" in host.text for host in started[1:])
    exported = tmp_path / "run" / "export" / "adapter"
    root = {name: content for name, content in repository.files.items() if not name.startswith("last-checkpoint/")}
    assert root == {path.name: path.read_bytes() for path in exported.iterdir()}
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.slow
def test_hosts_agree_on_the_date_of_host_0(two: Rehearsal, tmp_path: Path) -> None:
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(embedded.model_dir(), model)
    template = model / "chat_template.jinja"
    template.write_text("It is {{ strftime_now('%d %b %Y') }}." + template.read_text())
    rows.write_text("".join(json.dumps(row) + "\n" for row in embedded.cot_rows("train", 40)))
    settings = {"model.name": str(model), "source": str(rows), "data.split": "train", "max_length": 128}
    first, second = two.start(str(tmp_path / "run"), **settings, max_steps=1)
    assert two.wait() == [0, 0], first.text + second.text
    today = datetime.now(timezone(timedelta(hours=14)))
    dates = [str((today - timedelta(days=days)).date()) for days in (0, 1)]  # midnight may have passed since
    assert load_config(tmp_path / "run" / "config.yaml").data.date in dates


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize(("hosts", "faults"), [(2, 10), (4, 60)])
def test_faults_at_random_moments(tmp_path: Path, hosts: int, faults: int) -> None:
    done = hosts_campaign.main(str(tmp_path), str(hosts), str(faults), "1")
    assert sum(done["faults"].values()) == faults
