"""Checkpoints written by several hosts: every host writes its devices' shards, and there is one commit."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.training_functions import OPTIM, tiny
from tpu_kit.config.loader import load_config
from tpu_kit.config.mesh import Mesh, Spec
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.distributed.replica.mesh import Box, boxes, use_mesh
from tpu_kit.training.checkpoint import host_parts as parts_module
from tpu_kit.training.checkpoint.local_store import FolderStore
from tpu_kit.training.checkpoint.manager import CheckpointManager, HostParts, list_checkpoints
from tpu_kit.training.optimizer import OPTIMIZERS
from tpu_kit.training.state import TrainState, joined, read_tensors

CPU = torch.device("cpu")
MESH = Mesh(data=2, fsdp=2, model=2)
HOSTS = {2: [[0, 1, 4, 5], [2, 3, 6, 7]], 4: [[0, 1], [2, 3], [4, 5], [6, 7]]}  # by host, as in v5e:4x2, and in rows


class Host(CpuRuntime):
    """A host with some of the mesh's devices; `specs` are the shardings of the next tensors to read."""

    def __init__(self, devices: Sequence[int]) -> None:
        super().__init__(0, 1, CPU)
        self.devices, self.specs = devices, list[Spec]()

    def pieces(self, tensors: Sequence[torch.Tensor]) -> list[list[tuple[Box, torch.Tensor]]]:
        found = []
        for tensor, spec in zip(tensors, self.specs, strict=True):
            places = boxes(MESH, MESH.fitted(spec, tensor.shape), tensor.shape)
            first = {str(box): (device, box) for device, box in reversed(list(enumerate(places)))}
            found.append([(box, tensor[box].detach().clone()) for device, box in first.values()
                          if device in self.devices])  # fmt: skip
        return found


def example(optimizer: str) -> tuple[TrainState, list[Spec]]:
    """Returns a state with an average, all of whose numbers differ, and the specs of its tensors."""
    model = tiny()
    state = TrainState(model, CPU, replace(OPTIM, optimizer=optimizer, ema_decay=0.9))
    tensors = state.tensors()
    for number, tensor in enumerate(tensors.values()):
        with torch.no_grad():
            tensor.copy_((torch.arange(tensor.numel()) % 120 + number).view_as(tensor))
    params = {name: next((param for param in state.params if name.endswith(f"/{param}")), None) for name in tensors}
    return state, [state.spec(param, tensors[name]) if param else (None,) * tensors[name].ndim
                   for name, param in params.items()]  # fmt: skip


def save(place: Path | str, hosts: int, step: int, token: int, state: Any, specs: list[Spec], absent: int = -1) -> None:
    """Saves a step from one thread per host; host `absent` is lost before it writes its part."""
    errors: list[Exception] = []
    present = threading.Barrier(hosts - (absent >= 0))

    def write(index: int, manager: CheckpointManager) -> None:
        host = Host(HOSTS[hosts][index])
        host.specs = specs
        shards, layout = state.part(host)

        def make_room(step: int, size: int) -> None:
            if index == 0:
                manager.make_room(step, hosts * size)
            present.wait()

        try:
            with HostParts(place, index, hosts, token, make_room) as parts:
                attempt = parts.save(step, shards)
                if index == 0:
                    name = next(name for name, one in OPTIMIZERS.items() if one is state.optimizer)
                    documents = {"layout": layout, "config": load_config(None, {"optimizer": name}).to_dict()}
                    manager.save(step, {}, documents, {"loss": 1.0}, attempt=attempt)
                    manager.wait()
        except Exception as error:
            errors.append(error)

    with CheckpointManager(place, keep=3) as manager:  # open before any host writes, as in a run
        manager.newest()
        threads = [threading.Thread(target=write, args=(i, manager)) for i in reversed(range(hosts)) if i != absent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    if request.param == "folder":
        return tmp_path / "checkpoints"
    return f"{request.getfixturevalue('bucket')}/run/checkpoints"


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_the_parts_of_all_hosts_are_the_state_of_one(tmp_path: Path, optimizer: str) -> None:
    with use_mesh(MESH):
        state, specs = example(optimizer)
        assert any(axes for spec in specs for axes in spec)
        wanted = state.to_host(Host([]))
        for hosts in (2, 4):
            save(tmp_path / str(hosts), hosts, 3, 1, state, specs)
    for hosts in (2, 4):
        ((found,), damaged) = list_checkpoints(tmp_path / str(hosts), verify=True)
        assert not damaged and found.step == 3
        written = [found.tensors(f"training-{host}") for host in range(hosts)]
        assert len(list(filter(None, written))) == 2  # the other hosts' devices hold second replicas
        whole = joined(written, found.document("layout"))
        assert whole.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(whole[name], wanted[name])] == []
        for section in ("parameters/", "average/"):
            some = read_tensors(found, lambda name, begin=section: name.startswith(begin))
            assert some.keys() == {name for name in wanted if name.startswith(section)}
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in some.items())
        with pytest.raises(ValueError, match=r"the parts of the checkpoint lack shards of \d+ tensors, such as "):
            joined(written[1:], found.document("layout"))


