"""Speeds up the start of the tests' processes; Python runs it because this folder is on their path.

Importing torch, torch_xla and transformers makes millions of objects and almost no garbage. Garbage collection after
every 700 objects would take a quarter of that time, in hundreds of processes.

torch_xla imports its bridge to torch.compile, and with it torch's compiler for GPUs, which takes more than a second.
Here the bridge is executed at the first use of its names.

TESTS_HIDE names modules that a process and its children cannot find, as if their files were missing.
"""

import atexit
import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

gc.set_threshold(50_000)
atexit.register(gc.freeze)  # a final collection at exit would take another second


class _AtFirstUse:
    """A loader that executes a module when a name of it is first used."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        def load(name: str) -> Any:
            if name.startswith("__"):  # a search of all modules for a file or name
                raise AttributeError(name)
            del module.__dict__["__getattr__"]
            self.loader.exec_module(module)
            return getattr(module, name)

        module.__dict__["__getattr__"] = load


_HIDDEN = os.environ.get("TESTS_HIDE", "").split()


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(f"{name}.".startswith(f"{hidden}.") for hidden in _HIDDEN):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        spec = PathFinder.find_spec(name, path) if name == "torch_xla._dynamo.dynamo_bridge" else None
        if spec is not None:
            spec.loader = _AtFirstUse(spec.loader)  # type: ignore[assignment]  # Python needs only these two methods
        return spec


sys.meta_path.insert(0, _Finder)
