"""What a person sees while training: a live display on a terminal, plain lines where output is
piped."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farspan.cli.display import DisplayConsole
from farspan.domain.escapes import escape_controls
from farspan.domain.forecast import Forecast
from farspan.domain.model import train_flops_per_token
from farspan.domain.plan import Plan
from farspan.domain.results import (
    Event,
    Finished,
    Recovered,
    Saved,
    Started,
    Step,
    Validated,
    Warned,
)
from farspan.domain.units import counted, format_bytes, format_count, format_seconds
from farspan.estimate.forecast import revised
from farspan.report.losses import told
from farspan.report.so_far import SoFar
from farspan.report.text import ENDINGS, maybe

#: Seconds between two plain lines.
LINE_S = 10.0


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
        self._plan, self._console, self._clock, self._forecast = plan, console, clock, forecast
        #: Of show's thread; the live display is drawn in another one.
        self._so_far = SoFar(plan.train.steps)
        self._line_at = float("-inf")
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self._render, refresh_per_second=4, transient=True
            )

    def __enter__(self) -> TrainingDisplay:
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

    def show(self, event: Event) -> None:
        """Take one event in, and print what should stay on the screen."""
        self._so_far.take(event)
        match event:
            case Started():
                self._line_at = float("-inf")
                if event.step:
                    self._print(f"resumed after step {event.step:,}")
            case Recovered():
                again = f"{counted(event.lost, 'step')} lost"
                self._print(
                    f"recovered after {format_seconds(event.down_s)}: {event.fault.what} · {again}"
                )
            case Step():
                if self._live is None and self._clock() - self._line_at >= LINE_S:
                    self._line_at = self._clock()
                    self._print(
                        " · ".join([f"step {event.step:,}/{self._so_far.steps:,}", *self._facts()])
                    )
            case Validated():
                loss = f"validation loss {told(event)} · {event.bits_per_byte:.3f} bits a byte"
                self._print(f"step {event.step:,} · {loss}{' · best so far' if event.best else ''}")
            case Saved():
                if self._live is None:
                    self._print(
                        f"step {event.step:,} · saved {event.path}, "
                        f"{format_bytes(event.size_bytes)}"
                    )
            case Warned():
                self._print(f"warning: {event.message}", "yellow")
            case Finished():
                ending = ENDINGS.get(event.reason, event.reason)
                self._print(f"step {event.step:,} · {ending} after {format_seconds(event.seconds)}")

    def _print(self, line: str, style: str = "") -> None:
        # A piped line stays one line. Text, not markup: messages may hold square brackets. Escaped
        # here too, because Text drops some control characters without a trace.
        text = Text(escape_controls(line), style=style)
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    def _facts(self) -> list[str]:
        """Loss, speed, memory, time to go: known from the first step on."""
        last, validated, tokens_per_s = (
            self._so_far.recent[-1],
            self._so_far.validated,
            self._so_far.tokens_per_s,
        )
        facts = [f"loss {last.loss:.3f}"]
        if validated is not None:
            facts.append(f"val {validated.loss:.3f} {_read_of(validated)}".rstrip())
            if (end := self._at_the_end(validated)) is not None:
                facts.append(f"{end:.2f} expected at the end")
        facts += [
            f"{tokens_per_s:,.0f} tokens/s",
            f"MFU {self._mfu(tokens_per_s)}",
            format_bytes(last.memory_bytes),
        ]
        return [*facts, f"ETA {format_seconds(self._so_far.left_s())}"]

    def _at_the_end(self, validated: Validated) -> float | None:
        share = validated.step / self._so_far.steps
        if self._forecast is None or share >= 1:
            return None
        expected = revised(
            self._forecast, self._plan.train.schedule, share, validated.loss, validated.bigram_nats
        )
        return None if expected is None else expected[0]

    def _mfu(self, tokens_per_s: float) -> str:
        peak_flops = self._so_far.started.peak_flops if self._so_far.started else None
        flops = train_flops_per_token(self._plan.model, self._plan.train.seq_len)
        return maybe(flops * tokens_per_s / peak_flops if peak_flops else None, ".1%")

    def _render(self) -> Group:
        so_far, steps = self._so_far, self._so_far.steps
        if not so_far.recent:
            return Group(
                Text("starting workers" if so_far.started is None else "first step", style="dim")
            )
        done = so_far.recent[-1].step
        *facts, eta = self._facts()
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(
            ProgressBar(total=steps, completed=done),
            f"{done:,}/{steps:,} · {done / steps:.0%} · {eta}",
        )
        saved = "not saved yet"
        if so_far.saved is not None:
            ago_s = max(0.0, self._clock() - so_far.saved.at)
            saved = f"saved step {so_far.saved.step:,}, {format_seconds(ago_s)} ago"
        return Group(head, Text(" · ".join(facts)), Text(saved, style="dim"))


def _read_of(event: Validated) -> str:
    """As `read_on`, short."""
    return (
        ""
        if event.of is None
        else f"on {format_count(event.tokens)} of {format_count(event.of)} tokens"
    )