def test_a_lost_host_leaves_the_previous_checkpoint(place: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    with use_mesh(MESH):
        state, specs = example("adamw")
        save(place, 2, 3, 1, state, specs)
        with monkeypatch.context() as short:
            short.setattr(parts_module, "PATIENCE", 0.5)
            with pytest.raises(OSError, match=r"training-1.json did not appear within 0.5 s.* step 3 stays good"):
                save(place, 2, 6, 1, state, specs, absent=1)
            assert [one.step for one in list_checkpoints(place, verify=True)[0]] == [3]
            with pytest.raises(OSError, match=r"training-1.json did not appear"):  # the other launch's do not count
                save(place, 2, 3, 2, state, specs, absent=1)
        assert [one.step for one in list_checkpoints(place, verify=True)[0]] == [3]
        save(place, 4, 6, 3, state, specs)
        CheckpointManager(place, keep=3).close()  # removes the lost hosts' files
    good, damaged = list_checkpoints(place, verify=True)
    assert [one.step for one in good] == [3, 6] and not damaged
    assert sorted(good[1].files)[2:] == [f"training-{host}.safetensors" for host in range(4)]
    if isinstance(place, Path):
        assert sorted(one.name for one in place.iterdir() if one.is_dir()) == ["step-00000003", "step-00000006"]


def test_a_part_that_cannot_be_written_ends_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderStore, "_save", lambda *_: (_ for _ in ()).throw(OSError(28, "no room")))
    with pytest.raises(OSError, match=r"training-0\.json"), CheckpointManager(tmp_path, keep=1) as manager:
        parts = HostParts(tmp_path, 0, 2, 7, lambda *_: None)
        manager.save(1, {}, {"layout": {}}, {}, attempt=parts.save(1, {"x@": torch.zeros(())}))
        manager.wait()
    with pytest.raises(OSError, match="no room"):
        parts.wait()
    assert list_checkpoints(tmp_path) == ([], [])


def test_older_checkpoints_make_room_for_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk has room for two checkpoints, but not for the parts of a third."""
    with use_mesh(MESH):
        state, specs = example("adamw")
        for step in (1, 2):
            save(tmp_path, 2, step, step, state, specs)
        size, write = list_checkpoints(tmp_path)[0][0].size, FolderStore.write_part
        blocks = 40_000  # for the documents, which `save` counts in blocks and which may be written after all parts

        def free() -> int:
            return 2 * size + blocks - sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())

        def limited(*given: Any) -> None:
            if free() < sum(tensor.nbytes for tensor in given[-1].values()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(*given)

        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free()))
        monkeypatch.setattr(FolderStore, "write_part", limited)
        save(tmp_path, 2, 3, 3, state, specs)
    assert [found.step for found in list_checkpoints(tmp_path, verify=True)[0]] == [2, 3]
    assert "is full: the checkpoint of step 1 makes room for step 3" in capsys.readouterr().err
