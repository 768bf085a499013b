"""A progress bar that a notebook shows by itself."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from farspan.app.plans import Planned
from farspan.app.updates import Ended, Faulted, Note, Progress, Training, Tried, ignore_update
from farspan.domain.escapes import escape_controls
from farspan.domain.problems import Refusal
from farspan.domain.run_events import Event, Warned
from farspan.domain.units import format_seconds
from farspan.report.run_progress import SoFar

#: Seconds between two drawings of the bar.
REDRAW_S = 0.25
#: Characters of the bar where there is no HTML, and of a line of a terminal beside it.
BAR_CHARS = 20
LINE_CHARS = 79


@contextmanager
def show_progress(progress: Progress | None) -> Iterator[Progress]:
    """Yield the callback that takes updates: `progress`; without one a bar in IPython, else none.

    A Ctrl-C meanwhile that nothing else takes raises Refusal (interrupted), as one does that
    reaches a run.
    """
    bar = None
    module = sys.modules.get("IPython")
    if progress is None and module is not None:
        # The shell that runs this code, if IPython does; a kernel's shows HTML.
        shell = module.get_ipython()
        if shell is not None:
            bar = NotebookBar(hasattr(shell, "kernel"), time.monotonic)
    try:
        yield progress or bar or ignore_update
    except KeyboardInterrupt:
        raise Refusal(
            "interrupted",
            what="stopped as asked",
            where="farspan",
            fact="what was finished so far is kept and used again",
            remedy="call the same function again",
        ) from None
    else:
        if bar is not None:
            bar.mark_done()
    finally:
        if bar is not None:
            bar.end()


class NotebookBar:
    """A line that is drawn over itself: how far a run or an index is, and what is known of it."""

    def __init__(self, html: bool, clock: Callable[[], float]) -> None:
        """`clock` gives seconds. Without `html` the line goes to standard error, as in a
        terminal."""
        self._html = html
        self._clock = clock
        self._share: float | None = None
        self._text = "starting"
        self._warnings: list[str] = []
        self._run_progress: SoFar | None = None
        self._drawn_at = float("-inf")
        self._handle: Any | None = None

    def __call__(self, update: object) -> None:
        """Take an update in, and draw what it changes a few times a second."""
        match update:
            case Note() | Faulted() | Planned() | Tried():
                self._text = str(update)
            case Training():
                self._run_progress = SoFar(update.plan.train)
                self._text = "starting workers"
            case Ended():
                self.draw()
            case Warned():
                self._warnings.append(update.message)
            case _ if isinstance(update, Event):
                self._show_event(update)
            case _:
                from farspan.retrieval.index_work import IndexWork

                if isinstance(update, IndexWork):
                    self._share = update.share
                    self._text = str(update)
        if self._clock() - self._drawn_at >= REDRAW_S:
            self.draw()

    def _show_event(self, event: Event) -> None:
        run_progress = self._run_progress
        assert run_progress is not None
        run_progress.take(event)
        if not run_progress.recent:
            return
        self._share = run_progress.share
        facts = [f"step {run_progress.place}", f"loss {run_progress.recent[-1].loss:.3f}"]
        if run_progress.validated is not None:
            facts.append(f"val {run_progress.validated.loss:.3f}")
        facts.append(f"{run_progress.tokens_per_s:,.0f} tokens/s")
        if run_progress.finished is None:
            facts.append(f"ETA {format_seconds(run_progress.left_s())}")
        self._text = " · ".join(facts)

    def draw(self) -> None:
        """Show the bar as it is now."""
        self._drawn_at = self._clock()
        if not self._html:
            print(escape_controls(self._padded), end="\r", file=sys.stderr, flush=True)
            return
        display = importlib.import_module("IPython.display")
        shown = {"text/html": self.html, "text/plain": "\n".join([self.line, *self._warnings])}
        if self._handle is None:
            self._handle = display.DisplayHandle()
            self._handle.display(shown, raw=True)
        else:
            self._handle.update(shown, raw=True)

    def mark_done(self) -> None:
        """Fill the bar. A run's last figures stay, and other work reads `done`."""
        self._share = 1.0
        if self._run_progress is None:
            self._text = "done"

    def end(self) -> None:
        """Leave the last line as it stands; a call that showed none leaves none."""
        if self._drawn_at == float("-inf"):
            return
        if self._html:
            self.draw()
        else:
            print(escape_controls(self._padded), file=sys.stderr)

    @property
    def line(self) -> str:
        """The bar in characters."""
        if self._share is None:
            return self._text
        filled = "#" * round(BAR_CHARS * self._share)
        return f"[{filled.ljust(BAR_CHARS, '.')}] {self._share:4.0%} {self._text}"

    @property
    def _padded(self) -> str:
        """The line as wide as any: it covers the one before it."""
        return self.line[:LINE_CHARS].ljust(LINE_CHARS)

    @property
    def html(self) -> str:
        """The bar, and a line for each warning."""
        value = "" if self._share is None else f' value="{self._share:.4f}"'
        bar = f'<progress max="1"{value} style="width: 16em"></progress> {escape(self._text)}'
        warned = "".join(f"<br>warning: {escape(message)}" for message in self._warnings)
        return f'<div style="font-variant-numeric: tabular-nums">{bar}{warned}</div>'
