"""Tokens that replicas lose by meeting rarely: the published table, what lies between, and what
lies outside."""

from __future__ import annotations

import math

import msgspec
import pytest

from farspan.domain.plan import Replica, Sync
from farspan.estimate.scaling_law import scaling_law_loss, tokens_for
from farspan.estimate.token_efficiency import EXCESS, LATER, SPREAD, excess, token_efficiency
from tests.estimate.parts import cluster, device, mesh, plan, stage


def meeting(replicas: int, every: int, steps: int = 1000):
    there = cluster([[device()] * replicas])
    made = [Replica(stages=(stage(mesh(rank), (4,)),)) for rank in range(replicas)]
    return plan(there, *made, sync=Sync(every=every), batch=4 * replicas, steps=steps)


def test_loss_and_the_tokens_that_make_up_for_more_of_it():
    # 1.8172 + 482.01 / 10^3.478 + 2085.43 / 10^3.658 = 1.8172 + 482.01 / 3006.1 + 2085.43 / 4549.9.
    assert scaling_law_loss(1e10, 1e10) == pytest.approx(1.8172 + 0.16034 + 0.45835, abs=1e-4)
    factor = tokens_for(0.01, 1e9, 2e10)
    # The run with a worse algorithm ends 1 % higher after so many times the tokens than the good
    # one would there.
    assert scaling_law_loss(1e9, factor * 2e10) * 1.01 == pytest.approx(scaling_law_loss(1e9, 2e10))
    assert tokens_for(0.0, 1e9, 2e10) == pytest.approx(1.0)
    assert tokens_for(0.5, 1e9, 2e10) == math.inf


def test_the_table_as_its_paper_prints_it():
    # arXiv 2503.09799, table 4: percentages above data-parallel training, printed to one decimal.
    printed = {
        35e6: (0.7, 2.0, 3.9),
        90e6: (0.5, 1.5, 3.1),
        180e6: (0.2, 1.1, 2.3),
        335e6: (0.1, 0.9, 2.0),
        550e6: (0.2, 0.8, 1.7),
        1.3e9: (0.2, 0.5, 1.3),
        2.4e9: (-0.1, 0.3, 1.1),
    }
    for size, shares in printed.items():
        for replicas, share in zip((2, 4, 8), shares, strict=True):
            assert EXCESS[replicas][size] * 100 == pytest.approx(share, abs=0.051)
            assert excess(size, replicas, 30) == EXCESS[replicas][size]


def test_between_the_published_settings_shares_are_linear_in_logarithms():
    between = math.sqrt(90e6 * 180e6)
    assert excess(between, 4, 30) == pytest.approx((EXCESS[4][90e6] + EXCESS[4][180e6]) / 2)
    share = math.log(3 / 2) / math.log(2)
    assert excess(35e6, 3, 30) == pytest.approx(
        (1 - share) * EXCESS[2][35e6] + share * EXCESS[4][35e6]
    )


def test_loss_excess_grows_with_longer_outer_sync_intervals_as_published():
    assert excess(1e9, 2, 100) == pytest.approx(excess(1e9, 2, 30) + LATER[2])
    assert excess(1e9, 4, 300) == pytest.approx(
        excess(1e9, 4, 30) + LATER[4] * math.log(10) / math.log(10 / 3)
    )
    assert excess(1e9, 2, 10) == excess(1e9, 2, 30)
    # Streaming exchanges of M replicas, H = 30 and then 100: table 6 of arXiv 2501.18512.
    pairs = {
        2: ((3.53, 3.56), (3.21, 3.22), (2.98, 3.00), (2.81, 2.83), (2.67, 2.69), (2.48, 2.50)),
        4: ((3.60, 3.64), (3.25, 3.29), (3.02, 3.05), (2.84, 2.87), (2.70, 2.73), (2.50, 2.53)),
    }
    for replicas, losses in pairs.items():
        mean = sum(later / usual - 1 for usual, later in losses) / len(losses)
        assert LATER[replicas] == pytest.approx(mean, abs=5e-5)


def test_tokens_by_hand():
    found = token_efficiency(meeting(4, 30), 35e6)
    # L(35M, 700M) = 1.81720 + 1.14612 + 1.21244 = 4.17575; / (3.554 / 3.485) = 4.09468; the data's
    # part is 1.13136; (2085.43 / 1.13136)^(1 / 0.3658) / 7e8 = 1.2083 times the tokens.
    assert found.tokens == pytest.approx(1 / 1.2083, rel=1e-4)
    assert found.evidence
    low, high = found.interval
    assert low == pytest.approx(1 / tokens_for(EXCESS[4][35e6] + SPREAD, 35e6, 7e8))
    assert high == pytest.approx(1 / tokens_for(EXCESS[4][35e6] - SPREAD, 35e6, 7e8))
    assert low < found.tokens < high


def test_synchronous_plans_lose_nothing():
    one = meeting(2, 30)
    alone = msgspec.structs.replace(one, replicas=one.replicas[:1], sync=None)
    assert token_efficiency(alone, 1e9) == (1.0, (1.0, 1.0), True)


@pytest.mark.parametrize(
    ("parameters", "replicas", "every", "steps", "evidence"),
    [
        (35e6, 2, 30, 1000, True),
        (2.4e9, 8, 300, 1000, True),
        (1e9, 2, 5, 1000, True),
        (34e6, 2, 30, 1000, False),
        (2.5e9, 2, 30, 1000, False),
        (1e9, 9, 30, 1000, False),
        (1e9, 2, 301, 1000, False),
        (1e9, 2, 4, 1000, False),
        (1e9, 2, 100, 99, False),
    ],
)
def test_evidence_ends_where_the_published_runs_end(parameters, replicas, every, steps, evidence):
    assert token_efficiency(meeting(replicas, every, steps), parameters).evidence is evidence


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ((35e6, 2, 30), (5e6, 2, 30)),
        ((2.4e9, 2, 30), (7e9, 2, 30)),
        ((1e9, 8, 30), (1e9, 16, 30)),
        ((1e9, 2, 100), (1e9, 2, 300)),
        ((1e9, 2, 100), (1e9, 2, 1000)),
    ],
)
def test_bounds_widen_outside_by_what_going_there_changes(inside, outside):
    parameters, replicas, every = outside
    found = token_efficiency(meeting(replicas, every, 10_000), parameters)
    spread = SPREAD + abs(excess(*outside) - excess(*inside))
    shares = (excess(*outside) + spread, excess(*outside) - spread)
    assert found.interval == pytest.approx(
        tuple(1 / tokens_for(share, parameters, 20 * parameters) for share in shares)
    )
    assert found.interval[0] < found.tokens < found.interval[1]
