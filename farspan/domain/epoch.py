"""The starts of a run: each is an epoch, and what an earlier one still does afterwards counts for
nothing.

A worker that stood still, or that a cut link kept from hearing that it was replaced, may wake and
write. The run folder's `epochs.json` says which epoch may, and up to which step checkpoints of
earlier ones count.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from farspan.domain.codec import parse_json, save
from farspan.domain.problems import Problem, Refusal, command

#: The variable of a worker's environment that says which epoch it is of, as JSON.
EPOCH = "FARSPAN_EPOCH"
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ended the epoch before. `at` is when its supervisor saw it, in seconds since the Unix
    epoch; `step` the last step that was heard of."""

    problem: Problem
    at: float
    step: int
    #: Whether the run goes on under another plan.
    replanned: bool = False


class Epoch(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The start that workers belong to, as their launcher describes it."""

    number: Number
    #: Seconds that the run has used up when it starts, whatever its checkpoint says: time between
    #: starts counts too.
    used_s: float = 0.0
    #: Steps, from 0 on, whose batch is left out: their gradient was not finite.
    skip: tuple[int, ...] = ()
    fault: Fault | None = None


class Ledger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`epochs.json`: the epoch that may write, and the step of the newest checkpoint when each
    earlier one ended, by its number; -1 where there was none."""

    epoch: Number = 0
    ended: dict[int, int] = {}

    def counts(self, epoch: int, step: int) -> bool:
        """Whether a checkpoint of an epoch counts that has this step."""
        return epoch >= self.epoch or step <= self.ended.get(epoch, step)


def given(environment: os._Environ[str] | dict[str, str]) -> Epoch | None:
    """The epoch that a launcher gave this worker; None of one that was started by hand."""
    said = environment.get(EPOCH)
    return parse_json(said.encode(), Epoch, f"variable {EPOCH}") if said else None


def read_ledger(path: Path) -> Ledger:
    """The ledger of a run; of one that an earlier version began, an empty one."""
    try:
        return parse_json(path.read_bytes(), Ledger, path)
    except FileNotFoundError:
        return Ledger()


def advance(path: Path, newest: int) -> int:
    """Begin the next epoch of a run whose newest checkpoint has this step; returns its number."""
    before = read_ledger(path)
    ended = {**before.ended, before.epoch: newest} if before.epoch else before.ended
    save(Ledger(epoch=before.epoch + 1, ended=ended), path)
    return before.epoch + 1


def require(path: Path, number: int) -> None:
    """Raises Refusal (superseded) where another epoch of the run has begun since."""
    if (now := read_ledger(path).epoch) > number:
        raise Refusal(
            "superseded",
            what="this worker was replaced",
            where=path,
            fact=f"it is of start {number} of the run, which is at start {now}",
            remedy=command("status", path.parent),
        )
