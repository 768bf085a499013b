"""What tells one host's token files from another's."""

from __future__ import annotations

import numpy as np

from farspan.corpus import tokens
from farspan.corpus.tokens import fingerprint


def test_whichever_token_differs_the_fingerprint_does():
    random = np.random.default_rng(0)
    ours = random.integers(0, 2**16, 5000, dtype=np.uint16)
    assert fingerprint(ours.copy()) == fingerprint(ours)
    for place in (0, 4999, *random.integers(5000, size=50)):
        other = ours.copy()
        other[place] ^= 1
        assert fingerprint(other) != fingerprint(ours)
    assert fingerprint(ours[:-1]) != fingerprint(ours)


def test_of_large_files_evenly_spaced_blocks_are_read(monkeypatch):
    monkeypatch.setattr(tokens, "BLOCKS", 4)
    monkeypatch.setattr(tokens, "BLOCK", 10)
    ours = np.zeros(100, np.uint8)
    read = [
        place
        for place in range(100)
        if fingerprint(ours) != fingerprint((np.arange(100) == place).view(np.uint8))
    ]
    assert read == [start + i for start in (0, 25, 50, 75) for i in range(10)]
