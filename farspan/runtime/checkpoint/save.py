"""Writing checkpoints of a run whose state lies on many workers: each writes the slices that it
owns.

A slice that several workers own is written by one of them, so that all write about the same amount.
A worker that does not see rank 0's folder sends its part there (`SharedFolder`). A save takes a
copy of the state (`Snapshots`); it is written in the background, and rank 0 commits it when every
part is there.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import Tensor

from farspan.domain.own_files import open_own
from farspan.domain.problems import Refusal
from farspan.domain.run import SURVIVOR_WRITE_S, RunFolder
from farspan.domain.struct_files import write_atomically
from farspan.domain.units import format_seconds
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.checkpoint_folder import MODEL, OWN_STATE, Unsaved
from farspan.runtime.checkpoint.last_step import HostCopy, write_last_step
from farspan.runtime.checkpoint.manifest import TrainerState
from farspan.runtime.checkpoint.owned_slices import kept_by_kind, owners_by_piece, slices_of
from farspan.runtime.checkpoint.restore import restore
from farspan.runtime.checkpoint.slice_files import OwnedSlice, put_slices, reason
from farspan.runtime.checkpoint.snapshot import Snapshots
from farspan.runtime.comm.sealed import Forged, SealedServer, SealedStream
from farspan.runtime.comm.worker_group import Group
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.state.full_state import Piece

#: Times in a row that a checkpoint is due and cannot be written before the run ends.
UNSAVED = 3
#: How often rank 0 looks whether all parts of a checkpoint are there.
PART_POLL_S = 0.02


#: The first word of a worker's question to rank 0, before its rank; and rank 0's answer that the
#: part is on its disk.
PART_QUESTION = "part"
WRITTEN = b"+"


class SharedFolder:
    """The folder as one worker has it; all call `find_near_ranks`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: The ranks that see it.
        self.near = frozenset([0])
        #: On rank 0, the checkpoint that parts of the others belong to.
        self.receiving = path
        self._server: SealedServer | None = None
        self._rank_0 = "", 0
        self._met = False

    def find_near_ranks(self, group: Group) -> None:
        """Find out, once, which workers see rank 0's folder of checkpoints: they read and write
        there themselves."""
        if group.world == 1 or self._met:
            return
        self._met = True
        mark = ""
        if group.rank == 0:
            mark = f".here-{secrets.token_hex(8)}"
            with suppress(OSError):  # Then nobody sees it, and the first save reports why.
                self.path.mkdir(exist_ok=True)
                (self.path / mark).touch(exist_ok=False)
        path = self.path / group.broadcast_text(mark)
        sees = group.all_gather(float(group.rank == 0 or path.exists()))
        self.near = frozenset(rank for rank in range(group.world) if sees[rank])
        if group.rank == 0:
            path.unlink(missing_ok=True)
        if len(self.near) < group.world:
            port = 0
            if group.rank == 0:
                self._server = SealedServer(group.secret, self._receive_part)
                port = self._server.port
            self._rank_0 = os.environ["MASTER_ADDR"], int(group.all_reduce_sum(port)[0])

    def send_part(self, group: Group, slices: Sequence[OwnedSlice]) -> None:
        """Send a worker's part to rank 0, and wait until it lies on the disk there. Raises
        OSError."""
        rank = group.rank
        failed = f"rank 0 could not write the part of rank {rank}"
        try:
            stream = SealedStream.call(self._rank_0, group.secret, f"{PART_QUESTION} {rank}")
            with closing(stream):
                name = checkpoint_folder.part_name(rank)
                listing = put_slices(slices, name, lambda content: stream.write(bytes(content)))
                stream.end()
                stream.write(msgspec.json.encode(listing))
                stream.end()
                if stream.read(1) != WRITTEN:
                    raise OSError(failed)
        except Forged as error:
            raise OSError(f"{failed}: {error}") from None

    def _receive_part(self, question: str, stream: SealedStream) -> None:
        """Write a part that another worker sends next to rank 0's own."""
        word, _, number = question.partition(" ")
        if word != PART_QUESTION:
            return
        name = checkpoint_folder.part_name(int(number))
        file = checkpoint_folder.unfinished(self.receiving) / name
        with open_own(file, "wb") as target:
            target.writelines(stream.pieces())
            target.flush()
            os.fsync(target.fileno())
        write_atomically(file.with_suffix(".json"), b"".join(stream.pieces()))
        stream.write(WRITTEN)
        stream.end()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class Written(NamedTuple):
    """A checkpoint that is in its place."""

    step: int
    path: Path
    size: int
    seconds: float


