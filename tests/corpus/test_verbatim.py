"""What stands in a corpus word for word, against a search by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.corpus import verbatim
from farspan.corpus.verbatim import verbatim_share


@given(
    corpus=st.lists(st.integers(0, 2), max_size=60),
    written=st.lists(st.integers(0, 2), max_size=20),
    least=st.integers(1, 6),
)
def test_verbatim_share_is_what_a_search_by_hand_finds(corpus, written, least):
    covered = set()
    for i in range(len(written) - least + 1):
        gram = written[i : i + least]
        if any(corpus[j : j + least] == gram for j in range(len(corpus) - least + 1)):
            covered.update(range(i, i + least))
    wanted = len(covered) / len(written) if covered else 0.0
    assert verbatim_share(
        np.array(written, np.int64), np.array(corpus, np.uint16), least
    ) == pytest.approx(wanted)


def test_a_run_over_the_border_of_two_parts_is_found(monkeypatch):
    monkeypatch.setattr(verbatim, "PART_TOKENS", 50)
    rng = np.random.default_rng(0)
    corpus = rng.integers(0, 8000, 400).astype(np.uint16)
    for start in (0, 30, 42, 49, 50, 51, 380):
        written = np.concatenate(
            [rng.integers(8000, 9000, 10), corpus[start : start + 20], rng.integers(8000, 9000, 10)]
        )
        assert verbatim_share(written, corpus) == pytest.approx(20 / 40)
