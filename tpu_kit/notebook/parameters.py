"""What the cells of a notebook have set, and what to say where one has not run yet. Needs nothing but Python."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any

from tpu_kit.config.fields import ConfigError, closest

_PAPERMILL_HEADER = "# Parameters"
_HEADER = re.compile(r"#\s*(@title\s*)?Parameters\b")
_PLAIN = (str, int, float, bool, type(None), list, tuple, dict)


def parameters(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Find the notebook's parameters: the names that its parameters cells assign, with their present values.

    Papermill adds a cell of its own after the notebook's parameters cell and does not check what it assigns. A kernel
    sees no cell tags, but it keeps the source of what ran (`In`), so cells are told by their first line: the
    notebook's own begins with a comment such as ``# Parameters: change them here``, papermill's is exactly
    ``# Parameters``. Only the last run of each counts, and papermill's only when it ran after the notebook's own. So
    cells may be run again in any order, and variables of other cells are never taken for parameters.

    Args:
        namespace: ``globals()`` of the notebook. A mapping without `In` (a script) is taken whole: its names that
            begin with no underscore and hold plain values are the parameters.

    Raises:
        ConfigError: no parameters cell ran in this kernel, or its source is no Python.
    """
    if "In" not in namespace:
        return {k: v for k, v in namespace.items() if not k.startswith("_") and isinstance(v, _PLAIN)}
    own, injected = "", ""
    for source in namespace["In"]:
        first_line = source.lstrip().partition("\n")[0].rstrip()
        if first_line == _PAPERMILL_HEADER:
            injected = source
        elif _HEADER.match(first_line):
            own, injected = source, ""
    if not own and not injected:
        raise ConfigError(
            ["No parameters cell has run in this kernel: run the cell that begins with '# Parameters' first."]
        )
    try:
        statements = ast.parse(f"{own}\n{injected}").body
    except SyntaxError as error:
        raise ConfigError(
            [f"The parameters cell is not valid Python ({error.msg}): mend it and run it again."]
        ) from None
    names = []
    for statement in statements:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return {name: namespace[name] for name in names if name in namespace}


def check_names(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse parameters that a notebook does not know; papermill alone would only warn.

    Raises:
        ConfigError: each unknown name, with the nearest known one.
    """
    problems = []
    for name in [name for name in given if name not in known]:
        near = closest(name, known)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
        problems.append(f"{name}: this notebook has no such parameter; {advice}")
    if problems:
        raise ConfigError(problems)


def explain_missing_names() -> None:
    """From now on let a NameError of a cell say that another cell has to run first; nothing outside IPython."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if shell is not None:
        shell.set_custom_exc((NameError,), _explain)


def _explain(
    shell: Any, kind: type[NameError], error: NameError, trace: TracebackType | None, tb_offset: int | None = None
) -> None:
    frame = trace
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    # Of the cell itself, not of a function that it calls, where the name is an error of the code. The cell's code is
    # called <module> by some IPythons and <cell line: 1> by others.
    code = frame.tb_frame.f_code if frame is not None and frame.tb_frame.f_globals is shell.user_ns else None
    if code is not None and not code.co_flags & inspect.CO_OPTIMIZED:
        error.args = (
            f"name {error.name!r} is not defined yet: the cell above that sets it (look for `{error.name} =` or an "
            "import of it) has not run in this kernel. Run that cell first, or all above (Run > Run All Above)",
        )
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
