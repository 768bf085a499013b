"""Which hosts of a run cannot be worked with now: those that cannot be entered, and those that
others cannot reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

from farspan.domain.cluster import Host
from farspan.launch.examine import agents, reach
from farspan.launch.hosts import Agent

#: Of more hosts each is asked for the first alone, not for every other: pairs grow with the square.
MOST_PAIRED = 8


def away(hosts: Sequence[Host]) -> set[str]:
    """The hosts that are away. The side of a cut link counts as there that has the first host which
    can be entered, of those that see the run's folder if any does: what the run has saved is
    there."""
    if len(hosts) == 1 and hosts[0].enter == ():
        return set()
    with agents(hosts) as (reached, unreachable):
        there = sorted(
            (host for host in hosts if host.name in reached),
            key=lambda host: host.folder is not None,
        )
        if not there:
            return set(unreachable)
        home = there[0].name
        others = [host.name for host in there[1:]]
        pairs = [(home, other) for other in others]
        if len(there) <= MOST_PAIRED:
            pairs += combinations(others, 2)
        with ThreadPoolExecutor(max(1, len(pairs))) as pool:
            cut = [
                pair
                for pair, whole in zip(
                    pairs, pool.map(lambda p: _joined(reached, *p), pairs), strict=True
                )
                if not whole
            ]
    gone = set(unreachable) | {other for first, other in cut if first == home}
    while left := [pair for pair in cut if not gone & set(pair)]:
        # Of two that do not reach each other goes the one that lacks more, else the later one.
        counts = Counter(name for pair in left for name in pair)
        gone.add(max(counts, key=lambda name: (counts[name], others.index(name))))
    return gone


def _joined(reached: dict[str, Agent], a: str, b: str) -> bool:
    """Whether each of two hosts can connect to the other."""
    return not any(
        reach(reached[one], reached[other], pings=1).failed for one, other in ((a, b), (b, a))
    )
