"""The exact answer to "does it fit?": the step that trains, compiled by the real TPU compiler on any machine.

    from tpu_kit.compiler import compile_step
    compiled = compile_step(config, "v5e", num_replicas=8)
    print(compiled, compiled.total_bytes, compiled.fits)

libtpu can compile for a TPU that is not there. The step is traced without weights and compiled in a process of its own
(`aot`), which opens no chip and takes no lock: it may run beside a training. What the compiler said is kept on disk.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tpu_kit import chips
from tpu_kit.chips import Chip, Topology
from tpu_kit.compatibility import PAIRINGS
from tpu_kit.compiled import Buffer, Collective, Compiled, Effort
from tpu_kit.config import BatchPlan, TrainConfig, batch_arithmetic
from tpu_kit.shipped import shipped_shape

CACHE = Path("~/.cache/tpu_kit/compiled")

_NEEDED = ("torch_xla", "jax", "jaxlib", "libtpu")
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

    Returns:
        What the compiler says. To cancel, interrupt it (Ctrl-C): nothing goes on in the background.

    Raises:
        CompilerUnavailable: libtpu or what drives it is not installed, or not in the version that is known.
        ValueError: unknown chip, no such topology, too few devices; or the step cannot be traced: the model, the
            adapters or the batch do not allow it.
        RuntimeError: the process that compiles died.
    """
    kind, topology = find_topology(chip, num_replicas)
    config = _with_shipped_shape(config, cache_dir or CACHE.expanduser())
    if kind.name in chips.NO_KERNELS and config.model.attention == "auto":
        config = replace(config, model=replace(config.model, attention="sdpa"))
    if batch_size is not None:
        config = replace(config, optim=replace(config.optim, batch_size=batch_size))
    plan = batch_arithmetic(config, num_replicas)
    libtpu = check_available()
    folder = cache_dir or CACHE.expanduser()
    suffix = hashlib.sha256(
        repr((topology, num_replicas, effort, libtpu, _source("compiler", "aot", "hlo", "costs", "buffers"))).encode()
    ).hexdigest()[:16]
    asked = folder / f"plan-{_request_key(config, num_replicas)}-{suffix}.json"
    if use_cache and (known := _read(asked)) is not None:
        return known
    request = {
        "config": config.to_dict(), "num_replicas": num_replicas, "topology": asdict(topology), "effort": effort,
        "suffix": suffix, "known": str(folder) if use_cache else None, "parent": os.getpid(),
    }  # fmt: skip
    answer = _in_child(request, progress)
    if "known" in answer and (known := _read(Path(answer["known"]))) is not None:
        compiled = known
    else:
        compiled = _compiled(answer, kind, topology, plan, effort, libtpu)
        _write(folder / f"{compiled.program}-{suffix}.json", compiled)
    _write(asked, compiled)
    return compiled


def _with_shipped_shape(config: TrainConfig, folder: Path) -> TrainConfig:
    """The run with its model given by a folder, where its shape comes with the kit; else as it is."""
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


def find_topology(chip: str, num_replicas: int) -> tuple[Chip, Topology]:
    """The chip and the slice to compile for.

    Raises:
        ValueError: no such chip or topology, or the compiler knows none for the chip, or it has too few devices.
    """
    name, _, shape = chip.partition(":")
    kind = chips.chip(name)
    known = sorted(kind.topologies.values(), key=lambda one: one.chips)
    names = [one.name for one in known]
    if not known:
        raise ValueError(f"libtpu cannot compile for {kind.name}; it can for {', '.join(_compilable())}")
    if shape and f"{kind.name}:{shape}" not in names:
        near = difflib.get_close_matches(f"{kind.name}:{shape}", names, n=1, cutoff=0.0)
        raise ValueError(f"there is no topology {chip}: did you mean {near[0]}? Known: {', '.join(names)}")
    if shape:
        known = [one for one in known if one.name == f"{kind.name}:{shape}"]
    devices = [one.chips * kind.devices_per_chip for one in known]
    if num_replicas < 1 or num_replicas > devices[-1]:
        raise ValueError(f"num_replicas={num_replicas}: {known[-1].name} has {devices[-1]} devices; use 1 to that many")
    return kind, next(one for one, count in zip(known, devices, strict=True) if count >= num_replicas)


def _compilable() -> list[str]:
    return [name for name, kind in chips.CHIPS.items() if kind.topologies]


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


def _in_child(request: dict[str, Any], progress: bool) -> dict[str, Any]:
    """Runs `aot` and returns its answer; ends it whatever happens here."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="tpu_kit-compile-") as folder, open(Path(folder, "stderr"), "w+") as errors:
        environment = inherited | _ENVIRONMENT | {"TMPDIR": folder, "PYTHONPATH": path}
        child = subprocess.Popen(
            [sys.executable, "-m", "tpu_kit.aot"], env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            assert child.stdin is not None
            with _progress(child, progress):
                child.stdin.write(json.dumps(request | {"folder": folder}) + "\n")
                child.stdin.close()
                child.wait()
        except BrokenPipeError:
            child.wait()
        finally:
            child.kill()
            child.wait()
        result = Path(folder, "result.json")
        if not result.is_file():
            errors.seek(0)
            how = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
            raise RuntimeError(f"the process that compiles ended with {how}:\n{errors.read()[-4000:]}")
        answer: dict[str, Any] = json.loads(result.read_text())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


@contextmanager
def _progress(child: subprocess.Popen[str], shown: bool) -> Iterator[None]:
    """Says on stderr what the child is about; on a terminal with the seconds running."""
    import threading

    ended = threading.Event()
    phase = ["starting"]
    start = time.monotonic()
    terminal = sys.stderr.isatty()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            phase[0] = line.strip()
            if shown and not terminal:
                print(f"{time.monotonic() - start:5.0f} s  {phase[0]}", file=sys.stderr, flush=True)

    def tick() -> None:
        while shown and terminal and not ended.wait(1.0):
            print(f"\r\033[K{time.monotonic() - start:5.0f} s  {phase[0]}", end="", file=sys.stderr, flush=True)

    threads = [threading.Thread(target=target, daemon=True) for target in (read, tick)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if shown and terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------- the cache


def _request_key(config: TrainConfig, num_replicas: int) -> str:
    """A hash of everything the program follows from: the configuration, the model's, this package, and the versions."""
    values = config.to_dict()
    shape = {name: values[name] for name in ("model", "lora", "optim")} | {"max_length": config.data.max_length}
    parts = [
        json.dumps(shape, sort_keys=True), _model_config(config), str(num_replicas), _source(),
        *(version(name) for name in _VERSIONS),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _model_config(config: TrainConfig) -> str:
    """The text that says what the model's shape is; empty if there is none, which the child then reports."""
    from tpu_kit.pretrained import locate

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
    """A hash of this package's code, or of some of its modules: a changed step is another program."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if not modules or path.stem in modules:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> Compiled | None:
    try:
        return replace(Compiled.from_dict(json.loads(path.read_text())), cached=True)
    except (OSError, ValueError, TypeError, KeyError):  # none, or half of one
        return None


def _write(path: Path, compiled: Compiled) -> None:
    """Keeps an answer; where the folder cannot be written to, the next call compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            json.dump(compiled.to_dict(), file)
        os.replace(file.name, path)
    except OSError:
        pass
