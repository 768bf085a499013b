"""Checkpoints: safetensors and JSON, written beside and renamed into place, verified by checksum before use.

A checkpoint is a folder `step-00000120` with `model.safetensors` (fp32 masters), `optimizer.safetensors` (moments) and
`state.json` (progress, and the SHA-256 of the other two). It is whole or it is not there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from farspan.domain.codec import content_hash, parse_json, save
from farspan.domain.model import parameters
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.units import format_bytes
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.time_budget import RunPaces

MODEL, OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
#: Bytes beside the tensors, at most; and of `state.json`.
HEADERS = 2**20
#: A file's tensors, by name; and a file's name with what collects them.
Tensors = Mapping[str, torch.Tensor]
File = tuple[str, Callable[[], Tensors]]
#: The shape of every tensor of a file, by name; they are all fp32.
Shapes = Mapping[str, tuple[int, ...]]
#: What is held while files are written, and nothing, where nobody else could end this process.
Writing = AbstractContextManager[object]
ALONE: Writing = nullcontext()
#: What a number of `state.json` can be: more is damage.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


class TrainingProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a run is; together with the tensors and the plan, all that the next step depends on."""

    step: Count
    plan: str
    #: Wall-clock seconds trained so far, over all starts.
    elapsed_s: Finite
    best_loss: Finite | None = None
    #: Validations in a row without a better loss.
    stale: Count = 0
    loss_scale: Positive = 1.0
    #: Steps in a row without an overflow, which decide when the loss scale doubles.
    quiet: Count = 0
    #: Steps whose update an overflow has cost: the optimizer has counted so many fewer.
    skipped: Count = 0
    #: Steps of the whole run, where its time budget made them fewer than the plan's.
    steps: Count | None = None
    #: Of a run with a time budget: the share that its learning rate has followed so far, and what it knows of its
    #: speed.
    share: Finite = 0.0
    paces: RunPaces | None = None
    #: Whether a person was told that its steps are not the plan's.
    told: bool = False


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    progress: TrainingProgress
    sha256: dict[str, str]
    #: `content_hash` of the progress as it was written; None in a checkpoint from before there was one.
    progress_hash: str | None = None


class Corrupt(Exception):
    """A checkpoint that must not be used; the message says why."""


class Unsaved(Exception):
    """A checkpoint that could not be written; the message says why."""


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
    folder: Path, files: Sequence[File], progress: TrainingProgress, keep: int, writing: Writing = ALONE
) -> tuple[Path, int]:
    """Write the checkpoint of `progress.step`, then delete all but the newest `keep`. Returns its path and bytes.
    `writing` is entered while a file is written, and until all is in its place after the last, not while one is
    collected. Raises Unsaved once all files were collected: the other workers are done with theirs."""
    path = folder / _name(progress.step)
    size = _write_folder(path, files, progress, writing)
    _prune(path, keep)
    return path, size


def write_best(path: Path, weights: Tensors, progress: TrainingProgress, writing: Writing = ALONE) -> None:
    """Keep the weights of the best validation loss; the previous best stays until they are whole. Raises Unsaved."""
    _write_folder(path, [(MODEL, lambda: weights)], progress, writing)


def mend(folder: Path) -> None:
    """After a worker was killed: remove what it had not finished to write or to delete. What was put aside while a
    folder was replaced comes back, or goes where the new one is there."""
    for left in folder.glob(".*.tmp"):
        _remove(left)
    for old in folder.glob(".*.old"):
        replaced = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if os.path.lexists(replaced):
            _remove(old)
        else:
            os.rename(old, replaced)


def _write_folder(path: Path, files: Sequence[File], progress: TrainingProgress, writing: Writing) -> int:
    temporary, sums, size = path.with_name(f".{path.name}.tmp"), dict[str, str](), 0
    failure: Exception | None = None
    for name, collect in files:
        tensors = collect()  # After a failure too: the other workers are sending.
        with writing:
            try:
                if failure is None and not sums:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    mend(path.parent)
                    temporary.mkdir()
                if failure is None:
                    sums[name] = _write_file(temporary / name, tensors)
                if len(sums) == len(files):  # Now it needs no other worker, even if one is lost.
                    _write_state(temporary, progress, sums)
                    size = _put(temporary, path)
            except (OSError, SafetensorError, Refusal) as error:
                failure = error
                with suppress(OSError):  # What was written of it takes the space that is missing.
                    mend(path.parent)
        del tensors  # Before the next file is collected.
    if failure is not None:
        raise Unsaved(_reason(failure)) from failure
    return size


def _write_file(path: Path, tensors: Tensors) -> str:
    """Its SHA-256."""
    check_disk(path.parent, sum(tensor.nbytes for tensor in tensors.values()) + HEADERS)
    save_file(dict(tensors), path)
    _sync(path)
    return _sha256(path)


def _write_state(folder: Path, progress: TrainingProgress, sums: dict[str, str]) -> None:
    saved = CheckpointState(progress=progress, sha256=sums, progress_hash=content_hash(msgspec.to_builtins(progress)))
    save(saved, folder / _STATE)


def _put(temporary: Path, path: Path) -> int:
    """Rename a whole folder to where it belongs; its bytes."""
    size = sum(file.stat().st_size for file in temporary.iterdir())
    old = path.with_name(f".{path.name}.old")
    if os.path.lexists(path):
        os.rename(path, old)
    os.rename(temporary, path)
    _sync(path.parent)
    with suppress(OSError):  # The next `mend` finds it.
        _remove(old)
    return size


