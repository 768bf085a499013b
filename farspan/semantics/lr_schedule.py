"""The learning rate of each step: linear warm-up, then a cosine, a line, constant, or stable and
then a line (WSD)."""

from __future__ import annotations

import math

from farspan.domain.train import Schedule


def learning_rate(
    schedule: Schedule, peak: float, step: int, steps: int, share: float = 0.0
) -> float:
    """Learning rate of update `step` (from 0) of the plan's `steps`: linear warm-up, then the
    schedule's shape. It is as far as `share` says of the run where that is further than the steps
    are: its time is then what ends it."""
    warm = min(1.0, schedule.warmup_steps / steps)
    if step < schedule.warmup_steps and share < warm:
        return peak * max((step + 1) / (schedule.warmup_steps + 1), share / warm)
    floor = peak * schedule.floor
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "wsd":
        start = max(schedule.warmup_steps, steps - math.ceil(steps * schedule.decay))
        done = max(0.0, (step - start) / max(1, steps - 1 - start)) if step > start else 0.0
        done = max(done, _beyond(max(warm, 1 - schedule.decay), share))
        return peak + (floor - peak) * min(1.0, done)
    done = max(
        0.0,
        (step - schedule.warmup_steps) / max(1, steps - 1 - schedule.warmup_steps),
        _beyond(warm, share),
    )
    done = min(1.0, done)
    return floor + (peak - floor) * (
        1 - done if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    )


def _beyond(start: float, share: float) -> float:
    """How far `share` is from `start`, below 1, to 1."""
    return max(0.0, (share - start) / (1 - start)) if start < 1 else 0.0
