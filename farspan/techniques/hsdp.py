"""Hybrid sharding (FSDP's, arXiv 2304.11277, 3.2.2): state divided inside each site, copied between
sites."""

from __future__ import annotations

from farspan.domain.plan import Mesh, Plan, Zero
from farspan.domain.problems import Problem
from farspan.techniques._fastest_fitting import fastest_plan_that_fits
from farspan.techniques._search.one_stage import plans, too_few_rows, too_many_owners
from farspan.techniques._task import Task, cannot


def plan(task: Task) -> Plan | Problem:
    """Return one stage over (site, data).

    It needs the same number of devices in every site, and at least two of both.
    """
    counts = [len(ranks) for ranks in task.sites.values()]
    if len(counts) < 2 or len(set(counts)) > 1 or counts[0] < 2:
        return cannot(
            "hybrid sharding needs several sites with equally many devices, two or more",
            "the cluster",
            f"devices by site: {', '.join(map(str, counts))}",
            "use fsdp, or leave devices out with --cluster NAME:N",
        )
    if task.train.batch < len(task.ranks):
        return too_few_rows(task, len(task.ranks))
    mesh = Mesh(ranks=tuple(task.ranks), shape=(len(counts), counts[0]), axes=("site", "data"))
    levels: tuple[Zero, ...] = (1, 2, 3)
    problems = {zero: too_many_owners(task, zero, counts[0]) for zero in levels}
    problem = problems[1]
    if problem is not None:  # The level with the most matrices to divide.
        return problem

    def best_plan(asked: Task) -> Plan | Problem:
        candidates = []
        for zero in levels:
            if problems[zero] is None:
                candidates += plans(asked, "hsdp", mesh, zero=zero)
        return fastest_plan_that_fits(asked, candidates)

    return task.answer("hsdp", best_plan)
