"""A pipeline's step by event simulation: one-forward-one-backward order (arXiv 1806.03377) over
unlike stages.

Each stage runs its own order: the forward passes that it may have in flight, then a backward and
a forward pass in turn, then the remaining backward passes. A pass starts when its input is
there and the stage is free. A wire carries one message at a time each way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from farspan.semantics.pass_order import order_1f1b_passes


class Hop(NamedTuple):
    """One direction of an edge between stages: seconds that a message keeps the wire busy, then its
    delay."""

    busy: float
    delay: float


class PassSpan(NamedTuple):
    """What a stage did from `start` to `end`: the `kind` is "forward", "backward", or "send"."""

    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


class Simulated(NamedTuple):
    """When each stage finished its last pass, how long it computed and how long it waited for
    sends, and the spans."""

    ends: list[float]
    computed: list[float]
    sending: list[float]
    spans: list[PassSpan]


def simulate_pipeline(
    forward: Sequence[float],
    backward: Sequence[float],
    down: Sequence[Hop],
    up: Sequence[Hop],
    microbatches: int,
    depths: Sequence[int],
    *,
    sends_awaited: bool,
    receives_ahead: bool,
    starts: Sequence[float] | None = None,
) -> Simulated:
    """One step. `down[i]` carries activations from stage i to i + 1, `up[i]` gradients back;
    `depths` never increase. Stage i is free from `starts[i]` on, 0 by default.

    With `sends_awaited` a sender is blocked until its message has arrived. Without `receives_ahead`
    a message first waits for the receiver to be free and to answer: another delay.
    """
    stages = len(forward)
    orders = {depth: order_1f1b_passes(microbatches, depth) for depth in set(depths)}
    todo, place = [orders[depth] for depth in depths], [0] * stages
    computed, sending, free = [0.0] * stages, [0.0] * stages, list(starts or [0.0] * stages)
    ready: list[dict[str, list[float | None]]] = [
        {kind: [None] * microbatches for kind in ("forward", "backward")} for _ in range(stages)
    ]
    ready[0]["forward"] = [-math.inf] * microbatches
    wires = {1: [-math.inf] * stages, -1: [-math.inf] * stages}
    spans: list[tuple[int, str, int, float, float]] = []
    waiting = list(range(stages))
    while waiting:
        stage = waiting.pop()
        due, took, idle = (
            ready[stage],
            {"forward": forward[stage], "backward": backward[stage]},
            free[stage],
        )
        for kind, index in todo[stage][place[stage] :]:
            if (ready_at := due[kind][index]) is None:
                break
            place[stage] += 1
            start = ready_at if ready_at > idle else idle
            idle = end = start + took[kind]
            spans.append((stage, kind, index, start, end))
            computed[stage] += took[kind]
            sign = 1 if kind == "forward" else -1
            if sign == 1 and stage == stages - 1:
                due["backward"][index] = end
                continue
            if sign == -1 and stage == 0:
                continue
            peer, hop, wire = stage + sign, down[stage] if sign == 1 else up[stage - 1], wires[sign]
            sent = wire[stage] if wire[stage] > end else end
            if not receives_ahead:
                sent = max(sent, free[peer]) + hop.delay
            wire[stage] = sent + hop.busy
            ready[peer][kind][index] = arrives = sent + hop.busy + hop.delay
            if sends_awaited:
                sending[stage] += arrives - end
                spans.append((stage, "send", index, end, arrives))
                idle = arrives
            if not waiting or waiting[-1] != peer:
                waiting.append(peer)
        free[stage] = idle
    return Simulated(
        free, computed, sending, list(map(functools.partial(tuple.__new__, PassSpan), spans))
    )
