"""What a validation reads and says: the whole split at the end, a fixed seeded sample of it in
between, whoever shares the windows; against direct computations over the same windows."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace

from farspan.corpus.entropy import ngram_entropies_of
from farspan.domain.corpus import CorpusManifest
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Validated
from farspan.domain.struct_files import load
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.time_budget import SAMPLES, VALIDATION
from farspan.runtime.training import validation
from farspan.runtime.training.sample_order import PackedWindows
from farspan.runtime.training.validation import (
    LossSums,
    MeasuredLoss,
    Validation,
    ValidationSums,
)
from tests import tiny
from tests.runtime import jobs, reference, stored_tensors
from tests.runtime.fleet import Fleet
from tests.runtime.plans import HAND_PICKED
from tests.runtime.test_trainer import TRAIN, Start
from tests.runtime.verify import Case

pytestmark = pytest.mark.usefixtures("one_thread")
S = 16
VAL = 16 * 100 + 1


def corpus(folder: Path, *, val: int = VAL) -> CorpusManifest:
    """A validation split whose first tenth no model of the rest can predict: tokens of their own,
    at random."""
    manifest = tiny.corpus(folder, val=val)
    tokens = np.fromfile(folder / "val.bin", "<u2")
    strange = np.random.default_rng(7).integers(0, 300, val // 10)
    tokens[: val // 10] = strange
    tokens.tofile(folder / "val.bin")
    return manifest


def run_of(tmp_path: Path, name: str = "run", **changes) -> RunFolder:
    if not (tmp_path / "corpus").exists():
        corpus(tmp_path / "corpus")
    train = replace(
        TRAIN, **{"steps": 60, "validate_every": 20, "validate_tokens": 20 * S, **changes}
    )
    return tiny.run_folder(tmp_path / name, tiny.plan(train))


def direct(weights: dict[str, torch.Tensor], windows: PackedWindows, chosen) -> list[float]:
    """The summed loss of each window, in float64."""
    model = Decoder(tiny.SPEC, attention="vanilla").double()
    model.load_state_dict(weights)
    inputs, targets = map(torch.from_numpy, windows.read(np.asarray(chosen, np.uint64)))
    with torch.no_grad():
        losses = F.cross_entropy(
            model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none"
        )
    return losses.view_as(targets).sum(1).tolist()


def validated(start: Start) -> list[Validated]:
    return [event for event in start.events if isinstance(event, Validated)]


def test_the_last_validation_reads_the_whole_split_and_those_before_it_a_sample_of_all_of_it(
    tmp_path,
):
    start = Start(run_of(tmp_path))
    _, made = start.train()
    *between, last = validated(start)
    val = made.worker.val
    read = made.validation
    weights = stored_tensors.weights(stored_tensors.newest(start.run))
    every = direct(weights, val, range(val.count))
    assert last.loss == pytest.approx(sum(every) / (VAL - 1), rel=1e-5)
    assert (last.tokens, last.of, last.standard_error) == (VAL - 1, VAL - 1, 0.0)
    # The first tokens are far from the rest: that is what was read before.
    assert sum(every[:10]) / (10 * S) > last.loss + 0.5
    assert [(event.step, event.tokens, event.of) for event in between] == [
        (s, 20 * S, VAL - 1) for s in (20, 40)
    ]
    sample = [every[int(w)] for w in read.windows(0, 20)]
    assert (
        last.sample_loss == pytest.approx(sum(sample) / (20 * S), rel=1e-5)
        and last.sample_tokens == 20 * S
    )
    assert (
        len({event.read for event in between})
        == 1
        != len({event.read for event in (*between, last)})
    )
    expected = statistics.stdev(sample) / math.sqrt(20) / S * math.sqrt(1 - 20 / val.count)
    assert read.read(0, 20).standard_error(val.count) == pytest.approx(expected, rel=1e-3)


def test_standard_error_of_unequal_windows_equals_the_observed_deviation():
    """Over many samples their mean strays from the whole's by about the standard error that each
    tells."""
    rng = np.random.default_rng(0)
    count = 200
    size = 40
    targets = np.full(count, 16.0)
    targets[-1] = 5
    losses = targets * rng.normal(4.0, 0.8, count)
    whole = losses.sum() / targets.sum()
    said = []
    strayed = []
    for _ in range(2000):
        which = rng.choice(count, size, replace=False)
        t = targets[which]
        ls = losses[which]
        sums = LossSums(
            size, int(t.sum()), ls.sum(), (ls * ls).sum(), (ls * t).sum(), (t * t).sum()
        )
        said.append(sums.standard_error(count))
        strayed.append(sums.mean - whole)
    assert statistics.fmean(said) == pytest.approx(statistics.pstdev(strayed), rel=0.05)
    assert LossSums(1, 16, 60.0, 3600.0, 960.0, 256.0).standard_error(200) is None


def test_a_large_split_is_sampled_all_over_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(validation, "MOST_TOKENS", 50 * S)
    start = Start(run_of(tmp_path))
    _, made = start.train()
    last = validated(start)[-1]
    chosen = made.validation.windows(0, 50)
    assert len(set(chosen.tolist())) == 50 and last.tokens == 50 * S and last.of == VAL - 1
    assert all(
        5 <= sum(low <= w < low + 25 for w in chosen.tolist()) <= 20 for low in (0, 25, 50, 75)
    )
    weights = stored_tensors.weights(stored_tensors.newest(start.run))
    assert last.loss == pytest.approx(
        sum(direct(weights, made.worker.val, chosen)) / (50 * S), rel=1e-5
    )
    whole = sum(direct(weights, made.worker.val, range(made.worker.val.count))) / (VAL - 1)
    assert last.standard_error > 0 and abs(last.loss - whole) < 4 * last.standard_error


def test_entropies_are_of_the_tokens_that_were_read(tmp_path):
    start = Start(run_of(tmp_path))
    _, made = start.train()
    *between, last = validated(start)
    assert (last.unigram_nats, last.bigram_nats) == (
        5.7,
        2.0,
    )  # Of the whole split, as the corpus tells.
    inputs, targets = made.worker.val.read(made.validation.windows(0, 20))
    train = [int(token) for token in made.worker.train.tokens]
    singles = Counter(train)
    pairs = Counter(itertools.pairwise(train))
    p1 = {t: (singles[t] + 1) / (len(train) + 300) for t in range(300)}
    unigram = -statistics.fmean(math.log(p1[int(t)]) for t in targets.flat)
    both = list(zip(inputs.flatten().tolist(), targets.flatten().tolist(), strict=True))
    bigram = min(
        -statistics.fmean(math.log((pairs[a, b] + w * p1[b]) / (singles[a] + w)) for a, b in both)
        for w in (3, 10, 30, 100, 300, 1000, 3000)
    )
    for event in between:
        assert (event.unigram_nats, event.bigram_nats) == pytest.approx((unigram, bigram), rel=1e-9)
    assert (
        ngram_entropies_of(made.worker.train.tokens, inputs.flatten(), targets.flatten(), 300)[1]
        < unigram
    )


def test_runs_of_other_seeds_read_the_same_and_other_lengths_do_not(tmp_path):
    first, other = (Start(run_of(tmp_path, f"seed {seed}", seed=seed, steps=20)) for seed in (1, 2))
    shorter = Start(run_of(tmp_path, "shorter", seq_len=8, steps=20, validate_tokens=20 * S))
    names = []
    for start in (first, other, shorter):
        start.train()
        names.append(
            validated(start)[0].read if len(validated(start)) > 1 else validated(start)[-1].read
        )
    assert names[0] == names[1] != names[2]


def sums_of(sums: LossSums) -> ValidationSums:
    """Those of windows of a single source."""
    return ValidationSums((sums,), (sums.windows,), (1.0,))


def test_the_best_weights_are_judged_by_the_sample_and_not_by_the_end(tmp_path, monkeypatch):
    """The last state is worse on the sample; its smaller number on the whole split does not make it
    the best."""
    losses = iter([3.0, 4.0, 5.0])

    def read(self: Validation, first: int, stop: int) -> ValidationSums:
        nats = next(losses) if first == 0 and stop == self.first else 0.5
        count = stop - first
        return sums_of(LossSums(count, count * S, nats * count * S, 0.0, 0.0, 0.0))

    monkeypatch.setattr(Validation, "read", read)
    start = Start(run_of(tmp_path))
    start.train()
    events = validated(start)
    assert [event.best for event in events] == [True, False, False]
    assert events[-1].loss < 3.0 < events[-1].sample_loss
    assert checkpoint_folder.verify(start.run.best).step == 20


def test_final_validation_short_of_time_reads_a_sample_and_gives_its_standard_error(
    tmp_path, monkeypatch
):
    """A validation's windows take time here; the last one may take its share of the deadline, and
    no more."""
    corpus(tmp_path / "corpus", val=16 * 2000 + 1)
    start = Start(
        run_of(tmp_path, deadline_s=100.0, steps=100, validate_every=40, validate_tokens=20 * S)
    )
    read = Validation.read

    def slow(self: Validation, first: int, stop: int) -> ValidationSums:
        start.now += 0.05 * (stop - first)
        return read(self, first, stop)

    monkeypatch.setattr(Validation, "read", slow)
    reason, _ = start.train()
    last = validated(start)[-1]
    # The rest is kept for the sample text, which a worker writes after its training.
    assert reason == "deadline" and (1 - SAMPLES) * 100 - 2 <= start.now <= 102
    assert 0.5 * VALIDATION * 100 <= 0.05 * last.tokens / S <= (VALIDATION + SAMPLES) * 100 + 1
    assert last.tokens < last.of and last.standard_error > 0


NAMES = (
    "one worker",
    "uneven rows, fewer than microbatches",
    "zero 3",
    "hybrid 3",
    "megatron, sequences and vocabulary",
    "rows",
    "replicas unlike",
    "tensor widths by stage",
    "unlike rows and depths, several streams",
)


@pytest.mark.parametrize("name", NAMES)
def test_workers_together_read_each_validation_window_once(fleet: Fleet, folder: Path, name: str):
    case = Case(
        folder,
        replace(HAND_PICKED[name], train=replace(HAND_PICKED[name].train, validate_tokens=0)),
    )
    found = fleet.run(jobs.read, case.world, case.plan, case.path, 0, 10)
    assert len({sums for sums, _ in found}) == 1
    sums = found[0][0]
    manifest = load(RunFolder(case.path).corpus, CorpusManifest)
    tokens = np.fromfile(case.path.parent / "corpus" / "val.bin", "<u2")
    val = PackedWindows(tokens, case.plan.train.seq_len)
    chosen = validation.shuffle_index(np.arange(10, dtype=np.uint64), val.count, validation.SEED, 0)
    assert (
        Counter(w for _, mine in found for w in mine) == Counter(chosen.tolist())
        and len(tokens) == manifest.val.tokens
    )
    weights = {name: weight.double() for name, weight in reference.start(case.plan.model).items()}
    inputs, targets = map(torch.from_numpy, val.read(chosen))
    rows = [
        float(reference.mean_loss(weights, case.plan.model, inputs[i : i + 1], targets[i : i + 1]))
        for i in range(len(inputs))
    ]
    valid = val.valid(chosen)
    assert (sums.windows, sums.tokens) == (10, int(valid.sum()))
    (own,) = sums.parts
    assert own.loss == pytest.approx(float(np.dot(rows, valid)), rel=1e-5)
    assert own.ll == pytest.approx(float(np.dot(np.square(rows), valid * valid)), rel=1e-5)
    assert own.lt == pytest.approx(float(np.dot(rows, valid * valid)), rel=1e-5)


def test_two_workers_validate_as_one_does(tmp_path):
    found = []
    for rows in ((2,), (1, 1)):
        run = tiny.run_folder(
            tmp_path / f"run-{len(rows)}",
            tiny.plan(replace(TRAIN, steps=6, validate_every=3, validate_tokens=7 * S), rows=rows),
        )
        with tiny.workers(run) as workers:
            events = list(workers)
        found.append([event for event in events if isinstance(event, Validated)])
    for one, two in zip(*found, strict=True):
        assert (one.step, one.tokens, one.of, one.read, one.best) == (
            two.step,
            two.tokens,
            two.of,
            two.read,
            two.best,
        )
        assert two.loss == pytest.approx(one.loss, rel=1e-5)
        assert two.standard_error == pytest.approx(one.standard_error, rel=1e-3)
        assert two.unigram_nats == one.unigram_nats and two.bigram_nats == one.bigram_nats
    assert [event.tokens for event in found[0]] == [7 * S, 400]


def test_only_validations_that_are_worse_by_more_than_chance_count_against_patience(tmp_path):
    _, made = Start(run_of(tmp_path, steps=1)).train()
    judging = made.validation
    rng = np.random.default_rng(0)
    windows = rng.normal(4.0, 0.5, 100) * S

    def judged(step: int, higher: float) -> bool:
        """Of a validation whose losses are all higher by so many standard errors of the mean,
        0.05."""
        losses = windows + higher * 0.05 * S
        sums = sums_of(
            LossSums(
                100, 100 * S, losses.sum(), (losses**2).sum(), (losses * S).sum(), 100.0 * S * S
            )
        )
        return judging.update_best(step, MeasuredLoss(sums, sums, False, False, 0.0))

    made.state.best_loss = None
    made.state.stale = 0
    counted = []
    for step, higher in enumerate((0.0, 0.05, 1.0, 2.0, 0.1, 1.0, -0.01, 1.0, 1.0, 1.0), 100):
        counted.append((judged(step, higher), made.state.stale))
    best = [True, False, False, False, False, False, True, False, False, False]
    assert counted == list(zip(best, (0, 0, 1, 2, 0, 1, 0, 1, 2, 3), strict=True))
