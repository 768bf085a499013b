"""Files of a checkpoint: slices written as safetensors with a checksum for each block, and read by
the box.

A reader takes from a file what it needs of a slice, in whole blocks, and verifies each block that
it takes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from farspan.domain.codec import parse_json
from farspan.domain.problems import Refusal
from farspan.runtime.checkpoint.layout import (
    BLOCK,
    MANIFEST,
    Corrupt,
    GlobalTensor,
    Manifest,
    StoredSlice,
    checksum_of,
    key_of,
    overlap,
    within,
)

#: Bytes of a safetensors header, and of a manifest, at most.
MOST_HEADER = 2**26
MOST_MANIFEST = 2**28
#: A safetensors file begins with the length of its header, little-endian.
LENGTH = 8


class OwnedSlice(NamedTuple):
    """A box of a global tensor of this shape, with its values: contiguous, fp32, in the host's
    memory."""

    name: str
    global_shape: tuple[int, ...]
    at: tuple[int, ...]
    values: Tensor


#: What a file holds, by tensor: its shape, and the slices.
Listing = dict[str, GlobalTensor]


def put_slices(
    slices: Sequence[OwnedSlice], file: str, put: Callable[[bytes | memoryview], object]
) -> Listing:
    """Give the content of a safetensors file of these slices to `put`, piece by piece; what the
    manifest says of it."""
    header = dict[str, object]()
    end = 0
    for part in slices:
        header[key_of(part.name, part.at)] = {
            "dtype": "F32",
            "shape": list(part.values.shape),
            "data_offsets": [end, end + part.values.nbytes],
        }
        end += part.values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH)
    put(len(text).to_bytes(LENGTH, "little") + text)
    listed: dict[str, list[StoredSlice]] = {}
    for part in slices:
        content = memoryview(part.values.numpy().data).cast("B")
        sums = list[str]()
        for start in range(0, len(content), BLOCK):
            block = content[start : start + BLOCK]
            sums.append(digest(block))
            put(block)
        shape = tuple(part.values.shape)
        listed.setdefault(part.name, []).append(
            StoredSlice(file=file, at=part.at, shape=shape, sha256=tuple(sums))
        )
    shapes = {part.name: part.global_shape for part in slices}
    return {
        name: GlobalTensor(shape=shapes[name], slices=tuple(parts))
        for name, parts in listed.items()
    }


def digest(block: bytes | memoryview) -> str:
    return hashlib.sha256(block).hexdigest()[:16]


@contextmanager
def reading() -> Iterator[None]:
    """Whatever goes wrong in reading a checkpoint means that it is not whole. Raises Corrupt."""
    try:
        yield
    except Corrupt:
        raise
    except Refusal as refusal:
        problem = refusal.problem
        raise Corrupt(f"{problem.what}: {problem.fact} ({problem.where})") from None
    except Exception as error:
        raise Corrupt(reason(error) or type(error).__name__) from None


def reason(error: Exception) -> str:
    """Why something could not be read or written, in a line."""
    if isinstance(error, Refusal):
        return error.problem.fact
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())[:300]


def opened(path: Path) -> int:
    """The descriptor of a regular file: no link, which could lead out of the run, and no pipe,
    which would be waited for. Raises Corrupt."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        raise Corrupt(
            f"it has no {path.name}" if missing else f"{path.name}: {error.strerror}"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Corrupt(f"it has no {path.name}")
    return descriptor


def read_small(path: Path, most: int) -> bytes:
    """A file of so many bytes at most. Raises Corrupt."""
    with reading(), open(opened(path), "rb") as file:
        content = file.read(most + 1)
        if len(content) > most:
            raise Corrupt(f"{path.name} has more than {most} bytes")
        return content


