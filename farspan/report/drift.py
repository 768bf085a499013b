"""Which device or link is faster or slower than the plan assumed, by more than the estimate's
interval allows.

Reported only of runs with some steps, from traced steps that took about as long as the others
(their parts count as if they had been no slower), and where it makes a noticeable part of a step.
Clocks of hosts are never compared: a link's time is that of a round trip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal

import msgspec

from farspan.domain.cost import Estimate
from farspan.domain.plan import Replica
from farspan.domain.plan_words import join_words
from farspan.domain.run_events import IN_STEP, Span
from farspan.estimate.between_stages import edges
from farspan.estimate.schedule import Hop
from farspan.estimate.stage import Costs
from farspan.estimate.stage_time import stage_time
from farspan.report.history import RunHistory
from farspan.report.predicted_steps import Expected
from farspan.report.traces import Traces

LABELS = {
    "device": "compute of",
    "messages": "round trip between",
    "gradients": "exposed gradient sync of",
}
#: Nothing is reported of runs with fewer steps.
MIN_STEPS = 10
#: Nor of what makes less than this share of a step.
MIN_STEP_SHARE = 0.1
#: A traced step is like the others if it took at most so many times their median.
MAX_TYPICAL_RATIO = 1.25
#: A message was waited for if its receive took at least this share of its predicted way.
MIN_WAIT_SHARE = 0.1


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """One device or link: seconds as measured and as predicted, `times` in a step. `paces` are
    measured over predicted compute time, by rank."""

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
        """The part that departs from its prediction: `compute of rank 2`."""
        return f"{LABELS[self.what]} {self.who}"


def find_drifts(
    run: RunHistory,
    traces: Traces,
    estimate: Estimate,
    step_s: float,
    devices: dict[int, Expected],
    costs: Costs,
) -> tuple[Drift, ...]:
    """Return all that is beyond the interval, devices first; `step_s` is the predicted step."""
    if len(run.history.steps) < MIN_STEPS:
        return ()
    steps = _typical_steps(run, traces)
    if not steps:
        return ()
    timed = [rank for rank in traces.ranks if run.plan.devices[rank].backend in IN_STEP]
    computing = {rank: devices[rank] for rank in timed if rank in devices}
    compared = [*_compare_devices(traces, steps, computing, costs)]
    compared += _compare_links(run, traces, steps, timed, costs)
    low, high = estimate.interval
    drifting = []
    for drift in compared:
        lost_s = drift.times * abs(drift.measured_s - drift.predicted_s)
        if lost_s >= MIN_STEP_SHARE * step_s and not low <= drift.factor <= high:
            drifting.append(drift)
    return tuple(drifting)


def _typical_steps(run: RunHistory, traces: Traces) -> dict[int, float]:
    """Return the traced steps that are typical of the run, and what their seconds are multiplied
    by."""
    warm = [timed.step.step_s for timed in run.history.timed if timed.warm]
    if not warm:  # As of starts that all ended while they warmed up.
        return {}
    usual_s = median(warm)
    scales: dict[int, float] = {}
    for step in traces.steps:
        _, timing = traces.of(traces.ranks[0], step)
        if timing.step_s <= MAX_TYPICAL_RATIO * usual_s:
            scales[step] = min(1.0, usual_s / timing.step_s)
    # Where every one was slower the run has changed since its first steps, and they show how.
    if not scales and len(traces.steps) > 1:
        return dict.fromkeys(traces.steps, 1.0)
    return scales


def _compare_devices(
    traces: Traces, steps: dict[int, float], devices: dict[int, Expected], costs: Costs
) -> Iterator[Drift]:
    """Compare the compute time of every device whose passes hold nothing but arithmetic."""
    network = costs.network
    for rank, device in sorted(devices.items()):
        if device.compute_s and device.rows and not device.inside_s:
            seconds = [traces.step_parts(rank, step)["compute"] * steps[step] for step in steps]
            measured_s = median(seconds)
            kind = network.devices[rank].kind
            yield Drift(
                what="device",
                who=f"rank {rank} ({kind} in {network.hosts[rank]})",
                measured_s=measured_s,
                predicted_s=device.compute_s,
                paces={rank: measured_s / device.compute_s},
            )


def _compare_links(
    run: RunHistory, traces: Traces, steps: dict[int, float], timed: Sequence[int], costs: Costs
) -> Iterator[Drift]:
    """Compare the traffic between hosts, where every device of a replica was timed."""
    for replica in run.plan.replicas:
        if not all(set(stage.mesh.ranks) <= set(timed) for stage in replica.stages):
            continue
        hops = zip(*edges(replica, costs), strict=True)
        for edge, (down, up) in enumerate(hops):
            yield from _compare_messages(replica, edge, (down, up), traces, steps, costs)
        for index in range(len(replica.stages)):
            yield from _compare_gradient_sync(replica, index, traces, steps, costs)


def _compare_messages(
    replica: Replica,
    edge: int,
    hops: tuple[Hop, Hop],
    traces: Traces,
    steps: dict[int, float],
    costs: Costs,
) -> Iterator[Drift]:
    """Compare a round trip between two stages that lie in a host each: the quickest message each
    way that was waited for."""
    before = replica.stages[edge].mesh.ranks
    after = replica.stages[edge + 1].mesh.ranks
    hosts = costs.network.hosts
    a = hosts[before[0]]
    b = hosts[after[0]]
    if a == b or {hosts[rank] for rank in before} != {a}:
        return
    if {hosts[rank] for rank in after} != {b}:
        return
    round_trips = []
    for step, scale in steps.items():
        forwards = traces.pass_ends(before, step, "forward")
        activations = traces.last_receives(after, step, "down", False)
        down_s = _quickest_message(forwards, activations, hops[0])
        backwards = traces.pass_ends(after, step, "backward")
        gradients = traces.last_receives(before, step, "up", edge == 0)
        up_s = _quickest_message(backwards, gradients, hops[1])
        if down_s is not None and up_s is not None:
            round_trips.append(scale * (down_s + up_s))
    if round_trips:
        predicted_s = sum(hop.busy + hop.delay for hop in hops)
        yield Drift(
            what="messages",
            who=join_words([a, b]),
            measured_s=median(round_trips),
            predicted_s=predicted_s,
            times=replica.microbatches,
            ends=(a, b),
        )


def _quickest_message(sent: dict[int, float], received: dict[int, Span], hop: Hop) -> float | None:
    """Return the seconds from the end of a pass to that of the receive of what it made, of the
    quickest message that was waited for: when the others arrived is unknown."""
    least_wait_s = MIN_WAIT_SHARE * (hop.busy + hop.delay)
    seconds = []
    for microbatch, span in received.items():
        if microbatch in sent and span.end - span.start >= least_wait_s:
            seconds.append(span.end - sent[microbatch])
    return min(seconds, default=None)


def _compare_gradient_sync(
    replica: Replica, index: int, traces: Traces, steps: dict[int, float], costs: Costs
) -> Iterator[Drift]:
    """Compare the exposed gradient sync of a stage, as seen by the device that waits least
    for the others."""
    stage = replica.stages[index]
    last = len(replica.stages) - 1
    ranks = stage.mesh.ranks
    hosts = list(dict.fromkeys(costs.network.hosts[rank] for rank in ranks))
    shares_table = last and costs.graph.tied and index in (0, last)
    if len(hosts) < 2 or shares_table:
        return  # Inside a host, or together with the table that a pipeline's ends share.
    predicted_s = stage_time(costs, stage, stage.rows, replica.microbatches).exposed
    if not predicted_s:
        return
    seconds = []
    for step, scale in steps.items():
        least_s = min(traces.step_parts(rank, step)["communication"] for rank in ranks)
        seconds.append(scale * least_s)
    yield Drift(
        what="gradients", who=join_words(hosts), measured_s=median(seconds), predicted_s=predicted_s
    )
