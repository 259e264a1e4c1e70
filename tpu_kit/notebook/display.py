"""Shows tables, texts and pictures that stay in the notebook's file; outside IPython, prints plain text.

Nothing here is a widget: HTML and PNG survive papermill, and are visible when the notebook is opened without a kernel.
Styles are inline, which survives where a frontend strips scripts and most CSS from untrusted output. Needs nothing but
Python.
"""

from __future__ import annotations

import base64
import html
import io
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tpu_kit.hardware.machine import MARKS, Check
from tpu_kit.planning import tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bundle = dict[str, str]
"""MIME type to content; "text/plain" is always among them."""

COLOURS = {"ok": "#15803d", "warning": "#b45309", "failure": "#b91c1c", "skipped": "#6b7280"}


def show(bundle: Bundle) -> None:
    """Show in the cell, or print."""
    if in_ipython():
        from IPython.display import display

        display(bundle, raw=True)
    else:
        print(bundle["text/plain"], flush=True)


def in_ipython() -> bool:
    """Whether this process is IPython's, such as a notebook's kernel."""
    # Looked up, not imported: the kit does not depend on IPython, and inside it the module is loaded.
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def show_table(rows: tables.Rows) -> None:
    """Show rows as a table, one column per key of the first row; in plain text a line break in a cell is a slash."""
    show(table(rows))


def table(rows: tables.Rows) -> Bundle:
    """The table of `show_table`."""
    return {"text/html": tables.to_html(rows), "text/plain": tables.to_text(rows)}


def show_checks(checks: Iterable[Check]) -> list[Check]:
    """Show rows of the doctor as they come, each with its mark and, where there is one, its fix; returns them all."""
    rows: list[Check] = []
    if not in_ipython():
        for check in checks:
            print(check, flush=True)
            rows.append(check)
        return rows
    from IPython.display import display

    handle = display(_checks(rows), raw=True, display_id=True)
    for check in checks:
        rows.append(check)
        handle.update(_checks(rows), raw=True)
    return rows


def _checks(rows: Sequence[Check]) -> Bundle:
    body = ""
    for row in rows:
        mark = f"<b style='color:{COLOURS[row.status]}'>{MARKS[row.status]}</b>"
        fix = f"<br>→ <code>{html.escape(row.fix)}</code>" if row.fix else ""
        cells = (mark, html.escape(row.name), html.escape(row.found) + fix)
        body += "<tr>" + "".join(f"<td style='{tables.CELL}'>{cell}</td>" for cell in cells) + "</tr>"
    return {"text/html": f"<table>{body}</table>", "text/plain": "\n".join(map(str, rows)) or "looking ..."}


def picture(figure: Figure, text: str) -> Bundle:
    """A figure as PNG, and the text in its place.

    Without pyplot: drawing needs neither a backend nor the main thread.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": text}
