"""The sharding rules: each family's tensors match one, and each weight is sharded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tpu_kit.config.loader import load_config
from tpu_kit.config.mesh import Mesh, resolve_mesh
from tpu_kit.distributed.replica.mesh import use_mesh
from tpu_kit.model import trainable
from tpu_kit.model.loop.layer_calls import stacked_prefixes, tensors_of
from tpu_kit.model.loop.layer_scan import stack
from tpu_kit.model.meta_model import empty_model
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.model.sharding import partition
from tpu_kit.planning.memory import argument_memory

FAMILIES = [*(family for family in trainable.COMPARED if family != "gemma3"), "gemma4_text"]  # gemma3 is of images, too
SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "pad_token_id": 0,
}  # fmt: skip


def make(folder: Path, family: str, sizes: dict[str, object] = SIZES, **changes: object) -> torch.nn.Module:
    """A model on the meta device, with stacked layers and adapters."""
    (folder / "config.json").write_text(json.dumps({"model_type": family, **sizes}))
    config = load_config(None, {"model.name": str(folder), "max_length": 64, **changes})
    with torch.device("meta"):
        model = trainable.adapt(empty_model(config), config.lora, config.model.base_dtype)
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
    stacks = [row for row in rows if row.name.startswith("layers.*.")]
    assert stacks and all(row.spec[0] is None for row in stacks)


@pytest.mark.parametrize(("tied", "specs"), [(False, [("data", None, ("model", "fsdp"))]), (True, [])])
def test_a_trained_embedding_returns_columns_where_rows_are_over_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, specs: list[partition.Spec]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": tied, **SIZES}))
    with torch.device("meta"):
        model = empty_model(load_config(None, {"model.name": str(tmp_path), "max_length": 64, "lora.r": 0}))
    found: list[Any] = []
    monkeypatch.setattr(partition, "constrain", lambda tensor, spec: found.append(spec) or tensor)
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    with use_mesh(Mesh(data=2, fsdp=2)), partition.embedding_by_columns(model):
        model.get_input_embeddings()(ids)
    with use_mesh(Mesh(fsdp=4)), partition.embedding_by_columns(model):
        model.get_input_embeddings()(ids)
    assert found == specs


def test_the_gathered_form_keeps_the_model_axis() -> None:
    assert partition.gathered((("model", "fsdp"), None)) == (("model",), None)
    assert partition.gathered((None, "fsdp", "model")) == (None, None, ("model",))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_needs_first_is_gathered_early(tmp_path: Path, family: str) -> None:
    first = make(tmp_path, family).get_decoder().layers.runs[0].layers[0]  # type: ignore[operator, union-attr]
    slices = {name: tensor[0] for name, tensor in tensors_of(first).items()}
    assert partition.gathered_early(slices) == []
    with use_mesh(Mesh(fsdp=4)):
        groups = partition.gathered_early(slices)
        found = {name.split(".")[1] for group in groups for name in group}
        assert found in ({"q_proj", "k_proj", "v_proj"}, {"qkv_proj"}) and len(groups) == 1  # of equal shapes here
        assert all(name.endswith("base_layer.weight") for name in groups[0])
        assert partition.gathered_early({name: one.requires_grad_() for name, one in slices.items()}) == []
    with use_mesh(Mesh(data=2, model=2)):
        assert partition.gathered_early(slices) == []
    whole = make(tmp_path, family, base_dtype="int8").get_decoder().layers.runs[0].layers[0]  # type: ignore[operator, union-attr]
    with use_mesh(Mesh(fsdp=4)):
        assert partition.gathered_early({name: tensor[0] for name, tensor in tensors_of(whole).items()}) == []


def test_a_large_tensor_that_no_rule_matches_is_named(tmp_path: Path) -> None:
    model = make(tmp_path, "llama")
    model.register_parameter("strange", torch.nn.Parameter(torch.empty(1024, 32, 32, device="meta")))
    model.register_parameter("convolution", torch.nn.Parameter(torch.empty(2**16, 1, 4, device="meta")))  # stays whole
    with use_mesh(Mesh(fsdp=4)), pytest.raises(ValueError, match="fsdp=4: strange would not be sharded: no"):
        partition.check_rules(model, stacked_prefixes(model))
    with use_mesh(resolve_mesh("fsdp=4", 4, {"strange": "fsdp"})):
        rows = {row.name: row for row in partition.check_rules(model, stacked_prefixes(model))}
    assert rows["strange"].spec == (("fsdp",), None, None) and rows["strange"].bytes == 2**20


@pytest.mark.parametrize("mesh", [Mesh(fsdp=4), Mesh(model=2), Mesh(fsdp=2, model=2)], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_an_odd_vocabulary_is_sharded_by_the_hidden_states(tmp_path: Path, mesh: Mesh, tied: bool) -> None:
    model = make(tmp_path, "llama", SIZES | {"vocab_size": 643, "tie_word_embeddings": tied})
    with use_mesh(mesh):
        rows = {row.name: row for row in partition.check_rules(model, stacked_prefixes(model))}
        ends = {name: row for name, row in rows.items() if 643 in row.shape}
    assert len(ends) == 1 + (not tied)
    assert all(row.spec == (None, ("model", "fsdp")) and row.bytes * mesh.size == row.whole for row in ends.values())


def test_a_matrix_that_no_axes_divide_is_named_with_what_helps(tmp_path: Path) -> None:
    model = make(tmp_path, "llama", SIZES | {"vocab_size": 643, "hidden_size": 132})
    prefixes = stacked_prefixes(model)
    text = (
        r"fsdp=8: model\.embed_tokens\.weight, lm_head\.weight would .*\. Use .* divides a dimension of 643 x 132, or"
    )
    with use_mesh(Mesh(fsdp=8)), pytest.raises(ValueError, match=text):
        partition.check_rules(model, prefixes)
    text = r'launch\.mesh_rules, such as ({"\*embed_tokens\.weight": "None,fsdp"}), or'
    with use_mesh(Mesh(fsdp=4, model=2)), pytest.raises(ValueError, match=text) as error:
        partition.check_rules(model, prefixes)
    advised = json.loads(re.search(text, str(error.value))[1])
    with use_mesh(resolve_mesh("fsdp=4,model=2", 8, advised | {"lm_head.weight": "None,fsdp"})):
        rows = {row.name: row for row in partition.check_rules(model, prefixes)}
    assert rows["model.embed_tokens.weight"].spec == (None, ("fsdp",))


def test_a_teacher_is_sharded_by_its_own_sizes(tmp_path: Path) -> None:
    found = []
    for name, sizes in ("model", {"tie_word_embeddings": True}), ("teacher", {"hidden_size": 64, "vocab_size": 643}):
        (tmp_path / name).mkdir()
        found.append(make(tmp_path / name, "llama", SIZES | sizes))
    model, teacher = found

    def specs() -> set[tuple[tuple[int, ...], partition.Spec]]:
        return {(row.shape, row.spec) for row in partition.check_rules(model, stacked_prefixes(model))}

    with use_mesh(Mesh(fsdp=2, model=2)):
        wanted = specs() | {(row.shape, row.spec) for row in partition.check_rules(teacher, stacked_prefixes(teacher))}
        model.teacher = teacher
        assert specs() == wanted


def test_a_rule_of_the_users_comes_first(tmp_path: Path) -> None:
    model = make(tmp_path, "llama", base_dtype="int4", quant_group=16)
    rules = {
        "layers.*.self_attn.q_proj.lora_A.*": "None,None", "*.k_proj.lora_B.default.weight": "None,fsdp",
        "model.embed_tokens.weight": "fsdp", "*.v_proj.base_layer.weight": "None",
    }  # fmt: skip
    with use_mesh(resolve_mesh("fsdp=4", 4, rules)):
        rows = {row.name: row for row in partition.check_rules(model, stacked_prefixes(model))}
        name = "layers.0.self_attn.k_proj.lora_B.default.weight"
        in_layer = partition.spec_of(name, torch.empty(128, 16), partition.embedding_of(model))
    assert rows["layers.*.self_attn.q_proj.lora_A.default.weight"].bytes == 6 * 16 * 128 * 4  # replicated: it shows
    assert rows["layers.*.self_attn.k_proj.lora_B.default.weight"].spec == (None, None, ("fsdp",))
    assert in_layer == (None, ("fsdp",))
    assert rows["model.embed_tokens.weight"].spec == (("fsdp",), None)
    assert rows["layers.*.self_attn.v_proj.base_layer.weight"].spec == (None, None, None)


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"*.router.weight": "fsdp,None"},
         "launch.mesh_rules: *.router.weight matches no tensor; the names are model.embed_tokens.weight, layers.*"),
        ({"*.input_layernorm.weight": "fsdp"}, "*.input_layernorm.weight matches no tensor"),
        ({"*.q_proj.lora_A.*": "fsdp,None,model"},
         "*.q_proj.lora_A.* has 3 dimensions, and layers.*.self_attn.q_proj.lora_A.default.weight of"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_the_model(tmp_path: Path, rules: dict[str, str], problem: str) -> None:
    model = make(tmp_path, "llama")
    with use_mesh(resolve_mesh("fsdp=4", 4, rules)), pytest.raises(ValueError, match=r"launch\.mesh_rules") as error:
        partition.check_rules(model, stacked_prefixes(model))
    assert problem in str(error.value)


@pytest.mark.parametrize(("family", "changes"), [
    *((family, {}) for family in FAMILIES),
    ("llama", {"lora.dora": True}), ("gemma3_text", {"lora.r": 0}), ("phi3", {"base_dtype": "int8"}),
    ("gemma2", {"base_dtype": "int4", "quant_group": 16}),
    ("qwen2", {"lora.targets": ["q_proj"], "base_dtype": "fp32"}),
])  # fmt: skip
def test_the_planner_knows_the_tensors_without_the_model(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = make(tmp_path, family, **changes)
    mesh = Mesh(data=2, fsdp=4, model=1 if changes.get("base_dtype") == "int4" else 2)
    with use_mesh(mesh):
        wanted = partition.check_rules(model, stacked_prefixes(model))
    config = load_config(None, {"model.name": str(tmp_path), "max_length": 64, **changes})
    found = argument_memory.table(read_shape(config.model), config, mesh)
    small = re.compile("norm|bias|scalar")

    def matrices(rows: list[partition.Placed]) -> set[partition.Placed]:
        return {row for row in rows if len(row.shape) > 1 and not small.search(row.name)}

    assert matrices(found) == matrices(wanted)
