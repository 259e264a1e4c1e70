"""Formats rows as a table in plain text, or in HTML that stays readable if a frontend removes styles and scripts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

Rows = Sequence[Mapping[str, object]]
"""Rows as cells by column name; the first row sets the columns, and a missing cell is "None"."""

CELL = "text-align:left;vertical-align:top;white-space:pre-wrap"
"""The CSS of an HTML cell."""


class Html(str):
    """The text of a cell that is already HTML."""


def to_text(rows: Rows, align: str = "<") -> str:
    """Returns the table as lines, column names first, aligned left ("<") or right (">"); line breaks become " / "."""
    cells = [[text.strip().replace("\n", " / ") for text in row] for row in _cells(rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(f"{cell:{align}{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(map(str.rstrip, lines))


def to_html(rows: Rows) -> str:
    """Returns the table as an HTML element with names of columns as head; cells are escaped unless they are `Html`."""
    columns, *body = _cells(rows)
    head = "".join(f"<th style='text-align:left'>{html.escape(column)}</th>" for column in columns)
    lines = "".join("<tr>" + "".join(map(_html_cell, row)) + "</tr>\n" for row in body)
    return f"<table><tr>{head}</tr>\n{lines}</table>"


def _cells(rows: Rows) -> list[list[str]]:
    columns = list(rows[0]) if rows else []
    return [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]


def _cell(value: object) -> str:
    if isinstance(value, Html):
        return value
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _html_cell(text: str) -> str:
    if isinstance(text, Html):
        return f"<td style='{CELL}'>{text}</td>"
    longest = max(map(len, text.splitlines()), default=0)
    # Without a minimum width, the lines of this cell break if the cell beside it has many words.
    wide = f";min-width:{min(18, longest * 0.6):.0f}em" if "\n" in text else ""
    return f"<td style='{CELL}{wide}'>{html.escape(text)}</td>"
