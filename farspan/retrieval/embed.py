"""Embed text as unit vectors: its tokens, and the model's hidden states averaged over them, with
maps fitted by contrastive learning (`contrastive_fit.py`).

Every stream of the model is used (token embeddings, the states after each block, the output), each
averaged with inverse document frequencies as weights. Tokens are those of the text's words in lower
case, names split. docs/decisions/0008-embeddings.md has the variants that were tried.

Shapes: N texts, B rows of a batch, S positions, D size of a state, L streams, F = L D features, E
size of a vector, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from farspan.corpus.tokenizer import Tokenizer
from farspan.retrieval.contrastive_fit import KINDS, embed_texts, fit_embedder
from farspan.retrieval.index import FitSettings
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.names import spread
from farspan.retrieval.pairs import Pairs
from farspan.retrieval.passages import Damaged
from farspan.retrieval.pooling import Processes, pool_batches
from farspan.retrieval.stores import Vectors
from farspan.runtime.model.compute_dtype import product_dtype
from farspan.runtime.model.decoder import Decoder

#: Tokens a batch, with padding: enough to fill a core, and activations stay in cache.
_BATCH_TOKENS = 4096
#: Fewer batches are not worth sending to other processes.
_MIN_SHARED_BATCHES = 8
#: The weight of a token that every text has: the mean of a text without others stays defined.
_MIN_TOKEN_WEIGHT = 1e-3


class Read(NamedTuple):
    """The features of texts: the distinct tokens of each, and the means of its states (N, F)."""

    bags: list[list[int]]
    pooled: Tensor

    def select(self, rows: Sequence[int]) -> Read:
        """Return the features of some of the texts."""
        return Read([self.bags[row] for row in rows], self.pooled[list(rows)])


class Embedder:
    """A model with parameters fitted to a corpus (`contrastive_fit.py`), and tokens' weights (V).

    `work` caches embeddings and counts them; `processes` compute them in parallel.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        fitted: dict[str, Tensor],
        work: IndexWork | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._fitted = fitted
        self._work = work or IndexWork()
        self._processes = processes

    @classmethod
    def unfitted(
        cls,
        model: Decoder,
        tokenizer: Tokenizer,
        passages: Sequence[str],
        work: IndexWork | None = None,
        processes: Processes | None = None,
    ) -> Embedder:
        """Return an embedder with token weights of these passages: it reads, and makes no vectors
        yet."""
        weights_V = inverse_frequency(tokenizer.encode_batch(passages), model.spec.vocab_size)
        return cls(model, tokenizer, {"weights": weights_V}, work, processes)

    def fitted(
        self,
        passages: Read,
        asked: Read,
        pairs: Pairs,
        fit: FitSettings,
        seconds: float = math.inf,
    ) -> Embedder:
        """Return an embedder fitted to passages and their queries, within `seconds`."""
        spec = self._model.spec
        bags = (passages.bags, asked.bags)
        pooled = (passages.pooled, asked.pooled)
        weights_V = inverse_frequency(passages.bags, spec.vocab_size)
        tuned = fit_embedder(bags, pooled, weights_V, pairs, spec.d_model, fit, self._work, seconds)
        fitted = {"weights": self._fitted["weights"], **tuned}
        return Embedder(self._model, self._tokenizer, fitted, self._work, self._processes)

    def read(self, texts: Sequence[str]) -> Read:
        return Read(self.bags(texts), self.pool(texts))

    def vectors(self, texts: Read, kind: str) -> Vectors:
        """Return unit vectors (N, E), float32, `kind` being "passage" or "query"."""
        return embed_texts(self._fitted, texts.bags, texts.pooled, kind)

    def passages(self, texts: Sequence[str]) -> Vectors:
        """Return unit vectors (N, E), float32. States beyond the model's context are left out."""
        return self.vectors(self.read(texts), "passage")

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return unit vectors (N, E) of queries, which have a mean and a map of their own: they are
        shorter than passages."""
        return self.vectors(self.read(texts), "query")

    def bags(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the distinct tokens of each text's words in lower case, names split."""
        ids_N = self._tokenizer.encode_batch([spread(text) for text in texts])
        return [sorted({*ids}) for ids in ids_N]

    def save(self, path: Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self._fitted.items()}
        save_file(tensors, path)

    @classmethod
    def load(
        cls,
        model: Decoder,
        tokenizer: Tokenizer,
        path: Path,
        work: IndexWork | None = None,
        processes: Processes | None = None,
    ) -> Embedder:
        spec = model.spec
        fitted = _read_fitted(path)
        table = fitted.get("table", torch.empty(0, 0))
        vocab_size = spec.vocab_size
        size = table.shape[-1]
        features = (spec.layers + 2) * spec.d_model
        expected = {
            "weights": (vocab_size,),
            "token_weights": (vocab_size,),
            "table": (vocab_size, size),
        }
        for kind in KINDS:
            expected[f"{kind}_mean"] = (features,)
            expected[f"{kind}_map"] = (features, size)
            expected[f"{kind}_gate"] = ()
        shapes = {name: tuple(tensor.shape) for name, tensor in fitted.items()}
        if shapes != expected:
            raise Damaged(path.parents[1], f"{path.name} does not fit this model: {shapes}")
        return cls(model, tokenizer, fitted, work, processes)

    def pool(self, texts: Sequence[str]) -> Tensor:
        """Return weighted means of every stream (N, F), on the CPU; zeros for a text without
        tokens."""
        spec = self._model.spec
        max_tokens = spec.context - 1
        ids = [torch.tensor(text[:max_tokens]) for text in self._tokenizer.encode_batch(texts)]
        num_features = (spec.layers + 2) * spec.d_model
        pooled_NF = torch.zeros(len(ids), num_features)

        # Shortest first, so that rows of a batch are of nearly one length.
        order = [row for row, text in enumerate(ids) if len(text)]
        order.sort(key=lambda row: len(ids[row]))
        batches = _batches(order, [len(text) for text in ids])

        with self._work.features(self._features_id(ids)) as features:
            self._work.start_kind("embedding")
            computed: Iterator[Tensor] | None = None
            for number, rows in enumerate(batches):
                # Cached batches come first; from the first that is not, all are computed.
                block = None
                if computed is None:
                    block = features.read(len(rows) * num_features)
                if block is None:
                    if computed is None:
                        computed = self._pool_batches(ids, batches[number:])
                    block = next(computed).numpy()
                    features.write(block)
                pooled_BF = torch.from_numpy(block.copy()).view(len(rows), -1)
                pooled_NF[rows] = pooled_BF
                chars = sum(len(texts[row]) for row in rows)
                self._work.add_done(chars, texts=len(rows), kept=computed is None)
        return pooled_NF

    def _pool_batches(self, ids: list[Tensor], batches: list[list[int]]) -> Iterator[Tensor]:
        """Yield the weighted means (B, F) of each batch of rows, in order.

        Many batches are computed by the processes, a few here.
        """
        weights_V = self._fitted["weights"]
        end = self._tokenizer.end_of_text
        texts = [[ids[row] for row in rows] for rows in batches]
        if self._processes is None or len(batches) < _MIN_SHARED_BATCHES:
            yield from pool_batches(self._model, weights_V, end, texts)
            return
        yield from self._processes.pooled(self._model, weights_V, end, texts)

    def _features_id(self, ids: Sequence[Tensor]) -> str:
        """Return the name of the features of these texts, a hash of all they are computed from."""
        weights = self._fitted["weights"].numpy()
        digest = hashlib.sha256(weights.tobytes())
        dtype = product_dtype(self._model)
        if dtype != torch.float32:  # Of a CPU they keep the names of earlier versions.
            digest.update(str(dtype).encode())
        for text in ids:
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text.numpy().tobytes())
        return digest.hexdigest()


def _batches(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Return rows in batches of about _BATCH_TOKENS; `order` has the shortest texts first."""
    batches: list[list[int]] = []
    for row in order:
        # The last row of a batch is its longest.
        if not batches or (len(batches[-1]) + 1) * lengths[row] > _BATCH_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return batches


def _read_fitted(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise Damaged(path.parents[1], f"{path.name}: {error}") from None


def inverse_frequency(ids: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """Return log(N / n) of each token (V), n being the texts that have it, at least 1."""
    counts_V = np.zeros(vocab_size)
    for text in ids:
        distinct = np.unique(np.asarray(text, np.int64))
        counts_V[distinct] += 1
    weights_V = np.log(len(ids) / counts_V.clip(min=1))
    return torch.from_numpy(weights_V.clip(min=_MIN_TOKEN_WEIGHT)).float()
