"""Layouts: which rank holds which part of a one-dimensional range, and the sends that turn one
layout into another.

A range is the rows of a microbatch or of a table, or the elements of a flat tensor. Links between
sites are slow: each element crosses into a site that lacks it once, and spreads from there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

Tag = TypeVar("Tag")
Ranks = tuple[int, ...]


class HeldRange(NamedTuple):
    """A rank holds, or wants, elements [start, stop); none where stop <= start."""

    rank: int
    start: int
    stop: int


class Send(NamedTuple):
    """Elements [start, stop) that go from one rank to another."""

    source: int
    target: int
    start: int
    stop: int


def plan_reshard(
    sources: Sequence[HeldRange], wanted: Sequence[HeldRange], place: Callable[[int], Hashable]
) -> tuple[tuple[Send, ...], tuple[Send, ...]]:
    """Return the sends, in two rounds, after which every rank has the parts that it wants;
    `place(rank)` is a rank's site.

    In the first round holders send: to all of their own site that lack an element, and to one rank,
    the gateway, of each other site that wants it and lacks it. In the second the gateways spread it
    inside their site. Elements with the same holders are dealt to these evenly, as those with the
    same possible gateways. The order of the parts does not matter. Raises ValueError where nobody
    holds a wanted element.
    """
    site = {part.rank: place(part.rank) for part in (*sources, *wanted)}
    asked: defaultdict[tuple[Hashable, Ranks], list[tuple[int, int, int]]] = defaultdict(list)
    entering: defaultdict[Ranks, list[tuple[Ranks, int, int]]] = defaultdict(list)
    for start, stop, holders, wanters in _pieces(sources, wanted):
        near = by_site(holders, site.__getitem__)
        for where, ranks in by_site(
            sorted({*wanters}.difference(holders)), site.__getitem__
        ).items():
            if where in near:
                asked[where, near[where]] += [(rank, start, stop) for rank in ranks]
            else:
                entering[ranks].append((holders, start, stop))
    spread, received, sent = list[Send](), Counter[int](), Counter[int]()
    for ranks, crossing in entering.items():
        for gateway, holders, start, stop in _deal(crossing, ranks, received):
            asked[site[gateway], holders].append((gateway, start, stop))
            spread += [Send(gateway, rank, start, stop) for rank in ranks if rank != gateway]
    first = [
        Send(source, target, start, stop)
        for (_, holders), parts in asked.items()
        for source, target, start, stop in _deal(sorted(parts), holders, sent)
    ]
    return _merged(first), _merged(spread)


def _pieces(
    sources: Sequence[HeldRange], wanted: Sequence[HeldRange]
) -> Iterator[tuple[int, int, Ranks, Ranks]]:
    """(start, stop, holders, wanters) of every wanted stretch between two neighbouring bounds of
    parts, ascending."""
    changes: defaultdict[int, list[tuple[Counter[int], int, int]]] = defaultdict(list)
    holders, wanters = Counter[int](), Counter[int]()
    for active, parts in ((holders, sources), (wanters, wanted)):
        for rank, start, stop in parts:
            if start < stop:
                changes[start].append((active, rank, 1))
                changes[stop].append((active, rank, -1))
    for start, stop in pairwise(sorted(changes)):
        for active, rank, change in changes[start]:
            active[rank] += change
        having, lacking = tuple(sorted(+holders)), tuple(sorted(+wanters))
        if lacking and not having:
            raise ValueError(
                f"nobody holds [{start}, {stop}), which ranks {', '.join(map(str, lacking))} want"
            )
        if lacking:
            yield start, stop, having, lacking


def by_site(ranks: Iterable[int], place: Callable[[int], Hashable]) -> dict[Hashable, Ranks]:
    """Return the ranks of each site, both in the order given: that of a dict, so that no hash
    decides."""
    ranks_by_site: dict[Hashable, list[int]] = {}
    for rank in ranks:
        ranks_by_site.setdefault(place(rank), []).append(rank)
    return {where: tuple(members) for where, members in ranks_by_site.items()}


def _deal(
    parts: Iterable[tuple[Tag, int, int]], members: Ranks, load: Counter[int]
) -> Iterator[tuple[int, Tag, int, int]]:
    """Yield the parts cut into one consecutive share for each member, as (member, tag, start,
    stop). Shares differ by one element at most; who has the least `load`, to which all shares are
    added, comes first and gets the odd ones."""
    parts = list(parts)
    even, odd = divmod(sum(stop - start for _, start, stop in parts), len(members))
    turns = enumerate(sorted(members, key=lambda rank: (load[rank], rank)))
    member, room = -1, 0
    for tag, start, stop in parts:
        while start < stop:
            if not room:
                turn, member = next(turns)
                room = even + (turn < odd)
                load[member] += room
            end = min(stop, start + room)
            yield member, tag, start, end
            start, room = end, room - (end - start)


def _merged(sends: Iterable[Send]) -> tuple[Send, ...]:
    """Sorted, with adjacent parts between the same two ranks in one send."""
    merged: list[Send] = []
    for send in sorted(sends):
        if merged and merged[-1][:2] == send[:2] and merged[-1].stop == send.start:
            send = merged.pop()._replace(stop=send.stop)
        merged.append(send)
    return tuple(merged)
