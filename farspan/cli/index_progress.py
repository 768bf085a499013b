"""What a person sees while an index is made: a live line on a terminal, a plain one now and then
where it is piped."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from farspan.cli.display import DisplayConsole
from farspan.cli.progress import LINE_S
from farspan.retrieval.work import IndexWork


class IndexProgress:
    """Shows how far work is: `with IndexProgress(console, clock) as shown: build(..., Work(clock,
    shown.show))`."""

    def __init__(self, console: DisplayConsole, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._line_at = clock()
        self._work = IndexWork(clock)
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self._render, refresh_per_second=4, transient=True
            )

    def __enter__(self) -> IndexProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, work: IndexWork) -> None:
        """Take in how far the work is by now."""
        self._work = work
        if self._live is None and self._clock() - self._line_at >= LINE_S:
            self._line_at = self._clock()
            self._console.print(str(self._work), soft_wrap=True, highlight=False)

    def _render(self) -> Table:
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        row.add_row(ProgressBar(total=1.0, completed=self._work.share), str(self._work))
        return row
