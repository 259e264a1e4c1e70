"""The exact answer to "does it fit?": the step that trains, compiled by the real TPU compiler on any machine.

    from tpu_kit.planning.compile_check import compile_step
    compiled = compile_step(config, "v5e", num_replicas=8)
    print(compiled, compiled.total_bytes, compiled.fits)

libtpu can compile for a TPU that is not there. The step is traced without weights and compiled in a process of its own
(`compile_worker`), which opens no chip and takes no lock: it may run beside a training. The compiler's answer is kept
on disk.

What the TPU compiler says of a step, as a plain record.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tpu_kit.config.loader import BatchPlan, TrainConfig, batch_arithmetic
from tpu_kit.config.mesh import resolve_mesh
from tpu_kit.distributed.child_process import run_child
from tpu_kit.hardware import chips
from tpu_kit.hardware.chips import GIB, Chip, Topology
from tpu_kit.hardware.compatibility import PAIRINGS
from tpu_kit.hardware.slices import find_topology
from tpu_kit.models.architecture import shipped_shape
from tpu_kit.storage import atomic

Effort = Literal["full", "low"]


@dataclass(frozen=True)
class Buffer:
    """One of the largest buffers at the peak.

    Attributes:
        bytes: its size in HBM, tiles filled up.
        shape: such as "bf16[4,1024,4864]".
        kind: "temporary", "output" or "argument".
        name: the compiler's name for it; of an argument, the model's.
        operation: where in the model it comes from, such as "model/layers/3/mlp/aten__mm".
        source: file and line of the Python code that made it.
    """

    bytes: int
    shape: str
    kind: str
    name: str
    operation: str
    source: str


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind, such as "all-reduce": how many a step runs, and the bytes of their results."""

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the TPU compiler says of a step. Bytes are of one device; a figure is None where the step does not fit.

    Attributes:
        chip: the chip's short name in `chips`.
        topology: the slice it was compiled for, such as "v5e:2x4".
        num_replicas: devices that share the update.
        batch_size: rows of each in a pass.
        gradient_accumulation: passes.
        effort: of the compiler; "low" is some 6 times quicker, and its temporaries differ by 1.5 to 8 %, mostly down.
        fits: whether the step runs: it compiled, and its total is within the limit.
        limit_bytes: what a program can have of a device's memory.
        argument_bytes: weights, state and batch.
        output_bytes: what the step returns: the new state.
        aliased_bytes: the part of the outputs that is written over arguments.
        temporary_bytes: what is alive only during the step, at its peak.
        code_bytes: the program.
        peak_bytes: the compiler's own figure of that name, for information: nowhere does it say what it counts, and it
            is neither the total nor always below it. None of answers that were kept before it was asked for.
        total_bytes: arguments + (outputs - aliased) + temporaries + code; of what did not compile, what the compiler
            says it would use (to 1 %, unaliased outputs not counted).
        flops: floating point operations of a step on one device, loop bodies counted at every trip. Kernels count what
            they say of themselves, and splash attention, which says nothing, by formula (`hlo.splash_flops`).
        bytes_accessed: bytes that its instructions read and write, counted so, too, wherever these lie.
        hbm_bytes: those of them that come from HBM or go there, the rest being in on-chip memory (`hlo.hbm_bytes`).
        collectives: by kind.
        largest_buffers: those alive at the peak, largest first.
        loop_trips: how often each loop turns, by its name; None where the text does not tell (counted as once).
        out_of_memory: the compiler's text, of what does not fit.
        trace_seconds: time to trace the step, and `compile_seconds` to compile it. From the cache: what it took then.
        trace_host_bytes: the most memory that the process took while tracing.
        compile_seconds: see above.
        libtpu: version of the compiler.
        program: a hash of the program.
        cached: whether nothing was compiled, because the answer was known.
    """

    chip: str
    topology: str
    num_replicas: int
    batch_size: int
    gradient_accumulation: int
    effort: Effort
    fits: bool
    limit_bytes: int
    argument_bytes: int | None = None
    output_bytes: int | None = None
    aliased_bytes: int | None = None
    temporary_bytes: int | None = None
    code_bytes: int | None = None
    peak_bytes: int | None = None
    total_bytes: int
    flops: float | None = None
    bytes_accessed: float | None = None
    hbm_bytes: float | None = None
    collectives: tuple[Collective, ...] = ()
    largest_buffers: tuple[Buffer, ...] = ()
    loop_trips: Mapping[str, int | None]
    out_of_memory: str | None = None
    trace_seconds: float
    trace_host_bytes: int
    compile_seconds: float
    libtpu: str
    program: str
    cached: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; `from_dict` takes them back."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Compiled:
        """What `to_dict` returned."""
        lists = {
            "collectives": tuple(Collective(**one) for one in values["collectives"]),
            "largest_buffers": tuple(Buffer(**one) for one in values["largest_buffers"]),
        }
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
        )


CACHE = Path("~/.cache/tpu_kit/compiled")

_NEEDED = ("torch_xla", "jax", "jaxlib", "libtpu")
# What asks the compiler and reads its answer.
_READERS = (
    "tpu_kit.planning.compile_check", "tpu_kit.planning.compile_worker", "tpu_kit.xla.tpu_compiler", "tpu_kit.xla.hlo",
    "tpu_kit.xla.hlo_memory",
)  # fmt: skip
_VERSIONS = ("torch", "torch_xla", "transformers", "peft", "jax", "jaxlib")
# No question to the metadata server, no lock on the chips, no log files; torch_xla on the CPU, one thread; and kernels
# without the lines of code that they come from, or the kit in another folder would make another program.
_ENVIRONMENT = {
    "PJRT_DEVICE": "CPU", "XLA_ALWAYS_ALLREDUCE": "1", "XLA_HLO_DEBUG": "1", "XLA_IR_DEBUG": "1",
    "JAX_PLATFORMS": "cpu", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3", "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}  # fmt: skip
_NOT_INHERITED = ("XLA_", "TPU_", "LIBTPU_", "PJRT_", "JAX_", "CPU_NUM_DEVICES", "LOCAL_RANK", "RANK", "WORLD_SIZE")


class CompilerUnavailable(ValueError):
    """The TPU compiler is not here, or of a version that is not known; the text says what to do."""


def compile_step(
    config: TrainConfig,
    chip: str,
    *,
    num_replicas: int = 1,
    batch_size: int | None = None,
    effort: Effort = "full",
    progress: bool = True,
    cache_dir: Path | None = None,
    use_cache: bool = True,
    time_limit: float | None = None,
) -> Compiled:
    """Compiles the training step of `config` for a TPU. Not fitting is a result, not an error.

    Args:
        config: the run. Its model may be a folder with nothing but a config.json; no weight is read or made.
        chip: a chip's name ("v5e"), which takes the smallest slice with room for the replicas, or a topology
            ("v5e:2x4").
        num_replicas: data-parallel replicas, one per device; their all-reduce is in the program.
        batch_size: rows per replica in a pass, in place of `config.optim.batch_size`.
        effort: "low" to search, "full" to know.
        progress: say on stderr what is going on, and for how long.
        cache_dir: where answers are kept; ~/.cache/tpu_kit/compiled by default.
        use_cache: whether an answer that is there is taken.
        time_limit: seconds after which the compile is ended.

    Returns:
        What the compiler says. To cancel, interrupt it (Ctrl-C): nothing goes on in the background.

    Raises:
        CompilerUnavailable: libtpu or what drives it is not installed, or not in the version that is known.
        ValueError: unknown chip, no such topology, too few devices; or the step cannot be traced: the model, the
            adapters or the batch do not allow it.
        RuntimeError: the process that compiles died, or the time limit was exceeded.
    """
    kind, topology = find_topology(chip, num_replicas)
    config = with_shipped_shape(config, cache_dir)
    if kind.name in chips.NO_KERNELS and config.model.attention == "auto":
        config = replace(config, model=replace(config.model, attention="sdpa"))
    if batch_size is not None:
        config = replace(config, optim=replace(config.optim, batch_size=batch_size))
    mesh = resolve_mesh(config.launch.mesh, num_replicas) if config.launch.mesh else None
    plan = batch_arithmetic(config, mesh.batch_shards if mesh else num_replicas)
    libtpu = check_available()
    folder = cache_dir or CACHE.expanduser()
    suffix = hashlib.sha256(repr((topology, num_replicas, effort, libtpu, _source(*_READERS))).encode()).hexdigest()[
        :16
    ]
    asked = folder / f"plan-{_request_key(config, num_replicas)}-{suffix}.json"
    if use_cache and (known := _read(asked)) is not None:
        return known
    request = {
        "config": config.to_dict(), "num_replicas": num_replicas, "topology": asdict(topology), "effort": effort,
        "suffix": suffix, "known": str(folder) if use_cache else None, "parent": os.getpid(),
    }  # fmt: skip
    answer = _in_child(request, progress, time_limit)
    if "known" in answer and (known := _read(Path(answer["known"]))) is not None:
        compiled = known
    else:
        compiled = _compiled(answer, kind, topology, plan, effort, libtpu)
        _write(folder / f"{compiled.program}-{suffix}.json", compiled)
    _write(asked, compiled)
    return compiled


def with_shipped_shape(config: TrainConfig, folder: Path | None = None) -> TrainConfig:
    """The run with its model given by a folder, where its shape comes with the kit; else as it is."""
    folder = folder or CACHE.expanduser()
    shape = shipped_shape(config.model)
    if shape is None:
        return config
    place = folder / "shapes" / config.model.name
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(shape))
    except OSError:  # the hub may still have it
        return config
    return replace(config, model=replace(config.model, name=str(place)))


def _compiled(
    answer: Mapping[str, Any], kind: Chip, topology: Topology, plan: BatchPlan, effort: Effort, libtpu: str
) -> Compiled:
    assert kind.usable_hbm_bytes is not None
    about: dict[str, Any] = {
        "chip": kind.name, "topology": topology.name, "num_replicas": plan.num_replicas, "effort": effort,
        "batch_size": plan.batch_size, "gradient_accumulation": plan.gradient_accumulation, "libtpu": libtpu,
        "limit_bytes": kind.usable_hbm_bytes,
        **{name: answer[name] for name in ("program", "trace_seconds", "trace_host_bytes", "compile_seconds")},
    }  # fmt: skip
    memory = answer.get("out_of_memory")
    if memory is not None:
        # Some texts leave the arguments out.
        found, argument = memory["largest_buffers"], answer["argument_bytes"]
        return Compiled(
            **about, fits=False, total_bytes=memory["used_bytes"] + (0 if memory["argument_bytes"] else argument),
            argument_bytes=memory["argument_bytes"] or argument, loop_trips={},
            largest_buffers=tuple(Buffer(**one) for one in found),
            out_of_memory=answer["out_of_memory_text"],
        )  # fmt: skip
    parts = [f"{name}_bytes" for name in ("argument", "output", "aliased", "temporary", "code")]
    argument, output, aliased, temporary, code = (answer[name] for name in parts)
    total = argument + output - aliased + temporary + code
    return Compiled(
        **about, fits=total <= kind.usable_hbm_bytes, total_bytes=total, flops=answer["flops"],
        bytes_accessed=answer["bytes_accessed"], hbm_bytes=answer["hbm_bytes"], loop_trips=answer["loop_trips"],
        collectives=tuple(Collective(**one) for one in answer["collectives"]),
        largest_buffers=tuple(Buffer(**one) for one in answer["largest_buffers"]),
        peak_bytes=answer["peak_bytes"],
        **{name: answer[name] for name in parts},
    )  # fmt: skip


def check_available() -> str:
    """The version of the TPU compiler.

    Raises:
        CompilerUnavailable: it cannot be used here.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CompilerUnavailable(
            f"the TPU compiler needs {', '.join(missing)}, not installed here: pip install -r requirements-tpu.txt "
            "(Linux, Python 3.11 to 3.13)"
        )
    found, known = version("libtpu"), [one for pairing in PAIRINGS for one in pairing.libtpu]
    if found not in known:
        raise CompilerUnavailable(
            f"libtpu is {found}; the kit reads the answers of {', '.join(known)}: "
            f"pip install libtpu=={PAIRINGS[0].libtpu_for(sys.version_info[:2])}"
        )
    return found


