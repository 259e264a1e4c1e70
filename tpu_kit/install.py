"""Install the kit's packages, by one line of pip or uv, and check that they pair.

    from tpu_kit import install
    install.ensure(kit_source)

does all of it and prints one line where nothing is missing; every notebook begins with it. Notebook 1 shows the parts:

    decision = install.decide(install.look())
    print(decision)
    install.carry_out(decision)
    install.show_checks(install.check(decision))

Needs nothing but Python to begin with. What is decided, and from what, is in packages.py.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tpu_kit.cells import check_names, explain_missing_names, parameters
from tpu_kit.compatibility import PACKAGES, bare
from tpu_kit.displays import show_checks, show_table
from tpu_kit.fields import ConfigError
from tpu_kit.machine import Check
from tpu_kit.packages import Decision, decide, installed, look, matrix, normal

__all__ = [
    "carry_out",
    "check",
    "decide",
    "ensure",
    "look",
    "matrix",
    "options",
    "restart",
    "show_checks",
    "show_table",
    "stale",
]

_OPTIONS = ("kit_source", "hardware", "extras", "torch_index", "restart")
# Of these a kernel that had loaded them before the installation keeps the old version.
_LOADED = ("torch", "torch_xla", "jax", "jaxlib", "numpy", "transformers", "peft", "datasets", "tpu_kit")

explain_missing_names()


def options(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook's parameters, checked.

    Raises:
        ConfigError: a name that is none, with the nearest, or a value that cannot be.
    """
    given = parameters(namespace)
    check_names(given, _OPTIONS)
    problems = []
    if given.get("hardware", "auto") not in ("auto", "tpu", "gpu"):
        problems.append(f"hardware={given['hardware']!r}: there are auto, tpu and gpu")
    problems += [
        f"{name}={given[name]!r} must be a text"
        for name in ("kit_source", "extras", "torch_index")
        if not isinstance(given.get(name, ""), str)
    ]
    if problems:
        raise ConfigError(problems)
    return given


def ensure(kit_source: str = "git") -> None:
    """Installs what the kit needs and this environment lacks, and prints what was left and what was added.

    Args:
        kit_source: where the kit came from, as in the parameters of the notebooks.

    Raises:
        ValueError: it is impossible here, a command failed, or a package that is loaded was replaced: the kernel must
            be restarted.
    """
    decision = decide(look(), source=kit_source)
    if decision.action == "nothing":
        print(f"tpu_kit is ready: {decision.why[0]}")
        return
    carry_out(decision)
    if stale():
        raise ValueError("Restart the kernel, then run all cells again: " + "; ".join(stale()))


