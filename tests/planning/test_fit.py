"""What fits: the answer fits, the next rung does not, and more memory never fits less. Everything
is priced again."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan import models, techniques
from farspan.cli.main import main
from farspan.domain.cluster import Cluster
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.train import TrainSpec
from farspan.estimate.estimate_plan import estimate, price
from farspan.launch import clusters
from farspan.planning.candidate import Refused
from farspan.planning.cluster_parts import all_parts
from farspan.planning.fit import (
    Ground,
    Ladder,
    Rung,
    batch_ladder,
    find_hardest_rung,
    memory_ladder,
    model_ladder,
    with_memory,
)
from farspan.planning.misfit import explain_misfit, multiply_hosts
from farspan.planning.plan_question import Question, model_of, train_of
from farspan.planning.rank_plans import price_technique, rank_plans
from farspan.techniques import Task
from farspan.techniques._fastest_fitting import shortage
from tests.examples import few
from tests.techniques import worlds

ENGINE = load_engine("farspan")
QUICK = ("fsdp", "zero2", "zero1", "data")
GPT2M = model_of("gpt2m")
SMALL = model_of("124M")


def ground(cluster: Cluster, *allow: str, batch: str | None = "32") -> Ground:
    def train_for(model: ModelSpec, where: Cluster) -> TrainSpec:
        return train_of(Question(model="", tokens="16M", batch=batch), model, where)

    return Ground(cluster, ENGINE, train_for, allow)


def fits(where: Ground, model: ModelSpec) -> bool:
    """Whether the ranking that `farspan plan` shows chooses anything."""
    train = where.train_for(model, where.cluster)
    return rank_plans(model, where.cluster, train, ENGINE, allow=where.allow).chosen is not None


def rung_of(ladder: Ladder, amount: int) -> Rung:
    rungs = (ladder.rung(i, 1) for i in range(ladder.length))
    return next(rung for rung in rungs if rung.amount == amount)


def test_the_largest_model_fits_and_the_next_does_not() -> None:
    where = ground(clusters.find_cluster("fabric/gat-amst"))
    found = find_hardest_rung(where, model_ladder(where, "llama", 32_000, 1024))
    assert found is not None and found.next_lacks is not None and found.next_amount is not None
    assert (
        fits(where, found.best.plan.model)
        and count_parameters(found.best.plan.model) == found.best.amount
    )
    assert model_of(found.best.typed) == found.best.plan.model
    ladder = model_ladder(where, "llama", 32_000, 1024)
    assert not fits(where, rung_of(ladder, found.next_amount).model)
    assert found.next_lacks.spare < 0 <= found.best.binds.spare
    # The hosts' own memory binds there: 2 workers of 3 GB, and rank 0's copy of a checkpoint, 12
    # bytes a parameter.
    assert found.best.binds.used == pytest.approx(
        2 * ENGINE.host_framework + 12 * found.best.amount
    )
    assert found.next_lacks.used == pytest.approx(
        2 * ENGINE.host_framework + 12 * found.next_amount
    )


@pytest.mark.parametrize("name", QUICK)
def test_the_largest_batch_fits_at_once_and_one_more_a_device_does_not(name: str) -> None:
    where = ground(clusters.find_cluster("slm-cost/a100-80:4"), name)
    found = find_hardest_rung(where, batch_ladder(where, GPT2M))
    assert found is not None
    plan = found.best.plan
    batch = found.best.amount
    (replica,) = plan.replicas
    assert (replica.microbatches, sum(replica.stages[0].rows), found.best.micro_rows) == (
        1,
        batch,
        batch // 4,
    )
    again = estimate(plan, models.graph(GPT2M), where.cluster, ENGINE)
    usable = ENGINE.fill * where.cluster.devices[0].memory
    assert again.memory == found.best.estimate.memory and again.memory_bytes <= usable
    # One sequence more on every device, in the same plan.
    rows = tuple(row + 1 for row in replica.stages[0].rows)
    more = msgspec.structs.replace(
        plan,
        train=msgspec.structs.replace(plan.train, batch=batch + 4),
        replicas=(
            msgspec.structs.replace(
                replica, stages=(msgspec.structs.replace(replica.stages[0], rows=rows),)
            ),
        ),
    )
    larger = estimate(more, models.graph(GPT2M), where.cluster, ENGINE)
    assert larger.memory_bytes > usable and found.next_amount == batch + 4
    assert found.next_lacks is not None and -found.next_lacks.spare == pytest.approx(
        larger.memory_bytes - usable
    )


@pytest.mark.slow
def test_the_least_memory_fits_and_less_does_not() -> None:
    where = ground(clusters.find_cluster("fabric/gat-amst"))
    found = find_hardest_rung(where, memory_ladder(where, SMALL))
    assert found is not None and found.next_amount is not None
    for size, expected in ((found.best.amount, True), (found.next_amount, False)):
        assert (
            fits(ground(with_memory(where.cluster, lambda device, size=size: size)), SMALL)
            is expected
        )
    least = {limit.technique: limit.amount for limit in found.limits}
    # Each level of ZeRO divides more: arXiv 1910.02054, figure 1.
    assert least["fsdp"] < least["zero2"] < least["zero1"] < least["data"]


@pytest.mark.slow
@few(4)
@given(st.integers(0, 10_000))
def test_on_any_small_cluster_what_binds_is_what_pricing_again_finds(seed: int) -> None:
    draw = random.Random(seed)
    where = ground(worlds.random_cluster(draw, 4), *QUICK)
    found = find_hardest_rung(where, model_ladder(where, "llama", 8192, 512))
    if found is None:
        return
    assert fits(where, found.best.plan.model)
    only = None if len(found.best.places) == len(where.cluster.devices) else found.best.places
    model = found.best.plan.model
    train = found.best.plan.train
    task = Task(model, models.graph(model), where.cluster, train, ENGINE, only=only)
    again = price(found.best.plan, task.costs)
    lacking, _ = shortage(task, found.best.plan, again)
    assert lacking <= 0 and lacking >= -found.best.binds.spare - 1
    if found.next_amount is not None:
        ladder = model_ladder(where, "llama", 8192, 512)
        assert not fits(where, rung_of(ladder, found.next_amount).model)


@pytest.mark.slow
@few(2)
@given(st.integers(0, 10_000), st.floats(1.05, 3.0))
def test_more_memory_never_fits_less(seed: int, factor: float) -> None:
    cluster = worlds.random_cluster(random.Random(seed), 4)
    larger = with_memory(cluster, lambda device: round(device.memory * factor))
    for ask in (
        lambda where: find_hardest_rung(where, model_ladder(where, "llama", 8192, 512)),
        lambda where: find_hardest_rung(where, batch_ladder(where, SMALL)),
    ):
        before, after = (ask(ground(each, *QUICK)) for each in (cluster, larger))
        if before is not None:
            assert after is not None and after.best.amount >= before.best.amount


def test_misfit_reports_missing_memory_and_the_model_and_devices_that_would_fit() -> None:
    where = ground(clusters.find_cluster("slm-cost/a100-80:2"))
    model = model_of("8B")
    found = explain_misfit(where, model)
    assert (
        found is not None
        and found.lacks.spare < 0
        and found.smaller is not None
        and found.devices is not None
    )
    assert found.smaller.plan.model.family == model.family and fits(where, found.smaller.plan.model)
    assert fits(ground(multiply_hosts(where.cluster, found.devices // 2), *QUICK), model)
    # What lacks least: no technique on any part lacks less than is told, and all lack something.
    graph = models.graph(model)
    train = where.train_for(model, where.cluster)
    for part in all_parts(where.cluster):
        only = None if len(part.places) == 2 else part.places
        task = Task(model, graph, where.cluster, train, ENGINE, only=only)
        assert all(
            isinstance(price_technique(task, part, name), Refused)
            for name in techniques.technique_names()
        )
    # Were every device so much larger, it would fit.
    room = found.lacks.used / ENGINE.fill
    assert fits(ground(with_memory(where.cluster, lambda device: round(1.03 * room))), model)


def test_a_model_that_fits_is_no_misfit() -> None:
    assert (
        explain_misfit(ground(clusters.find_cluster("slm-cost/a100-80:2"), *QUICK), SMALL) is None
    )


def test_fit_prints_the_answer_its_limits_and_the_command_that_prices_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["fit", "model", "--cluster", "slm-cost/a100-80", "--technique", "data", "--json"]
    assert main(words) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert set(answer) == {"asked", "limits", "next_amount", "next_lacks"}
    (limit,) = answer["limits"]
    assert answer["next_amount"] > limit["amount"] and answer["next_lacks"]["spare"] < 0
    assert f"farspan plan --model {limit['typed']} --cluster slm-cost/a100-80" in printed.err


def test_fit_batch_without_a_model_is_refused_with_the_whole_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fit", "batch", "--cluster", "slm-cost/a100-80", "--json"]) == 2
    problem = json.loads(capsys.readouterr().out)["problem"]
    assert problem["remedy"] == "farspan fit batch --model gpt2m --cluster slm-cost/a100-80"
