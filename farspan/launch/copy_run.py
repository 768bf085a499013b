"""Writes the copy of a run to one place: what is needed to continue it elsewhere.

The run's own files, its text, the model that it starts from, and its newest checkpoint with the
best weights.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farspan.corpus.find_prepared import find_corpus
from farspan.domain.corpus import TOKEN_FILES, CorpusManifest
from farspan.domain.epoch_fence import readable_ledger
from farspan.domain.own_files import open_own
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load
from farspan.launch.copied_run import (
    CHANGED_FILES,
    FIXED_FILES,
    MANIFEST,
    CopiedRun,
    checkpoint_folder_name,
    copy_name,
    list_checkpoints,
    outdated_files,
)
from farspan.launch.copies import CopyError, CopyPlace
from farspan.launch.run_folder_transfer import MODEL_FILES
from farspan.launch.transfer_pacing import COPIES_SHARE, PacedReader, Pacer, automatic_rate
from farspan.models._base_files import resolve_inside

#: The folder in a run's that holds hard links to what is being copied: rank 0 may delete it
#: meanwhile.
LINKS_FOLDER = ".copied"
#: A checkpoint that is deleted while it is linked gives way to a newer one, so many times.
MAX_LINK_TRIES = 5


@contextmanager
def linked_checkpoints(run: RunFolder) -> Iterator[list[Path]]:
    """Link the best weights and the newest checkpoint of a run into a folder of their own, in this
    order; nothing where there is none yet."""
    folder = run.path / LINKS_FOLDER
    try:
        yield _link_checkpoints(run, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _link_checkpoints(run: RunFolder, folder: Path) -> list[Path]:
    for _ in range(MAX_LINK_TRIES):
        step = run.newest_checkpoint()
        if step < 0:
            return []
        shutil.rmtree(folder, ignore_errors=True)
        links = []
        try:
            folder.mkdir()  # No parents: a run's folder that was deleted is not made again.
            # The best weights first: the checkpoint records how good they are.
            for name in ("best", f"step-{step:08d}"):
                if (run.checkpoints / name / MANIFEST).is_file():
                    links.append(_link_files(run.checkpoints / name, folder / name))
        except FileNotFoundError:
            continue
        return links
    raise CopyError("checkpoints are deleted faster than they are copied")


def _link_files(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in sorted(source.iterdir()):
        try:
            os.link(path, target / path.name)
        except FileNotFoundError:
            raise
        except OSError:  # A file system without hard links.
            with open(path, "rb") as file, open_own(target / path.name, "wb") as copied:
                shutil.copyfileobj(file, copied)
    return target


def copy_run(
    run: RunFolder,
    place: CopyPlace,
    checkpoints: list[Path],
    pacer: Pacer,
    *,
    rate: float | None = None,
    window_s: float | None = None,
) -> None:
    """Bring the copy of a run up to date: its files, and these checkpoints.

    Bytes go at `rate`, or by `window_s`, the time between two checkpoints, so that they take half
    of it; without both as fast as they can. Raises CopyError, OSError, and Refusal where the run
    itself is damaged.
    """
    copy = CopiedRun(place, copy_name(run))
    _require_own(copy, run)
    plan = run.load_plan()
    there = copy.list_files()
    writer = _Writer(copy, pacer)
    if run.epochs.exists():
        writer.put_content("epochs.json", run.epochs.read_bytes())

    # The files that are not there yet, and their bytes.
    fixed = _list_fixed_files(run)
    missing = dict[str, Path]()
    new_checkpoints = dict[str, Path]()
    for name, path in fixed.items():
        if there.get(name) != path.stat().st_size:
            missing[name] = path
    current = set[str]()
    newest = -1
    for folder in checkpoints:
        target = checkpoint_folder_name(folder.name, (folder / MANIFEST).read_bytes())
        current.add(target)
        if match := re.fullmatch(r"step-(\d+)", folder.name):
            newest = int(match[1])
        if target not in {each.folder for each in list_checkpoints(there)}:
            # The manifest comes last, the best weights before the checkpoint that knows of them.
            files = sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST)
            new_checkpoints |= {f"checkpoints/{target}/{path.name}": path for path in files}
    changed = {name: run.path / name for name in CHANGED_FILES if (run.path / name).exists()}
    if rate is None and window_s is not None:
        paths = (*missing.values(), *changed.values(), *new_checkpoints.values())
        size = sum(path.stat().st_size for path in paths)
        rate = automatic_rate(size, window_s, COPIES_SHARE)
    pacer.set_rate(rate)

    for name, path in missing.items():
        writer.put_path(name, path)
    # The events come before the checkpoint whose steps they record: a run that is restored from it
    # makes none of these again.
    for name, path in changed.items():
        writer.put_path(name, path, verify=False)
    for name, path in new_checkpoints.items():
        writer.put_path(name, path)
    if newest >= 0:
        outdated = outdated_files(copy.list_files(), newest, plan.train.keep, current)
        place.delete_files([f"{copy.folder}/{name}" for name in outdated])


def write_ledger(run: RunFolder, copy: CopiedRun) -> None:
    """Write the run's ledger of starts to its copy. Raises CopyError where that is of a later
    start."""
    _require_own(copy, run)
    _Writer(copy, Pacer()).put_content("epochs.json", run.epochs.read_bytes())


def _require_own(copy: CopiedRun, run: RunFolder) -> None:
    """Raise CopyError where the copy is another run's, or a later start of this run has written
    it."""
    record = copy.read_record()
    own = load(run.record, RunRecord).identity
    if record is not None and record.identity != own:
        raise CopyError(f"{copy.folder} there is the copy of another run, {record.identity}")
    ledger = copy.read_ledger()
    epoch = readable_ledger(run.epochs).epoch
    if ledger is not None and ledger.epoch > epoch:
        raise CopyError(
            f"the copy there is of start {ledger.epoch} of the run, this is start {epoch}: the run "
            "goes on elsewhere"
        )


def _list_fixed_files(run: RunFolder) -> dict[str, Path]:
    """Return the files of a run that never change, by their names in a copy. A corpus that is not
    here is left out: it can be prepared again."""
    files = {name: run.path / name for name in FIXED_FILES}
    for path in sorted(run.plans.glob("*.json")):
        files[f"plans/{path.name}"] = path
    record = load(run.record, RunRecord)
    digest = load(run.corpus, CorpusManifest).hash
    corpus = find_corpus(record.corpus_folder, digest)
    if corpus is not None:
        files |= {f"corpus/{name}": corpus / name for name in TOKEN_FILES}
    if record.initial is not None:
        initial = Path(record.initial)
        for path in sorted(initial.iterdir()):
            if path.suffix in MODEL_FILES and path.is_file():
                files[f"initial/{path.name}"] = resolve_inside(path, initial)
    for path in sorted(run.base.rglob("*")):
        if path.is_file():
            name = path.relative_to(run.base).as_posix()
            files[f"{run.base.name}/{name}"] = resolve_inside(path, run.base)
    return files


class _Writer:
    """Puts files into a copy, no faster than a pacer allows."""

    def __init__(self, copy: CopiedRun, pacer: Pacer) -> None:
        self._copy = copy
        self._pacer = pacer

    def put_path(self, name: str, path: Path, *, verify: bool = True) -> None:
        """Put a file as it is now; with `verify` what is stored has the checksum of what was read.
        Raises CopyError and OSError."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = PacedReader(file, size, self._pacer)
            self._copy.place.put_file(f"{self._copy.folder}/{name}", content, size)
        if verify:
            stored = self._copy.place.checksum(f"{self._copy.folder}/{name}")
            if stored not in (None, content.sha256):
                self._copy.place.delete_files([f"{self._copy.folder}/{name}"])
                raise CopyError(f"{name} was stored with other bytes than were sent")

    def put_content(self, name: str, content: bytes) -> None:
        self._copy.place.put_file(f"{self._copy.folder}/{name}", io.BytesIO(content), len(content))