def carry_out(decision: Decision) -> None:
    """Run the commands, if there are any; show what they say, what was left as it is and what was added.

    Raises:
        ValueError: it is impossible, or a command failed, with the end of what it said.
    """
    if decision.action == "impossible":
        raise ValueError(str(decision))
    if decision.action == "nothing":
        print("Nothing was to be done.")
        return
    before, start = installed(), time.monotonic()
    with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="tpu_kit-keep-") as keep:
        keep.write("\n".join(decision.keep))
        keep.flush()
        # As constraints: where a package cannot be had beside what is there, pip fails and replaces nothing.
        environment = {**os.environ, "PIP_CONSTRAINT": keep.name, "UV_CONSTRAINT": keep.name}
        for command in decision.commands:
            _run(command, environment if decision.keep else dict(os.environ))
    after = installed()
    added = [f"{name} {version}" for name, version in after.items() if name not in before]
    replaced = [f"{name} {before[name]} -> {now}" for name, now in after.items() if before.get(name, now) != now]
    same = [name for name in before if after.get(name) == before[name]]
    left = [f"{name} {before[normal(name)]}" for name in PACKAGES if normal(name) in same]
    print(f"Installed in {time.monotonic() - start:.0f} s.")
    print("Added:", ", ".join(added) or "nothing")
    print("Replaced:", ", ".join(replaced) or "nothing")
    print("Left as they were:", ", ".join([*left, f"{len(same) - len(left)} others"]))


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs one command and shows what it says.

    Raises:
        ValueError: it failed, with the end of what it said.
    """
    print("$", shlex.join(command), flush=True)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        print(line, end="", flush=True)
        said.append(line.rstrip())
    if process.wait():
        raise ValueError(f"{shlex.join(command)} failed{_advice(said)}:\n" + "\n".join(said[-10:]))


def _advice(said: Sequence[str]) -> str:
    text = "\n".join(said)
    if "No space left" in text:
        return " (the disk is full: without a GPU set torch_index to an index without CUDA, or free some room)"
    if "Temporary failure in name resolution" in text or "Failed to establish a new connection" in text:
        return " (no network: on Kaggle turn on Settings > Internet, or attach a dataset of wheels as kit_source)"
    if "ResolutionImpossible" in text or "conflict" in text:
        return " (what is missing conflicts with a package that is here; nothing was replaced: use a new environment)"
    return ""


_CHILD = """
import importlib, json, sys
found, error = {}, ""
try:
    for name in sys.argv[1].split():
        found[name] = getattr(importlib.import_module(name), "__version__", "")
    if "torch_xla" in found:
        import torch
        found["sum"] = (torch.ones(3, device=importlib.import_module("torch_xla").device()) + 1).sum().item()
except BaseException as problem:
    error = f"{type(problem).__name__}: {problem}"
print(json.dumps({"found": found, "error": error}))
"""


def check(decision: Decision) -> list[Check]:
    """Load the packages in a fresh process, as a run will, and compute one sum with torch_xla on its CPU."""
    names = {"tpu": "torch torch_xla libtpu jax", "gpu": "torch"}[decision.kind]
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "TPU_SKIP_MDS_QUERY": "1", "USE_TORCH_XLA": "1"}
    command = [sys.executable, "-c", _CHILD, f"{names} transformers peft datasets omegaconf tpu_kit"]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = done.stdout.splitlines() or ['{"found": {}, "error": ""}']
    answer = json.loads(lines[-1])
    error = answer["error"] or (f"the process ended with {done.returncode}" if done.returncode else "")
    found, fix = answer["found"], "run this notebook again from the top"
    pair = " ".join(f"{name} {found[name]}".strip() for name in names.split() if name in found) or "nothing"
    if error:
        pairing = "undefined symbol" in error
        text = f"{pair} loaded, then {error[:300]}"
        return [Check("They pair", "failure", f"{text}{': torch and torch_xla do not pair' if pairing else ''}", fix)]
    rows = [Check("They pair", "ok", f"{pair} load together")]
    if "sum" in found:
        status: Literal["ok", "failure"] = "ok" if found["sum"] == 6 else "failure"
        rows.append(Check("They compute", status, f"(1 + 1) * 3 is {found['sum']:g} on torch_xla's CPU"))
    return rows


def stale() -> list[str]:
    """Packages that this process loaded before another version was installed."""
    versions, found = installed(), []
    for name in _LOADED:
        loaded, now = getattr(sys.modules.get(name), "__version__", None), versions.get(normal(name))
        if loaded and now and bare(loaded) != bare(now):
            found.append(f"{name} {loaded} is loaded, {now} is installed")
    return found


def restart(allowed: bool = False) -> None:
    """Say whether the kernel must be restarted; do so where that is allowed."""
    old = stale()
    if not old:
        print("The kernel can stay as it is.")
        return
    print("The kernel must be restarted: " + "; ".join(old))
    if not allowed:
        print("Kernel > Restart (Colab: Runtime > Restart session), then go on with the next notebook.")
        print("Or set restart = True above, run its cell and this one again, and it restarts by itself.")
        return
    from IPython import get_ipython

    get_ipython().kernel.do_shutdown(restart=True)
