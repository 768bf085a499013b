"""Restoring a run's state from its newest whole checkpoint: each worker reads what it needs of the
global tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from farspan.domain.problems import Refusal
from farspan.domain.units import counted
from farspan.runtime.checkpoint import checkpoint
from farspan.runtime.checkpoint.checkpoint import AVERAGE, MODEL, MOMENTUM
from farspan.runtime.checkpoint.manifest import Corrupt, Manifest, TrainerState
from farspan.runtime.checkpoint.shared_folder import SharedFolder
from farspan.runtime.checkpoint.slices import boxes
from farspan.runtime.checkpoint.stored import Stored
from farspan.runtime.comm.collective import Group
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.state.full_state import Piece

#: What a worker has by bucket, by kind of tensors.
Flats = Mapping[str, Sequence[Tensor]]


class Restorer:
    """All workers of a run call `restore` together."""

    def __init__(self, executor: Executor, folder: SharedFolder, group: Group) -> None:
        self._executor, self._folder, self._group = executor, folder, group
        self._whole, self._state, self._rank = (
            executor.whole,
            executor.state,
            executor.topology.rank,
        )
        #: Bytes of tensors that this worker read.
        self.read_bytes = 0

    def restore(
        self, accept: Callable[[TrainerState], None], warn: Callable[[str], None]
    ) -> TrainerState | None:
        """Every worker takes its part of the newest whole checkpoint, if any; corrupt ones are
        named, and the one before them is used. `accept` takes its progress, and raises Refusal for
        another training's."""
        group = self._group
        paths: list[Path] = []
        if self._rank == 0:
            with suppress(OSError):  # A save that finds the same says so.
                checkpoint.mend(self._folder.path)
            paths = list(checkpoint.newest_first(self._folder.path))
        corrupt, newest = list[str](), 0
        for number in range(int(group.sum(float(len(paths)))[0])):
            path, manifest, why = None, None, ""
            if self._rank == 0:
                path = paths[number]
                manifest, why = self._readable(path, accept)
            why = group.share_text(why)
            if not why:
                name, progress = self._shared(path, manifest)
                why = self._take(self._folder.path / name, manifest)
                if not why:
                    self._adopted(progress, accept, warn, corrupt, newest)
                    return progress
            if path is not None:
                # Names of files are bytes, and not all of them UTF-8.
                corrupt.append(f"{path}: {why}".encode(errors="backslashreplace").decode())
                newest = max(newest, checkpoint.step_of(path))
        if group.share_text("; ".join(corrupt)):
            raise Refusal(
                "checkpoint-corrupt",
                what="no checkpoint of this run can be used",
                where=self._folder.path,
                fact="; ".join(corrupt) or "rank 0 names them",
                remedy="start again: farspan train run.yaml --run NEW_FOLDER",
            )
        return None

    def _adopted(
        self,
        progress: TrainerState,
        accept: Callable[[TrainerState], None],
        warn: Callable[[str], None],
        corrupt: list[str],
        newest: int,
    ) -> None:
        accept(progress)
        if corrupt:
            lost = (
                f": {counted(newest - progress.step, 'step')} lost"
                if newest > progress.step
                else ""
            )
            warn(
                f"corrupt checkpoint {'; '.join(corrupt)}. Going on from step "
                f"{progress.step}{lost}."
            )
        self._executor.publish()

    def _readable(
        self, path: Path, accept: Callable[[TrainerState], None]
    ) -> tuple[Manifest | None, str]:
        """On rank 0: what a checkpoint says of itself, or why it is not one that this plan can go
        on from. Raises Refusal for another training's."""
        plan = self._executor.topology.plan
        try:
            manifest = checkpoint.read(path)
            accept(manifest.progress)
            if manifest.progress.step > plan.train.step_limit:
                raise Corrupt(
                    f"it is of step {manifest.progress.step}, and the plan has "
                    f"{plan.train.step_limit}"
                )
            for replica in range(len(plan.replicas)):
                kinds = {
                    name
                    for names in checkpoint.sources(plan, replica, manifest).values()
                    for name in names
                }
                manifest.check(checkpoint.shapes_of(plan, sorted(kinds)))
        except Corrupt as error:
            return None, str(error)
        return manifest, ""

    def _shared(self, path: Path | None, manifest: Manifest | None) -> tuple[str, TrainerState]:
        """The name of rank 0's checkpoint and its progress, on every worker."""
        mine = (
            b""
            if path is None or manifest is None
            else msgspec.json.encode((path.name, manifest.progress))
        )
        return msgspec.json.decode(self._group.share(mine), type=tuple[str, TrainerState])

    def _take(self, path: Path, manifest: Manifest | None) -> str:
        """Fill this worker's state from a checkpoint, and those of workers that do not see it; why
        that failed."""
        why, stored = "", None
        if self._rank in self._folder.near:
            try:
                manifest = manifest or checkpoint.read(path)
                stored = Stored(path, manifest.tensors)
            except Corrupt as error:
                why = str(error)
        kinds = self._targets()
        if stored is not None and manifest is not None:
            with stored:
                why = self._fill_own(stored, manifest, kinds)
                if self._rank == 0 and len(self._folder.near) < self._group.world:
                    why = self._hand_out(stored, manifest, kinds) or why
                self.read_bytes = stored.read_bytes
        elif self._rank not in self._folder.near:
            for flats in kinds.values():
                self._whole.receive(flats)
        return next(filter(None, self._group.gather_text(why)), "")

    def _targets(self) -> dict[str, Sequence[Tensor]]:
        """What is filled from a checkpoint, by the kinds of `checkpoint.sources`."""
        state, outer = self._state, self._executor.outer
        moments = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        average = {AVERAGE: state.average} if state.average else {}
        if outer is None:
            return {MODEL: state.master, **moments, **average}
        return {
            MODEL: outer.anchor,
            MOMENTUM: outer.momentum,
            "master": state.master,
            **moments,
            **average,
        }

    def _fill_own(self, stored: Stored, manifest: Manifest, targets: Flats) -> str:
        mine = self._whole.manifests[self._rank]
        names = checkpoint.sources(self._executor.topology.plan, mine.replica, manifest)
        try:
            for kind, flats in targets.items():
                for flat, pieces in zip(flats, mine.pieces, strict=True):
                    for piece in pieces if len(flat) else ():
                        owned = flat.reshape(-1)[piece.at : piece.at + piece.stop - piece.start]
                        _fill(stored, names[kind], piece, owned)
        except Corrupt as error:
            return str(error)
        return ""

    def _hand_out(self, stored: Stored, manifest: Manifest, targets: Flats) -> str:
        """On rank 0: read what workers need that do not see the folder, and send it to them."""
        plan, why = self._executor.topology.plan, list[str]()
        far = [rank for rank in range(len(self._whole.manifests)) if rank not in self._folder.near]

        def content(rank: int, b: int, kind: str) -> Tensor:
            theirs = self._whole.manifests[rank]
            if kind == checkpoint.SECOND and theirs.matrices[b]:
                return torch.zeros(0)
            values, names = (
                torch.zeros(theirs.sizes[b]),
                checkpoint.sources(plan, theirs.replica, manifest)[kind],
            )
            with _noting(why):  # Sent all the same: they wait for it.
                for piece in theirs.pieces[b]:
                    _fill(
                        stored, names, piece, values[piece.at : piece.at + piece.stop - piece.start]
                    )
            return values

        for kind in targets:
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
