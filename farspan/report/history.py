"""A run directory, read: its plan, corpus, configuration, and the one line of steps that its last model came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from farspan.domain.codec import load, read_bytes
from farspan.domain.corpus import CorpusManifest
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.results import (
    Event,
    Finished,
    Sampled,
    Saved,
    Started,
    Step,
    Validated,
    Warned,
    read_events,
)  # fmt: skipfrom farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run import RunFolder, RunRecord

#: Steps at each start that are slower than the rest (caches, compilation, connections) and left out of medians.
WARMUP_STEPS = 5


class Timed(msgspec.Struct, frozen=True):
    """One step that counts: `time_s` is how long the run had worked when it ended, `tokens` read until then."""

    step: Step
    time_s: float
    tokens: int
    start: Started
    warm: bool


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What led to the model that the run ended with.

    A start after a checkpoint undoes every step beyond it: those are dropped here, whether or not they were repeated.
    `run_s` counts all the time that workers ran, dropped steps included, and no time between two starts.
    `starts` holds each start with the `run_s` before it, `ends` every end told; `finished` is the last
    start's, None while it has none.
    """

    steps: tuple[Timed, ...]
    validations: tuple[Validated, ...]
    samples: tuple[Sampled, ...]
    saves: tuple[Saved, ...]
    warnings: tuple[Warned, ...]
    starts: tuple[tuple[Started, float], ...]
    ends: tuple[Finished, ...]
    finished: Finished | None
    run_s: float
    lost_steps: int
    memory_bytes: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All that reports are made from. `config` is run.yaml as written, `warnings` are those given before training."""

    folder: Path
    plan: Plan
    corpus: CorpusManifest
    config: str
    warnings: tuple[str, ...]
    history: History


def open_run(path: Path) -> Run:
    """Read a run directory; refuses a folder that is none, and a run that no worker has started."""
    folder = RunFolder.existing(path)
    if not folder.events.exists():
        raise Refusal(
            "not-a-run",
            what="the run has nothing to report yet",
            where=folder.events,
            fact="no worker has written an event",
            remedy=f"farspan resume {path}",
        )
    return Run(
        folder=path,
        plan=folder.load_plan(),
        corpus=load(folder.corpus, CorpusManifest),
        config=read_bytes(folder.config).decode(),
        warnings=load(folder.record, RunRecord).warnings,
        history=trace(read_events(folder.events)),
    )


def trace(events: Iterable[Event]) -> History:
    """Follow the events of a run through all its starts."""
    steps: dict[int, Timed] = {}
    starts: list[tuple[Started, float]] = []
    kept: list[Event] = []
    memory_bytes, lost_steps, run_s = 0, 0, 0.0
    for part in _parts(events):
        started = part[0]
        assert isinstance(started, Started)
        undone = [number for number in steps if number > started.step]
        for number in undone:
            del steps[number]
        lost_steps += len(undone)
        kept = [event for event in kept if not (isinstance(event, Validated | Sampled) and event.step > started.step)]
        starts.append((started, run_s))
        steps.update(_steps_of(part, started, run_s, steps[max(steps)].tokens if steps else 0))
        kept += part
        memory_bytes = max([memory_bytes, *(event.memory_bytes for event in part if isinstance(event, Step))])
        run_s += max(event.at for event in part) - started.at
    return History(
        steps=tuple(steps[number] for number in sorted(steps)),
        validations=tuple(event for event in kept if isinstance(event, Validated)),
        samples=tuple(event for event in kept if isinstance(event, Sampled)),
        saves=tuple(event for event in kept if isinstance(event, Saved)),
        warnings=tuple(event for event in kept if isinstance(event, Warned)),
        starts=tuple(starts),
        ends=tuple(event for event in kept if isinstance(event, Finished)),
        finished=kept[-1] if kept and isinstance(kept[-1], Finished) else None,
        run_s=run_s,
        lost_steps=lost_steps,
        memory_bytes=memory_bytes,
    )


def _parts(events: Iterable[Event]) -> Iterator[list[Event]]:
    """The events of each start, the start first."""
    part: list[Event] = []
    for event in events:
        if isinstance(event, Started) and part:
            yield part
            part = []
        if part or isinstance(event, Started):
            part.append(event)
    if part:
        yield part


def _steps_of(part: list[Event], started: Started, before_s: float, tokens: int) -> dict[int, Timed]:
    """The steps of one start by number, `before_s` seconds and `tokens` tokens into the run."""
    found = [event for event in part if isinstance(event, Step)]
    skipped = min(WARMUP_STEPS, len(found) // 2)
    timed = {}
    for index, step in enumerate(found):
        tokens += step.tokens
        time_s = before_s + step.at - started.at
        timed[step.step] = Timed(step, time_s, tokens, started, index >= skipped)
    return timed
