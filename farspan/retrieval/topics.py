"""Topics of a corpus: groups of documents that are alike, named by the words that set them apart.

Documents are grouped by spherical k-means (Dhillon and Modha 2001) of the means of their passages'
vectors; where an index has no vectors, of sketches of their words. Everything is seeded: the same
index has the same topics.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Container, Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.problems import Refusal
from farspan.domain.units import counted

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.intp]

_WHERE = "the topic of a search"
#: Topics at most, and documents of a topic at least, on average: fewer are no group.
MAX_TOPICS = 12
MIN_DOCUMENTS = 6
#: Starts of k-means, of which the tightest is kept, and steps of one.
STARTS = 4
MAX_STEPS = 40
#: Documents that k-means looks at; the others join the nearest group.
MAX_CLUSTERED = 20_000
#: Numbers of a sketch of words: cosines of random projections are off by 1/16 on average.
SKETCH_SIZE = 256
#: Words that name a topic, and documents that must have such a word.
NAME_WORDS = 3
MIN_WORD_DOCUMENTS = 2
#: A word that is in more of all documents than this names none.
MAX_WORD_SHARE = 0.4
#: Characters of a document whose words count; documents that name topics where vectors group them;
#: and words of a sketch.
MAX_NAMED_CHARS = 2_000
MAX_NAMED_DOCUMENTS = 4_000
MAX_SKETCHED_WORDS = 50_000

#: Letters with the marks that belong to them, which \w leaves out: of Indic scripts, Thai, Hebrew
#: and Arabic, and combining accents. No digits.
_WORD = re.compile(
    r"(?:[^\W\d_]|[\u0300-\u036f\u05b0-\u05c7\u064b-\u065f\u0900-\u0dff\u0e31-\u0e4e])+"
)
#: Scripts without spaces: their words are pairs of characters here.
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]+")
_MIN_WORD_CHARS = 3


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A group of documents, named by its words. The largest has number 0."""

    number: int
    name: str
    words: tuple[str, ...]
    documents: int


class Topics(msgspec.Struct, frozen=True, kw_only=True):
    """The topics of an index, the largest first; none of a few documents."""

    topics: tuple[Topic, ...] = ()


def refuse_topic(number: int, topics: Topics) -> Refusal:
    count = len(topics.topics)
    return Refusal(
        "usage",
        what=f"there is no topic {number}",
        where=_WHERE,
        fact=f"the index has {counted(count, 'topic')}, counted from 0",
        remedy="look at /api/topics: a new index has topics of its own",
    )


