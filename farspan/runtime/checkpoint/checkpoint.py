"""The folder of a run's checkpoints: written beside and renamed into place, the newest few kept,
read when whole.

A checkpoint is a folder `step-00000120` with a file of slices for each worker that wrote one,
`part-00000.safetensors`, and `manifest.json`, which says what is where. It is whole or it is not
there. While it is made each worker leaves beside its file what the manifest will say of it,
`part-00000.json`; rank 0 puts these together.

`python -m farspan.runtime.checkpoint.checkpoint FOLDER` verifies one, for processes that load no
PyTorch: it prints why it is not whole, and exits with the code of a corrupt one.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from farspan import models
from farspan.domain.codec import content_hash, parse_json, save, write_atomically
from farspan.domain.epoch import readable_ledger, require
from farspan.domain.model import parameters
from farspan.domain.own_files import open_own
from farspan.domain.plan import Plan
from farspan.domain.problems import EXIT_CODES, Refusal
from farspan.domain.run import RunFolder
from farspan.domain.units import format_bytes
from farspan.runtime.checkpoint.layout import (
    MANIFEST,
    Corrupt,
    GlobalTensor,
    Manifest,
    StoredSlice,
    TrainerState,
    checksum_of,
)
from farspan.runtime.checkpoint.stored import (
    MOST_MANIFEST,
    Listing,
    OwnedSlice,
    Stored,
    put_slices,
    read_manifest,
    read_small,
)
from farspan.runtime.model.decoder import Decoder
from farspan.semantics.matrices import block_matrices

#: Bytes beside the tensors, at most.
HEADERS = 2**20
#: The kinds of tensors of a synchronous run, and what each replica has of its own where there are
#: several.
MODEL = "model"
MOMENTUM = "momentum"
AVERAGE = "average"
SHARED = (MODEL, MOMENTUM, AVERAGE)
SECOND = "exp_avg_sq"
MOMENTS = ("exp_avg", SECOND)
OWN = ("master", *MOMENTS)


class Unsaved(Exception):
    """A checkpoint that could not be written; the message says why."""


def bytes_needed(plan: Plan) -> int:
    """Size of one checkpoint: all tensors of it in fp32, and some headers."""
    each = sum(
        4 * shape.numel() for shape in map(torch.Size, shapes_of(plan, kinds_of(plan)).values())
    )
    return each + HEADERS


def model_bytes(plan: Plan) -> int:
    """Size of the weights alone, and some headers."""
    return 4 * parameters(plan.model) + HEADERS


def check_disk(folder: Path, needed: int) -> None:
    """Refuse when the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refusal(
            "disk-full",
            what="there is not enough disk space for checkpoints",
            where=folder,
            fact=f"{format_bytes(needed)} needed, {format_bytes(free)} free",
            remedy=(
                f"free {format_bytes(needed - free)} there, or keep the run elsewhere: farspan "
                "train --run FOLDER"
            ),
        )


# -- writing
#   ------------------------------------------------------------------------------------------------


def unfinished(path: Path) -> Path:
    """Where a checkpoint lies until it is whole."""
    return path.with_name(f".{path.name}.tmp")


def begin(path: Path, size: int, epoch: int = 0) -> None:
    """Make the folder that a checkpoint of so many bytes is written in. Raises OSError, or Refusal
    (disk-full, or superseded where another start of the run has begun since this epoch)."""
    require(_ledger(path), epoch)
    # No parents: a run's folder that was deleted is not made again.
    path.parent.mkdir(exist_ok=True)
    mend(path.parent)
    check_disk(path.parent, size)
    unfinished(path).mkdir()


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"


def write_part(path: Path, rank: int, slices: Sequence[OwnedSlice]) -> None:
    """Write what one worker has of a checkpoint, and then what the manifest says of it. Raises
    OSError."""
    file = unfinished(path) / part_name(rank)
    with open_own(file, "wb") as target:
        listing = put_slices(slices, file.name, target.write)
        target.flush()
        os.fsync(target.fileno())
    write_atomically(file.with_suffix(".json"), msgspec.json.encode(listing))


