"""The training step compiled for a v5e by torch_tpu's libtpu, without a TPU; run by `make test-torch-tpu`."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_processes import REPOSITORY, run_python
from tests.support.compiler_models import QWEN2_500M, write_config
from tests.support.torch_tpu_environment import HEADERS, environment, needs_torch_tpu
from tpu_kit.config.loader import load_config
from tpu_kit.planning.compiler.compile_check import compile_step
from tpu_kit.torch_tpu import without_chip
from tpu_kit.torch_tpu.process_group import check_all_reduces

TORCH_XLA = os.environ.get("TESTS_TORCH_XLA_PYTHON", "")  # an interpreter of an environment with torch_xla
MODULE = ["-m", "tests.support.torch_tpu_compile"]
LIBTPU: dict[str, str | None] = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": None,
}  # fmt: skip
SMALL = ["device_type=torch-tpu", "batch_size=4", "remat=full"]


@pytest.mark.parametrize("groups", ["", "0", "[[0, 1]]", "[[0, 1], [2, 3]]", "[[0], [1], [2], [3]]"])
def test_a_step_that_does_not_sum_over_all_replicas_is_refused(groups: str) -> None:
    program = f'%1 = "stablehlo.all_reduce"(%0) <{{replica_groups = dense<{groups}>}}>' if groups else ""
    with pytest.raises(ValueError, match=r"num_replicas=4: the compiled step has [01] all-reduces.* Set launch.num_re"):
        check_all_reduces(program, 4)
    check_all_reduces('%1 = "stablehlo.all_reduce"(%0) <{replica_groups = dense<[[0, 1, 2, 3]]>}> ({', 4)
    check_all_reduces("", 1)


@needs_torch_tpu
def test_the_client_calls_the_functions_of_pjrt() -> None:
    """The places in PJRT's table, by its header."""
    header = (HEADERS / "xla/pjrt/c/pjrt_c_api.h").read_text()
    names = re.findall(r"_PJRT_API_STRUCT_FIELD\(PJRT_(\w+)\)", header)
    assert {name: names.index(name) for name in without_chip.FUNCTIONS} == without_chip.FUNCTIONS
    assert f"#define PJRT_API_MINOR {without_chip.PJRT_MINOR}\n" in header and len(names) == without_chip.COUNT


@needs_torch_tpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_plan_and_profile_ask_the_compiler(tmp_path: Path) -> None:
    """By the user's command: dropout, whose seed is drawn on the chip, and a mix, whose batches have another column."""
    around = {**environment(), "HOME": str(tmp_path), "TPU_LIBRARY_PATH": None}
    mix = "source=[{source: embedded, name: a}, {source: embedded, name: b, split: 'train[:200]'}]"
    for settings in (["embedded-cot", "lora.dropout=0.1"], ["embedded-cot", mix]):
        command = ["-m", "tpu_kit", "plan", *settings, *SMALL, "--chip", "v5e", "--exact", "--json"]
        (planned,) = json.loads(run_python(command, env=around, cwd=tmp_path, timeout=900).stdout)
        print({name: planned[name] for name in ("source", "peak_bytes", "step_seconds", "compile_seconds")})
        assert planned["source"] == "compiler" and planned["fits"] and planned["aliased_bytes"] > 0
    profile = ["-m", "tpu_kit", "profile", "embedded-cot", *SMALL, "lora.dropout=0.1", "chip=v5e"]
    text = run_python(profile, env=around, cwd=tmp_path, timeout=900).stdout
    assert "predicted from the compiled program" in text and "matrix product" in text and "kernel" in text


@needs_torch_tpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_replicas_sum_once(tmp_path: Path) -> None:
    config = load_config("embedded-cot", [*SMALL, "num_replicas=4"])
    compiled = compile_step(config, "v5e:2x2", num_replicas=4, cache_dir=tmp_path)
    (one,) = compiled.collectives
    print(compiled, one)
    assert (one.kind, one.count) == ("all-reduce", 1) and compiled.fits


@needs_torch_tpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_group_of_another_kind_is_refused() -> None:
    """With torch's "fake" one the all-reduce vanishes from the program without an error."""
    source = """
import os
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tpu_kit.config.loader import load_config
from tpu_kit.machine.slices import find_topology
from tpu_kit.planning.compiler import torch_tpu_trace
def join(replicas):
    dist.init_process_group("cpu:fake,tpu:fake", store=FakeStore(), rank=0, world_size=replicas)
torch_tpu_trace.process_group.join_alone = join
try:
    torch_tpu_trace.trace_step(load_config("embedded-cot", CHANGES), 4, find_topology("v5e", 4)[1])
except ValueError as error:
    print("found", error, flush=True)
os._exit(0)
""".replace("CHANGES", repr(SMALL))
    done = run_python(source, env={**environment(), **LIBTPU, "TPU_LIBRARY_PATH": None}, cwd=REPOSITORY, timeout=600)
    assert "found launch.num_replicas=4: the compiled step has 0 all-reduces" in done.stdout, done.stdout[-2000:]


@needs_torch_tpu
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not TORCH_XLA, reason="TESTS_TORCH_XLA_PYTHON names no interpreter with torch_xla")
def test_memory_on_a_v5e_is_that_of_torch_xla(tmp_path: Path) -> None:
    """Qwen2 0.5B with LoRA, 4 rows of 1,024 tokens, remat=full: has loops, kernels and donation."""
    model, theirs = write_config(tmp_path / "model", QWEN2_500M), tmp_path / "xla.mlir"
    changes = [f"model.name={model}", "lora.r=16", "max_length=1024", "batch_size=4", "remat=full"]
    on_cpu = {"PJRT_DEVICE": "CPU", "XLA_ALWAYS_ALLREDUCE": "1", **LIBTPU}
    run_python([*MODULE, "xla", str(theirs), *changes], env=on_cpu, cwd=REPOSITORY, timeout=900, executable=TORCH_XLA)
    tpu = compile_step(load_config(None, [*SMALL, *changes]), "v5e", cache_dir=tmp_path)
    done = run_python([*MODULE, "compile", str(theirs)], env={"PJRT_DEVICE": None, **LIBTPU}, cwd=REPOSITORY,
                      timeout=1800, executable=sys.executable)  # fmt: skip
    xla: Any = json.loads(done.stdout.rpartition("found ")[2])
    print(f"v5e: {xla['total'] / 2**30:.3f} GiB by torch_xla, {tpu.total_bytes / 2**30:.3f} by torch_tpu")
    assert tpu.total_bytes == pytest.approx(xla["total"], rel=0.02)
    assert tpu.aliased_bytes == xla["alias"]
    assert any(one.kind == "kernel" and one.flops for one in tpu.operations)
