"""The checkpoint of the last whole step, which the survivors of a lost worker write as they end.

Workers of a data axis hold the same state. Where those that are left hold all of it together, the
next start begins at the step that they had reached, and no step is made again. The threads that
train may wait for the lost worker in an exchange, so survivors agree through files alone: in a
folder that all of them see.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from farspan.domain.decoding import decode_json
from farspan.domain.run import SURVIVOR_WRITE_S, SURVIVORS_FOLDER
from farspan.domain.struct_files import write_atomically
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.checkpoint_folder import Unsaved
from farspan.runtime.checkpoint.manifest import TrainerState
from farspan.runtime.checkpoint.owned_slices import kept_by_kind, owners_by_piece, slices_of
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.state.full_state import BucketManifest, Piece

#: A worker that changes its state has done so within this: an update is much shorter than a step.
UPDATE_S = 5.0
#: Survivors of a lost worker learn of it within this of each other: reports take a round trip, and
#: are looked for every `heartbeat.COUNT_S`. Longer only where several workers are lost.
GATHER_S = 2.0
SURVIVOR_POLL_S = 0.02

HostCopy = Callable[[Tensor], Tensor]


class WholeState:
    """The state of a trainer after its last whole step, which survivors may write.

    `change` is held while the tensors are not of one step. `freeze` keeps them as they are, for as
    long as the process lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._device = device
        self._is_broken = False
        #: On a GPU, the end of the last change.
        self._changed: torch.cuda.Event | None = None
        #: The trainer's state with these tensors; None before the first step.
        self.trainer: TrainerState | None = None

    @contextmanager
    def change(self) -> Iterator[None]:
        """Change tensors. An error leaves them as they are, of no step."""
        with self.hold():
            try:
                yield
            except BaseException:
                self._is_broken = True
                raise
            if self._device.type == "cuda":
                self._changed = torch.cuda.Event()
                self._changed.record()

    def hold(self) -> AbstractContextManager[object]:
        """Return a context during which `freeze` waits."""
        return self._lock

    def freeze(self) -> TrainerState | None:
        """Return the trainer's state, which changes no more, nor the tensors; None where they are
        not of one step."""
        if not self._lock.acquire(timeout=UPDATE_S) or self._is_broken:
            return None
        return self.trainer

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Copy a frozen tensor to the host's memory. On a GPU other streams may wait for the lost
        worker for good: this one waits for the last change alone."""
        if self._changed is None:
            return tensor.cpu()
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(self._changed)
        with torch.cuda.stream(stream):
            return tensor.cpu()


def write_last_step(
    executor: Executor,
    folder: Path,
    survivors: Collection[int],
    state: TrainerState,
    copy: HostCopy,
    report: Callable[[Path, int], None],
) -> None:
    """Write a checkpoint of the state as it stands, with the other survivors, where they hold the
    whole state of one step together. The worker that commits it has its path and bytes reported.
    Raises OSError, Refusal, Unsaved."""
    rank = executor.topology.rank
    plan = executor.topology.plan
    path = folder / checkpoint_folder.step_name(state.step)
    checkpoint_folder.require_newest_epoch(path, state.epoch)
    if path.exists():  # Others were quicker.
        return
    meeting = _Survivors(folder / SURVIVORS_FOLDER, state.epoch)
    steps = meeting.agree(rank, meeting.gather(rank, state.step, survivors))
    writers = assign_survivors(executor.whole.manifests, steps)
    if not writers or path.exists():
        meeting.end()
        return
    if rank not in writers:
        return
    # The lowest rank leads, as rank 0 does otherwise.
    is_leader = rank == min(writers)
    try:
        if is_leader:
            checkpoint_folder.make_folder(path, checkpoint_folder.bytes_needed(plan), state.epoch)
            meeting.open_folder()
        meeting.wait_until(meeting.has_folder)
        slices = []
        for part in slices_of(executor, writers[rank], kept_by_kind(executor)):
            slices.append(part._replace(values=copy(part.values)))
        checkpoint_folder.write_part(path, rank, slices)
        if is_leader:
            meeting.wait_until(lambda: not checkpoint_folder.missing_parts(path, writers))
            size = checkpoint_folder.commit(path, sorted(writers), state)
            checkpoint_folder.prune(path, plan.train.keep)
            report(path, size)
    finally:
        if is_leader:
            meeting.end()


def assign_survivors(
    manifests: Sequence[BucketManifest], steps: Mapping[int, int]
) -> dict[int, list[tuple[int, Piece]]]:
    """Assign the pieces of the state to survivors, given the step of each: of the newest step whose
    whole state they hold, each piece to the lowest rank. Empty where there is no such step."""
    owners = owners_by_piece(manifests)
    for step in sorted(set(steps.values()), reverse=True):
        writers: dict[int, list[tuple[int, Piece]]] = {}
        for holders in owners:
            living = [holder for holder in holders if steps.get(holder[0]) == step]
            if not living:
                break
            rank, bucket, piece = living[0]
            writers.setdefault(rank, []).append((bucket, piece))
        else:
            return writers
    return {}


class _Survivors:
    """The survivors of one start of a run: each leaves a file with its step. The folder is there
    until the leader has ended, for which the launcher waits."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self._folder = folder
        self._prefix = f"{epoch}-"

    def gather(self, rank: int, step: int, expected: Collection[int]) -> dict[int, int]:
        """Wait for these ranks, for GATHER_S at most; return the step of each that has come."""
        self._folder.mkdir(exist_ok=True)
        write_atomically(self._folder / f"{self._prefix}{rank}", b"%d" % step)
        deadline = time.monotonic() + GATHER_S
        while True:
            steps = self._read_steps(expected)
            if len(steps) == len(expected) or time.monotonic() > deadline:
                return steps
            time.sleep(SURVIVOR_POLL_S)

    def agree(self, rank: int, steps: Mapping[int, int]) -> dict[int, int]:
        """Return the survivors that write, with their steps: those that the first one which came so
        far has seen. Two that have seen others would both lead. Raises OSError, also where the disk
        knows no hard links."""
        own = self._folder / f"{self._prefix}{rank}.agreed"
        write_atomically(own, msgspec.json.encode(steps))
        agreed = self._folder / f"{self._prefix}agreed"
        with suppress(FileExistsError):
            agreed.hardlink_to(own)
        return decode_json(agreed.read_bytes(), dict[int, int])

    def _read_steps(self, expected: Collection[int]) -> dict[int, int]:
        steps = {}
        for rank in sorted(expected):
            with suppress(OSError):  # It has not come, or has left: it has nothing to write.
                steps[rank] = int((self._folder / f"{self._prefix}{rank}").read_text())
        return steps

    def open_folder(self) -> None:
        """Let the others write to the checkpoint's folder."""
        write_atomically(self._folder / f"{self._prefix}folder", b"")

    def has_folder(self) -> bool:
        return (self._folder / f"{self._prefix}folder").exists()

    def wait_until(self, is_done: Callable[[], object]) -> None:
        """Raise Unsaved where the other survivors do not come so far within SURVIVOR_WRITE_S."""
        deadline = time.monotonic() + SURVIVOR_WRITE_S
        while not is_done():
            if time.monotonic() > deadline or not self._folder.exists():
                raise Unsaved("another survivor has not written its part")
            time.sleep(SURVIVOR_POLL_S)

    def end(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
