"""A table of token vectors that stands in for an encoder at queries: a query's vector is the sum of
its tokens' rows, so a search needs neither the encoder nor torch.

Shapes: N queries, F rows, E size of a vector, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from farspan.domain.own_files import open_own
from farspan.domain.problems import Refusal
from farspan.retrieval.encoders.encoder import scale_to_unit
from farspan.retrieval.encoders.tensors import Floats, read_tensors
from farspan.retrieval.stores import Vectors

#: Names of the file's tensors: token ids in ascending order, their rows, what every query adds, and
#: the encoder's tokenizer as JSON.
_TOKENS = "tokens"
_ROWS = "rows"
_BIAS = "bias"
_TOKENIZER = "tokenizer"


class QueryTable:
    """Rows (F, E) of tokens, and a bias (E), under an encoder's tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, tokens: npt.NDArray[np.int64], rows_FE: Floats, bias_E: Floats
    ) -> None:
        """`tokens` (F) has the ids of the rows, in ascending order."""
        self.dim = rows_FE.shape[1]
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._rows_FE = rows_FE
        self._bias_E = bias_E

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return unit vectors (N, E); zeros for a query without a token of the table."""
        sums_NE = np.zeros((len(texts), self.dim), np.float32)
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        for number, encoding in enumerate(encodings):
            ids = np.array(encoding.ids, np.int64)
            places = np.searchsorted(self._tokens, ids).clip(max=len(self._tokens) - 1)
            rows = places[self._tokens[places] == ids]
            if len(rows):
                sums_NE[number] = self._rows_FE[rows].sum(0) + self._bias_E
        return scale_to_unit(sums_NE)

    def save(self, path: Path) -> None:
        """Write the table as a safetensors file, rows in 16 bits."""
        from safetensors.numpy import save

        tokenizer = self._tokenizer.to_str().encode()
        tensors: dict[str, npt.NDArray[Any]] = {
            _TOKENS: self._tokens.astype(np.int32),
            _ROWS: self._rows_FE.astype(np.float16),
            _BIAS: self._bias_E,
            _TOKENIZER: np.frombuffer(tokenizer, np.uint8),
        }
        with open_own(path, "wb") as file:
            file.write(save(tensors))

    @classmethod
    def load(cls, path: Path) -> QueryTable:
        """Read a table; refuse (file-unreadable, path-missing) one that is damaged or not there."""
        try:
            return cls._parse(path)
        except (KeyError, ValueError) as error:
            raise _damaged(path, str(error)) from None
        except Refusal as refusal:
            raise _damaged(path, refusal.problem.fact) from None

    @classmethod
    def _parse(cls, path: Path) -> QueryTable:
        """Read a table; raises ValueError or KeyError for one that is damaged."""
        tensors = read_tensors(path)
        text = tensors[_TOKENIZER].stored.astype(np.uint8, copy=False).tobytes().decode()
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # The library raises nothing more precise.
            raise ValueError(f"its tokenizer cannot be read: {error}") from None
        tokens = tensors[_TOKENS].stored.astype(np.int64)
        rows_FE = tensors[_ROWS].floats()
        bias_E = tensors[_BIAS].floats()
        shapes_fit = (
            rows_FE.ndim == 2
            and len(tokens) > 0
            and tokens.shape == rows_FE.shape[:1]
            and bias_E.shape == rows_FE.shape[1:]
        )
        if not shapes_fit or (np.diff(tokens) <= 0).any() or tokens[0] < 0:
            raise ValueError("its tokens and rows do not fit each other")
        if not np.isfinite(rows_FE).all() or not np.isfinite(bias_E).all():
            raise ValueError("its rows hold a NaN or an infinity")
        return cls(tokenizer, tokens, rows_FE, bias_E)


def _damaged(path: Path, fact: str) -> Refusal:
    return Refusal(
        "file-unreadable",
        what="the table for queries cannot be read",
        where=path,
        fact=fact,
        remedy="make the index again",
    )
