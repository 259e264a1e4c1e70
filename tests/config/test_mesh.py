"""The forms in which users write a mesh, and refusals with their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpu_kit.config.fields import ConfigError
from tpu_kit.config.loader import load_config
from tpu_kit.config.mesh import Mesh, environment_mesh, parse_rules, resolve_mesh


@pytest.mark.parametrize(
    ("text", "devices", "mesh"),
    [
        ("fsdp=8", 8, Mesh(1, 8, 1)),
        ("data=2, fsdp=-1", 8, Mesh(2, 4, 1)),
        ("model=4,fsdp=16", 64, Mesh(1, 16, 4)),
        ("data=-1", 4, Mesh(4, 1, 1)),
    ],
)
def test_a_mesh_is_read(text: str, devices: int, mesh: Mesh) -> None:
    assert resolve_mesh(text, devices) == mesh
    assert resolve_mesh(str(mesh), devices) == mesh


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fsdp=3", "launch.mesh=fsdp=3 is a mesh of 3 devices, and there are 8; use fsdp=8, or data=2,fsdp=4"),
        ("data=3,fsdp=-1", "3 does not divide the 8 devices, so nothing is left for -1; use fsdp=8"),
    ],
)
def test_a_mesh_of_another_number_of_devices(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match="devices") as error:
        resolve_mesh(text, 8)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mesh": "tensor=8"}, "has 'tensor=8'; write data=N, fsdp=N, context=N, model=N"),
        ({"mesh": "fsdp"}, "has 'fsdp'; write data=N"),
        ({"mesh": "fsdp=2,fsdp=4"}, "names fsdp twice"),
        ({"mesh": "fsdp=0"}, "gives fsdp the size '0'; use 1 or more, or -1"),
        ({"mesh": "fsdp=--1"}, "gives fsdp the size '--1'; use 1 or more, or -1"),
        ({"mesh": "fsdp=-1,data=-1"}, "has -1 twice"),
        ({"mesh": "fsdp=8", "num_replicas": 8}, "sets the number of devices itself; remove launch.num_replicas"),
        ({"mesh": "fsdp=8", "device_type": "cuda"}, "needs XLA, and launch.device_type=cuda"),
        ({"mesh": "fsdp=4,model=2", "base_dtype": "int4"}, "splits columns, but int4 packs two columns in a byte"),
        ({"mesh": "fsdp=8", "scan_layers": "off"}, "needs layers that run as a loop"),
        ({"mesh": "fsdp=8", "remat": "none"}, "needs layers that run as a loop, and loops recompute; set optim.remat="),
    ],
)
def test_what_a_mesh_cannot_be_with(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, changes)
    assert error.value.problems[0].startswith("launch.mesh: ")
    assert problem in error.value.problems[0]


def test_yaml_may_give_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("launch:\n  mesh: {data: 2, fsdp: -1}\n")
    config = load_config(tmp_path / "run.yaml")
    assert config.launch.mesh == "data=2,fsdp=-1"
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml") == config


def test_the_variables_of_published_guides() -> None:
    both = {"TPU_MESH_CONFIG": "4,4,2", "TPU_AXIS_NAMES": "data,model,fsdp"}
    assert environment_mesh(both) == "data=4,model=4,fsdp=2"
    assert environment_mesh({}) is None
    with pytest.raises(ValueError, match="both are needed, with a size for each name"):
        environment_mesh({"TPU_MESH_CONFIG": "4,4"})
    with pytest.raises(ValueError, match="TPU_AXIS_NAMES=data,tensor: the mesh has 'tensor=2'"):
        environment_mesh({"TPU_MESH_CONFIG": "4,2", "TPU_AXIS_NAMES": "data,tensor"})


def test_every_command_reads_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_MESH_CONFIG", "1,8,1")
    with pytest.raises(ConfigError, match="both are needed, with a size for each name"):
        load_config()
    monkeypatch.setenv("TPU_AXIS_NAMES", "data,fsdp,model")
    config = load_config()
    assert (config.launch.mesh, config.sources["launch.mesh"]) == ("data=1,fsdp=8,model=1", "environment")
    assert load_config(None, "mesh=fsdp=4").launch.mesh == "fsdp=4"


def test_devices_are_numbered_with_the_last_axis_fastest() -> None:
    mesh = Mesh(2, 2, 2)
    assert mesh.coordinates(0) == {"data": 0, "fsdp": 0, "context": 0, "model": 0}
    assert mesh.coordinates(5) == {"data": 1, "fsdp": 0, "context": 0, "model": 1}
    assert Mesh(fsdp=2, model=2, context=3).coordinates(9) == {"data": 0, "fsdp": 1, "context": 1, "model": 1}
    assert mesh.shard_shape((("model", "fsdp"), None), (8, 3)) == (2, 3)
    assert mesh.fitted((("model", "fsdp"), "data"), (6, 4)) == (None, "data")


def test_weights_are_sharded_over_context_too_and_rows_are_not() -> None:
    mesh, spec = Mesh(data=2, fsdp=2, model=2, context=4), (("model", "fsdp"), None)
    assert mesh.over_weights(spec) == (("model", "fsdp", "context"), None)
    assert mesh.over_weights(("fsdp", "model")) == (("fsdp", "context"), ("model",))
    assert (mesh.size, mesh.batch_shards, mesh.weight_shards) == (32, 4, 8)
    assert Mesh(fsdp=2).over_weights(spec) == spec


def test_heads_that_a_mesh_does_not_divide_are_told_with_their_numbers() -> None:
    text = "2 key-value heads do not divide by model=4; use a smaller model axis, and fsdp for the rest"
    assert Mesh(model=4).problems(heads=32, kv_heads=2) == [f"launch.mesh: model=4: {text}"]
    assert Mesh(fsdp=8).problems(heads=14, kv_heads=2) == []


def test_the_layout_names_each_device() -> None:
    assert Mesh(2, 2, 2).layout() == "[[[0, 1], [2, 3]], [[4, 5], [6, 7]]] by data, fsdp, model"
    assert Mesh(fsdp=4).layout() == "[0, 1, 2, 3] by fsdp"


def test_rules_are_read() -> None:
    rules = parse_rules({"*.router.weight": "fsdp,None", "*.x.weight": "None, model+fsdp"})
    assert rules == (("*.router.weight", (("fsdp",), None)), ("*.x.weight", (None, ("model", "fsdp"))))
    assert resolve_mesh("fsdp=8", 8, {"*.router.weight": "fsdp"}).rules == (("*.router.weight", (("fsdp",),)),)


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"*.x": "tensor,None"}, "*.x: 'tensor,None' has 'tensor'; a dimension is fsdp, model, model+fsdp or None"),
        ({"*.x": "data"}, "has 'data'; a dimension is fsdp"),
        ({"*.x": "fsdp,fsdp"}, "*.x: 'fsdp,fsdp' has fsdp twice; an axis shards one dimension"),
        ({"*.x": "model+model"}, "has model twice"),
    ],
)
def test_rules_that_contradict_themselves(rules: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, {"mesh_rules": rules})
    assert error.value.problems[0].startswith("launch.mesh_rules: ")
    assert problem in error.value.problems[0]


def test_a_glob_given_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text('launch:\n  mesh_rules:\n    "*.x": fsdp\n    "*.x": model\n')
    with pytest.raises(ConfigError, match=r"line 4: not valid YAML: found duplicate key \*\.x"):
        load_config(tmp_path / "run.yaml")
