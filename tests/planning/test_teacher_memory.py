"""Memory and time of a teacher or an error-correction head, by formula and by the TPU compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kit.config.loader import TrainConfig, batch_arithmetic, load_config
from tpu_kit.config.mesh import Mesh
from tpu_kit.machine.checks import Machine
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.planning.compiler.compile_check import compile_step
from tpu_kit.planning.cost import work
from tpu_kit.planning.memory.memory_estimate import estimate
from tpu_kit.training.objectives import objective_of

GIB = 2**30
OBJECTIVES = ("supervised", "error-correction", "error-correction-alone")
COMPILED = {"total": 10_549_187_072, "arguments": 9_802_989_568, "flops": 71.8e12}
"""The TPU compiler's figures of `distilled()` for a v5e."""


def distilled(*settings: str) -> TrainConfig:
    """Qwen2.5-0.5B on 4 x 1024 tokens, distilled from Qwen2.5-7B in int8."""
    teacher = ["distill.teacher=Qwen/Qwen2.5-7B-Instruct", "teacher_dtype=int8"]
    given = ["model.name=Qwen/Qwen2.5-0.5B-Instruct", "batch_size=4", "max_length=1024", *(settings or teacher)]
    return load_config(None, given)


def test_the_formula_is_the_compilers_answer_with_a_teacher() -> None:
    found, alone = estimate(distilled()), estimate(distilled("optim.seed=0"))
    assert found.total_bytes == pytest.approx(COMPILED["total"], rel=0.05)
    assert found.argument_bytes == pytest.approx(COMPILED["arguments"], rel=0.001)
    # The teacher's weights, one chunk of its logits, and its last hidden states.
    added = found.parts["teacher_weights"] + 512 * 152_064 * 2 + 4096 * 3584 * 2
    assert found.total_bytes - alone.total_bytes == pytest.approx(added, rel=0.05)
    assert COMPILED["total"] - alone.total_bytes == pytest.approx(added, rel=0.05)


def test_a_student_that_samples_has_a_cache_and_a_buffer_of_gradients_beside_the_teacher() -> None:
    teacher = ("distill.teacher=Qwen/Qwen2.5-7B-Instruct", "teacher_dtype=int8")
    found = estimate(distilled(*teacher, "on_policy=true", "prompts_per_update=64", "max_completion_length=512"))
    names = [one.name for one in found.programs if "teacher_weights" in one.arguments]
    assert names == ["accumulate"] and found.moment.startswith("accumulate")
    assert all("teacher_weights" in {**one.arguments, **one.beside} for one in found.programs)
    added = found.parts["prompt_cache"] + found.parts["gradient_buffer"]
    assert found.parts["prompt_cache"] == 64 * 1024 * 24 * 2 * 2 * 64 * 2  # bf16 keys and values, 2 heads of 64
    assert found.total_bytes - estimate(distilled()).total_bytes == pytest.approx(added, rel=0.03)


def test_a_teacher_on_a_mesh() -> None:
    """The expected total and arguments, in MiB, are the TPU compiler's for v5e:2x4."""
    config = distilled("distill.teacher=Qwen/Qwen2.5-7B-Instruct", "teacher_dtype=int8", "batch_size=1")
    found = estimate(config, mesh=Mesh(1, 8, 1))
    assert found.argument_bytes / 2**20 == pytest.approx(1171.1, rel=0.001)
    assert found.total_bytes / 2**20 == pytest.approx(1730.9, rel=0.03)


def test_the_time_has_the_teachers_forward_pass() -> None:
    config = distilled()
    found = work(config, read_shape(config.model), batch_arithmetic(config, 1))
    assert found.flops == pytest.approx(COMPILED["flops"], rel=0.05)

    def added(*settings: str) -> float:
        """Returns the bytes moved for four more rows."""
        each = [distilled(*settings, f"batch_size={rows}") for rows in (4, 8)]
        few, more = (work(one, read_shape(one.model), batch_arithmetic(one, 1)).traffic for one in each)
        return more - few

    teacher = ("distill.teacher=Qwen/Qwen2.5-7B-Instruct", "teacher_dtype=int8")
    trained = added("model.name=Qwen/Qwen2.5-7B-Instruct", "base_dtype=int8")
    assert 0.2 < (added(*teacher) - added("optim.seed=0")) / trained < 0.4, "forward, and not backward"


def test_files_take_no_weights_but_columns_of_the_batch() -> None:
    files, alone = estimate(distilled("distill.teacher=t", "files=f")), estimate(distilled("optim.seed=0"))
    assert "teacher_weights" not in files.parts
    assert files.parts["batch"] - alone.parts["batch"] == pytest.approx(4 * 1024 * (64 + 65) * 4, rel=0.01)


@pytest.mark.parametrize(
    ("name", "rows", "length", "found"),
    [
        # By the TPU compiler for a v5e: total and arguments in MiB, TFLOP.
        ("HuggingFaceTB/SmolLM2-360M-Instruct", 8, 1024,
         ((1965, 801.1, 21.03), (2068, 804.4, 22.60), (927, 804.4, 9.48))),
        ("Qwen/Qwen2.5-0.5B-Instruct", 4, 1024,
         ((1586, 1043.1, 12.14), (1651, 1046.1, 14.39), (1248, 1046.1, 7.87))),
        ("unsloth/Llama-3.2-1B-Instruct", 8, 2048,
         ((5597, 2486.6, 120.7), (5791, 2493.3, 138.0), (3146, 2493.3, 70.2))),
    ],
)  # fmt: skip
def test_an_error_correction_head(name: str, rows: int, length: int, found: tuple[tuple[float, ...], ...]) -> None:
    sizes = [f"model.name={name}", f"batch_size={rows}", f"max_length={length}"]
    configs = [load_config(None, [*sizes, f"optim.objective={one}"]) for one in OBJECTIVES]
    totals = [estimate(config).total_bytes / 2**20 for config in configs]
    flops = [work(config, read_shape(config.model), batch_arithmetic(config, 1)).flops / 1e12 for config in configs]
    for config, (_, arguments, _) in zip(configs, found, strict=True):
        assert estimate(config).argument_bytes / 2**20 == pytest.approx(arguments, rel=0.001)
    # The cost of the head, and a whole step that trains only the head.
    assert totals[1] - totals[0] == pytest.approx(found[1][0] - found[0][0], abs=0.01 * found[0][0])
    assert totals[2] == pytest.approx(found[2][0], rel=0.1)
    assert flops[1] - flops[0] == pytest.approx(found[1][2] - found[0][2], rel=0.02)
    assert flops[2] == pytest.approx(found[2][2], rel=0.08)


def test_the_count_of_a_heads_parameters() -> None:
    objective = objective_of(load_config(None, ["optim.objective=error-correction"]))
    width, components, size = 128, 4, 16
    density = (width + 1) * components * (1 + 2 * size)
    assert objective.cost(10, 896).params == (896 + 1) * width + density + (width + size) * 896 + 1


@pytest.mark.slow
@pytest.mark.skipif(Machine().version("libtpu") is None, reason="libtpu is not installed")
def test_a_small_model_with_a_teacher_of_7b_in_int8_fits_a_v5e(tmp_path: Path) -> None:
    found = compile_step(distilled(), "v5e:1x1", cache_dir=tmp_path, progress=False)
    assert found.fits
    assert found.total_bytes < 15.75 * GIB
    assert found.total_bytes == pytest.approx(COMPILED["total"], rel=0.02)
    assert found.argument_bytes == COMPILED["arguments"]
