"""Tables of text, all made by rich: aligned columns, whose long cells are wrapped on a narrow
terminal."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from typing import Literal

from farspan.domain.escapes import escape_controls

#: Wider than any table: its cells stay on one line.
UNBOUNDED = 10_000


def table_lines(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
    width: int = UNBOUNDED,
    gap: int = 2,
    wrap: Collection[int] | None = None,
    colours: bool = False,
    tints: Sequence[str] = (),
) -> list[str]:
    """Return the lines of a table under its headings.

    Columns of the places `right` are aligned to the right, and cells of those in `wrap` (None: all)
    are wrapped. With `colours` the headings are dim, and each row has the style of `tints`, as rich
    names styles.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for place, head in enumerate(heads):
        fixed = wrap is not None and place not in wrap
        justify: Literal["left", "right"] = "right" if place in right else "left"
        title = Text(escape_controls(head))
        table.add_column(title, justify=justify, overflow="fold", no_wrap=fixed)
    for number, row in enumerate(rows):
        # Text, not markup: cells may hold square brackets.
        cells = [Text(escape_controls(cell)) for cell in row]
        table.add_row(*cells, style=tints[number] if tints else "")
    drawn = io.StringIO()
    console = Console(
        file=drawn,
        width=width,
        force_terminal=colours,
        color_system="standard" if colours else None,
        highlight=False,
        force_jupyter=False,
    )
    console.print(table)
    return [line.rstrip() for line in drawn.getvalue().splitlines()]
