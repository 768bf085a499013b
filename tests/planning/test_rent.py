"""What to rent: the frontier against every pair, budgets, and prices counted by hand from the
catalogue."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import yaml

import farspan
from farspan.cli.main import main
from farspan.domain.catalog import load_devices
from farspan.domain.cluster import Cluster
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec
from farspan.domain.problems import Refusal
from farspan.domain.train import TrainSpec
from farspan.planning.candidate import Candidate
from farspan.planning.plan_question import Question, model_of, train_of
from farspan.planning.rank_plans import rank_plans
from farspan.planning.rent import Budget, Rent, pareto_frontier, price_offers, rented_cluster

ENGINE = load_engine("farspan")
MODEL = model_of("gpt2m")
KINDS = ("a40", "l40s", "t4")
COUNTS = (1, 2, 4, 16)


def train_for(model: ModelSpec, cluster: Cluster) -> TrainSpec:
    return train_of(Question(model="gpt2m", tokens="200M", batch="64"), model, cluster)


@pytest.fixture(scope="module")
def found() -> Rent:
    return price_offers(
        MODEL, train_for, ENGINE, budget=Budget(3600.0, 5.0), kinds=KINDS, counts=COUNTS
    )


@pytest.mark.slow
def test_the_frontier_is_what_no_other_beats(found: Rent) -> None:
    points = [(offer.time_s, offer.usd) for offer in found.offers]
    beaten = {
        i for i, a in enumerate(points) for b in points if b != a and b[0] <= a[0] and b[1] <= a[1]
    }
    assert set(found.frontier) == {
        i for i in range(len(points)) if i not in beaten and points[i][0] < math.inf
    }
    times = [points[i][0] for i in found.frontier]
    assert times == sorted(times)


def test_a_frontier_of_random_points_is_pareto() -> None:
    draw = random.Random(5)
    for _ in range(200):
        points = [
            (draw.choice((1.0, 2.0, 3.0, 4.0, math.inf)), draw.choice((1.0, 2.0, 3.0)))
            for _ in range(8)
        ]
        inside = [points[i] for i in pareto_frontier(points)]
        assert len(set(inside)) == len(inside)
        finite = [point for point in points if point[0] < math.inf]
        for point in finite:
            assert any(kept[0] <= point[0] and kept[1] <= point[1] for kept in inside)
        for a in inside:
            assert not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in finite)


def test_dollars_are_the_catalogue_price_times_devices_times_hours(found: Rent) -> None:
    file = yaml.safe_load((Path(farspan.__file__).parent / "catalog/devices.yaml").read_text())
    for offer in found.offers:
        price = file[offer.kind]["price"]
        assert offer.usd_per_hour == pytest.approx(offer.count * price["usd_per_hour"])
        assert (offer.source, offer.checked) == (price["source"], price["checked"])
        if isinstance(offer.best, Candidate):
            hours = offer.best.estimate.run_s / 3600
            assert offer.usd == pytest.approx(offer.count * price["usd_per_hour"] * hours)
            assert offer.best.estimate.usd == pytest.approx(offer.usd)


def test_the_budget_takes_exactly_what_is_within_it(found: Rent) -> None:
    for offer in found.offers:
        assert offer.meets == (offer.time_s <= 3600 and offer.usd <= 5.0)
    assert any(offer.meets for offer in found.offers) and not all(
        offer.meets for offer in found.offers
    )
    assert found.chosen is not None
    assert found.offers[found.chosen].usd == min(offer.usd for offer in found.offers if offer.meets)


def test_dollars_alone_take_the_fastest() -> None:
    cheap = price_offers(
        MODEL, train_for, ENGINE, budget=Budget(usd=2.0), kinds=("a40", "l40s"), counts=(1, 2, 4)
    )
    assert cheap.chosen is not None
    assert cheap.offers[cheap.chosen].time_s == min(
        offer.time_s for offer in cheap.offers if offer.usd <= 2.0
    )
    none = price_offers(
        MODEL, train_for, ENGINE, budget=Budget(seconds=1.0), kinds=("t4",), counts=(1,)
    )
    assert none.chosen is None and not none.offers[0].meets


def test_an_offer_is_what_planning_for_that_cluster_finds(found: Rent) -> None:
    for kind, count in (("l40s", 2), ("a40", 4)):
        device = load_devices()[kind].device(kind)
        assert device is not None
        cluster = rented_cluster(device, count)
        ranking = rank_plans(MODEL, cluster, train_for(MODEL, cluster), ENGINE, parts=False)
        assert ranking.chosen is not None
        offer = next(offer for offer in found.offers if (offer.kind, offer.count) == (kind, count))
        # Not searched where what is left to gain is little.
        assert offer.time_s <= 1.05 * ranking.candidates[ranking.chosen].time_s


def test_sixteen_devices_are_two_hosts_with_the_network_that_is_asked_about(found: Rent) -> None:
    sixteen = next(offer for offer in found.offers if offer.count == 16)
    assert [len(host.devices) for host in sixteen.cluster.hosts] == [8, 8]
    assert [link.bandwidth for link in sixteen.cluster.links] == [found.bandwidth] == [10e9 / 8]
    faster = price_offers(
        MODEL, train_for, ENGINE, kinds=("t4",), counts=(16,), allow=("data",), bandwidth=50e9
    )
    slower = price_offers(MODEL, train_for, ENGINE, kinds=("t4",), counts=(16,), allow=("data",))
    assert faster.offers[0].time_s < slower.offers[0].time_s


def test_hosts_of_a_known_machines_shape_have_its_network_unless_another_is_asked_about() -> None:
    alone = {"counts": (8, 16), "allow": ("data",)}
    usual = price_offers(MODEL, train_for, ENGINE, kinds=("h100", "t4"), **alone)
    assert {kind: network.machine for kind, network in usual.known.items()} == {"h100": "DGX H100"}
    rates = {offer.kind: link.bandwidth for offer in usual.offers for link in offer.cluster.links}
    assert rates == {"h100": 3200e9 / 8, "t4": 10e9 / 8}
    asked = price_offers(MODEL, train_for, ENGINE, kinds=("h100",), bandwidth=1e9, **alone)
    assert asked.known == {} and asked.bandwidth == 1e9
    assert [link.bandwidth for offer in asked.offers for link in offer.cluster.links] == [1e9]


def test_a_kind_without_a_price_is_refused() -> None:
    with pytest.raises(Refusal, match="no price of 'a30'"):
        price_offers(MODEL, train_for, ENGINE, kinds=("a30",))


def test_a_technique_that_is_searched_for_may_be_the_only_one() -> None:
    found = price_offers(
        MODEL, train_for, ENGINE, kinds=("l40s",), counts=(1, 2), allow=("pipeshard",)
    )
    assert all(offer.best.technique == "pipeshard" for offer in found.offers)


def test_plan_rent_reports_list_price_dates_and_the_pareto_frontier(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "rent",
        "--model",
        "124M",
        "--tokens",
        "100M",
        "--device",
        "l40s",
        "--device",
        "t4",
        "--usd",
        "3",
    ]
    assert main([*words, "--technique", "data", "--technique", "fsdp", "--json"]) == 0
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert "list prices of 2026-05 to 2026-08" in told.err and "10 Gbit/s" in told.err
    assert answer["frontier"] and answer["candidates"][answer["chosen"]]["meets_budget"]
    one = answer["candidates"][0]
    assert {"technique", "devices", "fits", "problem", "estimate", "kind", "count", "price"} <= set(
        one
    )
    assert one["estimate"]["usd"] == pytest.approx(
        one["usd_per_hour"] * one["estimate"]["minutes"] / 60
    )
