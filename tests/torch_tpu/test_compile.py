"""The training step compiled for a v5e by torch_tpu's libtpu, without a TPU; run by `make test-torch-tpu`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.child_processes import REPOSITORY, run_python
from tests.support.compiler_models import QWEN2_500M, write_config
from tests.support.torch_tpu_environment import environment, needs_torch_tpu

TORCH_XLA = os.environ.get("TESTS_TORCH_XLA_PYTHON", "")  # an interpreter of an environment with torch_xla
MODULE = ["-m", "tests.support.torch_tpu_compile"]
LIBTPU: dict[str, str | None] = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": None,
}  # fmt: skip


@needs_torch_tpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not TORCH_XLA, reason="TESTS_TORCH_XLA_PYTHON names no interpreter with torch_xla")
def test_memory_on_a_v5e_is_that_of_torch_xla(tmp_path: Path) -> None:
    """Of a Qwen2 of 0.5B with LoRA, 4 rows of 1,024 tokens, remat=full: loops, kernels and donation are there."""
    model, theirs, dump = write_config(tmp_path / "model", QWEN2_500M), tmp_path / "xla.mlir", tmp_path / "dump"
    dump.mkdir()
    on_cpu = {"PJRT_DEVICE": "CPU", "XLA_ALWAYS_ALLREDUCE": "1", **LIBTPU}
    run_python([*MODULE, "xla", str(theirs), str(model), "remat=full"], env=on_cpu, cwd=REPOSITORY, timeout=600,
               executable=TORCH_XLA)  # fmt: skip
    shim = {**environment(), "SHIM_DUMP": str(dump), "SHIM_STABLEHLO": "1.16.3"}
    run_python([*MODULE, "tpu", str(model), "remat=full"], env=shim, cwd=REPOSITORY, timeout=600)
    ours = max(dump.iterdir(), key=lambda file: file.stat().st_size)
    done = run_python([*MODULE, "compile", str(theirs), str(ours)], env={"PJRT_DEVICE": None, **LIBTPU}, cwd=REPOSITORY,
                      timeout=1200, executable=sys.executable)  # fmt: skip
    xla, tpu = json.loads(done.stdout.rpartition("found ")[2])
    print(f"v5e: {xla['total'] / 2**30:.3f} GiB by torch_xla, {tpu['total'] / 2**30:.3f} by torch_tpu")
    assert tpu["total"] == pytest.approx(xla["total"], rel=0.02)
    assert tpu["alias"] == xla["alias"] and (tpu["loops"], tpu["kernels"]) == (xla["loops"], xla["kernels"]) == (3, 3)
