"""A run directory, read: its plan, corpus, configuration, and the one line of steps that its last
model came from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from farspan.domain.corpus import CorpusManifest
from farspan.domain.cost import Estimate
from farspan.domain.forecast import Forecast
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import (
    Event,
    Finished,
    Recovered,
    Rescheduled,
    Sampled,
    Saved,
    Started,
    Step,
    Traced,
    Validated,
    Warned,
    read_events,
)
from farspan.domain.struct_files import load, read_bytes

E = TypeVar("E")

#: Steps at each start that are slower than the rest (caches, compilation, connections) and left out
#: of medians.
SLOW_START_STEPS = 5
#: Ends (`Finished.reason`) after which nothing is left to train.
COMPLETE = ("done", "deadline", "early-stop")


class Timed(msgspec.Struct, frozen=True):
    """One step that counts: `time_s` is how long the run had worked when it ended, `tokens` read
    until then."""

    step: Step
    time_s: float
    tokens: int
    start: Started
    warm: bool


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What led to the model that the run ended with.

    A start after a checkpoint undoes every step beyond it: those are dropped here, whether or not
    they were repeated. `run_s` counts all the time that workers ran, dropped steps included, and
    that between two starts where the run resumed by itself. `starts` holds each start with the
    `run_s` before it, `ends` every end; `finished` is the last start's, None while it has none.
    """

    steps: tuple[Timed, ...]
    validations: tuple[Validated, ...]
    samples: tuple[Sampled, ...]
    traced: tuple[Traced, ...]
    saves: tuple[Saved, ...]
    #: All that were given, also those that later events made past.
    warnings: tuple[Warned, ...]
    rescheduled: tuple[Rescheduled, ...]
    starts: tuple[tuple[Started, float], ...]
    ends: tuple[Finished, ...]
    #: Faults after which the run resumed by itself.
    recoveries: tuple[Recovered, ...]
    finished: Finished | None
    run_s: float
    lost_steps: int
    memory_bytes: int

    @property
    def reason(self) -> str:
        """`Finished.reason`; "unfinished" where the last start has no end: it runs, or was
        killed."""
        return self.finished.reason if self.finished else "unfinished"

    @property
    def estimate(self) -> Estimate | None:
        """What the plan that the run ended with was predicted to take when it was first
        followed."""
        return next((start.estimate for start, _ in self.starts if start.plan == self.plan), None)

    @property
    def plan(self) -> str | None:
        """The hash of the plan that the run ended with: it may have been planned again."""
        return self.starts[-1][0].plan if self.starts else None

    @property
    def timed(self) -> tuple[Timed, ...]:
        """The steps that medians are of: of the last plan, each start's warm-up left out unless
        there are no others."""
        own = [timed for timed in self.steps if timed.start.plan == self.plan]
        own = own or list(self.steps)
        return tuple([timed for timed in own if timed.warm] or own)

    @property
    def usd(self) -> float | None:
        """US dollars at what each start was predicted to cost a second; None where a start's price
        is unknown."""
        ends = [*(before for _, before in self.starts[1:]), self.run_s]
        total = 0.0
        for (start, before), end in zip(self.starts, ends, strict=True):
            estimate = start.estimate
            if estimate is None or estimate.usd is None:
                return None
            total += estimate.usd / estimate.run_s * (end - before)
        return total if self.starts else None


class RunHistory(msgspec.Struct, frozen=True, kw_only=True):
    """All that reports are made from. `config` is run.yaml as written, `warnings` are those of
    the run that still hold, each once; `history` is rank 0's, `others` holds those of the other
    ranks with logs in this folder."""

    folder: Path
    plan: Plan
    corpus: CorpusManifest
    config: str
    warnings: tuple[str, ...]
    history: History
    others: dict[int, History] = {}
    forecast: Forecast | None = None

    @property
    def histories(self) -> dict[int, History]:
        """Of every rank that has one."""
        return {0: self.history, **self.others}


