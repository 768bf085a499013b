"""Checkpoints of a run whose state lies on many workers: rank 0 reads and writes, the others send and receive.

One replica: `model` (masters) and `optimizer` (moments). Several, saved where they meet: `model` is the one that they
met at, `optimizer` the outer momentum, and `replica-N` each one's own masters and moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from farspan.domain.problems import Refusal
from farspan.runtime import checkpoint
from farspan.runtime.checkpoint import MODEL, OPTIMIZER, Progress
from farspan.runtime.executor import Executor


class Saves:
    """All workers of a run call these together."""

    def __init__(self, executor: Executor, folder: Path, keep: int) -> None:
        self._executor, self._folder, self._keep = executor, folder, keep
        self._whole, self._state = executor.whole, executor.state

    def files(self) -> list[checkpoint.File]:
        """The files of a checkpoint, each to be collected when it is written: all together may be more than the memory
        of rank 0 holds."""
        outer = self._executor.outer
        if outer is None:
            return [(MODEL, self.weights), (OPTIMIZER, partial(self._named, 0, moments=True))]
        momentum, replicas = outer.momentum, range(len(self._executor.place.plan.replicas))
        return [
            (MODEL, self.weights), (OPTIMIZER, lambda: _prefixed("momentum", self._whole.collect(momentum))),
            *((f"replica-{r}.safetensors", partial(self._named, r, moments=True, masters=True)) for r in replicas),
        ]  # fmt: skip

    def weights(self) -> dict[str, Tensor]:
        """The model of the run, on rank 0: what replicas last met at."""
        outer = self._executor.outer
        return self._whole.collect(self._state.master if outer is None else outer.anchor)

    def _named(self, replica: int, *, moments: bool = False, masters: bool = False) -> dict[str, Tensor]:
        state, found = self._state, dict[str, Tensor]()
        kinds = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq} if moments else {}
        for kind, flats in (kinds | ({"master": state.master} if masters else {})).items():
            found |= _prefixed(kind, self._whole.collect(flats, replica))
        return found

    def write(self, progress: Progress, writing: checkpoint.Writing) -> tuple[Path, int] | None:
        """Write a checkpoint; rank 0 returns its path and bytes. `writing` is entered while files are written, not
        while workers are waited for."""
        if self._executor.place.rank == 0:
            return checkpoint.write(self._folder, self.files(), progress, self._keep, writing)
        for _, collect in self.files():
            collect()
        return None

    # -- restoring -----------------------------------------------------------------------------------------------------

    def find(self, adopt: Callable[[Progress], None], warn: Callable[[str], None]) -> Path | None:
        """On rank 0, the newest whole checkpoint, if any; corrupt ones are named, and the one before them is used."""
        corrupt: list[str] = []
        newest = 0
        checkpoint.mend(self._folder)
        for path in checkpoint.newest_first(self._folder):
            try:
                progress = checkpoint.verify(path)
            except checkpoint.Corrupt as error:
                corrupt.append(f"{path}: {error}")
                newest = max(newest, int(path.name.removeprefix("step-")))
                continue
            adopt(progress)
            if corrupt:
                message = f"corrupt checkpoint {'; '.join(corrupt)}. Going on from step {progress.step}"
                warn(f"{message}: {newest - progress.step} steps lost.")
            return path
        if corrupt:
            raise Refusal(
                "checkpoint-corrupt", what="no checkpoint of this run can be used", where=self._folder,
                fact="; ".join(corrupt), remedy="start again: farspan train run.yaml --run NEW_FOLDER",
            )  # fmt: skip
        return None

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
            for r in range(len(self._executor.place.plan.replicas)):
                self._whole.hand_out(state.master, _kind(path, f"replica-{r}.safetensors", "master"), r)
                self._moments(f"replica-{r}.safetensors", path, r)
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


def _prefixed(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": tensor for name, tensor in tensors.items()}


def _kind(path: Path | None, name: str, kind: str) -> dict[str, Tensor] | None:
    """The tensors of one kind in a checkpoint's file, on rank 0."""
    if path is None:
        return None
    tensors = checkpoint.read(path, name)
    return {key.removeprefix(f"{kind}."): tensor for key, tensor in tensors.items() if key.startswith(f"{kind}.")}
