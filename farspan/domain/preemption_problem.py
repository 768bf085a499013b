"""A preemption: the machine takes workers away by a signal that their launcher did not send.

So do a preempted VM, the shutdown of a node, and Slurm. The step that the signal came in is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farspan.domain.plan_words import join_words
from farspan.domain.problems import Problem

#: The variable of a worker's environment that holds a shell command: it succeeds once the worker's
#: host is about to be taken away.
NOTICE_VARIABLE = "FARSPAN_NOTICE"


def preemption_problem(
    hosts: Mapping[int, str], *, where: object, fact: str, remedy: str, **more: Any
) -> Problem:
    """Name the workers that were preempted together; `hosts` holds the host of each by rank, `more`
    further fields of Problem."""
    ranks = tuple(sorted(hosts))
    host_names = join_words(list(dict.fromkeys(hosts[rank] for rank in ranks)))
    workers = f"rank {ranks[0]} on {host_names} was"
    if len(ranks) > 1:
        workers = f"ranks {join_words([str(rank) for rank in ranks])} on {host_names} were"
    return Problem(
        code="preempted",
        what=f"{workers} preempted",
        where=str(where),
        fact=fact,
        remedy=remedy,
        rank=ranks[0],
        host=hosts[ranks[0]],
        ranks=ranks,
        **more,
    )