def read_manifest(path: Path) -> Manifest:
    """The manifest in a checkpoint's folder, as far as it does not contradict itself. Raises
    Corrupt."""
    content = read_small(path / MANIFEST, MOST_MANIFEST)
    with reading():
        manifest = parse_json(content, Manifest, path / MANIFEST)
        raw = msgspec.json.decode(content)
        if checksum_of(raw["progress"], raw["tensors"]) != manifest.checksum:
            raise Corrupt(f"{MANIFEST} does not match its checksum")
        for part in (part for tensor in manifest.tensors.values() for part in tensor.slices):
            if len(part.sha256) != -(-4 * math.prod(part.shape) // BLOCK):
                raise Corrupt(
                    f"{MANIFEST} has {len(part.sha256)} checksums for a slice of shape "
                    f"{list(part.shape)}"
                )
        return manifest


class Stored:
    """The tensors of one checkpoint: boxes of them are read, and verified, as they are asked
    for."""

    def __init__(self, path: Path, tensors: Mapping[str, GlobalTensor]) -> None:
        self.path = path
        self.tensors = tensors
        #: Bytes of tensors read so far.
        self.read_bytes = 0
        self._open: dict[str, tuple[int, dict[str, object], int]] = {}

    def fill(self, name: str, at: tuple[int, ...], target: Tensor) -> None:
        """Copy the box of a tensor that begins at `at` into `target`. Raises Corrupt."""
        if name not in self.tensors:
            raise Corrupt(f"it has no {name}")
        filled = 0
        with reading():
            for part in self.tensors[name].slices:
                if (shared := overlap(at, tuple(target.shape), part.at, part.shape)) is None:
                    continue
                low, shape = shared
                rows = (low[0] - part.at[0], low[0] - part.at[0] + shape[0]) if shape else (0, 1)
                lines = self._rows(name, part, *rows)
                begin = (part.at[0] + rows[0], *part.at[1:]) if shape else ()
                within(target, at, low, shape).copy_(within(lines, begin, low, shape))
                filled += math.prod(shape)
        if filled != target.numel():
            raise Corrupt(f"{name} is not whole")

    def whole(self, name: str) -> Tensor:
        """All of a tensor. Raises Corrupt."""
        if name not in self.tensors:
            raise Corrupt(f"it has no {name}")
        shape = self.tensors[name].shape
        values = torch.empty(shape)
        self.fill(name, (0,) * len(shape), values)
        return values

    def verify(self) -> None:
        """Read every block. Raises Corrupt."""
        with reading():
            for name, tensor in self.tensors.items():
                for part in tensor.slices:
                    self._rows(name, part, 0, part.shape[0] if part.shape else 1)

    def _rows(self, name: str, part: StoredSlice, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a slice, from whole blocks whose checksums are right."""
        line = 4 * math.prod(part.shape[1:])
        size = 4 * math.prod(part.shape)
        first = start * line
        last = stop * line
        block_from = first - first % BLOCK
        block_to = min(size, -(-last // BLOCK) * BLOCK)
        content = bytearray(block_to - block_from)
        descriptor, offset = self._place(name, part)
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            file.seek(offset + block_from)
            view = memoryview(content)
            while view:
                if not (taken := file.readinto(view)):
                    raise Corrupt(f"{part.file} ends early")
                view = view[taken:]
        self.read_bytes += len(content)
        _verify(part, content, block_from)
        values = torch.from_numpy(
            np.frombuffer(content, np.float32, (last - first) // 4, first - block_from)
        )
        return values.view(stop - start, *part.shape[1:]) if part.shape else values.view(())

    def _place(self, name: str, part: StoredSlice) -> tuple[int, int]:
        """The descriptor of a slice's file, and where the slice begins there."""
        descriptor, header, begin = self._file(part.file)
        key = key_of(name, part.at)
        entry = header.get(key)
        if (
            not isinstance(entry, dict)
            or entry.get("dtype") != "F32"
            or entry.get("shape") != list(part.shape)
        ):
            has = (
                f"{entry['dtype']} {entry['shape']}"
                if isinstance(entry, dict) and "shape" in entry
                else "nothing"
            )
            raise Corrupt(f"{part.file} has {has} for {key} where F32 {list(part.shape)} belongs")
        low, high = entry["data_offsets"]
        if not 0 <= low <= high or high - low != 4 * math.prod(part.shape):
            raise Corrupt(f"{part.file} has other bytes for {key}")
        return descriptor, begin + low

    def _file(self, name: str) -> tuple[int, dict[str, object], int]:
        if name not in self._open:
            descriptor = opened(self.path / name)
            self._open[name] = descriptor, {}, 0
            size = int.from_bytes(os.pread(descriptor, LENGTH, 0), "little")
            if size > min(MOST_HEADER, os.fstat(descriptor).st_size):
                raise Corrupt(f"{name} has a header beyond its end")
            header = msgspec.json.decode(os.pread(descriptor, size, LENGTH))
            if not isinstance(header, dict):
                raise Corrupt(f"{name} has a header of another shape")
            self._open[name] = descriptor, header, LENGTH + size
        return self._open[name]

    def __enter__(self) -> Stored:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for descriptor, _, _ in self._open.values():
            os.close(descriptor)


def _verify(part: StoredSlice, content: bytearray, start: int) -> None:
    """Raises Corrupt unless these bytes of a slice, which are whole blocks, match their
    checksums."""
    view = memoryview(content)
    for number, at in enumerate(range(0, len(content), BLOCK), start // BLOCK):
        if digest(view[at : at + BLOCK]) != part.sha256[number]:
            raise Corrupt(f"{part.file} does not match its checksum")
