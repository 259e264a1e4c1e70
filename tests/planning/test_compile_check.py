"""Compiles the training step with the real TPU compiler: a two-layer model here, real shapes in the slow tests."""

from __future__ import annotations

import glob
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_processes import REPOSITORY, child_environment, run_python
from tests.support.compiler_models import LLAMA_8B, QWEN2_500M, TINY, write_config
from tpu_kit.config.loader import ModelConfig, TrainConfig, batch_arithmetic, load_config
from tpu_kit.config.mesh import Mesh, parse_mesh
from tpu_kit.machine import chips
from tpu_kit.machine.slices import find_topology
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.model.weights.source import settings_of
from tpu_kit.planning.compiler import compile_check
from tpu_kit.planning.compiler.compile_check import Compiled, CompilerUnavailable, compile_step
from tpu_kit.planning.cost import predicted_collectives
from tpu_kit.planning.memory.memory_estimate import estimate

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
GIB = 2**30


def small(model: Path, *changes: str) -> TrainConfig:
    return load_config(None, [f"model.name={model}", "max_length=256", "batch_size=4", "loss_chunk=256", *changes])


def locks() -> set[str]:
    return {*glob.glob("/tmp/libtpu*"), *glob.glob(f"{tempfile.gettempdir()}/libtpu*")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def eight(tiny: Path, cache: Path) -> Iterator[Compiled]:
    """The tiny model's step for 8 chips, compiled at full effort."""
    before = locks()
    yield compile_step(small(tiny), "v5e", num_replicas=8, progress=False, cache_dir=cache)
    assert locks() == before, "a lock or a folder was left behind"


# -------------------------------------------------------------------------------------------------------- the answer


@needs_libtpu
def test_the_step_of_eight_replicas_is_one_program_that_writes_over_its_state(eight: Compiled) -> None:
    assert eight.topology == "v5e:2x4"
    # All gradients, the loss and the number of tokens are reduced in one collective.
    trained = 2 * 16 * (2 * 512 + 2 * 384 + 3 * 768)  # layers x rank x (inputs + outputs)
    assert [(one.kind, one.count) for one in eight.collectives] == [("all-reduce", 1)]
    assert 4 * trained <= eight.collectives[0].bytes < 4 * trained + 1024
    # Parameters and both moments, fp32, are updated in place; the other outputs are a few numbers for the log.
    assert eight.aliased_bytes is not None and eight.output_bytes is not None
    assert 3 * 4 * trained <= eight.aliased_bytes < 3 * 4 * trained + 4096
    assert 0 <= eight.output_bytes - eight.aliased_bytes <= 4096


@needs_libtpu
def test_its_sizes_add_up_and_fit(eight: Compiled) -> None:
    assert eight.argument_bytes and eight.temporary_bytes and eight.code_bytes
    assert eight.output_bytes is not None and eight.aliased_bytes is not None
    new = eight.output_bytes - eight.aliased_bytes
    assert eight.total_bytes == eight.argument_bytes + new + eight.temporary_bytes + eight.code_bytes
    assert eight.limit_bytes == chips.chip("v5e").usable_hbm_bytes
    assert eight.fits and eight.out_of_memory is None
    weights = 2048 * 256 + 2 * (256 * (256 + 256 + 128 + 128) + 3 * 256 * 512)
    assert 2 * weights < eight.argument_bytes < 2 * weights + 3 * 600_000 + 500_000
    # Forward, recomputed forward and the gradient of the input: 2 FLOPs per weight and token in each pass; the head is
    # not recomputed. Attention: in both layers 2 matrix products forward, twice, and 5 backward.
    least = (6 * (weights - 2048 * 256) + 4 * 2048 * 256) * 4 * 256 + 2 * (2 * 2 + 5) * 2 * 4 * 256**2 * 256
    assert eight.flops is not None and 1.0 < eight.flops / least < 1.3
    assert eight.bytes_accessed is not None and eight.bytes_accessed > 5 * eight.argument_bytes
    assert eight.hbm_bytes is not None and eight.argument_bytes / 2 < eight.hbm_bytes
    assert str(eight).startswith("fits v5e:2x4: 0.0")


@needs_libtpu
def test_its_arguments_are_those_of_the_formula(eight: Compiled, tiny: Path) -> None:
    found = estimate(small(tiny, "device_type=tpu"), num_replicas=8)
    assert found.argument_bytes == pytest.approx(eight.argument_bytes, rel=0.05)


@needs_libtpu
def test_costs_are_those_of_the_models_operations(eight: Compiled) -> None:
    flops, size = (sum(getattr(one, name) for one in eight.operations) for name in ("flops", "bytes"))
    assert (flops, size) == (pytest.approx(eight.flops), pytest.approx(eight.hbm_bytes))
    assert {one.kind for one in eight.operations} == {"matrix product", "kernel", "collective", "copy", "elementwise"}
    assert any("mlp" in one.operation for one in eight.operations if one.kind == "matrix product")
    assert any(one.source.startswith("transformers/") for one in eight.operations)
    assert not any(one.source.startswith("/") for one in eight.operations)


@needs_libtpu
def test_its_time_is_estimated_by_kind_of_work(eight: Compiled) -> None:
    """Its lower bound is the FLOPs at the chip's peak, its upper bound a hundred times that: the model is tiny."""
    assert {"base products", "adapters", "loss", "attention kernel", "optimizer"} <= eight.estimated.keys()
    peak = (eight.flops or 0) / 197e12
    assert peak < sum(eight.estimated.values()) < 100 * peak
    assert f"{1000 * sum(eight.estimated.values()):.1f} ms by its cost model" in str(eight)


@needs_libtpu
def test_a_second_call_compiles_nothing(eight: Compiled, tiny: Path, cache: Path, tmp_path: Path) -> None:
    start = time.monotonic()
    again = compile_step(small(tiny), "v5e", num_replicas=8, progress=False, cache_dir=cache)
    assert time.monotonic() - start < 3 and again == replace(eight, cached=True)
    # Another folder and learning rate: the step is traced again, and gives the same program.
    other = small(write_config(tmp_path / "other", TINY), "learning_rate=1e-3")
    known = compile_step(other, "v5e:2x4", num_replicas=8, progress=False, cache_dir=cache)
    assert known == replace(eight, cached=True)
    assert len(list(cache.glob("plan-*.json"))) == 2 and len(list(cache.glob("[0-9a-f]*.json"))) == 1
    assert Compiled.from_dict(json.loads(json.dumps(asdict(eight)))) == eight


@pytest.mark.slow
@needs_libtpu
def test_between_slices_the_hosts_reduce_what_a_slice_has_reduced(tiny: Path, tmp_path: Path) -> None:
    config = small(tiny, "mesh=data=2")
    two = compile_step(config, "2xv5e:1x1", num_replicas=2, effort="low", progress=False, cache_dir=tmp_path)
    assert two.topology == "2xv5e:1x1" and two.fits
    between = {one.kind: one for one in two.collectives if one.over_dcn}
    trained = 2 * 16 * (2 * 512 + 2 * 384 + 3 * 768)  # layers x rank x (inputs + outputs)
    moved = between["all-reduce between slices"]
    assert moved.over_dcn and moved.moved == pytest.approx(2 * trained, rel=0.02)  # bf16
    found = predicted_collectives(
        config, read_shape(config.model), batch_arithmetic(config, 2), Mesh(2, 1, 1), slices=2
    )
    assert moved.moved == pytest.approx(sum(one.moved for one in found), rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_libtpu
@pytest.mark.parametrize(
    ("mesh", "kv_heads", "kinds"),
    [
        ("fsdp=4,context=2", 8, {"all-to-all": ["all-to-all of heads", "all-to-all of embeddings"]}),
        ("fsdp=2,context=4", 2, {"collective-permute": ["exchange of queries"]}),
    ],
)
def test_attention_over_a_context_axis_has_the_collectives_that_are_predicted(
    tmp_path: Path, mesh: str, kv_heads: int, kinds: dict[str, list[str]]
) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 2}
    model = write_config(tmp_path / "model", LLAMA_8B, **sizes, num_key_value_heads=kv_heads, head_dim=128)
    config = small(model, f"mesh={mesh}", "batch_size=1", "max_length=4096", "remat=full")
    found = compile_step(config, "v5e:2x4", num_replicas=8, effort="low", progress=False, cache_dir=tmp_path)
    sizes_of = Mesh(**parse_mesh(mesh))
    plan = batch_arithmetic(config, sizes_of.batch_shards)
    predicted = {one.kind: one for one in predicted_collectives(config, read_shape(config.model), plan, sizes_of)}
    compiled = {one.kind: one for one in found.collectives}
    print({kind: (one.count, one.moved) for kind, one in predicted.items()})
    print({kind: (one.count, one.moved) for kind, one in compiled.items()})
    for kind, names in kinds.items():
        assert compiled[kind].moved == pytest.approx(sum(predicted[name].moved for name in names), rel=0.05)
        assert compiled[kind].count == pytest.approx(sum(predicted[name].count for name in names), abs=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_libtpu
def test_the_gradient_of_the_embedding_stays_in_its_shards(tmp_path: Path) -> None:
    """Without `partition.embedding_by_columns` it is whole on each device: f32[128256,4096], 6.2 GiB in all."""
    model = write_config(tmp_path / "model", LLAMA_8B, num_hidden_layers=2)
    config = small(model, "mesh=data=2,fsdp=64", "lora.r=0", "optimizer=adafactor", "batch_size=1", "max_length=1024")
    found = compile_step(config, "2xv5e:8x8", num_replicas=128, progress=False, cache_dir=tmp_path)
    assert found.fits and found.total_bytes < 2 * GIB


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_libtpu
def test_computation_hides_the_gathers_of_a_layers_first_products(tmp_path: Path) -> None:
    """Without `partition.gathered_early` 11 % of the gathered bytes are synchronous."""
    recorded = json.loads((Path(__file__).parents[1] / "recorded_memory.json").read_text())
    model = write_config(tmp_path / "model", recorded["models"]["qwen3-32b"], num_hidden_layers=8)
    config = small(model, "mesh=fsdp=8", "lora.r=16", "batch_size=1", "max_length=1024")
    found = compile_step(config, "v5e:2x4", num_replicas=8, progress=False, cache_dir=tmp_path)
    (gathers,) = (one for one in found.collectives if one.kind == "all-gather")
    assert gathers.synchronous < 0.03 * gathers.moved


@pytest.mark.slow
@needs_libtpu
def test_out_of_memory_is_a_result_and_two_replicas_have_an_all_reduce(tiny: Path, tmp_path: Path) -> None:
    two = compile_step(small(tiny), "v5e", num_replicas=2, effort="low", progress=False, cache_dir=tmp_path)
    assert two.topology == "v5e:2x2" and [one.count for one in two.collectives] == [1]
    big = write_config(
        tmp_path / "big", TINY, vocab_size=2_500_000, hidden_size=4096, num_attention_heads=32, num_hidden_layers=1
    )
    config = small(big, "max_length=128", "batch_size=1", "loss_chunk=128", "lora.targets=[o_proj]")
    result = compile_step(config, "v5e", effort="low", progress=False, cache_dir=tmp_path)
    assert not result.fits and result.total_bytes > result.limit_bytes and result.temporary_bytes is None
    assert result.argument_bytes is not None and result.argument_bytes > 2_500_000 * 4096 * 2
    assert result.out_of_memory is not None and "RESOURCE_EXHAUSTED" in result.out_of_memory
    assert str(result).startswith("does not fit v5e:1x1: ")


@needs_libtpu
def test_what_is_asked_of_the_child(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub model needs no network if the kit has its shape."""
    asked = []

    def stop(request: dict[str, Any], *_: Any) -> None:
        asked.append(request["config"]["model"])
        raise RuntimeError("enough")

    monkeypatch.setattr(compile_check, "_in_child", stop)
    monkeypatch.setattr(compile_check, "check_available", lambda *_: "0.0.21")
    hub = load_config(None, ["model.name=Qwen/Qwen2.5-0.5B-Instruct", "batch_size=1"])
    with pytest.raises(RuntimeError, match="enough"):
        compile_step(hub, "v5e", cache_dir=tmp_path)
    built = settings_of(ModelConfig(**asked[0]))
    assert (built.model_type, built.hidden_size) == ("qwen2", 896)


@needs_libtpu
def test_the_key_follows_from_all_that_makes_the_program(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It depends on the replicas, the settings, the model's shape, and the code."""
    ignored = shutil.ignore_patterns("*.safetensors", "__pycache__")
    source = shutil.copytree(REPOSITORY / "tpu_kit", tmp_path / "tpu_kit", ignore=ignored)
    monkeypatch.setattr(compile_check, "__file__", str(source / "planning/compiler/compile_check.py"))
    monkeypatch.setattr(compile_check, "_source", compile_check._source.__wrapped__)  # without its cache

    def key(model: Path = tiny, replicas: int = 1, *changes: str) -> str:
        return compile_check._request_key(small(model, *changes), replicas, "step", None)

    other = write_config(tmp_path / "other", TINY, rms_norm_eps=1e-6)
    keys = [key(), key(tiny, 2), key(tiny, 1, "lora.r=3"), key(other)]
    with (source / "training/losses/loss.py").open("a") as file:
        file.write("# changed\n")
    keys.append(key())
    assert len(set(keys)) == len(keys) and key() == keys[-1]


# ----------------------------------------------------------------------------------------------- the child process

CANCELLED = """
import signal
import sys
from pathlib import Path
from tpu_kit.planning.compiler.compile_check import compile_step
from tpu_kit.config.loader import load_config
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell and their children ignore it
try:
    compile_step(load_config(None, [f"model.name={sys.argv[1]}"]), "v5e", cache_dir=Path(sys.argv[2]))
except KeyboardInterrupt:
    print("cancelled", flush=True)
"""


@needs_libtpu
@pytest.mark.parametrize("stop", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_nothing_goes_on_when_the_caller_is_stopped(stop: signal.Signals, tiny: Path, tmp_path: Path) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    environment = child_environment({"TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[2])})
    caller = subprocess.Popen(
        [sys.executable, "-c", CANCELLED, str(tiny), str(cache)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert caller.stderr is not None
    assert "tracing" in caller.stderr.readline()
    children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
    assert len(children) == 1
    caller.send_signal(stop)
    output, _ = caller.communicate(timeout=30)
    assert output == ("cancelled\n" if stop == signal.SIGINT else "")
    deadline = time.monotonic() + 10
    while _runs(children[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(children[0]) and not cache.exists()
    assert stop == signal.SIGKILL or not list(temporary.iterdir())


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_libtpu
def test_a_child_that_dies_is_told(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_check, "check_available", lambda *_: "0.0.21")
    monkeypatch.setattr(compile_check.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the process that compiles ended with status 1"):
        compile_step(small(tiny), "v5e", progress=False, cache_dir=tmp_path)


def test_the_caller_touches_no_device_and_needs_no_torch_xla() -> None:
    code = (
        "import sys; from tpu_kit.machine.slices import find_topology; find_topology('v5e', 8); "
        "print([name for name in ('torch_xla', 'jax', 'libtpu', 'torch') if name in sys.modules])"
    )
    assert run_python(code).stdout == "[]\n"


def test_without_the_compiler_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    monkeypatch.setattr(compile_check, "_NEEDED", ("tpu_kit", "no_such_package"))
    with pytest.raises(CompilerUnavailable, match=r"needs no_such_package, not installed here: pip install -r req"):
        compile_step(small(tiny), "v5e")
    monkeypatch.setattr(compile_check, "_NEEDED", ())
    monkeypatch.setattr(compile_check, "version", lambda name: "0.0.34")
    with pytest.raises(CompilerUnavailable, match=r"libtpu is 0\.0\.34; .* pip install libtpu==0\.0\.21"):
        compile_step(small(tiny), "v5e")


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("chip", "replicas", "text"),
    [
        ("v5f", 1, r"unknown chip 'v5f': did you mean .*v5e"),
        ("v5e:3x3", 1, r"there is no topology v5e:3x3: did you mean v5e:\dx\d\? Known: v5e:1x1, v5e:2x2"),
        ("v5e:2x2", 8, r"num_replicas=8: v5e:2x2 has 4 devices; use 1 to that many"),
        ("v5e", 0, r"num_replicas=0: v5e:16x16 has 256 devices"),
        ("v7x", 1, r"libtpu cannot compile for v7x; it can for v4, v5e, v5p, v6e"),
        ("h100", 1, r"cannot compile for h100"),
    ],
)
def test_slices_that_do_not_exist(chip: str, replicas: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        find_topology(chip, replicas)


@pytest.mark.parametrize(
    ("chip", "replicas", "name"),
    [("v5e", 1, "v5e:1x1"), ("TPU v5 lite", 2, "v5e:2x2"), ("v4", 4, "v4:2x2x1"), ("v5litepod:4x4", 3, "v5e:4x4")],
)
def test_the_smallest_slice_with_room(chip: str, replicas: int, name: str) -> None:
    assert find_topology(chip, replicas)[1].name == name


@needs_libtpu
def test_a_config_json_without_sizes_is_refused(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", TINY, hidden_size=None, num_hidden_layers=None)
    with pytest.raises(ValueError, match=r"its config.json lacks hidden_size, num_hidden_layers; take the whole"):
        compile_step(small(model), "v5e", progress=False, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


# ------------------------------------------------------------------------------------------------------ real shapes


@pytest.mark.slow
@needs_libtpu
@pytest.mark.timeout(3000)
def test_qwen_of_half_a_billion(tmp_path: Path) -> None:
    model = write_config(tmp_path / "qwen", QWEN2_500M)
    config = load_config(None, [f"model.name={model}", "max_length=1024", "batch_size=4"])
    full = compile_step(config, "v5e", cache_dir=tmp_path)
    # Plain checkpointing with sdpa and full logits needs 3.1 GiB and moves 199.5 GB.
    assert full.fits and full.total_bytes < 2.7 * GIB
    assert full.bytes_accessed is not None and full.bytes_accessed < 130e9
    print(full)


@pytest.mark.slow
@needs_libtpu
def test_eight_billion_parameters_are_traced_in_six_gib(tmp_path: Path) -> None:
    model = write_config(tmp_path / "llama", LLAMA_8B)
    code = (
        "import sys, resource; from tpu_kit.config.loader import load_config; "
        "from tpu_kit.planning.compiler.trace import trace_step; "
        "from tpu_kit.xla.compiler import fingerprint; "
        "program = trace_step(load_config(None, ['model.name=' + sys.argv[1]]), 1); fingerprint(program); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, len(program.donated), flush=True); "
        "import os; os._exit(0)"
    )
    done = run_python(["-c", code, str(model)], env=compile_check._ENVIRONMENT)
    host_bytes, donated = map(int, done.stdout.split())
    assert host_bytes < 6 * GIB
    assert donated >= 3 * 2 * 7  # adapters, stacked or not, and the moments
    print(f"{host_bytes / GIB:.2f} GiB of host memory")


@pytest.mark.slow
@needs_libtpu
def test_a_program_is_the_same_wherever_the_kit_lies(tiny: Path, tmp_path: Path) -> None:
    """A kernel records the lines of its source code; their folder must not change the program's hash."""
    code = (
        "import os, sys; from tpu_kit.config.loader import load_config; "
        "from tpu_kit.planning.compiler.trace import trace_step; "
        "from tpu_kit.xla.compiler import fingerprint; "
        "print(fingerprint(trace_step(load_config(None, ['model.name=' + sys.argv[1], 'max_length=256']), 1)), "
        "sys.modules['tpu_kit'].__file__, flush=True); os._exit(0)"
    )
    elsewhere = shutil.copytree(REPOSITORY / "tpu_kit", tmp_path / "elsewhere" / "tpu_kit").parent
    found = [
        run_python(["-c", code, str(tiny)], env={**compile_check._ENVIRONMENT, **path}, cwd=tmp_path).stdout.split()
        for path in ({}, {"PYTHONPATH": str(elsewhere)})
    ]
    assert found[1][1].startswith(str(elsewhere)) and found[0][1] != found[1][1]
    assert found[0][0] == found[1][0]


def test_an_interrupted_write_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"chip": "v5e"')
    assert compile_check._read(tmp_path / "one.json") is None and compile_check._read(tmp_path / "two.json") is None
