"""The pipeline simulation against an independent one, closed forms, and what can only make it
faster."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.estimate.schedule import Hop, simulate_pipeline
from farspan.semantics.pass_order import order_1f1b_passes

DIRECT = Hop(0.0, 0.0)


def ends(forward, backward, down, up, microbatches, depths, *, awaited=False, ahead=True):
    return simulate_pipeline(
        forward,
        backward,
        down,
        up,
        microbatches,
        depths,
        sends_awaited=awaited,
        receives_ahead=ahead,
    ).ends


def reference(forward, backward, down, up, microbatches, depths, awaited):
    """Another simulation of the same rules, by the clock: at each moment what has ended is sent,
    and what can start starts; then the clock goes on to the next moment at which anything is
    due."""
    stages = len(forward)
    clock = 0.0
    queues = [order_1f1b_passes(microbatches, depth) for depth in depths]
    arrived = {(0, "forward", i): 0.0 for i in range(microbatches)}
    idle = [0.0] * stages
    wire = {}
    running = {}
    while any(queues) or running:
        changed = True
        while changed:
            changed = False
            for stage, (kind, index, end) in list(running.items()):
                if end > clock:
                    continue
                changed = True
                del running[stage]
                to = stage + (1 if kind == "forward" else -1)
                if to == stages:
                    arrived[stage, "backward", index] = clock
                elif to >= 0:
                    hop = down[stage] if kind == "forward" else up[to]
                    wire[stage, to] = max(clock, wire.get((stage, to), 0.0)) + hop.busy
                    arrived[to, kind, index] = wire[stage, to] + hop.delay
                    idle[stage] = arrived[to, kind, index] if awaited else idle[stage]
            for stage, queue in enumerate(queues):
                if queue and stage not in running and idle[stage] <= clock:
                    kind, index = queue[0]
                    if (stage, kind, index) in arrived and arrived[stage, kind, index] <= clock:
                        changed = True
                        queue.pop(0)
                        idle[stage] = clock + (forward if kind == "forward" else backward)[stage]
                        running[stage] = (kind, index, idle[stage])
        clock = min((time for time in (*idle, *arrived.values()) if time > clock), default=clock)
    return idle


def seconds(least=0.0):
    return st.integers(int(least * 8), 40).map(
        lambda eighths: eighths / 8
    )  # Eighths add up exactly.


@st.composite
def pipelines(draw):
    stages = draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 6))

    def hops():
        return [Hop(draw(seconds()), draw(seconds())) for _ in range(stages - 1)]

    depths = sorted((draw(st.integers(1, 7)) for _ in range(stages)), reverse=True)
    forward, backward = ([draw(seconds(0.125)) for _ in range(stages)] for _ in range(2))
    return forward, backward, hops(), hops(), microbatches, depths


@given(pipelines(), st.booleans())
def test_simulation_agrees_with_an_independent_one(pipeline, awaited):
    assert ends(*pipeline, awaited=awaited) == reference(*pipeline, awaited)


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 1), (1, 7), (2, 4), (3, 3), (4, 8), (5, 2)]
)
def test_equal_stages_without_delays_take_microbatches_plus_stages_less_one(stages, microbatches):
    depths = [stages - i for i in range(stages)]
    wires = [DIRECT] * (stages - 1)
    found = ends([1.0] * stages, [2.0] * stages, wires, wires, microbatches, depths)
    assert max(found) == found[0] == (microbatches + stages - 1) * 3


def test_pipeline_with_one_microbatch_in_flight_overlaps_nothing():
    hop = Hop(0.5, 0.25)
    found = ends([1.0, 2.0], [3.0, 4.0], [hop], [hop], 3, [1, 1])
    assert found[0] == 3 * (1 + 0.75 + 2 + 4 + 0.75 + 3)


def test_more_in_flight_hides_a_long_wire():
    hop = Hop(0.0, 6.0)

    def last(depth):
        return ends([1.0, 1.0], [2.0, 2.0], [hop], [hop], 8, [depth, 1])[0]

    # A microbatch is away for 6 + 1 + 2 + 6: with so many in flight that stage 1 never waits, 1 + 6
    # + 8 x 3 + 6 + 2.
    assert last(8) == 39
    assert last(1) == 8 * 18
    assert last(1) > last(2) > last(4) > last(8)


def test_awaited_sends_block_the_sender():
    hop = Hop(1.0, 2.0)
    # f0 ends at 1 and arrives at 4; b0 ends at 4 + 1 + 1 = 6 and arrives at 9; the last pass ends
    # at 10.
    simulated = simulate_pipeline(
        [1.0, 1.0], [1.0, 1.0], [hop], [hop], 1, [1, 1], sends_awaited=True, receives_ahead=True
    )
    assert simulated.ends == [10.0, 9.0]
    assert simulated.sending == [3.0, 3.0]
    # Stage 0 is blocked until 4, then until 8; stage 1 runs f0 and b0 from 4 to 6, is blocked until
    # 9, then runs f1 and b1 until 11.
    assert ends([1.0, 1.0], [1.0, 1.0], [hop], [hop], 2, [2, 1], awaited=True)[0] == 11 + 3 + 1
    # Not awaited, messages arrive at 4 and 5, stage 1 runs from 4 to 8.
    assert ends([1.0, 1.0], [1.0, 1.0], [hop], [hop], 2, [2, 1])[0] == 8 + 3 + 1


def test_receives_just_in_time_cost_another_delay_a_message():
    hop = Hop(1.0, 2.0)
    assert ends([1.0, 1.0], [1.0, 1.0], [hop], [hop], 1, [1, 1], ahead=False)[0] == 10 + 2 * 2


def test_a_wire_carries_one_message_at_a_time():
    # Forward passes end at 1, 2, 3; the wire takes 5 each: arrivals at 6, 11, 16.
    spans = simulate_pipeline(
        [1.0, 1.0],
        [1.0, 1.0],
        [Hop(5.0, 0.0)],
        [DIRECT],
        3,
        [3, 1],
        sends_awaited=False,
        receives_ahead=True,
    ).spans
    assert [span.start for span in spans if (span.stage, span.kind) == (1, "forward")] == [
        6,
        11,
        16,
    ]


@given(pipelines(), st.booleans(), st.booleans())
def test_no_stage_has_more_in_flight_than_its_depth_and_none_overlaps_itself(
    pipeline, awaited, ahead
):
    microbatches, depths = pipeline[4:]
    spans = simulate_pipeline(*pipeline, sends_awaited=awaited, receives_ahead=ahead).spans
    for stage, depth in enumerate(depths):
        own = sorted(
            (span.start, span.end, span.kind)
            for span in spans
            if span.stage == stage and span.kind != "send"
        )
        assert len(own) == 2 * microbatches
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
        begun = 0
        for _, _, kind in own:
            begun += 1 if kind == "forward" else -1
            assert 0 <= begun <= depth


@given(pipelines(), st.booleans(), st.booleans(), st.data())
def test_nothing_that_gets_faster_makes_a_pipeline_slower(pipeline, awaited, ahead, data):
    forward, backward, down, up, microbatches, depths = pipeline
    which = data.draw(st.sampled_from([forward, backward, down, up]))
    if not which:
        return
    place = data.draw(st.integers(0, len(which) - 1))
    before = max(ends(*pipeline, awaited=awaited, ahead=ahead))
    old = which[place]
    which[place] = Hop(old.busy / 2, old.delay / 4) if isinstance(old, Hop) else old / 2
    assert (
        max(ends(forward, backward, down, up, microbatches, depths, awaited=awaited, ahead=ahead))
        <= before
    )


def test_stages_that_are_free_later_start_later():
    found = simulate_pipeline(
        [1.0, 1.0],
        [2.0, 2.0],
        [DIRECT],
        [DIRECT],
        1,
        [1, 1],
        sends_awaited=False,
        receives_ahead=True,
        starts=[0, 5],
    )
    assert found.ends == [10.0, 8.0]
