"""What one has to read to change a module. `python -m pytest tests/test_measures.py -s` prints the figures.

The limits are ratchets: they are lowered when a figure falls. A feature may raise one in its own commit, with the
reason beside the figure.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.child_processes import REPOSITORY, run_python
from tests.support.measures import Package, side_channels

PACKAGE = Package.read(REPOSITORY / "tpu_kit")
CHANNELS = side_channels(PACKAGE.sources)

# Module -> the most lines of what it needs of the package. Goals: 10,000, 17,500 and 10,000; the recipe's is reported.
CLOSURES = {
    "training.step": 5_635, "training.trainer": 14_290, "generation.generator": 6_787, "recipes.sft": 34_589,
}  # fmt: skip

# The most modules of the kit that a module imports; goals: 15, and 25 for recipes and the modules on top.
FAN_OUT = 15
FAN_OUTS = {"recipes.sft": 42, "recipes.commands": 17}

# An identifier of a feature -> the modules that own it, and the most others that name it (goal: 3). The configuration
# and the command line may name each.
ANYWHERE = ("config", "cli")
TENTACLES = {
    "on_policy": (("training.losses.rollout",), 15),
    "prefix_ids": (("training.losses.policy",), 6),
    "teacher": (("training.losses.distillation", "training.losses.teacher_files"), 15),
    "error_correction": (("extras.error_correction.head",), 0),
    "kept_after": (("model.loop.layer_calls",), 1),
}

# What reaches other code than by arguments and results, each with its reason. Goals: 8, 8 and 3.
STATE = {
    "distributed.launch: _announced": "a notebook's launches tell the choice of device once",
    "distributed.preemption: _flag": "a signal handler has no argument",
    "distributed.replica.cpu_simulation: _meeting": "replicas are threads of one process that meet before collectives",
    "distributed.replica.mesh: _mesh": "torch_xla has one mesh for each process",
    "distributed.replica.runtime: _local": "the replica that a thread is",
    "model.loop.layer_inputs: _thread": "names in transformers' keyword arguments do not stay free",
    "xla.program: _lowering_for_tpu": "whether a graph is traced for the TPU's compiler on a CPU",
    "xla.scan: _loops": "traced loops, one for each body",
}
PATCHES = {
    "__main__: sys.stderr": "what is printed hides secrets, and never ends a run",
    "__main__: sys.stdout": "what is printed hides secrets, and never ends a run",
    "distributed.output: sys.stderr": "what is printed hides secrets, and never ends a run",
    "distributed.output: sys.stdout": "what is printed hides secrets, and never ends a run",
    "distributed.replica.worker: sys.stdout": "replicas print a whole line at a time",
    "machine.hub: os.environ": "the hub is asked once whether it can be reached; children know the answer",
    "machine.storage.object_store: os.environ": "gcsfs reads it at its import",
    "machine.surroundings: os.environ": "libraries need a user's name and home, which may lack",
    "machine.surroundings: sys.path": "files of the working folder hide no package while it is imported",
    "notebook.cells: os.environ[name]": "a secret of the platform reaches launched processes by the environment alone",
    "notebook.cells: os.environ[sft.SHOWN_REPORT]": "tells launched processes that the notebook showed the report",
    "notebook.displays: os.environ[NO_BAR]": "tells launched processes that the notebook draws the progress",
    "training.step: torch._dynamo.config.recompile_limit": "torch.compile has no argument for it",
    "xla.pallas: tpu_custom_call.get_ir_version": "jax 0.7 serialises for a newer libtpu than torch_xla's",
    "xla.sharding: jax.config": "torch_xla's sharding is that of GSPMD",
}
ON_MODELS = {
    "exporting.streaming: model.generation_config": "transformers saves what the model carries",
    "extras.error_correction.head: model.objective": "the head trains with the model",
    "model.loading: model.name_or_path": "the cache of integers is read under the model's own name",
    "model.loop.activation_checkpointing: layer.__class__": "a layer that recomputes stays the family's class",
    "model.trainable: model._tpu_kit_base": "the weights that the adapters are for",
    "model.trainable: model._tpu_kit_compute_dtype": "the dtype of autocast; copies of the model keep it",
    "training.losses.distillation: model.objective": "the projections train with the model",
    "training.losses.distillation: model.teacher": "the teacher moves and is sharded with the model",
}


def test_what_a_module_needs() -> None:
    measured = {name: PACKAGE.closure_lines(name) for name in CLOSURES}
    for name, lines in measured.items():
        print(f"{name:24} closure {len(PACKAGE.closure(name)):4} modules {lines:7,} lines, at most {CLOSURES[name]:,}")
    assert all(lines <= CLOSURES[name] for name, lines in measured.items()), measured


def test_how_many_modules_a_module_imports() -> None:
    measured = {name: len(imports) for name, imports in PACKAGE.imports.items()}
    for name in sorted(measured, key=lambda name: -measured[name])[:10]:
        print(f"{name:24} imports {measured[name]:3} modules, at most {FAN_OUTS.get(name, FAN_OUT)}")
    wrong = {name: count for name, count in measured.items() if count > FAN_OUTS.get(name, FAN_OUT)}
    assert not wrong


@pytest.mark.parametrize("identifier", TENTACLES)
def test_a_feature_is_named_in_its_own_files(identifier: str) -> None:
    owners, most = TENTACLES[identifier]
    assert all(owner in PACKAGE.sources for owner in owners), "an owner has moved"
    others = PACKAGE.tentacles(identifier, (*owners, *ANYWHERE))
    print(f"{identifier:24} named by {len(others):3} other modules, at most {most}")
    assert len(others) <= most, others


@pytest.mark.parametrize(("kind", "reasons"), [("state", STATE), ("patch", PATCHES), ("model", ON_MODELS)])
def test_each_side_channel_has_a_reason(kind: str, reasons: dict[str, str]) -> None:
    print(f"{kind:24} {len(CHANNELS[kind])} side channels")
    assert CHANNELS[kind] == sorted(reasons)


def test_side_channels_are_found() -> None:
    source = """
