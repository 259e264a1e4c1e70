"""Imports between rooms, packages that an import loads, and the lines that a change of a module needs.

`python -m pytest tests/test_imports.py -s` prints the lines as a table.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.child_processes import REPOSITORY, run_python
from tests.support.measures import Package, side_channels
from tpu_kit.config import registry

PACKAGE = REPOSITORY / "tpu_kit"

ROOMS = (
    "assets", "config", "machine", "torch_tpu", "distributed", "xla", "model", "data", "generation", "training",
    "planning", "exporting", "recipes", "notebook", "extras",
)  # fmt: skip
"""In order: a room imports itself and those before it. The modules on top may import all of them."""

ON_TOP = {"__init__", "__main__", "cli"}
MOST_MODULES, MOST_IN_FOLDER, MOST_LINES = 16, 11, 600  # of a room with its folders, of a folder alone, of a module
# Rooms with more modules, and the reason:
# - model and families, data (rows and chats), generation (decoding and judging) and training (steps and saves) were two
#   rooms each;
# - config: names of preference losses in other trainers; machine: versions of torch_tpu;
# - data: pictures of rows and pictures of prompts, rows made by a user's function, mixes of sources, a report,
#   pairs (rows, units in packed rows), and four modules of text streams;
# - training: pairs (losses, updates, sums by segment), updates from a stream, programs of sampled updates, the check of
#   an objective before a launch;
# - model: the cost of images, their checks before a launch, the cost of inputs beside text, trained embeddings, towers.
MORE_MODULES = {"config": 17, "machine": 17, "model": 31, "data": 33, "generation": 22, "training": 28, "planning": 17}

# Where the XLA stack may be imported, inside functions alone: so a machine without it can import every module, and a
# notebook's kernel never holds the TPU that the launched processes need.
XLA_STACK = ("torch_xla", "torch_tpu", "jax", "jaxlib", "libtpu")
XLA_MODULES = {
    "distributed.replica.backends", "distributed.replica.cpu_simulation", "distributed.replica.mesh",
    "distributed.replica.worker", "model.causal_lm",
    "extras.profile.recorder", "extras.profile.timeline", "torch_tpu.device", "torch_tpu.kernels",
    "torch_tpu.process_group", "torch_tpu.program", "torch_tpu.slices", "torch_tpu.without_chip",
    "xla.compiler", "xla.grouped", "xla.pallas", "xla.scan",
    "xla.sharding", "xla.slot_writes", "xla.traced_program",
}  # fmt: skip

# Modules that answer before torch is loaded, or without it.
LIGHT = (
    "config.loader", "machine.chips", "notebook.doctor", "notebook.install", "notebook.cells",
    "distributed.launch", "generation.evaluation.judging", "training.losses.rollout_programs",
    "extras.pods.report", "cli", "__main__",
    *(place.partition(":")[0].removeprefix("tpu_kit.") for place in registry.COMMANDS.values()),
)  # fmt: skip


def module_name(path: Path) -> str:
    """Returns the name below the package: "config.loader", "config" for a room, "__init__" for the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = ["tpu_kit", *(f"tpu_kit.{name}" for name in FILES if name != "__init__")]


@dataclass(frozen=True)
class Import:
    name: str  # dotted: "tpu_kit.config.loader", "torch_xla.core"
    where: str  # "module", "function" or "typing"
    line: int

    @property
    def ours(self) -> str | None:
        """The imported module of the package, as `FILES` names it; None for another package."""
        root, _, rest = self.name.partition(".")
        return (rest or "__init__") if root == "tpu_kit" else None


