"""A static encoder: the mean of a table's rows over a text's tokens, by sentence-transformers'
StaticEmbedding or by model2vec.

Shapes: N texts, V vocabulary, E size of a vector.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from farspan.retrieval.encoders.encoder import (
    Identity,
    Steps,
    apply_steps,
    identify,
    limit_tokens,
    load_steps,
    load_tokenizer,
    require_same,
)
from farspan.retrieval.encoders.layout import TOKENIZER, WEIGHTS, Layout, unsupported
from farspan.retrieval.encoders.tensors import (
    Floats,
    Tensor,
    read_tensors,
    require_finite,
)
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.stores import Vectors

#: Texts that are tokenized at a time: progress is counted after each batch.
_BATCH_SIZE = 1024


class _Table(NamedTuple):
    """Rows by token. `mapping` (V) is the row of each token, `weights` (V) how much it counts;
    a table with either is model2vec's, which leaves unknown tokens out."""

    rows: Floats
    mapping: np.ndarray | None
    weights: Floats | None
    vocabulary: int
    drops_unknown: bool


class StaticEncoder:
    """A table of vectors with its tokenizer; see `encoder.Encoder`."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        identity: Identity,
        tokenizer: Tokenizer,
        table: _Table,
        steps: Steps,
        dim: int,
    ) -> None:
        self.folder = folder
        self.name = identity.name
        self.id = identity.id
        self.languages = identity.languages
        self.dim = dim
        self.max_tokens = layout.max_tokens
        self._prompts = layout.prompts
        self.tokenizer = tokenizer
        self._table = table
        self._steps = steps
        self._unknown = _unknown_token(tokenizer) if table.drops_unknown else None

    @classmethod
    def open(cls, folder: Path, layout: Layout, made_with: str) -> StaticEncoder:
        """Open a folder; see `open_encoder`."""
        path = folder / layout.model / WEIGHTS
        tensors = read_tensors(path)
        checked = made_with != ""
        if not checked:
            require_finite(path, tensors)
        table = _read_table(folder, tensors)
        tokenizer = load_tokenizer(
            folder / layout.model / TOKENIZER, layout, table.vocabulary, checked=checked
        )
        limit_tokens(tokenizer, layout.max_tokens)
        steps, dim = load_steps(folder, layout, table.rows.shape[1])
        identity = identify(folder, layout, "static")
        require_same(identity, made_with, folder)
        return cls(folder, layout, identity, tokenizer, table, steps, dim)

    def passages(
        self, texts: Sequence[str], work: IndexWork | None = None, device: str = "auto"
    ) -> Vectors:
        """Return unit vectors (N, E); `device` is never needed."""
        return self._embed_all(texts, self._prompts.document, work or IndexWork())

    def many_queries(
        self, texts: Sequence[str], work: IndexWork | None = None, device: str = "auto"
    ) -> Vectors:
        """Return unit vectors (N, E) of queries; `device` is never needed."""
        return self._embed_all(texts, self._prompts.query, work or IndexWork())

    def _embed_all(self, texts: Sequence[str], prompt: str, work: IndexWork) -> Vectors:
        work.start_kind("embedding")
        vectors_NE = np.zeros((len(texts), self.dim), np.float32)
        for start in range(0, len(texts), _BATCH_SIZE):
            batch = texts[start : start + _BATCH_SIZE]
            vectors_NE[start : start + len(batch)] = self._embed(batch, prompt)
            work.add_done(sum(map(len, batch)), texts=len(batch))
        return vectors_NE

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self._embed(texts, self._prompts.query)

    def _embed(self, texts: Sequence[str], prompt: str) -> Vectors:
        prompted = [prompt + text for text in texts]
        encodings = self.tokenizer.encode_batch_fast(prompted, add_special_tokens=False)
        means_NE = np.zeros((len(texts), self._table.rows.shape[1]), np.float32)
        for row, encoding in enumerate(encodings):
            ids = np.array(encoding.ids, np.int64)
            if self._unknown is not None:
                ids = ids[ids != self._unknown]
            if len(ids):
                means_NE[row] = self._mean(ids)
        return apply_steps(means_NE, self._steps)

    def _mean(self, ids: np.ndarray) -> Floats:
        table = self._table
        rows = table.rows[ids if table.mapping is None else table.mapping[ids]]
        if table.weights is not None:
            rows = rows * table.weights[ids][:, None]
        return rows.mean(0)


def _read_table(folder: Path, tensors: dict[str, Tensor]) -> _Table:
    """Find a table under the names of either library."""
    if "embedding.weight" in tensors:
        rows = _read_rows(folder, tensors["embedding.weight"])
        return _Table(rows, None, None, len(rows), drops_unknown=False)
    if "embeddings" not in tensors:
        raise unsupported(
            folder,
            f"{WEIGHTS} has neither embedding.weight nor embeddings, but: "
            + ", ".join(sorted(tensors)[:5]),
        )
    rows = _read_rows(folder, tensors["embeddings"])
    vocabulary = len(rows)
    mapping = None
    weights = None
    if "mapping" in tensors:
        mapping = tensors["mapping"].stored.astype(np.int64)
        vocabulary = len(mapping)
        if mapping.ndim != 1 or (
            vocabulary and not 0 <= mapping.min() <= mapping.max() < len(rows)
        ):
            raise unsupported(folder, "its mapping points beyond the table")
    if "weights" in tensors:
        weights = tensors["weights"].floats()
        if weights.shape != (vocabulary,):
            raise unsupported(folder, f"it has {vocabulary} tokens, and weights {weights.shape}")
    return _Table(rows, mapping, weights, vocabulary, drops_unknown=True)


def _read_rows(folder: Path, tensor: Tensor) -> Floats:
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise unsupported(folder, f"its table has the shape {tensor.shape}")
    return tensor.floats()


def _unknown_token(tokenizer: Tokenizer) -> int | None:
    """Return the id of the unknown token, by the model in tokenizer.json."""
    model = json.loads(tokenizer.to_str())["model"]
    if model.get("unk_token") is not None:
        return tokenizer.token_to_id(model["unk_token"])
    return model.get("unk_id")
