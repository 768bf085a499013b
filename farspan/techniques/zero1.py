"""Data parallelism whose optimizer state is divided between the devices (ZeRO-1, arXiv
1910.02054)."""

from __future__ import annotations

from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.techniques._search.one_stage import one_device, over_batch
from farspan.techniques._task import Task


def plan(task: Task) -> Plan | Problem:
    """Return one stage over all devices, rows in proportion to their speed."""
    return one_device(task, "zero1") or over_batch(task, "zero1", 1)
