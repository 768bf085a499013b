"""Text to unit vectors: the model's states, averaged over tokens, then turned so that titles lie near their passages.

Every stream of the model counts (token embeddings, the states after each block, the output), each averaged with
inverse document frequencies as weights, centred and whitened. Two linear maps, one for passages and one for queries,
are then fitted by contrast on titles and passages that belong together (InfoNCE, arXiv 1807.03748, other passages of
the batch being the negatives). docs/decisions/0008-embeddings.md has what was tried.

Shapes: N texts, B rows of a batch, S positions, D size of a state, L streams, F = L D features, E size of a vector,
V vocabulary.
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
#: Whitening scales up no direction that has less than this share of the largest variance.
_VARIANCE_FLOOR = 1e-6
#: Fitting the maps: pairs a step, steps at most, how often each pair is seen, and AdamW's first learning rate.
#: [fitted] on the built-in corpus with the demo's model, once.
_PAIRS, _STEPS, _EPOCHS, _LR = 512, 300, 14, 2e-3
#: The first inverse temperature of the contrast, as a logarithm.
_SHARPNESS = 2.5


class Tokens(Protocol):
    """What embedding needs of a tokenizer."""

    end_of_text: int

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


class Pooling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`size` of a vector, at most the features that there are; `seed` of the fit."""

    size: Annotated[int, msgspec.Meta(ge=1)] = 256
    seed: int = 0


