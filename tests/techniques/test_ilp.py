"""The integer linear program against brute force on its own objective."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from farspan.techniques._search.ilp import Infeasible, StrategyChoice, objective, solve_ilp

NODES = 6
STRATEGIES = 4
CASES = 400


def random_case(seed: int):
    """Six operators of up to four strategies in a random graph; some transitions forbidden, half
    with a memory cap."""
    rng = random.Random(seed)
    counts = [rng.randint(1, STRATEGIES) for _ in range(NODES)]
    scale = 10.0 ** rng.randint(-7, 1)
    costs = [[scale * rng.random() for _ in range(n)] for n in counts]
    pairs = [
        pair
        for pair in itertools.combinations(range(NODES), 2)
        if pair[1] == pair[0] + 1 or rng.random() < 0.2
    ]
    edges = {
        (i, j): [
            [
                math.inf if rng.random() < 0.1 else scale * rng.choice((0.0, rng.random()))
                for _ in range(counts[j])
            ]
            for _ in range(counts[i])
        ]
        for i, j in pairs
    }
    memory = [[1e9 * rng.random() for _ in range(n)] for n in counts]
    cap = math.inf if rng.random() < 0.5 else 1e9 * rng.uniform(0.5, 4.0)
    return costs, edges, memory, cap


def brute_force(costs, edges, memory, cap) -> float:
    best = math.inf
    for picks in itertools.product(*(range(len(row)) for row in costs)):
        if sum(row[pick] for row, pick in zip(memory, picks, strict=True)) <= cap:
            best = min(best, objective(costs, edges, picks))
    return best


@pytest.mark.parametrize("block", range(8))
def test_the_program_finds_what_brute_force_finds(block: int):
    for seed in range(block * CASES // 8, (block + 1) * CASES // 8):
        costs, edges, memory, cap = random_case(seed)
        least = brute_force(costs, edges, memory, cap)
        found = solve_ilp(costs, edges, memory, cap)
        if least == math.inf:
            assert isinstance(found, Infeasible), seed
            continue
        assert isinstance(found, StrategyChoice), seed
        assert found.cost == pytest.approx(least, rel=1e-5), seed
        assert found.cost == objective(costs, edges, found.picks) and found.gap <= 1e-6
        assert found.memory <= cap * (1 + 1e-6)


def test_a_cap_that_nothing_keeps_names_the_least_that_anything_fills():
    costs = [[1.0, 2.0], [1.0, 3.0]]
    edges = {(0, 1): [[0.0, 0.0], [0.0, 0.0]]}
    found = solve_ilp(costs, edges, [[5.0, 4.0], [6.0, 3.0]], cap=6.0)
    assert found == Infeasible(7.0, 6.0)


def test_strategies_that_forbid_one_another_count_for_the_least_memory():
    # The two that fill least may not meet: 4 + 6 or 5 + 3 remain.
    edges = {(0, 1): [[0.0, 0.0], [0.0, math.inf]]}
    found = solve_ilp([[1.0, 2.0], [1.0, 3.0]], edges, [[5.0, 4.0], [6.0, 3.0]], cap=7.5)
    assert found == Infeasible(8.0, 7.5)


def test_the_same_problem_gives_the_same_choice():
    case = random_case(7)
    assert solve_ilp(*case) == solve_ilp(*case)
