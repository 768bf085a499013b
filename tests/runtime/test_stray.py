"""A worker whose loss leaves the others': named when it is one worker's fault, never for chance
alone."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from farspan.domain.problems import Refusal
from farspan.domain.run_events import Step, Warned, read_events
from farspan.domain.train import Optimizer, Schedule, TrainSpec
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.comm.topology import Topology
from farspan.runtime.training.loss_outlier import FIRST_STEPS, PATIENCE, LossOutliers
from farspan.runtime.training.sample_order import PackedWindows, SampleOrder
from tests import tiny

SEQ_LEN = 32
TRAIN = TrainSpec(
    steps=60,
    batch=8,
    seq_len=16,
    precision="fp32",
    optimizer=Optimizer(lr=1e-2),
    schedule=Schedule(warmup_steps=2),
    validate_every=100,
    seed=3,
)
SPOILT = 40


def replica(*rows):
    return tiny.plan(replace(TRAIN, batch=sum(rows)), rows=rows).replicas[0]


def drawn(rng, rows, level=4.0):
    """The summed losses of ranks that read rows of heavy-tailed text."""
    return {
        rank: float(np.clip(level + 0.7 * rng.standard_t(3, count), 0, 12).sum()) * SEQ_LEN
        for rank, count in enumerate(rows)
    }


@pytest.mark.parametrize("rows", [(1, 1), (4, 4), (16, 2, 1), (8, 8, 8, 8, 0)])
def test_random_loss_fluctuations_do_not_reach_the_patience_for_outliers(rows):
    rng = np.random.default_rng(sum(rows))
    for _ in range(5):
        strays = LossOutliers(replica(*rows), SEQ_LEN)
        found = [
            strays.find_outlier(drawn(rng, rows, level=4 + 5 * 0.99**step)) for step in range(2000)
        ]
        assert max((one.steps for one in found if one), default=0) < PATIENCE


def test_rank_whose_loss_stays_far_above_is_named_at_every_step():
    rng = np.random.default_rng(0)
    strays = LossOutliers(replica(8, 8, 4), SEQ_LEN)
    for _ in range(FIRST_STEPS):
        strays.find_outlier(drawn(rng, (8, 8, 4)))
    found = []
    for _ in range(PATIENCE):
        losses = drawn(rng, (8, 8, 4))
        losses[2] += 5.0 * 4 * SEQ_LEN
        found.append(strays.find_outlier(losses))
    assert [(one.rank, one.steps) for one in found] == [(2, step + 1) for step in range(PATIENCE)]
    assert found[0].loss == pytest.approx(9, abs=1.5) and found[0].others == pytest.approx(4, abs=1)
    assert strays.find_outlier(drawn(rng, (8, 8, 4))) is None


def test_loss_jump_of_all_ranks_or_of_a_single_worker_is_no_outlier():
    rng = np.random.default_rng(0)
    strays = LossOutliers(replica(8, 8), SEQ_LEN)
    assert [
        strays.find_outlier(drawn(rng, (8, 8), level=4 + 6 * (step > 50))) for step in range(100)
    ] == [None] * 100
    alone = LossOutliers(replica(8), SEQ_LEN)
    assert [
        alone.find_outlier(drawn(rng, (8,), level=4 + 6 * (step > 50))) for step in range(100)
    ] == [None] * 100


def test_workers_end_where_the_loss_of_one_stays_far_above(tmp_path):
    """What rank 1 reads from some step on is noise to the model; all other text is learnt."""
    plan = tiny.plan(TRAIN, rows=(4, 4))
    tokens = np.arange(TRAIN.batch * TRAIN.steps * TRAIN.seq_len + 1, dtype="<u2") * 7 % 200
    order = SampleOrder(PackedWindows(tokens, TRAIN.seq_len).count, TRAIN.seed)
    noise = np.random.default_rng(0)
    for step in range(SPOILT, TRAIN.steps):
        for window in order.window(np.concatenate(Topology(plan, 1).samples_by_microbatch(step))):
            start = int(window) * TRAIN.seq_len + 1
            tokens[start : start + TRAIN.seq_len] = noise.integers(200, 300, TRAIN.seq_len)
    manifest = tiny.corpus(tmp_path / "corpus", tokens=len(tokens))
    assert manifest.train.tokens == len(tokens)
    tokens.tofile(tmp_path / "corpus" / "train.bin")
    run = tiny.run_folder(tmp_path / "run", plan)
    with pytest.raises(Refusal) as refusal, tiny.workers(run) as workers:
        list(workers)
    problem = refusal.value.problem
    assert problem.code == "loss-spike" and problem.where == "rank 1 (cpu 0 of here)"
    assert f"at step {SPOILT + PATIENCE}" in problem.fact and "resume" in problem.remedy
    events = list(read_events(run.events))
    (warning,) = [event for event in events if isinstance(event, Warned)]
    assert warning.message.startswith(f"step {SPOILT + 1}: the loss of rank 1")
    assert max(event.step for event in events if isinstance(event, Step)) == SPOILT + PATIENCE - 1
    assert not list(checkpoint_folder.newest_first(run.checkpoints)), "none of its making was saved"
