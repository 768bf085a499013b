"""Experiment trackers, one file each: a run's losses and rates in the tool where a person compares
runs.

A file is called as its tracker, as the library that it needs, and as the extra that has it.
`train.trackers` of run.yaml names it. Listing the trackers imports none of them, and a library is
imported when its tracker is opened. That is in a process of its own (`app.track_process`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import msgspec

from farspan.domain.install import install_command
from farspan.domain.problems import Problem, Refusal
from farspan.domain.suggest import advise, known_names

#: What `train.trackers: auto` means where its library is installed; where it is not, no tracker.
DEFAULT = "tensorboard"
TRACKERS_KEY = "train.trackers"

#: How a job of a run has ended. A run that was stopped may be resumed.
EndState = Literal["finished", "stopped", "failed"]


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as trackers know it. `id` stays the same when the run is resumed; `config` holds the
    model, the training and the plan by dotted keys."""

    name: str
    id: str
    folder: Path
    config: dict[str, Any]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What a run reports at a step: numbers, or text of the model. `kind` is the event's."""

    kind: str
    step: int
    at: float
    values: dict[str, float] = {}
    texts: dict[str, str] = {}


class Tracker(Protocol):
    """A run in a tracker, open for writing. Any method may raise what its library raises: it is
    called again later with the same values."""

    #: A line for people, such as how to send what is written offline; or empty.
    note: str

    def last_steps(self) -> dict[str, int] | None:
        """Return the last step that the tracker holds of each kind of points; None where it cannot
        be asked."""

    def rewind(self, step: int) -> bool:
        """Forget what was logged after `step`; return whether the tracker can."""

    def describe(self, config: Mapping[str, Any]) -> None:
        """Record the configuration of a run that follows another plan from here on."""

    def log(self, points: Sequence[Point]) -> None:
        """Log points, and return when the library has written them or has them to send."""

    def finish(self, state: EndState, summary: Mapping[str, Any], at: float) -> None:
        """Record how the run has ended, and close it."""


class TrackerModule(Protocol):
    """What a tracker's file offers."""

    @staticmethod
    def required_modules() -> tuple[str, ...]:
        """Return the names of the modules that it imports."""

    @staticmethod
    def open_tracker(run: TrackedRun) -> Tracker:
        """Begin the run in the tracker, or resume the one that it has by its id."""


def list_trackers() -> list[str]:
    """List the trackers' names without importing them."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(module for module in modules if not module.startswith("_"))


def load_tracker(name: str) -> TrackerModule:
    """Import the file of a tracker, not its library."""
    return cast(TrackerModule, importlib.import_module(f"{__name__}.{name}"))


def resolve_trackers(asked: str | Sequence[str]) -> tuple[str, ...]:
    """Return the trackers that run.yaml means, each once. Raises Refusal (out-of-range) for an
    unknown one."""
    if asked == "auto":
        return () if find_missing(DEFAULT) else (DEFAULT,)
    wanted = (asked,) if isinstance(asked, str) else asked
    for name in wanted:
        if name not in list_trackers():
            raise Refusal(
                "out-of-range",
                what=f"there is no tracker {name!r}",
                where=f"run.yaml, key {TRACKERS_KEY}",
                fact=known_names(name, list_trackers(), "trackers"),
                remedy=advise(name, list_trackers(), verb=f"set {TRACKERS_KEY}:"),
                key=TRACKERS_KEY,
            )
    return tuple(dict.fromkeys(wanted))


def find_missing(name: str) -> Problem | None:
    """Return the problem of a tracker whose library is not installed here, None of the others."""
    required = load_tracker(name).required_modules()
    missing = [module for module in required if find_spec(module) is None]
    if not missing:
        return None
    return Problem(
        code="extra-missing",
        what=f"the tracker {name} needs a library that is not installed",
        where=f"{TRACKERS_KEY}: {name}",
        fact=f"there is no module {missing[0]}",
        remedy=install_command(name),
        key=TRACKERS_KEY,
    )


def require_trackers(asked: str | Sequence[str]) -> None:
    """Refuse trackers that are unknown, or whose library is not installed."""
    for name in resolve_trackers(asked):
        problem = find_missing(name)
        if problem is not None:
            raise Refusal.of(problem)
