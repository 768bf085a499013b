"""What a person sees while an index is made: a live line on a terminal, a plain one now and then
where it is piped."""

from __future__ import annotations

from collections.abc import Callable

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from farspan.cli.display import DisplayConsole
from farspan.cli.progress import LINE_INTERVAL_S
from farspan.retrieval.index_work import IndexWork


class IndexProgress:
    """Shows how far work is: `with IndexProgress(console, clock) as shown: build(..., Work(clock,
    shown.show))`."""

    def __init__(self, console: DisplayConsole, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._line_at = clock()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> IndexProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, work: IndexWork) -> None:
        """Show how far the work is."""
        if self._live is not None:
            row = Table.grid(padding=(0, 1), expand=True)
            row.add_column(ratio=1)
            row.add_column(justify="right", no_wrap=True)
            row.add_row(ProgressBar(total=1.0, completed=work.share), str(work))
            self._live.update(row)
        elif self._clock() - self._line_at >= LINE_INTERVAL_S:
            self._line_at = self._clock()
            self._console.print(str(work), soft_wrap=True, highlight=False)
