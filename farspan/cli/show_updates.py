"""What a person sees of the API's updates: lines, tables, and a live display while something
runs."""

from __future__ import annotations

import time

from farspan.app.plans import Planned
from farspan.app.updates import Chosen, Ended, Faulted, Note, Ranked, Training, Tried
from farspan.cli.console import Console
from farspan.cli.display import DisplayConsole
from farspan.cli.index_progress import IndexProgress
from farspan.cli.plan_table import print_ranking, wrap_paragraph
from farspan.cli.progress import TrainingDisplay
from farspan.domain.run_events import Event


class Show:
    """Takes updates: `with Show(console) as show: train(folder, show)`. A live display ends with
    what it shows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: TrainingDisplay | IndexProgress | None = None

    def __enter__(self) -> Show:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_display()

    def __call__(self, update: object) -> None:
        write = self._console.write_line
        match update:
            case Note() | Faulted():
                write(update.text)
            case Ranked():
                print_ranking(update.ranking, self._console)
                write()
            case Tried():
                self._console.write_facts(str(update))
            case Chosen():
                write(wrap_paragraph(str(update)))
            case Planned():
                self._console.write_facts(str(update))
                for warning in update.resolved.warnings:
                    self._console.write_facts(f"warning: {warning}")
            case Training():
                display = self._display_console()
                self._live = TrainingDisplay(update.plan, display, time.time, update.forecast)
                self._live.__enter__()
            case Ended():
                self._end_display()
            case _ if isinstance(update, Event):
                assert isinstance(self._live, TrainingDisplay)
                self._live.show(update)
            case _:
                self._show_index_work(update)

    def _show_index_work(self, update: object) -> None:
        from farspan.retrieval.index_work import IndexWork

        if not isinstance(update, IndexWork):
            return
        if self._live is None:
            self._live = IndexProgress(self._display_console(), time.monotonic)
            self._live.__enter__()
        assert isinstance(self._live, IndexProgress)
        self._live.show(update)

    def _display_console(self) -> DisplayConsole:
        return DisplayConsole(stderr=self._console.json)

    def _end_display(self) -> None:
        if self._live is not None:
            self._live.__exit__()
            self._live = None
