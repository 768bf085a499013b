"""The starts of a run: each is an epoch, and what an earlier one still does afterwards counts for
nothing.

A worker that stood still, or that a cut link kept from learning that it was replaced, may wake and
write. The run folder's `epochs.json` records which epoch may, and up to which step checkpoints of
earlier ones count. Each host of a run keeps the newest epoch that it has seen, too: a copy of the
run folder may be trained from another machine.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from farspan.domain.decoding import decode_json
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import parse_json, save

#: The variable of a worker's environment that holds its epoch, as JSON.
EPOCH_VARIABLE = "FARSPAN_EPOCH"
#: The variable that names the claim on a worker's host: the newest epoch of its run there.
CLAIM_VARIABLE = "FARSPAN_CLAIM"
#: The file beside a claim that the run's workers on the host have open (`launch.agent`).
WORKERS_SUFFIX = ".workers"
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ended the epoch before. `at` is when its supervisor saw it, in seconds since the Unix
    epoch; `step` the last step that was reported."""

    problem: Problem
    at: float
    step: int
    #: Whether the run resumes under another plan.
    replanned: bool = False


class Epoch(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The start that workers belong to, as their launcher describes it."""

    number: Number
    #: Seconds that the run has used up when it starts, whatever its checkpoint has: time between
    #: starts counts too.
    used_s: float = 0.0
    #: Steps, from 0 on, whose batch is left out: their gradient was not finite.
    skip: tuple[int, ...] = ()
    fault: Fault | None = None


class Ledger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`epochs.json`: the epoch that may write, and the step of the newest checkpoint when each
    earlier one ended, by its number; -1 where there was none."""

    epoch: Number
    ended: dict[int, int]

    def counts(self, epoch: int, step: int) -> bool:
        """Return whether a checkpoint of an epoch counts that has this step."""
        return epoch >= self.epoch or step <= self.ended.get(epoch, step)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The newest epoch of a run that a host has seen, and the run folder of its supervisor, as
    `MACHINE:PATH`. It lies on the host."""

    epoch: Number
    holder: str


#: Of a run that no launcher has begun yet.
NO_EPOCHS = Ledger(epoch=0, ended={})


def read_own_epoch(environment: os._Environ[str] | dict[str, str]) -> Epoch | None:
    """Read the epoch that a launcher gave this worker; None of one that was started by hand."""
    text = environment.get(EPOCH_VARIABLE)
    if not text:
        return None
    return parse_json(text.encode(), Epoch, f"variable {EPOCH_VARIABLE}")


def read_own_claim() -> Claim | None:
    """Read the claim on this worker's host; None where there is none, or it cannot be read: the
    run folder's ledger decides then."""
    path = os.environ.get(CLAIM_VARIABLE)
    if not path:
        return None
    with suppress(OSError, msgspec.DecodeError):
        return decode_json(Path(path).expanduser().read_bytes(), Claim)
    return None


def hold_claim() -> None:
    """Open the lock file of the claim on this worker's host, if there is a claim, until this
    process ends: by it others see that the worker is there."""
    path = os.environ.get(CLAIM_VARIABLE)
    if not path:
        return
    file = Path(f"{path}{WORKERS_SUFFIX}").expanduser()
    with suppress(OSError):  # The disk may be full.
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def read_ledger(path: Path) -> Ledger:
    """Read the ledger of a run; NO_EPOCHS where it has none. Raises Refusal for a damaged one."""
    try:
        return parse_json(path.read_bytes(), Ledger, path)
    except FileNotFoundError:
        return NO_EPOCHS


def readable_ledger(path: Path) -> Ledger:
    """As `read_ledger`; NO_EPOCHS also for a damaged one, which excludes nothing. The next start
    mends it."""
    with suppress(Refusal):
        return read_ledger(path)
    return NO_EPOCHS


def begin_epoch(path: Path, newest: int, before: Ledger | None = None, *, after: int = 0) -> int:
    """Begin the next epoch of a run whose newest checkpoint has this step, later than `after`;
    returns its number. `before` stands for a ledger that is damaged."""
    before = read_ledger(path) if before is None else before
    ended = dict(before.ended)
    if before.epoch:
        ended[before.epoch] = newest
    epoch = max(before.epoch, after) + 1
    save(Ledger(epoch=epoch, ended=ended), path)
    return epoch


def rebuild_ledger(epoch: int, newest: int) -> Ledger:
    """Rebuild the ledger of a run that lost it, from its newest start and newest checkpoint. What
    starts have saved so far counts; what they may still save does not."""
    return Ledger(epoch=epoch, ended=dict.fromkeys(range(1, epoch + 1), newest))


def fence_stale_epoch(path: Path, number: int) -> None:
    """Refuse to write for an earlier epoch.

    Raises Refusal: (superseded) where another epoch of the run has begun since, in this run folder
    or on this host, (worker-lost) where a damaged ledger leaves that open: the next start mends it.
    """
    claim = read_own_claim()
    if claim is not None and claim.epoch > number:
        raise Refusal(
            "superseded",
            what="this worker was replaced",
            where=path.parent,
            fact=f"it is of start {number} of the run; start {claim.epoch} was by {claim.holder}",
            remedy=command("status", path.parent),
        )
    try:
        now = read_ledger(path).epoch
    except Refusal as refusal:
        raise Refusal(
            "worker-lost",
            what="a worker cannot tell whether it was replaced",
            where=path,
            fact=refusal.problem.fact,
            remedy=RunFolder(path.parent).resume_command(),
        ) from None
    if now > number:
        raise Refusal(
            "superseded",
            what="this worker was replaced",
            where=path,
            fact=f"it is of start {number} of the run, which is at start {now}",
            remedy=command("status", path.parent),
        )
