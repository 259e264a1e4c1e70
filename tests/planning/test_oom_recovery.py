"""The proposal when memory runs out, on a TPU (by its compiler's text), a GPU or a host; other errors get none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machine.test_checks import V5E, fake
from tests.support.compiler_models import LLAMA_8B, QWEN2_500M, write_config
from tests.support.training_functions import OUT_OF_MEMORY
from tpu_kit.config.loader import load_config
from tpu_kit.distributed import detection
from tpu_kit.distributed.launch import LaunchError
from tpu_kit.planning.oom_recovery import next_setting, out_of_memory, suggestion
from tpu_kit.planning.preflight import Preflight, check_before_launch
from tpu_kit.training.checkpoint.manager import CheckpointManager

GIB = 2**30


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "gpu_count", lambda: 0)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


@pytest.fixture
def eight(tmp_path: Path) -> Preflight:
    """A run of Qwen2.5-0.5B on eight chips, with the most rows that fit by formula."""
    model = write_config(tmp_path / "qwen", QWEN2_500M)
    settings = [f"model.name={model}", "max_steps=10", "device_type=tpu", "batch_size=96", f"output_dir={tmp_path}/run"]
    return check_before_launch(load_config(None, settings), at=fake(tmp_path / "root", *[V5E] * 8))


def again(outlook: Preflight, overrides: dict[str, object], tmp_path: Path) -> Preflight:
    """The same run with the proposed settings, as a user passes them."""
    given = [name for name in outlook.config.sources if name.rpartition(".")[2] not in overrides]
    values = {name: outlook.config[name] for name in given if name != "output_dir"}
    config = load_config(None, {**values, **overrides})
    return check_before_launch(config, at=fake(tmp_path / "again", *[V5E] * 8))


def test_a_prediction_that_was_too_low_is_corrected_by_what_was_taken(eight: Preflight, tmp_path: Path) -> None:
    error = LaunchError(f"ranks 0, 1 failed:\nRuntimeError: {OUT_OF_MEMORY}", 0, "the traceback")
    found = out_of_memory(error, eight)
    assert found is not None and (found.rank, found.traceback) == (0, "the traceback")
    assert found.overrides["global_batch_size"] == 8 * 96 and 96 % found.overrides["batch_size"] == 0
    text = str(found)
    assert text.startswith("ranks 0, 1 failed:\n") and "; 17.00 were requested. An update keeps its rows" in text
    assert f"\n  batch_size={found.overrides['batch_size']} global_batch_size=768\n" in text
    assert "it starts anew, because nothing was saved yet" in text
    other = again(eight, found.overrides, tmp_path)
    assert other.fits and suggestion(other) == "" and other.setting is not None and eight.setting is not None
    # It still fits if this formula is too low by the same factor.
    assert other.setting.peak_bytes * 17 * GIB / eight.setting.peak_bytes < 15.75 * GIB


def test_a_prediction_that_was_three_times_too_low(eight: Preflight, tmp_path: Path) -> None:
    assert eight.setting is not None
    overrides, why = next_setting(eight, used=int(3 * eight.setting.peak_bytes))
    other = again(eight, overrides, tmp_path)
    assert other.setting is not None and 3 * other.setting.peak_bytes < 15.75 * GIB
    assert why.startswith(f"Predicted memory: {3 * other.setting.peak_bytes / GIB:.2f} of ")


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 10.25G at the bottom of memory. "
        "That was not possible. There are 8.00G free, 0B reserved, and 8.00G reservable.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...",
    ],
)
def test_without_a_figure_it_takes_clearly_less(text: str, eight: Preflight, tmp_path: Path) -> None:
    found = out_of_memory(LaunchError(f"rank 3 failed:\n{text}", 3), eight)
    assert found is not None
    other = again(eight, found.overrides, tmp_path)
    assert other.setting is not None and eight.setting is not None
    assert other.setting.peak_bytes < 0.8 * eight.setting.peak_bytes


def test_what_is_no_shortage_of_memory_is_left_as_it_is(eight: Preflight) -> None:
    for text in ("ValueError: no", "RESOURCE_EXHAUSTED: Quota exceeded for requests",
                 "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20M of 16M vmem."):  # fmt: skip
        assert out_of_memory(LaunchError(text), eight) is None
    assert out_of_memory(RuntimeError("shapes differ"), eight) is None


def test_the_host_of_a_tpu_is_another_matter(eight: Preflight) -> None:
    found = out_of_memory(LaunchError("rank 2 (process 7) was ended by SIGKILL: often by the kernel"), eight)
    assert found is not None and not found.overrides
    assert "The host ran out of memory, not the device" in str(found)
    assert "(launch.num_replicas) with global_batch_size=768 gradient_accumulation=1, which" in str(found)


def test_when_nothing_is_left_to_lower(tmp_path: Path) -> None:
    model = write_config(tmp_path / "llama", LLAMA_8B)
    settings = [
        f"model.name={model}",
        "max_steps=10",
        "device_type=tpu",
        "batch_size=1",
        "loss_chunk=64",
        "mlp_tile=512",
    ]
    outlook = check_before_launch(load_config(None, settings), at=fake(tmp_path / "root", V5E))
    assert next_setting(outlook) == ({}, "")
    text = str(out_of_memory(LaunchError(OUT_OF_MEMORY), outlook))
    assert "No other setting of the same training takes less memory. A new training takes less, with these" in text
    assert "model.base_dtype=int8 (base weights in int8, products in bf16, a new training): 9.79 GiB, fits" in text
    assert "a new training cannot resume from the checkpoints of this run: give it another run_name (or" in text
    tight = check_before_launch(load_config(None, [*settings[:3], "batch_size=2"]), at=fake(tmp_path / "other", V5E))
    overrides, why = next_setting(tight)
    assert overrides["batch_size"] == 1 and why.startswith("It may still be too much. Predicted memory: ")
    warned = "warning: the run may run out of memory. "
    assert suggestion(tight).startswith(f"{warned}The same training takes less memory with batch_size=1 ")
    assert suggestion(outlook).startswith(f"{warned}No other setting of the same training takes less memory. A new")


def test_one_long_row_is_recomputed_in_blocks(tmp_path: Path) -> None:
    model = write_config(tmp_path / "llama", LLAMA_8B)
    settings = [f"model.name={model}", "base_dtype=int8", "max_length=16384", "max_steps=10", "batch_size=1"]
    outlook = check_before_launch(load_config(None, [*settings, "device_type=tpu", "remat=full"]),
                                  at=fake(tmp_path / "root", V5E))  # fmt: skip
    overrides, why = next_setting(outlook, used=int(17.6 * GIB))
    assert overrides == {"remat": "blocks"} and why.startswith("Predicted memory: 14.")


def test_a_run_that_began_anew_is_not_to_begin_anew_again(tmp_path: Path) -> None:
    """With resume=never again, its saved checkpoints would be moved aside."""
    model = write_config(tmp_path / "qwen", QWEN2_500M)
    settings = {"model.name": str(model), "max_steps": 10, "device_type": "tpu", "batch_size": 96, "resume": "never",
                "output_dir": str(tmp_path / "run")}  # fmt: skip
    outlook = check_before_launch(load_config(None, settings), at=fake(tmp_path / "root", V5E))
    error = LaunchError(f"rank 0 failed:\nRuntimeError: {OUT_OF_MEMORY}", 0)
    nothing = out_of_memory(error, outlook)
    assert nothing is not None and "resume" not in nothing.overrides and "it starts anew" in str(nothing)
    for step, changes, goes_on in ((3, {}, True), (4, {"r": 4}, False)):  # the newest is then of another run
        with CheckpointManager(tmp_path / "run" / "checkpoints", keep=9) as writer:
            writer.save(step, {}, {"config": load_config(None, {**settings, **changes}).to_dict()}, {})
        found = out_of_memory(error, outlook)
        assert found is not None and (found.overrides.get("resume") == "auto") is goes_on
        assert ("the run resumes from step 3" in str(found)) is goes_on


def test_without_a_prediction_the_next_smaller_batch(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", QWEN2_500M, model_type="none")
    config = load_config(None, [f"model.name={model}", "batch_size=6", "device_type=cpu", "remat=none"])
    outlook = check_before_launch(config)
    assert outlook.setting is None
    assert next_setting(outlook) == (
        {"batch_size": 3, "global_batch_size": 6},
        "Its memory cannot be predicted here",
    )
    error = out_of_memory(MemoryError("no room"), outlook)
    assert error is not None and str(error).startswith("MemoryError: no room\n\nOut of memory. The next setting")


def test_a_small_model_on_a_cpu_takes_fewer_rows_though_the_code_of_two_passes_is_larger(tmp_path: Path) -> None:
    settings = ["batch_size=4", "global_batch_size=4", "max_length=96", "device_type=cpu", f"output_dir={tmp_path}/run"]
    outlook = check_before_launch(load_config("embedded-cot", settings))
    assert outlook.setting is not None
    assert next_setting(outlook)[0] == {"batch_size": 2}
