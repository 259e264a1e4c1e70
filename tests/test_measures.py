"""What one has to read to change a module. `python -m pytest tests/test_measures.py -s` prints the figures.

The limits are ratchets: they are lowered when a figure falls. A feature may raise one in its own commit, with the
reason beside the figure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import counted_facts
from tests.support.child_processes import PYTHONPATH, REPOSITORY, child_environment, run_python
from tests.support.measures import Package, side_channels
from tests.support.object_store import free_port

PACKAGE = Package.read(REPOSITORY / "tpu_kit")
CHANNELS = side_channels(PACKAGE.sources)

# Module -> the most lines of what it needs of the package. Goals: 10,000, 17,500 and 10,000; the recipe's is reported.
# Run plan, a state that restores itself, hub and exchange between replicas are about 180 lines of the step, 230 of the
# trainer; a recipe that pushes its result needs exports and hub too, 2,000 lines. Images are 140 lines of the step and
# 470 of the trainer (columns of batches, the registry of families), and 1,900 of the recipe, which prepares them.
CLOSURES = {
    "training.step": 5_946, "training.trainer": 14_990, "generation.generator": 7_019, "recipes.sft": 39_331,
}  # fmt: skip

# The most modules of the kit that a module imports; goals: 15, and 25 for recipes and the modules on top.
FAN_OUT = 15
FAN_OUTS = {"recipes.replica": 23, "recipes.sft": 18, "planning.compiler.trace": 16}

# An identifier of a feature -> the modules that own it, and the most others that name it (goal: 3). The configuration
# and the command line may name each.
ANYWHERE = ("config", "cli")
TENTACLES = {
    "on_policy": (("training.losses.sampled_updates",), 15),
    "prefix_ids": (("training.losses.policy_gradient",), 6),  # attention and its kernel for TPU are two modules
    "teacher": (("training.losses.distillation", "training.losses.teacher_files"), 15),
    "error_correction": (("extras.error_correction.head",), 0),
    "kept_after": (("model.loop.layer_calls",), 1),
}

# What reaches other code than by arguments and results, each with its reason. Goals: 8, 8 and 3.
STATE = {
    "distributed.launch: _announced": "a notebook's launches tell the choice of device once",
    "distributed.preemption: _flag": "a signal handler has no argument",
    "distributed.replica.cpu_simulation: _rendezvous": "replicas are threads of a process that meet before collectives",
    "distributed.replica.mesh: _mesh": "torch_xla has one mesh for each process",
    "distributed.replica.runtime: _local": "the replica that a thread is",
    "model.loop.layer_inputs: _thread": "names in transformers' keyword arguments do not stay free",
    "xla.scan: _loops": "traced loops, one for each body",
    "xla.traced_program: _lowering_for_tpu": "whether a graph is traced for the TPU's compiler on a CPU",
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
    "notebook.cells: os.environ[SHOWN_REPORT]": "tells launched processes that the notebook showed the report",
    "notebook.cells: os.environ[name]": "a secret of the platform reaches launched processes by the environment alone",
    "notebook.displays: os.environ[NO_BAR]": "tells launched processes that the notebook draws the progress",
    "training.step: torch._dynamo.config.recompile_limit": "torch.compile has no argument for it",
    "xla.pallas: tpu_custom_call.get_ir_version": "jax 0.7 serialises for a newer libtpu than torch_xla's",
    "xla.sharding: jax.config": "torch_xla's sharding is that of GSPMD",
}
ON_MODELS = {
    "exporting.streaming: model.generation_config": "transformers saves what the model carries",
    "extras.error_correction.head: model.objective": "the head trains with the model",
    "model.loop.activation_checkpointing: layer.__class__": "a layer that recomputes stays the family's class",
    "model.trainable: model._tpu_kit_compute_dtype": "the dtype of autocast; copies of the model keep it",
    "model.weights.loading: model.name_or_path": "the cache of integers is read under the model's own name",
    "recipes.image_answers: model._tpu_kit_compute_dtype": "the dtype of autocast; copies of the model keep it",
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


# What each process of a run may find: the caller each fact once, a replica nothing. A replica makes the objective that
# the plan names, and rank 0 confirms the checkpoint, and reads for its files which modules the model leaves out.
CALLER = dict.fromkeys(counted_facts.FACTS, 1) | {"the confirmation of rank 0": 0}
REPLICA = dict.fromkeys(counted_facts.FACTS, 0) | {"the objective": 1}
RANK_0 = REPLICA | {"the confirmation of rank 0": 1}
TRAINED = [
    "embedded-cot", "warmup_steps=0", "save_steps=1", "eval_rows=2", "generate_rows=0", "data.split=train[:40]"
]  # fmt: skip
SAMPLED = [
    "embedded-grpo", "warmup_steps=0", "prompts_per_update=2", "max_completion_length=8", "generate_rows=0",
    "eval_rows=2", "eval_generate_rows=0", "eval_steps=null", "data.split=train[:40]",
]  # fmt: skip
CPU, XLA = ["device_type=cpu", "num_replicas=1"], ["device_type=xla-cpu"]
slow = pytest.mark.slow  # quick sibling: a new and a resumed run in the calling process


def assert_found(folder: Path, hosts: int, replicas: int, differ: Mapping[str, int]) -> None:
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    wanted = {f"caller-{host}": CALLER | differ for host in range(hosts)}
    wanted |= {f"replica-{rank}": REPLICA if rank else RANK_0 for rank in range(replicas)}
    for name, counts in found.items():
        print(f"{name:24} {counts}")
        if name == "replica-0":
            assert counts.pop("the model's configuration", 0) <= 1, "once in a process that saves"
    assert found == {name: {fact: count for fact, count in counts.items() if count} for name, counts in wanted.items()}


@pytest.mark.parametrize(
    ("recipe", "updates", "settings", "replicas", "differ"),
    [
        pytest.param("train", "1,2", [*TRAINED, *CPU], 1, {}, id="new-and-resumed"),
        pytest.param("train", "1", [*TRAINED, *XLA, "num_replicas=2"], 2, {}, id="two-replicas", marks=slow),
        # The memory of a device of a mesh is not known on XLA:CPU.
        pytest.param(
            "train", "1", [*TRAINED, *XLA, "mesh=fsdp=2"], 1, {"the estimate of memory": 0}, id="a-mesh", marks=slow
        ),
        # The estimate asks the objective of its setting what it costs.
        pytest.param("grpo", "1", [*SAMPLED, *CPU], 1, {"the objective": 2}, id="grpo", marks=slow),
    ],
)
def test_how_often_a_run_finds_its_facts(
    recipe: str, updates: str, settings: list[str], replicas: int, differ: dict[str, int], tmp_path: Path
) -> None:
    run_python(["-m", "tests.support.counted_facts", recipe, str(tmp_path), updates, *settings], cwd=REPOSITORY)
    for steps in updates.split(","):
        assert_found(tmp_path / steps, 1, replicas, differ)


@slow
def test_how_often_each_of_two_hosts_finds_its_facts(tmp_path: Path) -> None:
    port, hosts = free_port(), []
    for index in (0, 1):
        env = {"TPU_KIT_HOSTS": "a,b", "TPU_KIT_HOST_INDEX": str(index), "TPU_KIT_COORDINATOR": f"127.0.0.1:{port}",
               "PYTHONPATH": PYTHONPATH, "PJRT_DEVICE": None}  # fmt: skip
        command = [sys.executable, "-m", "tests.support.counted_facts", "train", str(tmp_path), "1", *TRAINED, *CPU]
        hosts.append(subprocess.Popen(command, env=child_environment(env)))
    assert [host.wait(300) for host in hosts] == [0, 0]
    assert_found(tmp_path / "1", 2, 2, {})