class _Pending(NamedTuple):
    """A checkpoint that is being written. On rank 0 the future returns its bytes and the time when
    it was in its place."""

    state: TrainerState
    path: Path
    began: float
    future: Future[tuple[int, float]]
    #: Set when no other worker writes any more: a part that is missing then does not come.
    ended: threading.Event
    due: bool


class Checkpointer:
    """All workers of a run call these together, but for `poll`. On rank 0 `written` receives each
    checkpoint that is in its place. Without `background` training waits while a
    checkpoint is written."""

    def __init__(
        self,
        executor: Executor,
        folder: Path,
        group: Group,
        *,
        written: Callable[[Written], None] = lambda checkpoint: None,
        warn: Callable[[str], None] = lambda message: None,
        monotonic: Callable[[], float] = time.monotonic,
        background: bool = True,
    ) -> None:
        self._executor = executor
        self._group = group
        self._whole = executor.whole
        self._plan = executor.topology.plan
        self._written = written
        self._warn = warn
        self._monotonic = monotonic
        self._background = background
        self._folder = SharedFolder(folder)
        self._rank = executor.topology.rank
        #: The step of the newest checkpoint, -1 without one.
        self.newest = -1
        #: The step whose state was written last or is being written, -1 where it is to be written
        #: again.
        self.step = -1
        #: Bytes of tensors that this worker read to restore its state.
        self.read_bytes = 0
        #: Times in a row that a checkpoint was due and could not be written.
        self._unsaved = 0
        self._pending: _Pending | None = None
        #: Seconds for a byte of the last part that was written here; 0 before the first.
        self._byte_s = 0.0
        self._snapshots = Snapshots(executor.staging)
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    # -- saving
    #   --------------------------------------------------------------------------------------------

    def save(
        self, state: TrainerState, *, due: bool = False, last: bool = False, wait: bool = False
    ) -> bool:
        """Begin to write a checkpoint, unless this step's is written or being written; wait for it
        at the end. Returns whether it is there, or on its way. Raises Refusal (disk-full) if the
        run cannot continue without it."""
        if state.step != self.step:
            self._wait_for_pending()
            path = self._folder.path / checkpoint_folder.step_name(state.step)
            flats = kept_by_kind(self._executor)
            if self._executor.outer is not None:
                replica = self._executor.topology.replica_index
                for kind in OWN_STATE:
                    flats[checkpoint_folder.replica_kind(replica, kind)] = flats.pop(kind)
            size = checkpoint_folder.bytes_needed(self._plan)
            try:
                self._begin_write(state, path, flats, size, due=due)
            except Unsaved as error:
                self._warn(self._failure_warning(str(error), state, due=due, last=last))
                return False
            self.step = state.step
        if self._background and not (last or wait):
            return True
        return self._wait_for_pending(last=last)

    def save_best(self, state: TrainerState, path: Path) -> None:
        """Write the model alone, and wait for it. Raises Unsaved."""
        self._wait_for_pending()
        flats = {MODEL: self._best_weights()}
        size = checkpoint_folder.model_bytes(self._plan)
        self._finish_write(self._begin_write(state, path, flats, size))

    def poll(self) -> None:
        """Report, on rank 0, the checkpoint that was being written, if it is now in its place."""
        pending = self._pending
        if self._rank != 0 or pending is None or not pending.future.done():
            return
        if pending.future.exception() is None:
            self._report_saved(pending)

    def _wait_for_pending(self, *, last: bool = False) -> bool:
        """Wait for the checkpoint that is being written, if any; return whether it is in its
        place."""
        if (pending := self._pending) is None:
            return True
        try:
            self._finish_write(pending)
        except Unsaved as error:
            self.step = -1
            why = str(error)
            self._warn(self._failure_warning(why, pending.state, due=pending.due, last=last))
            return False
        self._report_saved(pending)
        return True

    def _report_saved(self, pending: _Pending) -> None:
        """Count a checkpoint that is in its place, once; rank 0 reports it."""
        if self.newest == pending.state.step:
            return
        self.newest = pending.state.step
        self._unsaved = 0
        if self._rank == 0:
            size, ended = pending.future.result()
            seconds = ended - pending.began
            self._written(Written(self.newest, pending.path, size, seconds))

    # -- what is written
    #   --------------------------------------------------------------------------------------------

    def _assign_writers(self) -> dict[int, list[tuple[int, Piece]]]:
        """Assign to each worker the pieces of its buckets that it writes: each piece of a replica
        to one of its owners that sees the folder, if any does, and of these to the one with the
        least to write."""
        load = [0] * len(self._whole.manifests)
        writers: dict[int, list[tuple[int, Piece]]] = {}
        for holders in owners_by_piece(self._whole.manifests):
            near = [holder for holder in holders if holder[0] in self._folder.near] or holders
            # Holders are in the order of ranks: of several with the least load the first.
            rank, b, piece = min(near, key=lambda holder: load[holder[0]])
            load[rank] += piece.stop - piece.start
            writers.setdefault(rank, []).append((b, piece))
        return writers

    def _copy_slices(
        self, own: Sequence[tuple[int, Piece]], flats: Mapping[str, Sequence[Tensor]], size: int
    ) -> list[OwnedSlice]:
        """Begin to copy the pieces that this worker writes, of these kinds, for a checkpoint of
        `size` bytes."""
        slices = slices_of(self._executor, own, flats)
        copies = self._snapshots.take([part.values for part in slices], size)
        pairs = zip(slices, copies, strict=True)
        return [part._replace(values=values) for part, values in pairs]

    # -- writing
    #   --------------------------------------------------------------------------------------------

    def _begin_write(
        self,
        state: TrainerState,
        path: Path,
        flats: Mapping[str, Sequence[Tensor]],
        size: int,
        *,
        due: bool = False,
    ) -> _Pending:
        """Take a copy of what this worker keeps by kind and begin to write it at `path`. Raises
        Unsaved on every worker where it cannot be begun."""
        self._folder.find_near_ranks(self._group)
        began = self._monotonic()
        why = ""
        if self._rank == 0:
            try:
                with self._group.writing:
                    checkpoint_folder.make_folder(path, size, state.epoch)
            except (OSError, Refusal) as error:
                why = _clear_failed(path, error)
        # Before the others go on: a quick one sends its part while this worker still copies its
        # own.
        self._folder.receiving = path
        _raise_together(self._group, why)
        writers = self._assign_writers()
        slices = self._copy_slices(writers.get(self._rank, ()), flats, size)
        ended = threading.Event()
        ranks = sorted(writers)
        if checkpoint_folder.step_of(path) < 0:  # The best weights, which the first replica writes.
            ranks = [rank for rank in ranks if self._whole.manifests[rank].replica == 0]
        future = self._writer.submit(self._write_and_commit, path, slices, ranks, state, ended)
        self._pending = _Pending(state, path, began, future, ended, due)
        return self._pending

    def _write_and_commit(
        self,
        path: Path,
        slices: list[OwnedSlice],
        ranks: list[int],
        state: TrainerState,
        ended: threading.Event,
    ) -> tuple[int, float]:
        """Write this worker's part; rank 0 then waits for the others' and commits. The lock of
        files is held while they are written, not while workers are waited for."""
        self._snapshots.wait()
        if self._rank in ranks:
            if self._rank in self._folder.near:
                with self._group.writing:
                    began = self._monotonic()
                    checkpoint_folder.write_part(path, self._rank, slices)
                    size = sum(part.values.nbytes for part in slices)
                    self._byte_s = (self._monotonic() - began) / max(1, size)
            else:
                self._folder.send_part(self._group, slices)
        slices.clear()
        if self._rank != 0:
            return 0, 0.0
        while missing := checkpoint_folder.missing_parts(path, ranks):
            if ended.wait(PART_POLL_S) and checkpoint_folder.missing_parts(path, ranks):
                raise Unsaved(f"rank {missing[0]} could not write its part")
        with self._group.writing:
            size = checkpoint_folder.commit(path, ranks, state)
            if checkpoint_folder.step_of(path) >= 0:
                checkpoint_folder.prune(path, self._plan.train.keep)
        return size, self._monotonic()

    def _finish_write(self, pending: _Pending) -> None:
        """Wait until what is being written is in its place. Raises Unsaved on every worker where it
        is not."""
        why = "" if self._rank == 0 else _failure_reason(pending.future)
        others = self._group.all_gather_text(why)
        if self._rank == 0:
            pending.ended.set()
            why = next(filter(None, others), "") or _failure_reason(pending.future)
            failure = pending.future.exception()
            if failure is not None:
                _clear_failed(pending.path, failure)
        self._pending = None
        _raise_together(self._group, why)

    @property
    def kept(self) -> str:
        """The checkpoint that a run that ends now leaves."""
        if self.newest < 0:
            return "there is no checkpoint"
        return f"the newest checkpoint is of step {self.newest}"

    def _failure_warning(self, why: str, state: TrainerState, *, due: bool, last: bool) -> str:
        """Return a warning that a checkpoint could not be written.

        Raises Refusal (disk-full) if it was the last one, or was due UNSAVED times in a row.
        """
        self._unsaved += due
        every = format_seconds(self._plan.train.checkpoint_every_s)
        if not last and self._unsaved < UNSAVED:
            return (
                f"step {state.step}: no checkpoint could be written: {why}; {self.kept}, and the "
                f"next is tried in {every}; after {UNSAVED} on end the run stops"
            )
        run = RunFolder(self._folder.path.parent)
        what = f"no checkpoint could be written for {UNSAVED} intervals of {every}"
        if last:
            what = "the last checkpoint could not be written"
        raise Refusal(
            "disk-full",
            where=self._folder.path,
            remedy=f"free some space there, then: {run.resume_command()}",
            what=what,
            fact=f"{why}; {state.step} of {state.steps} steps are trained, {self.kept}",
        )

    def write_last_step(
        self, state: TrainerState, lost: int, copy: HostCopy, report: Callable[[Written], None]
    ) -> None:
        """Write the state of the last whole step, with the other survivors of a lost worker, where
        it is newer than the newest checkpoint, and this disk is quick enough for all of it
        (`last_step.write_last_step`)."""
        folder = self._folder
        if self._rank not in folder.near or state.step <= self.newest:
            return
        if checkpoint_folder.bytes_needed(self._plan) * self._byte_s > SURVIVOR_WRITE_S:
            return
        began = self._monotonic()

        def report_written(path: Path, size: int) -> None:
            report(Written(state.step, path, size, self._monotonic() - began))

        survivors = folder.near - {lost}
        write_last_step(self._executor, folder.path, survivors, state, copy, report_written)

    # -- restoring
    #   --------------------------------------------------------------------------------------------

    def restore(self, accept: Callable[[TrainerState], None], warn: Callable[[str], None]) -> bool:
        """Take this worker's part of the newest whole checkpoint, if any (`restore.restore`)."""
        folder = self._folder
        folder.find_near_ranks(self._group)
        restored = restore(self._executor, folder.path, folder.near, self._group, accept, warn)
        if restored is None:
            return False
        state, self.read_bytes = restored
        self.newest = state.step
        self.step = state.step
        return True

    def weights(self) -> dict[str, Tensor]:
        """Collect the model of the run on rank 0: the average of its weights, or the synced
        parameters."""
        return self._whole.collect_parameters(self._best_weights())

    def _best_weights(self) -> Sequence[Tensor]:
        """Return by bucket the weights that are kept as the best and used."""
        state = self._executor.state
        outer = self._executor.outer
        synced = state.master if outer is None else outer.synced_parameters
        return state.average or synced

    def close(self) -> None:
        self._folder.close()
        self._snapshots.close()


def _failure_reason(future: Future[tuple[int, float]]) -> str:
    """Return why a worker's part could not be written, once it has ended; empty if it was."""
    error = future.exception()
    if error is None:
        return ""
    if isinstance(error, Exception) and not isinstance(error, Unsaved):
        return reason(error)
    return str(error)


def _clear_failed(path: Path, error: BaseException) -> str:
    """Remove what was written of a checkpoint: it takes the space that is missing. Returns why
    it could not be written. Raises Refusal (superseded) where this worker was replaced."""
    if isinstance(error, Refusal) and error.problem.code == "superseded":
        raise error  # The files there are another start's.
    with suppress(OSError):
        checkpoint_folder.clean_up(path.parent)
    return reason(error) if isinstance(error, Exception) else str(error)


def _raise_together(group: Group, why: str) -> None:
    """Raise Unsaved on every worker if rank 0 gives a reason."""
    if shared := group.broadcast_text(why):
        raise Unsaved(shared)
