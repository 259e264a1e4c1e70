"""The sharded step on several hosts: jaxlib's processes run torch_xla's trace, with the results of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.child_processes import PYTHONPATH, child_environment, run_python
from tests.support.object_store import free_port
from tests.support.slice_program import DEVICES, joined
from tests.support.tpu_program import ENVIRONMENT
from tpu_kit.machine.checks import Machine

pytestmark = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
SCRIPT = ["-m", "tests.support.slice_program"]


def run_hosts(folder: Path, hosts: int) -> list[torch.Tensor]:
    port = free_port()
    commands = [[sys.executable, *SCRIPT, "run", str(folder), str(i), str(hosts), str(port)] for i in range(hosts)]
    env = {"PYTHONPATH": PYTHONPATH} | child_environment(ENVIRONMENT)
    running = [subprocess.Popen(one, env=env, stderr=subprocess.PIPE, text=True) for one in commands]
    try:
        for one in running:
            told = one.communicate(timeout=600)[1]
            assert one.returncode == 0, told[-4000:]
    finally:
        for one in running:
            one.kill()
    return joined(folder, hosts)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=4"])
def test_two_and_four_hosts_compute_the_step_of_one_process(tmp_path: Path, mesh: str) -> None:
    run_python([*SCRIPT, "trace", str(tmp_path), mesh], env={**ENVIRONMENT, "XLA_ALWAYS_ALLREDUCE": "1"})
    wanted = run_hosts(tmp_path, 1)
    assert len(wanted) > 50 and DEVICES == 8
    for hosts in (2, 4):
        for mine, other in zip(run_hosts(tmp_path, hosts), wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))
