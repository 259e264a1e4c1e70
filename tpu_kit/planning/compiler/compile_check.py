"""Compiles the training step with the real TPU compiler, on any machine, to find out whether it fits.

A child process traces the step without weights and compiles it with libtpu's compile-only client: the caller must not
import torch_xla, and only killing the process stops a compile. The child opens no chip and takes no lock, so it may run
beside a training run. Results are kept on disk.
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
    """Cost of the instructions that an operation of the model was compiled to. Figures sum all its runs in a step.

    Attributes:
        operation: path in the model, such as "model/layers/3/mlp/aten__mm"; empty if the compiler does not report it.
        source: file and line of its Python code; empty likewise.
        kind: kind of work: "matrix product", "kernel", "collective", "copy" or "elementwise".
        flops: floating point operations.
        bytes: bytes read from and written to HBM.
        seconds: time by the compiler's cost model; 0 for collectives.
    """

    operation: str
    source: str
    kind: str
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The TPU compiler's figures of a step. Bytes are per device; figures may be None if the step does not fit.

    Attributes:
        topology: the target slice, such as "v5e:2x4".
        fits: whether the step compiled and `total_bytes` is within `limit_bytes`.
        limit_bytes: device memory that a program can use.
        argument_bytes: weights, state and batch.
        output_bytes: the new state.
        aliased_bytes: the part of the outputs that overwrites arguments.
        temporary_bytes: peak of the buffers that live only during the step.
        code_bytes: the program.
        total_bytes: arguments + (outputs - aliased) + temporaries + code; if the step did not compile, the figure in
            the compiler's error, without outputs.
        flops: floating point operations of a step on one device, with every trip of a loop; splash attention reports
            none, so a formula adds them.
        bytes_accessed: bytes that instructions read and write in any memory, as the compiler reports.
        hbm_bytes: bytes that instructions read from and write to HBM. Every fusion of an asynchronous collective
            counts its buffers.
        collectives: by kind.
        operations: costs by operation of the model.
        estimated: kind of work -> seconds by the compiler's cost model; see `step_estimate`.
        out_of_memory: the compiler's error, if the step does not fit.
        trace_seconds: seconds to trace the step.
        compile_seconds: seconds to compile it.
        libtpu: version of the compiler.
        program: a hash of the program.
        cached: whether the result was read from disk.
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
        """Returns the work of a program of generation for `cost.step_time`; none of its collectives overlap."""
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

_NEEDED = ("torch_xla", "jax", "jaxlib", "libtpu")  # of torch_xla; see `torch_tpu.limits` for torch_tpu
# Modules that run the compiler and read its result.
_READERS = (
    "tpu_kit.planning.compiler.compile_check", "tpu_kit.planning.compiler.step_estimate", "tpu_kit.xla.compiler",
    "tpu_kit.xla.hlo",
)  # fmt: skip
# Sections on which no program depends; the key adds the mesh, the row length and the columns of a batch.
_NOT_TRACED = ("data", "checkpoint", "launch", "tracking", "hub", "output_dir", "run_name")
_VERSIONS = ("torch", "transformers", "peft", "jax", "jaxlib")
# No lock on the chips, no log files, and no source lines in kernels: with them, the program would depend on the folder
# of the kit.
_ENVIRONMENT = {
    "XLA_ALWAYS_ALLREDUCE": "1", "XLA_HLO_DEBUG": "1", "XLA_IR_DEBUG": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled", "TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3",
}  # fmt: skip


class CompilerUnavailable(ValueError):
    """The TPU compiler is not installed, its version is unknown, or it has no topology for the slice."""


class CompileTimeout(RuntimeError):
    """The compile exceeded the time limit."""


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
    """Compiles the training step of `config` for a TPU, or reads it from disk; a step that does not fit is no error.

    Args:
        config: the run. Its model may be a folder with only a config.json; no weights are read or made.
        chip: a topology ("v5e:2x4"), or a chip ("v5e") for the smallest slice with enough devices.
        num_replicas: data-parallel replicas, one per device, whose all-reduce the program contains; with launch.mesh,
            number of devices of the mesh.
        effort: "full" for exact figures; "low" is about 6 times faster, and its temporaries differ by 1.5 to 8 %,
            mostly downwards.
        progress: whether to print each phase with its time to stderr.
        cache_dir: folder of the results; None: ~/.cache/tpu_kit/compiled.
        time_limit: seconds after which the compiling process is killed; None: no limit.
        part: the "step"; "accumulate" or "apply" for an update of two programs; or a program of generation: "prefill",
            "samples" or "decode".
        sizes: keyword arguments of `trace.trace_generation` for a program of generation; None for the others.

    Raises:
        CompilerUnavailable: libtpu or a package that drives it is missing or has an unknown version.
        ConfigError: the run is for torch_tpu, with settings that torch_tpu does not support (`run_limits`).
        ValueError: the chip or topology is unknown; the slice has too few devices; there is no config.json; or the
            model, the adapters or the batch cannot be traced.
        RuntimeError: the compiling process died; a `CompileTimeout` if it exceeded the time limit.
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
    refuses = None if tracer(config.launch.device_type) == "torch_tpu" else False  # True: name operations XLA lacks
    compiled = Compiled.from_dict(_in_child(request | {"refuses": refuses}, progress, time_limit))
    _write(asked, compiled)
    return compiled


