"""The plan of reinforcement learning: its programs, their memory together, its time, and refused settings."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.benchmarks import rollouts as recorded
from tests.machine.test_checks import V5E, fake
from tests.planning.test_planner import compiled
from tests.support.compiler_models import LLAMA_8B, QWEN2_500M, TINY, cache_bytes_per_token, write_config
from tpu_kit.cli import main
from tpu_kit.config.loader import ConfigError, TrainConfig, as_trained, load_config
from tpu_kit.config.mesh import Mesh
from tpu_kit.distributed.launch import LaunchError
from tpu_kit.machine.chips import GIB, chip
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.notebook.doctor import diagnose
from tpu_kit.planning import run_on_slice
from tpu_kit.planning.compiler.compile_check import compile_programs
from tpu_kit.planning.cost import HOST_SECONDS
from tpu_kit.planning.memory.memory_estimate import estimate
from tpu_kit.planning.oom_recovery import next_setting, out_of_memory, suggestion
from tpu_kit.planning.planner import Plan, plan
from tpu_kit.planning.preflight import check_before_launch
from tpu_kit.planning.program_peaks import cache_bytes, program_rows
from tpu_kit.planning.report import format_plans
from tpu_kit.training.losses.policy_gradient import Sampled, pack
from tpu_kit.training.losses.rollout_programs import rollout_of, update_plan

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
SIZES = ["max_length=1024", "max_prompt_length=256", "max_completion_length=512", "max_steps=100"]
NAMES = ["prefill", "samples", "decode", "accumulate", "apply"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_config(tmp_path / "qwen", QWEN2_500M)


def run(model: Path | str, *settings: str) -> TrainConfig:
    return as_trained(load_config(None, [f"model.name={model}", *SIZES, *settings]))


def planned(model: Path, *settings: str) -> Plan:
    return plan(run(model, "batch_size=4", "remat=full", *settings))[0]


def test_what_lies_beside_each_program(small: Path) -> None:
    found = planned(small, "eval_generate_rows=64")
    of = {one.name: one for one in found.memory.programs}
    assert [*of] == NAMES
    token = cache_bytes_per_token(SimpleNamespace(**QWEN2_500M), 2)  # heads of 64 are not padded: slots are the lanes
    slots = 256 + 512
    assert of["prefill"].arguments["prompt_cache"] == 16 * slots * token
    assert of["decode"].arguments["sample_cache"] == of["samples"].results == 128 * slots * token
    assert of["decode"].beside["prompt_cache"] == 16 * slots * token
    # The samples' cache is freed after the rollout; the prompts' cache and the optimizer's state stay.
    for name in ("accumulate", "apply"):
        there = {**of[name].arguments, **of[name].beside}
        assert "sample_cache" not in there and {"prompt_cache", "gradient_buffer", "optimizer"} <= there.keys()
    adapters = of["apply"].arguments["adapters"]
    assert of["apply"].arguments["gradient_buffer"] == adapters and "base_weights" in of["apply"].beside
    rows = {row["program"]: row["formula_bytes"] for row in program_rows(found.memory.programs, {})}
    assert found.peak_bytes == max(rows.values()) == rows["decode"] == sum(found.parts.values())


def test_the_report_and_its_figures(small: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = planned(small)
    values = found.to_dict()
    assert (values["gradient_accumulation"], values["updates"], [row["program"] for row in values["programs"]]) == (
        128 // 4, 100, NAMES,  # a completion and its prompt fill a row
    )  # fmt: skip
    seconds = values["step_seconds"]
    assert 0 < values["rollout_seconds"] < seconds and values["tokens_per_second"] == 128 * 512 / seconds
    assert values["run_hours"] == pytest.approx(100 * seconds / 3600)
    text = format_plans(found.config, [found], details=True)
    for line in (
        "up to 7 programs: 3 prefill, 1 samples, 1 decode, 1 accumulate, 1 apply",
        "a rollout of a replica reads 16 prompts of up to 256 tokens and decodes 128 completions of up to 512, in a "
        "cache of 768 slots",
        "s in 32 passes",
    ):
        assert line in text
    # A file that sets a parameter of `rl` is planned as `grpo` trains it.
    file = tmp_path / "my.yaml"
    file.write_text(f"model: {{name: {small}}}\nrl: {{prompts_per_update: 8}}\noptim: {{max_steps: 5}}\n")
    assert main(["plan", str(file), "batch_size=4", "remat=full", "--details"]) == 0
    assert "decodes 64 completions of up to 512" in capsys.readouterr().out
    (other,) = plan(load_config(None, [f"model.name={small}", "batch_size=4", "remat=full"]))
    assert [one.name for one in other.memory.programs] == ["step"] and "programs" not in other.to_dict()


def test_time_follows_the_sizes(small: Path) -> None:
    time = planned(small).time
    assert time is not None
    shorter, twice = planned(small, "max_completion_length=256").time, planned(small, "num_iterations=2").time
    assert shorter is not None and 2 < time.rollout / shorter.rollout < 2.6  # half the steps, with a shorter cache
    # Two updates share a rollout and the log-probabilities computed before the first update.
    assert twice is not None and time.rollout / 2 < twice.rollout < time.rollout
    more = planned(small, "beta=0.04").time
    assert more is not None and more.compute > 1.2 * time.compute  # plus a forward pass of the reference
    eight = plan(run(small, "batch_size=4", "remat=full"), ["v5e-8"])[0].time
    assert eight is not None and eight.rollout < time.rollout and eight.predicted < time.predicted / 3


def test_a_long_run_decodes_and_trains_its_layers_one_by_one(small: Path) -> None:
    short, long = (plan(run(small, "batch_size=4", f"max_steps={count}"))[0] for count in (100, 10_000))
    assert (short.config.optim.remat, long.config.optim.remat) == ("full", "none")
    # By the compiler's cost model, a token takes 0.60 of its time in a loop.
    assert 0.5 < long.time.rollout / short.time.rollout < 0.8
    assert long.fits and long.peak_bytes > short.peak_bytes


def test_shapes_on_replicas_and_on_a_mesh(small: Path) -> None:
    config = run(small, "batch_size=4")
    rollout = rollout_of(config, 8)
    assert rollout is not None and (rollout.prompts, rollout.samples) == (2, 16)
    assert update_plan(config, 8).gradient_accumulation == 4
    shape = read_shape(config.model)
    whole = cache_bytes(config, shape, 128, 768, None)
    assert cache_bytes(config, shape, 128, 768, Mesh(fsdp=2)) == whole // 2  # by its two key-value heads
    assert cache_bytes(config, shape, 128, 768, Mesh(fsdp=8)) == whole // 8  # by rows


@pytest.mark.parametrize(("length", "shares"), [(1024, True), (2048, True), (4096, True), (4096, False)])
def test_the_rows_of_an_update_are_those_that_are_packed(length: int, shares: bool, small: Path) -> None:
    """Completions share their prompt if every token sees all earlier tokens, which is not so in Gemma 3."""
    model = small if shares else "google/gemma-3-1b-it"
    config = run(model, "batch_size=1", f"max_length={length}", "num_generations=6")
    assert read_shape(config.model).sees_all == shares
    prompts, tokens = config.rl.prompts_per_update, config.rl.max_completion_length
    sampled = [Sampled(n // 6, (1 + n // 6,) * 256, (2,) * tokens, (0.0,) * tokens, 1.0) for n in range(6 * prompts)]
    rows = pack(sampled, config, share_prompts=shares)
    assert rows is not None and update_plan(config, 1).gradient_accumulation == len(rows)


def test_a_rollout_that_does_not_fit_is_told_before_the_launch(small: Path, tmp_path: Path) -> None:
    at = fake(tmp_path / "root", V5E)
    config = run(small, "device_type=tpu", "batch_size=4", "prompts_per_update=512")
    told = r"prompts_per_update=512: keys and values of 512 prompts and 4096 completions in 768 slots take 40\.50 GiB"
    with pytest.raises(ConfigError, match=told + r"\. .* 15\.75 GiB per device.*; set rl\.prompts_per_update=185"):
        check_before_launch(config, at=at)
    config = run(small, "device_type=tpu", "batch_size=4", "prompts_per_update=185")  # without its temporaries
    outlook = check_before_launch(config, at=at)
    assert outlook.fits is False and outlook.setting is not None and outlook.setting.memory.moment == "decode"
    # No setting of the passes makes a rollout smaller.
    assert next_setting(outlook) == ({}, "") and ": rl.prompts_per_update=" in suggestion(outlook)
    with pytest.raises(ValueError, match=r"not one row .* on v5litepod-1: rl\.prompts_per_update=\d+ \(fewer pr"):
        check_before_launch(run(small, "device_type=tpu", "batch_size=auto", "prompts_per_update=512"), at=at)
    advice = plan(config)[0].advice
    assert advice is not None
    knob = next(one for one in advice.knobs if one.change.startswith("rl.prompts_per_update="))
    assert knob.fits and planned(small, knob.change).fits


def test_a_pass_that_does_not_fit_becomes_smaller(small: Path, tmp_path: Path) -> None:
    outlook = check_before_launch(run(small, "device_type=tpu", "batch_size=300"), at=fake(tmp_path / "root", V5E))
    assert outlook.fits is False and "step             at most " in str(outlook)
    overrides, _ = next_setting(outlook)
    assert {*overrides} <= {"batch_size", "remat", "loss_chunk", "mlp_tile"} and overrides["batch_size"] < 300
    again = check_before_launch(
        run(small, "device_type=tpu", *(f"{name}={value}" for name, value in overrides.items())),
        at=fake(tmp_path / "other", V5E),
    )  # fmt: skip
    assert again.fits
    found = out_of_memory(LaunchError("rank 2 (process 7) was ended by SIGKILL: often by the kernel"), outlook)
    assert "(launch.num_replicas), so that the run can resume" in str(found)  # grpo refuses a global batch


def test_rows_that_a_tpu_does_not_fill_are_told(small: Path, tmp_path: Path) -> None:
    text = "6 prompts of a rollout x 8 completions are 48 rows in each of 1 replicas, no multiple of 64"
    found = planned(small, "prompts_per_update=6")
    assert text in found.note and "rl.prompts_per_update=8 fills" in found.note
    at = fake(tmp_path / "root", V5E)
    config = run(small, "prompts_per_update=6", "device_type=tpu", "batch_size=1")
    assert text in str(check_before_launch(config, at=at))
    assert not planned(small).note
    *_, row = diagnose(config, at)
    assert (row.name, row.status) == ("Rollouts", "warning") and text in row.fix
    two = replace(at, environ={"TPU_KIT_HOSTS": "a,b", "TPU_KIT_HOST_INDEX": "0"})
    *_, row = diagnose(run(small), two)
    assert row.status == "failure" and row.found.endswith("sampling is for one host, not 2")
    *_, row = diagnose(run(small, "reward_funcs=[no_module:judge]"), at)
    assert row.status == "failure" and "rl.reward_funcs=no_module:judge" in row.found


def test_hours_from_epochs() -> None:
    config = load_config("embedded-grpo", ["max_steps=null", "epochs=1", "split=train[:64]", "eval_rows=0",
                                           "eval_steps=null", "eval_generate_rows=0", "warmup_steps=0"])  # fmt: skip
    assert plan(config)[0].updates == 64 // 16
    assert plan(load_config("embedded-grpo", ["num_iterations=2"]))[0].updates == 150


def test_the_stored_configuration_of_a_run_is_planned_as_it_was_trained(tmp_path: Path) -> None:
    for objective, learns in (("supervised", False), ("policy", True)):
        stored = tmp_path / f"{objective}.yaml"
        stored.write_text(load_config(None, [f"objective={objective}", "max_length=1024"]).to_yaml())
        assert as_trained(load_config(stored)).on_policy == learns
    assert as_trained(load_config(None, ["rl.num_generations=8", "eval_generate_rows=8"])).on_policy


def test_settings_that_contradict_grpo_are_refused(small: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim\.global_batch_size: 8 is not for grpo"):
        plan(load_config(None, [f"model.name={small}", "prompts_per_update=8", "global_batch_size=8"]))


# --------------------------------------------------------------------------------------------------------- the compiler


@pytest.mark.parametrize("answer", recorded.ANSWERS, ids=lambda one: one["settings"][0].rpartition("/")[2])
def test_the_formula_is_near_the_compiler(answer: dict[str, Any]) -> None:
    config, limit = recorded.configuration(answer), chip("v5e").usable_hbm_bytes
    assert limit is not None
    rows = recorded.rows(answer)
    assert [row["program"] for row in rows] == [one.name for one in estimated(config, answer).programs]
    largest = max(rows, key=lambda row: row["compiler_bytes"])
    for row in rows:
        assert row["compiler_bytes"] <= limit, row
        assert abs(row["formula_bytes"] / row["compiler_bytes"] - 1) < (0.04 if row == largest else 0.1), row
    assert recorded.summary(answer) in recorded.PAGE.read_text(), "python -m tests.benchmarks.rollouts --readme"


def estimated(config: TrainConfig, answer: dict[str, Any]) -> Any:
    return estimate(config, num_replicas=answer["replicas"], mesh=recorded.mesh_of(answer))


def test_a_compiled_rollout_takes_what_the_cost_model_says(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"prefill": 0.5, "samples": 0.25, "decode": 0.125, "accumulate": 0.75, "apply": 0.0625}

    def answer(config: TrainConfig, topology: str, devices: int, **_: Any) -> dict[str, Any]:
        programs = estimate(config).programs
        return {one.name: compiled(one.own, estimated={"other": spent[one.name]}) for one in programs}

    monkeypatch.setattr(run_on_slice, "compile_programs", answer)
    (found,) = plan(run(small, "batch_size=4", "remat=full"), exact=True)
    sizes, passes = rollout_of(found.config, 1), found.update.gradient_accumulation
    assert sizes is not None
    blocks = -(-sizes.tokens // sizes.block)
    host = HOST_SECONDS * (2 + blocks)  # for each program run
    assert found.time.rollout == pytest.approx(0.5 + 0.25 + blocks * 0.125 + host)
    assert found.time.device == pytest.approx(passes * 0.75 + 0.0625)


def test_a_pass_that_the_compiler_refuses_becomes_smaller(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(config: TrainConfig, topology: str, devices: int, **_: Any) -> dict[str, Any]:
        asked.append(config.optim.batch_size)
        more = {"accumulate": 3 * GIB * config.optim.batch_size}  # type: ignore[operator]  # a number
        return {one.name: compiled(one.own + more.get(one.name, 0)) for one in estimate(config).programs}

    monkeypatch.setattr(run_on_slice, "compile_programs", answer)
    (found,) = plan(run(small, "remat=full"), exact=True)
    assert (found.source, found.fits, found.config.optim.batch_size) == ("compiler", True, asked[-1]) and len(asked) > 1
    rows = found.to_dict()["programs"]
    assert found.peak_bytes == max(row["compiler_bytes"] for row in rows) < found.where.limit
    # In these answers each program has a byte of code.
    others, decode = sum(one.code for one in found.memory.programs if one.name != "decode"), rows[2]
    assert decode["compiler_bytes"] == decode["formula_bytes"] - others + len(rows) - 1
    text = format_plans(found.config, [found], details=True)
    assert "GiB by compiler" in text and "each start compiles the programs: 0.2 min on this machine" in text
    asked.clear()
    (found,) = plan(run(small, "remat=full", "batch_size=64"), exact=True)
    assert not found.fits and asked == [64] and found.advice is not None and found.advice.knobs


@pytest.mark.slow
@needs_libtpu
@pytest.mark.timeout(1200)
def test_the_programs_of_a_tiny_model_compile(tmp_path: Path) -> None:
    model = write_config(tmp_path / "tiny", TINY)
    settings = ["max_length=256", "prompts_per_update=4", "max_completion_length=64", "max_prompt_length=64"]
    config = as_trained(load_config(None, [f"model.name={model}", *settings, "eval_generate_rows=8", "batch_size=2"]))
    made = compile_programs(config, "v5e:1x1", 1, progress=False, cache_dir=tmp_path)
    assert all(one.fits for one in made.values())
    programs = {one.name: one for one in estimate(config).programs}
    assert made.keys() == programs.keys()
    for name, one in programs.items():
        # The batches of all passes are in memory, and each pass reads one; the other inputs of decoding are small.
        read = sum(size for part, size in one.arguments.items() if part != "batch")
        assert made[name].argument_bytes == pytest.approx(read, abs=2**16), name
    # Decode steps update their cache in place, and passes update the gradients in place.
    assert (made["decode"].aliased_bytes or 0) >= programs["decode"].arguments["sample_cache"]
    assert (made["accumulate"].aliased_bytes or 0) >= programs["accumulate"].arguments["gradient_buffer"]
    # The samples are new buffers: nothing of the last rollout is in memory.
    assert made["samples"].aliased_bytes == 0
    assert made["samples"].output_bytes == pytest.approx(programs["samples"].results, abs=1024)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("answer", recorded.ANSWERS, ids=lambda one: one["settings"][0].rpartition("/")[2])
def test_the_compiler_still_says_so(answer: dict[str, Any]) -> None:
    for name, one in compile_programs(recorded.configuration(answer), answer["topology"], answer["replicas"]).items():
        assert one.total_bytes == pytest.approx(answer["programs"][name]["total_bytes"], rel=0.02), name


def test_a_teacher_scores_one_sample_of_each_prompt(small: Path) -> None:
    config = load_config(None, [f"model.name={small}", f"distill.teacher={small}", "distill.on_policy=true", *SIZES])
    found = plan(as_trained(config))[0]
    of = {one.name: one for one in found.memory.programs}
    assert [*of] == ["prefill", "decode", "accumulate", "apply"]  # no copy: decoding uses the prompts' cache
    assert "prompt_cache" in of["decode"].arguments and "teacher_weights" in of["decode"].beside
    assert of["accumulate"].arguments["teacher_weights"] == of["decode"].beside["teacher_weights"] > 0
    assert "decodes 16 completions of up to 512" in format_plans(config, [found], details=True)
    *_, row = diagnose(config)
    assert row.found == "16 prompts x 1 completions a rollout, judged by the teacher"


def test_an_8b_model_in_int8_is_planned(tmp_path: Path) -> None:
    found = planned(write_config(tmp_path / "llama", LLAMA_8B), "base_dtype=int8", "max_completion_length=256")
    assert found.to_dict()["fits"] in (True, False) and found.time is not None and found.time.rollout > 1
