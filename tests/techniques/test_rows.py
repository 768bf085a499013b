"""Operators that divide rows over a tensor axis: its ranks have as many of every microbatch, in all
plans."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from farspan.domain.plan import Plan, Replica, Stage
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import load, to_json
from farspan.techniques._search.one_stage import microbatch_counts
from farspan.techniques.diloco import _shares
from tests.runtime.planned import planned
from tests.runtime.plans import HAND_PICKED, MEGATRON, ROWS, replica, stage

#: Clusters of all sorts, and those where memory holds few of the rows that the cheapest operators
#: would divide.
SEEDS = (*range(8), 31, 75, 89, 97, 118)


def even(one: Replica, index: int) -> bool:
    """Whether every microbatch of a stage divides evenly over its tensor axis."""
    ways = one.stages[index].mesh.size("tensor")
    coordinates = range(len(one.stages[index].rows))
    return all(
        one.microbatch_rows(index, c, i) % ways == 0
        for c in coordinates
        for i in range(one.microbatches)
    )


def by_rows(plan: Plan) -> list[tuple[Replica, int]]:
    """The stages that divide rows."""
    found = [(one, index) for one in plan.replicas for index in range(len(one.stages))]
    return [(one, index) for one, index in found if "b" in one.stages[index].splits.values()]


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_of_all_techniques_divide_every_microbatch_evenly(seed: int):
    assert all(even(*stage) for plan in planned(seed) for stage in by_rows(plan))


@pytest.mark.parametrize("seed", [31, 118])
def test_some_of_it_does_so_in_several_microbatches(seed: int):
    assert any(one.microbatches > 1 for plan in planned(seed) for one, _ in by_rows(plan))


def divided(rows: tuple[int, ...], ways: int, splits: dict[str, str]) -> Stage:
    coordinates = len(rows)
    return stage(
        (0, 4),
        range(coordinates * ways),
        rows,
        axes=("data", "tensor"),
        shape=(coordinates, ways),
        splits=splits,
    )


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_only_numbers_of_microbatches_that_divide_evenly_are_searched_and_let_through(ways: int):
    for rows in itertools.product(range(ways, 17, ways), repeat=2):
        fitting = list[int]()
        searched = microbatch_counts(divided(rows, ways, ROWS))
        for count in range(1, 20):
            if even(replica(divided(rows, ways, MEGATRON), microbatches=count), 0):
                fitting.append(replica(divided(rows, ways, ROWS), microbatches=count).microbatches)
            else:
                with pytest.raises(
                    ValueError,
                    match=f"over a tensor axis of {ways} need a multiple of {count * ways}",
                ):
                    replica(divided(rows, ways, ROWS), microbatches=count)
        assert fitting == list(searched)


def test_without_splits_of_rows_any_number_of_microbatches_may_be():
    whole = divided((5, 3), 2, MEGATRON)
    assert list(microbatch_counts(whole)) == [1, 2, 3, 4, 5]
    assert replica(whole, microbatches=5).microbatch_rows(0, 1, 0) == 0


def test_a_plan_file_whose_microbatches_do_not_divide_evenly_is_refused(tmp_path: Path):
    uneven = to_json(HAND_PICKED["rows"]).replace(b'"microbatches": 2', b'"microbatches": 8')
    (tmp_path / "plan.json").write_bytes(uneven)
    with pytest.raises(Refusal) as refused:
        load(tmp_path / "plan.json", Plan)
    problem = refused.value.problem
    assert problem.code == "out-of-range" and "replicas" in problem.what and problem.remedy
    assert problem.fact.startswith("8 rows in 8 microbatches") and problem.fact.endswith(
        "need a multiple of 16"
    )


@pytest.mark.parametrize("seed", range(20))
def test_replicas_read_by_speed_and_a_sequence_a_device_at_least(seed: int):
    """As brute force over all divisions has it, within a sequence of the slowest site."""
    rng = random.Random(seed)
    least = [rng.randint(1, 4) for _ in range(3)]
    seconds = [rng.uniform(0.5, 4) for _ in least]
    batch = sum(least) + rng.randint(0, 12)
    shares = _shares(batch, seconds, least)
    assert sum(shares) == batch and all(
        share >= count for share, count in zip(shares, least, strict=True)
    )

    def end(found):
        return max(share * second for share, second in zip(found, seconds, strict=True))

    every = (
        (a, b, batch - a - b)
        for a in range(least[0], batch)
        for b in range(least[1], batch)
        if batch - a - b >= least[2]
    )
    assert end(shares) <= min(map(end, every)) + max(seconds)
