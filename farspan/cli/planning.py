"""A ranking as people read it."""

from __future__ import annotations

from farspan.cli.console import Console
from farspan.domain.units import format_bytes, format_seconds
from farspan.planning.rank import Ranking


def say_ranking(ranking: Ranking, console: Console) -> None:
    """One line a candidate, the chosen one marked."""
    for i, one in enumerate(ranking.candidates):
        mark = "*" if i == ranking.chosen else " "
        if one.estimate is None:
            assert one.problem is not None
            console.say(f"{mark} {one.technique:10} {one.where:16} {one.problem.what}: {one.problem.fact}")
            continue
        memory = format_bytes(one.estimate.memory_bytes)
        console.say(
            f"{mark} {one.technique:10} {one.where:16} {format_seconds(one.time_s):>12} {memory:>9} {one.unchosen or ''}"
        )
