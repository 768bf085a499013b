"""Find documents that are copies of one another: MinHash signatures, locality-sensitive hashing,
exact verification.

Near duplicates share at least THRESHOLD of their word triples (Jaccard). Signatures and triples lie
in files, one set a shard; in memory are about 40 bytes a document. Two documents of Jaccard 0.8 are
missed with probability 2e-5.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from farspan.corpus.documents import read_lines, write_array
from farspan.domain.own_files import open_own

THRESHOLD = 0.8
#: (1 - 0.8^5)^28 = 2e-5 pairs of Jaccard 0.8 share no band.
BANDS = 28
ROWS_PER_BAND = 5
SHINGLE_WORDS = 3
#: Of longer documents the smallest hashes are kept: an unbiased Jaccard estimate within 0.006.
MAX_SHINGLES = 4096
#: In a bucket each document is compared with this many next larger ones, so that templates stay
#: affordable.
BUCKET_WINDOW = 32

# A word, or one character of a script written without spaces.
_WORD = re.compile(r"[\u3040-\u9fff\uac00-\ud7a3]|[^\W\u3040-\u9fff\uac00-\ud7a3]+")
_RANDOM_BYTES = hashlib.shake_128(b"farspan minhash").digest(8 * BANDS * ROWS_PER_BAND)
_SEEDS = np.frombuffer(_RANDOM_BYTES, "<u4").reshape(2, -1)
_PRIMES = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


def text_hash(text: str) -> int:
    """Return 64 bits of the text's BLAKE2b: equal for equal texts, and what the split goes by."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def shingle_hashes(text: str) -> U32:
    """Return the sorted distinct hashes of the text's word triples, lower case; of a text of fewer
    words, of all its words."""
    words = _WORD.findall(text.lower()) or [text]
    hashes = np.array([zlib.crc32(word.encode()) for word in words], np.uint64)
    width = min(SHINGLE_WORDS, len(words))
    count = len(words) - width + 1
    mixed = np.zeros(count, np.uint64)
    for place in range(width):
        mixed ^= hashes[place : place + count]
        mixed *= _PRIMES[place]
        mixed ^= mixed >> np.uint64(29)
    high = mixed >> np.uint64(32)
    distinct: U32 = np.unique(high.astype(np.uint32))
    return distinct


def jaccard(a: U32, b: U32) -> float:
    """Return the Jaccard similarity of two shingle sets; of truncated ones, estimated on their
    common range."""
    truncated = [s for s in (a, b) if len(s) == MAX_SHINGLES]
    if truncated:
        top = min(s[-1] for s in truncated)
        a = a[a <= top]
        b = b[b <= top]
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)


def sign(stem: Path) -> None:
    """Write of a shard: .marks.npy [1 + BANDS, documents], text hashes and then band hashes; the
    documents' shingles one after the other (.shingles), and where each ends (.ends.npy)."""
    documents = read_lines(stem.with_suffix(".docs"))
    texts = [document.text for document in documents]
    sets = [shingle_hashes(text) for text in texts]
    hashes = np.array([text_hash(text) for text in texts], np.uint64)
    kept = [s[:MAX_SHINGLES] for s in sets]
    ends = np.cumsum([len(s) for s in kept], dtype=np.uint32)
    marks = np.vstack([hashes, _minhash_bands(sets)])
    write_array(stem.with_suffix(".marks.npy"), marks)
    with open_own(stem.with_suffix(".shingles"), "wb") as file:
        file.write(np.concatenate(kept).tobytes())
    write_array(stem.with_suffix(".ends.npy"), ends)


def _minhash_bands(sets: list[U32]) -> U64:
    """Return [BANDS, documents]: one hash of ROWS minima of permuted shingles each."""
    block = np.concatenate(sets)
    starts = np.cumsum([0, *map(len, sets[:-1])])
    bands = np.zeros((BANDS, len(sets)), np.uint64)
    for place, (flip, scale) in enumerate(_SEEDS.T):
        band = bands[place // ROWS_PER_BAND]
        permuted = (block ^ flip) * (scale | np.uint32(1))
        band ^= np.minimum.reduceat(permuted, starts)
        band *= _PRIMES[0]
        band ^= band >> np.uint64(32)
    return bands


class Shards:
    """The signatures of all shards, read a row at a time."""

    def __init__(self, stems: list[Path]) -> None:
        self.stems = stems
        ends = [np.load(stem.with_suffix(".ends.npy")) for stem in stems]
        self.first = np.cumsum([0, *map(len, ends)])
        sizes = [np.diff(e, prepend=np.uint32(0)) for e in ends]
        self.sizes: U32 = np.concatenate(sizes)
        self._ends: U32 = np.concatenate(ends)

    def read_lsh_marks(self, row: int) -> U64:
        """Return every document's text hash (row 0), or its hash of band `row`, from 1."""
        rows = []
        for stem in self.stems:
            marks = np.load(stem.with_suffix(".marks.npy"), mmap_mode="r")
            rows.append(np.array(marks[row]))
        return np.concatenate(rows)

    def read_shingles(self, document: int) -> U32:
        shard = int(np.searchsorted(self.first, document, side="right")) - 1
        size = int(self.sizes[document])
        start = int(self._ends[document]) - size
        file = self.stems[shard].with_suffix(".shingles")
        return np.fromfile(file, np.uint32, size, offset=4 * start)


def find_duplicate_clusters(shards: Shards) -> npt.NDArray[np.int64]:
    """Return for each document the first of its cluster of exact and near duplicates (itself if it
    has none)."""
    parent = np.arange(len(shards.sizes))
    for copies in _group_lsh_buckets(shards.read_lsh_marks(0)):
        parent[copies] = copies[0]
    distinct = parent == np.arange(len(parent))
    for band in range(1, 1 + BANDS):
        for bucket in _group_lsh_buckets(shards.read_lsh_marks(band)):
            _merge_bucket(shards, parent, bucket[distinct[bucket]])
    for document in range(len(parent)):  # a parent comes before its child, so one pass flattens
        parent[document] = parent[parent[document]]
    return parent


def _group_lsh_buckets(marks: U64) -> Iterator[npt.NDArray[np.int64]]:
    """Yield groups of two or more documents with the same mark, each in ascending order."""
    order = np.argsort(marks, kind="stable")
    ordered = marks[order]
    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    starts = np.concatenate([[0], edges])
    ends = np.concatenate([edges, [len(marks)]])
    several = ends - starts > 1
    for start, end in zip(starts[several], ends[several], strict=True):
        yield order[start:end]


def _merge_bucket(
    shards: Shards, parent: npt.NDArray[np.int64], bucket: npt.NDArray[np.int64]
) -> None:
    """Join the clusters of verified near duplicates among the documents of a bucket."""
    roots = {_find_root(parent, member) for member in bucket.tolist()}
    if len(roots) < 2:
        return
    by_size = np.argsort(shards.sizes[bucket], kind="stable")
    members = bucket[by_size].tolist()
    for place, member in enumerate(members):
        mine = shards.read_shingles(member)
        for other in members[place + 1 : place + 1 + BUCKET_WINDOW]:
            if len(mine) < THRESHOLD * shards.sizes[other]:
                break
            low, high = sorted((_find_root(parent, member), _find_root(parent, other)))
            if low != high and jaccard(mine, shards.read_shingles(other)) >= THRESHOLD:
                parent[high] = low


def _find_root(parent: npt.NDArray[np.int64], document: int) -> int:
    while (above := int(parent[document])) != document:
        parent[document] = parent[above]
        document = above
    return document
