"""Helpers of the tests, imported by tests alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join([str(REPOSITORY), str(Path(__file__).with_name("startup"))])

# XLA:CPU spends its compile time on optimisations that a test of a small graph does not need: about five times quicker.
# Of dropout and other integer arithmetic, its newer emitters of fusions make programs that take three times as long.
QUICK_XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
)

# Settings of the machine that runs the tests, which would change what a child process does.
_SETTINGS = "ACCELERATE_ CPU_NUM_DEVICES HF_ JAX_ LIBTPU_ MASTER_ PJRT_ PYTHONPATH TPU_ USE_TORCH WANDB_ XLA_ XRT_"
_RANKS = "LOCAL_RANK LOCAL_WORLD_SIZE RANK WORLD_SIZE"
_NOT_INHERITED = tuple(f"{_SETTINGS} {_RANKS}".split())


def child_environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Builds the environment of a child process: XLA on the CPU, quick compiles, no hub, whatever the caller has set.

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
        cwd: Folder to run in; the caller's when None. The package is importable from any.
        timeout: Seconds before the child is killed.
        expect: Exit status the child must have; None accepts any.
        executable: The interpreter; the tests' own by default.

    Returns:
        The finished process, with `.stdout`, `.stderr` and `.returncode`.

    Raises:
        AssertionError: The exit status is another one. The message ends with what the child wrote.
        subprocess.TimeoutExpired: The child ran past the timeout.
    """
    command = [str(executable), *(["-c", arguments] if isinstance(arguments, str) else arguments)]
    environment = {"PYTHONPATH": PYTHONPATH} | child_environment(env)
    done = subprocess.run(
        command, env=environment, cwd=cwd, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if expect is not None and done.returncode != expect:
        raise AssertionError(
            f"the child ended with status {done.returncode}, not {expect}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        )
    return done
