"""Text to unit vectors: hidden states of the model, averaged over tokens, then centred and whitened.

Shapes: N texts, B rows of a batch, S positions, D size of a hidden state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from farspan.retrieval.stores import Vectors
from farspan.runtime.model import Decoder

#: Positions a batch, padding included: enough to fill the cores, little memory at any model size.
_BATCH_POSITIONS = 8192
#: Whitening scales up no direction that has less than this share of the largest variance.
_VARIANCE_FLOOR = 1e-5


class Tokens(Protocol):
    """What embedding needs of a tokenizer."""

    end_of_text: int

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


class Pooling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which states are averaged: the stream after `layers` blocks, or (None) the model's output; and the whitening.

    `whiten` 0 only centres; 1 gives every direction the same variance.
    """

    layers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    whiten: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class Embedder:
    """A model with what was fitted to a corpus: token weights (V), mean (D) and whitening (D, D)."""

    def __init__(self, model: Decoder, tokenizer: Tokens, pooling: Pooling, fitted: dict[str, Tensor]) -> None:
        self._model, self._tokenizer, self._pooling, self._fitted = model, tokenizer, pooling, fitted

    @classmethod
    def fit(cls, model: Decoder, tokenizer: Tokens, texts: Sequence[str], pooling: Pooling) -> tuple[Embedder, Vectors]:
        """Fit to a corpus; returns the vectors (N, D) of its texts too, which are made on the way."""
        ids = tokenizer.encode_batch(texts)
        fitted = {"weights": _inverse_frequency(ids, model.spec.vocab_size)}
        embedder = cls(model, tokenizer, pooling, fitted)
        pooled_ND = embedder._pool(ids)
        fitted["mean"] = pooled_ND.mean(0)
        fitted["whitening"] = _whitening(pooled_ND - fitted["mean"], pooling.whiten)
        return embedder, embedder._finish(pooled_ND)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors (N, D), float32. Only as many tokens of a text count as the model's context holds."""
        return self._finish(self._pool(self._tokenizer.encode_batch(texts)))

    def save(self, path: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self._fitted.items()}, path)

    @classmethod
    def load(cls, model: Decoder, tokenizer: Tokens, pooling: Pooling, path: Path) -> Embedder:
        return cls(model, tokenizer, pooling, load_file(path))

    def _finish(self, pooled_ND: Tensor) -> Vectors:
        vectors_ND = (pooled_ND - self._fitted["mean"]) @ self._fitted["whitening"]
        return np.asarray(torch.nn.functional.normalize(vectors_ND, dim=1))

    @torch.inference_mode()
    def _pool(self, ids: list[list[int]]) -> Tensor:
        """Weighted means of the states (N, D) on the CPU. A text of weightless tokens only gets their plain mean."""
        device = self._model.tok.weight.device
        weights_V = self._fitted["weights"].to(device)
        pooled_ND = torch.zeros(len(ids), self._model.spec.d_model)
        end = self._tokenizer.end_of_text
        for rows in _batches(ids, self._model.spec.context):
            lengths_B = torch.tensor([len(ids[row]) for row in rows]).clamp(max=self._model.spec.context - 1)
            # Texts follow an end of text, as in training; it is never averaged. Padding lies behind what counts, where
            # causal attention cannot see it.
            padded = [[end, *ids[row][: int(lengths_B[-1])]] for row in rows]
            tokens_BS = torch.tensor([row + [end] * (int(lengths_B[-1]) + 1 - len(row)) for row in padded]).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=_bf16_is_fast(device)):
                states_BSD = self._model.hidden(tokens_BS, self._pooling.layers)[:, 1:].float()
            inside_BS = torch.arange(states_BSD.shape[1], device=device) < lengths_B[:, None].to(device)
            weights_BS = weights_V[tokens_BS[:, 1:]] * inside_BS
            weights_BS = torch.where(weights_BS.sum(1, keepdim=True) > 0, weights_BS, inside_BS.float())
            sums_BD = torch.bmm(weights_BS[:, None], states_BSD)[:, 0]
            pooled_ND[rows] = (sums_BD / weights_BS.sum(1, keepdim=True).clamp(min=1e-9)).cpu()
        return pooled_ND


def _batches(ids: list[list[int]], context: int) -> Iterator[list[int]]:
    """Row numbers, shortest texts first, so that rows of a batch are of nearly one length. Empty texts are left out."""
    order = sorted((row for row in range(len(ids)) if ids[row]), key=lambda row: len(ids[row]))
    batch: list[int] = []
    for row in order:
        if batch and (len(batch) + 1) * min(len(ids[row]) + 1, context) > _BATCH_POSITIONS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _inverse_frequency(ids: list[list[int]], vocab_size: int) -> Tensor:
    """log(N / n) of each token, n being the texts that have it; tokens that no text has weigh as if one had."""
    counts = np.zeros(vocab_size)
    for text in ids:
        counts[np.unique(np.asarray(text, np.int64))] += 1
    return torch.from_numpy(np.log(max(len(ids), 1) / np.clip(counts, 1, None))).float()


def _whitening(centred_ND: Tensor, power: float) -> Tensor:
    """(D, D) that scales the principal directions by their deviation ** -power (arXiv 2103.15316 for power 1)."""
    covariance_DD = (centred_ND.T @ centred_ND / len(centred_ND)).double()
    variances_D, directions_DD = torch.linalg.eigh(covariance_DD)
    floor = float(variances_D[-1]) * _VARIANCE_FLOOR or 1.0
    return (directions_DD * variances_D.clamp(min=floor) ** (-power / 2)).float()


def _bf16_is_fast(device: torch.device) -> bool:
    if device.type == "cpu":
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return device.type == "cuda" and torch.cuda.is_bf16_supported()
