"""Trials on two emulated sites: what is measured, what they die of, and that nothing is left; runs
far from here."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan import models
from farspan.domain.cluster import Cluster, Link, Site
from farspan.domain.engine import load_engine
from farspan.domain.model import count_parameters
from farspan.domain.plan import PlannedDevice, Sync
from farspan.domain.run_events import Finished, read_events
from farspan.estimate.estimate_plan import estimate
from farspan.launch.trial import (
    NUM_WARMUP_STEPS,
    TrialLimits,
    run_trial,
    shorten_plan,
    start_s,
    step_times,
    trial_limits,
)
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.semantics.identity import plan_key
from farspan_lab import state
from farspan_lab.cluster import of_lab
from tests import tiny
from tests.launch.conftest import up
from tests.launch.test_launchers import (
    ENDLESS,
    TRAIN,
    assert_resumed,
    divided,
    last_step,
    losses_until,
    planned,
)
from tests.waiting import LIMIT_S

FEW = TrialLimits(steps=3, deadline_s=LIMIT_S)


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


def unreachable_sites(bandwidth=1e8) -> Cluster:
    """This machine as a site, and another that cannot be entered: its client is not installed."""
    (near,) = tiny.this_machine(planned()).hosts
    far = replace(near, name="star", enter=("no-such-client", "star"), folder="/tmp/nowhere")
    link = Link(a="utah", b="star", rtt_s=0.02, bandwidth=bandwidth)
    hosts = (replace(near, name="utah"), far)
    return Cluster(
        sites=tuple(Site(name=host.name, hosts=(host,)) for host in hosts), links=(link,)
    )


def left(cluster):
    """Run folders on the far site's disk."""
    return list(Path(cluster.hosts[1].folder, "runs").glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipeline", "zero3"])
def test_a_plan_over_both_sites_is_measured(sites, corpus, kind):
    plan = divided(kind)
    made = run_trial(plan, corpus, sites, "local", FEW)
    assert made.status == "ok", made.problem
    assert made.plan == plan_key(plan) and len(made.steps) == FEW.steps
    assert min(made.steps) <= made.step_s <= max(made.steps)
    assert set(made.memory_bytes) == set(made.compute_s) == {0, 1, 2, 3}
    assert all(0 < seconds < made.step_s for seconds in made.compute_s.values())
    assert 0.02 < made.step_s < made.took_s
    assert not left(sites)


@pytest.mark.slow
def test_traffic_leaving_a_site_is_limited_to_the_wan_rate_of_the_plan(sites, corpus):
    """Half of a site's gradients go over each of its two connections: a second at half as many
    bytes a second."""
    plan = planned()
    (stage,) = plan.replicas[0].stages

    def step_s(wan_rate):
        sync = replace(stage.grad_sync, topology="hierarchical", wan_rate=wan_rate)
        held = replace(
            plan, replicas=(replace(plan.replicas[0], stages=(replace(stage, grad_sync=sync),)),)
        )
        made = run_trial(held, corpus, sites, "local", FEW)
        assert made.status == "ok", made.problem
        return made.step_s

    limited_s = step_s(2 * count_parameters(plan.model))
    assert limited_s > 0.8
    assert limited_s > step_s(None)


@pytest.mark.slow
def test_trial_of_replicas_weights_outer_sync_by_the_interval_of_the_plan(sites, corpus):
    made = run_trial(divided("replicas"), corpus, sites, "local", FEW)
    assert made.status == "ok", made.problem
    # Two rounds of 4 steps; a fifth of what their first steps take longer.
    assert len(made.steps) == 8
    synced = statistics.fmean(made.steps[::4])
    between = statistics.fmean(step for at, step in enumerate(made.steps) if at % 4)
    assert made.step_s == pytest.approx(between + max(0.0, synced - between) / 5)


def test_outer_sync_share_of_a_trial_step_equals_that_computed_by_hand():
    plan = replace(divided("replicas"), sync=Sync(every=100))
    short = shorten_plan(plan, 3)
    assert (short.sync.every, short.train.steps) == (4, 13)
    # A first round; two whose steps take 1 s; 2 s and 4 s for the meetings before them.
    ends = [0.0] * 4
    for met in (2.0, 4.0):
        ends += [ends[-1] + met + 1, ends[-1] + met + 2, ends[-1] + met + 3, ends[-1] + met + 4]
    assert step_times(plan, short, ends)[0] == pytest.approx(1 + 3 / 100)


def test_steps_that_warm_up_do_not_count():
    plan = planned()
    short = shorten_plan(plan, 3)
    assert short.train.steps == NUM_WARMUP_STEPS + 3 + 1
    assert step_times(plan, short, [9.0, 10.0, 11.0, 12.0, 14.0]) == (1.0, (1.0, 1.0, 2.0))
    assert shorten_plan(plan, 1, warmup=1).train.steps == 1 + 1 + 1
    assert step_times(plan, shorten_plan(plan, 1, warmup=1), [9.0, 70.0], warmup=1) == (
        61.0,
        (61.0,),
    )


@pytest.mark.slow
def test_a_plan_on_the_far_site_alone_is_measured(sites, corpus):
    made = run_trial(at_star(), corpus, sites, "local", FEW)
    assert made.status == "ok", made.problem
    assert set(made.memory_bytes) == {0}
    assert not left(sites)


@pytest.mark.slow
def test_memory_that_is_not_there_is_a_result(sites, corpus):
    model = models.family("gpt2").shape(d_model=512, layers=8, heads=8, vocab_size=300, context=16)
    train = replace(TRAIN, batch=4)
    plan = tiny.plan(train, rows=(1, 1, 1, 1), micro_rows=1, spec=model)
    plan = replace(plan, devices=planned().devices)
    found = run_trial(plan, corpus, sites, "local", FEW)
    assert found.status == "oom" and found.problem is not None
    assert "star" in f"{found.problem.what} {found.problem.where}"
    assert found.step_s is None and not left(sites)


@pytest.mark.slow
def test_a_trial_that_does_not_end_is_ended(sites, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan = replace(planned(), train=replace(TRAIN, batch=8))
    made = run_trial(plan, corpus, sites, "local", TrialLimits(steps=100_000, deadline_s=3.0))
    assert made.status == "failed" and "did not end within 3 s" in made.problem.what
    own = ["pgrep", "-af", f"{tmp_path}/farspan-trial-"]
    assert not subprocess.run(own, capture_output=True, text=True).stdout
    assert not left(sites)


@pytest.mark.parametrize("kind", ["far alone", "both"])
def test_a_host_that_nothing_here_reaches_is_a_result(corpus, kind):
    """Its client is not installed."""
    plan = at_star() if kind == "far alone" else planned()
    made = run_trial(plan, corpus, unreachable_sites(), "local", FEW)
    assert made.status == "failed" and "no-such-client" in made.problem.fact, made.problem


def test_limits_follow_the_prediction(corpus):
    plan = planned()
    sites = unreachable_sites()
    assert trial_limits(plan, sites, 2.0, 5).deadline_s == pytest.approx(30 + 4 * 7 * 2.0)
    # The corpus goes to the one host that shares no disk.
    state_s = 16 * count_parameters(plan.model) / 2e8
    size = sum(
        (corpus / name).stat().st_size for name in ("train.bin", "train.idx", "val.bin", "val.idx")
    )
    assert start_s(plan, sites, corpus) == pytest.approx(120 + state_s + size / 1e6)


def test_trial_deadline_of_replicas_includes_its_more_frequent_outer_syncs():
    """Over a slow line a meeting takes far longer than a step: a hundredth of it a step in the run,
    a quarter here."""
    slow = unreachable_sites(bandwidth=1e4)
    plan = replace(divided("replicas"), sync=Sync(every=100))
    step_s = estimate(plan, models.graph(plan.model), slow, load_engine("farspan")).step_s
    meeting_s = plan.sync.bits / 8 * count_parameters(plan.model) / 1e4
    assert trial_limits(plan, slow, step_s, 3).deadline_s > 4 * 3 * meeting_s


# -- runs whose rank 0 is elsewhere
#   ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_on_a_remote_site_resumes_from_its_step_and_is_fetched_complete(
    sites, tmp_path, monkeypatch
):
    monkeypatch.setattr("farspan.launch.run_folder_transfer.PULL_S", 0.1)
    run = tiny.run_folder(tmp_path / "far" / "run", at_star(ENDLESS))
    before = losses_until(1, run, sites)
    after = losses_until(last_step(before) + 4, run, sites)
    alone = tiny.run_folder(tmp_path / "alone" / "run", tiny.plan(ENDLESS, rows=(8,), micro_rows=2))
    here = tiny.this_machine(alone.load_plan())
    assert_resumed(before, after, losses_until(last_step(after), alone, here))
    *_, last = read_events(run.events)
    assert isinstance(last, Finished) and last.step == last_step(after)
    assert checkpoint_folder.verify(run.checkpoints / f"step-{last.step:08d}")
