"""The expected loss follows the text's own counts, and a run's own losses more and more."""

from __future__ import annotations

import random

import pytest

from farspan.domain.forecast import Counted, Forecast
from farspan.domain.train import Schedule
from farspan.estimate.loss_forecast import BEFORE, EARLIEST, FACTORS, forecast, revised

COUNTED = tuple(
    Counted(tokens=tokens, few=few, few_again=few - 0.3, many_again=few - 0.6)
    for tokens, few in ((50_000.0, 6.0), (200_000.0, 5.4), (800_000.0, 4.6))
)
COSINE = Schedule(floor=0.0)


def expected(
    tokens: float, *, parameters: float = 3e6, unique: float = 1e9, counted=COUNTED
) -> Forecast:
    found = forecast(
        counted,
        parameters=parameters,
        unique_tokens=unique,
        tokens=tokens,
        steps=tokens / 4096,
        bigram_nats=5.0,
    )
    assert found is not None
    return found


def test_a_harder_text_is_expected_to_be_harder_in_proportion():
    easier = tuple(
        Counted(
            tokens=one.tokens,
            few=one.few - 1.5,
            few_again=one.few_again - 1.5,
            many_again=one.many_again - 1.5,
        )
        for one in COUNTED
    )
    for tokens in (60_000.0, 200_000.0, 5e6):
        assert expected(tokens).loss - expected(tokens, counted=easier).loss == pytest.approx(
            sum(FACTORS[4:7]) * 1.5
        )
        low, high = expected(tokens).interval
        assert (low, high) == pytest.approx(
            (expected(tokens).loss - BEFORE, expected(tokens).loss + BEFORE)
        )


def test_more_text_and_more_parameters_are_never_expected_to_teach_less():
    rng = random.Random(0)
    for _ in range(200):
        tokens, unique, size = (10 ** rng.uniform(4.5, 7.5) for _ in range(3))
        base = expected(tokens, unique=unique, parameters=size).loss
        assert expected(1.3 * tokens, unique=unique, parameters=size).loss < base
        assert expected(tokens, unique=1.3 * unique, parameters=size).loss <= base + 1e-9
        assert expected(tokens, unique=unique, parameters=1.3 * size).loss < base


def test_near_the_end_a_run_is_expected_to_end_where_it_is():
    before = expected(500_000.0)
    told = [
        revised(before, COSINE, share, 5.0, 5.0)
        for share in (EARLIEST / 2, EARLIEST, 0.5, 0.9, 0.999, 1.0)
    ]
    assert told[0] is None and told[-1] is None
    near = [abs(one[0] - 5.0) for one in told if one is not None]
    assert near[-1] < 0.01 and near[-2] < 0.2
    halves = [one[1] for one in told if one is not None]
    assert halves == sorted(halves, reverse=True) and 0 < halves[0] < BEFORE
    # A run that is worse than another is expected to end worse, the more so the later it is seen.
    worse = [revised(before, COSINE, share, 5.3, 5.0)[0] for share in (EARLIEST, 0.5, 0.9, 0.999)]
    assert [high - one[0] for high, one in zip(worse, told[1:-1], strict=True)] == pytest.approx(
        [0.3 * share for share in (EARLIEST, 0.5, 0.9, 0.999)]
    )
    # A sample of the split that is easier for counts by 0.3 nats is taken to be so for the model.
    (plain, _), (corrected, _) = (
        revised(before, COSINE, 0.5, 5.0, 5.0),
        revised(before, COSINE, 0.5, 5.0, 4.7),
    )
    assert corrected == pytest.approx(plain + 0.5 * 0.3)


def test_loss_forecast_is_none_without_counted_text_or_decay():
    assert (
        forecast((), parameters=3e6, unique_tokens=100.0, tokens=100.0, steps=1, bigram_nats=5.0)
        is None
    )
    assert revised(expected(1e6), Schedule(kind="constant"), 0.5, 5.0, 5.0) is None
    assert expected(1e6, counted=COUNTED[:1]).loss < 10
