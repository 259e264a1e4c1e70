"""The sharding rules: each family's tensors match one, and each weight is sharded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tpu_kit.config.loader import load_config
from tpu_kit.config.mesh import Mesh
from tpu_kit.distributed.mesh import boxes, use_mesh
from tpu_kit.models import causal_lm, partition
from tpu_kit.models.layer_scan import FAMILIES, stack, stacked_prefixes
from tpu_kit.planning.trace import empty_model

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "pad_token_id": 0,
}  # fmt: skip


def make(folder: Path, family: str, **changes: object) -> torch.nn.Module:
    """A model on the meta device, with stacked layers and adapters."""
    (folder / "config.json").write_text(json.dumps({"model_type": family, **SIZES}))
    config = load_config(None, {"model.name": str(folder), "max_length": 64, **changes})
    with torch.device("meta"):
        model = causal_lm.adapt(empty_model(config), config.lora, config.model.base_dtype)
        stack(model.get_decoder())  # type: ignore[operator]  # a method of PEFT's and transformers' models
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_every_large_tensor_of_a_family_is_sharded(tmp_path: Path, family: str, dtype: str) -> None:
    model = make(tmp_path, family, base_dtype=dtype, **({"quant_group": 16} if dtype == "int4" else {}))
    with use_mesh(Mesh(fsdp=4)):
        rows = partition.check_rules(model, stacked_prefixes(model))
    whole = [row.name for row in rows if not any(row.spec) and torch.Size(row.shape).numel() > 6 * 256]
    assert not whole, whole
    for row in rows:
        assert row.bytes * (4 if any(row.spec) else 1) <= max(1, row.bytes * 4)
    stacks = [row for row in rows if ".runs." in row.name]
    assert stacks and all(row.spec[0] is None for row in stacks)


def test_the_gathered_form_keeps_the_model_axis() -> None:
    assert partition.gathered((("model", "fsdp"), None)) == (("model",), None)
    assert partition.gathered((None, "fsdp", "model")) == (None, None, ("model",))


def test_a_large_tensor_that_no_rule_matches_is_named(tmp_path: Path) -> None:
    model = make(tmp_path, "llama")
    model.register_parameter("strange", torch.nn.Parameter(torch.empty(1024, 1024, device="meta")))
    with use_mesh(Mesh(fsdp=4)), pytest.raises(ValueError, match="no sharding rule matches strange; train this model"):
        partition.check_rules(model, stacked_prefixes(model))


def test_the_boxes_of_the_devices_tile_a_tensor() -> None:
    mesh, whole = Mesh(2, 2, 2), torch.arange(32.0).reshape(8, 4)
    spec = (("model", "fsdp"), None)
    found = torch.zeros_like(whole)
    for device, box in enumerate(boxes(mesh, spec, whole.shape)):
        at = mesh.coordinates(device)
        assert box[0].start == 2 * (2 * at["model"] + at["fsdp"])
        found[box] = whole[box]
    assert torch.equal(found, whole)
