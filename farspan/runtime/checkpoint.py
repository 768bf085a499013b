"""Checkpoints: safetensors and JSON, written beside and renamed into place, verified by checksum before use.

A checkpoint is a folder `step-00000120` with `model.safetensors` (fp32 masters), `optimizer.safetensors` (moments) and
`state.json` (progress, and the SHA-256 of the other two). It is whole or it is not there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from farspan.domain.codec import load, save
from farspan.domain.model import parameters
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.units import format_bytes
from farspan.runtime.budget import Paces

MODEL, OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
#: Bytes beside the tensors, at most.
HEADERS = 2**20
#: A file's tensors, by name; and a file's name with what collects them.
Tensors = Mapping[str, torch.Tensor]
File = tuple[str, Callable[[], Tensors]]
#: What is held while files are written, and nothing, where nobody else could end this process.
Writing = AbstractContextManager[object]
ALONE: Writing = nullcontext()


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a run is; together with the tensors and the plan, all that the next step depends on."""

    step: int
    plan: str
    #: Wall-clock seconds trained so far, over all starts.
    elapsed_s: float
    best_loss: float | None = None
    #: Validations in a row without a better loss.
    stale: int = 0
    loss_scale: float = 1.0
    #: Steps in a row without an overflow, which decide when the loss scale doubles.
    quiet: int = 0
    #: Steps whose update an overflow has cost: the optimizer has counted so many fewer.
    skipped: int = 0
    #: Steps of the whole run, where its time budget made them fewer than the plan's.
    steps: int | None = None
    #: Of a run with a time budget: the share that its learning rate has followed so far, and what it knows of its
    #: speed.
    share: float = 0.0
    paces: Paces | None = None
    #: Whether a person was told that its steps are not the plan's.
    told: bool = False


class Saved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    progress: Progress
    sha256: dict[str, str]


class Corrupt(Exception):
    """A checkpoint that must not be used; the message says why."""


def bytes_needed(plan: Plan) -> int:
    """Size of one checkpoint: fp32 master and two moments a parameter, of each replica where there are several, beside
    the model that they met at and the outer momentum; and some headers."""
    each = 12 if plan.sync is None else 8 + 12 * len(plan.replicas)
    return each * parameters(plan.model) + HEADERS


def check_disk(folder: Path, needed: int) -> None:
    """Refuse when the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refusal(
            "disk-full",
            what="there is not enough disk space for checkpoints",
            where=folder,
            fact=f"{format_bytes(needed)} needed, {format_bytes(free)} free",
            remedy=f"free {format_bytes(needed - free)} there, or keep the run elsewhere: farspan train --run FOLDER",
        )


def write(
    folder: Path, files: Sequence[File], progress: Progress, keep: int, writing: Writing = ALONE
) -> tuple[Path, int]:  # fmt: skip
    """Write the checkpoint of `progress.step`, then delete all but the newest `keep`. Returns its path and bytes.
    `writing` is entered while a file is written, and until all is in its place after the last, not while one is
    collected."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{progress.step:08d}"
    size = _write_folder(path, files, progress, writing)
    for old in sorted(folder.glob("step-*"), reverse=True)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return path, size


def write_best(path: Path, weights: Tensors, progress: Progress, writing: Writing = ALONE) -> None:
    """Keep the weights of the best validation loss; the previous best stays until they are whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_folder(path, [(MODEL, lambda: weights)], progress, writing)


def mend(folder: Path) -> None:
    """After a worker was killed between the two renames that replace a folder: what was put aside comes back, or goes
    where the new one is there."""
    for old in folder.glob(".*.old"):
        replaced = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if replaced.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, replaced)


def _write_folder(path: Path, files: Sequence[File], progress: Progress, writing: Writing) -> int:
    mend(path.parent)
    for unfinished in path.parent.glob(".*.tmp"):
        shutil.rmtree(unfinished)
    temporary, sums = path.with_name(f".{path.name}.tmp"), dict[str, str]()
    temporary.mkdir(parents=True)
    size = 0
    for name, collect in files:
        tensors = collect()
        with writing:
            check_disk(path.parent, sum(tensor.nbytes for tensor in tensors.values()) + HEADERS)
            save_file(dict(tensors), temporary / name)
            _sync(temporary / name)
            sums[name] = _sha256(temporary / name)
            if len(sums) == len(files):  # Now it needs nobody else, whoever is lost meanwhile.
                save(Saved(progress=progress, sha256=sums), temporary / _STATE)
                size = _put(temporary, path)
        del tensors  # Before the next file is collected.
    return size


def _put(temporary: Path, path: Path) -> int:
    """Rename a whole folder to where it belongs; its bytes."""
    size = sum(file.stat().st_size for file in temporary.iterdir())
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        os.rename(temporary, path)
        shutil.rmtree(old)
    else:
        os.rename(temporary, path)
    _sync(path.parent)
    return size


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest_first(folder: Path) -> Iterator[Path]:
    """Checkpoints of a run that can be resumed from, newest first, whole or not."""
    yield from sorted(folder.glob("step-*"), reverse=True)


def read(path: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of one file of a verified checkpoint."""
    try:
        return load_file(path / name)
    except SafetensorError as error:
        raise Corrupt(str(error)) from None


def verify(path: Path, files: Sequence[str] | None = None) -> Progress:
    """Check a checkpoint's files, all unless named, against their checksums; returns its progress or raises Corrupt."""
    try:
        saved = load(path / _STATE, Saved)
        for name in saved.sha256 if files is None else files:
            if _sha256(path / name) != saved.sha256[name]:
                raise Corrupt(f"{name} does not match its checksum ({format_bytes((path / name).stat().st_size)})")
    except (OSError, KeyError, Refusal) as error:
        raise Corrupt(f"{path.name} is not whole: {str(error).splitlines()[0]}") from None
    return saved.progress


def progress_of(path: Path) -> tuple[Progress, str]:
    """The progress that a checkpoint's weights are from, and their SHA-256."""
    saved = load(path / _STATE, Saved)
    return saved.progress, saved.sha256[MODEL]


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of a checkpoint or of `best`, by parameter name."""
    verify(path, (MODEL,))
    return read(path, MODEL)
