"""Reading token files: memory-mapped, so that a corpus of any size costs no memory to open, and
verified block by block as they are read."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from farspan.domain.corpus import (
    BLOCK_BYTES,
    CHECKSUM_BYTES,
    SENT,
    SPLITS,
    CorpusManifest,
    SplitName,
)
from farspan.domain.problems import Refusal

#: What tells one split's bytes from another's: so many blocks of so many bytes, a quarter of a
#: second to read.
FINGERPRINT_BLOCKS = 256
FINGERPRINT_BLOCK_BYTES = 2**20
#: The command that makes a corpus whole where no run is known that it belongs to.
PREPARE_COMMAND = "farspan prepare run.yaml"


class VerifiedArray:
    """An array in a memory-mapped file. Each block of the file is hashed once, when a slice first
    reads from it: a slice raises Refusal (corpus-damaged) for a block of other bytes."""

    def __init__(
        self, values: npt.NDArray[Any], checksums: bytes, path: Path, remedy: str = PREPARE_COMMAND
    ) -> None:
        #: The values without any check, for a caller that reads little of many blocks.
        self.unverified = np.asarray(values)
        self.checksums = checksums
        self._bytes = values.view(np.uint8)
        self._path = path
        self._remedy = remedy
        #: One byte for each block: 1 where it was verified.
        self._verified = bytearray(-(-len(self._bytes) // BLOCK_BYTES))

    def __len__(self) -> int:
        return len(self.unverified)

    def __getitem__(self, part: slice | int) -> Any:
        if isinstance(part, int):
            start = part % max(1, len(self))
            stop = start + 1
        else:
            start, stop, _ = part.indices(len(self))
        self._verify_span(start, stop)
        return self.unverified[part]

    def read_rows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
        """Return the `length` values (rows, length) from each start on, all of them in the file."""
        if self._verified.find(0) >= 0:
            for start in starts.tolist():
                self._verify_span(start, start + length)
        return read_rows(self.unverified, starts, length)

    def verify(self) -> None:
        """Verify every block. Raises Refusal (corpus-damaged)."""
        self._verify_blocks(0, len(self._verified))

    def _verify_span(self, start: int, stop: int) -> None:
        """Verify the blocks of the values `start` to `stop - 1` that were not read before."""
        size = self.unverified.itemsize
        first = start * size // BLOCK_BYTES
        last = -(-stop * size // BLOCK_BYTES)
        if self._verified.find(0, first, last) >= 0:
            self._verify_blocks(first, last)

    def _verify_blocks(self, first: int, last: int) -> None:
        """Verify the blocks `first` to `last - 1` that were not read before."""
        for block in range(first, last):
            if self._verified[block]:
                continue
            start = block * BLOCK_BYTES
            content = self._bytes[start : start + BLOCK_BYTES]
            at = block * CHECKSUM_BYTES
            expected = self.checksums[at : at + CHECKSUM_BYTES]
            if block_checksum(content.data) != expected:
                _disown_copy(self._path.parent)
                raise _damaged_file(
                    self._path,
                    f"the block at byte {start} (of {len(content)} bytes) has another checksum "
                    "than when it was prepared",
                    self._remedy,
                )
            self._verified[block] = 1


def read_rows(values: Tokens, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
    """Return the `length` values (rows, length) from each start on, all of them in the array."""
    if isinstance(values, VerifiedArray):
        return values.read_rows(starts, length)
    return sliding_window_view(values, length)[starts]


#: What tokens are read from; that of an earlier version's corpus, without checksums, is the file.
Tokens = npt.NDArray[Any] | VerifiedArray


class TokenFile(msgspec.Struct, frozen=True, kw_only=True):
    """One split: `tokens` (all documents, each ended by the end-of-text token) and `offsets`
    (documents + 1)."""

    tokens: Tokens
    offsets: Tokens

    @classmethod
    def open(
        cls,
        folder: Path,
        split: SplitName,
        manifest: CorpusManifest,
        remedy: str = PREPARE_COMMAND,
    ) -> TokenFile:
        """Map `split` of the corpus in `folder`. Raises Refusal (corpus-damaged) for files whose
        sizes are not those of the manifest; `remedy` is the command that mends that."""
        expected = manifest.train if split == "train" else manifest.val
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        tokens = _memmap_file(
            folder / f"{split}.bin", dtype, expected.tokens, expected.token_checksums, remedy
        )
        count = expected.documents + 1
        offsets = _memmap_file(
            folder / f"{split}.idx", np.dtype("<i8"), count, expected.offset_checksums, remedy
        )
        return cls(tokens=tokens, offsets=offsets)

    def document(self, index: int) -> npt.NDArray[Any]:
        """Return the tokens of one document, its end-of-text token included."""
        start, end = self.offsets[index : index + 2]
        tokens: npt.NDArray[Any] = self.tokens[start:end]
        return tokens

    def verify(self) -> None:
        """Verify every block that has a checksum. Raises Refusal (corpus-damaged)."""
        for values in (self.tokens, self.offsets):
            if isinstance(values, VerifiedArray):
                values.verify()


def block_checksum(block: bytes | memoryview) -> bytes:
    """Return the checksum that the manifest holds for a block of a token file."""
    return hashlib.sha256(block).digest()[:CHECKSUM_BYTES]


def checksums_of(path: Path) -> bytes:
    """Return the checksums of all blocks of a token file, one after the other."""
    with path.open("rb") as file:
        return b"".join(map(block_checksum, iter(lambda: file.read(BLOCK_BYTES), b"")))


def is_whole(folder: Path, manifest: CorpusManifest) -> bool:
    """Check that both splits are in `folder` and of the manifest's sizes."""
    try:
        for split in SPLITS:
            TokenFile.open(folder, split, manifest)
    except Refusal:
        return False
    return True


