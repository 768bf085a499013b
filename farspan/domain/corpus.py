"""What a prepared corpus is: one folder of token files, described by its manifest `corpus.json`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath
from typing import Literal

import msgspec

#: The files of both splits, as `Split` describes them.
TOKEN_FILES = ("train.bin", "train.idx", "val.bin", "val.idx")
#: A line about several skipped files.
_SEVERAL = re.compile(r"and \d+ [^/,:]+(, \d+ [^/,:]+)*(: |$)")


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
    #: Documents left out as exact or near duplicates, and files skipped with the reason: the first by name.
    exact_duplicates: int
    near_duplicates: int
    skipped: tuple[str, ...] = ()

    @property
    def skipped_kinds(self) -> list[str]:
        return by_kind(self.skipped)


def by_kind(skipped: Iterable[str]) -> list[str]:
    """`12 .bin, 3 .exe: REASON` of lines `PATH: REASON` or `and 12 .bin: REASON`, one line for each reason."""
    counts: dict[str, Counter[str]] = {}
    for line in skipped:
        several = _SEVERAL.match(line)
        what, colon, reason = line.partition(": ")
        kinds = counts.setdefault(colon + reason, Counter())
        for number, kind in re.findall(r"(\d+) ([^,]+)", what) if several else [("1", _kind(what))]:
            kinds[kind] += int(number)
    return [
        ", ".join(f"{number} {kind}" for kind, number in kinds.most_common()) + reason
        for reason, kinds in counts.items()
    ]


def _kind(path: str) -> str:
    return PurePath(path).suffix.lower() or "without an extension"


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One text. `origin` says where it came from: a path, a dataset row, a qualified name."""

    title: str
    text: str
    origin: str
    metadata: dict[str, str] = {}
