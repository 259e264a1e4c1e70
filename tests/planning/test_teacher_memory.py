"""What a teacher adds to memory and time, by formula and by the TPU compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kit.config.loader import TrainConfig, batch_arithmetic, load_config
from tpu_kit.hardware.machine import Machine
from tpu_kit.models.architecture import read_shape
from tpu_kit.planning.compile_check import compile_step
from tpu_kit.planning.cost import work
from tpu_kit.planning.memory_estimate import estimate

GIB = 2**30
COMPILED = {"total": 10_549_187_072, "arguments": 9_802_991_104, "flops": 71.8e12}
"""The TPU compiler's figures of `distilled()` for a v5e."""


def distilled(*settings: str) -> TrainConfig:
    """Qwen2.5-0.5B with 4 x 1024 tokens, which learns from Qwen2.5-7B in int8."""
    teacher = ["distill.teacher=Qwen/Qwen2.5-7B-Instruct", "teacher_dtype=int8"]
    given = ["model.name=Qwen/Qwen2.5-0.5B-Instruct", "batch_size=4", "max_length=1024", *(settings or teacher)]
    return load_config(None, given)


def test_the_formula_is_the_compilers_answer_with_a_teacher() -> None:
    found, alone = estimate(distilled()), estimate(distilled("optim.seed=0"))
    assert found.total_bytes == pytest.approx(COMPILED["total"], rel=0.05)
    assert found.argument_bytes == pytest.approx(COMPILED["arguments"], rel=0.001)
    # Its weights, one chunk of its logits, and its last hidden states.
    added = found.parts["teacher_weights"] + 512 * 152_064 * 2 + 4096 * 3584 * 2
    assert found.total_bytes - alone.total_bytes == pytest.approx(added, rel=0.05)
    assert COMPILED["total"] - alone.total_bytes == pytest.approx(added, rel=0.05)


def test_the_time_has_the_teachers_forward_pass() -> None:
    config = distilled()
    found = work(config, read_shape(config.model), batch_arithmetic(config, 1))
    assert found.flops == pytest.approx(COMPILED["flops"], rel=0.05)


def test_files_take_no_weights_but_columns_of_the_batch() -> None:
    files, alone = estimate(distilled("distill.teacher=t", "files=f")), estimate(distilled("optim.seed=0"))
    assert files.parts["teacher_weights"] == 0
    assert files.parts["batch"] - alone.parts["batch"] == pytest.approx(4 * 1024 * (64 + 65) * 4, rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(Machine().version("libtpu") is None, reason="libtpu is not installed")
def test_a_small_model_with_a_teacher_of_7b_in_int8_fits_a_v5e(tmp_path: Path) -> None:
    found = compile_step(distilled(), "v5e:1x1", cache_dir=tmp_path, progress=False)
    assert found.fits
    assert found.total_bytes < 15.75 * GIB
    assert found.total_bytes == pytest.approx(COMPILED["total"], rel=0.02)
    assert found.argument_bytes == COMPILED["arguments"]
