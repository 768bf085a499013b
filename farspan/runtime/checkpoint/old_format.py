"""Checkpoints of earlier versions: whole tensors in one file a kind, written by rank 0, and a
`state.json`.

They are read as what a manifest says; every file is verified against its checksum first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import msgspec

from farspan.domain.codec import content_hash, parse_json
from farspan.runtime.checkpoint.manifest import (
    Corrupt,
    GlobalTensor,
    Manifest,
    StoredSlice,
    TrainingProgress,
)
from farspan.runtime.checkpoint.stored import LENGTH, MOST_HEADER, opened, read_small, reading

STATE = "state.json"
MOST_STATE = 2**20
FILE = re.compile(r"(model|optimizer|replica-[0-9]{1,6})\.safetensors")


class OldState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`state.json`: the progress, and the SHA-256 of the other files."""

    progress: TrainingProgress
    sha256: dict[str, str]
    #: `content_hash` of the progress as it was written; None in a checkpoint from before there was
    #: one.
    progress_hash: str | None = None


def is_old(path: Path) -> bool:
    return os.path.lexists(path / STATE)


def files(path: Path) -> dict[str, str]:
    """The files that a checkpoint says it has, with their SHA-256. Raises Corrupt."""
    with reading():
        return parse_json(read_small(path / STATE, MOST_STATE), OldState, path / STATE).sha256


def read_old(path: Path, only: str | None = None) -> Manifest:
    """An earlier version's checkpoint, or one file of it, as a manifest; its files match their
    checksums. Raises Corrupt."""
    content = read_small(path / STATE, MOST_STATE)
    with reading():
        saved = parse_json(content, OldState, path / STATE)
        if saved.progress_hash not in (
            None,
            content_hash(msgspec.json.decode(content)["progress"]),
        ):
            raise Corrupt(f"the progress in {STATE} does not match its checksum")
        tensors: dict[str, GlobalTensor] = {}
        for file, wanted in saved.sha256.items():
            if not FILE.fullmatch(file):
                raise Corrupt(f"{file!r} is no name of one of its files")
            if only in (None, file):
                tensors |= _tensors(path, file, wanted)
        return Manifest(progress=saved.progress, tensors=tensors, checksum="")


def _tensors(path: Path, file: str, wanted: str) -> dict[str, GlobalTensor]:
    with open(opened(path / file), "rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != wanted:
            raise Corrupt(f"{file} does not match its checksum")
        stream.seek(0)
        size = int.from_bytes(stream.read(LENGTH), "little")
        if size > MOST_HEADER:
            raise Corrupt(f"{file} has a header of {size} bytes")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    tensors = {}
    for key, entry in header.items():
        shape = tuple(entry["shape"])
        part = StoredSlice(file=file, at=(0,) * len(shape), shape=shape, key=key)
        tensors[_name(file, key)] = GlobalTensor(shape=shape, slices=(part,))
    return tensors


def _name(file: str, key: str) -> str:
    """A tensor's name in a manifest, of its file and its key there (`exp_avg.tok.weight`)."""
    if file == "model.safetensors":
        return f"model/{key}"
    kind, _, name = key.partition(".")
    replica = "" if file == "optimizer.safetensors" else f"{file.removesuffix('.safetensors')}/"
    return f"{replica}{kind}/{name}"
