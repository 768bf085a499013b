"""Data parallelism whose parameters, gradients and optimizer state are divided (ZeRO-3, FSDP, arXiv
2304.11277)."""

from __future__ import annotations

from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.techniques._search.one_stage import one_device, over_batch
from farspan.techniques._task import Task


def plan(task: Task) -> Plan | Problem:
    """Return one stage over all devices, rows in proportion to their speed."""
    return one_device(task, "fsdp") or over_batch(task, "fsdp", 3)
