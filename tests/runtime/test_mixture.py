"""Training on mixtures: shares that hold, an order that is pure, and losses by source."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.cli.main import main
from farspan.domain.corpus import CorpusManifest
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Step, Validated, read_events
from farspan.domain.struct_files import load
from farspan.runtime.training.sample_order import (
    MIXTURE_BLOCK,
    MixedOrder,
    MixedWindows,
    PackedWindows,
    SampleOrder,
    count_by_share,
    interleave,
    join_number,
    split_number,
)
from farspan.runtime.training.validation import LossSums, ValidationSums
from tests.corpus.test_mixture import write_texts

WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(sum)


@st.composite
def mixed_orders(draw: st.DrawFn) -> tuple[MixedOrder, list[float]]:
    weights = draw(WEIGHTS)
    shares = [weight / sum(weights) for weight in weights]
    sizes = [draw(st.integers(1, 400)) for _ in weights]
    seed = draw(st.integers(0, 1000))
    orders = [SampleOrder(size, seed) for size in sizes]
    return MixedOrder(tuple(orders), count_by_share(shares, MIXTURE_BLOCK), seed), shares


@given(weights=WEIGHTS, total=st.integers(5, 2000))
def test_counts_follow_the_shares(weights, total):
    shares = [weight / sum(weights) for weight in weights]
    counts = count_by_share(shares, total)
    assert sum(counts) == total
    for count, share in zip(counts, shares, strict=True):
        assert (count == 0) == (share == 0)
        assert abs(count - share * total) <= len(shares)


@given(mixed=mixed_orders(), blocks=st.integers(1, 3))
def test_each_block_holds_the_shares_and_each_source_is_walked_through_in_order(mixed, blocks):
    order, shares = mixed
    windows = order.window(np.arange(blocks * MIXTURE_BLOCK))
    part_of, number = split_number(windows)
    for block in range(blocks):
        in_block = part_of[block * MIXTURE_BLOCK : (block + 1) * MIXTURE_BLOCK]
        assert np.bincount(in_block, minlength=len(shares)).tolist() == list(order.counts)
    for part, own in enumerate(order.orders):
        read = number[part_of == part]
        samples = np.arange(blocks * order.counts[part])
        # The same samples as a run on this source alone reads, in another order within a block.
        expected = own.window(samples)
        for block in range(blocks):
            rows = slice(block * order.counts[part], (block + 1) * order.counts[part])
            assert sorted(read[rows].tolist()) == sorted(expected[rows].tolist())


@given(mixed=mixed_orders(), samples=st.lists(st.integers(0, 10**7), min_size=1, max_size=20))
def test_order_is_a_pure_function_of_the_sample(mixed, samples):
    order, _ = mixed
    together = order.window(np.array(samples))
    for sample, window in zip(samples, together, strict=True):
        assert order.window(np.array([sample]))[0] == window


def test_ranks_that_take_turns_read_the_same_mixture():
    """Half of each source, where two replicas read every other sample."""
    order = MixedOrder((SampleOrder(500, 0), SampleOrder(700, 0)), (500, 500), seed=0)
    part_of, _ = split_number(order.window(np.arange(20_000)))
    for replica in (part_of[::2], part_of[1::2]):
        assert replica.mean() == pytest.approx(0.5, abs=0.02)


@given(
    sizes=st.lists(st.integers(2, 60), min_size=1, max_size=4),
    seq_len=st.integers(1, 16),
)
def test_windows_of_a_mixture_never_reach_into_another_source(sizes, seq_len):
    # Each source has tokens of its own.
    tokens = np.concatenate([np.arange(size) + 1000 * part for part, size in enumerate(sizes)])
    firsts = np.cumsum([0, *sizes[:-1]])
    parts = [
        PackedWindows(tokens.astype(np.uint16), seq_len, int(first), size)
        for first, size in zip(firsts, sizes, strict=True)
    ]
    mixed = MixedWindows(tuple(parts))
    order = interleave([part.count for part in parts], [1 / len(sizes)] * len(sizes), 0)
    assert len(set(order.tolist())) == len(order) == mixed.count
    inputs, targets = mixed.read(order)
    valid = targets >= 0
    assert (inputs[valid] + 1 == targets[valid]).all()
    expected = [1000 * part + token for part, size in enumerate(sizes) for token in range(1, size)]
    assert sorted(targets[valid].tolist()) == expected
    assert valid.sum() == mixed.num_targets == mixed.valid(order).sum()
    assert mixed.valid(np.array([mixed.padding], np.uint64)).tolist() == [0]


@given(
    sizes=st.lists(st.integers(1, 300), min_size=2, max_size=4),
    first=st.integers(1, 200),
)
def test_first_windows_of_a_validation_hold_the_shares_while_sources_last(sizes, first):
    shares = [1 / len(sizes)] * len(sizes)
    chosen, _ = split_number(interleave(sizes, shares, 3)[:first])
    counts = np.bincount(chosen, minlength=len(sizes))
    for size, count in zip(sizes, counts, strict=True):
        assert count >= min(size, first // len(sizes) - 1)


def test_source_without_a_share_is_validated_last():
    part_of, _ = split_number(interleave([3, 4], [0.0, 1.0], 0))
    assert part_of.tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert join_number(1, np.array([3], np.uint64)).tolist() == [(1 << 48) + 3]


def test_mixed_loss_weighs_sources_by_share_and_leaves_out_what_is_replayed():
    own = LossSums(4, 40, 80.0, 1700.0, 800.0, 400.0)
    other = LossSums(2, 20, 60.0, 1850.0, 600.0, 200.0)
    replayed = LossSums(9, 90, 900.0, 0.0, 0.0, 0.0)
    sums = ValidationSums((own, other, replayed), (8, 2, 90), (0.6, 0.2, 0.0))
    assert sums.mean == pytest.approx(0.75 * 2.0 + 0.25 * 3.0)
    # The second was read whole.
    assert sums.standard_error(100) == pytest.approx(0.75 * own.standard_error(8))
    both = 0.75 * own.standard_error(math.inf), 0.25 * other.standard_error(math.inf)
    assert sums.standard_error(math.inf) == pytest.approx(math.hypot(*both))
    unread = ValidationSums((own, LossSums(), replayed), (8, 2, 90), (0.6, 0.2, 0.0))
    assert unread.mean == pytest.approx(2.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_texts(folder / "papers", 0, 40, "p")
    write_texts(folder / "notes", 1, 15, "n")
    write_texts(folder / "web", 2, 30, "w")
    config = folder / "run.yaml"
    config.write_text(f"""
