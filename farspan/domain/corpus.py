"""What a prepared corpus is: one folder of token files, described by its manifest `corpus.json`."""

from __future__ import annotations

from typing import Literal

import msgspec

#: The files of both splits, as `Split` describes them.
TOKEN_FILES = ("train.bin", "train.idx", "val.bin", "val.idx")


class Split(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token file: `NAME.bin`, tokens one after the other, a document's last followed by the end-of-text token.

    `NAME.idx` holds `documents + 1` little-endian int64 offsets (in tokens): document i is tokens[idx[i]:idx[i+1]].
    """

    tokens: int
    documents: int
    #: UTF-8 bytes of the text, without end-of-text tokens: what bits per byte divide by.
    text_bytes: int


class CorpusManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`hash` covers source content, split, tokenizer and format: equal hash, equal bytes.

    `documents.jsonl.zst` beside it holds every kept document (domain.corpus.Document) in the order of its split's
    token file: first all of train, then all of val.
    """

    hash: str
    source: str
    vocab_size: int
    #: Id of the end-of-text token.
    end_of_text: int
    dtype: Literal["uint16", "uint32"]
    train: Split
    val: Split
    #: Entropy of the validation tokens under train-set counts, nats a token: unigram (add-one smoothed), and bigram
    #: (smoothed towards the unigram, see `farspan.corpus.entropy`).
    unigram_nats: float
    bigram_nats: float
    #: Documents left out as exact or near duplicates, and files skipped with the reason.
    exact_duplicates: int
    near_duplicates: int
    skipped: tuple[str, ...] = ()


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One text. `origin` says where it came from: a path, a dataset row, a qualified name."""

    title: str
    text: str
    origin: str
    metadata: dict[str, str] = {}
