"""Text to unit vectors: what its tokens are, and the model's states averaged over them, fitted so
that what belongs together lies near (`tuning.py`).

Every stream of the model counts (token embeddings, the states after each block, the output), each
averaged with inverse document frequencies as weights. Tokens are those of the text's words in small
letters, names split. docs/decisions/0008-embeddings.md has what was tried.

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
from farspan.retrieval.index import FitSettings
from farspan.retrieval.lexical import spread
from farspan.retrieval.pairs import Pairs
from farspan.retrieval.passages import Damaged
from farspan.retrieval.pooling import Processes, pool_batch
from farspan.retrieval.stores import Vectors
from farspan.retrieval.tuning import KINDS, tune, vectors_of
from farspan.retrieval.work import IndexWork
from farspan.runtime.model.decoder import Decoder

#: Texts a batch: enough to fill the cores with chunks of 128 tokens, and activations stay near
#: them.
_ROWS = 32
#: Fewer batches are not worth telling other processes of.
_SHARED_OUT = 8
#: A token that every text has still counts so much: the mean of a text that has no others stays
#: defined.
_LEAST_WEIGHT = 1e-3


class Read(NamedTuple):
    """What vectors are made of: the distinct tokens of each text, and the means of its states (N,
    F)."""

    bags: list[list[int]]
    pooled: Tensor


class Embedder:
    """A model and what was fitted to a corpus (`tuning.py`), with the weights (V) of tokens in
    means of states.

    `work` keeps what was embedded and counts it; `processes` share it out.
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
        """What knows how often tokens are in the passages of a corpus: it reads, and makes no
        vectors yet."""
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
        """Another one, fitted to passages and to what is asked for them, in so many `seconds` at
        most."""
        spec = self._model.spec
        tuned = tune(
            (passages.bags, asked.bags),
            (passages.pooled, asked.pooled),
            inverse_frequency(passages.bags, spec.vocab_size),
            pairs,
            spec.d_model,
            fit,
            self._work,
            seconds,
        )
        fitted = {"weights": self._fitted["weights"], **tuned}
        return Embedder(self._model, self._tokenizer, fitted, self._work, self._processes)

    def read(self, texts: Sequence[str]) -> Read:
        return Read(self.bags(texts), self.pool(texts))

    def vectors(self, texts: Read, kind: str) -> Vectors:
        """Unit vectors (N, E), float32, `kind` being "passage" or "query"."""
        return vectors_of(self._fitted, texts.bags, texts.pooled, kind)

    def passages(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors (N, E), float32. Of the states only as many count as the model's context
        holds tokens."""
        return self.vectors(self.read(texts), "passage")

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors (N, E) of queries: they are short and unlike passages, so they have a mean
        and a map apart."""
        return self.vectors(self.read(texts), "query")

    def bags(self, texts: Sequence[str]) -> list[list[int]]:
        """The distinct tokens of each text's words in small letters, names split."""
        return [
            sorted({*ids}) for ids in self._tokenizer.encode_batch([spread(text) for text in texts])
        ]

    def save(self, path: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self._fitted.items()}, path)

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
        size = fitted.get("table", torch.empty(0, 0)).shape[-1]
        features = (spec.layers + 2) * spec.d_model
        wanted = {
            "weights": (spec.vocab_size,),
            "token_weights": (spec.vocab_size,),
            "table": (spec.vocab_size, size),
        }
        for kind in KINDS:
            wanted |= {
                f"{kind}_mean": (features,),
                f"{kind}_map": (features, size),
                f"{kind}_gate": (),
            }
        shapes = {name: tuple(tensor.shape) for name, tensor in fitted.items()}
        if shapes != wanted:
            raise Damaged(path.parents[1], f"{path.name} does not fit this model: {shapes}")
        return cls(model, tokenizer, fitted, work, processes)

    def pool(self, texts: Sequence[str]) -> Tensor:
        """Weighted means of every stream (N, F), on the CPU; zeros for a text without tokens."""
        spec = self._model.spec
        ids = [
            torch.tensor(text[: spec.context - 1]) for text in self._tokenizer.encode_batch(texts)
        ]
        pooled_NF = torch.zeros(len(ids), (spec.layers + 2) * spec.d_model)
        # Shortest first, so that rows of a batch are of nearly one length.
        order = sorted(
            (row for row, text in enumerate(ids) if len(text)), key=lambda row: len(ids[row])
        )
        batches = [order[start : start + _ROWS] for start in range(0, len(order), _ROWS)]
        with self._work.features(self._name(ids)) as features:
            self._work.start("embedding")
            computed: Iterator[Tensor] | None = None
            for number, rows in enumerate(batches):
                # What is on disk comes first; from the first batch that is not, all are computed.
                block = None if computed else features.read(len(rows) * pooled_NF.shape[1])
                if block is None:
                    computed = computed or self._pooled(
                        [[ids[row] for row in rows] for rows in batches[number:]]
                    )
                    block = next(computed).numpy()
                    features.write(block)
                pooled_NF[rows] = torch.from_numpy(block.copy()).view(len(rows), -1)
                chars = sum(len(texts[row]) for row in rows)
                self._work.did(chars, texts=len(rows), kept=computed is None)
        return pooled_NF

    def _pooled(self, batches: list[list[Tensor]]) -> Iterator[Tensor]:
        """Weighted means (B, F) of each batch, in order: by the processes where there are many,
        else here."""
        weights_V = self._fitted["weights"]
        end = self._tokenizer.end_of_text
        if self._processes is None or len(batches) < _SHARED_OUT:
            for ids in batches:
                yield pool_batch(self._model, weights_V, end, ids)
            return
        yield from self._processes.pooled(self._model, weights_V, end, batches)

    def _name(self, ids: Sequence[Tensor]) -> str:
        """The features of these texts are named by what one model computes them from."""
        digest = hashlib.sha256(self._fitted["weights"].numpy().tobytes())
        for text in ids:
            digest.update(len(text).to_bytes(8, "little") + text.numpy().tobytes())
        return digest.hexdigest()


def _read_fitted(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise Damaged(path.parents[1], f"{path.name}: {error}") from None


def inverse_frequency(ids: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """log(N / n) of each token (V), n being the texts that have it; tokens that no text has weigh
    as if one had."""
    counts_V = np.zeros(vocab_size)
    for text in ids:
        counts_V[np.unique(np.asarray(text, np.int64))] += 1
    return torch.from_numpy(np.log(len(ids) / counts_V.clip(min=1)).clip(min=_LEAST_WEIGHT)).float()
