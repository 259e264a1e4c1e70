"""Long rows that a run cannot train are refused before the launch, with the value, the size and advice in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machine.test_checks import V5E, fake
from tests.planning.test_preflight import host
from tests.support.compiler_models import LLAMA_8B, write_config
from tpu_kit.cli import main
from tpu_kit.config.loader import load_config
from tpu_kit.distributed import detection
from tpu_kit.planning.preflight import check_before_launch
from tpu_kit.recipes import sft

Tell = Callable[..., str]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tell:
    """Returns a function that calls a command, which must be refused, and returns the line of its only problem."""

    def run(*command: str, status: int = 2) -> str:
        monkeypatch.setattr(sft, "launch", lambda *_: pytest.fail("it was launched"))
        capsys.readouterr()
        assert main([*command, f"output_dir={tmp_path / 'run'}"]) == status
        *_, line = capsys.readouterr().err.strip().splitlines()
        return line

    return run


@pytest.mark.parametrize(
    ("settings", "status", "told"),
    [
        (
            ["max_length=4096", "batch_size=16", "attention=sdpa"], 2,
            "model.attention=sdpa: the scores of 32 heads x 4,096 x 4,096 x 2 bytes for each of 16 rows are 16.00 GiB, "
            "more than the 15.75 GiB of v5litepod-1; set model.attention=auto, whose kernel writes no scores, or "
            "optim.batch_size=15",
        ),
        (
            ["max_length=16411", "batch_size=1"], 2,
            "data.max_length=16411: 1 x 16411 tokens would be 16,411 tiles of 1 for optim.mlp_tile=2048, because "
            "larger tiles are not equal; set data.max_length=16384, a multiple of 128",
        ),
        (
            ["max_length=16411", "batch_size=1", "remat=blocks"], 2,
            "data.max_length=16411: 1 x 16411 tokens would be 16,411 tiles of 1 for optim.mlp_tile=2048, because "
            "larger tiles are not equal; set data.max_length=16384, a multiple of 128",
        ),
        (
            ["max_length=131073", "batch_size=1"], 1,
            "data.max_length=131073 is longer than the 131072 positions of the model; set it to 131072 or less, or "
            "use a model with more: an adapter cannot store another scaling of rotary positions",
        ),
    ],
)  # fmt: skip
def test_rows_that_no_tpu_trains_are_told_with_what_to_do(
    settings: list[str], status: int, told: str, tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = fake(tmp_path / "root", V5E)
    monkeypatch.setattr(detection, "Machine", lambda: at)
    file, model = tmp_path / "my.yaml", write_config(tmp_path / "llama", LLAMA_8B)
    file.write_text(f"model: {{name: {model}, base_dtype: int8}}\ndata: {{source: synthetic, split: 'train[:16]'}}\n")
    line = tell("train", str(file), "device_type=tpu", "max_steps=1", "remat=full", *settings, status=status)
    assert line.endswith(told)


def test_a_rollout_whose_keys_and_values_do_not_fit_is_told_with_what_to_do(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = host(tmp_path / "root", 1.75)
    monkeypatch.setattr(detection, "Machine", lambda: at)
    sizes = ["max_length=1024", "max_completion_length=900", "prompts_per_update=64", "eval_rows=0"]
    sizes += ["eval_generate_rows=0", "eval_steps=null", "device_type=cpu"]
    line = tell("grpo", "embedded-grpo", *sizes)
    assert "rl.prompts_per_update=64: keys and values of 64 prompts and 512 completions in 1,040 slots" in line
    assert " take 1.27 GiB. Weights and state take " in line and " GiB of the 0.25 GiB per device of this host" in line
    assert line.endswith("; set rl.prompts_per_update=12")
    fewer = load_config("embedded-grpo", [*sizes, "prompts_per_update=12"])
    assert check_before_launch(fewer, at=at).setting is not None


def test_what_attention_pads_is_told(tmp_path: Path) -> None:
    one, eight = fake(tmp_path / "root", V5E), fake(tmp_path / "eight", *[V5E] * 8)
    cases = (
        (one, None, 8, 16384, ""),
        (one, None, 8, 16500, "to 17408; data.max_length=16384 or 17408 wastes no time"),
        (eight, "context=8", 8, 24576, ""),  # heads for tokens
        (eight, "context=8", 4, 24576, "to 32768; data.max_length=16384 or 32768 wastes no time"),
    )
    for at, mesh, heads, length, told in cases:
        model = write_config(tmp_path / f"llama-{heads}", LLAMA_8B, num_key_value_heads=heads)
        values = {"model.name": str(model), "base_dtype": "int8", "device_type": "tpu", "max_length": length}
        values["mesh"] = mesh
        notes = check_before_launch(load_config(None, values | {"batch_size": 1, "remat": "full"}), at=at).notes
        assert [note.partition(f"{length} tokens ")[2] for note in notes if "attention pads" in note] == [told] * bool(
            told
        )