def missing_parts(path: Path, ranks: Iterable[int]) -> list[int]:
    """The workers whose part is not written yet."""
    return [
        rank
        for rank in ranks
        if not (unfinished(path) / part_name(rank)).with_suffix(".json").exists()
    ]


def commit(path: Path, ranks: Iterable[int], progress: TrainerState) -> int:
    """Put the parts of these workers together and the checkpoint in its place; its bytes. Raises
    OSError, and Corrupt for a part that is not there; Refusal (superseded) where another start of
    the run has begun."""
    folder = unfinished(path)
    slices = dict[str, list[StoredSlice]]()
    shapes = dict[str, tuple[int, ...]]()
    for rank in ranks:
        listed = (folder / part_name(rank)).with_suffix(".json")
        for name, tensor in parse_json(read_small(listed, MOST_MANIFEST), Listing, listed).items():
            slices.setdefault(name, []).extend(tensor.slices)
            shapes[name] = tensor.shape
        listed.unlink()
    require(_ledger(path), progress.epoch)
    tensors = {
        name: GlobalTensor(shape=shapes[name], slices=tuple(parts))
        for name, parts in slices.items()
    }
    save(
        Manifest(progress=progress, tensors=tensors, checksum=checksum_of(progress, tensors)),
        folder / MANIFEST,
    )
    sync(folder)
    return _put(folder, path)


def mend(folder: Path) -> None:
    """After a worker was killed: remove what it had not finished to write or to delete. What was
    put aside while a folder was replaced comes back, or goes where the new one is there."""
    for left in folder.glob(".*.tmp"):
        _remove(left)
    for old in folder.glob(".*.old"):
        replaced = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if os.path.lexists(replaced):
            _remove(old)
        else:
            os.rename(old, replaced)


def _put(temporary: Path, path: Path) -> int:
    """Rename a whole folder to where it belongs; its bytes."""
    size = sum(file.stat().st_size for file in temporary.iterdir())
    old = path.with_name(f".{path.name}.old")
    if os.path.lexists(path):
        os.rename(path, old)
    os.rename(temporary, path)
    sync(path.parent)
    with suppress(OSError):  # The next `mend` finds it.
        _remove(old)
    return size


def prune(newest: Path, keep: int) -> None:
    """Delete all but the newest `keep`, of which the first was just written. What lacks files does
    not count, and goes. Of a later step there is only what this start found damaged: it stays until
    the run is there again."""
    past = [path for path in newest_first(newest.parent) if 0 <= step_of(path) < step_of(newest)]
    kept = [path for path in past if _has_its_files(path)][: keep - 1]
    for path in past:
        if path not in kept:
            with suppress(OSError):  # It is tried again after the next save.
                # Renamed first: of one that is half deleted, when this process is killed, nobody
                # thinks that it is one.
                left = path.with_name(f".{path.name}.tmp")
                os.rename(path, left)
                _remove(left)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after; -1 where it is named after none."""
    number = re.fullmatch(r"step-([0-9]{8,20})", path.name)
    return int(number[1]) if number and path.name == step_name(int(number[1])) else -1


def newest_first(folder: Path) -> Iterator[Path]:
    """Checkpoints of a run that can be resumed from, newest first, whole or not. What is named
    after no step comes before all: it may have been the newest."""
    yield from sorted(
        folder.glob("step-*"),
        key=lambda path: (step_of(path) < 0, step_of(path), path.name),
        reverse=True,
    )


# -- reading
#   ------------------------------------------------------------------------------------------------


def read(path: Path) -> Manifest:
    """Return a checkpoint's manifest, which does not contradict itself. Raises Corrupt."""
    manifest = read_manifest(path)
    if path.name.startswith("step-") and step_of(path) != manifest.progress.step:
        raise Corrupt(f"its manifest is of step {manifest.progress.step}, its name is not")
    if path.name.startswith("step-") and not readable_ledger(_ledger(path)).counts(
        manifest.progress.epoch, step_of(path)
    ):
        raise Corrupt(
            f"start {manifest.progress.epoch} of the run wrote it after another had begun"
        )
    return manifest


