"""Compiles the training step with the real TPU compiler, on any machine, to tell exactly whether it fits.

The step is traced without weights and compiled by the compile-only client of libtpu in a child process: the caller must
not import torch_xla, and only the end of its process stops a compile. The child opens no chip and takes no lock, so it
may run beside a training run. Answers are kept on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tpu_kit.config.loader import ConfigError, TrainConfig
from tpu_kit.distributed.child_process import run_child, xla_cpu_environment
from tpu_kit.machine.chips import CHIPS, GIB, Topology
from tpu_kit.machine.compatibility import PAIRINGS
from tpu_kit.machine.slices import find_topology
from tpu_kit.machine.storage import atomic
from tpu_kit.model.families.input_work import inputs_of
from tpu_kit.model.shape_cache import read_shape, shape_key
from tpu_kit.planning.compiler.step_estimate import Sizes, estimated_seconds, instruction_seconds
from tpu_kit.planning.cost import Collective, Work
from tpu_kit.planning.memory.activation_memory import objective_beside
from tpu_kit.torch_tpu.limits import compiler_problem, run_limits, tracer
from tpu_kit.training.losses.rollout_programs import rollout_of

Effort = Literal["full", "low"]


@dataclass(frozen=True)
class Operation:
    """The instructions of a step that one operation of the model became.

    Attributes:
        operation: of the model, such as "model/layers/3/mlp/aten__mm"; empty where the compiler does not tell.
        source: file and line of its Python code; empty likewise.
        kind: of the work: "matrix product", "kernel", "collective", "copy" or "elementwise".
        flops: of all its runs in a step.
        bytes: read from and written to HBM, likewise.
        seconds: that the compiler's cost model takes them for, likewise; 0 of collectives.
    """

    operation: str
    source: str
    kind: str
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The TPU compiler's figures of a step. Bytes are of one device; a figure is None where the step does not fit.

    Attributes:
        topology: the slice it was compiled for, such as "v5e:2x4".
        fits: whether the step runs: it compiled, and its total is within the limit.
        limit_bytes: the most that a program can have of a device's memory.
        argument_bytes: weights, state and batch.
        output_bytes: the new state.
        aliased_bytes: the part of the outputs that is written over arguments.
        temporary_bytes: buffers that live only during the step, at its peak.
        code_bytes: the program.
        total_bytes: arguments + (outputs - aliased) + temporaries + code; if the step did not compile, what the
            compiler's error says, without outputs.
        flops: floating point operations of a step on one device, each trip of a loop counted; of splash attention,
            which reports none, by formula.
        bytes_accessed: bytes that its instructions read and write in any memory, by the compiler.
        hbm_bytes: bytes that they read from HBM and write to it. Each fusion of an asynchronous collective counts its
            buffers.
        collectives: by kind.
        operations: what each operation of the model costs.
        estimated: by kind of work, the seconds that the compiler's cost model makes of it; see `step_estimate`.
        out_of_memory: the compiler's error, if the step does not fit.
        trace_seconds: seconds to trace the step.
        compile_seconds: seconds to compile it.
        libtpu: version of the compiler.
        program: a hash of the program.
        cached: whether nothing was compiled, because the answer was on disk.
    """

    topology: str
    fits: bool
    limit_bytes: int
    argument_bytes: int | None = None
    output_bytes: int | None = None
    aliased_bytes: int | None = None
    temporary_bytes: int | None = None
    code_bytes: int | None = None
    total_bytes: int
    flops: float | None = None
    bytes_accessed: float | None = None
    hbm_bytes: float | None = None
    collectives: tuple[Collective, ...] = ()
    operations: tuple[Operation, ...] = ()
    estimated: Mapping[str, float] = field(default_factory=dict)
    out_of_memory: str | None = None
    trace_seconds: float
    compile_seconds: float
    libtpu: str
    program: str
    cached: bool = False

    def generation_work(self) -> Work:
        """What `cost.step_time` takes of a program of generation: the traffic of HBM; and products wait for data."""
        moved = tuple(replace(one, synchronous=one.moved) for one in self.collectives)
        return Work(self.flops or 0.0, self.hbm_bytes or 0.0, moved)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Compiled:
        """Reads the result of `asdict`."""
        kinds: dict[str, type] = {"collectives": Collective, "operations": Operation}
        lists = {name: tuple(kind(**one) for one in values.get(name, ())) for name, kind in kinds.items()}
        return Compiled(**{**values, **lists})

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        text = f"{verdict} {self.topology}: {self.total_bytes / GIB:.2f} of {self.limit_bytes / GIB:.2f} GiB"
        if self.argument_bytes is None or self.temporary_bytes is None or self.bytes_accessed is None:
            return text
        return (
            f"{text} ({self.argument_bytes / GIB:.2f} arguments, {self.temporary_bytes / GIB:.2f} temporaries), "
            f"{(self.flops or 0) / 1e12:.1f} TFLOP, {self.bytes_accessed / 1e9:.1f} GB moved, "
            f"compiled in {self.compile_seconds:.0f} s"
            + (f", {1000 * sum(self.estimated.values()):.1f} ms by its cost model" if self.estimated else "")
        )