def compile_programs(
    config: TrainConfig, topology: str | None, num_devices: int, *, seconds: float | None = None, **options: Any
) -> dict[str, Compiled]:
    """Compiles every program of a run with `compile_step`; returns the results by program name.

    A program that does not fit is no error. A run that samples has "prefill", "samples" (if a prompt has several),
    "decode", "accumulate" and "apply". Other runs have only "step".

    Args:
        config: the run.
        topology: the slice; None if the compiler has no topology for it, which raises CompilerUnavailable.
        num_devices: replicas, or devices of the mesh.
        seconds: time limit for all programs together, after which CompileTimeout is raised; None: no limit.
        options: more keyword arguments of `compile_step`, whose errors are raised.
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
    """Checks the TPU compiler of TorchTPU for "torch-tpu", of torch_xla for other types; returns libtpu's version.

    Raises:
        CompilerUnavailable: a package is missing, or libtpu has a version that the kit does not know.
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
    """Runs this module in a child process, and returns `asdict` of its `Compiled`; raises as `compile_step`.

    `progress` and `time_limit` are as there. If a signal ends the child, it runs once more with `refuses`, so that the
    error names an unsupported operation.
    """
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
            return _in_child(request | {"refuses": True}, progress, left)  # names an operation, if it was the cause
        if not result.is_file():
            raise RuntimeError(f"the process that compiles ended with {done.how}:\n{done.errors[-4000:]}")
        answer: dict[str, Any] = json.loads(result.read_text())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def main() -> None:
    """Compiles the request on stdin, a line of JSON, and ends the process, which `compile_step` started.

    Writes `result.json`, {"error": text} for a ValueError, to the request's "folder", and the phases to stdout.
    """
    from tpu_kit.xla.traced_program import refusing

    request = json.loads(sys.stdin.readline())
    phases = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries' prints go to stderr, like their warnings
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the caller
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
    """Traces and compiles a request; returns `asdict` of its `Compiled`, which is read from or written to the cache."""
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
        # Some errors do not report the arguments.
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
    """Hashes everything that determines the program: run, model configuration, code and versions."""
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
    """Hashes the code of `modules` or of the whole package: changed code may trace or read another program."""
    package = Path(__file__).parents[2]
    paths = [package.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in modules]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths or sorted(package.rglob("*.py")))).hexdigest()


def _read(path: Path) -> Compiled | None:
    """Reads a result, with `cached` set; None if the file is missing or incomplete."""
    try:
        return replace(Compiled.from_dict(json.loads(path.read_text())), cached=True)
    except (OSError, ValueError, TypeError, KeyError):  # no file, or an incomplete one
        return None


def _write(path: Path, compiled: Compiled) -> None:
    """Writes a result; if the folder cannot be written to, the next call compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps(asdict(compiled)), shared=True)
    except OSError:
        pass


if __name__ == "__main__":
    main()
