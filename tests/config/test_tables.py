"""Rows as text and as HTML."""

from __future__ import annotations

from tpu_kit.config.text_tables import Html, to_html, to_text

ROWS = [{"name": "a", "loss": 0.123456789}, {"name": "b\n<c>", "more": 1}]


def test_a_table_as_text() -> None:
    assert to_text(ROWS) == "name     loss\na        0.12346\nb / <c>  None"
    assert to_text(ROWS, ">").splitlines()[1] == "      a  0.12346"
    assert to_text([]) == ""


def test_a_table_as_html() -> None:
    page = to_html([*ROWS, {"name": Html("<a>x</a>")}])
    assert "b\n&lt;c&gt;</td>" in page and "<a>x</a></td>" in page and page.count("<tr>") == 4
