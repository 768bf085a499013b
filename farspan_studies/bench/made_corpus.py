"""Made-up token files: what speed is measured on, where the text does not matter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np

from farspan.corpus import tokenizer as tokenizers
from farspan.domain.corpus import CorpusManifest, Split
from farspan.domain.struct_files import content_hash, save

#: Of every ten tokens nine follow from the one before, so that a model has something to learn.
FOLLOWS = 0.9
JUMP = 7
#: Bytes of text that a token stands for; nothing depends on it.
TOKEN_BYTES = 3


def make(folder: Path, vocab: int, tokens: int, seed: int = 0) -> CorpusManifest:
    """Return a corpus of so many tokens for training, and a twentieth more for validation; the same
    arguments make the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    splits = dict[str, Split]()
    dtype: Literal["uint16", "uint32"] = "uint16" if vocab <= 2**16 else "uint32"
    for name, count in (("train", tokens + 1), ("val", tokens // 20 + 1)):
        jumps = np.where(rng.random(count) < FOLLOWS, JUMP, rng.integers(0, vocab, count))
        (np.cumsum(jumps) % vocab).astype(np.dtype(dtype).newbyteorder("<")).tofile(
            folder / f"{name}.bin"
        )
        np.array([0, count], "<i8").tofile(folder / f"{name}.idx")
        splits[name] = Split(tokens=count, documents=1, text_bytes=TOKEN_BYTES * count)
    manifest = CorpusManifest(
        hash=content_hash("made", vocab, tokens, seed),
        source="made-up tokens",
        vocab_size=vocab,
        end_of_text=0,
        dtype=dtype,
        unigram_nats=math.log(vocab),
        bigram_nats=math.log(vocab),
        exact_duplicates=0,
        near_duplicates=0,
        train=splits["train"],
        val=splits["val"],
    )
    tokenizers.train_bpe_tokenizer(["alpha beta gamma delta"] * 50, max(vocab, 257)).save(
        folder / "tokenizer.json"
    )
    save(manifest, folder / "corpus.json")
    return manifest