class Embedder:
    """A model and what was fitted to a corpus: token weights (V), means (F) and maps (F, E) of passages and queries."""

    def __init__(self, model: Decoder, tokenizer: Tokens, pooling: Pooling, fitted: dict[str, Tensor]) -> None:
        self._model, self._tokenizer, self._pooling, self._fitted = model, tokenizer, pooling, fitted

    @classmethod
    def fit(
        cls, model: Decoder, tokenizer: Tokens, texts: Sequence[str], titles: Sequence[str], owners: Sequence[int],
        pooling: Pooling,
    ) -> tuple[Embedder, Vectors]:  # fmt: skip
        """Fit to the passages of a corpus, and to titles of which number i belongs to passage `owners[i]`.

        Returns the vectors (N, E) of the passages too, which are made on the way.
        """
        weights_V = _inverse_frequency(tokenizer.encode_batch(texts), model.spec.vocab_size)
        embedder = cls(model, tokenizer, pooling, {"weights": weights_V})
        passages_NF, titles_NF = embedder.pool(texts), embedder.pool(titles)
        mean_F = passages_NF.mean(0)
        title_mean_F = titles_NF.mean(0) if len(titles) else mean_F.clone()
        whitening_FF = _whitening(passages_NF - mean_F, model.spec.d_model)
        maps = _contrast(
            (passages_NF[list(owners)] - mean_F) @ whitening_FF, (titles_NF - title_mean_F) @ whitening_FF, pooling
        )
        embedder._fitted |= {
            "passage_mean": mean_F, "query_mean": title_mean_F,
            "passage_map": whitening_FF @ maps[0], "query_map": whitening_FF @ maps[1],
        }  # fmt: skip
        return embedder, embedder._finish(passages_NF, "passage")

    def passages(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors (N, E), float32. Only as many tokens of a text count as the model's context holds."""
        return self._finish(self.pool(texts), "passage")

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors (N, E) of queries: they are short and unlike passages, so they have a mean and a map apart."""
        return self._finish(self.pool(texts), "query")

    def save(self, path: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self._fitted.items()}, path)

    @classmethod
    def load(cls, model: Decoder, tokenizer: Tokens, pooling: Pooling, path: Path) -> Embedder:
        return cls(model, tokenizer, pooling, load_file(path))

    def _finish(self, pooled_NF: Tensor, kind: str) -> Vectors:
        mean_F, map_FE = self._fitted[f"{kind}_mean"], self._fitted[f"{kind}_map"]
        return np.asarray(F.normalize((pooled_NF - mean_F) @ map_FE, dim=1))

    @torch.inference_mode()
    def pool(self, texts: Sequence[str]) -> Tensor:
        """Weighted means of every stream (N, F), on the CPU; zeros for a text without tokens."""
        device, end = self._model.tok.weight.device, self._tokenizer.end_of_text
        room, weights_V = self._model.spec.context - 1, self._fitted["weights"].to(device)
        ids = [text[:room] for text in self._tokenizer.encode_batch(texts)]
        pooled_NF = torch.zeros(len(ids), (self._model.spec.layers + 2) * self._model.spec.d_model)
        for rows in _batches(ids):
            # Texts follow an end of text, as in training. Padding lies behind them, where causal attention cannot see.
            longest = len(ids[rows[-1]])
            padded = [[end, *ids[row], *[end] * (longest - len(ids[row]))] for row in rows]
            tokens_BS = torch.tensor(padded, device=device)
            lengths_B = torch.tensor([len(ids[row]) for row in rows], device=device)
            inside_BS = torch.arange(longest, device=device) < lengths_B[:, None]
            # The floor keeps the mean defined where every token is in every text.
            weights_BS = weights_V[tokens_BS[:, 1:]].clamp(min=1e-3) * inside_BS
            weights_BS = weights_BS / weights_BS.sum(1, keepdim=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=_bf16_is_fast(device)):
                streams = [x_BSD[:, 1:].float() for x_BSD in self._streams(tokens_BS)]
            means = [torch.bmm(weights_BS[:, None], x_BSD)[:, 0] for x_BSD in streams]
            pooled_NF[rows] = torch.cat(means, dim=1).cpu()
        return pooled_NF

    def _streams(self, tokens_BS: Tensor) -> Iterator[Tensor]:
        """Token embeddings, the states after each block, and the model's output, each (B, S, D)."""
        for x_BSD in self._model.streams(tokens_BS):
            yield x_BSD
        yield self._model.norm(x_BSD)


def _contrast(passages_NF: Tensor, titles_NF: Tensor, pooling: Pooling) -> tuple[Tensor, Tensor]:
    """Maps (F, E) of passages and of titles under which the two of a pair are more alike than those of other pairs.

    Both begin as the same random projection, which keeps angles; without pairs that is what they stay.
    """
    generator = torch.Generator().manual_seed(pooling.seed)
    features = passages_NF.shape[1]
    start_FE = torch.linalg.qr(torch.randn(features, min(pooling.size, features), generator=generator))[0]
    maps = [start_FE.clone().requires_grad_() for _ in range(2)]
    sharpness = torch.tensor(_SHARPNESS, requires_grad=True)
    pairs = [F.normalize(x_NF, dim=1) * features**0.5 for x_NF in (passages_NF, titles_NF)]
    count, batch = len(passages_NF), min(_PAIRS, len(passages_NF))
    steps = min(_STEPS, _EPOCHS * -(-count // _PAIRS)) if count > 1 else 0
    adamw = torch.optim.AdamW([*maps, sharpness], lr=_LR, weight_decay=0.01)
    for step in range(steps):
        for group in adamw.param_groups:
            group["lr"] = _LR * (1 - step / steps)
        chosen = torch.randperm(count, generator=generator)[:batch]
        a_NE, b_NE = (F.normalize(x_NF[chosen] @ map_FE, dim=1) for x_NF, map_FE in zip(pairs, maps, strict=True))
        alike_NN, own_N = b_NE @ a_NE.T * sharpness.exp(), torch.arange(batch)
        adamw.zero_grad()
        (F.cross_entropy(alike_NN, own_N) + F.cross_entropy(alike_NN.T, own_N)).backward()
        adamw.step()
    return maps[0].detach(), maps[1].detach()


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


def _inverse_frequency(ids: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """log(N / n) of each token (V), n being the texts that have it; tokens that no text has weigh as if one had."""
    counts = np.zeros(vocab_size)
    for text in ids:
        counts[np.unique(np.asarray(text, np.int64))] += 1
    return torch.from_numpy(np.log(max(len(ids), 1) / np.clip(counts, 1, None))).float()


def _whitening(centred_NF: Tensor, size: int) -> Tensor:
    """(F, F) that gives the principal directions of each stream of `size` features one variance (arXiv 2103.15316)."""
    blocks = []
    for centred_ND in centred_NF.split(size, dim=1):
        variances_D, directions_DD = torch.linalg.eigh((centred_ND.T @ centred_ND / len(centred_ND)).double())
        floor = float(variances_D[-1]) * _VARIANCE_FLOOR or 1.0
        blocks.append((directions_DD * variances_D.clamp(min=floor) ** -0.5).float())
    return torch.block_diag(*blocks)


def _bf16_is_fast(device: torch.device) -> bool:
    if device.type == "cpu":
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return device.type == "cuda" and torch.cuda.is_bf16_supported()
