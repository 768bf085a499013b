"""Plans and offers on machines that are taken away: by expected time, and as ever where no rate is
given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from farspan.cli.main import main
from farspan.domain.cluster import Cluster
from farspan.domain.clusterfile import load_cluster, save_cluster
from farspan.domain.engine import load_engine
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import content_hash
from farspan.estimate.interruptions import choose_save_interval
from farspan.planning.rank_plans import rank_plans
from farspan.planning.why import describe_choice
from tests.planning import test_resolve, worlds

FILE = """
sites:
  spot:
    preemption: {rate}
    lease: 24h
    hosts:
      a: {{devices: [a30]}}
      b: {{devices: [a30], preemption: 2/day, lease: 6h}}
  owned:
    hosts:
      c: {{devices: [a30]}}
"""


def read(folder: Path, rate: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(FILE.format(rate=rate))
    return load_cluster(path)


def test_rate_of_a_host_goes_before_its_sites_and_hosts_add_up(tmp_path: Path) -> None:
    cluster = read(tmp_path, "0.1/h")
    assert cluster.preemptions_per_s(["a"]) == pytest.approx(0.1 / 3600)
    assert cluster.preemptions_per_s(["b"]) == pytest.approx(2 / 86400)
    assert cluster.preemptions_per_s(["a", "b", "b", "c"]) == pytest.approx(0.1 / 3600 + 2 / 86400)
    assert cluster.preemptions_per_s(["c"]) == 0
    assert cluster.lease_s(["a", "c"]) == 24 * 3600
    assert cluster.lease_s(["a", "b"]) == 6 * 3600
    assert cluster.lease_s(["c"]) == math.inf


def test_rates_survive_a_file(tmp_path: Path) -> None:
    cluster = read(tmp_path, "0.1/h")
    save_cluster(cluster, tmp_path / "again.yaml", "again")
    assert load_cluster(tmp_path / "again.yaml").sites == cluster.sites


@pytest.mark.parametrize("rate", ["0.1", "0.1h", "90/min", "-1/h", "/h", "1/", "1/parsec", "1//h"])
def test_rate_without_its_time_is_refused(tmp_path: Path, rate: str) -> None:
    with pytest.raises(Refusal) as caught:
        read(tmp_path, rate)
    assert caught.value.problem.code == "out-of-range"
    assert "preemption" in caught.value.problem.what


def with_rates(cluster: Cluster, *per_hour: float) -> Cluster:
    sites = []
    for site, rate in zip(cluster.sites, per_hour, strict=True):
        sites.append(replace(site, preemptions_per_s=rate / 3600) if rate else site)
    return replace(cluster, sites=tuple(sites))


def test_cluster_and_ranking_without_a_rate_are_as_before() -> None:
    cluster = worlds.cluster((worlds.FAST,), (worlds.SLOW,))
    assert "preemption" not in json.dumps(msgspec.to_builtins(cluster))
    assert "lease_s" not in json.dumps(msgspec.to_builtins(cluster.hosts))
    assert content_hash(cluster) == content_hash(with_rates(cluster, 0, 0))
    assert choose_save_interval(cluster, 10**8) is None


def test_plan_avoids_a_fast_site_that_is_taken_away_often() -> None:
    model = test_resolve.run({"size": "tiny"}).model
    train = replace(test_resolve.run({"size": "tiny"}).train, steps=200_000, precision="fp16")
    train = replace(train, checkpoint_every_s=1800.0)
    calm = worlds.cluster((worlds.FAST,), (worlds.SLOW,))
    engine = load_engine("farspan")
    first = rank_plans(model, calm, train, engine, allow=["data"])
    assert first.chosen == 0 and first.candidates[0].places == (0,)
    assert "Expects" not in describe_choice(first)

    taken = rank_plans(model, with_rates(calm, 20, 0), train, engine, allow=["data"])
    assert taken.chosen == 0 and taken.candidates[0].places == (1,)
    for candidate in taken.candidates:
        work_s = candidate.estimate.equal_loss_s
        if 0 not in candidate.places:
            assert candidate.interruptions is None and candidate.time_s == work_s
            continue
        assert candidate.interruptions is not None
        assert candidate.time_s == candidate.interruptions.expected_s(work_s) > work_s
        assert candidate.estimate.usd is not None
        assert candidate.usd == pytest.approx(candidate.estimate.usd * candidate.time_s / work_s)


def test_steps_are_made_again_where_no_other_host_holds_the_state() -> None:
    model = test_resolve.run({"size": "tiny"}).model
    train = replace(test_resolve.run({"size": "tiny"}).train, precision="fp16")
    spot = with_rates(worlds.cluster((worlds.FAST,), (worlds.FAST,)), 1, 1)

    def again(technique: str, cluster: Cluster) -> dict[tuple[int, ...], float]:
        ranked = rank_plans(model, cluster, train, load_engine("farspan"), allow=[technique])
        shares = {}
        for candidate in ranked.candidates:
            assert candidate.interruptions is not None
            shares[candidate.places] = candidate.interruptions.again
        return shares

    assert again("data", spot) == {(0, 1): 0.0, (0,): 1.0}
    assert again("zero2", spot) == {(0, 1): 1.0}
    # Rank 0's host may be the one that is taken away, with its disk.
    sites = []
    for site in spot.sites:
        hosts = tuple(replace(host, folder="/srv") for host in site.hosts)
        sites.append(replace(site, hosts=hosts))
    assert again("data", replace(spot, sites=tuple(sites)))[0, 1] == 0.5


def test_checkpoint_interval_is_dalys_where_a_rate_is_given_and_nothing_asked() -> None:
    calm = test_resolve.cluster()
    spot = with_rates(calm, 0.5)
    assert test_resolve.run({"size": "tiny"}, devices=calm).train.checkpoint_every_s == 300
    chosen = test_resolve.run({"size": "tiny"}, devices=spot)
    assert 10 <= chosen.train.checkpoint_every_s < 300
    assert chosen.origin["train.checkpoint_every_s"].startswith("auto")
    asked = {"size": "tiny", "checkpoint": {"every": "5m"}}
    assert test_resolve.run(asked, devices=spot).train.checkpoint_every_s == 300


def rent(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    asked = ["rent", "--model", "gpt2m", "--tokens", "50M", "--device", "t4", "--technique", "data"]
    assert main([*asked, *words, "--json"]) == 0
    answer: dict = json.loads(capsys.readouterr().out)
    return answer


def test_rent_prices_the_expected_dollars_and_nothing_beyond_the_lease(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calm = rent(capsys)
    spot = rent(capsys, "--preemption", "0.5/h")
    assert all("interruptions" not in each for each in calm["candidates"])
    pairs = {each["count"]: each for each in calm["candidates"] if each["fits"]}
    for each in spot["candidates"]:
        if each["fits"]:
            before = pairs[each["count"]]["estimate"]["minutes"]
            assert each["estimate"]["minutes"] > before
            assert each["interruptions"]["undisturbed_s"] == pytest.approx(60 * before)
            assert each["interruptions"]["expected_usd"] > each["estimate"]["usd"]
    leased = rent(capsys, "--lease", "1h")
    for each in leased["candidates"]:
        if each["fits"]:
            assert each["meets_budget"] == (each["estimate"]["minutes"] <= 60)
