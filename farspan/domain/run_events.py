"""The events that a run is made of.

`events.jsonl` in a run directory holds one event a line; everything that is shown about a run is
computed from it. Times are seconds since the epoch (`at`) or durations (`_s`); sizes are bytes;
losses are nats a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from farspan.domain.cost import Estimate, SourceLoss
from farspan.domain.decoding import json_decoder
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Problem, Refusal
from farspan.domain.units import counted, format_bytes, format_seconds


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run ran: enough to explain a difference in speed."""

    farspan: str
    python: str
    torch: str
    platform: str
    device: str
    cpus: int
    threads: int
    memory_bytes: int
    commit: str | None = None


class _Event(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="event", forbid_unknown_fields=True
):
    at: float


class Started(_Event, frozen=True, kw_only=True, tag="started"):
    """A worker group began to train: at step 0, or after a checkpoint."""

    step: int
    plan: str
    world: int
    environment: Environment
    estimate: Estimate | None
    #: Of all devices together, at the run's precision; None where it is not known.
    peak_flops: float | None
    #: Seconds that the run had used up by then, as its time budget counts them.
    used_s: float = 0.0

    def __str__(self) -> str:
        workers = counted(self.world, "worker")
        return f"resumed after step {self.step:,}" if self.step else f"{workers} started"


class Recovered(_Event, frozen=True, kw_only=True, tag="recovered"):
    """After a fault workers resume, without a person: from `step`, which makes `lost` steps to do
    again. The fault was seen `down_s` seconds ago."""

    step: int
    epoch: int
    fault: Problem
    lost: int
    down_s: float
    #: Whether the run resumes under another plan.
    replanned: bool = False

    def __str__(self) -> str:
        again = f"{counted(self.lost, 'step')} again"
        return f"recovered after {format_seconds(self.down_s)}: {self.fault.what} · {again}"


class Step(_Event, frozen=True, kw_only=True, tag="step"):
    """One optimizer step over all ranks. `loss` is the mean over the step's valid tokens."""

    step: int
    loss: float
    lr: float
    #: Before clipping; None where it was not finite, as after an overflow in fp16, and the update
    #: was skipped. A step that was not read from a file may have inf or nan here: JSON has no word
    #: for them, and they are written as null.
    grad_norm: float | None
    tokens: int
    step_s: float
    memory_bytes: int
    #: Steps of the whole run as its time budget has it now; None of a run without one.
    steps: int | None = None

    def __str__(self) -> str:
        whole = "" if self.steps is None else f"/{self.steps:,}"
        speed = f"{self.tokens / self.step_s:,.0f} tokens/s"
        return f"step {self.step:,}{whole} · loss {self.loss:.3f} · {speed}"


class Validated(_Event, frozen=True, kw_only=True, tag="validated"):
    """The mean loss of `tokens` of the `of` tokens to be predicted in the validation split, with
    the weights of `step`."""

    step: int
    loss: float
    bits_per_byte: float
    tokens: int
    seconds: float
    #: Whether these weights are kept as the best so far, by what validations in between read.
    best: bool
    of: int | None = None
    #: Of `loss`, as an estimate of the whole split's; None where there are too few windows.
    standard_error: float | None = None
    #: What the tokens are known by: losses of runs with other names are not of the same tokens.
    read: str | None = None
    #: Entropies of these same tokens under the training split's counts, nats a token; reported by
    #: rank 0.
    unigram_nats: float | None = None
    bigram_nats: float | None = None
    #: Of the last validation of a run: its loss on the `sample_tokens` that validations in between
    #: read.
    sample_loss: float | None = None
    sample_tokens: int | None = None
    #: Of a mixture: by source. `loss` weighs them as training does, without what is replayed.
    sources: dict[str, SourceLoss] | msgspec.UnsetType = msgspec.UNSET

    def __str__(self) -> str:
        best = " · best so far" if self.best else ""
        return f"step {self.step:,} · validation loss {self.loss:.3f}{best}"

    @property
    def whole(self) -> bool:
        """True if all of the split was read."""
        return self.tokens == self.of


