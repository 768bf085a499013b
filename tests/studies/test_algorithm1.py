"""Algorithm 1 of arXiv 2602.02632: every branch as printed, and where it stops short of what the
trials showed."""

import msgspec
import pytest

from farspan.domain.trial import Trial
from farspan.semantics.identity import plan_key
from farspan_studies.papers.algorithm1 import Decision, Speeds, algorithm1, choose
from tests.planning.test_select_by_trials import asked
from tests.planning.worlds import FAST, cluster

BOTH = 0
FIRST = 1
SECOND = 2

#: Tp, Td1, Ts1, Td2, Ts2, delta, whether ZeRO2 runs -> technique, machine, step. The last column
#: says what is tried.
BRANCHES = [
    (2.0, 1.0, 0.5, 0.9, 0.4, 0.1, True, "pipeshard", BOTH, "1", "far better on both"),
    (1.2, 1.0, 0.5, 0.9, 0.4, 0.1, True, "pipeshard", BOTH, "1", "better by 20 %, 10 % asked"),
    (
        1.2,
        1.0,
        0.5,
        0.9,
        0.4,
        0.2,
        True,
        "zero2",
        BOTH,
        "3",
        "better by just what is asked is not more than it",
    ),
    (1.0, 2.0, 0.5, 0.9, 0.4, 0.1, True, "data", FIRST, "2", "Data on the first"),
    (1.0, 0.5, 2.0, 0.9, 0.4, 0.1, True, "shard", FIRST, "2", "Shard on the first"),
    (1.0, 0.5, 0.4, 2.0, 0.4, 0.1, True, "data", SECOND, "2", "Data on the second"),
    (1.0, 0.5, 0.4, 0.3, 2.0, 0.1, True, "shard", SECOND, "2", "Shard on the second"),
    (1.0, 2.0, 2.0, 0.3, 0.2, 0.1, True, "data", FIRST, "2", "Data wins a tie with Shard"),
    (
        1.0,
        2.0,
        0.1,
        2.0,
        0.2,
        0.1,
        True,
        "data",
        FIRST,
        "2",
        "the first wins a tie with the second",
    ),
    (
        1.0,
        0.1,
        2.0,
        2.0,
        0.2,
        0.1,
        True,
        "shard",
        FIRST,
        "2",
        "the machine comes before the technique",
    ),
    (1.0, 1.2, 0.1, 0.2, 0.2, 0.25, True, "zero2", BOTH, "3", "a tie within delta"),
    (1.0, 1.0, 0.0, 0.0, 0.0, 0.1, True, "zero2", BOTH, "3", "exactly equal"),
    (1.0, 1.0, 0.0, 0.0, 0.0, 0.1, False, None, BOTH, "none", "equal, and ZeRO2 fails"),
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.1, True, "zero2", BOTH, "3", "no single machine works (gap a)"),
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.1, False, None, BOTH, "none", "the same, and ZeRO2 fails (gap a)"),
    (0.0, 1.0, 0.5, 0.0, 0.0, 0.1, True, "zero2", BOTH, "3", "Pipeshard fails (gap b)"),
    (0.0, 1.0, 0.5, 0.0, 0.0, 0.1, False, None, BOTH, "none", "the same, and ZeRO2 fails (gap b)"),
    (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, True, "zero2", BOTH, "3", "only ZeRO2 runs"),
    (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, False, None, BOTH, "none", "nothing runs"),
    (2.1, 1.0, 0.0, 0.0, 0.0, 1.0, False, "pipeshard", BOTH, "1", "delta at its most"),
]


@pytest.mark.parametrize("row", BRANCHES, ids=[row[-1] for row in BRANCHES])
def test_every_branch(row):
    tp, td1, ts1, td2, ts2, delta, runs, technique, machine, step, _ = row
    found = algorithm1(Speeds(tp=tp, td1=td1, ts1=ts1, td2=td2, ts2=ts2), delta, lambda: runs)
    assert found == Decision(technique=technique, machine=machine, step=step)


def test_zero2_is_run_only_where_the_others_decide_nothing():
    asked = []
    speeds = Speeds(tp=2.0, td1=1.0, ts1=0.0, td2=0.0, ts2=0.0)
    algorithm1(speeds, 0.1, lambda: asked.append(1) or True)
    assert asked == []


@pytest.mark.parametrize("delta", [0.0, -0.1, 1.01, float("nan")])
def test_delta_out_of_range(delta):
    with pytest.raises(ValueError, match="delta"):
        algorithm1(Speeds(tp=1, td1=1, ts1=1, td2=1, ts2=1), delta, lambda: True)


def test_machines_that_cannot_reach_each_other_are_tried_alone():
    here = msgspec.structs.replace(cluster((FAST, FAST), (FAST,)), links=())
    found = choose(
        here,
        asked(),
        lambda plan, step_s: Trial(plan=plan_key(plan), status="ok", step_s=step_s),
        0.1,
    )
    both = next(one for one in found.candidates if one.name == "tp")
    assert (
        both.problem is not None
        and "cannot reach each other" in both.problem.what
        and both.tflops == 0
    )
    assert found.speeds.td1 > 0 and found.speeds.td2 > 0
