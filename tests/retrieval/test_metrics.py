"""Metrics against hand calculations and brute force; intervals against all resamples there are."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.retrieval.metrics import (
    bootstrap_interval,
    hit_rate,
    mrr,
    ndcg,
    recall,
    relevant_ranks,
)


def test_metrics_are_those_computed_by_hand():
    scores = np.array([0.1, 0.9, 0.5, 0.5, 0.3])
    assert relevant_ranks(scores, [1]).tolist() == [1]
    assert relevant_ranks(scores, [2]).tolist() == [3], "a tie is lost"
    assert relevant_ranks(scores, [2, 3]).tolist() == [2, 3]
    assert relevant_ranks(scores, [0, 1]).tolist() == [1, 5]
    assert ndcg(np.array([3]), 10) == 1 / math.log2(4)
    assert ndcg(np.array([11]), 10) == 0
    assert ndcg(np.array([1, 2]), 10) == 1
    assert ndcg(np.array([2, 20]), 10) == pytest.approx((1 / math.log2(3)) / (1 + 1 / math.log2(3)))
    assert (hit_rate(np.array([2, 20]), 1), hit_rate(np.array([2, 20]), 10)) == (0, 1)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=12).flatmap(
        lambda scores: st.tuples(
            st.just(scores), st.sets(st.integers(0, len(scores) - 1), min_size=1)
        )
    )
)
def test_ranks_are_those_of_a_sort(case):
    scores, relevant = case
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i in relevant))
    expected = [1 + place for place, i in enumerate(order) if i in relevant]
    assert relevant_ranks(np.array(scores, float), sorted(relevant)).tolist() == expected


@pytest.mark.parametrize("seed", range(40))
def test_values_are_those_of_trec_eval(seed: int):
    pytrec_eval = pytest.importorskip(
        "pytrec_eval", reason="needs pytrec-eval-terrier: pip install 'farspan[test]'"
    )
    rng = np.random.default_rng(seed)
    scores = rng.permutation(int(rng.integers(3, 300))).astype(float)
    relevant = rng.choice(
        len(scores), int(rng.integers(1, 1 + len(scores) // 2)), replace=False
    ).tolist()
    judged = {"q": {f"d{n}": 1 for n in relevant}}
    ranked = {"q": {f"d{n}": float(score) for n, score in enumerate(scores)}}
    evaluator = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10", "recall.100", "recip_rank"})
    found = evaluator.evaluate(ranked)["q"]
    own = relevant_ranks(scores, relevant)
    assert ndcg(own, 10) == pytest.approx(found["ndcg_cut_10"])
    assert recall(own, 100) == pytest.approx(found["recall_100"])
    assert mrr(own, len(scores)) == pytest.approx(found["recip_rank"])


def test_the_interval_is_that_of_every_possible_resample():
    differences = np.array([1.0, 0.0, 0.0, -1.0, 1.0])
    means = [np.mean(draw) for draw in itertools.product(differences, repeat=5)]
    low, high = bootstrap_interval(differences, seed=3)
    assert (low, high) == (np.quantile(means, 0.025), np.quantile(means, 0.975))
    assert bootstrap_interval(differences, seed=3) == (low, high)
    assert bootstrap_interval(np.full(7, 0.25), seed=0) == (0.25, 0.25)


def test_intervals_cover_the_true_mean_about_95_times_in_100():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        low, high = bootstrap_interval(
            generator.choice([-1.0, 0.0, 1.0], 300, p=[0.1, 0.7, 0.2]), seed=trial, resamples=500
        )
        covered += low <= 0.1 <= high
    assert 180 <= covered <= 199
