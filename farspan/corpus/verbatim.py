"""Measure how much of a text stands in a corpus word for word: what a model has memorized."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from farspan.corpus.token_files import Tokens

#: So many tokens on end count as memorized: fewer also come about by chance and by grammar.
#: A choice; Carlini et al. (arXiv 2202.07646) take 50 of a corpus whose common phrases are longer.
MIN_MEMORIZED_TOKENS = 16
#: Tokens that are looked through at a time.
PART_TOKENS = 1 << 20
#: An odd factor of a polynomial's terms, as in Rabin and Karp's search.
FACTOR = 0x9E3779B97F4A7C15

Written = npt.NDArray[np.integer[Any]]


def verbatim_share(written: Written, corpus: Tokens, least: int = MIN_MEMORIZED_TOKENS) -> float:
    """Return the share of `written` tokens that are part of `least` or more on end which stand so
    in `corpus`; 0 of fewer."""
    if len(written) < least or len(corpus) < least:
        return 0.0
    wanted: dict[int, list[int]] = {}
    for i, value in enumerate(_hash_runs(written, least).tolist()):
        wanted.setdefault(value, []).append(i)
    # Most of a corpus differs already in the last bits.
    likely = np.zeros(1 << 16, dtype=bool)
    for value in wanted:
        likely[value % len(likely)] = True
    is_memorized = np.zeros(len(written), dtype=bool)
    for start in range(0, len(corpus) - least + 1, PART_TOKENS):
        part = np.asarray(corpus[start : start + PART_TOKENS + least - 1])
        hashes = _hash_runs(part, least)
        is_likely = likely[hashes.astype(np.uint16)]
        for place in np.flatnonzero(is_likely).tolist():
            run = part[place : place + least]
            for i in wanted.get(int(hashes[place]), ()):
                if np.array_equal(run, written[i : i + least]):
                    is_memorized[i : i + least] = True
    return float(is_memorized.mean())


def _hash_runs(tokens: Written, least: int) -> npt.NDArray[np.uint64]:
    """Hash every `least` tokens on end by a polynomial, as in Rabin and Karp's search."""
    count = len(tokens) - least + 1
    wide = tokens.astype(np.uint64) + np.uint64(1)
    total = np.zeros(count, np.uint64)
    for k in range(least):
        total = total * np.uint64(FACTOR) + wide[k : k + count]
    return total
