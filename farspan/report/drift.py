"""Which device or link keeps another pace than the plan assumed, by more than the estimate's
interval allows.

Told only of runs with some steps, from traced steps that took about as long as the others (their
parts count as if they had been no slower), and where it makes a noticeable part of a step. Clocks
of hosts are never compared: what a link takes is the way there and back together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal

import msgspec

from farspan.domain.plan import Replica
from farspan.domain.results import IN_STEP, Estimate, Span
from farspan.domain.words import joined
from farspan.estimate.between_stages import edges
from farspan.estimate.schedule import Hop
from farspan.estimate.stage import Costs
from farspan.estimate.stage_time import stage_time
from farspan.report.expected import Expected
from farspan.report.history import RunHistory
from farspan.report.traces import Traces

LABELS = {
    "device": "compute of",
    "messages": "round trip between",
    "gradients": "exposed gradient sync of",
}
#: Nothing is told of runs with fewer steps.
LEAST_STEPS = 10
#: Nor of what makes less than this share of a step.
MATTERS = 0.1
#: A traced step is like the others if it took at most so many times their median.
TYPICAL = 1.25
#: A message was waited for if its receive took at least this share of its predicted way.
WAITED = 0.1


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """One device or link: seconds as measured and as predicted, so many times
    in a step. `paces` are measured over predicted compute time, by rank."""

    what: Literal["device", "messages", "gradients"]
    who: str
    measured_s: float
    predicted_s: float
    times: int = 1
    paces: dict[int, float] = {}
    #: The hosts that messages go between.
    ends: tuple[str, str] | None = None

    @property
    def factor(self) -> float:
        return self.measured_s / self.predicted_s

    @property
    def label(self) -> str:
        """Return what takes longer or less long than predicted: `compute of rank 2`."""
        return f"{LABELS[self.what]} {self.who}"


def drifts(
    run: RunHistory,
    traces: Traces,
    estimate: Estimate,
    step_s: float,
    devices: dict[int, Expected],
    costs: Costs,
) -> tuple[Drift, ...]:
    """All that is beyond the interval, devices first; `step_s` is the predicted step."""
    if len(run.history.steps) < LEAST_STEPS or not (steps := _typical(run, traces)):
        return ()

    def beyond(drift: Drift) -> bool:
        low, high = estimate.interval
        return (
            not low <= drift.factor <= high
            and drift.times * abs(drift.measured_s - drift.predicted_s) >= MATTERS * step_s
        )

    timed = [rank for rank in traces.ranks if run.plan.devices[rank].backend in IN_STEP]
    computing = {rank: devices[rank] for rank in timed if rank in devices}
    found = [*_devices(traces, steps, computing, costs), *_links(run, traces, steps, timed, costs)]
    return tuple(filter(beyond, found))


def _typical(run: RunHistory, traces: Traces) -> dict[int, float]:
    """Return the traced steps that are typical of the run, and what their seconds are multiplied
    by."""
    warm = [timed.step.step_s for timed in run.history.timed if timed.warm]
    if not warm:  # As of starts that all ended while they warmed up.
        return {}
    usual = median(warm)
    took = {step: traces.of(traces.ranks[0], step)[1].step_s for step in traces.steps}
    like = {
        step: min(1.0, usual / step_s) for step, step_s in took.items() if step_s <= TYPICAL * usual
    }
    # Where every one was slower the run has changed since its first steps, and they say how.
    return like or (dict.fromkeys(took, 1.0) if len(took) > 1 else {})


def _devices(
    traces: Traces, steps: dict[int, float], devices: dict[int, Expected], costs: Costs
) -> Iterator[Drift]:
    """Compare the compute time of every device whose passes hold nothing but arithmetic."""
    network = costs.network
    for rank, device in sorted(devices.items()):
        if device.compute_s and device.rows and not device.inside_s:
            measured = median(
                scale * traces.parts(rank, step)["compute"] for step, scale in steps.items()
            )
            yield Drift(
                what="device",
                who=f"rank {rank} ({network.devices[rank].kind} in {network.hosts[rank]})",
                measured_s=measured,
                predicted_s=device.compute_s,
                paces={rank: measured / device.compute_s},
            )


def _links(
    run: RunHistory, traces: Traces, steps: dict[int, float], timed: Sequence[int], costs: Costs
) -> Iterator[Drift]:
    """Compare the traffic between hosts, where every device of a replica was timed."""
    for replica in run.plan.replicas:
        if not all(rank in timed for stage in replica.stages for rank in stage.mesh.ranks):
            continue
        for edge, (down, up) in enumerate(zip(*edges(replica, costs), strict=True)):
            yield from _messages(replica, edge, (down, up), traces, steps, costs)
        for index in range(len(replica.stages)):
            yield from _sums(replica, index, traces, steps, costs)


def _messages(
    replica: Replica,
    edge: int,
    hops: tuple[Hop, Hop],
    traces: Traces,
    steps: dict[int, float],
    costs: Costs,
) -> Iterator[Drift]:
    """One message each way between two stages that lie in a host each: the quickest that was waited
    for."""
    before, after = (replica.stages[i].mesh.ranks for i in (edge, edge + 1))
    a, b = ({costs.network.hosts[rank] for rank in ranks} for ranks in (before, after))
    if len(a) > 1 or len(b) > 1 or a == b:
        return
    round_trips = []
    for step, scale in steps.items():
        down = _quickest(
            traces.passes(before, step, "forward"),
            traces.receives(after, step, "down", False),
            hops[0],
        )
        up = _quickest(
            traces.passes(after, step, "backward"),
            traces.receives(before, step, "up", edge == 0),
            hops[1],
        )
        if down is not None and up is not None:
            round_trips.append(scale * (down + up))
    if round_trips:
        yield Drift(
            what="messages",
            who=joined([*a, *b]),
            measured_s=median(round_trips),
            predicted_s=sum(hop.busy + hop.delay for hop in hops),
            times=replica.microbatches,
            ends=(next(iter(a)), next(iter(b))),
        )


def _quickest(sent: dict[int, float], received: dict[int, Span], hop: Hop) -> float | None:
    """Seconds from the end of a pass to that of the receive of what it made, of the quickest
    message that was waited for: others came at a time that nobody saw."""
    waited = [
        i
        for i, span in received.items()
        if span.end - span.start >= WAITED * (hop.busy + hop.delay)
    ]
    return min((received[i].end - sent[i] for i in waited if i in sent), default=None)


def _sums(
    replica: Replica, index: int, traces: Traces, steps: dict[int, float], costs: Costs
) -> Iterator[Drift]:
    """Compare the exposed gradient sync of a stage, as seen by the device that waits least
    for the others."""
    stage = replica.stages[index]
    last = len(replica.stages) - 1
    hosts = list(dict.fromkeys(costs.network.hosts[rank] for rank in stage.mesh.ranks))
    if len(hosts) < 2 or (last and costs.graph.tied and index in (0, last)):
        return  # Inside a host, or together with the table that a pipeline's ends share.
    predicted = stage_time(costs, stage, stage.rows, replica.microbatches).exposed
    measured = median(
        scale * min(traces.parts(rank, step)["communication"] for rank in stage.mesh.ranks)
        for step, scale in steps.items()
    )
    if predicted:
        yield Drift(what="gradients", who=joined(hosts), measured_s=measured, predicted_s=predicted)
