"""The folder of a run's checkpoints: written aside and renamed into place, the newest few kept,
read when whole.

A checkpoint is a folder `step-00000120` with a file of slices for each worker that wrote one,
`part-00000.safetensors`, and `manifest.json`, which locates each slice. It is whole or it is not
there. While it is made each worker writes next to its file the entries of the manifest for it,
`part-00000.json`; rank 0 merges these.

`python -m farspan.runtime.checkpoint.checkpoint_folder FOLDER` verifies one, without
loading PyTorch: it prints why it is not whole, and exits with the code of a corrupt one.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farspan import models
from farspan.domain.epoch_fence import fence_stale_epoch, readable_ledger
from farspan.domain.own_files import open_own
from farspan.domain.plan import Plan
from farspan.domain.problems import EXIT_CODES, Refusal
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import content_hash, parse_json, save, write_atomically
from farspan.domain.units import format_bytes
from farspan.runtime.checkpoint.manifest import (
    MANIFEST,
    Corrupt,
    GlobalTensor,
    Manifest,
    TrainerState,
    checksum_of,
)
from farspan.runtime.checkpoint.slice_files import (
    MOST_MANIFEST,
    Listing,
    OwnedSlice,
    Stored,
    put_slices,
    read_manifest,
    read_small,
)
from farspan.semantics.muon_matrices import block_matrices

if TYPE_CHECKING:
    import torch

#: Bytes in addition to the tensors, at most.
MAX_HEADER_BYTES = 2**20
#: The kinds of tensors of a synchronous run, and what each replica has of its own where there are
#: several.
MODEL = "model"
MOMENTUM = "momentum"
AVERAGE = "average"
SHARED_STATE = (MODEL, MOMENTUM, AVERAGE)
SECOND_MOMENT = "exp_avg_sq"
MOMENTS = ("exp_avg", SECOND_MOMENT)
OWN_STATE = ("master", *MOMENTS)


def printable(text: str) -> str:
    """Escape what is not UTF-8: names of files are bytes."""
    return text.encode(errors="backslashreplace").decode()


class Unsaved(Exception):
    """A checkpoint that could not be written, with the reason as its message."""


def bytes_needed(plan: Plan) -> int:
    """Return the size of one checkpoint: all tensors of it in fp32, and some headers."""
    shapes = shapes_of(plan, kinds_of(plan))
    return 4 * sum(map(math.prod, shapes.values())) + MAX_HEADER_BYTES


def model_bytes(plan: Plan) -> int:
    """Return the size of the trained weights alone, and some headers."""
    return 4 * models.count_trained(plan.model) + MAX_HEADER_BYTES


def check_disk(folder: Path, needed: int) -> None:
    """Refuse when the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refusal(
            "disk-full",
            what="there is not enough disk space for checkpoints",
            where=folder,
            fact=f"{format_bytes(needed)} needed, {format_bytes(free)} free",
            remedy=f"free {format_bytes(needed - free)} there, or keep the run elsewhere: farspan "
            "train --run FOLDER",
        )


# -- writing
#   ------------------------------------------------------------------------------------------------


def unfinished(path: Path) -> Path:
    """Return the path of a checkpoint until it is whole."""
    return path.with_name(f".{path.name}.tmp")


def make_folder(path: Path, size: int, epoch: int = 0) -> None:
    """Make the folder that a checkpoint of `size` bytes is written in. Raises OSError, or Refusal
    (disk-full, or superseded where another start of the run has begun since this epoch)."""
    require_newest_epoch(path, epoch)
    # No parents: a run's folder that was deleted is not made again.
    path.parent.mkdir(exist_ok=True)
    clean_up(path.parent)
    check_disk(path.parent, size)
    unfinished(path).mkdir()


def require_newest_epoch(path: Path, epoch: int) -> None:
    """Raise Refusal (superseded) where another start of a checkpoint's run has begun since this
    epoch."""
    fence_stale_epoch(_ledger_path(path), epoch)


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"


def write_part(path: Path, rank: int, slices: Sequence[OwnedSlice]) -> None:
    """Write one worker's part of a checkpoint, and then the manifest's entries for it. Raises
    OSError."""
    file = unfinished(path) / part_name(rank)
    with open_own(file, "wb") as target:
        listing = put_slices(slices, file.name, target.write)
        target.flush()
        os.fsync(target.fileno())
    write_atomically(file.with_suffix(".json"), msgspec.json.encode(listing))