class Saved(_Event, frozen=True, kw_only=True, tag="saved"):
    step: int
    path: str
    size_bytes: int
    seconds: float

    def __str__(self) -> str:
        size = format_bytes(self.size_bytes)
        return f"step {self.step:,} · saved {self.path}, {size}"


class Sampled(_Event, frozen=True, kw_only=True, tag="sampled"):
    """Text that the model wrote after a prompt."""

    step: int
    prompt: str
    text: str
    #: The share of its tokens that stand in the training text word for word (`corpus.verbatim`);
    #: None where nobody looked.
    verbatim: float | None = None

    def __str__(self) -> str:
        sample = " ".join((self.prompt + self.text).split())
        return f"step {self.step:,} · sample: {sample}"


class Warned(_Event, frozen=True, kw_only=True, tag="warned"):
    """Something a person should know though the run went on."""

    message: str
    #: What makes it past: a checkpoint or best weights that could not be written, until later ones
    #: are.
    until: Literal["saved", "best"] | None = None

    def __str__(self) -> str:
        return f"warning: {self.message}"


class Rescheduled(_Event, frozen=True, kw_only=True, tag="rescheduled"):
    """At the speed measured so far the time budget fits `steps`, not the `planned` ones; the
    learning-rate schedule follows. `Step.steps` has the number at each step."""

    step: int
    steps: int
    planned: int

    def __str__(self) -> str:
        if self.steps < self.planned:
            return (
                f"at this speed only {self.steps:,} of {counted(self.planned, 'step')} fit the "
                "time budget; the learning-rate schedule has been shortened"
            )
        return (
            f"at this speed {counted(self.steps, 'step')} fit the time budget, not "
            f"{self.planned:,}; the learning-rate schedule has been lengthened"
        )


#: Kinds of spans that are arithmetic; and backends whose passes have ended when their spans end:
#: others only take orders in them.
COMPUTE_SPANS = ("forward", "backward", "update")


IN_STEP = ("cpu", "cuda")


class Span(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker did from `start` to `end`, seconds since the epoch: forward, backward, receive,
    collective, or update."""

    kind: str
    microbatch: int | None
    start: float
    end: float


class Traced(_Event, frozen=True, kw_only=True, tag="traced"):
    """All that one worker did in one step."""

    step: int
    rank: int
    spans: tuple[Span, ...]

    def __str__(self) -> str:
        spans = counted(len(self.spans), "span")
        return f"step {self.step:,} · rank {self.rank} traced, {spans}"


class Finished(_Event, frozen=True, kw_only=True, tag="finished"):
    """The end of a worker group: `reason` is done, deadline, early-stop, interrupted, preempted or
    failed."""

    step: int
    reason: str
    seconds: float
    problem: Problem | None = None

    def __str__(self) -> str:
        seconds = format_seconds(self.seconds)
        return f"step {self.step:,} · {self.reason} after {seconds}"


#: Ends (`Finished.reason`) between two steps, by a request or a preemption: the step is saved, and
#: the run resumes from there.
STOP_REASONS = ("interrupted", "preempted")


Event = (
    Started
    | Recovered
    | Step
    | Validated
    | Saved
    | Sampled
    | Warned
    | Rescheduled
    | Traced
    | Finished
)


def read_events(path: Path) -> Iterator[Event]:
    """Read the events of a run, oldest first. A last line that a killed worker left unfinished is
    left out. Raises Refusal (file-unreadable) for a line that is no event."""
    with open(path, "rb") as lines:
        yield from decode_events((line for line in lines if line.endswith(b"\n")), path)


def decode_events(lines: Iterable[bytes], where: object) -> Iterator[Event]:
    """Decode events from their lines, which may be another machine's.

    Raises Refusal (file-unreadable).
    """
    decoder = json_decoder(Event)
    for line in lines:
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refusal(
                "file-unreadable",
                what="a line is not an event of a run",
                where=where,
                fact=f"{str(error)[:200]}: {line[:80].decode(errors='backslashreplace')}",
                remedy=f"take that line out of {shell_word(where)}",
            ) from None