data:
  source:
    - {{source: {folder / "papers"}, weight: 3}}
    - {{source: {folder / "notes"}, weight: 1}}
  replay: {{source: {folder / "web"}, share: 20%}}
  val: 20%
tokenizer: {{vocab: 400}}
model: {{family: llama, layers: 2, d_model: 32, heads: 2, context: 32}}
train: {{steps: 12, batch: {{global: 8 sequences}}, precision: fp32,
  reshuffle: true, recipe: plain, optimizer: {{kind: adamw, lr: 0.003}}}}
""")
    return config


def train(config: Path, run: Path, *settings: str) -> RunFolder:
    words = ["train", str(config), "--run", str(run)]
    for setting in settings:
        words += ["--set", setting]
    assert main(words) == 0
    return RunFolder(run)


def events_of(run: RunFolder, kind: type) -> list:
    return [event for event in read_events(run.events) if isinstance(event, kind)]


def test_mixture_is_trained_alike_on_one_worker_and_on_two_and_validated_by_source(
    tmp_path, config
):
    alone = train(config, tmp_path / "one", "parallel.workers=1")
    shared = train(config, tmp_path / "two", "parallel.workers=2", "parallel.technique=data")
    assert load(alone.plan, Plan).train.shares == pytest.approx((0.6, 0.2, 0.2))
    losses = [[step.loss for step in events_of(run, Step)] for run in (alone, shared)]
    assert len(losses[0]) == 12
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    manifest = load(alone.corpus, CorpusManifest)
    last, other = (events_of(run, Validated)[-1] for run in (alone, shared))
    assert list(last.sources) == ["papers", "notes", "replay"]
    assert last.whole and last.tokens == manifest.val.tokens - 3
    sources = last.sources
    assert last.loss == pytest.approx(0.75 * sources["papers"].loss + 0.25 * sources["notes"].loss)
    assert last.bits_per_byte == pytest.approx(
        0.75 * sources["papers"].bits_per_byte + 0.25 * sources["notes"].bits_per_byte
    )
    for name, source in sources.items():
        part = next(part for part in manifest.parts if part.name == name)
        assert source.tokens == part.val.tokens - 1
        assert source.loss == pytest.approx(other.sources[name].loss, rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "fact"),
    [
        ("source: [{source: A, weight: 1}, B]", "the sources without a weight have no share"),
        ("source: [{source: A, weight: 0}, {source: B, weight: 0}]", "no source would be read"),
        ("source: [{source: A, weight: -1}]", "weight"),
        ("source: []", "source"),
        ("source: [{source: A, wieght: 1}]", "weight"),
        ("source: A, replay: {source: B, share: 0%}", "share"),
        ("source: A, replay: {source: B, share: 100%}", "share"),
        ("source: A, replay: {share: 5%}", "source"),
    ],
)
def test_mixtures_that_cannot_be_are_refused_before_any_text_is_read(
    tmp_path, config, capsys, keys, fact
):
    text = config.parent
    keys = keys.replace("A", str(text / "papers")).replace("B", str(text / "notes"))
    wrong = tmp_path / "run.yaml"
    wrong.write_text(f"data: {{{keys}}}\n")
    assert main(["plan", str(wrong)]) != 0
    shown = capsys.readouterr()
    assert fact in shown.err and "data" in shown.err
    assert "Traceback" not in shown.err and "reading" not in shown.out
