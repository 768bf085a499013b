"""The fit ends in the time that it is given."""

from itertools import count

import pytest
import torch

from farspan.retrieval.contrastive_fit import fit_embedder
from farspan.retrieval.index import FitSettings
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.pairs import Pairs


@pytest.mark.parametrize(
    ("seconds", "steps"), [(float("inf"), 40), (1000.0, 40), (25.0, 22), (0.5, 8)]
)
def test_steps_are_as_many_as_the_time_is_enough_for(seconds, steps):
    """This clock goes on by a second with every look at it: once a step, and once after eight."""
    bags = [[n, n + 1] for n in range(30)]
    asked = [[n] for n in range(30)]
    pooled = tuple(torch.randn(30, 8, generator=torch.Generator().manual_seed(n)) for n in range(2))
    pairs = Pairs(
        asked=[""] * 30,
        texts=[*range(30)],
        passages=[*range(30)],
        negatives=[[] for _ in range(30)],
        groups=torch.arange(30).numpy(),
    )
    ticks = count()
    shares = []
    work = IndexWork(lambda: float(next(ticks)), lambda work: shares.append(work.share))
    work.add_expected("fitting", 40)
    fitted = fit_embedder(
        (bags, asked),
        pooled,
        torch.ones(31),
        pairs,
        8,
        FitSettings(size=16, batch=8, steps=40),
        work,
        seconds,
    )
    assert len(shares) == steps and work.share == 1.0 and torch.isfinite(fitted["table"]).all()
