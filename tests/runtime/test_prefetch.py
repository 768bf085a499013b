"""Steps that a thread reads ahead are those that are read one by one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from farspan.corpus.token_files import TokenFile
from farspan.domain.corpus import CorpusManifest
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import load
from farspan.domain.train import Regularization
from farspan.runtime.comm.topology import Topology
from farspan.runtime.training import batches as batches_module
from farspan.runtime.training.batches import Batches
from farspan.runtime.training.prefetch import GROUP_STEPS, Prefetcher, ReadStep
from farspan.runtime.training.sample_order import PackedWindows, ReshuffledWindows
from farspan.runtime.worker import train_windows
from tests import tiny
from tests.runtime.test_trainer import TRAIN

CPU = torch.device("cpu")


class Reads:
    """Reads steps as arrays of their own number, and keeps which were read together."""

    def __init__(self, fails_at: int = 10**9) -> None:
        self.groups: list[list[int]] = []
        self._fails_at = fails_at

    def __call__(self, first, arrays) -> list[ReadStep]:
        steps = list(range(first, first + len(arrays)))
        self.groups.append(steps)
        if self._fails_at in steps:
            raise Refusal("corpus-damaged", what="a block", where="here", fact="", remedy="prepare")
        for step, array in zip(steps, arrays, strict=True):
            array[:] = step
        return [
            ReadStep(step, step, np.empty(0, np.int64), array)
            for step, array in zip(steps, arrays, strict=True)
        ]


def take(prefetcher: Prefetcher, step: int) -> int:
    read = prefetcher.get(step)
    (number,) = set(read.inputs.tolist())
    assert read.valid == number
    return number


def test_steps_come_in_order_and_are_read_several_at_a_time():
    reads = Reads()
    prefetcher = Prefetcher(reads, 4, 100, CPU)
    assert [take(prefetcher, step) for step in range(100)] == list(range(100))
    prefetcher.close()
    assert [step for group in reads.groups for step in group][:100] == list(range(100))
    assert len(reads.groups[0]) == GROUP_STEPS
    assert max(map(len, reads.groups)) <= GROUP_STEPS


@settings(max_examples=30, deadline=None)
@given(skips=st.lists(st.integers(1, 50), max_size=8), start=st.integers(0, 40))
def test_steps_that_are_left_out_are_left_out(skips, start):
    prefetcher = Prefetcher(Reads(), 4, 10**6, CPU)
    step = start
    for skip in skips:
        for _ in range(3):
            assert take(prefetcher, step) == step
            step += 1
        step += skip
    assert take(prefetcher, step) == step
    prefetcher.close()


def test_a_step_may_be_asked_for_again_after_the_end():
    prefetcher = Prefetcher(Reads(), 4, 5, CPU)
    assert [take(prefetcher, step) for step in range(5)] == list(range(5))
    prefetcher.close()
    assert take(prefetcher, 0) == 0
    prefetcher.close()


def test_what_reading_raises_is_raised_where_the_step_is_asked_for():
    prefetcher = Prefetcher(Reads(fails_at=20), 4, 100, CPU)
    for step in range(GROUP_STEPS):
        assert take(prefetcher, step) == step
    for _ in range(2):
        with pytest.raises(Refusal, match="corpus-damaged"):
            prefetcher.get(GROUP_STEPS)
    prefetcher.close()


def test_long_steps_keep_little_memory():
    prefetcher = Prefetcher(Reads(), 2**23, 100, CPU)
    assert take(prefetcher, 0) == 0
    assert take(prefetcher, 1) == 1
    prefetcher.close()


@pytest.mark.parametrize("rows", [(6,), (5, 1), (6, 0)])
@pytest.mark.parametrize(
    "regularization", [None, Regularization(dropout=0.1, mask=0.2, reshuffle=True)]
)
def test_steps_read_ahead_are_the_same_tokens(tmp_path, monkeypatch, rows, regularization):
    """Over several epochs, whose last window is short, with several microbatches."""
    train = replace(TRAIN, batch=sum(rows), steps=70)
    if regularization is not None:
        train = replace(train, regularization=regularization)
    plan = tiny.plan(train, rows=rows)
    tiny.corpus(tmp_path / "corpus", tokens=1003, documents=5)
    run = tiny.run_folder(tmp_path / "run", plan)
    for rank in range(len(rows)):
        worker = build_alone(plan, run, rank)
        one_by_one = Batches(worker)
        monkeypatch.setattr(batches_module, "PREFETCHING_DEVICES", frozenset({"cpu"}))
        ahead = Batches(worker)
        monkeypatch.undo()
        for step in [*range(40), 55, 56]:
            expected = one_by_one.read_step(step)
            read = ahead.read_step(step)
            assert (read.valid, read.valid_of_all) == (expected.valid, expected.valid_of_all)
            assert torch.equal(read.inputs, expected.inputs)
            for microbatch in range(plan.replicas[0].microbatches):
                mine = ahead.microbatch(read, microbatch)
                theirs = one_by_one.microbatch(expected, microbatch)
                assert torch.equal(mine.inputs, theirs.inputs)
                assert torch.equal(mine.targets, theirs.targets)
                assert (mine.dropout is None) == (regularization is None)
        ahead.close()


def build_alone(plan, run, rank):
    """A worker that reads its part of a plan without the others."""
    manifest = load(run.corpus, CorpusManifest)
    corpus = run.path.parent / "corpus"
    file = TokenFile.open(corpus, "train", manifest, "")
    executor = SimpleNamespace(topology=Topology(plan, rank), tied=None)
    return SimpleNamespace(
        plan=plan,
        executor=executor,
        train=train_windows(file, plan.train, manifest),
        manifest=manifest,
        group=SimpleNamespace(device=CPU),
    )


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(30, 400),
    seq_len=st.integers(1, 40),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_windows_that_are_read_together_are_those_read_one_by_one(tokens, seq_len, seed, data):
    values = np.random.default_rng(seed).integers(0, 999, tokens).astype(np.uint16)
    ends = np.array([0, tokens // 3, tokens // 2, tokens], np.int64)
    for split in (
        PackedWindows(values, seq_len),
        ReshuffledWindows(values, seq_len, offsets=ends, seed=seed),
    ):
        last = 3 * split.count - 1 if isinstance(split, ReshuffledWindows) else split.count
        numbers = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=12))
        inputs, targets = split.read(np.array(numbers, np.uint64))
        for row, number in enumerate(numbers):
            valid = int(split.valid(np.array([number], np.uint64))[0])
            assert (targets[row, valid:] == -1).all() and (inputs[row, valid:] == 0).all()
            if valid:
                span = split._read_span(number, valid + 1)
                assert inputs[row, :valid].tolist() == span[:-1].tolist()
                assert targets[row, :valid].tolist() == span[1:].tolist()
