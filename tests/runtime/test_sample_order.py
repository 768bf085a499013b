"""Data order: every token of every epoch exactly once, whatever the world size, and a pure function
of its inputs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farspan.domain.train import TrainSpec
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model.dropout import Dropout
from farspan.runtime.training.sample_order import (
    PackedWindows,
    ReshuffledWindows,
    SampleOrder,
    dropout_seeds,
    mask,
    shuffle_index,
)
from tests import tiny


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**31), epoch=st.integers(0, 1000))
def test_permute_is_a_bijection(size, seed, epoch):
    out = shuffle_index(np.arange(size, dtype=np.uint64), size, seed, epoch)
    assert sorted(out) == list(range(size))


def test_permute_mixes_and_depends_on_seed_and_epoch():
    index = np.arange(1000, dtype=np.uint64)
    base = shuffle_index(index, 1000, 1, 0)
    for other in (shuffle_index(index, 1000, 2, 0), shuffle_index(index, 1000, 1, 1), index):
        assert (base == other).mean() < 0.02
    # Neighbours must not stay neighbours: a correlated order would make every batch a single
    # document.
    assert (np.abs(np.diff(base.astype(np.int64))) == 1).mean() < 0.02


def test_permute_evaluates_single_indices_like_whole_ranges():
    whole = shuffle_index(np.arange(777, dtype=np.uint64), 777, 5, 3)
    assert [
        shuffle_index(np.array([i], np.uint64), 777, 5, 3)[0] for i in (0, 1, 500, 776)
    ] == list(whole[[0, 1, 500, 776]])


def test_permute_needs_no_memory_for_huge_ranges():
    out = shuffle_index(np.array([0, 1, 2**40], np.uint64), 2**40 + 1, 0, 0)
    assert len(set(out.tolist())) == 3
    assert all(value <= 2**40 for value in out)


@given(tokens=st.integers(2, 400), seq_len=st.integers(1, 50))
def test_windows_predict_every_token_but_the_first_exactly_once(tokens, seq_len):
    windows = PackedWindows(np.arange(tokens, dtype=np.uint16), seq_len)
    inputs, targets = windows.read(np.arange(windows.count, dtype=np.uint64))
    valid = targets >= 0
    assert sorted(targets[valid]) == list(range(1, tokens))
    assert (inputs[valid] + 1 == targets[valid]).all()
    assert valid.sum() == windows.valid(np.arange(windows.count, dtype=np.uint64)).sum()


@given(
    windows=st.integers(1, 60),
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum),
    seed=st.integers(0, 1000),
    epochs=st.integers(1, 3),
    micro_rows=st.integers(1, 4),
)
def test_every_window_of_every_epoch_exactly_once_over_all_ranks(
    windows, rows, seed, epochs, micro_rows
):
    order = SampleOrder(windows, seed)
    batch = sum(rows)
    steps = -(-windows * epochs // batch)
    samples = np.concatenate(
        [one for step in range(steps) for one in samples_of(step, tuple(rows), micro_rows)]
    )
    read = order.window(samples)
    assert sorted(samples) == list(range(steps * batch))
    for epoch in range(epochs):
        here = read[(samples >= epoch * windows) & (samples < (epoch + 1) * windows)]
        assert sorted(here) == list(range(windows))


def test_the_same_samples_whatever_the_split_over_ranks():
    order = SampleOrder(97, seed=3)
    one = order.window(np.concatenate(samples_of(5, (12,))))
    many = order.window(np.concatenate(samples_of(5, (5, 1, 4, 2))))
    assert sorted(one) == sorted(many)


def samples_of(step, rows, micro_rows=4):
    """The samples of a step that each rank of a plan reads, microbatch by microbatch."""
    train = TrainSpec(steps=1, batch=sum(rows), seq_len=16, precision="fp32")
    plan = tiny.plan(train, rows=rows, micro_rows=micro_rows)
    return [
        part
        for rank in range(len(rows))
        for part in Topology(plan, rank).samples_by_microbatch(step)
    ]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seq_len=st.integers(1, 7),
    seed=st.integers(0, 9),
)
def test_a_later_epoch_reads_every_document_whole_in_another_order(lengths, seq_len, seed):
    ends = np.cumsum([0, *lengths])
    # Each document is its number, and ends with 0.
    documents = [[k + 1] * (n - 1) + [0] for k, n in enumerate(lengths)]
    windows = ReshuffledWindows(np.concatenate(documents), seq_len, offsets=ends, seed=seed)
    plain = PackedWindows(windows.tokens, seq_len)
    total = int(ends[-1])
    orders = set()
    for epoch in range(4):
        every = np.arange(plain.count, dtype=np.uint64)
        inputs, targets = windows.read(every + np.uint64(epoch * plain.count))
        assert (windows.valid(every + np.uint64(epoch * plain.count)) == plain.valid(every)).all()
        assert ((targets >= 0).sum(axis=1) == plain.valid(every)).all()
        read = [*inputs.reshape(-1)[:1], *targets[targets >= 0]] if total > 1 else []
        if total > 1:
            assert sorted(read) == sorted(windows.tokens)
        whole = []
        begun = list[int]()
        for token in read:
            begun.append(int(token))
            if token == 0:
                whole = [*whole, tuple(begun)]
                begun = []
        assert not begun and (total == 1 or sorted(whole) == sorted(map(tuple, documents)))
        orders.add(tuple(whole))
        if epoch == 0:
            assert all(
                (ours == theirs).all()
                for ours, theirs in zip((inputs, targets), plain.read(every), strict=True)
            )
    assert len(orders) > 1 or len({tuple(d) for d in documents}) < 5


def test_epochs_may_be_read_side_by_side():
    """A step that ends one epoch and begins the next, and a run that goes on from the middle of
    one."""
    tokens = np.arange(200) % 50
    ends = np.arange(0, 201, 8)
    windows = ReshuffledWindows(tokens, 7, offsets=ends, seed=3)
    places = np.arange(5 * windows.count, dtype=np.uint64)
    wanted = windows.read(places)
    mixed = np.random.default_rng(0).permutation(places)
    again = ReshuffledWindows(tokens, 7, offsets=ends, seed=3).read(mixed)
    assert all((ours == theirs[mixed]).all() for ours, theirs in zip(again, wanted, strict=True))


def test_a_share_of_inputs_is_masked_by_sample_alone():
    samples = np.arange(400)
    inputs = np.zeros((400, 50), np.int64)
    masked = mask(inputs, samples, 0.15, 1000, seed=4)
    assert 0.14 < (masked != 0).mean() < 0.16
    assert len(np.unique(masked)) > 900
    order = np.random.default_rng(0).permutation(400)
    assert (mask(inputs[order], samples[order], 0.15, 1000, seed=4) == masked[order]).all()
    assert (mask(inputs, samples, 0.15, 1000, seed=5) != masked).any()
    assert (mask(inputs, samples + 400, 0.15, 1000, seed=4) != masked).any()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share_of_every_row_place_and_column(share):
    dropout = Dropout(share, torch.from_numpy(dropout_seeds(np.arange(64), 1)))
    ones = torch.ones(64, 24, 64)
    places = dropout.at_places(6)
    masks = torch.stack([place(ones) == 0 for place in places]).double()
    assert places[3](ones).mean() == pytest.approx(
        1.0, abs=6 * math.sqrt(share / (1 - share) / ones.numel())
    )
    for dims in ((0, 1, 2), (1, 2, 3), (0, 1, 3), (0, 2, 3)):
        means = masks.mean(dims)
        count = masks.numel() / means.numel()
        assert float((means - share).abs().max()) < 6 * math.sqrt(share * (1 - share) / count)
    # Nor does one row, place or position say anything of another.
    rows = (masks - share).flatten(2).transpose(0, 1).reshape(64, -1)
    correlation = (rows @ rows.T / rows.shape[1] / (share * (1 - share))).fill_diagonal_(0.0)
    assert float(correlation.abs().max()) < 6 / math.sqrt(rows.shape[1])
    shifted = (masks - share).flatten(1)
    for step in (1, 64, 65, 24 * 64):
        both = (shifted[:, step:] * shifted[:, :-step]).mean() / (share * (1 - share))
        assert abs(float(both)) < 6 / math.sqrt(shifted.numel())
