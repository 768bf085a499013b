"""Trials on two emulated sites: what is measured, what they die of, and that nothing is left; runs
far from here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan import models
from farspan.domain.engine import engine
from farspan.domain.model import parameters
from farspan.domain.plan import PlannedDevice, Sync
from farspan.domain.results import Finished, Step, Validated, read_events
from farspan.estimate.price import estimate
from farspan.launch.launchers import launch
from farspan.launch.trial import (
    WARMUP,
    Limits,
    TrialQuery,
    apart,
    limits,
    shortened,
    start_s,
    timed,
    trial,
)
from farspan.semantics.identity import plan_key
from farspan_lab import state
from farspan_lab.cluster import of_lab
from tests import tiny
from tests.launch.conftest import up
from tests.launch.test_launchers import TRAIN, divided, losses, planned

pytestmark = pytest.mark.slow

FEW = Limits(steps=3, deadline_s=90.0)


@pytest.fixture(scope="module")
def sites():
    """Two sites of two devices, 20 ms apart; one device of the second may use 450 MB."""
    name = f"trials-{os.getpid()}"
    links = "links: [{between: [utah, star], rtt: 20ms}]"
    star = "{devices: [{}, {memory: 450MB}]}"
    made = up(f"name: {name}\nsites: {{utah: {{devices: 2}}, star: {star}}}\n{links}\n")
    yield of_lab(made)
    state.down(name)


@pytest.fixture
def corpus(tmp_path):
    return tiny.run_folder(tmp_path / "run", planned()).path.parent / "corpus"


def at_star(train=TRAIN):
    """The whole run on the first device of the far site."""
    plan = tiny.plan(train, rows=(8,), micro_rows=2)
    return replace(plan, devices=(PlannedDevice(host="star", backend="cpu", index=0, threads=1),))


def left(cluster):
    """Run folders on the far site's disk."""
    return list(Path(cluster.hosts[1].folder, "runs").glob("*"))


@pytest.mark.parametrize("kind", ["pipeline", "zero3"])
def test_a_plan_over_both_sites_is_measured(sites, corpus, kind):
    plan = divided(kind)
    made = trial(plan, corpus, sites, "local", FEW)
    assert made.status == "ok", made.problem
    assert made.plan == plan_key(plan) and len(made.steps) == FEW.steps
    assert min(made.steps) <= made.step_s <= max(made.steps)
    assert set(made.memory_bytes) == set(made.compute_s) == {0, 1, 2, 3}
    assert all(0 < seconds < made.step_s for seconds in made.compute_s.values())
    assert 0.02 < made.step_s < made.took_s
    assert not left(sites)


def test_traffic_leaving_a_site_is_limited_to_the_wan_rate_of_the_plan(sites, corpus):
    """Half of a site's gradients go over each of its two connections: half a second at as many
    bytes a second."""
    plan = planned()
    (stage,) = plan.replicas[0].stages

    def step_s(wan_rate):
        sync = replace(stage.grad_sync, topology="hierarchical", wan_rate=wan_rate)
        held = replace(
            plan, replicas=(replace(plan.replicas[0], stages=(replace(stage, grad_sync=sync),)),)
        )
        made = trial(held, corpus, sites, "local", FEW)
        assert made.status == "ok", made.problem
        return made.step_s

    assert step_s(None) < 0.4 < step_s(4 * parameters(plan.model))


def test_trial_of_replicas_weights_outer_sync_by_the_interval_of_the_plan(sites, corpus):
    made = trial(divided("replicas"), corpus, sites, "local", FEW)
    assert made.status == "ok", made.problem
    # Rounds of 4 steps, 20 ms apart: a meeting's share of 5 steps.
    assert len(made.steps) == 8
    assert made.step_s < sum(made.steps) / len(made.steps)


def test_outer_sync_share_of_a_trial_step_equals_that_computed_by_hand():
    plan = replace(divided("replicas"), sync=Sync(every=100))
    short = shortened(plan, 3)
    assert (short.sync.every, short.train.steps) == (4, 13)
    # A first round; two whose steps take 1 s; 2 s and 4 s for the meetings before them.
    ends = [0.0] * 4
    for met in (2.0, 4.0):
        ends += [ends[-1] + met + 1, ends[-1] + met + 2, ends[-1] + met + 3, ends[-1] + met + 4]
    assert timed(plan, short, ends)[0] == pytest.approx(1 + 3 / 100)


def test_steps_that_warm_up_do_not_count():
    plan = planned()
    short = shortened(plan, 3)
    assert short.train.steps == WARMUP + 3 + 1
    assert timed(plan, short, [9.0, 10.0, 11.0, 12.0, 14.0]) == (1.0, (1.0, 1.0, 2.0))
    assert shortened(plan, 1, warmup=1).train.steps == 1 + 1 + 1
    assert timed(plan, shortened(plan, 1, warmup=1), [9.0, 70.0], warmup=1) == (61.0, (61.0,))


