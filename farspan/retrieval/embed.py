"""Text to unit vectors: the model's states, averaged over tokens, then turned so that titles lie near their passages.

Every stream of the model counts (token embeddings, the states after each block, the output), each averaged with
inverse document frequencies as weights, centred and whitened. Two linear maps, one for passages and one for queries,
are then fitted by contrast on titles and passages that belong together (InfoNCE, arXiv 1807.03748, other passages of
the batch being the negatives). docs/decisions/0008-embeddings.md has what was tried.

Shapes: N texts, P pairs of a title and a passage, B rows of a batch, S positions, D size of a state, L streams,
F = L D features, E size of a vector, V vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.codec import to_json
from farspan.retrieval.index import FitSettings
from farspan.retrieval.passages import Damaged
from farspan.retrieval.pooling import Processes, bf16_is_fast, pool_batch
from farspan.retrieval.stores import Vectors
from farspan.retrieval.work import IndexWork
from farspan.runtime.model.decoder import Decoder

#: Texts a batch: enough to fill the cores with chunks of 128 tokens, and activations stay near them.
_ROWS = 32
#: Fewer batches are not worth telling other processes of.
_SHARED_OUT = 8
#: Whitening leaves out directions with less than this share of the largest variance: what is in them is rounding. A
#: LayerNorm leaves one without any.
_VARIANCE_FLOOR = 1e-6
#: A token that every text has still counts so much: the mean of a text that has no others stays defined.
_LEAST_WEIGHT = 1e-3
#: Pairs a step, each passage being a negative for the titles of the others.
_PAIRS = 512
#: What cosines are multiplied by: one over the temperature of SimCSE (arXiv 2104.08821).
_SHARPNESS = 20.0


class Embedder:
    """A model and what was fitted to a corpus: token weights (V), means (F) and maps (F, E) of passages and queries.

    `work` keeps what was embedded and counts it; `processes` share it out.
    """

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, fitted: dict[str, Tensor], work: IndexWork | None = None,
        processes: Processes | None = None,
    ) -> None:  # fmt: skip
        self._model, self._tokenizer, self._fitted = model, tokenizer, fitted
        self._work, self._processes = work or IndexWork(), processes

    @classmethod
    def fit(
        cls, model: Decoder, tokenizer: Tokenizer, texts: Sequence[str], titles: Sequence[str], owners: Sequence[int],
        fit: FitSettings, work: IndexWork | None = None, processes: Processes | None = None,
    ) -> tuple[Embedder, Vectors]:  # fmt: skip
        """Fit to the passages of a corpus, and to titles of which number i belongs to passage `owners[i]`.

        Returns the vectors (N, E) of the passages too, which are made on the way.
        """
        fitted = {"weights": inverse_frequency(tokenizer.encode_batch(texts), model.spec.vocab_size)}
        embedder = cls(model, tokenizer, fitted, work, processes)
        passages_NF, titles_PF = embedder.pool(texts), embedder.pool(titles)
        fitted |= fit_maps(passages_NF, titles_PF, owners, model.spec.d_model, fit, work)
        return embedder, apply_maps(fitted, passages_NF, "passage")

    def passages(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors (N, E), float32. Only as many tokens of a text count as the model's context holds."""
        return apply_maps(self._fitted, self.pool(texts), "passage")

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors (N, E) of queries: they are short and unlike passages, so they have a mean and a map apart."""
        return apply_maps(self._fitted, self.pool(texts), "query")

    def save(self, path: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self._fitted.items()}, path)

    @classmethod
    def load(
        cls, model: Decoder, tokenizer: Tokenizer, path: Path, work: IndexWork | None = None,
        processes: Processes | None = None,
    ) -> Embedder:  # fmt: skip
        spec, fitted = model.spec, _read_fitted(path)
        features = (spec.layers + 2) * spec.d_model
        shapes = {name: tuple(tensor.shape) for name, tensor in fitted.items()}
        maps = {shapes.get(f"{kind}_map", ()) for kind in ("passage", "query")}
        means = {shapes.get(f"{kind}_mean", ()) for kind in ("passage", "query")}
        right = shapes.get("weights") == (spec.vocab_size,) and means == {(features,)} and len(maps) == 1
        if not right or next(iter(maps))[:1] != (features,):
            raise Damaged(path.parents[1], f"{path.name} does not fit this model: {shapes}")
        return cls(model, tokenizer, fitted, work, processes)

    def pool(self, texts: Sequence[str]) -> Tensor:
        """Weighted means of every stream (N, F), on the CPU; zeros for a text without tokens."""
        spec = self._model.spec
        ids = [torch.tensor(text[: spec.context - 1]) for text in self._tokenizer.encode_batch(texts)]
        pooled_NF = torch.zeros(len(ids), (spec.layers + 2) * spec.d_model)
        # Shortest first, so that rows of a batch are of nearly one length.
        order = sorted((row for row, text in enumerate(ids) if len(text)), key=lambda row: len(ids[row]))
        batches = [order[start : start + _ROWS] for start in range(0, len(order), _ROWS)]
        with self._work.features(self._name(ids)) as features:
            self._work.start("embedding")
            done = 0
            while done < len(batches):
                kept = features.read(len(batches[done]) * pooled_NF.shape[1])
                if kept is None:
                    break
                pooled_NF[batches[done]] = torch.from_numpy(kept.copy()).view(len(batches[done]), -1)
                self._work.kept += len(batches[done])
                self._work.did(sum(len(texts[row]) for row in batches[done]), kept=True)
                done += 1
            rest = batches[done:]
            for rows, pooled_BF in zip(rest, self._pooled([[ids[r] for r in rows] for rows in rest]), strict=True):
                pooled_NF[rows] = pooled_BF
                features.write(pooled_BF.numpy())
                self._work.embedded += len(rows)
                self._work.did(sum(len(texts[row]) for row in rows))
        return pooled_NF

    def _pooled(self, batches: list[list[Tensor]]) -> Iterator[Tensor]:
        """Weighted means (B, F) of each batch, in order: by the processes where there are many, else here."""
        weights_V, end = self._fitted["weights"], self._tokenizer.end_of_text
        if self._processes is None or len(batches) < _SHARED_OUT:
            for ids in batches:
                yield pool_batch(self._model, weights_V, end, ids)
            return
        yield from self._processes.pooled(self._model, weights_V, end, batches)

    def _name(self, ids: Sequence[Tensor]) -> str:
        """The features of these texts are named by all that they are computed from."""
        digest = hashlib.sha256(self._model_digest)
        digest.update(self._fitted["weights"].numpy().tobytes())
        for text in ids:
            digest.update(len(text).to_bytes(8, "little") + text.numpy().tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def _model_digest(self) -> bytes:
        device = self._model.tok.weight.device
        how = [torch.__version__, device.type, bf16_is_fast(device), _ROWS, self._tokenizer.end_of_text]
        digest = hashlib.sha256(to_json([self._model.spec, *map(str, how)]))
        for name, tensor in self._model.state_dict().items():
            digest.update(name.encode() + tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.digest()


def _read_fitted(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise Damaged(path.parents[1], f"{path.name}: {error}") from None


def inverse_frequency(ids: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """log(N / n) of each token (V), n being the texts that have it; tokens that no text has weigh as if one had."""
    counts_V = np.zeros(vocab_size)
    for text in ids:
        counts_V[np.unique(np.asarray(text, np.int64))] += 1
    return torch.from_numpy(np.log(len(ids) / counts_V.clip(min=1)).clip(min=_LEAST_WEIGHT)).float()


def fit_maps(
    passages_NF: Tensor, titles_PF: Tensor, owners: Sequence[int], width: int, fit: FitSettings,
    work: IndexWork | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Means (F) and maps (F, E) of passages and queries, from features in streams of `width`."""
    passage_mean_F = passages_NF.mean(0)
    query_mean_F = titles_PF.mean(0) if len(titles_PF) else passage_mean_F
    whitening_FF = _whitening(passages_NF - passage_mean_F, width)
    own_PF, titles_PF = passages_NF[list(owners)] - passage_mean_F, titles_PF - query_mean_F
    passage_map_FE, query_map_FE = _contrast(own_PF @ whitening_FF, titles_PF @ whitening_FF, fit, work)
    return {
        "passage_mean": passage_mean_F, "passage_map": whitening_FF @ passage_map_FE,
        "query_mean": query_mean_F.clone(), "query_map": whitening_FF @ query_map_FE,
    }  # fmt: skip