def missing_parts(path: Path, ranks: Iterable[int]) -> list[int]:
    """Return the ranks of the workers that have not written their part yet."""
    folder = unfinished(path)
    missing = list[int]()
    for rank in ranks:
        listing = (folder / part_name(rank)).with_suffix(".json")
        if not listing.exists():
            missing.append(rank)
    return missing


def commit(path: Path, ranks: Iterable[int], progress: TrainerState) -> int:
    """Merge the parts of these workers, move the checkpoint to its place and return its bytes.
    Raises OSError, and Corrupt for a part that is not there; Refusal (superseded) if another start
    of the run has begun."""
    folder = unfinished(path)
    tensors: Listing = {}
    for rank in ranks:
        listed = (folder / part_name(rank)).with_suffix(".json")
        listing = parse_json(read_small(listed, MOST_MANIFEST), Listing, listed)
        for name, tensor in listing.items():
            slices = tensor.slices
            if name in tensors:
                slices = tensors[name].slices + slices
            tensors[name] = GlobalTensor(shape=tensor.shape, slices=slices)
        listed.unlink()
    require_newest_epoch(path, progress.epoch)
    checksum = checksum_of(progress, tensors)
    save(Manifest(progress=progress, tensors=tensors, checksum=checksum), folder / MANIFEST)
    fsync_path(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    # Rename the folder; one that was there before is put aside until then.
    old = path.with_name(f".{path.name}.old")
    if os.path.lexists(path):
        os.rename(path, old)
    os.rename(folder, path)
    fsync_path(path.parent)
    with suppress(OSError):  # The next `clean_up` finds it.
        _remove_path(old)
    return size


def clean_up(folder: Path) -> None:
    """Clean up after a worker that was killed: remove what it had not finished to write or to
    delete. A folder that was put aside while it was replaced comes back, or goes if the new one is
    there."""
    for half_written in folder.glob(".*.tmp"):
        _remove_path(half_written)
    for old in folder.glob(".*.old"):
        replaced = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if os.path.lexists(replaced):
            _remove_path(old)
        else:
            os.rename(old, replaced)


def prune(newest: Path, keep: int) -> None:
    """Delete all but the newest `keep`, the first of them just written. One that lacks files
    does not count, and goes. Of a later step there is only what this start found damaged: it stays
    until the run is there again."""
    step = step_of(newest)
    past = [path for path in newest_first(newest.parent) if 0 <= step_of(path) < step]
    kept = [path for path in past if _has_its_files(path)][: keep - 1]
    for path in past:
        if path not in kept:
            with suppress(OSError):  # It is tried again after the next save.
                # Renamed first: one that is half deleted when this process is killed must not
                # look like a checkpoint.
                doomed = path.with_name(f".{path.name}.tmp")
                os.rename(path, doomed)
                _remove_path(doomed)


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's folder is named after; -1 if it is named after none."""
    if not re.fullmatch(r"step-[0-9]{8,20}", path.name):
        return -1
    step = int(path.name.removeprefix("step-"))
    return step if path.name == step_name(step) else -1


def newest_first(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints of a run that can be resumed from, newest first, whole or not. One that
    is named after no step comes before all: it may have been the newest."""

    def age(path: Path) -> tuple[bool, int, str]:
        step = step_of(path)
        return step < 0, step, path.name

    yield from sorted(folder.glob("step-*"), key=age, reverse=True)


# -- reading
#   ------------------------------------------------------------------------------------------------


def read_checked_manifest(path: Path) -> Manifest:
    """Return a checkpoint's manifest, which does not contradict itself. Raises Corrupt."""
    manifest = read_manifest(path)
    if not path.name.startswith("step-"):
        return manifest
    step = manifest.progress.step
    epoch = manifest.progress.epoch
    if step_of(path) != step:
        raise Corrupt(f"its manifest is of step {step}, its name is not")
    if not readable_ledger(_ledger_path(path)).counts(epoch, step):
        raise Corrupt(f"start {epoch} of the run wrote it after another had begun")
    return manifest


def _ledger_path(path: Path) -> Path:
    """Return the ledger of the starts that count of a checkpoint's run."""
    return RunFolder(path.parent.parent).epochs


def _has_its_files(path: Path) -> bool:
    """Return whether a checkpoint has all its files, without reading them."""
    with suppress(Corrupt, OSError):
        files = set[str]()
        for tensor in read_manifest(path).tensors.values():
            files.update(part.file for part in tensor.slices)
        return all((path / file).is_file() for file in files)
    return False


def verify(path: Path) -> TrainerState:
    """Check every byte of a checkpoint's tensors; return its progress or raise Corrupt."""
    manifest = read_checked_manifest(path)
    manifest.check({name: tensor.shape for name, tensor in manifest.tensors.items()})
    with Stored(path, manifest.tensors) as stored:
        stored.verify()
    return manifest.progress


def shapes_of(plan: Plan, kinds: Iterable[str] = (MODEL, *MOMENTS)) -> dict[str, tuple[int, ...]]:
    """Return the shape of every global tensor of these kinds, by name: of parameters that are
    trained, as frozen ones are in the folder of the model that the run continues."""
    import torch

    from farspan.runtime.model.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(plan.model)
    # Muon keeps one moment of the parameters that it updates.
    lacking = set[str]()
    if plan.train.optimizer.muon:
        lacking.update(block_matrices(models.graph(plan.model)))
    shapes = dict[str, tuple[int, ...]]()
    for kind in kinds:
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name not in lacking or not kind.endswith(SECOND_MOMENT):
                shapes[f"{kind}/{name}"] = tuple(parameter.shape)
    return shapes


def replica_kind(replica: int, kind: str) -> str:
    """Return the name of a kind of tensors that one of several replicas has of its own."""
    return f"replica-{replica}/{kind}"


def kinds_of(plan: Plan) -> tuple[str, ...]:
    """List all kinds of tensors in a checkpoint of a plan."""
    average = (AVERAGE,) if plan.train.optimizer.average else ()
    if plan.sync is None:
        return MODEL, *MOMENTS, *average
    kinds = [MODEL, MOMENTUM, *average]
    for replica in range(len(plan.replicas)):
        kinds += [replica_kind(replica, kind) for kind in OWN_STATE]
    return tuple(kinds)


def source_kinds(plan: Plan, replica: int, stored: Manifest) -> Mapping[str, tuple[str, ...]]:
    """List by kind what a worker of a replica restores its state from: the mean of these kinds,
    zeros if there are none.

    If the number of replicas has changed, each begins at the synced parameters of the old ones,
    with the mean of their moments and the outer momentum. What replicas had learned since the last
    outer sync is not kept.
    """
    kinds: dict[str, tuple[str, ...]] = {MODEL: (MODEL,)}
    for kind in MOMENTS:
        kinds[kind] = tuple(replica_kind(r, kind) for r in range(stored.replicas)) or (kind,)
    if plan.train.optimizer.average:
        kinds[AVERAGE] = (AVERAGE,)
    if plan.sync is None:
        return kinds
    kinds[MOMENTUM] = (MOMENTUM,) if stored.replicas else ()
    kinds["master"] = (MODEL,)
    if stored.replicas == len(plan.replicas):
        for kind in OWN_STATE:
            kinds[kind] = (replica_kind(replica, kind),)
    return kinds


def read_weights(
    path: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, torch.Tensor], TrainerState, str]:
    """Read the fp32 weights of a checkpoint or of `best`, by parameter name, the progress they are
    from, and a checksum of them. `shapes` are those of a plan's model (`shapes_of`). Raises
    Corrupt."""
    manifest = read_checked_manifest(path)
    manifest.check(shapes)
    wanted = {name: tensor for name, tensor in manifest.tensors.items() if name in shapes}
    weights: dict[str, torch.Tensor] = {}
    with Stored(path, wanted) as stored:
        for name in shapes:
            weights[name.removeprefix(f"{MODEL}/")] = stored.whole(name)
    return weights, manifest.progress, content_hash(wanted)


def main() -> int:
    try:
        verify(Path(sys.argv[1]))
    except Corrupt as error:
        print(error)
        return EXIT_CODES["checkpoint-corrupt"]
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
