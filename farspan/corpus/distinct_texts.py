"""Documents as they can be searched: every text once, with each place where it stands.

Copies are dropped for training alone. A near copy is a document of its own; an exact copy is one
more place of a document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from farspan.corpus.documents import read_copies, read_documents
from farspan.domain.corpus import CorpusManifest, Document, Place

#: The first document of each one's cluster, by numbers in the corpus: int64, those of documents
#: first and then those of copies.
CLUSTERS = "clusters.npy"


class Copies(NamedTuple):
    """Which of N documents are copies. The first `kept` are those of training and validation."""

    kept: int
    #: The first document (N) of each one's cluster of near duplicates, its own number for most.
    clusters: Sequence[int]
    #: Where exact copies of a document stand, by its number; most have none.
    places: Mapping[int, tuple[Place, ...]]

    @classmethod
    def none(cls, count: int) -> Copies:
        return cls(count, range(count), {})

    @property
    def near(self) -> int:
        return len(self.clusters) - self.kept

    @property
    def exact(self) -> int:
        return sum(map(len, self.places.values()))


class Text(NamedTuple):
    """The distinct texts of a source, and its fingerprint.

    The first `train` are those of the training split; validation and near copies of these follow.
    """

    documents: list[Document]
    train: int
    fingerprint: str
    copies: Copies


def distinct_texts(
    documents: Iterable[Document],
    clusters: Sequence[int],
    *,
    train: int,
    kept: int,
    fingerprint: str,
) -> Text:
    """Merge equal texts of `documents`: the first `train` are for training and the first `kept`
    are not dropped, without what is equal. `clusters` has the first of each one's cluster."""
    texts: list[Document] = []
    places: dict[int, list[Place]] = {}
    numbers: list[int] = []
    by_text: dict[bytes, int] = {}
    trained = distinct_kept = 0
    for row, document in enumerate(documents):
        digest = hashlib.blake2b(document.text.encode(), digest_size=16).digest()
        number = by_text.setdefault(digest, len(texts))
        numbers.append(number)
        if number < len(texts):
            place = Place(
                title=document.title,
                origin=document.origin,
                metadata=document.metadata,
                line=document.line,
                page=document.page,
            )
            places.setdefault(number, []).append(place)
            continue
        texts.append(document)
        trained += row < train
        distinct_kept += row < kept
    # A text's cluster is that of its first document, which comes last here.
    firsts = list(range(len(texts)))
    for row, number in reversed(list(enumerate(numbers))):
        firsts[number] = numbers[clusters[row]]
    exact = {number: tuple(several) for number, several in places.items()}
    return Text(texts, trained, fingerprint, Copies(distinct_kept, firsts, exact))


def read_distinct(prepared: Path, manifest: CorpusManifest, fingerprint: str) -> Text:
    """Return the distinct texts of a prepared corpus, copies that are not trained on too.

    What is replayed is left out, and with it the copies: which source they are of is not kept.
    """
    documents = list(read_documents(prepared))
    if manifest.replays:
        first_val = manifest.train.documents
        train = manifest.own_documents("train")
        own_val = documents[first_val : first_val + manifest.own_documents("val")]
        documents = documents[:train] + own_val
        count = len(documents)
        return distinct_texts(
            documents, range(count), train=train, kept=count, fingerprint=fingerprint
        )
    kept = len(documents)
    documents += read_copies(prepared)
    clusters = np.load(prepared / CLUSTERS).tolist()
    train = manifest.train.documents
    return distinct_texts(documents, clusters, train=train, kept=kept, fingerprint=fingerprint)
