"""Checkpoints of a run whose state lies on many workers: rank 0 reads and writes, the others send and receive.

One replica: `model` (masters) and `optimizer` (moments). Several, saved where they meet: `model` is the one that they
met at, `optimizer` the outer momentum, and `replica-N` each one's own masters and moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import Tensor

from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.units import counted, format_seconds
from farspan.runtime.checkpoint import checkpoint
from farspan.runtime.checkpoint.checkpoint import MODEL, OPTIMIZER, Corrupt, TrainingProgress, Unsaved
from farspan.runtime.comm.collective import Group
from farspan.runtime.parallel.executor import Executor

#: Times on end that a checkpoint is due and cannot be written before the run ends.
UNSAVED = 3


class Checkpointer:
    """All workers of a run call these together."""

    def __init__(self, executor: Executor, folder: Path, keep: int) -> None:
        self._executor, self._folder, self._keep = executor, folder, keep
        self._whole, self._state = executor.whole, executor.state
        #: The step of the newest checkpoint, -1 without one.
        self.newest = -1
        #: Times on end that a checkpoint was due and could not be written.
        self._unsaved = 0

    def files(self) -> list[checkpoint.File]:
        """The files of a checkpoint, each to be collected when it is written: all together may be more than the memory
        of rank 0 holds."""
        outer = self._executor.outer
        if outer is None:
            return [(MODEL, self.weights), (OPTIMIZER, partial(self._named, 0, moments=True))]
        momentum, replicas = outer.momentum, range(len(self._executor.topology.plan.replicas))
        return [
            (MODEL, self.weights), (OPTIMIZER, lambda: _prefixed("momentum", self._whole.collect(momentum))),
            *((checkpoint.replica(r), partial(self._named, r, moments=True, masters=True)) for r in replicas),
        ]  # fmt: skip

    def weights(self) -> dict[str, Tensor]:
        """The model of the run, on rank 0: what replicas last met at."""
        outer = self._executor.outer
        return self._whole.collect(self._state.master if outer is None else outer.anchor)

    def _named(self, replica: int, *, moments: bool = False, masters: bool = False) -> dict[str, Tensor]:
        state, tensors = self._state, dict[str, Tensor]()
        kinds = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq} if moments else {}
        for kind, flats in (kinds | ({"master": state.master} if masters else {})).items():
            tensors |= _prefixed(kind, self._whole.collect(flats, replica))
        return tensors

    def write(self, progress: TrainingProgress, group: Group) -> tuple[Path, int] | None:
        """Write a checkpoint; rank 0 returns its path and bytes. Raises Unsaved on every worker where it cannot be
        written. The lock of files is held while they are written, not while workers are waited for."""
        written, why = None, ""
        if group.rank == 0:
            try:
                written = checkpoint.write(self._folder, self.files(), progress, self._keep, group.writing)
            except Unsaved as error:
                why = str(error)
        else:
            for _, collect in self.files():
                collect()
        _agree(group, why)
        self.newest, self._unsaved = progress.step, 0
        return written

    def write_best(self, path: Path, progress: TrainingProgress, group: Group) -> None:
        """Write the model alone. Raises Unsaved on every worker where it cannot be written."""
        weights, why = self.weights(), ""
        if group.rank == 0:
            try:
                checkpoint.write_best(path, weights, progress, group.writing)
            except Unsaved as error:
                why = str(error)
        _agree(group, why)

    @property
    def kept(self) -> str:
        """What a run that ends now leaves."""
        return f"the newest checkpoint is of step {self.newest}" if self.newest >= 0 else "there is no checkpoint"

    def excuse(self, why: str, step: int, steps: int, *, due: bool, last: bool) -> str:
        """A warning that a checkpoint could not be written. Raises Refusal (disk-full) where it was the last one, or
        was due UNSAVED times on end."""
        self._unsaved += due
        every, run = (
            format_seconds(self._executor.topology.plan.train.checkpoint_every_s),
            RunFolder(self._folder.parent),
        )
        if not last and self._unsaved < UNSAVED:
            return (
                f"step {step}: no checkpoint could be written: {why}; {self.kept}, and the next is tried in {every}; "
                f"after {UNSAVED} on end the run stops"
            )
        raise Refusal(
            "disk-full", where=self._folder, remedy=f"free some space there, then: {run.resume()}",
            what="the last checkpoint could not be written" if last
            else f"no checkpoint could be written for {UNSAVED} intervals of {every}",
            fact=f"{why}; {step} of {steps} steps are trained, {self.kept}",
        )  # fmt: skip

    # -- restoring -----------------------------------------------------------------------------------------------------

    def find(self, adopt: Callable[[TrainingProgress], None], warn: Callable[[str], None]) -> Path | None:
        """On rank 0, the newest whole checkpoint, if any; corrupt ones are named, and the one before them is used."""
        corrupt: list[str] = []
        newest = 0
        with suppress(OSError):  # A save that finds the same says so.
            checkpoint.mend(self._folder)
        for path in checkpoint.newest_first(self._folder):
            try:
                progress = self._verified(path)
            except Corrupt as error:
                # Names of files are bytes, and not all of them UTF-8.
                corrupt.append(f"{path}: {error}".encode(errors="backslashreplace").decode())
                newest = max(newest, checkpoint.step_of(path))
                continue
            adopt(progress)
            if corrupt:
                lost = f": {counted(newest - progress.step, 'step')} lost" if newest > progress.step else ""
                warn(f"corrupt checkpoint {'; '.join(corrupt)}. Going on from step {progress.step}{lost}.")
            return path
        if corrupt:
            raise Refusal(
                "checkpoint-corrupt", what="no checkpoint of this run can be used", where=self._folder,
                fact="; ".join(corrupt), remedy="start again: farspan train run.yaml --run NEW_FOLDER",
            )  # fmt: skip
        return None

    def _verified(self, path: Path) -> TrainingProgress:
        """The progress of a checkpoint that every worker can take its part of, or of one of another plan. Raises
        Corrupt."""
        plan, progress = self._executor.topology.plan, checkpoint.verify(path)
        if progress.plan == plan.hash:
            if progress.step > plan.train.steps:
                raise Corrupt(f"it is of step {progress.step}, and the plan has {plan.train.steps}")
            checkpoint.check_tensors(path, checkpoint.shapes_of(plan))
        return progress

    def restore(self, path: Path | None) -> None:
        """Every worker takes its part of a checkpoint; `path` is known to rank 0."""
        state, outer = self._state, self._executor.outer
        weights = checkpoint.read(path, MODEL) if path else None
        if outer is None:
            self._whole.hand_out(state.master, weights)
            self._moments(OPTIMIZER, path, None)
        else:
            self._whole.hand_out(outer.anchor, weights)
            self._whole.hand_out(outer.momentum, _kind(path, OPTIMIZER, "momentum"))
            for r in range(len(self._executor.topology.plan.replicas)):
                self._whole.hand_out(state.master, _kind(path, checkpoint.replica(r), "master"), r)
                self._moments(checkpoint.replica(r), path, r)
        self._executor.publish()

    def adopt(self, weights: Mapping[str, Tensor] | None) -> None:
        """Every worker takes its part of a model, which rank 0 gives."""
        self._whole.hand_out(self._state.master, weights)
        self._executor.publish()
        if self._executor.outer is not None:
            self._executor.outer.start()

    def _moments(self, name: str, path: Path | None, replica: int | None) -> None:
        self._whole.hand_out(self._state.exp_avg, _kind(path, name, "exp_avg"), replica)
        self._whole.hand_out(self._state.exp_avg_sq, _kind(path, name, "exp_avg_sq"), replica)


def _agree(group: Group, why: str) -> None:
    """Raises Unsaved on every worker where rank 0 gives a reason."""
    if any(group.sum(float(bool(why)))):
        raise Unsaved(group.share(why.encode(errors="backslashreplace")).decode())


def _prefixed(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": tensor for name, tensor in tensors.items()}


def _kind(path: Path | None, name: str, kind: str) -> dict[str, Tensor] | None:
    """The tensors of one kind in a checkpoint's file, on rank 0."""
    if path is None:
        return None
    tensors = checkpoint.read(path, name)
    return {key.removeprefix(f"{kind}."): tensor for key, tensor in tensors.items() if key.startswith(f"{kind}.")}
