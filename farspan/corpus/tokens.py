"""Reading token files: memory-mapped, so that a corpus of any size costs no memory to open."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.corpus import CorpusManifest
from farspan.domain.problems import Refusal


class TokenFile(msgspec.Struct, frozen=True, kw_only=True):
    """One split: `tokens` (all documents, each ended by the end-of-text token) and `offsets` (documents + 1)."""

    tokens: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def open(cls, folder: Path, split: Literal["train", "val"], manifest: CorpusManifest) -> TokenFile:
        """Map `split` of the corpus in `folder`; refuses files whose sizes are not what the manifest says."""
        expected = manifest.train if split == "train" else manifest.val
        tokens = _mapped(folder / f"{split}.bin", np.dtype(manifest.dtype).newbyteorder("<"), expected.tokens)
        return cls(tokens=tokens, offsets=_mapped(folder / f"{split}.idx", np.dtype("<i8"), expected.documents + 1))

    def document(self, index: int) -> npt.NDArray[Any]:
        """Tokens of one document, its end-of-text token included."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    found = path.stat().st_size if path.exists() else 0
    if found != count * dtype.itemsize:
        raise Refusal(
            "source-unreadable", what="a token file is not as large as the corpus manifest says", where=path,
            fact=f"{found} bytes there, {count * dtype.itemsize} expected",
            remedy=f"remove the damaged corpus and prepare again: rm -r {path.parent}",
        )  # fmt: skip
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