# -------------------------------------------------------------------------------------------------------- the child


def _in_child(request: dict[str, Any], progress: bool, time_limit: float | None) -> dict[str, Any]:
    """Runs `compile_worker` and returns its answer; ends it whatever happens here."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    with tempfile.TemporaryDirectory(prefix="tpu_kit-compile-") as folder, _progress(progress) as show:
        try:
            done = run_child(
                ["-m", "tpu_kit.planning.compile_worker"], inherited | _ENVIRONMENT | {"TMPDIR": folder},
                given=json.dumps(request | {"folder": folder}) + "\n", on_line=show, seconds=time_limit,
            )  # fmt: skip
        except TimeoutError:
            raise RuntimeError(f"the compile was not done after the time limit of {time_limit:g} s") from None
        result = Path(folder, "result.json")
        if not result.is_file():
            raise RuntimeError(f"the process that compiles ended with {done.how}:\n{done.errors[-4000:]}")
        answer: dict[str, Any] = json.loads(result.read_text())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[str], None]]:
    """Gives a function that says on stderr what the child is about; on a terminal with the seconds running."""
    import threading

    ended = threading.Event()
    phase = ["starting"]
    start = time.monotonic()
    terminal = sys.stderr.isatty()

    def show(line: str) -> None:
        phase[0] = line.strip()
        if shown and not terminal:
            print(f"{time.monotonic() - start:5.0f} s  {phase[0]}", file=sys.stderr, flush=True)

    def tick() -> None:
        while not ended.wait(1.0):
            print(f"\r\033[K{time.monotonic() - start:5.0f} s  {phase[0]}", end="", file=sys.stderr, flush=True)

    if shown and terminal:
        threading.Thread(target=tick, daemon=True).start()
    try:
        yield show
    finally:
        ended.set()
        if shown and terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------- the cache


def _request_key(config: TrainConfig, num_replicas: int) -> str:
    """A hash of everything the program follows from: the configuration, the model's, this package, and the versions."""
    values = config.to_dict()
    shape = {name: values[name] for name in ("model", "lora", "optim")}
    shape |= {"max_length": config.data.max_length, "mesh": config.launch.mesh}
    parts = [
        json.dumps(shape, sort_keys=True), _model_config(config), str(num_replicas),
        _source(*_READERS, *_imported("tpu_kit.planning.trace")),
        *(version(name) for name in _VERSIONS),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _model_config(config: TrainConfig) -> str:
    """The text that says what the model's shape is; empty if there is none, which the child then reports."""
    from tpu_kit.models.loading import locate

    model = config.model
    folder = Path(locate(model))
    if model.gguf_file and folder.is_dir():
        stat = (folder / model.gguf_file).stat()
        return f"{folder / model.gguf_file} {stat.st_size} {stat.st_mtime_ns}"
    if folder.is_dir():
        code = sorted(folder.glob("*.py")) if model.trust_remote_code else []
        return "\0".join(path.read_text() for path in [folder / "config.json", *code])
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model.name, model.gguf_file or "config.json", revision=model.revision)).read_text()
    except (OSError, ValueError):
        return ""


@cache
def _source(*modules: str) -> str:
    """Hashes the code of modules of this package: changed code may trace another program, or read an answer anew."""
    digest = hashlib.sha256()
    for name in modules:
        digest.update(_file(name).read_bytes())
    return digest.hexdigest()


@cache
def _imported(module: str) -> tuple[str, ...]:
    """Finds a module and all of this package that it imports, within functions too."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found or not _file(name).is_file():
            continue
        found.add(name)
        for node in ast.walk(ast.parse(_file(name).read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tpu_kit"):
                waiting += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return tuple(sorted(found))


def _file(module: str) -> Path:
    return Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")


def _read(path: Path) -> Compiled | None:
    try:
        return replace(Compiled.from_dict(json.loads(path.read_text())), cached=True)
    except (OSError, ValueError, TypeError, KeyError):  # none, or half of one
        return None


def _write(path: Path, compiled: Compiled) -> None:
    """Keeps an answer; where the folder cannot be written to, the next call compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps(compiled.to_dict()), shared=True)
    except OSError:
        pass
