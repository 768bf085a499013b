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
    """A table whose every text is escaped. Columns of the places `right` are aligned to the right,
    and the rows `strong` are bold."""

    def cells(name: str, texts: Sequence[str]) -> str:
        sides = ["right" if place in right else "left" for place in range(len(texts))]
        return "".join(
            f'<{name} dir="auto" style="{_CELL}{side}">{escape(text)}</{name}>'
            for text, side in zip(texts, sides, strict=True)
        )

    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    weights = ["bold" if place in strong else "normal" for place in range(len(rows))]
    body = "".join(
        f'<tr style="font-weight: {weight}">{cells("td", row)}</tr>'
        for weight, row in zip(weights, rows, strict=True)
    )
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if any(heads) else ""
    return f"<table>{title}{head}<tbody>{body}</tbody></table>"


def html_text(text: str) -> str:
    """Text of a terminal, whose columns are aligned by spaces."""
    return f"<pre>{escape(text)}</pre>"