def find_imports(source: str, modules: frozenset[str] = frozenset(FILES), at: str = "") -> list[Import]:
    """Finds all imports. Args: at: the room of the source, for relative ones."""
    found: list[Import] = []

    def visit(node: ast.AST, where: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            where = "function"
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, "typing")
            for child in node.orelse:
                visit(child, where)
            return
        elif isinstance(node, ast.Import):
            found.extend(Import(alias.name, where, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ["tpu_kit", at] if node.level == 1 else ["tpu_kit"] if node.level else []
            base = ".".join(filter(None, [*here, node.module]))
            if base.split(".")[0] == "tpu_kit":  # a module of the package, or a name in one
                inner = base.removeprefix("tpu_kit").removeprefix(".")
                full = [".".join(filter(None, [inner, alias.name])) for alias in node.names]
                names = [f"tpu_kit.{name}" if name in modules else base for name in full]
                found.extend(Import(name, where, node.lineno) for name in dict.fromkeys(names))
            else:
                found.append(Import(base, where, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    visit(ast.parse(source), "module")
    return found


IMPORTS = {
    name: find_imports(path.read_text(), at=".".join(path.relative_to(PACKAGE).parent.parts))
    for name, path in FILES.items()
}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch_xla.core as core", [Import("torch_xla.core", "module", 1)]),
        ("class A:\n  import jax", [Import("jax", "module", 2)]),
        ("try:\n  import jax\nexcept ImportError: pass", [Import("jax", "module", 2)]),
        ("def f():\n  from torch_xla import runtime", [Import("torch_xla", "function", 2)]),
        ("from . import rules", [Import("tpu_kit.config.rules", "module", 1)]),
        ("from .rules import check", [Import("tpu_kit.config.rules", "module", 1)]),
        ("from ..data import f", [Import("tpu_kit.data", "module", 1)]),
        ("from tpu_kit import config, train", [Import("tpu_kit.config", "module", 1), Import("tpu_kit", "module", 1)]),
        ("from tpu_kit.config import rules", [Import("tpu_kit.config.rules", "module", 1)]),
        ("if TYPE_CHECKING:\n  import torch\nelse:\n  import jax",
         [Import("torch", "typing", 2), Import("jax", "module", 4)]),
    ],
)  # fmt: skip
def test_find_imports(source: str, expected: list[Import]) -> None:
    assert find_imports(source, frozenset({"config", "config.rules"}), at="config") == expected


def test_the_package_holds_its_rooms_alone() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*ROOMS, "configs"}
    assert {path.stem for path in PACKAGE.glob("*.py")} <= ON_TOP
    assert "utils" not in {name.split(".")[-1] for name in FILES}, "name a module after what it does"


@pytest.mark.parametrize("room", ROOMS)
def test_room(room: str) -> None:
    folders = sorted(path.parent for path in (PACKAGE / room).rglob("__init__.py"))
    modules = [name for name in FILES if name.startswith(f"{room}.") and FILES[name].name != "__init__.py"]
    assert len(modules) <= MORE_MODULES.get(room, MOST_MODULES), f"{room} has {len(modules)} modules: split it"
    for folder in folders:
        here = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(here) <= MOST_IN_FOLDER, f"{folder.name} has {len(here)} modules: make a folder of those that belong"
        docstring = ast.get_docstring(tree := ast.parse((folder / "__init__.py").read_text())) or ""
        assert len(tree.body) == 1, "a room imports nothing: start-up stays quick"
        assert 4 <= len(docstring.splitlines()) <= 5, f"{folder}/__init__.py says what the room is for"
    for name in modules:
        assert len(FILES[name].read_text().splitlines()) <= MOST_LINES, f"{name} is too long: split it"
    below = {*ROOMS[: ROOMS.index(room) + 1]}
    wrong = [
        f"{name}:{one.line} imports {one.ours}"
        for name in modules
        for one in IMPORTS[name]
        if one.ours and one.where != "typing" and one.ours.split(".")[0] not in below
    ]
    assert not wrong, wrong


def test_no_two_modules_import_each_other() -> None:
    """Not even within functions; imports under TYPE_CHECKING do not count."""
    graph = {
        name: sorted({one.ours for one in imports if one.ours and one.where != "typing"} - {name})
        for name, imports in IMPORTS.items()
        if name not in ON_TOP
    }
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "a cycle: " + " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for imported in graph.get(name, []):
                walk(imported, (*path, name))
            done.add(name)

    for name in graph:
        walk(name, ())


@pytest.mark.parametrize("name", sorted(FILES))
def test_xla_stack_only_inside_functions_of_its_modules(name: str) -> None:
    for found in IMPORTS[name]:
        if found.name.split(".")[0] in XLA_STACK and found.where != "typing":
            assert found.where == "function", f"{name}:{found.line} imports {found.name} at module level"
            assert name in XLA_MODULES, f"{name}:{found.line}: {found.name} belongs in {sorted(XLA_MODULES)}"


def test_package_is_lazy() -> None:
    ours = [one.ours for one in IMPORTS["__init__"] if one.ours and one.where == "module"]
    assert ours == ["config.registry", "machine.surroundings"], "these run before other libraries are imported"


def import_all(names: list[str], forbidden: str) -> str:
    """Source that imports the kit's modules one by one, and names the first that loads a forbidden package."""
    return (
        f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
        f"    assert {forbidden!r} not in sys.modules, f'importing {{name}} loads {forbidden}'\n"
    )


def test_private_names_of_the_xla_stack_are_used_in_three_rooms() -> None:
    """Names that move with versions, such as `torch_xla._XLAC`, `torch_tpu._loader` and `jax._src`."""
    wrong = []
    for name, path in FILES.items():
        private = [one.name for one in IMPORTS[name] if re.match(r"(torch_xla|torch_tpu|jax|jaxlib)\b.*\._", one.name)]
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        private += [
            ast.unparse(node) for node in nodes if re.match(r"(torch_xla|jax|xla_client)\._", ast.unparse(node))
        ]
        rooms = ("xla.", "torch_tpu.", "distributed.replica.cpu_simulation", "distributed.replica.mesh")
        if private and not name.startswith(rooms):
            wrong.append((name, private))
    assert not wrong


def test_light_modules_do_not_load_torch() -> None:
    run_python(import_all(["tpu_kit", *(f"tpu_kit.{name}" for name in LIGHT)], "torch"))


def test_no_module_and_no_public_name_loads_torch_xla() -> None:
    names = (
        "ConfigError", "SearchOptions", "TrainConfig", "evaluate", "export", "generate", "launch", "load_config",
        "plan", "profile", "think", "train",
    )  # fmt: skip
    public = f"import tpu_kit\nfor name in {names}: assert name in dir(tpu_kit) and getattr(tpu_kit, name)\n"
    first = (
        "import os, sys, tpu_kit\nassert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'\n"
        "import tpu_kit.notebook.runner\nassert 'torch' not in sys.modules\n"
        "assert tpu_kit.train and 'torch._dynamo' not in sys.modules\n"  # a second of each launch
    )
    run_python(first + public + import_all(MODULES, "torch_xla"), env={"OMP_WAIT_POLICY": None})


@pytest.mark.slow
def test_light_modules_in_a_fresh_environment(tmp_path: Path) -> None:
    """A laptop with only Python and PyYAML reads a config and runs the doctor."""
    run_python(["-m", "venv", str(tmp_path / "env")])
    python = tmp_path / "env" / "bin" / "python"
    pins = (REPOSITORY / "requirements-gpu.txt").read_text().splitlines()
    (pyyaml,) = [pin for pin in pins if pin.startswith("pyyaml")]
    run_python(["-m", "pip", "install", "--quiet", pyyaml], executable=python)
    light = ["tpu_kit", *(f"tpu_kit.{name}" for name in LIGHT)]
    code = import_all(light, "torch") + "from tpu_kit.config.loader import load_config\nprint(load_config().to_yaml())"
    printed = run_python(code, executable=python).stdout
    assert "batch_size:" in printed
    assert sys.prefix not in run_python("import sys; print(sys.path)", executable=python).stdout


# ------------------------------------------------------------------------------------- lines to read to change a module

# The limits below are ratchets: they are lowered when a figure falls. A feature may raise one in its own commit, with
# the reason beside the figure.
KIT = Package.read(PACKAGE)
CHANNELS = side_channels(KIT.sources)

# Module -> the most lines of its closure: the module and all modules of the package that it needs. Goals: 10,000,
# 17,500 and 10,000; the recipe has none. Lines that features added ("all" = to all four modules):
#
# | feature | step | trainer | generator | recipe |
# |---|---:|---:|---:|---:|
# | run plan, restoring state, hub, exchange between replicas | 180 | 230 | | 2,000 |
# | images: columns of batches, registry of families, preparation | 140 | 470 | | 1,900 |
# | requests to a hub with limits, adapters named by any path | | | | 50 |
# | `plan` refuses what `train` refuses without data | | | | 8 |
# | picture files that change, lie elsewhere or are read by headers; packing with images | | 8 | | 90 |
# | answers about pictures, exports, plans, comparisons, an adapter of the projector | | | | 750 |
# | prompts about pictures, llama.cpp called in two ways | | | | 35 |
# | torch_tpu: device, programs, loops, kernels, slices; steps as programs; versions and refusals | 460 | | 400 | 200 |
# | torch_tpu on several chips: process group, check of the all-reduce; trace for a compiler | 120 | 120 | 120 | 300 |
# | time of a step by the compiler's cost model, a chip's clock | 2 | | | 210 |
# | loss that reads the logits of a chunk once; adapters within the base product | 104 | | | |
# | rotation by halves (all that load a model) | 80 | 80 | 80 | 80 |
# | heads side by side in the cache; slots written with their neighbours | | | 50 | |
# | compiled programs of another trainer | | | | 16 |
# | rows made by a user's function; the hash of its code | 11 | 11 | 31 | 190 |
# | mixes of sources; lists of data sets of other trainers (all that read a file: 180) | 120 | 330 | | 970 |
# | tokens from a mapped cache; rows tokenised step by step | | 60 | | 180 |
# | pairs of replies; names of losses in other trainers (all that read a file: 110) | 50 | 450 | | 1,150 |
# | a pass that is traced once; `remat` by the time of the run | | 40 | | 110 |
# | streams of text | 46 | 80 | | 1,150 |
# | exports compared in vLLM | | | | 170 |
# | stacks that a loop writes without clearing (all) | 12 | 12 | 12 | 12 |
# | blocks of the attention kernel, unfused backward pass (all) | 45 | 45 | 45 | 45 |
# | recomputation of blocks of layers | 70 | 70 | 20 | 95 |
# | long rows: attention in blocks of queries, masks without booleans (all); limits | 140 | 140 | 140 | 205 |
# | more vision families: additions to layers, positions in axes; towers, processors | 15 | 15 | 15 | 500 |
# | the mesh axis `context` | 90 | 170 | 170 | 225 |
# | trained embeddings | 160 | 450 | | 510 |
# | LFM2-VL: tower, tiles, a processor without torchvision | | | | 150 |
# | objectives state the models that they run; one ladder for memory; the compiler before a launch | 20 | 30 | | 250 |
# | docstrings with all that a caller must know | 290 | 920 | 425 | 2,970 |
CLOSURES = {
    "training.step": 6_860, "training.trainer": 18_670, "generation.generator": 8_800, "recipes.sft": 51_660,
}  # fmt: skip

# The most modules of the kit that a module imports; goals: 15, and 25 for recipes and the modules on top.
FAN_OUT = 15
FAN_OUTS = {
    "recipes.replica": 23, "recipes.sft": 18, "planning.compiler.trace": 16,
    "generation.reference_check": 16,  # it compares models with images, too
    "planning.compiler.compile_check": 17,  # the key of an answer has all that a program depends on, of two backends
}  # fmt: skip

# Identifier of a feature -> its own modules, and the most other modules that name it (goal: 3). The configuration and
# the command line may name any feature.
ANYWHERE = ("config", "cli")
TENTACLES = {
    "on_policy": (("training.losses.sampled_updates", "training.losses.rollout_programs"), 4),
    "prefix_ids": (
        ("model.loop.layer_inputs", "training.losses.policy_gradient", "data.pairs"),
        1,
    ),  # the kernel for TPU
    "teacher": (("training.losses.distillation", "training.losses.teacher_files"), 10),
    "error_correction": (("extras.error_correction.head",), 0),
    "kept_after": (("model.loop.layer_calls",), 1),
}

# Objectives, models and sampled updates state their cost to planning, which names none of these features.
NOT_IN_PLANNING = (
    "on_policy", "teacher", "distill", "on_pairs", "preference", "images", "error_correction", "policy",
    "num_generations", "prefix_ids",
)  # fmt: skip

# State, patches and attributes of models that reach other code without arguments or results, with reasons. Goals: 8, 8
# and 3.
STATE = {
    "data.stream.feeder: _stream": "a process of a pool gets the stream once, and then its rows",
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
    "notebook.displays.runs: os.environ[NO_BAR]": "tells launched processes that the notebook draws the progress",
    "training.step: torch._dynamo.config.recompile_limit": "torch.compile has no argument for it",
    "torch_tpu.device: os.environ['TPU_LIBRARY_PATH']": "torch_tpu reads it, and its import sets libtpu's",
    "torch_tpu.process_group: os.environ": "torch_tpu reads there which chip a process has, and which the others",
    "torch_tpu.without_chip: export.fx_to_mlir": "torch_tpu lowers the body of a loop by it, and would compile it",
    "xla.pallas: tpu_custom_call.get_ir_version": "jax 0.7 serialises for a newer libtpu than torch_xla's",
    "xla.sharding: jax.config": "torch_xla's sharding is that of GSPMD",
}
ON_MODELS = {
    "exporting.streaming: model.generation_config": "transformers saves what the model carries",
    "extras.error_correction.head: model.objective": "the head trains with the model",
    "model.families.vision: layer.__class__": "a layer that takes an addition stays the family's class",
    "model.families.vision: layer.addition": "layers that take other additions are no turns of one loop",
    "model.loop.activation_checkpointing: layer.__class__": "a layer that recomputes stays the family's class",
    "model.trainable: model._tpu_kit_compute_dtype": "the dtype of autocast; copies of the model keep it",
    "model.weights.loading: model.name_or_path": "the cache of integers is read under the model's own name",
    "training.losses.distillation: model.objective": "the projections train with the model",
    "training.losses.distillation: model.teacher": "the teacher moves and is sharded with the model",
}


def test_what_a_module_needs() -> None:
    measured = {name: KIT.closure_lines(name) for name in CLOSURES}
    for name, lines in measured.items():
        print(f"{name:24} closure {len(KIT.closure(name)):4} modules {lines:7,} lines, at most {CLOSURES[name]:,}")
    assert all(lines <= CLOSURES[name] for name, lines in measured.items()), measured


def test_how_many_modules_a_module_imports() -> None:
    measured = {name: len(imports) for name, imports in KIT.imports.items()}
    for name in sorted(measured, key=lambda name: -measured[name])[:10]:
        print(f"{name:24} imports {measured[name]:3} modules, at most {FAN_OUTS.get(name, FAN_OUT)}")
    wrong = {name: count for name, count in measured.items() if count > FAN_OUTS.get(name, FAN_OUT)}
    assert not wrong


@pytest.mark.parametrize("identifier", TENTACLES)
def test_a_feature_is_named_in_its_own_files(identifier: str) -> None:
    owners, most = TENTACLES[identifier]
    assert all(owner in KIT.sources for owner in owners), "an owner has moved"
    others = KIT.tentacles(identifier, (*owners, *ANYWHERE))
    print(f"{identifier:24} named by {len(others):3} other modules, at most {most}")
    assert len(others) <= most, others


@pytest.mark.parametrize("identifier", NOT_IN_PLANNING)
def test_planning_names_no_feature(identifier: str) -> None:
    assert not [name for name in KIT.tentacles(identifier, ()) if name.startswith("planning.")]


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
