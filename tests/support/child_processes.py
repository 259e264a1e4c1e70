"""Runs Python in child processes with a controlled environment; for tests only."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join([str(REPOSITORY), str(Path(__file__).with_name("startup"))])

# XLA:CPU spends most of its compile time on optimisations that the small graphs of tests do not need: without them it
# compiles about five times faster. Its newer fusion emitters are off: they make programs with dropout or other
# integer arithmetic three times slower.
QUICK_XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
)

# Variables of the calling machine that would change a child's behaviour.
_SETTINGS = "ACCELERATE_ CPU_NUM_DEVICES HF_ JAX_ LIBTPU_ MASTER_ PJRT_ PYTHONPATH TPU_ USE_TORCH WANDB_ XLA_ XRT_"
_RANKS = "LOCAL_RANK LOCAL_WORLD_SIZE RANK WORLD_SIZE"
_NOT_INHERITED = tuple(f"{_SETTINGS} {_RANKS}".split())


def child_environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Builds the environment of a child process: XLA on the CPU, fast compiles, no hub, whatever the caller's settings.

    Args:
        extra: Variables to add; None removes one.

    Returns:
        A full environment for `subprocess`.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    environment |= {
        "PJRT_DEVICE": "CPU",
        "XLA_FLAGS": QUICK_XLA_FLAGS,
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in (extra or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def run_python(
    arguments: str | Sequence[str],
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 300.0,
    expect: int | None = 0,
    executable: str | os.PathLike[str] = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a child process, so that the process of the tests itself never initialises torch_xla.

    Args:
        arguments: Source code (a str), or the interpreter's arguments, such as `["-m", "tpu_kit", "doctor"]`.
        env: Changes to `child_environment`.
        cwd: Folder to run in; None: the caller's. The package is importable from any folder.
        timeout: Seconds before the child is killed.
        expect: Exit status the child must have; None accepts any.
        executable: The interpreter; default: the interpreter of the tests.

    Returns:
        The finished process, with `.stdout`, `.stderr` and `.returncode`.

    Raises:
        AssertionError: The exit status is not `expect`. The message ends with the child's output.
        subprocess.TimeoutExpired: The child ran past the timeout.
    """
    command = [str(executable), *(["-c", arguments] if isinstance(arguments, str) else arguments)]
    environment = {"PYTHONPATH": PYTHONPATH} | child_environment(env)
    done = subprocess.run(
        command, env=environment, cwd=cwd, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return _checked(done, expect)


def _checked(done: subprocess.CompletedProcess[str], expect: int | None) -> subprocess.CompletedProcess[str]:
    if expect is not None and done.returncode != expect:
        raise AssertionError(
            f"the child ended with status {done.returncode}, not {expect}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        )
    return done


def run_loaded(
    arguments: str | Sequence[str], *, env: Mapping[str, str | None] | None = None, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Runs Python like `run_python`, in a fork of a process that has imported torch, transformers, peft and datasets.

    This saves three seconds of processor time. Use it for tests of a program's results; the child imports torch_xla
    itself. Do not use it for tests of memory, imports, the start or end of a process, or environment variables that the
    libraries read when they are imported.

    Args:
        arguments: Source code (a str), or `["-c", source, ...]`, or `["-m", module, ...]`.
        env: Changes to `child_environment`.
        timeout: Seconds before the child is killed.

    Returns:
        The finished process.

    Raises:
        AssertionError: The exit status is not 0, or the child ran past the timeout.
    """
    arguments = ["-c", arguments] if isinstance(arguments, str) else [*arguments]
    with tempfile.TemporaryDirectory() as folder:
        process = fork_loaded(_in_fork, arguments, child_environment(_LOADED | dict(env or {})), folder)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        out, err = (Path(folder, name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return _checked(subprocess.CompletedProcess(arguments, process.exitcode or 0, out, err), 0)


_LOADED: dict[str, str | None] = {"PYTHONPATH": PYTHONPATH, "USE_TORCH_XLA": "0"}  # the kit sets it when it is imported


def fork_loaded(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Starts a process that calls a function; it is forked from a server that has imported `loaded_libraries`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.loaded_libraries"])
    process = context.Process(target=function, args=arguments)
    with mock.patch.dict(os.environ, child_environment(_LOADED), clear=True):
        process.start()  # the first call also starts the fork server
    return process


def become(environment: Mapping[str, str], streams: Sequence[int]) -> None:
    """Replaces this process's environment, and its stdin, stdout and stderr by `streams`."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    from transformers.utils import import_utils

    import_utils.USE_TORCH_XLA = environment.get("USE_TORCH_XLA", "AUTO")  # transformers has already read it, at import
    import_utils.is_torch_xla_available.cache_clear()


def _in_fork(arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    """Runs `python ARGUMENTS` in this process: its environment, streams, arguments and main module."""
    out = os.O_WRONLY | os.O_CREAT
    become(environment, [os.open(os.path.join(folder, name), flags) for name, flags in
                         ((os.devnull, os.O_RDONLY), ("stdout", out), ("stderr", out))])  # fmt: skip
    kind, program, *rest = arguments
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)
