"""Decide which documents are trained on, which are held out for validation, and which are copies.

A document is held out if the least text hash of its cluster of near duplicates lies below the
share: the same in any order, and no text has a near duplicate on the other side. Where that would
leave a side empty, the cluster of least hash is held out; of a single text, its end.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from farspan.corpus import dedup, shard_stages
from farspan.corpus.documents import read_lines, write_array
from farspan.domain.config import DataConfig
from farspan.domain.escapes import shell_word, yaml_word
from farspan.domain.problems import Refusal
from farspan.domain.units import parse_fraction

Fates = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

#: Where a text is cut, best first: after a paragraph, a line, a sentence, a word.
_ENDS = tuple(map(re.compile, (r"\n[ \t]*\n\s*", r"\n\s*", r"[.!?]\s+|[。！？]\s*", r"\s+")))
#: How far from the asked share a better place to cut is looked for, as a part of that share.
CUT_REACH = 0.5


class Decision(NamedTuple):
    """What becomes of N documents in the order of their shards: DROPPED, TRAIN, VAL or CUT."""

    fates: Fates
    #: The first held-out character (N) of documents that are CUT, and of dropped copies of these;
    #: else 0.
    cuts: Numbers
    #: The first document (N) of each one's cluster of exact and near duplicates.
    clusters: Numbers
    #: Dropped documents that have the text of an earlier one, and the others.
    exact: int
    near: int

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(self.fates.tobytes())
        if self.cuts.any():
            digest.update(self.cuts.tobytes())
        return digest.hexdigest()

    def corpus_clusters(self) -> Numbers:
        """Return the first document of each one's cluster, by numbers in the corpus: training
        documents come first, then validation, then dropped ones. What is cut counts as two."""
        tailed = np.flatnonzero(self.cuts)
        documents = np.concatenate([np.arange(len(self.fates)), tailed])
        is_tail = np.arange(len(documents)) >= len(self.fates)
        fates = self.fates[documents]
        is_val = (fates == shard_stages.VAL) | is_tail
        sides = np.select([fates == shard_stages.DOCUMENT_DROPPED, is_val], [2, 1], 0)
        order = np.lexsort((is_tail, documents, sides))
        numbers = np.empty(len(order), np.int64)
        numbers[order] = np.arange(len(order))
        heads = numbers[: len(self.fates)]
        tails = heads.copy()
        tails[tailed] = numbers[len(self.fates) :]
        first = self.clusters[documents]
        numbered: Numbers = np.where(is_tail, tails[first], heads[first])
        return numbered[order]


def decide_split(
    stems: list[Path], data: DataConfig, *, must_split: bool, parts: Sequence[int]
) -> Decision:
    """Find duplicates, choose what is held out of each source, and write each shard's fates.
    `parts`: the number of each shard's source, in order.

    Refuses (no-documents) a text that is too short to hold any of it out, if it `must_split`.
    """
    shards = dedup.Shards(stems)
    clusters = dedup.find_duplicate_clusters(shards)
    texts = shards.read_lsh_marks(0)
    copies = clusters != np.arange(len(clusters))
    exact = near = 0
    if data.dedup:
        exact = len(texts) - len(np.unique(texts))
        near = int(copies.sum()) - exact
    dropped = copies & data.dedup
    # Every document goes by the least hash of its cluster.
    keys = texts.copy()
    np.minimum.at(keys, clusters, texts)
    keys = keys[clusters]
    share = parse_fraction(data.val)
    fates = np.full(len(keys), np.uint8(shard_stages.DOCUMENT_DROPPED))
    cuts = np.zeros(len(keys), np.int64)
    for first, stop in _part_shards(parts):
        rows = slice(shards.first[first], shards.first[stop])
        kept = ~dropped[rows]
        if not kept.any():
            continue
        part_keys = keys[rows]
        is_held_out = below_share(part_keys, share)
        is_split = bool(is_held_out[kept].any() and not is_held_out[kept].all())
        if not is_split:
            is_held_out[kept] = of_least_hash(part_keys[kept])
        side = np.where(is_held_out, np.uint8(shard_stages.VAL), np.uint8(shard_stages.TRAIN))
        # Views: what is written to them is written to the whole.
        part_fates = fates[rows]
        part_fates[kept] = side[kept]
        if share and not is_split:
            texts_to_cut = _texts_to_cut(stems[first:stop], part_keys, dropped[rows])
            _hold_out_end(texts_to_cut, part_fates, cuts[rows], share)
    # What one source alone has to hold out is not trained on in another.
    held_clusters = clusters[fates == shard_stages.VAL]
    is_held_cluster = np.zeros(len(fates), bool)
    is_held_cluster[held_clusters] = True
    fates[(fates == shard_stages.TRAIN) & is_held_cluster[clusters]] = shard_stages.VAL
    # Copies of what is cut are cut alike, so that their halves are copies too.
    for document in np.flatnonzero(cuts):
        is_copy = dropped & (texts == texts[document])
        cuts[is_copy] = cuts[document]
    has_held_out = np.isin(fates, (shard_stages.VAL, shard_stages.CUT)).any()
    if must_split and not (share and has_held_out):
        raise _nothing_held_out(data)
    for number, stem in enumerate(stems):
        rows = slice(shards.first[number], shards.first[number + 1])
        columns = np.stack([fates[rows].astype(np.int64), cuts[rows]])
        write_array(stem.with_suffix(".fates.npy"), columns)
    return Decision(fates, cuts, clusters, exact, near)


def _part_shards(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first shard of each source and the one after its last."""
    start = 0
    for _, shards in itertools.groupby(parts):
        stop = start + len(list(shards))
        yield start, stop
        start = stop


