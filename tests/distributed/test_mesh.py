"""Tensors on the virtual devices of a mesh: each device holds its shard alone, and reading joins them."""

from __future__ import annotations

import json

import pytest

from tests.support.child_processes import run_python
from tpu_kit.hardware.machine import Machine

CODE = """
import json
import torch, torch_xla
from tpu_kit.config.mesh import Mesh
from tpu_kit.distributed.mesh import put, read, start
from tpu_kit.xla.sharding import constrain

start(Mesh(2, 2, 2))
whole = torch.arange(64.0).reshape(8, 8)
spec = (("model", "fsdp"), "data")
sharded, replicated = put(whole, spec), put(whole, (None, None))
shapes = lambda tensor: [list(shard.shape) for shard, _ in torch_xla._XLAC._get_local_shards([tensor])[0]]
doubled = constrain(replicated * 2, spec)
torch_xla.sync()
back = read([sharded, replicated, doubled])
print(json.dumps({"sharded": shapes(sharded), "replicated": shapes(replicated), "doubled": shapes(doubled),
                  "equal": [torch.equal(one, wanted) for one, wanted in zip(back, [whole, whole, whole * 2])]}))
"""


@pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
def test_each_device_holds_its_shard_and_reading_joins_them() -> None:
    done = run_python(["-c", CODE], env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"})
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sharded"] == found["doubled"] == [[2, 4]] * 8
    assert found["replicated"] == [[8, 8]] * 8
    assert found["equal"] == [True] * 3