def _ledger(path: Path) -> Path:
    """Which starts of the run count that a checkpoint is of."""
    return RunFolder(path.parent.parent).epochs


def _has_its_files(path: Path) -> bool:
    """A cheap look at whether a checkpoint is whole."""
    with suppress(Corrupt, OSError):
        files = {
            part.file for tensor in read_manifest(path).tensors.values() for part in tensor.slices
        }
        return all((path / file).is_file() for file in files)
    return False


def verify(path: Path) -> TrainerState:
    """Check every byte of a checkpoint's tensors; returns its progress or raises Corrupt."""
    manifest = read(path)
    manifest.check({name: tensor.shape for name, tensor in manifest.tensors.items()})
    with Stored(path, manifest.tensors) as stored:
        stored.verify()
    return manifest.progress


def shapes_of(plan: Plan, kinds: Iterable[str] = (MODEL, *MOMENTS)) -> dict[str, tuple[int, ...]]:
    """The shape of every global tensor of these kinds, by name."""
    with torch.device("meta"):
        model = {
            name: tuple(parameter.shape)
            for name, parameter in Decoder(plan.model).named_parameters()
        }
    lacking = without_second_moment(plan)
    return {
        f"{kind}/{name}": shape
        for kind in kinds
        for name, shape in model.items()
        if not (name in lacking and kind.endswith(SECOND))
    }


def without_second_moment(plan: Plan) -> frozenset[str]:
    """Parameters of which the optimizer keeps one moment only: those that Muon updates."""
    return frozenset(block_matrices(models.graph(plan.model)) if plan.train.optimizer.muon else ())


def own(replica: int, kind: str) -> str:
    """A kind of tensors that one of several replicas has of its own."""
    return f"replica-{replica}/{kind}"


def kinds_of(plan: Plan) -> tuple[str, ...]:
    """All kinds of tensors in a checkpoint of a plan."""
    average = (AVERAGE,) if plan.train.optimizer.average else ()
    if plan.sync is None:
        return MODEL, *MOMENTS, *average
    return (
        MODEL,
        MOMENTUM,
        *average,
        *(own(r, kind) for r in range(len(plan.replicas)) for kind in OWN),
    )


def sources(plan: Plan, replica: int, stored: Manifest) -> Mapping[str, tuple[str, ...]]:
    """What a worker of a replica takes its state from, by kind: the mean of these kinds, zeros
    where there are none.

    Where the number of replicas is another one, each begins at the model that the old ones last met
    at, with the mean of their moments; the outer momentum goes on. What replicas had learned since
    they met is not kept.
    """
    each = [own(r, kind) for kind in MOMENTS for r in range(stored.replicas)]
    mean = {
        kind: tuple(name for name in each if name.endswith(f"/{kind}")) or (kind,)
        for kind in MOMENTS
    }
    if plan.train.optimizer.average:
        mean[AVERAGE] = (AVERAGE,)
    if plan.sync is None:
        return {MODEL: (MODEL,), **mean}
    momentum = (MOMENTUM,) if stored.replicas else ()
    if stored.replicas == len(plan.replicas):
        return {
            MODEL: (MODEL,),
            MOMENTUM: momentum,
            **mean,
            **{kind: (own(replica, kind),) for kind in OWN},
        }
    return {MODEL: (MODEL,), MOMENTUM: momentum, "master": (MODEL,), **mean}


def read_weights(
    path: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, torch.Tensor], TrainerState, str]:
    """The fp32 weights of a checkpoint or of `best`, by parameter name, the progress that they are
    from, and a checksum of them. `shapes` are those of a plan's model (`shapes_of`). Raises
    Corrupt."""
    manifest = read(path)
    manifest.check(shapes)
    wanted = {name: tensor for name, tensor in manifest.tensors.items() if name in shapes}
    with Stored(path, wanted) as stored:
        weights = {name.removeprefix(f"{MODEL}/"): stored.whole(name) for name in shapes}
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
