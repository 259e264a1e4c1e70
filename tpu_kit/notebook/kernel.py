"""Reads the parameters of a notebook in its kernel, and shows tables, texts and figures in its cells.

Displays are HTML and PNG, not widgets: papermill keeps them, and they are visible without a kernel. Styles are inline,
because some frontends remove scripts and style sheets from outputs. Outside IPython, displays are printed as plain
text. This module needs nothing but Python.
"""

from __future__ import annotations

import ast
import base64
import inspect
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tpu_kit.config import text_tables
from tpu_kit.config.fields import ConfigError, closest
from tpu_kit.machine.checks import MARKS, Check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bundle = dict[str, str]
"""Contents by MIME type; "text/plain" is always present."""

COLOURS = {"ok": "#15803d", "warning": "#b45309", "failure": "#b91c1c", "skipped": "#6b7280"}

# The cell that installs the kit imports this module before the libraries that would warn.
warnings.filterwarnings("ignore", message="IProgress not found")
# A notebook keeps every state of a tqdm bar, so only work of more than 5 s gets a bar, in child processes too. tqdm
# reads this variable once, at its import.
os.environ.setdefault("TQDM_DELAY", "5")

_PAPERMILL_HEADER = "# Parameters"
_HEADER = re.compile(r"#\s*(@title\s*)?Parameters\b")
_SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp,
)  # fmt: skip
"""Nodes with a scope of their own: names assigned in them are not the cell's."""
_PLAIN = (str, int, float, bool, type(None), list, tuple, dict)


def parameters(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the notebook's parameters: the names that its parameters cells assign, with their current values.

    A kernel sees no cell tags, but it keeps the source of all cells that ran (`In`). The notebook's own parameters cell
    begins with a comment such as ``# Parameters: change them here``. papermill adds a cell after it that begins with
    exactly ``# Parameters``. Only the last run of a cell counts, and papermill's cell only if it ran after the
    notebook's own. So cells may run again in any order, and variables of other cells are never parameters.

    Args:
        namespace: ``globals()`` of the notebook. In a mapping without `In` (a script), all names without a leading
            underscore and with a plain value are parameters.

    Raises:
        ConfigError: no parameters cell has run in this kernel, it is not valid Python, or as in `assigned`.
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
        raise ConfigError(["no parameters cell has run in this kernel: run the cell that begins with '# Parameters'"])
    try:
        names = assigned(f"{own}\n{injected}")
    except SyntaxError as error:
        raise ConfigError([f"the parameters cell is not valid Python ({error.msg}): correct it and run it"]) from None
    return {name: namespace[name] for name in names if name in namespace}


def assigned(source: str) -> list[str]:
    """Returns the names that a cell assigns, also in tuples, under `if` or as loop variables.

    Names of imports, functions and classes, and names assigned inside of them or of comprehensions, are left out.

    Raises:
        SyntaxError: the source is not Python.
        ConfigError: the source has `exec`, globals(), locals(), vars() or `import *`, so it may assign other names.
    """
    names: dict[str, None] = {}
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop(0)
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        star = isinstance(node, ast.ImportFrom) and any(one.name == "*" for one in node.names)
        if star or called in ("globals", "locals", "vars", "exec"):
            raise ConfigError(
                [f"the parameters cell says {ast.unparse(node)!r}, which may set any name: write name = value instead"]
            )
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = None
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)
    return list(names)


def check_names(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuses names in `given` that are not in `known`, a notebook's parameters; papermill only warns about them.

    Raises:
        ConfigError: names are unknown; the text has the nearest known names.
    """
    problems = []
    for name in [name for name in given if name not in known]:
        near = closest(name, known)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
        problems.append(f"{name}: this notebook has no such parameter; {advice}")
    if problems:
        raise ConfigError(problems)


def shorten_errors() -> None:
    """Makes IPython show ValueErrors raised in the kit without a traceback, and say which cell a NameError needs.

    Does nothing outside IPython.
    """
    if in_ipython():
        sys.modules["IPython"].get_ipython().set_custom_exc((NameError, ValueError), _explain)


def _explain(
    shell: Any, kind: type[Exception], error: Exception, trace: TracebackType | None, tb_offset: int | None = None
) -> None:
    """Shows an error, as IPython's custom handler; see `shorten_errors`. Changes the text of a cell's NameError."""
    *_, (frame, _line) = traceback.walk_tb(trace)
    # Only errors of the cell itself: in a function (CO_OPTIMIZED), a missing name is an error in the code.
    of_cell = frame.f_globals is shell.user_ns and not frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if isinstance(error, NameError) and of_cell:
        error.args = (
            f"name {error.name!r} is not defined yet: the cell above that sets it (look for `{error.name} =` or an "
            "import of it) has not run in this kernel. Run that cell first, or all cells above (Run > Run All Above)",
        )
    of_kit = isinstance(error, ValueError) and frame.f_globals.get("__name__", "").partition(".")[0] == "tpu_kit"
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset, exception_only=of_kit)


# ------------------------------------------------------------------------------------------------------------- displays


def in_ipython() -> bool:
    """Returns whether this process runs IPython, as the kernel of a notebook does."""
    # Looked up, not imported: the kit does not depend on IPython, and inside IPython the module is loaded already.
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def show(bundle: Bundle) -> None:
    """Shows a bundle in the cell; outside IPython prints its text."""
    if in_ipython():
        from IPython.display import display

        display(bundle, raw=True)
    else:
        print(bundle["text/plain"], flush=True)


def show_table(rows: text_tables.Rows) -> None:
    """Shows rows as a table with one column per key of the first row; plain text has " / " for a line break."""
    show({"text/html": text_tables.to_html(rows), "text/plain": text_tables.to_text(rows)})


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, Sequence[Any]]:
    """Returns a figure of `width` x `height` inches and its `columns` axes, side by side; needs no pyplot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def picture(figure: Figure, text: str) -> Bundle:
    """Returns a bundle of the figure as PNG (base64) and `text` for plain displays."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": text}


def show_checks(checks: Iterable[Check]) -> list[Check]:
    """Shows results of checks, with marks and fixes, as they arrive; returns them as a list."""
    rows: list[Check] = []
    handle = None
    if in_ipython():
        from IPython.display import display

        handle = display(_checks(rows), raw=True, display_id=True)
    for check in checks:
        rows.append(check)
        if handle is None:
            print(check, flush=True)
        else:
            handle.update(_checks(rows), raw=True)
    return rows


def _checks(rows: Sequence[Check]) -> Bundle:
    """Returns a table of checks with their fixes, as text "looking ..." if there are none."""
    shown = [
        {
            "": text_tables.Html(f"<b style='color:{COLOURS[row.status]}'>{MARKS[row.status]}</b>"),
            "check": row.name,
            "result": row.found + (f"\n→ {row.fix}" if row.fix else ""),
        }
        for row in rows
    ]
    return {"text/html": text_tables.to_html(shown), "text/plain": "\n".join(map(str, rows)) or "looking ..."}
