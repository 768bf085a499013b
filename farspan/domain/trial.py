"""A plan run for a few steps: what was measured, or why nothing was."""

from __future__ import annotations

from typing import Literal

import msgspec

from farspan.domain.problems import Problem
from farspan.domain.run_events import Environment


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`step_s` is what a step of the whole run takes, outer syncs of replicas by their share;
    None where none was made."""

    #: Of the plan, without how long it trains: `plan_key`.
    plan: str
    status: Literal["ok", "oom", "failed"]
    step_s: float | None = None
    #: Seconds of every step after those that warm up.
    steps: tuple[float, ...] = ()
    #: Seconds that a rank computed in a step, of those whose spans end with their passes
    #: (`results.IN_STEP`).
    compute_s: dict[int, float] = {}
    #: Peak bytes by rank, of those ranks whose records came back.
    memory_bytes: dict[int, int] = {}
    problem: Problem | None = None
    #: Where rank 0 ran.
    environment: Environment | None = None
    #: Seconds from the first process to the last one's end.
    took_s: float = 0.0
