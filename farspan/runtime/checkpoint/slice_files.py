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
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from farspan.domain.problems import Refusal
from farspan.domain.struct_files import parse_json
from farspan.runtime.checkpoint.manifest import (
    CHECKSUM_BLOCK_BYTES,
    MANIFEST,
    Corrupt,
    GlobalTensor,
    Manifest,
    StoredSlice,
    checksum_of,
    intersect_boxes,
    key_of,
    view_box,
)

if TYPE_CHECKING:  # A process that verifies a checkpoint loads no PyTorch.
    from torch import Tensor

#: Bytes of a safetensors header, and of a manifest, at most.
MOST_HEADER = 2**26
MOST_MANIFEST = 2**28
#: A safetensors file begins with the length of its header, little-endian.
HEADER_LENGTH_BYTES = 8


class OwnedSlice(NamedTuple):
    """A box of a global tensor of this shape, with its values: contiguous, fp32, in the host's
    memory."""

    name: str
    global_shape: tuple[int, ...]
    at: tuple[int, ...]
    values: Tensor


#: The content of a file, by tensor: its shape, and the slices.
Listing = dict[str, GlobalTensor]


def put_slices(
    slices: Sequence[OwnedSlice], file: str, put: Callable[[bytes | memoryview], object]
) -> Listing:
    """Give the content of a safetensors file of these slices to `put`, piece by piece; return the
    manifest's entries for it."""
    header = dict[str, object]()
    end = 0
    for part in slices:
        begin = end
        end += part.values.nbytes
        entry = {"dtype": "F32", "shape": list(part.values.shape), "data_offsets": [begin, end]}
        header[key_of(part.name, part.at)] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_LENGTH_BYTES)
    put(len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text)
    listing: Listing = {}
    for part in slices:
        content = memoryview(part.values.numpy().data).cast("B")
        sums = list[str]()
        for start in range(0, len(content), CHECKSUM_BLOCK_BYTES):
            block = content[start : start + CHECKSUM_BLOCK_BYTES]
            sums.append(checksum_of_block(block))
            put(block)
        shape = tuple(part.values.shape)
        stored = StoredSlice(file=file, at=part.at, shape=shape, sha256=tuple(sums))
        earlier = listing[part.name].slices if part.name in listing else ()
        listing[part.name] = GlobalTensor(shape=part.global_shape, slices=(*earlier, stored))
    return listing


def checksum_of_block(block: bytes | memoryview) -> str:
    return hashlib.sha256(block).hexdigest()[:16]


@contextmanager
def corrupt_on_error() -> Iterator[None]:
    """Raise Corrupt for any error in reading a checkpoint: it is not whole."""
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
    """Return in one line why something could not be read or written."""
    if isinstance(error, Refusal):
        return error.problem.fact
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())[:300]


