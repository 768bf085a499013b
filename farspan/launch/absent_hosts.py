"""Hosts of a run that cannot be worked with now: those that cannot be entered, and those that
others cannot reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, combinations, compress

from farspan.domain.cluster import Host
from farspan.launch.agent_pool import AgentPool
from farspan.launch.link_measurement import measure_round_trip

#: Of more hosts each is asked for the first alone, not for every other: pairs grow with the square.
MAX_PAIRED_HOSTS = 8


def find_absent_hosts(hosts: Sequence[Host], agents: AgentPool) -> set[str]:
    """Return the absent hosts. The side of a cut link counts as there that has the first host which
    can be entered, of those that see the run's folder if any does: what the run has saved is
    there."""
    if len(hosts) == 1 and hosts[0].enter == ():
        return set()
    reached, unreachable = agents.reach(hosts)
    present = [host for host in hosts if host.name in reached]
    present.sort(key=lambda host: host.folder is not None)
    if not present:
        return set(unreachable)
    home = present[0].name
    others = [host.name for host in present[1:]]
    pairs = [(home, other) for other in others]
    if len(present) <= MAX_PAIRED_HOSTS:
        pairs += combinations(others, 2)

    def is_cut(pair: tuple[str, str]) -> bool:
        a, b = (reached[name] for name in pair)
        return bool(
            measure_round_trip(a, b, pings=1).failed or measure_round_trip(b, a, pings=1).failed
        )

    with ThreadPoolExecutor(max(1, len(pairs))) as pool:
        cut = list(compress(pairs, pool.map(is_cut, pairs)))
    gone = set(unreachable)
    gone.update(other for first, other in cut if first == home)
    while remaining := [pair for pair in cut if not gone & set(pair)]:
        # Of two that do not reach each other goes the one that lacks more, else the later one.
        counts = Counter(chain.from_iterable(remaining))
        gone.add(max(counts, key=lambda name: (counts[name], others.index(name))))
    return gone
