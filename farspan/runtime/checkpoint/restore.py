"""Restoring a run's state from its newest whole checkpoint: each worker reads what it needs of the
global tensors."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from farspan.domain.decoding import decode_json
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import SURVIVORS_FOLDER
from farspan.domain.units import counted
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.manifest import Corrupt, Manifest, TrainerState, boxes
from farspan.runtime.checkpoint.owned_slices import kept_by_kind
from farspan.runtime.checkpoint.slice_files import Stored
from farspan.runtime.comm.worker_group import Group
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.state.full_state import Piece


def restore(
    executor: Executor,
    folder: Path,
    near: frozenset[int],
    group: Group,
    accept: Callable[[TrainerState], None],
    warn: Callable[[str], None],
) -> tuple[TrainerState, int] | None:
    """Restore each worker's part of the newest whole checkpoint, if any; corrupt ones are named,
    and the one before them is used. `accept` takes its state, and raises Refusal for another
    training's. `near` are the ranks that see the folder. Returns the state, and the bytes of
    tensors that this worker read."""
    rank = group.rank
    plan = executor.topology.plan
    paths = list[Path]()
    if rank == 0:
        with suppress(OSError):  # A save that fails so reports it.
            checkpoint_folder.clean_up(folder)
            shutil.rmtree(folder / SURVIVORS_FOLDER, ignore_errors=True)
        paths = list(checkpoint_folder.newest_first(folder))
    corrupt = list[str]()
    newest = 0
    num_paths = int(group.all_reduce_sum(float(len(paths)))[0])
    for number in range(num_paths):
        # Rank 0 reads the manifest, and sends name and state to the others.
        path = None
        manifest = None
        problem = ""
        content = b""
        if rank == 0:
            path = paths[number]
            try:
                manifest = _read_resumable(path, plan, accept)
                content = msgspec.json.encode((path.name, manifest.progress))
            except Corrupt as error:
                problem = str(error)
        problem = group.broadcast_text(problem)
        if not problem:
            content = group.broadcast_bytes(content)
            name, state = decode_json(content, tuple[str, TrainerState])
            reader = _Reader(executor, near, group)
            problem = reader.take(folder / name, manifest)
            if not problem:
                accept(state)
                if corrupt:
                    lost = ""
                    if newest > state.step:
                        lost = f": {counted(newest - state.step, 'step')} lost"
                    faults = "; ".join(corrupt)
                    warn(f"corrupt checkpoint {faults}. Going on from step {state.step}{lost}.")
                executor.publish_masters()
                return state, reader.read_bytes
        if path is not None:
            corrupt.append(checkpoint_folder.printable(f"{path}: {problem}"))
            newest = max(newest, checkpoint_folder.step_of(path))
    faults = "; ".join(corrupt)
    if group.broadcast_text(faults):
        raise Refusal(
            "checkpoint-corrupt",
            what="no checkpoint of this run can be used",
            where=folder,
            fact=faults or "rank 0 names them",
            remedy="start again: farspan train run.yaml --run NEW_FOLDER",
        )
    return None


def _read_resumable(path: Path, plan: Plan, accept: Callable[[TrainerState], None]) -> Manifest:
    """Read on rank 0 the manifest of a checkpoint that this plan can resume from. Raises Corrupt,
    and Refusal for another training's."""
    manifest = checkpoint_folder.read_checked_manifest(path)
    accept(manifest.progress)
    step = manifest.progress.step
    limit = plan.train.step_limit
    if step > limit:
        raise Corrupt(f"it is of step {step}, and the plan has {limit}")
    for replica in range(len(plan.replicas)):
        sources = checkpoint_folder.source_kinds(plan, replica, manifest)
        kinds = set[str]().union(*sources.values())
        manifest.check(checkpoint_folder.shapes_of(plan, sorted(kinds)))
    return manifest


class _Reader:
    """Fills the state of one worker; rank 0's reads for those that do not see the folder, too."""

    def __init__(self, executor: Executor, near: frozenset[int], group: Group) -> None:
        self._plan = executor.topology.plan
        self._whole = executor.whole
        self._near = near
        self._group = group
        self._rank = group.rank
        self._targets = kept_by_kind(executor)
        #: Bytes of tensors that this worker read.
        self.read_bytes = 0

    def take(self, path: Path, manifest: Manifest | None) -> str:
        """Fill this worker's state from a checkpoint, and those of workers that do not see it;
        return why that failed."""
        problem = ""
        if self._rank not in self._near:
            for flats in self._targets.values():
                self._whole.receive_buckets(flats)
        else:
            try:
                manifest = manifest or checkpoint_folder.read_checked_manifest(path)
            except Corrupt as error:
                problem = str(error)
            else:
                with Stored(path, manifest.tensors) as stored:
                    problem = self._fill_own(stored, manifest)
                    if self._rank == 0 and len(self._near) < self._group.world:
                        problem = self._hand_out(stored, manifest) or problem
                    self.read_bytes = stored.read_bytes
        return next(filter(None, self._group.all_gather_text(problem)), "")

    def _fill_own(self, stored: Stored, manifest: Manifest) -> str:
        own = self._whole.manifests[self._rank]
        sources = checkpoint_folder.source_kinds(self._plan, own.replica, manifest)
        try:
            for kind, flats in self._targets.items():
                for flat, pieces in zip(flats, own.pieces, strict=True):
                    for piece in pieces if len(flat) else ():
                        _fill_with_mean(stored, sources[kind], piece, flat)
        except Corrupt as error:
            return str(error)
        return ""

    def _hand_out(self, stored: Stored, manifest: Manifest) -> str:
        """Read on rank 0 what workers need that do not see the folder, and send it to them."""
        problems = list[str]()
        manifests = self._whole.manifests
        far = [rank for rank in range(len(manifests)) if rank not in self._near]

        def content(kind: str, rank: int, b: int) -> Tensor:
            theirs = manifests[rank]
            if kind == checkpoint_folder.SECOND_MOMENT and theirs.matrices[b]:
                return torch.zeros(0)
            values = torch.zeros(theirs.sizes[b])
            sources = checkpoint_folder.source_kinds(self._plan, theirs.replica, manifest)
            try:
                for piece in theirs.pieces[b]:
                    _fill_with_mean(stored, sources[kind], piece, values)
            except Corrupt as error:  # Sent all the same: they wait for it.
                problems.append(str(error))
            return values

        for kind in self._targets:
            self._whole.send_out(far, functools.partial(content, kind))
        return problems[0] if problems else ""


def _fill_with_mean(stored: Stored, kinds: Sequence[str], piece: Piece, flat: Tensor) -> None:
    """Fill a worker's piece of a parameter, in its bucket, with the mean of these kinds; zeros if
    there are none."""
    owned = flat.reshape(-1)[piece.at : piece.at + piece.stop - piece.start]
    if not kinds:
        owned.zero_()
    for number, kind in enumerate(kinds):
        in_place = number == 0 and owned.device.type == "cpu"
        values = owned if in_place else torch.empty(owned.shape)
        for box in boxes(piece.slice, piece.shape, piece.start, piece.stop):
            stored.fill(f"{kind}/{piece.name}", box.at, box.of(values))
        if number > 0:
            owned.add_(values.to(owned.device))
        elif not in_place:
            owned.copy_(values)
    if len(kinds) > 1:
        owned.div_(len(kinds))