def find_topics(
    vectors_NE: Floats | None, texts: Sequence[str], seed: int = 0
) -> tuple[Topics, Ints]:
    """Return the topics of documents and the topic of each, -1 where there are none.

    `vectors_NE` has a vector of each document, zero for one without; None for sketches of
    `texts`.
    """
    count = len(texts)
    num_topics = min(MAX_TOPICS, count // MIN_DOCUMENTS)
    if num_topics < 2:
        return Topics(), np.full(count, -1, np.intp)
    named = np.arange(count)
    if count > MAX_NAMED_DOCUMENTS and vectors_NE is not None:
        named = np.unique(np.linspace(0, count - 1, MAX_NAMED_DOCUMENTS).astype(np.intp))
    words = [words_of(texts[row]) for row in named.tolist()]
    shared = Counter(chain.from_iterable(words))
    if vectors_NE is None:
        vectors_NE = sketch_words(words, shared)
    labels = group_vectors(vectors_NE, num_topics, seed)

    # The largest group has number 0.
    sizes = np.bincount(labels)
    groups = sorted(np.flatnonzero(sizes).tolist(), key=lambda group: (-sizes[group], group))
    numbers = np.zeros(len(sizes), np.intp)
    numbers[groups] = np.arange(len(groups))
    labels = numbers[labels]
    topics = []
    for number, chosen in enumerate(name_groups(words, shared, labels[named], len(groups))):
        topic = Topic(
            number=number,
            name=", ".join(chosen) or f"topic {number + 1}",
            words=chosen,
            documents=int(sizes[groups[number]]),
        )
        topics.append(topic)
    return Topics(topics=tuple(topics)), labels


def words_of(text: str) -> Counter[str]:
    """Count the words of a text that may name a topic, in lower case."""
    words = Counter[str]()
    for match in _WORD.finditer(text[:MAX_NAMED_CHARS].lower()):
        word = match[0]
        unspaced = _UNSPACED.search(word)
        if unspaced:
            run = unspaced[0]
            words.update(run[start : start + 2] for start in range(len(run) - 1))
        elif len(word) >= _MIN_WORD_CHARS:
            words[word] += 1
    return words


def sketch_words(words: Sequence[Counter[str]], shared: Counter[str]) -> Floats:
    """Return a vector of each document: the sum of random directions of its words, rare words
    counting more."""
    count = len(words)
    common = [word for word, number in shared.items() if number >= MIN_WORD_DOCUMENTS]
    common.sort(key=lambda word: (-shared[word], word))
    rows = {word: row for row, word in enumerate(common[:MAX_SKETCHED_WORDS])}
    directions_VE = np.zeros((len(rows), SKETCH_SIZE), np.float32)
    for word, row in rows.items():
        digest = hashlib.blake2b(word.encode(), digest_size=SKETCH_SIZE // 8).digest()
        signs = np.unpackbits(np.frombuffer(digest, np.uint8)).astype(np.float32) * 2 - 1
        directions_VE[row] = math.log(count / shared[word]) * signs
    sketch_NE = np.zeros((count, SKETCH_SIZE), np.float32)
    for number, each in enumerate(words):
        used = [word for word in each if word in rows]
        weights = np.array([math.log1p(each[word]) for word in used], np.float32)
        sketch_NE[number] = weights @ directions_VE[[rows[word] for word in used]]
    return sketch_NE


def group_vectors(vectors_NE: Floats, num_groups: int, seed: int) -> Ints:
    """Return the group of each vector, by spherical k-means about their common mean."""
    rng = np.random.default_rng(seed)
    is_there = np.abs(vectors_NE).sum(1) > 0
    centred_NE = vectors_NE - vectors_NE[is_there].mean(0) if is_there.any() else vectors_NE
    units_NE = _unit_rows(centred_NE)
    sample = np.arange(len(units_NE))
    if len(sample) > MAX_CLUSTERED:
        sample = np.sort(rng.choice(len(sample), MAX_CLUSTERED, replace=False))

    best_fit = -np.inf
    best_KE = units_NE[:1]
    for _ in range(STARTS):
        centres_KE, fit = _cluster(units_NE[sample], num_groups, rng)
        # A later start must be better for certain, not by rounding.
        if fit > best_fit + 1e-9:
            best_fit = fit
            best_KE = centres_KE
    labels: Ints = (units_NE @ best_KE.T).argmax(1)
    return labels


def _cluster(units_NE: Floats, num_groups: int, rng: np.random.Generator) -> tuple[Floats, float]:
    """Return centres (K, E) and their mean cosine, from one start of k-means++."""
    centres_KE = _first_centres(units_NE, num_groups, rng)
    labels = np.full(len(units_NE), -1)
    fit = -np.inf
    for _ in range(MAX_STEPS):
        cosines_NK = units_NE @ centres_KE.T
        nearest = cosines_NK.argmax(1)
        fit = float(cosines_NK.max(1).mean(dtype=np.float64))
        if (nearest == labels).all():
            break
        labels = nearest
        sums_KE = np.zeros_like(centres_KE)
        np.add.at(sums_KE, labels, units_NE)
        # A group that lost all of its members keeps its centre.
        is_used = np.bincount(labels, minlength=num_groups) > 0
        centres_KE = np.where(is_used[:, None], _unit_rows(sums_KE), centres_KE)
    return centres_KE, fit


def _first_centres(units_NE: Floats, num_groups: int, rng: np.random.Generator) -> Floats:
    """Choose rows that lie far from each other (k-means++, Arthur and Vassilvitskii 2007)."""
    rows = [int(rng.integers(len(units_NE)))]
    far_N = np.full(len(units_NE), np.inf)
    for _ in range(num_groups - 1):
        far_N = np.minimum(far_N, np.maximum(1 - units_NE @ units_NE[rows[-1]], 0))
        total = far_N.sum()
        if total <= 0:
            rows.append(int(rng.integers(len(units_NE))))
        else:
            rows.append(int(np.searchsorted(far_N.cumsum(), rng.random() * total)))
    return units_NE[np.minimum(rows, len(units_NE) - 1)]


def _unit_rows(vectors_NE: Floats) -> Floats:
    lengths_N = np.linalg.norm(vectors_NE, axis=1, keepdims=True)
    units: Floats = (vectors_NE / np.maximum(lengths_N, 1e-12)).astype(np.float32)
    return units


def name_groups(
    words: Sequence[Counter[str]], shared: Counter[str], labels: Ints, num_groups: int
) -> list[tuple[str, ...]]:
    """Return the words that name each group of documents."""
    usable = {word for word, number in shared.items() if _can_name(number, len(words))}
    everywhere = _mean_weights(words, usable)
    chosen = []
    for group in range(num_groups):
        members = [words[row] for row in np.flatnonzero(labels == group).tolist()]
        chosen.append(_distinctive_words(members, everywhere, len(words)))
    return chosen


def _can_name(documents: int, count: int) -> bool:
    return MIN_WORD_DOCUMENTS <= documents <= MAX_WORD_SHARE * count


def _mean_weights(words: Sequence[Counter[str]], usable: Container[str]) -> dict[str, float]:
    """Return the mean weight of each word in documents; a word that comes twice weighs less than
    double."""
    sums: dict[str, float] = {}
    for each in words:
        for word, times in each.items():
            if word in usable:
                sums[word] = sums.get(word, 0.0) + math.log1p(times)
    return {word: total / max(len(words), 1) for word, total in sums.items()}


def _distinctive_words(
    members: Sequence[Counter[str]], everywhere: dict[str, float], count: int
) -> tuple[str, ...]:
    """Return the words that weigh much in most of a group's documents, and little in the others.

    A word scores its weight inside, times the share of documents that have it, times the logarithm
    of how much more it weighs than outside.
    """
    having = Counter(chain.from_iterable(members))
    scores = {}
    others = count - len(members)
    for word, inside in _mean_weights(members, everywhere).items():
        if having[word] < MIN_WORD_DOCUMENTS:
            continue
        total = everywhere[word] * count
        outside = (total - inside * len(members) + 0.5) / (others + 1)
        lift = max(math.log(inside / outside), 0)
        scores[word] = inside * having[word] / len(members) * lift
    chosen: list[str] = []
    for word in sorted(scores, key=lambda word: (-scores[word], word)):
        # One form of a word is enough: "servers" next to "server" adds nothing.
        stem = word[: max(4, len(word) - 2)]
        is_form = any(other.startswith(stem) or word.startswith(other[:-1]) for other in chosen)
        if not is_form and scores[word] > 0:
            chosen.append(word)
        if len(chosen) == NAME_WORDS:
            break
    return tuple(chosen)