def open_regular_file(path: Path) -> int:
    """Open a regular file for reading: no link, which could lead out of the run, and no pipe,
    which would be waited for. Raises Corrupt."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise Corrupt(f"it has no {path.name}") from None
    except OSError as error:
        raise Corrupt(f"{path.name}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Corrupt(f"it has no {path.name}")
    return descriptor


def read_small(path: Path, most: int) -> bytes:
    """Read a file of at most `most` bytes. Raises Corrupt."""
    with corrupt_on_error(), open(open_regular_file(path), "rb") as file:
        content = file.read(most + 1)
        if len(content) > most:
            raise Corrupt(f"{path.name} has more than {most} bytes")
        return content


def read_manifest(path: Path) -> Manifest:
    """Read the manifest in a checkpoint's folder, and check that it is consistent. Raises
    Corrupt."""
    content = read_small(path / MANIFEST, MOST_MANIFEST)
    with corrupt_on_error():
        manifest = parse_json(content, Manifest, path / MANIFEST)
        raw = msgspec.json.decode(content)
        if checksum_of(raw["progress"], raw["tensors"]) != manifest.checksum:
            raise Corrupt(f"{MANIFEST} does not match its checksum")
        for tensor in manifest.tensors.values():
            for part in tensor.slices:
                num_sums = len(part.sha256)
                num_blocks = -(-4 * math.prod(part.shape) // CHECKSUM_BLOCK_BYTES)
                if num_sums != num_blocks:
                    shape = list(part.shape)
                    raise Corrupt(
                        f"{MANIFEST} has {num_sums} checksums for a slice of shape {shape}"
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
        with corrupt_on_error():
            for part in self.tensors[name].slices:
                shared = intersect_boxes(at, tuple(target.shape), part.at, part.shape)
                if shared is None:
                    continue
                low, shape = shared
                begin = part.at
                start = 0
                stop = 1
                if shape:
                    # The rows of the slice that the box reaches into.
                    start = low[0] - part.at[0]
                    stop = start + shape[0]
                    begin = (low[0], *part.at[1:])
                rows = self._read_rows(name, part, start, stop)
                view_box(target, at, low, shape).copy_(view_box(rows, begin, low, shape))
                filled += math.prod(shape)
        if filled != target.numel():
            raise Corrupt(f"{name} is not whole")

    def whole(self, name: str) -> Tensor:
        """Read all of a tensor. Raises Corrupt."""
        import torch

        if name not in self.tensors:
            raise Corrupt(f"it has no {name}")
        shape = self.tensors[name].shape
        values = torch.empty(shape)
        self.fill(name, (0,) * len(shape), values)
        return values

    def verify(self) -> None:
        """Read every block. Raises Corrupt."""
        with corrupt_on_error():
            for name, tensor in self.tensors.items():
                for part in tensor.slices:
                    num_rows = part.shape[0] if part.shape else 1
                    self._read_blocks(name, part, 0, num_rows)

    def _read_rows(self, name: str, part: StoredSlice, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of a slice, from whole blocks with the right checksums."""
        import torch

        content, skipped = self._read_blocks(name, part, start, stop)
        count = (stop - start) * math.prod(part.shape[1:])
        numbers = np.frombuffer(content, np.float32, count, skipped)
        shape = (stop - start, *part.shape[1:]) if part.shape else ()
        return torch.from_numpy(numbers).view(shape)

    def _read_blocks(
        self, name: str, part: StoredSlice, start: int, stop: int
    ) -> tuple[bytearray, int]:
        """Read the whole blocks that hold rows [start, stop) of a slice, and verify them; return
        them with the bytes before the first row."""
        row_bytes = 4 * math.prod(part.shape[1:])
        size = 4 * math.prod(part.shape)
        first = start * row_bytes
        last = stop * row_bytes
        first_block = first // CHECKSUM_BLOCK_BYTES
        block_from = first_block * CHECKSUM_BLOCK_BYTES
        block_to = min(size, -(-last // CHECKSUM_BLOCK_BYTES) * CHECKSUM_BLOCK_BYTES)
        content = bytearray(block_to - block_from)
        view = memoryview(content)
        descriptor, offset = self._locate_slice(name, part)
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            file.seek(offset + block_from)
            unread = view
            while unread:
                if not (taken := file.readinto(unread)):
                    raise Corrupt(f"{part.file} ends early")
                unread = unread[taken:]
        self.read_bytes += len(content)
        for number, at in enumerate(range(0, len(content), CHECKSUM_BLOCK_BYTES), first_block):
            if checksum_of_block(view[at : at + CHECKSUM_BLOCK_BYTES]) != part.sha256[number]:
                raise Corrupt(f"{part.file} does not match its checksum")
        return content, first - block_from

    def _locate_slice(self, name: str, part: StoredSlice) -> tuple[int, int]:
        """Return the descriptor of a slice's file, and the offset of the slice in it."""
        descriptor, header, begin = self._open_file(part.file)
        key = key_of(name, part.at)
        shape = list(part.shape)
        entry = header.get(key)
        if not isinstance(entry, dict):
            raise Corrupt(f"{part.file} has nothing for {key} where F32 {shape} belongs")
        if entry.get("dtype") != "F32" or entry.get("shape") != shape:
            actual = f"{entry['dtype']} {entry['shape']}" if "shape" in entry else "nothing"
            raise Corrupt(f"{part.file} has {actual} for {key} where F32 {shape} belongs")
        low, high = entry["data_offsets"]
        size = 4 * math.prod(shape)
        if not 0 <= low <= high or high - low != size:
            raise Corrupt(f"{part.file} has other bytes for {key}")
        return descriptor, begin + low

    def _open_file(self, name: str) -> tuple[int, dict[str, object], int]:
        if name not in self._open:
            descriptor = open_regular_file(self.path / name)
            self._open[name] = descriptor, {}, 0
            size = int.from_bytes(os.pread(descriptor, HEADER_LENGTH_BYTES, 0), "little")
            file_size = os.fstat(descriptor).st_size
            if size > min(MOST_HEADER, file_size):
                raise Corrupt(f"{name} has a header beyond its end")
            header = msgspec.json.decode(os.pread(descriptor, size, HEADER_LENGTH_BYTES))
            if not isinstance(header, dict):
                raise Corrupt(f"{name} has a header of another shape")
            self._open[name] = descriptor, header, HEADER_LENGTH_BYTES + size
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
