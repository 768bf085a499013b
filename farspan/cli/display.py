"""Rich's console for live displays and styled lines, which shows control characters of text instead
of sending them."""

from __future__ import annotations

from collections.abc import Iterable

import rich.console
from rich.segment import Segment

from farspan.domain.escapes import escape_controls


class DisplayConsole(rich.console.Console):
    """Rich's own styles and cursor movements are no text, and stay."""

    def render(
        self,
        renderable: rich.console.RenderableType,
        options: rich.console.ConsoleOptions | None = None,
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=escape_controls(segment.text))