CACHE = Path("~/.cache/tpu_kit/compiled")

_NEEDED = ("torch_xla", "jax", "jaxlib", "libtpu")  # of torch_tpu's programs `limits` tells
# The modules that run the compiler and read its answer.
_READERS = (
    "tpu_kit.planning.compiler.compile_check", "tpu_kit.planning.compiler.step_estimate", "tpu_kit.xla.compiler",
    "tpu_kit.xla.hlo",
)  # fmt: skip
# What no program depends on, but for the mesh, the length of rows and the columns of a batch, which are in the key.
_NOT_TRACED = ("data", "checkpoint", "launch", "tracking", "hub", "output_dir", "run_name")
_VERSIONS = ("torch", "transformers", "peft", "jax", "jaxlib")
# No lock on the chips, no log files; and kernels without their source lines, which would make another program where the
# kit lies in another folder.
_ENVIRONMENT = {
    "XLA_ALWAYS_ALLREDUCE": "1", "XLA_HLO_DEBUG": "1", "XLA_IR_DEBUG": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled", "TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3",
}  # fmt: skip


class CompilerUnavailable(ValueError):
    """The TPU compiler is not installed, or its version is not known; the text says what to do."""


class CompileTimeout(RuntimeError):
    """The compile was not done after the time limit."""


def compile_step(
    config: TrainConfig,
    chip: str,
    *,
    num_replicas: int = 1,
    effort: Effort = "full",
    progress: bool = True,
    cache_dir: Path | None = None,
    time_limit: float | None = None,
    part: str = "step",
    sizes: Mapping[str, int] | None = None,
) -> Compiled:
    """Compiles the training step of `config` for a TPU. Not fitting is a result, not an error.

    Args:
        config: the run. Its model may be a folder with nothing but a config.json; no weight is read or made.
        chip: a topology ("v5e:2x4"), or a chip ("v5e"): the smallest slice with room for the replicas.
        num_replicas: data-parallel replicas, one per device; their all-reduce is in the program.
        effort: "full" for the exact figures; "low" is some 6 times quicker, and its temporaries differ by 1.5 to 8 %,
            mostly down.
        progress: whether to print each phase with its time to stderr.
        cache_dir: folder of the answers; ~/.cache/tpu_kit/compiled by default.
        time_limit: seconds after which the process that compiles is killed.
        part: the "step"; "accumulate" or "apply" of an update that is two programs; or a program of generation.
        sizes: of a program of generation, as `trace.trace_generation` takes them.

    Raises:
        CompilerUnavailable: libtpu or a package that drives it is not installed, or not in a known version.
        ConfigError: the run is for torch_tpu, which does not train it.
        ValueError: unknown chip, no such topology, too few devices; no config.json; or the step cannot be traced: the
            model, the adapters or the batch do not allow it.
        RuntimeError: the process that compiles died; a `CompileTimeout` if the time limit was exceeded.
    """
    kind, topology = find_topology(chip, num_replicas)
    if problems := run_limits(config):
        raise ConfigError(problems)
    libtpu = check_available(config.launch.device_type)
    folder = cache_dir or CACHE.expanduser()
    compiler = repr((topology, num_replicas, effort, libtpu, _source(*_READERS)))
    suffix = hashlib.sha256(compiler.encode()).hexdigest()[:16]
    asked = folder / f"plan-{_request_key(config, num_replicas, part, sizes)}-{suffix}.json"
    if (known := _read(asked)) is not None:
        return known
    request = {
        "config": config.to_dict(), "num_replicas": num_replicas, "topology": asdict(topology), "effort": effort,
        "suffix": suffix, "cache": str(folder), "parent": os.getpid(), "part": part, "sizes": sizes and dict(sizes),
        "about": {"topology": str(topology), "libtpu": libtpu, "limit_bytes": kind.usable_hbm_bytes},
    }  # fmt: skip
    refuses = None if tracer(config.launch.device_type) == "torch_tpu" else False  # whether it names what XLA lacks
    compiled = Compiled.from_dict(_in_child(request | {"refuses": refuses}, progress, time_limit))
    _write(asked, compiled)
    return compiled