import os
from elsewhere import Thing
_STATE, _COUNT, _KEPT = {}, 0, []
_KEPT.append(1)  # while it is imported
def f(model, value):
    global _COUNT
    _COUNT += 1
    _STATE[value] = 1
    os.environ["A"] = value
    Thing.method = value
    model.head = value
    model.config.size = value
def g(_STATE):
    _KEPT.sort()
    _STATE[1] = 2
"""
    assert side_channels({"a.b": source}) == {
        "state": ["a.b: _COUNT", "a.b: _STATE"],
        "patch": ["a.b: Thing.method", "a.b: os.environ['A']"],
        "model": ["a.b: model.head"],
    }


def test_closures_and_tentacles_are_found() -> None:
    package = Package(
        {
            "a": "from kit import b\nfrom kit.c import C\ndef f(x: C): return b.y",
            "b": "def y():\n    from kit.d import z\n    return z",
            "c": "C = 1",
            "d": "z = 1\nmy_teacher = 2  # teacher",
            "e": '"""A teacher."""\nx = {"teacher": 1}',
        },
        "kit",
    )
    assert package.closure("a") == {"a", "b", "d"}  # C is an annotation alone
    assert package.closure_lines("a") == 8
    assert package.tentacles("teacher", ("e",)) == ["d"]
    assert package.tentacles("teacher", ()) == ["d", "e"]


# Fact of a run -> the function that finds it, and the most calls of one `train` (goal: 1).
FACTS = {
    "the device": ("tpu_kit.distributed.detection", "detect", 6),
    "the newest checkpoint": ("tpu_kit.training.checkpoint.manager", "scan", 3),
    "identity of the weights": ("tpu_kit.model.base_identity", "identify", 2),
    "the model's configuration": ("tpu_kit.model.source", "read_config", 5),
    "the objective": ("tpu_kit.training.objectives", "objective_of", 3),
    "the estimate of memory": ("tpu_kit.planning.memory.memory_estimate", "estimate", 1),
}


def test_how_often_a_run_finds_its_facts(tmp_path: Path) -> None:
    source = f"""
import functools, importlib, json, sys
from collections import Counter
from pathlib import Path

from tpu_kit import load_config, train
from tpu_kit.model.shape_cache import read_shape

read_shape(load_config("embedded-cot").model)  # which a new machine derives once
calls = Counter()
for fact, (module, name, _) in json.loads({json.dumps(json.dumps(FACTS))}).items():
    found = getattr(importlib.import_module(module), name)

    def counted(*arguments, found=found, fact=fact, **options):
        calls[fact] += 1
        return found(*arguments, **options)

    for holder in [held for name, held in sys.modules.items() if name.startswith("tpu_kit")]:
        for held in [held for held, value in vars(holder).items() if value is found]:
            setattr(holder, held, functools.wraps(found)(counted))
settings = ["device_type=cpu", "num_replicas=1", "max_steps=2", "warmup_steps=0", "generate_rows=0", "eval_rows=2"]
train(load_config("embedded-cot", [*settings, "save_steps=1", f"output_dir={tmp_path}"]))
Path("calls.json").write_text(json.dumps(calls))
"""
    run_python(source, cwd=tmp_path)
    calls = json.loads((tmp_path / "calls.json").read_text())
    for fact, (_, _, most) in FACTS.items():
        print(f"{fact:28} found {calls.get(fact, 0):3} times, at most {most}")
    assert all(0 < calls.get(fact, 0) <= most for fact, (_, _, most) in FACTS.items()), calls
