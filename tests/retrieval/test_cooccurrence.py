"""Vectors of tokens from the passages that they share, beside a plain computation."""

import math
from itertools import combinations

import numpy as np
import torch

from farspan.retrieval import cooccurrence
from farspan.retrieval.cooccurrence import cooccurrence_vectors


def drawn(passages: int = 60, tokens: int = 30) -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [sorted({*generator.choice(tokens, 8).tolist()}) for _ in range(passages)]


def plain(bags: list[list[int]], tokens: int) -> torch.Tensor:
    single = [sum(t in bag for bag in bags) for t in range(tokens)]
    found = torch.zeros(tokens, tokens)
    for t, u in combinations(range(tokens), 2):
        both = sum(t in bag and u in bag for bag in bags)
        if both:
            found[t, u] = found[u, t] = max(
                0.0, math.log(len(bags) * both / (single[t] * single[u]))
            )
    return found


def test_angles_are_those_of_the_leading_directions():
    """With as many directions as tokens, vectors are rows of the root of |M|."""
    bags = drawn()
    values, directions = torch.linalg.eigh(plain(bags, 30))
    rows = torch.nn.functional.normalize(directions * values.abs().sqrt(), dim=1)
    found = cooccurrence_vectors(bags, 40, 30, seed=3)
    torch.testing.assert_close(found[:30] @ found[:30].T, rows @ rows.T, atol=1e-4, rtol=0)
    assert not found[30:].any(), "a token that no passage has"


def test_words_that_stand_with_the_same_words_lie_near():
    """Tokens 0 and 1 never meet, and have the same neighbours; 2 has others."""
    bags = [
        [0, 10, 11],
        [0, 11, 12],
        [1, 10, 11],
        [1, 11, 12],
        [2, 20, 21],
        [2, 21, 22],
        [20, 22],
        [10, 12],
    ] * 3
    v = cooccurrence_vectors(bags, 30, 6, seed=0)
    assert v[0] @ v[1] > 0.8 > 0.3 > v[0] @ v[2]


def test_rare_tokens_and_those_beyond_the_most_have_none(monkeypatch):
    """Nor one that every passage has: 0."""
    bags = [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 3, 4], [0, 3, 5], [0, 6]]
    found = cooccurrence_vectors(bags, 7, 4, seed=0)
    assert (found.norm(dim=1) > 0.99).tolist() == [False, True, True, False, False, False, False]
    assert found[[0, 3, 4, 5, 6]].norm() < 1e-2
    assert not cooccurrence_vectors([[0], [1]], 6, 4, seed=0).any()
    monkeypatch.setattr(cooccurrence, "MAX_FREQUENT_TOKENS", 2)
    assert cooccurrence_vectors(bags, 7, 4, seed=0).norm() < 1e-2, (
        "0 and 1 alone say nothing of each other"
    )


def test_the_same_seed_gives_the_same_vectors():
    assert torch.equal(
        cooccurrence_vectors(drawn(), 30, 8, seed=2), cooccurrence_vectors(drawn(), 30, 8, seed=2)
    )
