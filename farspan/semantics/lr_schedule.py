"""The learning rate of each step: linear warm-up, then a cosine, a line, constant, or stable and
then a line (WSD)."""

from __future__ import annotations

import math

from farspan.domain.train import Schedule

#: A decay to exactly 0 would waste its last step: that one is half a step before the end.
LAST_STEP = 0.5


def learning_rate(
    schedule: Schedule,
    peak: float,
    step: int,
    steps: int,
    share: float = 0.0,
    *,
    limit: int | None = None,
    total: int | None = None,
) -> float:
    """Learning rate of update `step` (from 0) of the plan's `steps`: linear warm-up, then the
    schedule's shape. Its progress is `share` of the run where that is further than the steps
    of `limit` (None: of `steps`): the run's time then ends it, after `total` steps
    (None: `limit`). Above 0 at any step."""
    limit = limit or steps
    warm = min(1.0, schedule.warmup_steps / steps)
    if step < schedule.warmup_steps and share < warm:
        return peak * max(warmup_share(schedule, step), share / warm)
    if schedule.kind == "constant":
        return peak
    after = max(warm, 1 - schedule.decay) if schedule.kind == "wsd" else warm
    done = max(
        0.0,
        (step - _start(schedule, limit)) / _decaying(schedule, limit),
        _beyond(after, share),
    )
    most = 1.0 if schedule.floor else 1.0 - LAST_STEP / _decaying(schedule, total or limit)
    done = min(most, done)
    floor = peak * schedule.floor
    if schedule.kind == "cosine":
        return floor + (peak - floor) * cosine_decay(done)
    return floor + (peak - floor) * (1 - done)


def warmup_share(schedule: Schedule, step: int) -> float:
    """Return the share of the peak that the linear warm-up has reached at a step."""
    return (step + 1) / (schedule.warmup_steps + 1)


def cosine_decay(done: float) -> float:
    """Return the share of the way from floor to peak where a share `done` of the decay is over."""
    return 0.5 * (1 + math.cos(math.pi * done))


def _start(schedule: Schedule, steps: int) -> int:
    """Return the last step at the peak."""
    if schedule.kind != "wsd":
        return schedule.warmup_steps
    return max(schedule.warmup_steps, steps - math.ceil(steps * schedule.decay))


def _decaying(schedule: Schedule, steps: int) -> int:
    """Return steps from the peak to the floor, one at least."""
    return max(1, steps - 1 - _start(schedule, steps))


def _beyond(start: float, share: float) -> float:
    """How far `share` is from `start`, below 1, to 1."""
    return max(0.0, (share - start) / (1 - start)) if start < 1 else 0.0
