"""The choice between replicas and a mesh, its reason and report, and its collectives against the compiler's."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.machine.test_checks import V5E, fake
from tests.planning.test_memory_estimate import ANSWERS, configuration, name_of
from tests.support.compiler_models import LLAMA_8B, QWEN2_500M, write_config
from tpu_kit.cli import main
from tpu_kit.config.loader import ConfigError, TrainConfig, batch_arithmetic, load_config
from tpu_kit.config.mesh import Mesh, resolve_mesh
from tpu_kit.distributed import detection
from tpu_kit.machine.chips import chip
from tpu_kit.machine.slices import find_slice
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.planning.cost import link_seconds, predicted_collectives, step_time, work
from tpu_kit.planning.mesh_choice import largest_models, placed
from tpu_kit.planning.planner import Plan, plan
from tpu_kit.planning.preflight import check_before_launch
from tpu_kit.planning.report import collective_rows, format_plans, mesh_lines, next_parameters, tensor_rows

SLICE = "v5litepod-8"
SHARDED = [one for one in ANSWERS if "collectives" in one]


def run(model: Path | str, *settings: str) -> TrainConfig:
    return load_config(None, [f"model.name={model}", "max_steps=10", *settings])


def planned(*settings: str, model: str = "meta-llama/Llama-3.1-8B") -> Plan:
    (found,) = plan(run(model, *settings), [SLICE])
    return found


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(detection, "gpu_count", lambda: 0)
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return fake(tmp_path / "root", *[V5E] * 8)


# ----------------------------------------------------------------------------------------------------------- the choice


def test_a_model_that_fits_a_chip_has_replicas() -> None:
    found = planned(model="Qwen/Qwen3-0.6B")
    assert found.where.mesh is None and found.config.launch.mesh is None and found.fits
    assert found.note.startswith("launch.mesh=null: a replica on each of the 8 devices, which takes 1.")


@pytest.mark.parametrize("setting", ["mesh=null", "mesh=auto"])
def test_a_larger_one_has_the_smallest_mesh_that_holds_it(setting: str) -> None:
    found = planned(setting)
    assert found.fits and str(found.where.mesh) == found.config.launch.mesh == "data=4,fsdp=2"
    assert f"launch.{setting}: a replica on each device takes 16." in found.note
    assert "so mesh=data=4,fsdp=2, which holds it in" in found.note and " s with replicas" in found.note
    assert found.where.replicas == 8 and 8 < found.peak_bytes / 2**30 < 14.5
    assert "mesh = 'data=4,fsdp=2'" in next_parameters(found)


def test_devices_share_the_tokens_of_rows_that_fit_no_other_mesh() -> None:
    found = planned("max_length=65536", "batch_size=1", "remat=full")
    assert found.fits and str(found.where.mesh) == "fsdp=2,context=4"
    assert "so mesh=fsdp=2,context=4, which holds it in 10." in found.note
    kinds = {one.kind: one for one in found.collectives}
    # 32 layers, forward, recomputed and backward; queries, keys, values and outputs of 32, 8, 8 and 32 heads in bf16.
    tokens, numbers = 65536 // 4, (32 + 8 + 8 + 32) * 128
    assert kinds["all-to-all of heads"].count == 4 * 3 * 32
    assert kinds["all-to-all of heads"].moved == 3 * 32 * tokens * numbers * 2 * 3 / 4
    # A device has as many tokens as with a row of 16,384, and thus as much traffic between matrix products.
    shared, alone = (
        planned(f"mesh={mesh}", f"max_length={length}", "batch_size=1", "remat=full")
        for mesh, length in (("context=8", 131072), ("fsdp=8", 16384))
    )
    assert shared.settings[0].time.memory == pytest.approx(alone.settings[0].time.memory, rel=0.2)
    few_heads = planned("mesh=context=8", "max_length=32768", "batch_size=1", model="Qwen/Qwen2.5-7B-Instruct")
    assert {"all-gather of keys", "exchange of queries"} <= {one.kind for one in few_heads.collectives}


@pytest.mark.parametrize(
    ("model", "settings", "text"),
    [
        ("Qwen/Qwen3.5-4B", [], "launch.mesh: fsdp=2,context=4: a layer that reads its tokens one after the other"),
        ("Qwen/Qwen3-30B-A3B", [], "launch.mesh: fsdp=2,context=4: a mixture of experts is not supported with an axis"),
        ("meta-llama/Llama-3.1-8B", ["max_length=1022"],
         "data.max_length: 1022 tokens do not divide by the context axis of launch.mesh=fsdp=2,context=4; use 1024,"),
        ("google/gemma-4-12B-it", ["model.images=true"], "launch.mesh: fsdp=2,context=4: model.images=true is not"),
    ],
)  # fmt: skip
def test_what_a_context_axis_does_not_support(model: str, settings: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        planned("mesh=fsdp=2,context=4", "batch_size=1", *settings, model=model)


def test_where_nothing_fits_the_advice_says_so_with_numbers() -> None:
    found = planned("batch_size=1", model="meta-llama/Llama-3.3-70B-Instruct")
    assert not found.fits and str(found.where.mesh) == "fsdp=8"
    assert "so mesh=fsdp=8, the largest fsdp axis, which does not hold it in 2" in found.note
    assert found.advice is not None and found.advice.smallest_slice is not None
    assert " with mesh=fsdp=" in found.advice.smallest_slice and "with mesh=" in str(found.advice)
    assert any(knob.change == "model.base_dtype=int8" and knob.fits for knob in found.advice.knobs)


def test_a_chip_alone_means_the_slice_of_the_mesh() -> None:
    config = run("meta-llama/Llama-3.1-8B", "mesh=fsdp=8", "batch_size=1")
    (found,) = plan(config)
    assert (found.where.name, str(found.where.mesh)) == (SLICE, "fsdp=8")
    with pytest.raises(ValueError, match=r"launch\.mesh=fsdp=8 is a mesh of 8 devices, and there are 4; use fsdp=4"):
        plan(config, ["v5litepod-4"])


def test_replicas_that_are_asked_for_stay() -> None:
    found = planned("num_replicas=8", "batch_size=1")
    assert found.where.mesh is None and not found.fits and found.advice is not None
    refused = planned("scan_layers=off", "lora.r=0", "batch_size=1")
    assert refused.where.mesh is None and "this run cannot be sharded over a mesh" in refused.note


def test_train_chooses_before_the_launch(eight: Any) -> None:
    found = check_before_launch(run("meta-llama/Llama-3.1-8B", "device_type=tpu", "batch_size=2"), at=eight)
    assert found.config.launch.mesh == "data=4,fsdp=2" and found.fits
    assert found.room is not None and found.room.replicas == 8 and found.time is not None
    text = str(found)
    assert "launch.mesh=null: a replica on each device takes 17." in text
    assert "so mesh=data=4,fsdp=2, which holds it in 9.84 GiB; predicted:" in text
    assert "devices [[0, 1], [2, 3], [4, 5], [6, 7]] by data, fsdp" in text
    open_batch = check_before_launch(run("Qwen/Qwen3-32B", "device_type=tpu", "batch_size=auto"), at=eight)
    assert (open_batch.config.launch.mesh, open_batch.config.optim.batch_size) == ("fsdp=8", 2)
    with pytest.raises(ValueError, match=r"launch\.mesh_rules: \*\.router\.weight matches no tensor"):
        rules = {"model.name": "Qwen/Qwen3-32B", "mesh": "fsdp=8", "mesh_rules": {"*.router.weight": "fsdp,None"}}
        check_before_launch(load_config(None, rules | {"device_type": "tpu", "max_steps": 1}), at=eight)


def test_auto_means_replicas_off_tpu(tmp_path: Path, eight: Any) -> None:
    small = write_config(tmp_path / "qwen", QWEN2_500M)
    found = check_before_launch(run(small, "device_type=cpu", "mesh=auto"), at=eight)
    assert found.config.launch.mesh is None
    assert detection.detect(run(small, "device_type=cpu", "mesh=auto").launch, eight).mesh is None
    with pytest.raises(ConfigError, match=r"launch\.mesh: 'auto' sets the number of devices itself"):
        run(small, "mesh=auto", "num_replicas=4")


def test_the_largest_models_of_a_slice(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["base_dtype"]: row for row in largest_models(find_slice(SLICE, None))}
    assert list(rows) == ["bf16", "int8", "int4"]
    assert float(str(rows["bf16"]["parameters"]).removesuffix("e9")) > 30
    assert all(float(str(rows[name]["parameters"]).removesuffix("e9")) > 70 for name in ("int8", "int4"))
    assert all(int(str(row["largest batch_size"])) >= 1 for row in rows.values())
    assert main(["plan", "--models", "--chip", SLICE]) == 0
    printed = capsys.readouterr().out
    assert "v5litepod-8: the largest models by formula" in printed and "int4" in printed


# ----------------------------------------------------------------------------------------------------------- the report


def test_a_plan_shows_devices_shards_and_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned("mesh=fsdp=4,model=2", "batch_size=1")
    text = format_plans(found.config, [found], details=True)
    assert "mesh fsdp=4,model=2: devices [[0, 1], [2, 3], [4, 5], [6, 7]] by fsdp, model; rows divided by 4" in text
    rows = {str(row["tensor"]): row for row in tensor_rows(found)}
    gate = rows["layers.*.mlp.gate_proj.base_layer.weight"]
    assert (gate["shape"], gate["spec"], gate["share"]) == ("32 x 14336 x 4096", "-, model+fsdp, -", "1/8")
    assert gate["MiB a device"] == "448.0" and "layers.*.mlp.gate_proj.base_layer.weight" in text
    kinds = [str(row["collective"]) for row in collective_rows(found)]
    assert kinds[0] == "all-gather of weights" and "all-reduce of activations" in kinds
    assert "collectives take" in text
    assert found.to_dict()["mesh"] == "fsdp=4,model=2" and found.to_dict()["collectives"][0]["moved"] > 1e9
    assert mesh_lines(planned(model="Qwen/Qwen3-0.6B")) == []


def test_replicated_adapters_show_in_the_table(tmp_path: Path) -> None:
    rules = {"*.lora_A.*": "None", "*.lora_B.*": "None"}
    values = {"model.name": "meta-llama/Llama-3.3-70B-Instruct", "max_steps": 1, "mesh": "fsdp=8", "batch_size": 1}
    (plain,) = plan(load_config(None, values), [SLICE])
    (found,) = plan(load_config(None, values | {"mesh_rules": rules}), [SLICE])
    rows = {str(row["tensor"]): row for row in tensor_rows(found)}
    assert rows["layers.*.mlp.up_proj.lora_B.default.weight"]["share"] == "whole"
    # With both moments: 2.3 GiB replicated, an eighth sharded.
    state = [sum(one.parts[name] for name in ("adapters", "optimizer")) / 2**30 for one in (found, plain)]
    assert state[0] == pytest.approx(2.3, abs=0.1) and state[1] == pytest.approx(state[0] / 8, rel=0.01)


# ---------------------------------------------------------------------------------------------- against the compiler


@pytest.mark.parametrize("answer", SHARDED, ids=name_of)
def test_collectives_are_those_of_the_compiled_program(answer: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(answer, tmp_path)
    shape, mesh = read_shape(config.model), resolve_mesh(config.launch.mesh or "", answer["replicas"])
    done = work(config, shape, batch_arithmetic(config, mesh.batch_shards), mesh)
    assert done.flops == pytest.approx(answer["flops"], rel=0.06)
    moved, wanted = sum(one.moved for one in done.collectives), sum(one["moved"] for one in answer["collectives"])
    assert moved == pytest.approx(wanted, rel=0.15 if mesh.size > 64 else 0.06)
    time = step_time(done, chip(answer["topology"].partition(":")[0]))
    assert 0 < time.all_reduce < max(time.compute, time.memory)


# ------------------------------------------------------------------------------------------------- several slices


def test_the_data_axis_spreads_over_slices(tmp_path: Path) -> None:
    model = write_config(tmp_path / "8b", LLAMA_8B)
    config = run(model, "lora.r=0", "batch_size=1", "optimizer=adafactor")
    shape, where = read_shape(config.model), find_slice("2xv5e:8x8", None)
    chosen, on, note = placed(config, shape, where)
    assert (chosen.launch.mesh, on.mesh, on.slices) == ("data=16,fsdp=8", Mesh(16, 8, 1), 2)
    assert "so mesh=data=16,fsdp=8" in note
    # A device has an eighth of the gradients in bf16, which its slice first reduces over 8 devices.
    (between,) = (one for one in predicted_collectives(chosen, shape, batch_arithmetic(chosen, 128), Mesh(16, 8, 1), 2)
                  if one.over_dcn)  # fmt: skip
    assert between.moved == pytest.approx(2 * shape.parameters / 8 / 8, rel=0.01)
    assert link_seconds([between], where.chip) == pytest.approx(between.moved / (3.125e9 * 0.7))
    # A model that fits a device also gets a mesh, with its weights on every device.
    small = load_config(None, {"model.name": "Qwen/Qwen2.5-0.5B-Instruct", "batch_size": 1, "max_steps": 1})
    assert str(placed(small, read_shape(small.model), where)[1].mesh) == "data=128"


def test_what_several_slices_cannot_have_is_refused(tmp_path: Path) -> None:
    model, where = write_config(tmp_path / "8b", LLAMA_8B), find_slice("2xv5e:8x8", None)
    config = run(model, "mesh=fsdp=128")
    text = r"data=1 does not divide by 2; the other axes would gather .* Use data=2,fsdp=-1"
    with pytest.raises(ConfigError, match=text):
        placed(config, read_shape(config.model), where)
    config = run(model, "num_replicas=128")
    with pytest.raises(ValueError, match=r"num_replicas=128: 2xv5litepod-64 is trained by a mesh; set launch.mesh="):
        placed(config, read_shape(config.model), where)


# ------------------------------------------------------------------------------------------ shipped configurations

SHIPPED = {
    "qwen-32b-kaggle": (SLICE, 10.6), "llama-70b-int4-kaggle": (SLICE, 10.9), "llama-8b-full-v6e-8": ("v6e-8", 25.0),
    "qwen3-30b-a3b-kaggle": (SLICE, 4.9), "gpt-oss-20b-kaggle": (SLICE, 5.9),
    "gpt-oss-120b-kaggle": (SLICE, 14.6),
}  # fmt: skip
"""Name -> the slice, and an upper bound for the GiB of a device, close to the formula."""


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_configuration_fits_its_slice(name: str) -> None:
    (found,) = plan(load_config(name), [SHIPPED[name][0]])
    assert found.fits and found.updates == 400
    assert 0.95 < found.peak_bytes / (SHIPPED[name][1] * 2**30) < 1.05
    assert str(found.where.mesh) == "fsdp=8" and found.config.optim.batch_size == load_config(name).optim.batch_size


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_configuration_compiles(name: str) -> None:
    where, most = SHIPPED[name]
    (found,) = plan(load_config(name), [where], exact=True)
    assert found.source == "compiler" and found.fits and found.peak_bytes <= most * 2**30
    assert found.compiled["step"].topology == found.where.topology
    text = format_plans(found.config, [found], details=True)
    assert "all-gather" in text and "synchronous" in text and "s predicted" in text


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_the_state_of_an_optimizer_is_counted_as_it_is_sharded(optimizer: str, tmp_path: Path) -> None:
    """Compared with the state that training makes on the meta device."""
    torch = pytest.importorskip("torch")
    from tpu_kit.distributed.replica.backends import TpuRuntime
    from tpu_kit.distributed.replica.mesh import use_mesh
    from tpu_kit.model import trainable
    from tpu_kit.model.meta_model import empty_model
    from tpu_kit.training.step import prepare_model
    from tpu_kit.xla import traced_program

    model = write_config(tmp_path / "qwen", QWEN2_500M, num_hidden_layers=4)
    config = run(model, "mesh=data=2,fsdp=4", f"optimizer={optimizer}", "lora.r=0", "batch_size=1", "attention=sdpa")
    mesh = resolve_mesh("data=2,fsdp=4", 8)
    with torch.device("meta"), use_mesh(mesh), traced_program.lowering_for_tpu():
        made = trainable.adapt(empty_model(config), config.lora, "bf16").train()
        state = prepare_model(made, config, TpuRuntime(0, 1, torch.device("meta")))
        held = sum(
            math.prod(mesh.shard_shape(mesh.fitted(state.spec(name, one), one.shape), one.shape)) * one.itemsize
            for name, moments in state.moments.items()
            for one in moments.values()
        )
    (found,) = plan(config, [SLICE])
    assert found.parts["optimizer"] == pytest.approx(held, rel=0.03)  # plus padding of tiles
