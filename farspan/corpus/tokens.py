"""Reading token files: memory-mapped, so that a corpus of any size costs no memory to open."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.corpus import CorpusManifest
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal

#: What tells one split's bytes from another's: so many blocks of so many bytes, a quarter of a
#: second to read.
BLOCKS, BLOCK = 256, 2**20


class TokenFile(msgspec.Struct, frozen=True, kw_only=True):
    """One split: `tokens` (all documents, each ended by the end-of-text token) and `offsets`
    (documents + 1)."""

    tokens: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def open(
        cls, folder: Path, split: Literal["train", "val"], manifest: CorpusManifest
    ) -> TokenFile:
        """Map `split` of the corpus in `folder`; refuses files whose sizes are not what the
        manifest says."""
        expected = manifest.train if split == "train" else manifest.val
        tokens = _mapped(
            folder / f"{split}.bin", np.dtype(manifest.dtype).newbyteorder("<"), expected.tokens
        )
        return cls(
            tokens=tokens,
            offsets=_mapped(folder / f"{split}.idx", np.dtype("<i8"), expected.documents + 1),
        )

    def document(self, index: int) -> npt.NDArray[Any]:
        """Tokens of one document, its end-of-text token included."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def fingerprint(tokens: npt.NDArray[Any]) -> int:
    """48 bits of a split's bytes: of all where there are few, else of evenly spaced blocks."""
    data = tokens.view(np.uint8)
    digest, apart = hashlib.blake2b(digest_size=6), max(BLOCK, len(data) // BLOCKS)
    for start in range(0, len(data), apart):
        digest.update(data[start : start + BLOCK].data)
    return int.from_bytes(digest.digest(), "big")


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    size = path.stat().st_size if path.exists() else 0
    if size != count * dtype.itemsize:
        raise Refusal(
            "source-unreadable",
            what="a token file is not as large as the corpus manifest says",
            where=path,
            fact=f"it has {size} bytes and should have {count * dtype.itemsize}",
            remedy=f"remove the damaged corpus and prepare again: rm -r {shell_word(path.parent)}",
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