def open_run(path: Path) -> RunHistory:
    """Read a run directory; refuses a folder that is none, and a run that no worker has started."""
    folder = RunFolder.existing(path)
    if not folder.events.exists():
        raise Refusal(
            "not-a-run",
            what="the run has nothing to report yet",
            where=folder.events,
            fact="no worker has written an event",
            remedy=folder.resume_command(),
        )
    history = follow_events(read_events(folder.events))
    plan = folder.load_plan()
    record = load(folder.record, RunRecord)

    # Warnings that still hold: a checkpoint that could not be written is none once a later one is
    # there.
    saves = [saved.at for saved in history.saves]
    bests = [event.at for event in history.validations if event.best]
    ends = {"saved": max(saves, default=-math.inf), "best": max(bests, default=-math.inf)}
    warnings = dict.fromkeys(record.warnings)
    for warning in history.warnings:
        if warning.until is None or ends[warning.until] <= warning.at:
            warnings.setdefault(warning.message)
    corpus = load(folder.corpus, CorpusManifest)
    config = read_bytes(folder.config).decode(errors="backslashreplace")

    # The other ranks' logs; those of workers on other hosts may be missing.
    others = {}
    for rank in range(1, len(plan.devices)):
        log = folder.logs / f"rank-{rank}.events.jsonl"
        if log.exists():
            others[rank] = follow_events(read_events(log))
    return RunHistory(
        folder=path,
        plan=plan,
        corpus=corpus,
        config=config,
        warnings=tuple(warnings),
        history=history,
        others=others,
        forecast=record.forecast,
    )


def follow_events(events: Iterable[Event]) -> History:
    """Follow the events of a run through all its starts."""
    recorded = list(events)
    steps: dict[int, Timed] = {}
    lasting: list[Validated | Sampled | Traced] = []
    starts: list[tuple[Started, float]] = []
    lost_steps = 0
    run_s = 0.0
    ended_at = 0.0
    for started, part in _split_by_start(recorded):
        # Where it resumed by itself the machines were the run's meanwhile.
        if ended_at:
            run_s += len(_events_of(Recovered, part)) * (started.at - ended_at)
        kept = {number: timed for number, timed in steps.items() if number <= started.step}
        lost_steps += len(steps) - len(kept)
        tokens = max((timed.tokens for timed in kept.values()), default=0)
        steps = kept | _steps_of(part, started, run_s, tokens)
        lasting = [event for event in lasting if event.step <= started.step]
        lasting += [event for event in part if isinstance(event, Validated | Sampled | Traced)]
        starts.append((started, run_s))
        ended_at = max(event.at for event in part)
        run_s += ended_at - started.at
    validations = _events_of(Validated, lasting)
    samples = _events_of(Sampled, lasting)
    traced = _events_of(Traced, lasting)
    saves = _events_of(Saved, recorded)
    warnings = _events_of(Warned, recorded)
    rescheduled = _events_of(Rescheduled, recorded)
    ends = _events_of(Finished, recorded)
    recoveries = _events_of(Recovered, recorded)
    finished = None
    if recorded and isinstance(recorded[-1], Finished):
        finished = recorded[-1]
    memory_bytes = max((step.memory_bytes for step in _events_of(Step, recorded)), default=0)
    return History(
        steps=tuple(steps.values()),
        validations=validations,
        samples=samples,
        traced=traced,
        saves=saves,
        warnings=warnings,
        rescheduled=rescheduled,
        starts=tuple(starts),
        ends=ends,
        recoveries=recoveries,
        finished=finished,
        run_s=run_s,
        lost_steps=lost_steps,
        memory_bytes=memory_bytes,
    )


def _events_of(kind: type[E], events: Iterable[object]) -> tuple[E, ...]:
    return tuple(event for event in events if isinstance(event, kind))


def _split_by_start(events: Iterable[Event]) -> Iterator[tuple[Started, list[Event]]]:
    """Yield each start, and the events from it to the next; no warnings, which a worker may also
    give before it starts."""
    started = None
    part = list[Event]()
    for event in events:
        if isinstance(event, Started):
            if started is not None:
                yield started, part
            started = event
            part = []
        if not isinstance(event, Warned):
            part.append(event)
    if started is not None:
        yield started, part


def _steps_of(
    part: list[Event], started: Started, before_s: float, tokens: int
) -> dict[int, Timed]:
    """Return one start's steps by number, `before_s` seconds and `tokens` tokens into the run."""
    steps = _events_of(Step, part)
    skipped = min(SLOW_START_STEPS, len(steps) // 2)
    timed = dict[int, Timed]()
    for index, step in enumerate(steps):
        if step.step in timed:  # A survivor has reported rank 0's last step, as rank 0 has.
            continue
        tokens += step.tokens
        time_s = before_s + step.at - started.at
        timed[step.step] = Timed(step, time_s, tokens, started, index >= skipped)
    return timed


def is_complete(folder: RunFolder) -> bool:
    """Whether nothing is left to train."""
    return folder.events.exists() and follow_events(read_events(folder.events)).reason in COMPLETE
