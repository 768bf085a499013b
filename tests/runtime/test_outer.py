"""Meetings of replicas: how far a worker may send ahead of what it has received, against every
place in a random order; what goes on while steps are made, and how it ends."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from farspan.domain.plan import Sync
from farspan.domain.run import RunFolder
from farspan.domain.train import Schedule
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.parallel.outer_step import _most_ahead
from farspan.semantics.reshard import Send
from tests.runtime import jobs, reference, stored_tensors
from tests.runtime.fleet import Fleet
from tests.runtime.plans import HAND_PICKED, plan, replica, stage
from tests.runtime.test_resume import state
from tests.runtime.verify import Case


def ranges(rng: random.Random, size: int) -> list[Send]:
    """Some of a range of elements, in pieces, ascending."""
    bounds = sorted(rng.sample(range(size + 1), k=rng.randint(0, 8) // 2 * 2))
    return [Send(0, 1, start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]


@pytest.mark.parametrize("seed", range(50))
def test_ahead_is_the_maximum_of_sent_minus_received_elements(seed):
    rng = random.Random(seed)
    sends = ranges(rng, 60)
    receives = ranges(rng, 60)

    def before(parts, place):
        return sum(max(0, min(one.stop, place) - one.start) for one in parts)

    assert _most_ahead(sends, receives) == max(
        before(sends, p) - before(receives, p) for p in range(61)
    )


def test_ahead_is_zero_for_a_rank_that_receives_what_it_sends():
    parts = [Send(0, 1, 0, 10), Send(0, 1, 20, 50)]
    assert _most_ahead(parts, parts) == 0


def test_steps_do_not_wait_for_a_replica_that_takes_longer_to_come(fleet: Fleet, folder: Path):
    two = plan(
        *(replica(stage((0, 4), [i], [2])) for i in range(2)),
        sync=Sync(every=9, overlap=True),
        sites=[0, 1],
    )
    case = Case(folder, two)
    first, second = fleet.run(jobs.step_while_another_is_away, case.world, two, case.path, 4)
    assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))


def test_tokens_of_a_step_are_those_of_all_replicas(fleet: Fleet, folder: Path):
    two = plan(
        replica(stage((0, 4), [0], [1])),
        replica(stage((0, 4), [1], [3])),
        sync=Sync(every=4),
        sites=[0, 1],
    )
    alone = plan(replica(stage((0, 4), [0], [4])), train=two.train)
    (wanted,) = fleet.run(jobs.tokens, 1, alone, Case(folder, alone).path)
    assert wanted > 0 and fleet.run(jobs.tokens, 2, two, Case(folder, two).path) == [wanted] * 2


def test_a_run_that_stops_early_takes_the_exchange_under_way_as_one_that_ends_there_does(
    fleet: Fleet, folder: Path
):
    base = HAND_PICKED["replicas unlike, overlapped"]
    train = replace(
        base.train,
        steps=400,
        validate_every=2,
        patience=2,
        schedule=Schedule(kind="constant"),
        optimizer=replace(base.train.optimizer, lr=0.1),
    )
    early = Case(folder, replace(base, train=train))
    stopped = fleet.run(jobs.train, early.world, early.plan, early.path)
    steps = len(stopped[0].losses)
    assert {one.reason for one in stopped} == {"early-stop"} and steps < train.steps
    whole = Case(folder, replace(base, train=replace(train, steps=steps, patience=0)))
    ended = fleet.run(jobs.train, whole.world, whole.plan, whole.path)
    assert {one.reason for one in ended} == {"done"}
    assert stopped[0].validation == ended[0].validation
    ours = state(early.path)
    theirs = state(whole.path)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_the_best_weights_of_overlapping_replicas_are_those_that_were_validated(
    fleet: Fleet, folder: Path
):
    """While an exchange goes on each replica has another model; what is validated and written is
    the one of all."""
    base = HAND_PICKED["replicas unlike, overlapped"]
    train = replace(
        base.train,
        steps=12,
        validate_every=2,
        schedule=Schedule(kind="constant"),
        optimizer=replace(base.train.optimizer, lr=0.1),
    )
    case = Case(folder, replace(base, train=train))
    fleet.run(jobs.train, case.world, case.plan, case.path)
    best = RunFolder(case.path).best
    progress = checkpoint_folder.verify(best)
    assert progress.step < train.steps, "the last model is one of all replicas anyhow"
    inputs, targets = map(
        torch.from_numpy, case.data.val.read(np.arange(case.data.val.count, dtype=np.uint64))
    )
    loss = reference.mean_loss(stored_tensors.weights(best), case.plan.model, inputs, targets)
    assert float(loss) == pytest.approx(progress.best_loss, rel=1e-5)
