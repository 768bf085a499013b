"""Text to unit vectors: the model's token embeddings, averaged by how much each token surprises the model.

A token's weight is its surprisal, -log p(token | those before it), to a power: what the model can foresee (grammar,
boilerplate, a name's second half) says little about what a text is about. Means are then centred and partly whitened.
docs/decisions/0008-embeddings.md has what was tried: states of later blocks find far less in models this small.

Shapes: N texts, B rows of a batch, S positions, M positions that hold a token, D size of a state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from farspan.retrieval.stores import Vectors
from farspan.runtime.model import Decoder

#: Positions a batch, padding included: enough to fill the cores, and activations stay near them.
_BATCH_POSITIONS = 4096
#: Logits are made this many at a time, so that they stay in the CPU's cache: three times faster than 2**24.
_LOGITS = 2**22
#: Whitening scales up no direction that has less than this share of the largest variance.
_VARIANCE_FLOOR = 1e-6


class Tokens(Protocol):
    """What embedding needs of a tokenizer."""

    end_of_text: int

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


class Pooling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens weigh their surprisal ** `power`. `whiten` 0 only centres, 1 gives every direction the same variance."""

    power: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    whiten: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.75


class Embedder:
    """A model with what was fitted to a corpus: means of passages and of queries (D), and the whitening (D, D)."""

    def __init__(self, model: Decoder, tokenizer: Tokens, pooling: Pooling, fitted: dict[str, Tensor]) -> None:
        self._model, self._tokenizer, self._pooling, self._fitted = model, tokenizer, pooling, fitted

    @classmethod
    def fit(
        cls, model: Decoder, tokenizer: Tokens, texts: Sequence[str], queries: Sequence[str], pooling: Pooling
    ) -> tuple[Embedder, Vectors]:
        """Fit to the passages of a corpus and to what queries are like; which belong together is not used.

        Returns the vectors (N, D) of the passages too, which are made on the way.
        """
        embedder = cls(model, tokenizer, pooling, {})
        pooled_ND = embedder.pool(texts)
        mean_D = pooled_ND.mean(0)
        embedder._fitted |= {
            "passage_mean": mean_D,
            "query_mean": embedder.pool(queries).mean(0),
            "whitening": _whitening(pooled_ND - mean_D, pooling.whiten),
        }
        return embedder, embedder._finish(pooled_ND, "passage_mean")

    def passages(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors (N, D), float32. Only as many tokens of a text count as the model's context holds."""
        return self._finish(self.pool(texts), "passage_mean")

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors (N, D) of queries: they are short and unlike passages, so they are centred apart."""
        return self._finish(self.pool(texts), "query_mean")

    def save(self, path: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self._fitted.items()}, path)

    @classmethod
    def load(cls, model: Decoder, tokenizer: Tokens, pooling: Pooling, path: Path) -> Embedder:
        return cls(model, tokenizer, pooling, load_file(path))

    def _finish(self, pooled_ND: Tensor, mean: str) -> Vectors:
        return np.asarray(F.normalize((pooled_ND - self._fitted[mean]) @ self._fitted["whitening"], dim=1))

    @torch.inference_mode()
    def pool(self, texts: Sequence[str]) -> Tensor:
        """Weighted means of token embeddings (N, D), on the CPU; zeros for a text without tokens."""
        embeddings_VD, end = self._model.tok.weight, self._tokenizer.end_of_text
        device, room = embeddings_VD.device, self._model.spec.context - 1
        ids = [text[:room] for text in self._tokenizer.encode_batch(texts)]
        pooled_ND = torch.zeros(len(ids), embeddings_VD.shape[1])
        for rows in _batches(ids):
            # Texts follow an end of text, as in training. Padding lies behind them, where causal attention cannot see.
            longest = len(ids[rows[-1]])
            padded = [[end, *ids[row], *[end] * (longest - len(ids[row]))] for row in rows]
            tokens_BS = torch.tensor(padded, device=device)
            lengths_B = torch.tensor([len(ids[row]) for row in rows], device=device)
            inside_BS = torch.arange(longest, device=device) < lengths_B[:, None]
            weights_BS = torch.zeros(inside_BS.shape, device=device)
            # The floor keeps the mean defined where the model foresees every token.
            weights_BS[inside_BS] = surprisal(self._model, tokens_BS, inside_BS).clamp(min=1e-3) ** self._pooling.power
            sums_BD = torch.bmm(weights_BS[:, None], F.embedding(tokens_BS[:, 1:], embeddings_VD).float())[:, 0]
            pooled_ND[rows] = (sums_BD / weights_BS.sum(1, keepdim=True)).cpu()
        return pooled_ND


def surprisal(model: Decoder, tokens_BS: Tensor, inside_BS: Tensor) -> Tensor:
    """-log p in nats (M) of the tokens after each row's first, where `inside_BS` (one position shorter) is true."""
    device = tokens_BS.device
    with torch.autocast(device.type, torch.bfloat16, enabled=_bf16_is_fast(device)):
        states_MD = model.hidden(tokens_BS[:, :-1])[inside_BS]
        parts = []
        rows = max(_LOGITS // model.head_VD.shape[0], 1)
        for x_ND, targets_N in zip(states_MD.split(rows), tokens_BS[:, 1:][inside_BS].split(rows), strict=True):
            logits_NV = F.linear(x_ND, model.head_VD).float()
            parts.append(F.cross_entropy(logits_NV, targets_N, reduction="none"))
    return torch.cat(parts)


def _batches(ids: list[list[int]]) -> Iterator[list[int]]:
    """Row numbers, shortest texts first, so that rows of a batch are of nearly one length. Empty texts are left out."""
    batch: list[int] = []
    for row in sorted((row for row in range(len(ids)) if ids[row]), key=lambda row: len(ids[row])):
        if batch and (len(batch) + 1) * (len(ids[row]) + 1) > _BATCH_POSITIONS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


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