def _prune(newest: Path, keep: int) -> None:
    """Delete all but the newest `keep`, of which the first was just written. What lacks files does not count, and goes.
    Of a later step there is only what this start found damaged: it stays until the run is there again."""
    past = [path for path in newest_first(newest.parent) if 0 <= step_of(path) < step_of(newest)]
    kept = [path for path in past if _has_its_files(path)][: keep - 1]
    for path in past:
        if path not in kept:
            with suppress(OSError):  # It is tried again after the next save.
                # Renamed first: of one that is half deleted, when this process is killed, nobody thinks that it is one.
                left = path.with_name(f".{path.name}.tmp")
                os.rename(path, left)
                _remove(left)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    """Why something could not be written, in a line."""
    if isinstance(error, Refusal):
        return error.problem.fact
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())[:300]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after; -1 where it is named after none."""
    number = re.fullmatch(r"step-([0-9]{8,20})", path.name)
    return int(number[1]) if number and path.name == _name(int(number[1])) else -1


def newest_first(folder: Path) -> Iterator[Path]:
    """Checkpoints of a run that can be resumed from, newest first, whole or not. What is named after no step comes
    before all: it may have been the newest."""
    yield from sorted(
        folder.glob("step-*"), key=lambda path: (step_of(path) < 0, step_of(path), path.name), reverse=True
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong in reading a checkpoint means that it is not whole. Raises Corrupt."""
    try:
        yield
    except Corrupt:
        raise
    except Refusal as refusal:
        problem = refusal.problem
        raise Corrupt(f"{problem.what}: {problem.fact} ({problem.where})") from None
    except Exception as error:
        raise Corrupt(_reason(error) or type(error).__name__) from None


def _file(path: Path, name: str) -> Path:
    """A file of a checkpoint."""
    if not re.fullmatch(r"[a-z0-9-]+\.(safetensors|json)", name):
        raise Corrupt(f"{name!r} is no name of one of its files")
    if not (path / name).is_file():  # A pipe would be waited for.
        raise Corrupt(f"it has no {name}")
    return path / name


def _state(path: Path) -> CheckpointState:
    """What a checkpoint says of itself, as far as that does not contradict itself. Raises Corrupt."""
    with _reading(path):
        with open(_file(path, _STATE), "rb") as file:
            content = file.read(HEADERS)
        saved = parse_json(content, CheckpointState, path / _STATE)
        written = content_hash(msgspec.json.decode(content)["progress"])
        if saved.progress_hash not in (None, written):
            raise Corrupt(f"the progress in {_STATE} does not match its checksum")
        if path.name.startswith("step-") and step_of(path) != saved.progress.step:
            raise Corrupt(f"its {_STATE} is of step {saved.progress.step}, its name is not")
        return saved


def _has_its_files(path: Path) -> bool:
    """A cheap look at whether a checkpoint is whole."""
    with suppress(Corrupt, OSError):
        return all(_file(path, name) for name in _state(path).sha256)
    return False


def read(path: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of one file of a verified checkpoint. Raises Corrupt."""
    with _reading(path):
        return load_file(_file(path, name))


def verify(path: Path, files: Sequence[str] | None = None) -> TrainingProgress:
    """Check a checkpoint's files, all unless named, against their checksums; returns its progress or raises Corrupt."""
    saved = _state(path)
    with _reading(path):
        for name in saved.sha256 if files is None else files:
            if _sha256(_file(path, name)) != saved.sha256.get(name):
                raise Corrupt(f"{name} does not match its checksum ({format_bytes((path / name).stat().st_size)})")
    return saved.progress


def shapes_of(plan: Plan) -> dict[str, Shapes]:
    """What a checkpoint of a plan holds, by file."""
    with torch.device("meta"):
        model = {name: tuple(parameter.shape) for name, parameter in Decoder(plan.model).named_parameters()}

    def of(*kinds: str) -> Shapes:
        return {f"{kind}.{name}": shape for kind in kinds for name, shape in model.items()}

    if plan.sync is None:
        return {MODEL: model, OPTIMIZER: of("exp_avg", "exp_avg_sq")}
    replicas = {replica(r): of("exp_avg", "exp_avg_sq", "master") for r in range(len(plan.replicas))}
    return {MODEL: model, OPTIMIZER: of("momentum"), **replicas}


def replica(number: int) -> str:
    """The file of one of several replicas."""
    return f"replica-{number}.safetensors"


def check_tensors(path: Path, files: Mapping[str, Shapes]) -> None:
    """Raises Corrupt unless these files hold exactly these tensors, of which none is read."""
    named = _state(path).sha256
    for name, shapes in files.items():
        if name not in named:
            raise Corrupt(f"its {_STATE} names no {name}")
        with _reading(path), safe_open(_file(path, name), "pt") as file:
            views = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
            stored = {key: (view.get_dtype(), tuple(view.get_shape())) for key, view in views.items()}
        for key in sorted(shapes.keys() | stored.keys()):
            wanted = ("F32", shapes[key]) if key in shapes else None
            if stored.get(key) != wanted:
                raise Corrupt(f"{name} has {_said(stored.get(key))} for {key} where the plan has {_said(wanted)}")


def _said(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[0]} {list(tensor[1])}"


def progress_of(path: Path) -> tuple[TrainingProgress, str]:
    """The progress that a checkpoint's weights are from, and their SHA-256. Raises Corrupt."""
    saved = _state(path)
    return saved.progress, saved.sha256[MODEL]


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of a checkpoint or of `best`, by parameter name. Raises Corrupt."""
    verify(path, (MODEL,))
    return read(path, MODEL)
