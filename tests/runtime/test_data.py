"""Data order: every token of every epoch exactly once, whatever the world size, and a pure function of its inputs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.domain.train import TrainSpec
from farspan.runtime.comm.topology import Topology
from farspan.runtime.training.data import Order, Windows, permute
from tests import tiny


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(0, 2**31), epoch=st.integers(0, 1000))
def test_permute_is_a_bijection(size, seed, epoch):
    out = permute(np.arange(size, dtype=np.uint64), size, seed, epoch)
    assert sorted(out) == list(range(size))


def test_permute_mixes_and_depends_on_seed_and_epoch():
    index = np.arange(1000, dtype=np.uint64)
    base = permute(index, 1000, 1, 0)
    for other in (permute(index, 1000, 2, 0), permute(index, 1000, 1, 1), index):
        assert (base == other).mean() < 0.02
    # Neighbours must not stay neighbours: a correlated order would make every batch a single document.
    assert (np.abs(np.diff(base.astype(np.int64))) == 1).mean() < 0.02


def test_permute_evaluates_single_indices_like_whole_ranges():
    whole = permute(np.arange(777, dtype=np.uint64), 777, 5, 3)
    assert [permute(np.array([i], np.uint64), 777, 5, 3)[0] for i in (0, 1, 500, 776)] == list(whole[[0, 1, 500, 776]])


def test_permute_needs_no_memory_for_huge_ranges():
    out = permute(np.array([0, 1, 2**40], np.uint64), 2**40 + 1, 0, 0)
    assert len(set(out.tolist())) == 3
    assert all(value <= 2**40 for value in out)


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(2, 400), seq_len=st.integers(1, 50))
def test_windows_predict_every_token_but_the_first_exactly_once(tokens, seq_len):
    windows = Windows(np.arange(tokens, dtype=np.uint16), seq_len)
    inputs, targets = windows.read(np.arange(windows.count, dtype=np.uint64))
    valid = targets >= 0
    assert sorted(targets[valid]) == list(range(1, tokens))
    assert (inputs[valid] + 1 == targets[valid]).all()
    assert valid.sum() == windows.valid(np.arange(windows.count, dtype=np.uint64)).sum()


@settings(max_examples=60, deadline=None)
@given(
    windows=st.integers(1, 60), rows=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum),
    seed=st.integers(0, 1000), epochs=st.integers(1, 3), micro_rows=st.integers(1, 4),
)  # fmt: skip
def test_every_window_of_every_epoch_exactly_once_over_all_ranks(windows, rows, seed, epochs, micro_rows):
    order, batch = Order(windows, seed), sum(rows)
    steps = -(-windows * epochs // batch)
    samples = np.concatenate([one for step in range(steps) for one in samples_of(step, tuple(rows), micro_rows)])
    read = order.window(samples)
    assert sorted(samples) == list(range(steps * batch))
    for epoch in range(epochs):
        here = read[(samples >= epoch * windows) & (samples < (epoch + 1) * windows)]
        assert sorted(here) == list(range(windows))


def test_the_same_samples_whatever_the_split_over_ranks():
    order = Order(97, seed=3)
    one = order.window(np.concatenate(samples_of(5, (12,))))
    many = order.window(np.concatenate(samples_of(5, (5, 1, 4, 2))))
    assert sorted(one) == sorted(many)


def samples_of(step, rows, micro_rows=4):
    """The samples of a step that each rank of a plan reads, microbatch by microbatch."""
    train = TrainSpec(steps=1, batch=sum(rows), seq_len=16, precision="fp32")
    plan = tiny.plan(train, rows=rows, micro_rows=micro_rows)
    return [part for rank in range(len(rows)) for part in Topology(plan, rank).samples(step)]
