"""How often the processes of a run compute each fact: the caller once, replicas never."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import counted_facts
from tests.support.child_processes import PYTHONPATH, REPOSITORY, child_environment, run_python
from tests.support.object_store import free_port

# A replica makes the objective that the plan names. Rank 0 confirms the checkpoint, and for its files reads the modules
# that the model leaves out.
CALLER = dict.fromkeys(counted_facts.FACTS, 1) | {"the confirmation of rank 0": 0}
REPLICA = dict.fromkeys(counted_facts.FACTS, 0) | {"the objective": 1}
RANK_0 = REPLICA | {"the confirmation of rank 0": 1}
TRAINED = [
    "embedded-cot", "warmup_steps=0", "save_steps=1", "eval_rows=2", "generate_rows=0", "data.split=train[:40]"
]  # fmt: skip
SAMPLED = [
    "embedded-grpo", "warmup_steps=0", "prompts_per_update=2", "max_completion_length=8", "generate_rows=0",
    "eval_rows=2", "eval_generate_rows=0", "eval_steps=null", "data.split=train[:40]",
]  # fmt: skip
CPU, XLA = ["device_type=cpu", "num_replicas=1"], ["device_type=xla-cpu"]
slow = pytest.mark.slow  # quick sibling: a new and a resumed run in the calling process


def assert_found(folder: Path, hosts: int, replicas: int, differ: Mapping[str, int]) -> None:
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    wanted = {f"caller-{host}": CALLER | differ for host in range(hosts)}
    wanted |= {f"replica-{rank}": REPLICA if rank else RANK_0 for rank in range(replicas)}
    for name, counts in found.items():
        print(f"{name:24} {counts}")
        if name == "replica-0":
            assert counts.pop("the model's configuration", 0) <= 1, "once in a process that saves"
    assert found == {name: {fact: count for fact, count in counts.items() if count} for name, counts in wanted.items()}


@pytest.mark.parametrize(
    ("recipe", "updates", "settings", "replicas", "differ"),
    [
        pytest.param("train", "1,2", [*TRAINED, *CPU], 1, {}, id="new-and-resumed"),
        pytest.param("train", "1", [*TRAINED, *XLA, "num_replicas=2"], 2, {}, id="two-replicas", marks=slow),
        # The memory of a mesh's device is unknown on XLA:CPU.
        pytest.param(
            "train", "1", [*TRAINED, *XLA, "mesh=fsdp=2"], 1, {"the estimate of memory": 0}, id="a-mesh", marks=slow
        ),
        # The estimate asks its setting's objective for the cost.
        pytest.param("grpo", "1", [*SAMPLED, *CPU], 1, {"the objective": 2}, id="grpo", marks=slow),
    ],
)
def test_how_often_a_run_finds_its_facts(
    recipe: str, updates: str, settings: list[str], replicas: int, differ: dict[str, int], tmp_path: Path
) -> None:
    run_python(["-m", "tests.support.counted_facts", recipe, str(tmp_path), updates, *settings], cwd=REPOSITORY)
    for steps in updates.split(","):
        assert_found(tmp_path / steps, 1, replicas, differ)


@slow
def test_how_often_each_of_two_hosts_finds_its_facts(tmp_path: Path) -> None:
    port, hosts = free_port(), []
    for index in (0, 1):
        env = {"TPU_KIT_HOSTS": "a,b", "TPU_KIT_HOST_INDEX": str(index), "TPU_KIT_COORDINATOR": f"127.0.0.1:{port}",
               "PYTHONPATH": PYTHONPATH, "PJRT_DEVICE": None}  # fmt: skip
        command = [sys.executable, "-m", "tests.support.counted_facts", "train", str(tmp_path), "1", *TRAINED, *CPU]
        hosts.append(subprocess.Popen(command, env=child_environment(env)))
    assert [host.wait(300) for host in hosts] == [0, 0]
    assert_found(tmp_path / "1", 2, 2, {})
