"""Restoring a run's state from its newest whole checkpoint: each worker reads what it needs of the
global tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.units import counted
from farspan.runtime.checkpoint import checkpoint
from farspan.runtime.checkpoint.checkpoint import AVERAGE, MODEL, MOMENTUM
from farspan.runtime.checkpoint.layout import Corrupt, Manifest, TrainerState, boxes
from farspan.runtime.checkpoint.stored import Stored
from farspan.runtime.comm.collective import Group
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
    """Every worker takes its part of the newest whole checkpoint, if any; corrupt ones are named,
    and the one before them is used. `accept` takes its state, and raises Refusal for another
    training's. `near` are the ranks that see the folder. Returns the state, and the bytes of
    tensors that this worker read."""
    rank = group.rank
    plan = executor.topology.plan
    paths = list[Path]()
    if rank == 0:
        with suppress(OSError):  # A save that finds the same says so.
            checkpoint.mend(folder)
        paths = list(checkpoint.newest_first(folder))
    corrupt = list[str]()
    newest = 0
    for number in range(int(group.sum(float(len(paths)))[0])):
        path = None
        manifest = None
        why = ""
        mine = b""
        if rank == 0:
            path = paths[number]
            try:
                manifest = _readable(path, plan, accept)
                mine = msgspec.json.encode((path.name, manifest.progress))
            except Corrupt as error:
                why = str(error)
        why = group.share_text(why)
        if not why:
            name, state = msgspec.json.decode(group.share(mine), type=tuple[str, TrainerState])
            reader = _Reader(executor, near, group)
            why = reader.take(folder / name, manifest)
            if not why:
                accept(state)
                if corrupt:
                    lost = counted(newest - state.step, "step")
                    warn(
                        f"corrupt checkpoint {'; '.join(corrupt)}. Going on from step {state.step}"
                        f"{f': {lost} lost' if newest > state.step else ''}."
                    )
                executor.publish()
                return state, reader.read_bytes
        if path is not None:
            # Names of files are bytes, and not all of them UTF-8.
            corrupt.append(f"{path}: {why}".encode(errors="backslashreplace").decode())
            newest = max(newest, checkpoint.step_of(path))
    if group.share_text("; ".join(corrupt)):
        raise Refusal(
            "checkpoint-corrupt",
            what="no checkpoint of this run can be used",
            where=folder,
            fact="; ".join(corrupt) or "rank 0 names them",
            remedy="start again: farspan train run.yaml --run NEW_FOLDER",
        )
    return None


def kept_by_kind(executor: Executor) -> dict[str, Sequence[Tensor]]:
    """Return what this worker keeps by bucket, by the kinds of `checkpoint.sources`."""
    state = executor.state
    outer = executor.outer
    model = {MODEL: state.master}
    if outer is not None:
        model = {MODEL: outer.anchor, MOMENTUM: outer.momentum, "master": state.master}
    average = {AVERAGE: state.average} if state.average else {}
    return {**model, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq, **average}


def _readable(path: Path, plan: Plan, accept: Callable[[TrainerState], None]) -> Manifest:
    """On rank 0: the manifest of a checkpoint that this plan can go on from. Raises Corrupt, and
    Refusal for another training's."""
    manifest = checkpoint.read(path)
    accept(manifest.progress)
    step = manifest.progress.step
    limit = plan.train.step_limit
    if step > limit:
        raise Corrupt(f"it is of step {step}, and the plan has {limit}")
    for replica in range(len(plan.replicas)):
        kinds = set[str]().union(*checkpoint.sources(plan, replica, manifest).values())
        manifest.check(checkpoint.shapes_of(plan, sorted(kinds)))
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
        why = ""
        if self._rank not in self._near:
            for flats in self._targets.values():
                self._whole.receive(flats)
        else:
            try:
                manifest = manifest or checkpoint.read(path)
            except Corrupt as error:
                why = str(error)
            else:
                with Stored(path, manifest.tensors) as stored:
                    why = self._fill_own(stored, manifest)
                    if self._rank == 0 and len(self._near) < self._group.world:
                        why = self._hand_out(stored, manifest) or why
                    self.read_bytes = stored.read_bytes
        return next(filter(None, self._group.gather_text(why)), "")

    def _fill_own(self, stored: Stored, manifest: Manifest) -> str:
        mine = self._whole.manifests[self._rank]
        names = checkpoint.sources(self._plan, mine.replica, manifest)
        try:
            for kind, flats in self._targets.items():
                for flat, pieces in zip(flats, mine.pieces, strict=True):
                    for piece in pieces if len(flat) else ():
                        owned = flat.reshape(-1)[piece.at : piece.at + piece.stop - piece.start]
                        _fill(stored, names[kind], piece, owned)
        except Corrupt as error:
            return str(error)
        return ""

    def _hand_out(self, stored: Stored, manifest: Manifest) -> str:
        """On rank 0: read what workers need that do not see the folder, and send it to them."""
        plan = self._plan
        why = list[str]()
        far = [rank for rank in range(len(self._whole.manifests)) if rank not in self._near]

        def content(rank: int, b: int, kind: str) -> Tensor:
            theirs = self._whole.manifests[rank]
            if kind == checkpoint.SECOND and theirs.matrices[b]:
                return torch.zeros(0)
            values = torch.zeros(theirs.sizes[b])
            names = checkpoint.sources(plan, theirs.replica, manifest)[kind]
            with _noting(why):  # Sent all the same: they wait for it.
                for piece in theirs.pieces[b]:
                    _fill(
                        stored, names, piece, values[piece.at : piece.at + piece.stop - piece.start]
                    )
            return values

        for kind in self._targets:
            self._whole.send_out(far, lambda rank, b, kind=kind: content(rank, b, kind))  # type: ignore[misc]
        return why[0] if why else ""


@contextmanager
def _noting(why: list[str]) -> Iterator[None]:
    """Note why a checkpoint could not be read, and go on."""
    try:
        yield
    except Corrupt as error:
        why.append(str(error))


def _fill(stored: Stored, kinds: Sequence[str], piece: Piece, owned: Tensor) -> None:
    """Fill what a worker owns of a parameter with the mean of these kinds; zeros where there are
    none."""
    if not kinds:
        owned.zero_()
    for number, kind in enumerate(kinds):
        values = owned if number == 0 and owned.device.type == "cpu" else torch.empty(owned.shape)
        for box in boxes(piece.slice, piece.shape, piece.start, piece.stop):
            stored.fill(f"{kind}/{piece.name}", box.at, box.of(values))
        if values is not owned:
            owned.copy_(values) if number == 0 else owned.add_(values.to(owned.device))
    if len(kinds) > 1:
        owned.div_(len(kinds))
