"""Sends between layouts: played on arrays, every rank ends with what it wants, and slow links carry
nothing twice."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.semantics.reshard import HeldRange, Send, plan_reshard

SIZE = 30
places = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)
parts = st.lists(
    st.builds(lambda rank, place: HeldRange(rank, *place), st.integers(0, 8), places), max_size=10
)
layouts = st.tuples(parts, parts, st.lists(st.integers(0, 3), min_size=9, max_size=9))


def elements(layout):
    return {(part.rank, i) for part in layout for i in range(part.start, part.stop)}


def moves(sends):
    """Every element of every send, as (source, target, element)."""
    return [(send.source, send.target, i) for send in sends for i in range(send.start, send.stop)]


def complete(held, wanted):
    """The held parts, and rank 0 with what is wanted of what nobody has."""
    missing = {i for _, i in elements(wanted)} - {i for _, i in elements(held)}
    return [*held, *(HeldRange(0, i, i + 1) for i in sorted(missing))]


@given(layouts)
def test_every_rank_ends_with_the_values_that_it_wants(layout):
    held, wanted, site = layout
    held = complete(held, wanted)
    values = np.arange(SIZE) + 100.0
    ranks = np.full((9, SIZE), np.nan)
    for part in held:
        ranks[part.rank, part.start : part.stop] = values[part.start : part.stop]
    for sends in plan_reshard(held, wanted, site.__getitem__):
        sent = [
            ranks[send.source, send.start : send.stop].copy() for send in sends
        ]  # A round is all at once.
        for send, data in zip(sends, sent, strict=True):
            ranks[send.target, send.start : send.stop] = data
    for part in wanted:
        np.testing.assert_array_equal(
            ranks[part.rank, part.start : part.stop], values[part.start : part.stop]
        )


@given(layouts)
def test_nothing_is_sent_twice_or_further_than_it_must(layout):
    held, wanted, site = layout
    held = complete(held, wanted)
    first, second = plan_reshard(held, wanted, site.__getitem__)
    having = elements(held)
    lacking = elements(wanted) - elements(held)
    assert sorted((target, i) for _, target, i in moves(first + second)) == sorted(lacking)
    assert all((source, i) in having for source, _, i in moves(first))
    at_home = {(site[rank], i) for rank, i in having}
    crossed = sorted(
        (site[target], i) for source, target, i in moves(first) if site[source] != site[target]
    )
    assert crossed == sorted({(site[rank], i) for rank, i in lacking} - at_home)
    arrived = {(target, i) for source, target, i in moves(first) if site[source] != site[target]}
    assert all(
        (source, i) in arrived and site[source] == site[target]
        for source, target, i in moves(second)
    )


@given(layouts, st.randoms(use_true_random=False))
def test_neither_the_order_of_the_parts_nor_the_names_of_the_sites_matter(layout, rng):
    held, wanted, site = layout
    held = complete(held, wanted)
    names = rng.sample(range(1000), 4)
    other = plan_reshard(
        rng.sample(held, len(held)), rng.sample(wanted, len(wanted)), lambda rank: names[site[rank]]
    )
    assert other == plan_reshard(held, wanted, site.__getitem__)


@given(layouts)
def test_sends_are_sorted_whole_and_never_empty(layout):
    held, wanted, site = layout
    for sends in plan_reshard(complete(held, wanted), wanted, site.__getitem__):
        assert list(sends) == sorted(sends)
        assert all(send.start < send.stop for send in sends)
        starts = {send[:3] for send in sends}
        assert not any((send.source, send.target, send.stop) in starts for send in sends)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 100))
def test_copies_share_the_work_evenly(sources, targets, size):
    held = [HeldRange(rank, 0, size) for rank in range(sources)]
    wanted = [HeldRange(10 + rank, 0, size) for rank in range(targets)]
    first, second = plan_reshard(held, wanted, lambda rank: rank // 10)
    for side, ranks in ((0, sources), (1, targets)):
        load = Counter(move[side] for move in moves(first))
        assert {load[10 * side + rank] for rank in range(ranks)} <= {
            size // ranks,
            -(-size // ranks),
        }
    spread = Counter(source for source, _, _ in moves(second))
    shares = {spread[10 + rank] for rank in range(targets)}
    assert shares <= {(targets - 1) * (size // targets), (targets - 1) * -(-size // targets)}


def test_many_small_parts_are_shared_as_evenly_as_a_large_one():
    held = [HeldRange(rank, 0, 12) for rank in (0, 1)]
    wanted = [HeldRange(2 + row, row, row + 1) for row in range(12)]
    first, second = plan_reshard(held, wanted, lambda rank: int(rank > 1))
    assert first == tuple(Send(row // 6, 2 + row, row, row + 1) for row in range(12))
    assert second == ()


def test_odd_elements_go_by_turns():
    """One row for each of four sites, two copies of it: no copy sends three."""
    first, _ = plan_reshard(
        [HeldRange(0, 0, 1), HeldRange(1, 0, 1)],
        [HeldRange(rank, 0, 1) for rank in range(2, 6)],
        lambda rank: rank,
    )
    assert [send[:2] for send in first] == [(0, 2), (0, 4), (1, 3), (1, 5)]


CASES = {
    "two pairs of another site: half by each, then swapped": (
        [HeldRange(0, 0, 10), HeldRange(1, 0, 10)],
        [HeldRange(2, 0, 10), HeldRange(3, 0, 10)],
        "aabb",
        ((0, 2, 0, 5), (1, 3, 5, 10)),
        ((2, 3, 0, 5), (3, 2, 5, 10)),
    ),
    "the same in one site: each to one, nothing to spread": (
        [HeldRange(0, 0, 10), HeldRange(1, 0, 10)],
        [HeldRange(2, 0, 10), HeldRange(3, 0, 10)],
        "aaaa",
        ((0, 2, 0, 10), (1, 3, 0, 10)),
        (),
    ),
    "what a rank or its site has does not cross": (
        [HeldRange(0, 0, 10), HeldRange(1, 4, 6)],
        [HeldRange(1, 0, 10), HeldRange(2, 4, 8)],
        "abb",
        ((0, 1, 0, 4), (0, 1, 7, 10), (0, 2, 6, 7), (1, 2, 4, 6)),
        ((1, 2, 7, 8), (2, 1, 6, 7)),
    ),
    "divided otherwise": (
        [HeldRange(0, 0, 6), HeldRange(1, 6, 12)],
        [HeldRange(2, 0, 4), HeldRange(3, 4, 8), HeldRange(2, 8, 12)],
        "aabb",
        ((0, 2, 0, 4), (0, 3, 4, 6), (1, 2, 8, 12), (1, 3, 6, 8)),
        (),
    ),
    "adjacent parts of one rank are one send": (
        [HeldRange(0, 0, 3), HeldRange(0, 3, 9)],
        [HeldRange(1, 0, 5), HeldRange(1, 5, 7)],
        "ab",
        ((0, 1, 0, 7),),
        (),
    ),
    "empty parts, and nothing wanted that is not there": (
        [HeldRange(0, 0, 5), HeldRange(1, 3, 3)],
        [HeldRange(0, 1, 4), HeldRange(1, 2, 2)],
        "ab",
        (),
        (),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case):
    held, wanted, site, first, second = CASES[case]
    assert plan_reshard(held, wanted, site.__getitem__) == (first, second)


def test_transfer_of_a_range_that_no_rank_holds_is_an_error():
    with pytest.raises(ValueError, match=r"nobody holds \[5, 8\), which ranks 1, 2 want"):
        plan_reshard([HeldRange(0, 0, 5)], [HeldRange(1, 0, 8), HeldRange(2, 3, 8)], str)


def test_hundreds_of_ranks_with_disjoint_parts():
    """From 200 to 300 shards in six sites, by way of shuffled ranks: every element is sent to its
    one wanter, once."""
    rng = random.Random(0)
    size = 10**9
    ranks = rng.sample(range(500), 500)
    bounds = {count: [size * i // count for i in range(count + 1)] for count in (200, 300)}
    held, wanted = (
        [
            HeldRange(rank, bounds[len(group)][i], bounds[len(group)][i + 1])
            for i, rank in enumerate(group)
        ]
        for group in (ranks[:200], ranks[200:])
    )
    first, second = plan_reshard(held, wanted, lambda rank: rank % 6)
    assert (sum(send.stop - send.start for send in first), second) == (size, ())
    assert len(first) <= 200 + 300 - 1