def below_share(keys: dedup.U64, share: float) -> npt.NDArray[np.bool_]:
    """Mark the documents (N) that have a key in the lowest `share` of all 64-bit hashes."""
    limit = min(share * 2.0**64, 2.0**64 - 2**12)
    return keys < np.uint64(limit)


def of_least_hash(keys: dedup.U64) -> npt.NDArray[np.bool_]:
    """Mark the documents (N) that have the least key; none where all have the same."""
    least: npt.NDArray[np.bool_] = keys == keys.min()
    return least & (not least.all())


class _Kept(NamedTuple):
    """A document that is not dropped: its number, and its text."""

    number: int
    text: str


def _texts_to_cut(
    stems: list[Path], keys: dedup.U64, dropped: npt.NDArray[np.bool_]
) -> list[list[_Kept]]:
    """Return the texts whose ends are to be held out, each as its parts.

    Each document where all are copies of one another; the source's document where all are parts of
    it. Else none.
    """
    clusters = len(np.unique(keys))
    has_copies = clusters < np.count_nonzero(~dropped)
    if clusters > 1 and has_copies:
        # A copy of what is held out would be trained on.
        return []
    parts: list[_Kept] = []
    origins: set[str] = set()
    shards = (read_lines(stem.with_suffix(".docs")) for stem in stems)
    for number, document in enumerate(itertools.chain.from_iterable(shards)):
        if dropped[number]:
            continue
        parts.append(_Kept(number, document.text))
        origins.add(document.origin)
        if clusters > 1 and len(origins) > 1:
            return []
    return [parts] if clusters > 1 else [[part] for part in parts]


def _hold_out_end(texts: list[list[_Kept]], fates: Fates, cuts: Numbers, share: float) -> None:
    """Write in `fates` and `cuts` (N) that about the last `share` of each text is held out, where
    it has two characters or more."""
    for parts in texts:
        total = sum(len(part.text) for part in parts)
        held_chars = max(1, round(share * total))
        reach = int(CUT_REACH * held_chars)
        target = total - held_chars
        start = 0
        for place, part in enumerate(parts):
            end = start + len(part.text)
            is_near_start = place > 0 and target - start <= reach
            is_near_end = place + 1 < len(parts) and end - target <= reach
            if is_near_start or target < start:
                fates[part.number] = shard_stages.VAL
            elif target >= end or is_near_end:
                fates[part.number] = shard_stages.TRAIN
            else:
                at = place_to_cut(part.text, target - start, reach)
                fates[part.number] = shard_stages.CUT if at else shard_stages.TRAIN
                cuts[part.number] = at
            start = end


def place_to_cut(text: str, target: int, reach: int) -> int:
    """Return the character from which to cut a text in two parts with text: the best place at most
    `reach` characters from `target`. 0 for a text that cannot be cut."""
    first = len(text) - len(text.lstrip())
    last = len(text.rstrip()) - 1
    if first >= last:
        return 0
    low = max(first + 1, target - reach)
    high = min(last, target + reach)
    for end in _ENDS:
        matches = end.finditer(text, max(0, low - 1), high)
        places = [match.end() for match in matches if match.end() >= low]
        if places:
            return min(places, key=lambda place: abs(place - target))
    return min(max(target, first + 1), last)


def _nothing_held_out(data: DataConfig) -> Refusal:
    if parse_fraction(data.val):
        fact = "all of its text is one character, so none of it can be held out"
        remedy = f"add text to {shell_word(data.line)}"
    else:
        fact = f"data.val is {data.val}: nothing is held out"
        remedy = "set data.val: 5%"
    if not parse_fraction(data.val) and not data.is_mixture:
        remedy = f"write in run.yaml: data: {{source: {yaml_word(data.line)}, val: 5%}}"
    return Refusal(
        "no-documents",
        what="the validation part of this corpus would be empty",
        where=data.line,
        fact=fact,
        remedy=remedy,
    )
