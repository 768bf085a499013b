"""The copy of a run in one place: which files it has under which names, and how they are read.

Checkpoints lie in folders named after their content, `step-00000120.1f2e3d4c`. Their files are
written once and never changed, and manifest.json comes last: without it a folder does not count.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from farspan.domain.corpus import TOKEN_FILES
from farspan.domain.epoch_fence import Ledger, Number
from farspan.domain.own_files import open_own
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load, parse_json
from farspan.domain.units import format_bytes
from farspan.launch.copies import CopyError, CopyPlace
from farspan.models._base_files import TEMPLATES

T = TypeVar("T")
MANIFEST = "manifest.json"
#: Bytes of a run's own files at most, of its events, of a manifest, and of all files of one run.
MAX_RUN_FILE_BYTES = 2**28
MAX_EVENTS_BYTES = 2**36
MAX_RUN_BYTES = 2**44
#: Files of a run that are written once; those that a start or a save changes, run.json last: it
#: makes the folder a copy.
FIXED_FILES = ("corpus.json", "tokenizer.json")
CHANGED_FILES = (
    "epochs.json",
    "events.jsonl",
    "estimate.json",
    "cluster.json",
    "cluster.whole.json",
    "run.yaml",
    "plan.json",
    "run.json",
)
CHECKPOINT = re.compile(r"(best|step-(\d{8,20}))\.[0-9a-f]{8}")
COPIED_FILE = re.compile(r"part-\d{1,10}\.safetensors|manifest\.json")
#: Other files of a copy that may be fetched.
OTHER_FILE = re.compile(
    rf"corpus/({'|'.join(TOKEN_FILES)})|plans/[0-9a-f]{{16}}\.json"
    r"|initial/[^/\0]{1,200}\.(json|safetensors)"
    rf"|base/({TEMPLATES}/)?[A-Za-z0-9_][^/\0]{{0,199}}"
)


class CopiedCheckpoint(NamedTuple):
    """A whole checkpoint of a copy: its folder there, its name in a run, its step (-1 of the best
    weights), and the bytes of its files."""

    folder: str
    name: str
    step: int
    files: dict[str, int]


class _Progress(msgspec.Struct, frozen=True):
    epoch: Number = 0


class _Manifest(msgspec.Struct, frozen=True):
    """The part of a checkpoint's manifest that names the start which wrote it."""

    progress: _Progress


def run_slug(name: str) -> str:
    """Return a run's name as every kind of place can hold it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "run"


def copy_name(run: RunFolder) -> str:
    """Return the folder of a run's copy: no other run has it."""
    return f"{run_slug(run.path.absolute().name)}-{load(run.record, RunRecord).identity}"


class CopiedRun:
    """The copy of one run in a place, as it stands now."""

    def __init__(self, place: CopyPlace, folder: str) -> None:
        self.place = place
        self.folder = folder

    def list_files(self) -> dict[str, int]:
        """Return the bytes of all files, by their names in the copy. Raises CopyError."""
        files = self.place.list_files(self.folder)
        if sum(files.values()) > MAX_RUN_BYTES:
            raise CopyError(f"it lists more than {format_bytes(MAX_RUN_BYTES)} for one run")
        return files

    def read_file(self, name: str, most: int = MAX_RUN_FILE_BYTES) -> bytes | None:
        return self.place.read_file(f"{self.folder}/{name}", most)

    def read_record(self) -> RunRecord | None:
        """Return the run's record; None where there is no copy. Raises CopyError for a damaged
        one."""
        content = self.read_file("run.json")
        return None if content is None else self._parse(content, RunRecord, "run.json")

    def read_ledger(self) -> Ledger | None:
        """Return the ledger of the run's starts; None where there is none. Raises CopyError."""
        content = self.read_file("epochs.json")
        return None if content is None else self._parse(content, Ledger, "epochs.json")

    def read_epoch(self, checkpoint: CopiedCheckpoint) -> int:
        """Return the start of the run that wrote a checkpoint. Raises CopyError."""
        name = f"checkpoints/{checkpoint.folder}/{MANIFEST}"
        content = self.read_file(name) or b""
        return self._parse(content, _Manifest, name).progress.epoch

    def fetch_checkpoint(self, checkpoint: CopiedCheckpoint, folder: Path) -> None:
        """Fetch a checkpoint's files into a new folder. Raises CopyError and OSError."""
        folder.mkdir(parents=True)
        for name, size in checkpoint.files.items():
            self.fetch_file(f"checkpoints/{checkpoint.folder}/{name}", folder / name, size)

    def fetch_file(self, name: str, path: Path, size: int) -> None:
        with open_own(path, "wb") as file:
            self.place.fetch_file(f"{self.folder}/{name}", file, size)

    def _parse(self, content: bytes, kind: type[T], name: str) -> T:
        try:
            return parse_json(content, kind, f"{self.place.name}, {self.folder}/{name}")
        except Refusal as refusal:
            raise CopyError(f"{name} is damaged: {refusal.problem.fact}") from None


def list_checkpoints(files: dict[str, int]) -> list[CopiedCheckpoint]:
    """List the checkpoints of a copy that have their manifest, the newest first and the best
    weights last."""
    checkpoints = []
    for folder, contents in _checkpoint_folders(files).items():
        match = CHECKPOINT.fullmatch(folder)
        if match and MANIFEST in contents:
            step = -1 if match[2] is None else int(match[2])
            checkpoints.append(CopiedCheckpoint(folder, match[1], step, contents))
    return sorted(checkpoints, key=lambda each: each.step, reverse=True)


def list_other_files(files: dict[str, int]) -> Iterator[str]:
    """Yield the files of a copy that are neither a run's own nor a checkpoint's."""
    return (name for name in files if OTHER_FILE.fullmatch(name))


def checkpoint_folder_name(name: str, manifest: bytes) -> str:
    """Return the folder in a copy of a checkpoint with this manifest."""
    return f"{name}.{hashlib.sha256(manifest).hexdigest()[:8]}"


def _checkpoint_folders(files: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the files of each folder in `checkpoints`, by folder; others are left out."""
    folders: dict[str, dict[str, int]] = {}
    for name, size in files.items():
        top, _, rest = name.partition("/")
        folder, _, file = rest.partition("/")
        if top == "checkpoints" and COPIED_FILE.fullmatch(file):
            folders.setdefault(folder, {})[file] = size
    return folders


def outdated_files(files: dict[str, int], newest: int, keep: int, current: set[str]) -> list[str]:
    """List the files of checkpoints that a copy keeps no longer, manifests before what they name.

    The `current` ones stay, and the newest others up to step `newest` that make up `keep`.
    """
    kept = set(current)
    older = [each for each in list_checkpoints(files) if 0 <= each.step <= newest]
    steps = sum(folder.startswith("step-") for folder in current)
    for each in older:
        if each.folder not in kept and steps < keep:
            kept.add(each.folder)
            steps += 1
    outdated = []
    for folder, contents in _checkpoint_folders(files).items():
        if folder not in kept:
            ordered = sorted(contents, key=lambda name: name != MANIFEST)
            outdated += [f"checkpoints/{folder}/{name}" for name in ordered]
    return outdated
