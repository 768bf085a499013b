"""What is said to drift is what was made to drift, by as much, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from farspan.app.reporting import slow_cluster, write_report
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.run import RunFolder
from farspan.estimate.estimate_plan import price
from farspan.planning.rank_plans import rank_plans
from farspan.planning.ranking import candidate_name
from farspan.report.compare import compare_to_prediction
from farspan.report.compare_text import step_lines, step_rows
from farspan.report.drift import Drift
from farspan.report.history import open_run
from tests.report.fake_fleet import costs_of, fleet_run, piped, side_by_side


def drifts(folder: Path, **changes: object) -> list[Drift]:
    found = compare_to_prediction(open_run(fleet_run(folder, **changes)))  # type: ignore[arg-type]
    assert found is not None
    return list(found.drifts)


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("make", [piped, side_by_side])
@pytest.mark.parametrize("pace", [1.8, 0.5])
def test_a_device_with_another_pace_is_named_with_it(tmp_path: Path, slow: int, make, pace: float):
    paces = tuple(pace if rank == slow else 1.0 for rank in range(3))
    (one,) = drifts(tmp_path / "run", paces=paces, make=make, clocks=(0, 0.7, -40))
    assert one.what == "device" and one.paces == {slow: pytest.approx(pace, rel=0.01)}
    place = ("gat", "amst", "star")[slow]
    assert one.label == f"compute of rank {slow} (epyc in {place})"
    found = compare_to_prediction(open_run(tmp_path / "run"))
    assert float(step_rows(found)[2][3]) == pytest.approx(pace, rel=0.02)


def test_an_interval_allows_what_it_allows(tmp_path: Path):
    assert drifts(tmp_path / "inside", paces=(1.1, 1.2, 1.1)) == []
    assert [one.what for one in drifts(tmp_path / "beyond", paces=(1.9, 2.0, 2.1))] == [
        "device"
    ] * 3


@pytest.mark.parametrize(("links", "who"), [((5, 1), "gat and amst"), ((1, 5), "amst and star")])
def test_a_link_is_named_without_comparing_clocks(
    tmp_path: Path, links: tuple[float, float], who: str
):
    (one,) = drifts(tmp_path / "run", links=links, clocks=(0, 12.5, -3))
    assert (one.what, one.who) == ("messages", who)
    assert one.factor == pytest.approx(5, rel=0.1)
    assert one.label == f"round trip between {who}"


def test_slow_gradient_sync_is_distinguished_from_a_slow_device(tmp_path: Path):
    (one,) = drifts(tmp_path / "sums", make=side_by_side, sums=4, clocks=(0, 1, 2))
    assert (one.what, one.who) == ("gradients", "gat, amst and star")
    assert one.factor == pytest.approx(4, rel=0.01)
    assert [one.what for one in drifts(tmp_path / "slow", make=side_by_side, paces=(1, 4, 1))] == [
        "device"
    ]


def test_nothing_is_claimed_without_data(tmp_path: Path):
    slow = {"paces": (1, 1, 3), "links": (6, 6)}
    assert drifts(tmp_path / "short", steps=9, traced=(2, 3), **slow) == []
    assert drifts(tmp_path / "untraced", traced=(), **slow) == []
    found = compare_to_prediction(open_run(tmp_path / "untraced"))
    assert found is not None and not found.steps.inside
    assert step_lines(found)[2:] == ["no traced device or link is the cause"]
    assert len(drifts(tmp_path / "traced", steps=10, traced=(2, 3), **slow)) == 3
    # Of a device whose log lies elsewhere nothing is known, nor of links of its pipeline.
    assert drifts(tmp_path / "missing", missing=(2,), **slow) == []


def test_runs_with_warm_up_steps_alone_show_no_drift(tmp_path: Path):
    run = open_run(fleet_run(tmp_path / "run", paces=(1, 1, 3)))
    cold = tuple(msgspec.structs.replace(one, warm=False) for one in run.history.steps)
    found = compare_to_prediction(
        msgspec.structs.replace(run, history=msgspec.structs.replace(run.history, steps=cold))
    )
    assert found is not None and not found.drifts


def test_single_stalled_traced_step_is_no_drift_unless_all_are_slow(tmp_path: Path):
    assert drifts(tmp_path / "one", steps=30, traced=(3,), slow={3: 3.0}) == []
    # A traced step that was somewhat slow counts as if it had not been.
    (one,) = drifts(tmp_path / "two", steps=30, traced=(3,), slow={3: 1.2}, paces=(1, 1, 2))
    assert one.factor == pytest.approx(2, rel=0.05)
    # Where all of several were slow, that is how the run goes on.
    changed = drifts(tmp_path / "all", steps=30, traced=(20, 25), slow={20: 3.0, 25: 3.0})
    assert {one.what for one in changed} == {"device", "messages"}
    assert changed[0].factor == pytest.approx(3, rel=0.1)


def test_drift_below_a_tenth_of_the_step_is_left_out(tmp_path: Path):
    # The second stage computes for a twelfth of a step: twice as long is not a tenth of one.
    folder = fleet_run(tmp_path / "run", paces=(1, 1, 1))
    found = compare_to_prediction(open_run(folder))
    assert found is not None
    shares = [
        sum(mark.end - mark.start for mark in row.predicted if mark.kind != "sums")
        / found.steps.predicted_s
        for row in found.rows
    ]
    least = min(range(3), key=shares.__getitem__)
    few = 1 + 0.09 / shares[least]
    assert (
        drifts(tmp_path / "few", paces=tuple(few if rank == least else 1 for rank in range(3)))
        == []
    )


def test_planning_again_ranks_with_the_measured_pace(tmp_path: Path):
    folder = fleet_run(tmp_path / "run", paces=(1, 1, 2.5), make=side_by_side)
    (folder / "run.yaml").write_text("data: docs\nparallel: {allow: [data, pipeshard]}\n")
    made = write_report(folder)
    run = made.run
    found = made.compared
    written = made.page
    assert found is not None and found.again in step_lines(found)
    cluster = slow_cluster(
        load_cluster_json(RunFolder(folder).cluster), {("star", 0): found.drifts[0].paces[2]}
    )
    assert [device.learned.pace for device in cluster.devices] == pytest.approx(
        [1, 1, 2.5], rel=0.01
    )
    costs = costs_of(run.plan, cluster)
    ranking = rank_plans(
        run.plan.model, cluster, run.plan.train, costs.engine, allow=("data", "pipeshard")
    )
    best = next(one for one in ranking.candidates if one.eligible and 0 in one.places)
    speed = best.estimate.tokens_per_s / price(run.plan, costs).tokens_per_s
    assert found.again == (
        f"planned again with this pace, {candidate_name(best)} would be chosen: {speed:.2g}x as "
        "many tokens a second"
    )
    assert speed > 1.01 and found.again[1:] in written.read_text()


def test_planning_again_ranks_with_the_measured_slowdown_of_a_link(tmp_path: Path):
    folder = fleet_run(tmp_path / "run", links=(8, 1))
    (folder / "run.yaml").write_text("data: docs\nparallel: {allow: [data, pipeshard]}\n")
    made = write_report(folder)
    run = made.run
    found = made.compared
    assert found is not None
    (drift,) = found.drifts
    assert drift.ends == ("gat", "amst")
    there = load_cluster_json(RunFolder(folder).cluster)
    cluster = slow_cluster(there, {}, {drift.ends: drift.factor})
    assert cluster.link("amst", "gat").pace == pytest.approx(
        8 * there.link("amst", "gat").pace, rel=0.1
    )
    assert cluster.link("amst", "star") == there.link("amst", "star")
    assert (
        price(run.plan, costs_of(run.plan, cluster)).step_s
        > price(run.plan, costs_of(run.plan, there)).step_s
    )
    assert found.again.startswith("planned again with this pace, ")


def test_report_states_that_no_plan_would_be_faster(tmp_path: Path):
    slow = {"paces": (1, 1, 2.5), "steps": 30, "traced": (3,)}
    run = open_run(fleet_run(tmp_path / "first", make=side_by_side, **slow))  # type: ignore[arg-type]
    cluster = slow_cluster(load_cluster_json(RunFolder(run.folder).cluster), {("star", 0): 2.5})
    engine = costs_of(run.plan, cluster).engine
    (best,) = rank_plans(
        run.plan.model, cluster, run.plan.train, engine, allow=("data",), parts=False
    ).candidates
    folder = fleet_run(tmp_path / "best", make=lambda steps: best.plan, **slow)  # type: ignore[arg-type,return-value]
    (folder / "run.yaml").write_text("data: docs\nparallel: {technique: data}\n")
    found = write_report(folder).compared
    assert (
        found is not None
        and found.again == "planned again with this pace, no plan would be faster than this one"
    )
