"""A BERT-like encoder: passages by torch where it is installed, queries by numpy.

Shapes: N texts, B texts of a batch, S positions, D size of a state, E size of a vector.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from farspan.retrieval.encoders.architecture import (
    Architecture,
    Weights,
    bind_weights,
    read_architecture,
)
from farspan.retrieval.encoders.encoder import (
    Identity,
    Ids,
    Steps,
    apply_steps,
    identify,
    limit_tokens,
    load_steps,
    load_tokenizer,
    pool_states,
    require_same,
)
from farspan.retrieval.encoders.layout import TOKENIZER, WEIGHTS, Layout, Pooling, unsupported
from farspan.retrieval.encoders.numpy_forward import compute_states
from farspan.retrieval.encoders.tensors import Floats, read_tensors, require_finite
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.stores import Vectors

#: Tokens a batch, padding included: enough for full matrix products, and activations stay in cache.
_BATCH_TOKENS = 2048


class TransformerEncoder:
    """A transformer with its tokenizer and pooling; see `encoder.Encoder`."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        identity: Identity,
        tokenizer: Tokenizer,
        architecture: Architecture,
        weights: Weights,
        steps: Steps,
        dim: int,
    ) -> None:
        assert layout.pooling is not None
        self.folder = folder
        self.name = identity.name
        self.id = identity.id
        self.languages = identity.languages
        self.dim = dim
        self.max_tokens = min(layout.max_tokens, architecture.max_tokens)
        self.architecture = architecture
        self.weights = weights
        self._pooling: Pooling = layout.pooling
        self._prompts = layout.prompts
        self.tokenizer = tokenizer
        self._steps = steps

    @classmethod
    def open(cls, folder: Path, layout: Layout, made_with: str) -> TransformerEncoder:
        """Open a folder; see `open_encoder`."""
        assert layout.pooling is not None
        model = folder / layout.model
        architecture = read_architecture(folder, model)
        size = architecture.d_model
        if layout.pooling.dimension not in (None, size):
            raise unsupported(
                folder,
                f"its pooling takes states of {layout.pooling.dimension} numbers, and config.json "
                f"says {size}",
            )
        # Files are hashed while others are read: it takes as long as all else.
        with ThreadPoolExecutor(1) as pool:
            hashing = pool.submit(identify, folder, layout, architecture)
            tensors = read_tensors(model / WEIGHTS)
            weights = bind_weights(folder, model, architecture, tensors)
            checked = made_with != ""
            if not checked:
                require_finite(model / WEIGHTS, tensors)
            vocabulary = architecture.vocab_size
            tokenizer = load_tokenizer(model / TOKENIZER, layout, vocabulary, checked=checked)
            limit_tokens(tokenizer, min(layout.max_tokens, architecture.max_tokens))
            steps, dim = load_steps(folder, layout, size * len(layout.pooling.modes))
            identity = hashing.result()
        require_same(identity, made_with, folder)
        return cls(folder, layout, identity, tokenizer, architecture, weights, steps, dim)

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return unit vectors (N, E) of queries, without torch."""
        ids = self.tokenize(texts, self._prompts.query)
        prompt_tokens = self._count_prompt(self._prompts.query)
        pooled = np.zeros((len(texts), self._pooled_size), np.float32)
        for rows in _batches(ids):
            batch = [ids[row] for row in rows]
            pooled[rows] = self.pool(self.numpy_states(batch), batch, prompt_tokens)
        return apply_steps(pooled, self._steps)

    def passages(
        self, texts: Sequence[str], work: IndexWork | None = None, device: str = "auto"
    ) -> Vectors:
        """Return unit vectors (N, E) of passages; by numpy where torch is not installed.

        On a GPU, or a CPU with instructions for it, products are in bf16.
        """
        return self._embed(texts, self._prompts.document, work or IndexWork(), device)

    def many_queries(
        self, texts: Sequence[str], work: IndexWork | None = None, device: str = "auto"
    ) -> Vectors:
        """Return unit vectors (N, E) of queries, computed as passages are."""
        return self._embed(texts, self._prompts.query, work or IndexWork(), device)

    def _embed(self, texts: Sequence[str], prompt: str, work: IndexWork, device: str) -> Vectors:
        ids = self.tokenize(texts, prompt)
        batches = list(_batches(ids))
        pooled = np.zeros((len(texts), self._pooled_size), np.float32)
        with work.features(self._features_id(ids, prompt)) as features:
            work.start_kind("embedding")
            computed: Iterator[Floats] | None = None
            for number, rows in enumerate(batches):
                # Kept batches come first; from the first that is not, all are computed.
                block = None
                if computed is None:
                    block = features.read(len(rows) * self._pooled_size)
                if block is None:
                    if computed is None:
                        computed = self._pool_batches(ids, batches[number:], prompt, device)
                    block = next(computed)
                    features.write(block)
                pooled[rows] = block.reshape(len(rows), -1)
                chars = sum(len(texts[row]) for row in rows)
                work.add_done(chars, texts=len(rows), kept=computed is None)
        return apply_steps(pooled, self._steps)

    def tokenize(self, texts: Sequence[str], prompt: str) -> list[Ids]:
        encodings = self.tokenizer.encode_batch_fast([prompt + text for text in texts])
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def numpy_states(self, ids: Sequence[Ids]) -> Floats:
        """Return the states (B, S, D) of a batch of texts."""
        longest = max(map(len, ids))
        ids_BS = np.zeros((len(ids), longest), np.int64)
        mask_BS = np.zeros((len(ids), longest), np.bool_)
        for row, text in enumerate(ids):
            ids_BS[row, : len(text)] = text
            mask_BS[row, : len(text)] = True
        return compute_states(self.weights, self.architecture, ids_BS, mask_BS)

    def pool(self, states_BSD: Floats, ids: Sequence[Ids], prompt_tokens: int) -> Floats:
        """Pool the states of each text of a batch."""
        rows = [
            pool_states(states_SD[: len(text)], self._pooling, prompt_tokens)
            for states_SD, text in zip(states_BSD, ids, strict=True)
        ]
        return np.stack(rows)

    @property
    def _pooled_size(self) -> int:
        return self.architecture.d_model * len(self._pooling.modes)

    def _count_prompt(self, prompt: str) -> int:
        """Count a prompt's tokens with the special ones before it."""
        if not prompt or self._pooling.include_prompt:
            return 0
        encoding = self.tokenizer.encode(prompt)
        return len(encoding.ids) - (1 if encoding.special_tokens_mask[-1] else 0)

    def _pool_batches(
        self, ids: Sequence[Ids], batches: Sequence[Sequence[int]], prompt: str, device: str
    ) -> Iterator[Floats]:
        """Yield the pooled states of each batch of rows, in order."""
        prompt_tokens = self._count_prompt(prompt)
        texts = [[ids[row] for row in rows] for rows in batches]
        if importlib.util.find_spec("torch") is None:
            for batch in texts:
                yield self.pool(self.numpy_states(batch), batch, prompt_tokens)
            return
        # Here alone, as a search must not wait for torch.
        from farspan.retrieval.encoders.torch_forward import TorchForward

        forward = TorchForward(self.weights, self.architecture, device)
        for batch, states_BSD in zip(texts, forward.states(texts), strict=True):
            yield self.pool(states_BSD, batch, prompt_tokens)

    def _features_id(self, ids: Sequence[Ids], prompt: str) -> str:
        """Return the name of these texts' pooled states, a hash of all they are computed from."""
        digest = hashlib.sha256(f"{self.id} {_BATCH_TOKENS} {prompt}".encode())
        for text in ids:
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text.tobytes())
        return digest.hexdigest()


def _batches(ids: Sequence[Ids]) -> Iterator[list[int]]:
    """Yield rows of texts of nearly one length, of up to `_BATCH_TOKENS` tokens, shortest first."""
    order = sorted(
        (row for row, text in enumerate(ids) if len(text)), key=lambda row: len(ids[row])
    )
    batch: list[int] = []
    for row in order:
        if batch and (len(batch) + 1) * len(ids[row]) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
