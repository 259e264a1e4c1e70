"""Tensors on the virtual devices of a mesh: each device holds only its shard, and reading joins the shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.child_processes import run_loaded
from tpu_kit.config.mesh import Mesh, Spec
from tpu_kit.distributed.replica import mesh as mesh_module
from tpu_kit.distributed.replica.mesh import boxes, pieces, put, put_rows, put_stack, row_shards, use_mesh
from tpu_kit.machine.checks import Machine

CODE = """
import json
import torch, torch_xla
from tpu_kit.config.mesh import Mesh
from tpu_kit.distributed.replica.mesh import put, read, start
from tpu_kit.xla.sharding import constrain

start(Mesh(2, 2, 2))
whole = torch.arange(64.0).reshape(8, 8)
spec = (("model", "fsdp"), "data")
sharded, replicated = put(whole, spec), put(whole, (None, None))
shapes = lambda tensor: [list(shard.shape) for shard, _ in torch_xla._XLAC._get_local_shards([tensor])[0]]
doubled = constrain(replicated * 2, spec)
odd = constrain(replicated[:, :5] * 2, (None, ("model", "fsdp")), uneven=True)
total = odd.sum(0)
wanted = [whole, whole, whole * 2, whole[:, :5].sum(0) * 2]
torch_xla.sync()
back = read([sharded, replicated, doubled, total])
print(json.dumps({"sharded": shapes(sharded), "replicated": shapes(replicated), "doubled": shapes(doubled),
                  "odd": shapes(odd), "equal": list(map(torch.equal, back, wanted))}))
"""


@pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
def test_each_device_holds_its_shard_and_reading_joins_them() -> None:
    done = run_loaded(["-c", CODE], env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"})
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sharded"] == found["doubled"] == [[2, 4]] * 8
    assert found["odd"] == [[8, 2]] * 8  # five columns over four devices
    assert found["replicated"] == [[8, 8]] * 8
    assert found["equal"] == [True] * 4


# ------------------------------------------------------------------------------------------ a slice of several hosts

MESH = Mesh(2, 2, 2)
HOSTS = ([0, 1, 4, 5], [2, 3, 6, 7])  # as the devices of v5e:4x2 lie on hosts of 2x2
SPECS: tuple[Spec, ...] = ((("model", "fsdp"), "data"), (None, "model"), ("fsdp", None), (None, None))


class Hosts:
    """The hosts' runtimes; each host takes one shard per device, in the order of the devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[int, torch.Tensor] = {}
        self.devices: Sequence[int] = ()
        monkeypatch.setattr(mesh_module, "local_devices", lambda: self.devices)
        monkeypatch.setattr(mesh_module, "_of_shards", self.take)
        monkeypatch.setattr(mesh_module, "_sharded", lambda tensors: [True] * len(tensors))
        monkeypatch.setattr(mesh_module, "_shards", lambda spec: self.parts(spec.spec, spec.shape))

    def take(self, shards: list[torch.Tensor], spec: Spec, shape: torch.Size) -> torch.Tensor:
        assert all(one.is_contiguous() for one in shards)
        self.held |= dict(zip(self.devices, shards, strict=True))
        self.shape, self.spec = shape, spec
        return torch.zeros(())

    def whole(self) -> torch.Tensor:
        """The tensor of all devices; equal shards must hold the same."""
        found = torch.full(self.shape, torch.nan)
        for device, box in enumerate(boxes(MESH, self.spec, self.shape)):
            assert bool(found[box].isnan().all()) or torch.equal(found[box], self.held[device])
            found[box] = self.held[device]
        return found

    def parts(self, spec: Spec, shape: torch.Size) -> Any:
        places = [str(box) for box in boxes(MESH, spec, shape)]
        for device, box in zip(self.devices, boxes(MESH, spec, shape, self.devices), strict=True):
            yield device, places[:device].count(str(box)), box, self.held[device]


@pytest.mark.parametrize("spec", SPECS)
def test_each_host_gives_and_saves_the_shards_of_its_devices(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, hosts = torch.arange(64.0).reshape(8, 8), Hosts(monkeypatch)
    with use_mesh(MESH):
        for hosts.devices in HOSTS:
            put(whole, spec)
        assert torch.equal(hosts.whole(), whole)
        saved = torch.zeros(8, 8)
        for hosts.devices in HOSTS:
            tensor = torch.empty(8, 8)
            tensor.spec = spec  # type: ignore[attr-defined]  # for `Hosts.parts`
            for box, part in pieces([tensor], hosts.devices)[0]:
                saved[box] += part
        assert torch.equal(saved, whole), "each number is saved once"
        hosts.held.clear()
        for hosts.devices in HOSTS:
            put_stack(list(whole[:, None].expand(8, 4, 8)), (None, *spec[:1], None), torch.float32)
        assert torch.equal(hosts.whole(), whole[:, None].expand(8, 4, 8))


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2), Mesh(fsdp=8), Mesh(2, 4, 1), Mesh(1, 1, 8)], ids=str)
def test_each_host_gives_its_own_rows_and_none_is_lost(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, hosts = torch.arange(48.0).reshape(24, 2), Hosts(monkeypatch)
    given = []
    with use_mesh(mesh):
        for hosts.devices in HOSTS:
            mine = sorted(set(row_shards(mesh, hosts.devices)))  # as `shard_rows` selects rows
            put_rows(whole.reshape(mesh.batch_shards, -1, 2)[mine].reshape(-1, 2))
            given += mine
        monkeypatch.setattr("tests.distributed.test_mesh.MESH", mesh)
        assert hosts.shape == whole.shape and torch.equal(hosts.whole(), whole)
    assert set(given) == set(range(mesh.batch_shards))
    assert len(given) == mesh.batch_shards or mesh.model > 1, "a model axis over hosts alone gives them the same rows"
