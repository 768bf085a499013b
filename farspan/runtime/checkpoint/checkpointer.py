"""Checkpoints of a run whose state lies on many workers: each writes the slices that it owns, and
reads those it needs.

What several workers own one of them writes, so that all write about as much. Who does not see rank
0's folder sends its part there (`far_parts`), and is sent what it needs. A save takes a copy of the
state; it is written while training goes on, and rank 0 commits it when every part is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.units import format_seconds
from farspan.runtime.checkpoint import checkpoint
from farspan.runtime.checkpoint.checkpoint import AVERAGE, MODEL, MOMENTUM, OWN, SHARED, Unsaved
from farspan.runtime.checkpoint.far_parts import send_part
from farspan.runtime.checkpoint.manifest import TrainerState
from farspan.runtime.checkpoint.restorer import Restorer
from farspan.runtime.checkpoint.shared_folder import SharedFolder
from farspan.runtime.checkpoint.slices import boxes
from farspan.runtime.checkpoint.stored import OwnedSlice, reason
from farspan.runtime.comm.collective import Group
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.state.full_state import Piece

#: Times on end that a checkpoint is due and cannot be written before the run ends.
UNSAVED = 3
#: How often rank 0 looks whether all parts of a checkpoint are there.
POLL_S = 0.02


class Written(NamedTuple):
    """A checkpoint that is in its place."""

    step: int
    path: Path
    size: int
    seconds: float


class _Ended(NamedTuple):
    """Bytes of a checkpoint that is in its place, and when it was; 0 where another worker knows."""

    size: int
    at: float


class _Pending(NamedTuple):
    """A checkpoint that is being written: on rank 0 its bytes come of it, once all parts are
    there."""

    progress: TrainerState
    path: Path
    began: float
    future: Future[_Ended]
    #: Set when no other worker writes any more: what is missing then does not come.
    ended: threading.Event
    due: bool


class Checkpointer:
    """All workers of a run call these together, but for `poll`."""

    def __init__(
        self,
        executor: Executor,
        folder: Path,
        keep: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor, self._folder, self._keep, self._monotonic = (
            executor,
            SharedFolder(folder),
            keep,
            monotonic,
        )
        self._whole, self._state = executor.whole, executor.state
        self._rank = executor.topology.rank
        #: The step of the newest checkpoint, -1 without one.
        self.newest = -1
        #: Bytes of tensors that this worker read to restore its state.
        self.read_bytes = 0
        #: Times on end that a checkpoint was due and could not be written.
        self._unsaved = 0
        self._pending: _Pending | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    # -- what is written
    #   --------------------------------------------------------------------------------------------

    def _flats(self) -> dict[str, Sequence[Tensor]]:
        """What this worker keeps by bucket, by kind of global tensors."""
        state, outer = self._state, self._executor.outer
        moments = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        average = {AVERAGE: state.average} if state.average else {}
        if outer is None:
            return {MODEL: state.master, **moments, **average}
        mine = {"master": state.master, **moments}
        replica = self._executor.topology.replica_index
        return {MODEL: outer.anchor, MOMENTUM: outer.momentum, **average} | {
            checkpoint.own(replica, kind): mine[kind] for kind in OWN
        }

    def _writers(self) -> dict[int, list[tuple[int, Piece]]]:
        """Which worker writes which pieces of its buckets: each piece of a replica one of its
        owners that sees the folder, if any does, and of these the one with the least to write."""
        owners: dict[tuple[object, ...], list[tuple[int, int, Piece]]] = {}
        for rank, manifest in enumerate(self._whole.manifests):
            for b, pieces in enumerate(manifest.pieces):
                for piece in pieces if not manifest.copies[b] else ():
                    key = manifest.replica, piece.name, piece.slice, piece.start, piece.stop
                    owners.setdefault(key, []).append((rank, b, piece))
        load = dict.fromkeys(range(len(self._whole.manifests)), 0)
        writers: dict[int, list[tuple[int, Piece]]] = {}
        for holders in owners.values():
            near = [holder for holder in holders if holder[0] in self._folder.near] or holders
            rank, b, piece = min(near, key=lambda holder: (load[holder[0]], holder[0]))
            load[rank] += piece.stop - piece.start
            writers.setdefault(rank, []).append((b, piece))
        return writers

    def _snapshot(
        self, mine: Sequence[tuple[int, Piece]], flats: Mapping[str, Sequence[Tensor]]
    ) -> list[OwnedSlice]:
        """A copy of the pieces that this worker writes, of these kinds. What replicas share the
        first one writes."""
        first, shapes = self._executor.topology.replica_index == 0, self._whole.shapes
        slices = list[OwnedSlice]()
        for kind in flats:
            if kind in SHARED and not first:
                continue
            for b, piece in mine:
                if len(flats[kind][b]) == 0:  # A second moment that the optimizer does not keep.
                    continue
                owned = flats[kind][b].reshape(-1)[piece.at : piece.at + piece.stop - piece.start]
                for box in boxes(piece.slice, piece.shape, piece.start, piece.stop):
                    values = torch.empty(box.shape).copy_(box.of(owned))
                    slices.append(
                        OwnedSlice(
                            f"{kind}/{piece.name}", tuple(shapes[piece.name]), box.at, values
                        )
                    )
        return slices

    # -- writing
    #   --------------------------------------------------------------------------------------------

    def begin(
        self,
        progress: TrainerState,
        group: Group,
        *,
        best: Path | None = None,
        due: bool = False,
    ) -> None:
        """Take a copy of the state and begin to write it; of `best` the model alone, there. Raises
        Unsaved on every worker where it cannot be begun."""
        self._folder.meet(group)
        began, plan = self._monotonic(), self._executor.topology.plan
        path = best or self._folder.path / checkpoint.step_name(progress.step)
        flats, size = self._flats(), checkpoint.bytes_needed(plan)
        if best is not None:
            flats, size = {MODEL: self._best()}, checkpoint.model_bytes(plan)
        why = ""
        if self._rank == 0:
            try:
                checkpoint.begin(path, size, progress.epoch)
            except (OSError, Refusal) as error:
                why = _cleared(path, error)
        if self._folder.receiver is not None:
            # Before the others go on: who is quick sends its part while this worker still copies
            # its own.
            self._folder.receiver.path = path
        _agree(group, why)
        writers = self._writers()
        slices, ended = self._snapshot(writers.get(self._rank, ()), flats), threading.Event()
        ranks = [
            rank
            for rank in sorted(writers)
            if best is None or self._whole.manifests[rank].replica == 0
        ]
        future = self._writer.submit(self._write, path, slices, ranks, progress, group, ended)
        self._pending = _Pending(progress, path, began, future, ended, due)

    def _write(
        self,
        path: Path,
        slices: list[OwnedSlice],
        ranks: list[int],
        progress: TrainerState,
        group: Group,
        ended: threading.Event,
    ) -> _Ended:
        """Write this worker's part; rank 0 then waits for the others' and commits. The lock of
        files is held while they are written, not while workers are waited for."""
        if self._rank in ranks:
            if self._rank in self._folder.near:
                with group.writing:
                    checkpoint.write_part(path, self._rank, slices)
            else:
                assert self._folder.sends_to is not None
                send_part(self._folder.sends_to, group.secret, self._rank, slices)
        slices.clear()
        if self._rank != 0:
            return _Ended(0, 0.0)
        while missing := checkpoint.missing_parts(path, ranks):
            if ended.wait(POLL_S) and checkpoint.missing_parts(path, ranks):
                raise Unsaved(f"rank {missing[0]} could not write its part")
        with group.writing:
            size = checkpoint.commit(path, ranks, progress)
            if checkpoint.step_of(path) >= 0:
                checkpoint.prune(path, self._keep)
        return _Ended(size, self._monotonic())

    @property
    def pending(self) -> tuple[int, bool]:
        """The step of the checkpoint that is being written, -1 without one, and whether it was
        due."""
        return (
            (-1, False)
            if self._pending is None
            else (self._pending.progress.step, self._pending.due)
        )

    def poll(self) -> Written | None:
        """On rank 0: the checkpoint that was being written and is now in its place, told once."""
        pending = self._pending
        if (
            self._rank != 0
            or pending is None
            or not pending.future.done()
            or pending.future.exception()
        ):
            return None
        return self._told(pending)

    def _told(self, pending: _Pending) -> Written | None:
        if checkpoint.step_of(pending.path) >= 0:
            if self.newest == pending.progress.step:
                return None
            self.newest, self._unsaved = pending.progress.step, 0
        size, at = pending.future.result()
        return Written(pending.progress.step, pending.path, size, at - pending.began)

    def settle(self, group: Group) -> Written | None:
        """Wait until what is being written is in its place; rank 0 returns it, unless `poll` has.
        Raises Unsaved on every worker where it is not."""
        if (pending := self._pending) is None:
            return None
        why = "" if self._rank == 0 else _failure(pending.future)
        others = group.gather_text(why)
        if self._rank == 0:
            pending.ended.set()
            why = next(filter(None, others), "") or _failure(pending.future)
            if failure := pending.future.exception():
                _cleared(pending.path, failure)
        self._pending = None
        _agree(group, why)
        told = self._told(pending)
        return told if self._rank == 0 else None

    @property
    def kept(self) -> str:
        """What a run that ends now leaves."""
        return (
            f"the newest checkpoint is of step {self.newest}"
            if self.newest >= 0
            else "there is no checkpoint"
        )

    def excuse(self, why: str, step: int, steps: int, *, due: bool, last: bool) -> str:
        """A warning that a checkpoint could not be written. Raises Refusal (disk-full) where it was
        the last one, or was due UNSAVED times on end."""
        self._unsaved += due
        every, run = (
            format_seconds(self._executor.topology.plan.train.checkpoint_every_s),
            RunFolder(self._folder.path.parent),
        )
        if not last and self._unsaved < UNSAVED:
            return (
                f"step {step}: no checkpoint could be written: {why}; {self.kept}, and the next is "
                f"tried in {every}; "
                f"after {UNSAVED} on end the run stops"
            )
        raise Refusal(
            "disk-full",
            where=self._folder.path,
            remedy=f"free some space there, then: {run.resume()}",
            what="the last checkpoint could not be written"
            if last
            else f"no checkpoint could be written for {UNSAVED} intervals of {every}",
            fact=f"{why}; {step} of {steps} steps are trained, {self.kept}",
        )

    # -- restoring
    #   --------------------------------------------------------------------------------------------

    def restore(
        self, accept: Callable[[TrainerState], None], warn: Callable[[str], None], group: Group
    ) -> bool:
        """Every worker takes its part of the newest whole checkpoint, if any (`Restorer`)."""
        self._folder.meet(group)
        restorer = Restorer(self._executor, self._folder, group)
        if (progress := restorer.restore(accept, warn)) is not None:
            self.newest, self.read_bytes = progress.step, restorer.read_bytes
        return progress is not None

    def adopt(self, weights: Mapping[str, Tensor] | None) -> None:
        """Every worker takes its part of a model, which rank 0 gives."""
        self._whole.hand_out(self._state.master, weights)
        self._executor.begin()

    def weights(self) -> dict[str, Tensor]:
        """The model of the run, on rank 0: the average of its weights, or what replicas last met
        at."""
        return self._whole.collect(self._best())

    def _best(self) -> Sequence[Tensor]:
        """By bucket, what is kept as the best weights and used."""
        outer = self._executor.outer
        return self._state.average or (self._state.master if outer is None else outer.anchor)

    def close(self) -> None:
        self._folder.close()


def _failure(future: Future[_Ended]) -> str:
    """Why a worker's part could not be written, once it has ended; empty where it was."""
    error = future.exception()
    if error is None:
        return ""
    return (
        str(error)
        if isinstance(error, Unsaved)
        else reason(error)
        if isinstance(error, Exception)
        else str(error)
    )


def _cleared(path: Path, error: BaseException) -> str:
    """Remove what was written of a checkpoint: it takes the space that is missing. Why it could not
    be written. Raises Refusal (superseded) where this worker was replaced."""
    if isinstance(error, Refusal) and error.problem.code == "superseded":
        raise error  # What lies there is another start's.
    with suppress(OSError):
        checkpoint.mend(path.parent)
    return reason(error) if isinstance(error, Exception) else str(error)


def _agree(group: Group, why: str) -> None:
    """Raises Unsaved on every worker where rank 0 gives a reason."""
    if said := group.share_text(why):
        raise Unsaved(said)