def verify_corpus(folder: Path, manifest: CorpusManifest, remedy: str = PREPARE_COMMAND) -> None:
    """Verify every block of both splits. Raises Refusal (corpus-damaged)."""
    for split in SPLITS:
        TokenFile.open(folder, split, manifest, remedy).verify()


def _disown_copy(folder: Path) -> None:
    """Make a copy that another host sent count as none, so that it is sent again."""
    if folder.name.startswith(SENT):
        with suppress(OSError):
            (folder / "corpus.json").unlink()


def split_fingerprint(tokens: Tokens) -> int:
    """Hash a split to 48 bits: its checksums; without these, all bytes of a small split, else
    evenly spaced blocks."""
    digest = hashlib.blake2b(digest_size=6)
    if isinstance(tokens, VerifiedArray):
        digest.update(tokens.checksums)
    else:
        data = tokens.view(np.uint8)
        stride = max(FINGERPRINT_BLOCK_BYTES, len(data) // FINGERPRINT_BLOCKS)
        for start in range(0, len(data), stride):
            digest.update(data[start : start + FINGERPRINT_BLOCK_BYTES].data)
    return int.from_bytes(digest.digest(), "big")


def _memmap_file(
    path: Path,
    dtype: np.dtype[Any],
    count: int,
    checksums: bytes | msgspec.UnsetType,
    remedy: str,
) -> Tokens:
    size = path.stat().st_size if path.exists() else None
    expected = count * dtype.itemsize
    if size != expected:
        has = "it is not there" if size is None else f"it has {size} bytes"
        raise _damaged_file(path, f"{has} and should have {expected}", remedy)
    values = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    if checksums is msgspec.UNSET:
        return values
    blocks = -(-expected // BLOCK_BYTES)
    if len(checksums) != blocks * CHECKSUM_BYTES:
        raise _damaged_file(
            path,
            f"its manifest has {len(checksums)} bytes of checksums for {blocks} blocks",
            remedy,
        )
    return VerifiedArray(values, checksums, path, remedy)


def _damaged_file(path: Path, fact: str, remedy: str) -> Refusal:
    return Refusal(
        "corpus-damaged",
        what="a token file of the corpus is damaged",
        where=path,
        fact=fact,
        remedy=remedy,
    )
