"""Every branch that only a TPU takes, found in the code, with its coverage without a TPU."""

from __future__ import annotations

import ast
import re

from tests.support.child_processes import REPOSITORY

PACKAGE = REPOSITORY / "tpu_kit"


def _values(node: ast.AST) -> set[object]:
    """The constants of a comparison's side, or of a dict's keys."""
    elements = node.elts if isinstance(node, ast.Tuple | ast.Set | ast.List) else [node]
    return {one.value for one in elements if isinstance(one, ast.Constant)}


def asks_for_a_tpu(node: ast.AST) -> bool:
    """Whether a condition separates a TPU from all other devices; ("tpu", "xla-cpu") includes the rehearsal."""
    if isinstance(node, ast.Compare):
        sides = [_values(side) for side in (node.left, *node.comparators)]
    elif isinstance(node, ast.Dict):
        sides = [{key.value for key in node.keys if isinstance(key, ast.Constant)}]
    else:
        asked = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        return asked in ("tpus", "nodes", "tpu_devices")
    return any(side & {"tpu", "TPU"} and "xla-cpu" not in side for side in sides)


def written(node: ast.AST) -> str:
    return ast.unparse(node).replace("'", '"')


def find_branches(source: str, stem: str) -> dict[str, int]:
    """The number of such expressions per function: "stem.qualified.name" to the count."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}"
        if isinstance(node, ast.ClassDef) and 'device_type = "tpu"' in map(written, node.body):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found[f"{name}.{method.name}"] = 1
        if asks_for_a_tpu(node):
            found[name] = found.get(name, 0) + 1
        for child in ast.iter_child_nodes(node):
            visit(child, name)

    visit(ast.parse(source), stem)
    return found


COMPILER = "traced as a TPU's replica, and taken by the TPU compiler"
RECORDED = "given what was recorded of a machine with a TPU, or of its runtime"
RUNS = "runs here: it does not ask for a device of this machine"
THROUGH = "run on XLA:CPU through torch_tpu, whose device is named tpu, in an environment of its own"
NEVER = "never run; tests/README.md says so"
# The number of such expressions, their coverage, and the test module, or words of tests/README.md.
VERIFY = "the calls of `verify` on a chip: compiled kernels, its larger shapes, its time limit"
BRANCHES: dict[str, tuple[int, str, str]] = {
    "model_loading._read": (1, NEVER, "the cast of a small model's fp32 weights to bf16 before it answers"),
    "attention._attend": (1, THROUGH, "test_runs"),
    "device.has_kernels": (1, THROUGH, "test_compile"),
    "program.is_traced": (1, THROUGH, "test_runs"),
    "pallas._call": (1, THROUGH, "test_compile"),
    "scan.replace_contents": (1, THROUGH, "test_runs"),
    "limits.check_machine": (4, RECORDED, "test_runtime"),
    "claims.Claims._learns": (1, NEVER, VERIFY),
    "doctor.diagnose": (5, NEVER, "the doctor's rows"),
    "hosts.find_hosts": (1, RECORDED, "test_hosts"),
    "host.chips_of": (2, NEVER, "MFU and cost by the chip's name"),
    "install._kind": (1, RUNS, "test_install"),
    "install._pair": (1, RUNS, "test_install"),
    "install._ways_out": (1, RUNS, "test_install"),
    "kv_cache.heads_beside": (1, THROUGH, "test_runs"),
    "launch._check_host": (2, RECORDED, "test_launch"),
    "checks.check_holder": (1, RECORDED, "test_checks"),
    "checks.check_metadata": (1, RECORDED, "test_checks"),
    "checks.check_settings": (2, RECORDED, "test_checks"),
    "checks.check_tpu": (2, RECORDED, "test_checks"),
    "checks.verdict": (2, RECORDED, "test_cells"),
    "checks.Machine.tpu_devices": (1, RECORDED, "test_checks"),
    "checks.Machine.tpu_signs": (2, RECORDED, "test_runtime"),
    "checks.preset_per_process": (1, RECORDED, "test_checks"),
    "preflight._table": (1, RECORDED, "test_preflight"),
    "smoke_test._splash": (
        1,
        NEVER,
        VERIFY,
    ),
    "smoke_test": (1, NEVER, VERIFY),
    "verify._Checks.__init__": (1, NEVER, VERIFY),
    "verify._Checks._cores": (1, NEVER, VERIFY),
    "verify._Checks._time": (1, NEVER, VERIFY),
    "verify._Checks._shapes": (
        1,
        NEVER,
        VERIFY,
    ),
    "preflight.Preflight.device_bytes": (1, RECORDED, "test_peak_memory"),
    "preflight.check_before_launch": (1, RECORDED, "test_rollouts"),
    "preflight.settle": (1, RECORDED, "test_preflight"),
    "preflight._Asks.__call__": (1, RECORDED, "test_preflight"),
    "ladder.remats": (1, RECORDED, "test_preflight"),
    "install.decide": (1, RUNS, "test_install"),
    "slice_job._run_problems": (1, RUNS, "test_pods"),
    "install.look": (1, RECORDED, "test_install"),
    "report._backward_pass": (1, RUNS, "test_planner"),
    "traced_program.kernels_on": (1, COMPILER, "test_attention"),
    "traced_program.runs_kernels": (1, COMPILER, "test_trace"),
    "traced_program.on_tpu": (1, NEVER, "the question whether experts run by their kernel"),
    "output_location.find_place": (1, RECORDED, "test_output_location"),
    "worker": (1, NEVER, "the start of a process for each chip by `xmp.spawn`"),
    "worker._xla_replica": (1, NEVER, "the start of a process for each chip by `xmp.spawn`"),
    "worker._processes": (1, NEVER, "the start of a process for each chip by `xmp.spawn`"),
    "oom_recovery.out_of_memory": (1, RECORDED, "test_oom_recovery"),
    "oom_recovery.next_setting": (1, RECORDED, "test_oom_recovery"),
    "detection.device_memory_budget": (2, RECORDED, "test_preflight"),
    "detection.seen_on": (1, RECORDED, "test_preflight"),
    "detection": (1, RECORDED, "test_runtime"),
    "backends.TpuRuntime.__init__": (1, COMPILER, "test_trace"),
    "backends.TpuRuntime.exchange": (
        1,
        NEVER,
        "the numbers of threads and processes in an exchange",
    ),
    "backends.TpuRuntime.barrier": (1, NEVER, "the barrier by `xm.rendezvous`"),
    "backends.TpuRuntime.memory": (1, NEVER, "the memory that the runtime reports"),
    "preflight._placed": (1, RECORDED, "test_mesh_choice"),
    "preflight._scores": (1, RECORDED, "test_long_rows"),
    "preflight._padding": (1, RECORDED, "test_long_rows"),
    "detection.detect": (1, RECORDED, "test_runtime"),
    "detection._mesh": (3, RECORDED, "test_runtime"),
    "detection._replicas": (1, RECORDED, "test_runtime"),
    "detection._choose": (3, RECORDED, "test_runtime"),
    "detection._require": (3, RECORDED, "test_runtime"),
    "launch._settings": (1, NEVER, "its environment"),
    "launch._environment": (1, RECORDED, "test_checks"),
}


def test_an_expression_that_tells_a_tpu_is_found() -> None:
    source = """
class A:
    def one(self): return rt.device_type == "tpu" and at.tpus()
    def two(self): return rt.device_type in ("tpu", "cuda") or {"tpu": 1}[asked]
    def rehearsed(self): return rt.device_type in ("tpu", "xla-cpu") or device == "cuda" or print("tpu")
class B(A):
    device_type = "tpu"
    def three(self): pass
"""
    assert find_branches(source, "stem") == {"stem.A.one": 2, "stem.A.two": 2, "stem.B.three": 1}


def test_every_branch_that_a_tpu_alone_takes_is_listed_with_how_it_is_covered() -> None:
    found: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        found |= find_branches(path.read_text(), path.stem)
    assert found == {name: count for name, (count, _, _) in BRANCHES.items()}


def test_what_covers_a_branch_is_there_and_the_readme_states_the_others() -> None:
    modules = {path.stem for path in (REPOSITORY / "tests").rglob("test_*.py")}
    readme = re.sub(r"\s+", " ", (REPOSITORY / "tests" / "README.md").read_text())
    for name, (_, kind, where) in BRANCHES.items():
        assert where in (readme if kind == NEVER else modules), (name, where)