def compile_programs(
    config: TrainConfig, topology: str | None, num_devices: int, *, seconds: float | None = None, **options: Any
) -> dict[str, Compiled]:
    """As `compile_step` for each program of a run, by name.

    Args:
        config: the run.
        topology: the slice; None where the compiler has none.
        num_devices: replicas, or devices of the mesh.
        seconds: time limit of all programs together.
        options: of `compile_step`.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    if topology is None:
        raise CompilerUnavailable("the compiler has no topology for this slice")
    asked: dict[str, Mapping[str, int] | None] = {"step": None}
    if rollout := rollout_of(config, 1 if config.launch.mesh else num_devices):
        asked = {**rollout.programs, "accumulate": None, "apply": None}
    return {
        part: compile_step(
            config, topology, num_replicas=num_devices, part=part, sizes=sizes,
            time_limit=None if seconds is None else max(0.0, end - time.monotonic()), **options,
        )
        for part, sizes in asked.items()
    }  # fmt: skip


def check_available(device_type: str = "tpu") -> str:
    """Returns the version of the TPU compiler for `launch.device_type`.

    Raises:
        CompilerUnavailable: it cannot be used here.
    """
    if tracer(device_type) == "torch_tpu":
        if problem := compiler_problem():
            raise CompilerUnavailable(problem)
        return version("libtpu")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing and not compiler_problem():
        raise CompilerUnavailable(
            f"the TPU compiler needs {', '.join(missing)}, not installed beside torch_tpu; set launch.device_type="
            "torch-tpu, whose compiler is here"
        )
    if missing:
        raise CompilerUnavailable(
            f"the TPU compiler needs {', '.join(missing)}, not installed here: pip install -r requirements-tpu.txt "
            "(Linux, Python 3.11 to 3.13)"
        )
    found, known = version("libtpu"), [one for pairing in PAIRINGS for one in pairing.libtpu]
    if found not in known:
        raise CompilerUnavailable(
            f"libtpu is {found}; the kit reads the answers of {', '.join(known)}: "
            f"pip install libtpu=={PAIRINGS[0].versions(sys.version_info[:2])['libtpu']}"
        )
    return found


def _in_child(request: dict[str, Any], progress: bool, time_limit: float | None) -> dict[str, Any]:
    """Runs this module in a process and returns its answer; the process ends with the call, whatever happens."""
    start = time.monotonic()

    def show(phase: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {phase}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="tpu_kit-compile-") as folder:
        try:
            done = run_child(
                ["-m", "tpu_kit.planning.compiler.compile_check"],
                xla_cpu_environment() | _ENVIRONMENT | {"TMPDIR": folder},
                given=json.dumps(request | {"folder": folder}) + "\n", on_line=show if progress else None,
                seconds=time_limit,
            )  # fmt: skip
        except TimeoutError:
            raise CompileTimeout(f"the compile was not done after the time limit of {time_limit:.3g} s") from None
        result = Path(folder, "result.json")
        if not result.is_file() and done.status < 0 and request["refuses"] is False:
            left = None if time_limit is None else max(0.0, time_limit - (time.monotonic() - start))
            return _in_child(request | {"refuses": True}, progress, left)  # to name the operation, if it was one
        if not result.is_file():
            raise RuntimeError(f"the process that compiles ended with {done.how}:\n{done.errors[-4000:]}")
        answer: dict[str, Any] = json.loads(result.read_text())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def main() -> None:
    """Compiles the request on stdin, in the child: writes `result.json`, and each phase to stdout."""
    from tpu_kit.xla.traced_program import refusing

    request = json.loads(sys.stdin.readline())
    phases = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the libraries' prints go where their warnings go
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the compile ends if the caller is killed
    if os.getppid() != request["parent"]:
        sys.exit(1)
    try:
        with refusing() if request["refuses"] else contextlib.nullcontext():
            answer = _compile(request, lambda phase: print(phase, file=phases))
    except ValueError as error:
        answer = {"error": str(error)}
    Path(request["folder"], "result.json").write_text(json.dumps(answer))
    os._exit(0)  # libtpu sometimes hangs at exit


def _compile(request: dict[str, Any], show: Callable[[str], None]) -> dict[str, Any]:
    from tpu_kit.config.loader import load_config
    from tpu_kit.planning.compiler import torch_tpu_trace, trace
    from tpu_kit.xla.compiler import compile_program, fingerprint

    show("tracing")
    start = time.monotonic()
    config, devices, part = load_config(request["config"]), request["num_replicas"], request["part"]
    sizes = request["sizes"]
    if tracer(config.launch.device_type) == "torch_tpu":
        program = torch_tpu_trace.trace_step(config, devices, Topology(**request["topology"]))
    elif sizes:
        program = trace.trace_generation(config, devices, part, **sizes)
    else:
        program = trace.trace_step(config, devices, part)
    traced = {"program": fingerprint(program), "trace_seconds": time.monotonic() - start}
    file = Path(request["cache"], f"{traced['program']}-{request['suffix']}.json")
    if (known := _read(file)) is not None:
        return asdict(known)
    show(f"compiling for {request['topology']['name']}")
    sizes_of, chip = Sizes.of(read_shape(config.model), config.lora.r), CHIPS[request["topology"]["name"].split(":")[0]]
    answer = compile_program(
        program, request, lambda made, costs: {"estimated": estimated_seconds(made, costs, sizes_of, chip)},
        partial(instruction_seconds, chip=chip),
    )  # fmt: skip
    answer.pop("loop_trips", None)
    if (memory := answer.get("out_of_memory")) is not None:
        # Some errors leave the arguments out.
        argument = memory["argument_bytes"] or answer["argument_bytes"]
        total = memory["used_bytes"] + (0 if memory["argument_bytes"] else argument)
        answer |= {"argument_bytes": argument, "out_of_memory": memory["text"]}
    else:
        sizes = [answer[f"{name}_bytes"] for name in ("argument", "output", "temporary", "code")]
        total = sum(sizes) - answer["aliased_bytes"]
    fits = memory is None and total <= request["about"]["limit_bytes"]
    compiled = Compiled.from_dict(traced | answer | request["about"] | {"total_bytes": total, "fits": fits})
    _write(file, compiled)
    return asdict(compiled)


# -------------------------------------------------------------------------------------------------------- the cache


def _request_key(config: TrainConfig, num_replicas: int, part: str, sizes: Mapping[str, int] | None) -> str:
    """Hashes everything that determines the program: the run, the model's configuration, the code, and the versions."""
    values, objective = config.to_dict(), objective_beside(config)
    others = [one.model for one in objective.cost(1, 1).frozen] if objective else []
    shape = {name: value for name, value in values.items() if name not in _NOT_TRACED}
    mesh, by = [config.launch.mesh, config.launch.mesh_rules], tracer(config.launch.device_type)
    beside = inputs_of(config)
    columns = repr([objective and dict(objective.columns), beside and dict(beside.columns)])
    shape |= {"max_length": config.data.max_length, "mesh": mesh, "part": part, "sizes": sizes and dict(sizes)}
    shape |= {"columns": columns}
    parts = [
        json.dumps(shape, sort_keys=True), *map(shape_key, [config.model, *others]), str(num_replicas),
        _source(), by, *(version(name) for name in (by, *_VERSIONS)),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@cache
def _source(*modules: str) -> str:
    """Hashes the code of modules, or of the package: changed code may trace another program, or read another answer."""
    package = Path(__file__).parents[2]
    paths = [package.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in modules]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths or sorted(package.rglob("*.py")))).hexdigest()


def _read(path: Path) -> Compiled | None:
    try:
        return replace(Compiled.from_dict(json.loads(path.read_text())), cached=True)
    except (OSError, ValueError, TypeError, KeyError):  # no file, or half of one
        return None


def _write(path: Path, compiled: Compiled) -> None:
    """Keeps an answer; if the folder cannot be written to, the next call compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps(asdict(compiled)), shared=True)
    except OSError:
        pass


if __name__ == "__main__":
    main()
