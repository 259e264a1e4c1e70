"""Python runs this at the start of each process of the tests, which have this folder on their path.

Importing torch, torch_xla and transformers makes millions of objects and almost no garbage. To look for garbage after
each 700 objects takes a quarter of that time, in each of hundreds of processes.

torch_xla imports its bridge to torch.compile and with it the compiler that torch has for GPUs, which takes more than a
second. Here the bridge is executed when a name of it is first asked for.

TESTS_HIDE names modules that cannot be found in a process and its children, as if their files were not there.
"""

import atexit
import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

gc.set_threshold(50_000)
atexit.register(gc.freeze)  # and at the end a second, to look through them once more


class _AtFirstUse:
    """A loader that leaves a module empty until then."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        def load(name: str) -> Any:
            if name.startswith("__"):  # of one who looks through all modules, for a file or a name
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
            spec.loader = _AtFirstUse(spec.loader)  # type: ignore[assignment]  # Python asks for no more than this
        return spec


sys.meta_path.insert(0, _Finder)