def apply_maps(maps: dict[str, Tensor], pooled_NF: Tensor, kind: str) -> Vectors:
    """Unit vectors (N, E) of features, `kind` being "passage" or "query"."""
    return np.asarray(F.normalize((pooled_NF - maps[f"{kind}_mean"]) @ maps[f"{kind}_map"], dim=1))


def _whitening(centred_NF: Tensor, width: int) -> Tensor:
    """(F, F) that gives the principal directions of each stream of `width` one variance (arXiv 2103.15316)."""
    blocks = []
    for centred_ND in centred_NF.split(width, dim=1):
        variances_D, directions_DD = torch.linalg.eigh((centred_ND.T @ centred_ND / len(centred_ND)).double())
        floor = float(variances_D[-1]) * _VARIANCE_FLOOR or 1.0
        scales_D = torch.where(variances_D < floor, 0.0, variances_D.clamp(min=floor) ** -0.5)
        blocks.append((directions_DD * scales_D).float())
    return torch.block_diag(*blocks)


def steps_to_fit(pairs: int, fit: FitSettings) -> int:
    """Steps in which the maps are fitted to so many pairs; none where no pair has another to be told from."""
    return fit.epochs * -(-pairs // _PAIRS) if pairs > 1 else 0


def _contrast(
    passages_PF: Tensor, titles_PF: Tensor, fit: FitSettings, work: IndexWork | None = None
) -> tuple[Tensor, Tensor]:
    """Maps (F, E) of passages and of titles under which the two of a pair are more alike than those of other pairs.

    Both begin as the same random projection, which keeps angles; without pairs that is what they stay.
    """
    generator = torch.Generator().manual_seed(fit.seed)
    pairs, features = passages_PF.shape
    start_FE = torch.linalg.qr(torch.randn(features, min(fit.size, features), generator=generator))[0]
    maps = [start_FE.clone().requires_grad_() for _ in range(2)]
    adam = torch.optim.Adam(maps)
    steps, work = steps_to_fit(pairs, fit), work or IndexWork()
    work.start("fitting")
    for step in range(steps):
        adam.param_groups[0]["lr"] = adam.defaults["lr"] * (1 - step / steps)
        chosen = torch.randperm(pairs, generator=generator)[:_PAIRS]
        both = zip((passages_PF, titles_PF), maps, strict=True)
        a_BE, b_BE = (F.normalize(x_PF[chosen] @ map_FE, dim=1) for x_PF, map_FE in both)
        alike_BB, own_B = b_BE @ a_BE.T * _SHARPNESS, torch.arange(len(chosen))
        adam.zero_grad()
        (F.cross_entropy(alike_BB, own_B) + F.cross_entropy(alike_BB.T, own_B)).backward()
        adam.step()
        work.did(1)
    return maps[0].detach(), maps[1].detach()
