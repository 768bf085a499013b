"""A pipeline's step by event simulation: one-forward-one-backward order (arXiv 1806.03377) over unlike stages.

Each stage runs its own order: as many forward passes as it may have in flight, then a backward and a forward pass in
turn, then the backward passes that are left. A pass starts when its input is there and the stage is free. A wire
carries one message at a time each way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from farspan.semantics.pass_order import pass_order


class Hop(NamedTuple):
    """One direction of an edge between stages: seconds that a message keeps the wire busy, then its delay."""

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
    """When each stage finished its last pass, how long it computed and how long it waited for sends, and the spans."""

    ends: list[float]
    computed: list[float]
    sending: list[float]
    spans: list[PassSpan]


def simulate(
    forward: Sequence[float], backward: Sequence[float], down: Sequence[Hop], up: Sequence[Hop], microbatches: int,
    depths: Sequence[int], *, sends_awaited: bool, receives_ahead: bool, starts: Sequence[float] | None = None,
) -> Simulated:  # fmt: skip
    """One step. `down[i]` carries activations from stage i to i + 1, `up[i]` gradients back; `depths` never increase.
    Stage i is free from `starts[i]` on, 0 by default.

    With `sends_awaited` a sender is blocked until its message has arrived. Without `receives_ahead` a message first
    waits for the receiver to be free and to answer: another delay.
    """
    stages = len(forward)
    todo = [pass_order(microbatches, depth) for depth in depths]
    place, computed, sending = [0] * stages, [0.0] * stages, [0.0] * stages
    free = list(starts or [0.0] * stages)
    ready: dict[tuple[int, str, int], float] = {(0, "forward", i): -math.inf for i in range(microbatches)}
    wires = {(i, way): -math.inf for i in range(stages) for way in (1, -1)}
    spans: list[PassSpan] = []
    waiting = list(range(stages))
    while waiting:
        stage = waiting.pop()
        while place[stage] < len(todo[stage]):
            kind, index = todo[stage][place[stage]]
            if (ready_at := ready.get((stage, kind, index))) is None:
                break
            place[stage] += 1
            took = forward[stage] if kind == "forward" else backward[stage]
            start = max(ready_at, free[stage])
            end = start + took
            spans.append(PassSpan(stage, kind, index, start, end))
            computed[stage] += took
            free[stage] = end
            if kind == "forward" and stage == stages - 1:
                ready[(stage, "backward", index)] = end
                continue
            if kind == "backward" and stage == 0:
                continue
            peer, hop, way = (stage + 1, down[stage], 1) if kind == "forward" else (stage - 1, up[stage - 1], -1)
            sent = max(end, wires[stage, way])
            if not receives_ahead:
                sent = max(sent, free[peer]) + hop.delay
            wires[stage, way] = sent + hop.busy
            arrives = sent + hop.busy + hop.delay
            ready[(peer, kind, index)] = arrives
            if sends_awaited:
                free[stage] = arrives
                sending[stage] += arrives - end
                spans.append(PassSpan(stage, "send", index, end, arrives))
            waiting.append(peer)
    return Simulated(free, computed, sending, spans)
