"""What a prepared corpus is: one folder of token files, described by its manifest `corpus.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath
from typing import Literal

import msgspec

from farspan.domain.codec import ContentHash

#: The files of both splits, as `Split` describes them.
TOKEN_FILES = ("train.bin", "train.idx", "val.bin", "val.idx")


class Skipped(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A file that was left out and why, or the number of several files by their endings."""

    reason: str
    path: str | None = None
    kinds: dict[str, int] = {}

    @classmethod
    def file(cls, path: object, reason: str) -> Skipped:
        return cls(reason=reason, path=str(path))

    @property
    def counts(self) -> dict[str, int]:
        """The number of files by their endings."""
        return (
            self.kinds
            if self.path is None
            else {PurePath(self.path).suffix.lower() or "without an extension": 1}
        )

    def __str__(self) -> str:
        several = sorted(self.kinds.items(), key=lambda kind: -kind[1])
        return (
            f"{self.path or ', '.join(f'{number} {kind}' for kind, number in several)}: "
            f"{self.reason}"
        )


def by_kind(skipped: Iterable[Skipped]) -> list[Skipped]:
    """Files by their endings, one entry for each reason."""
    counts: dict[str, Counter[str]] = {}
    for entry in skipped:
        counts.setdefault(entry.reason, Counter()).update(entry.counts)
    return [Skipped(reason=reason, kinds=dict(kinds)) for reason, kinds in counts.items()]


class Split(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token file: `NAME.bin`, tokens one after the other, a document's last followed by the
    end-of-text token.

    `NAME.idx` holds `documents + 1` little-endian int64 offsets (in tokens): document i is
    tokens[idx[i]:idx[i+1]].
    """

    tokens: int
    documents: int
    #: UTF-8 bytes of the text, without end-of-text tokens: what bits per byte divide by.
    text_bytes: int


class CorpusManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`hash` covers source content, split, tokenizer and format: equal hash, equal bytes.

    `documents.jsonl.zst` beside it holds every kept document (domain.corpus.Document) in the order
    of its split's token file: first all of train, then all of val.
    """

    hash: ContentHash
    source: str
    vocab_size: int
    #: Id of the end-of-text token.
    end_of_text: int
    dtype: Literal["uint16", "uint32"]
    train: Split
    val: Split
    #: Entropy of the validation tokens under train-set counts, nats a token: unigram (add-one
    #: smoothed), and bigram (smoothed towards the unigram, see `farspan.corpus.entropy`).
    unigram_nats: float
    bigram_nats: float
    #: Documents left out as exact or near duplicates, and files skipped: the first by name, the
    #: others by kind (earlier versions: lines of text).
    exact_duplicates: int
    near_duplicates: int
    skipped: tuple[Skipped | str, ...] = ()

    @property
    def skipped_kinds(self) -> list[str]:
        """`12 .bin, 3 .exe: REASON`, one line for each reason; an earlier version's lines as they
        are."""
        files = [entry for entry in self.skipped if isinstance(entry, Skipped)]
        return [
            *map(str, by_kind(files)),
            *(line for line in self.skipped if isinstance(line, str)),
        ]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One text. `origin` says where it came from: a path, a dataset row, a qualified name.

    A form feed in the text begins a page.
    """

    title: str
    text: str
    origin: str
    metadata: dict[str, str] = {}
    #: Line and page of the source on which the text begins, from 1 on; 0 where it has none.
    line: int = 0
    page: int = 0
