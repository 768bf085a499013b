"""Values as notebooks show them: a line of text, and a table in HTML."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

#: A cell keeps its line breaks and its own direction of writing.
_CELL = "white-space: pre-wrap; vertical-align: top; text-align: "


def html_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    right: Collection[int] = (),
    strong: Collection[int] = (),
) -> str:
    """Write a table whose every text is escaped. Columns of the places `right` are aligned to the
    right, and the rows `strong` are bold."""

    def cells(name: str, texts: Sequence[str]) -> str:
        html = ""
        for place, text in enumerate(texts):
            side = "right" if place in right else "left"
            html += f'<{name} dir="auto" style="{_CELL}{side}">{escape(text)}</{name}>'
        return html

    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = ""
    for place, row in enumerate(rows):
        weight = "bold" if place in strong else "normal"
        body += f'<tr style="font-weight: {weight}">{cells("td", row)}</tr>'
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if any(heads) else ""
    return f"<table>{title}{head}<tbody>{body}</tbody></table>"


def html_text(text: str) -> str:
    """Text of a terminal, whose columns are aligned by spaces."""
    return f"<pre>{escape(text)}</pre>"
