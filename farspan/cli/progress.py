"""What a person sees while training: a live display on a terminal, plain lines where output is
piped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farspan.cli.display import DisplayConsole
from farspan.cli.paint import FACT, fold_line
from farspan.cli.status_text import format_largest_unit
from farspan.domain.escapes import escape_controls
from farspan.domain.forecast import Forecast
from farspan.domain.model import train_flops_per_token
from farspan.domain.plan import Plan
from farspan.domain.run_events import (
    Event,
    Finished,
    Recovered,
    Rescheduled,
    Saved,
    Started,
    Step,
    Validated,
    Warned,
)
from farspan.domain.units import counted, format_bytes, format_count, format_seconds
from farspan.estimate.loss_forecast import revised
from farspan.report.losses import format_validation
from farspan.report.run_endings import ending
from farspan.report.run_progress import SoFar

#: Seconds between two plain lines.
LINE_INTERVAL_S = 10.0
#: A terminal keeps one validation for each such share of a run: they fill a third of 24 rows.
KEPT_SHARE = 1 / 8
#: Columns of the bar, and facts that come before it where there is little room.
MIN_BAR_COLUMNS = 6
MAX_BAR_COLUMNS = 20
FACTS_BEFORE_BAR = 2


class TrainingDisplay:
    """Shows events one at a time: `with TrainingDisplay(plan, console, time.time) as progress:
    progress.show(event)`.

    `clock` gives seconds since the epoch, as `Event.at`. Only events of this start are shown, not
    those of starts before a resumption.
    """

    def __init__(
        self,
        plan: Plan,
        console: DisplayConsole,
        clock: Callable[[], float],
        forecast: Forecast | None = None,
    ) -> None:
        self._plan = plan
        self._console = console
        self._clock = clock
        self._forecast = forecast
        #: Of show's thread; the live display is drawn in another one.
        self._so_far = SoFar(plan.train)
        self._line_at = float("-inf")
        #: How far the run was at the last validation that stays on a terminal.
        self._validated_share = 0.0
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self._render, refresh_per_second=4, transient=True
            )

    def __enter__(self) -> TrainingDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: Event) -> None:
        """Take one event in, and print what should stay on the screen."""
        self._so_far.take(event)
        match event:
            case Started():
                self._line_at = float("-inf")
                if event.step:
                    self._print_line(f"resumed after step {event.step:,}")
            case Recovered():
                down = format_seconds(event.down_s)
                lost = f"{counted(event.lost, 'step')} lost"
                self._print_line(f"recovered after {down}: {event.fault.what} · {lost}")
            case Step():
                if self._live is None and self._clock() - self._line_at >= LINE_INTERVAL_S:
                    self._line_at = self._clock()
                    place = self._so_far.place
                    if self._so_far.total is None:
                        place += f" ({self._so_far.share:.0%})"
                    self._print_line(FACT.join([f"step {place}", *self._line_facts()]))
            case Validated():
                self._print_validation(event)
            case Saved():
                if self._live is None:
                    name = Path(event.path).name
                    saved = f"saved {name}, {format_bytes(event.size_bytes)}"
                    self._print_line(f"step {event.step:,} · {saved}")
            case Rescheduled():
                self._print_line(f"step {event.step:,} · {event}")
            case Warned():
                self._print_line(f"warning: {event.message}", "yellow")
            case Finished():
                text = f"{ending(event.reason, event.step)} after {format_seconds(event.seconds)}"
                started = self._so_far.started
                if started is not None and started.step:
                    text += f", {format_seconds(started.used_s + event.seconds)} in all"
                self._print_line(f"step {event.step:,} · {text}")

    def _print_validation(self, event: Validated) -> None:
        """Print a validation in full where output is piped.

        A terminal keeps one for each KEPT_SHARE of the run, and the last one: the display has the
        others.
        """
        best = f"{FACT}best so far" if event.best else ""
        if event.step == 0:
            best = f"{FACT}the model as it was, before training"
        if self._live is None:
            loss = f"validation loss {format_validation(event)}"
            bits = f"{event.bits_per_byte:.3f} bits a byte"
            self._print_line(f"step {event.step:,} · {loss} · {bits}{best}")
            return
        share = self._so_far.share
        last = event.sample_loss is not None or share >= 1
        if event.step and not last and share < self._validated_share + KEPT_SHARE:
            return
        self._validated_share = share
        loss = f"validation loss {event.loss:.3f}"
        if event.standard_error:
            loss += f" ± {event.standard_error:.3f}"
        self._print_line(f"step {event.step:,} · {loss}{best}")

    def _print_line(self, line: str, style: str = "") -> None:
        # A piped line stays one line. Text, not markup: messages may hold square brackets. Escaped
        # here too, because Text drops some control characters without a trace.
        line = escape_controls(line)
        if self._console.is_terminal or self._console.file.isatty():
            line = fold_line(line, self._console.width)
        self._console.print(Text(line, style=style), soft_wrap=not self._console.is_terminal)

    def _line_facts(self) -> list[str]:
        """List loss, speed, memory, time to go: known from the first step on."""
        last = self._so_far.recent[-1]
        validated = self._so_far.validated
        tokens_per_s = self._so_far.tokens_per_s
        facts = [f"loss {last.loss:.3f}"]
        if validated is not None:
            loss = f"val {validated.loss:.3f}"
            if validated.of is not None:
                tokens = format_count(validated.tokens)
                loss += f" on {tokens} of {format_count(validated.of)} tokens"
            facts.append(loss)
            if (end := self._predict_end(validated)) is not None:
                facts.append(f"{end:.2f} expected at the end")
        facts.append(f"{tokens_per_s:,.0f} tokens/s")
        facts.append(f"MFU {self._format_mfu(tokens_per_s)}")
        facts.append(format_bytes(last.memory_bytes))
        facts.append(f"ETA {format_seconds(self._so_far.left_s())}")
        return facts

    def _predict_end(self, validated: Validated) -> float | None:
        share = min(1.0, validated.step / self._so_far.steps)
        if self._forecast is None or share >= 1:
            return None
        schedule = self._plan.train.schedule
        predicted = revised(self._forecast, schedule, share, validated.loss, validated.bigram_nats)
        return None if predicted is None else predicted[0]

    def _format_mfu(self, tokens_per_s: float) -> str:
        started = self._so_far.started
        if started is None or not started.peak_flops:
            return "n/a"
        flops = train_flops_per_token(self._plan.model, self._plan.train.seq_len)
        return f"{flops * tokens_per_s / started.peak_flops:.1%}"

    def _render(self) -> RenderableType:
        so_far = self._so_far
        if not so_far.recent:
            state = "starting workers" if so_far.started is None else "first step"
            return Text(state, style="dim")
        head = f"step {so_far.place} {so_far.share:.0%}"
        return ProgressLine(head, so_far.share, self._brief_facts())

    def _brief_facts(self) -> list[str]:
        """List the facts of the display's one line, short, the most wanted first."""
        so_far = self._so_far
        last = so_far.recent[-1]
        tokens_per_s = so_far.tokens_per_s
        validated = so_far.validated
        facts = [f"loss {last.loss:.3f}", f"ETA {format_largest_unit(so_far.left_s())}"]
        if validated is not None:
            facts.append(f"val {validated.loss:.3f}")
        facts.append(f"{format_count(tokens_per_s)} tok/s")
        saved = "not saved"
        if so_far.saved is not None:
            ago_s = max(0.0, self._clock() - so_far.saved.at)
            saved = f"saved {format_largest_unit(ago_s)} ago"
        facts.append(saved)
        if validated is not None and (end := self._predict_end(validated)) is not None:
            facts.append(f"{end:.2f} expected")
        facts.append(format_bytes(last.memory_bytes))
        facts.append(f"MFU {self._format_mfu(tokens_per_s)}")
        return facts


class ProgressLine:
    """One line of any width: the place, a bar, and the whole facts that there is room for."""

    def __init__(self, head: str, share: float, facts: Sequence[str]) -> None:
        self._head = head
        self._share = share
        self._facts = facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = options.max_width
        # Of one width while the facts after it change theirs.
        bar = max(MIN_BAR_COLUMNS, min(MAX_BAR_COLUMNS, columns // 10))
        text = self._head
        for place, fact in enumerate(self._facts):
            longer = f"{text}{FACT}{fact}"
            kept = 0 if place < FACTS_BEFORE_BAR else bar + 1
            if len(longer) + kept > columns:
                break
            text = longer
        if len(text) + bar + 1 > columns:
            yield Text(text, no_wrap=True, overflow="crop")
            return
        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True, overflow="crop")
        line.add_row(ProgressBar(total=1.0, completed=self._share, width=bar), text)
        yield line
