"""What a person sees while training: a live display on a terminal, plain lines where output is piped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farspan.domain.model import train_flops_per_token
from farspan.domain.plan import Plan
from farspan.domain.results import Event, Finished, Saved, Started, Step, Validated, Warned
from farspan.domain.units import format_bytes, format_count, format_seconds
from farspan.report.losses import told
from farspan.report.text import ENDINGS, maybe

#: Speeds and times to go are medians over so many last steps.
RECENT_STEPS = 50
#: Seconds between two plain lines.
LINE_S = 10.0


class TrainingDisplay:
    """Shows events one at a time: `with Progress(plan, console, time.time) as progress: progress.show(event)`.

    `clock` gives seconds since the epoch, as `Event.at`. Only events of this start are shown, not those of starts
    before a resumption.
    """

    def __init__(self, plan: Plan, console: Console, clock: Callable[[], float]) -> None:
        self._plan, self._console, self._clock = plan, console, clock
        #: Of show's thread. The live display is drawn in another one, which takes a copy before it goes through them.
        self._recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        self._started: Started | None = None
        self._validated: Validated | None = None
        self._saved: Saved | None = None
        self._steps, self._pauses_s = 0, 0.0
        #: Of the whole run, as its time budget has it now.
        self._in_all = plan.train.steps
        self._line_at = float("-inf")
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> TrainingDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: Event) -> None:
        """Take one event in, and print what should stay on the screen."""
        match event:
            case Started():
                self._started = event
                if event.step:
                    self._print(f"resumed after step {event.step:,}")
            case Step():
                # Counted first: the display divides by it as soon as there is a step.
                self._steps += 1
                self._recent.append(event)
                self._in_all = event.steps or self._in_all
                if self._live is None and self._clock() - self._line_at >= LINE_S:
                    self._line_at = self._clock()
                    self._print(" · ".join([f"step {event.step:,}/{self._in_all:,}", *self._facts()]))
            case Validated():
                self._validated, self._pauses_s = event, self._pauses_s + event.seconds
                loss = f"validation loss {told(event)} · {event.bits_per_byte:.3f} bits a byte"
                self._print(f"step {event.step:,} · {loss}{' · best so far' if event.best else ''}")
            case Saved():
                self._saved, self._pauses_s = event, self._pauses_s + event.seconds
                if self._live is None:
                    self._print(f"step {event.step:,} · saved {event.path}, {format_bytes(event.size_bytes)}")
            case Warned():
                self._print(f"warning: {event.message}", "yellow")
            case Finished():
                ending = ENDINGS.get(event.reason, event.reason)
                self._print(f"step {event.step:,} · {ending} after {format_seconds(event.seconds)}")

    def _print(self, line: str, style: str = "") -> None:
        # A piped line stays one line. Text, not markup: messages may hold square brackets.
        self._console.print(Text(line, style=style), soft_wrap=not self._console.is_terminal)

    def _facts(self) -> list[str]:
        """Loss, speed, memory, time to go: known from the first step on."""
        recent = tuple(self._recent)
        last = recent[-1]
        facts = [f"loss {last.loss:.3f}"]
        if self._validated is not None:
            facts.append(f"val {self._validated.loss:.3f} {_read_of(self._validated)}".rstrip())
        tokens_per_s = median(step.tokens / step.step_s for step in recent)
        facts += [f"{tokens_per_s:,.0f} tokens/s", f"MFU {self._mfu(tokens_per_s)}", format_bytes(last.memory_bytes)]
        return [*facts, f"ETA {format_seconds(self.eta_s())}"]

    def _mfu(self, tokens_per_s: float) -> str:
        peak_flops = self._started.peak_flops if self._started else None
        flops = train_flops_per_token(self._plan.model, self._plan.train.seq_len)
        return maybe(flops * tokens_per_s / peak_flops if peak_flops else None, ".1%")

    def eta_s(self) -> float:
        """Seconds until the last step: each takes the median of recent ones and its share of validations and saves."""
        recent = tuple(self._recent)
        each_s = median(step.step_s for step in recent) + self._pauses_s / self._steps
        return (self._in_all - recent[-1].step) * each_s

    def _render(self) -> Group:
        steps = self._in_all
        if not self._recent:
            return Group(Text("starting workers" if self._started is None else "first step", style="dim"))
        done = self._recent[-1].step
        *facts, eta = self._facts()
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(ProgressBar(total=steps, completed=done), f"{done:,}/{steps:,} · {done / steps:.0%} · {eta}")
        saved = "not saved yet"
        if self._saved is not None:
            ago_s = max(0.0, self._clock() - self._saved.at)
            saved = f"saved step {self._saved.step:,}, {format_seconds(ago_s)} ago"
        return Group(head, Text(" · ".join(facts)), Text(saved, style="dim"))


def _read_of(event: Validated) -> str:
    """As `read_on`, short."""
    return "" if event.of is None else f"on {format_count(event.tokens)} of {format_count(event.of)} tokens"
