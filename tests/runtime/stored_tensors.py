"""Whole tensors of a checkpoint, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from farspan.domain.run import RunFolder
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.manifest import TrainerState
from farspan.runtime.checkpoint.slice_files import OwnedSlice, Stored


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by name."""
    manifest = checkpoint_folder.read_checked_manifest(path)
    with Stored(path, manifest.tensors) as stored:
        return {name: stored.whole(name) for name in manifest.tensors}


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The model of a checkpoint, by parameter name."""
    return {
        name.removeprefix("model/"): value
        for name, value in tensors(path).items()
        if name.startswith("model/")
    }


def newest(run: RunFolder) -> Path:
    return next(checkpoint_folder.newest_first(run.checkpoints))


def slices(values: Mapping[str, torch.Tensor]) -> list[OwnedSlice]:
    return [
        OwnedSlice(name, tuple(v.shape), (0,) * v.dim(), v.contiguous())
        for name, v in values.items()
    ]


def write(
    folder: Path, values: Mapping[str, torch.Tensor], progress: TrainerState, keep: int = 3
) -> Path:
    """A checkpoint of whole tensors, as one worker would write it."""
    path = folder / checkpoint_folder.step_name(progress.step)
    write_one(path, values, progress)
    checkpoint_folder.prune(path, keep)
    return path


def write_one(path: Path, values: Mapping[str, torch.Tensor], progress: TrainerState) -> None:
    checkpoint_folder.make_folder(path, checkpoint_folder.MAX_HEADER_BYTES, progress.epoch)
    checkpoint_folder.write_part(path, 0, slices(values))
    checkpoint_folder.commit(path, [0], progress)