def test_a_plan_on_the_far_site_alone_is_measured(sites, corpus):
    made = trial(at_star(), corpus, sites, "local", FEW)
    assert made.status == "ok", made.problem
    assert set(made.memory_bytes) == {0}
    assert not left(sites)


def test_memory_that_is_not_there_is_a_result(sites, corpus):
    model = models.family("gpt2").shape(d_model=512, layers=8, heads=8, vocab_size=300, context=16)
    train = replace(TRAIN, batch=4)
    plan = tiny.plan(train, rows=(1, 1, 1, 1), micro_rows=1, spec=model)
    plan = replace(plan, devices=planned().devices)
    found = trial(plan, corpus, sites, "local", FEW)
    assert found.status == "oom" and found.problem is not None
    assert "star" in f"{found.problem.what} {found.problem.where}"
    assert found.step_s is None and not left(sites)


def test_a_trial_that_does_not_end_is_ended(sites, corpus):
    plan = replace(planned(), train=replace(TRAIN, batch=8))
    made = trial(plan, corpus, sites, "local", Limits(steps=100_000, deadline_s=3.0))
    assert made.status == "failed" and "did not end within 3 s" in made.problem.what
    assert made.took_s < 300
    assert not subprocess.run(
        ["pgrep", "-af", "farspan-trial-"], capture_output=True, text=True
    ).stdout


def test_trial_whose_process_dies_is_a_failed_result(sites, tmp_path):
    nowhere = str(tmp_path / "no-corpus")
    made = apart(
        TrialQuery(plan=planned(), corpus=nowhere, cluster=sites, launcher="local", within=FEW)
    )
    assert made.status == "failed" and made.plan == plan_key(planned())
    assert "exit code 1" in made.problem.fact and "no-corpus" in made.problem.fact


@pytest.mark.parametrize("kind", ["far alone", "both"])
def test_a_host_that_nothing_here_reaches_is_a_result(corpus, kind):
    """Its client is not installed."""
    plan = at_star() if kind == "far alone" else planned()
    here = tiny.this_machine(planned())
    (site,) = here.sites
    (host,) = site.hosts
    far = replace(host, name="star", enter=("no-such-client", "star"), folder="/tmp/nowhere")
    near = replace(host, name="utah")
    cluster = replace(here, sites=(replace(site, hosts=(near, far)),))
    made = trial(plan, corpus, cluster, "local", FEW)
    assert made.status == "failed" and "no-such-client" in made.problem.fact, made.problem


def test_limits_follow_the_prediction(sites, corpus):
    plan = planned()
    assert limits(plan, sites, 2.0, 5).deadline_s == pytest.approx(30 + 4 * 7 * 2.0)
    # The corpus goes to the one host that shares no disk.
    state_s = 16 * parameters(plan.model) / 2e8
    size = sum(
        (corpus / name).stat().st_size for name in ("train.bin", "train.idx", "val.bin", "val.idx")
    )
    assert start_s(plan, sites, corpus) == pytest.approx(120 + state_s + size / 1e6)


def test_trial_deadline_of_replicas_includes_its_more_frequent_outer_syncs(sites):
    """Over a slow line a meeting takes far longer than a step: a hundredth of it a step in the run,
    a quarter here."""
    slow = replace(sites, links=tuple(replace(link, bandwidth=1e4) for link in sites.links))
    plan = replace(divided("replicas"), sync=Sync(every=100))
    step_s = estimate(plan, models.graph(plan.model), slow, engine("farspan")).step_s
    meeting_s = plan.sync.bits / 8 * parameters(plan.model) / 1e4
    assert limits(plan, slow, step_s, 3).deadline_s > 4 * 3 * meeting_s


# -- runs whose rank 0 is elsewhere
#   ------------------------------------------------------------------------------------


#: It takes longer than events take to come back.
MANY = replace(TRAIN, steps=600, validate_every=200)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = tiny.run_folder(
        tmp_path_factory.mktemp("alone") / "run", tiny.plan(MANY, rows=(8,), micro_rows=2)
    )
    return losses(run, "local", tiny.this_machine(run.load_plan()))


def test_run_on_a_remote_site_resumes_from_its_step_and_is_fetched_complete(
    sites, alone, tmp_path, monkeypatch
):
    monkeypatch.setattr("farspan.launch.remote_run.PULL_S", 0.1)
    run = tiny.run_folder(tmp_path / "run", at_star(MANY))
    first = []
    with launch("local", run.load_plan(), run, sites) as workers:
        for event in workers:
            first.append(event)
            if isinstance(event, Step) and event.step == 1:
                workers.interrupt()
    assert max(event.step for event in first if isinstance(event, Step)) < 600, (
        "it ended before it could be interrupted"
    )
    again = losses(run, "local", sites)
    before = [event.loss for event in first if isinstance(event, Step | Validated)]
    assert before + again == pytest.approx(alone, abs=1e-6)
    *_, told = read_events(run.events)
    assert isinstance(told, Finished) and told.reason == "done"
    assert (run.checkpoints / f"step-{MANY.steps:08d}" / "manifest.json").exists()
