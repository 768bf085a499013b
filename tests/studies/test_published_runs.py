"""The lists of published runs and block times load, and what they say of their plans holds
together."""

from __future__ import annotations

import statistics
from collections import Counter

import msgspec
import pytest

from farspan import models
from farspan.domain.assumed_networks import UNKNOWN_SITE
from farspan.domain.cluster import SITE_RTT_S
from farspan.domain.engine import load_engine
from farspan.estimate.estimate_plan import estimate
from farspan_studies.papers import unseen_runs
from farspan_studies.papers.published_runs import Block, Run, published_blocks, published_runs


def twice(ids: list[str]) -> list[str]:
    return [x for x, count in Counter(ids).items() if count > 1]


def test_there_are_enough_runs_and_no_id_comes_twice():
    runs = published_runs().runs
    assert len(runs) >= 30
    assert twice([run.id for run in runs]) == []
    assert len({run.gpu for run in runs}) >= 5


def test_no_id_of_a_block_comes_twice():
    blocks = published_blocks().blocks
    assert twice([block.id for block in blocks]) == []
    assert len({block.gpu for block in blocks}) >= 3


@pytest.mark.parametrize("run", published_runs().runs, ids=lambda run: run.id)
def test_the_plan_of_a_run_is_whole(run: Run):
    assert run.gpus == run.data * run.tensor * run.pipeline
    assert run.batch % (run.data * run.microbatch) == 0
    assert run.gpus % run.gpus_per_host == 0
    assert sum(x is not None for x in (run.step_s, run.tokens_per_s, run.tflops_per_gpu)) == 1
    assert run.model.d_model % run.model.heads == 0
    assert run.model.heads % run.model.kv_heads == 0
    assert run.seq_len <= run.model.context
    assert run.model.layers % (run.pipeline * run.interleave) == 0


@pytest.mark.parametrize("block", published_blocks().blocks, ids=lambda block: block.id)
def test_a_block_has_a_shape(block: Block):
    assert block.model.d_model % block.model.heads == 0
    assert block.seq_len <= block.model.context
    assert block.layers <= block.model.layers


def test_every_assumed_name_is_a_field_of_its_run_block_or_model():
    items: list[Run | Block] = [*published_runs().runs, *published_blocks().blocks]
    for item in items:
        for name in item.assumed:
            assert hasattr(item, name) or hasattr(item.model, name), f"{item.id}: {name}"


SEVERAL = [run for run in published_runs().runs if run.gpus > run.gpus_per_host]


@pytest.mark.parametrize("run", SEVERAL, ids=lambda run: run.id)
def test_a_run_is_priced_with_the_network_that_a_user_gets(run: Run):
    """What the source states, and else what the product assumes."""
    _, cluster = unseen_runs.run_plan(run)
    (site,) = cluster.sites
    link = cluster.link("h0", "h1")
    assert link is not None
    assumed = cluster.assumed_network("h0", "h1")
    if run.network_gbit is not None:
        assert link.bandwidth == site.lan_bandwidth == run.network_gbit * 1e9 / 8
        assert assumed is None
    else:
        assert site.lan_bandwidth is None and assumed is not None
        assert (link.bandwidth, link.rtt_s) == (assumed.rate, assumed.rtt_s)
        assert bool(assumed.machine) == (run.gpus_per_host == 8)
    if site.lan_rtt_s is not None:
        assert site.lan_rtt_s > SITE_RTT_S and "delay" in (run.network or "")


def test_hosts_of_no_known_shape_keep_10_gbit_s_where_their_source_states_no_network():
    run = next(run for run in SEVERAL if run.gpus_per_host == 4)
    unstated = msgspec.structs.replace(run, network=None, network_gbit=None)
    _, cluster = unseen_runs.run_plan(unstated)
    assert cluster.assumed_network("h0", "h1") == UNKNOWN_SITE


def test_runs_are_priced_under_the_engines_as_they_are():
    """In fp32, too: `torch2024` multiplies with TF32, as it does for whoever asks for it."""
    run = next(
        run
        for run in published_runs().runs
        if run.precision == "fp32" and unseen_runs.software(run) == "torch2024"
    )
    plan, cluster = unseen_runs.run_plan(run)
    own = estimate(plan, models.graph(plan.model), cluster, load_engine("torch2024"))
    row = unseen_runs.priced_run(run)
    assert row.predicted_s == own.step_s


def test_medians_by_source_count_every_run_once():
    rows = unseen_runs.unseen_runs()
    scores = unseen_runs.source_scores(rows)
    assert sum(one.runs for one in scores) == len(rows)
    assert len({one.origin for one in scores}) == len(scores) > 10
    for one in scores:
        own = [abs(row.error) for row in rows if row.source.startswith(one.origin)]
        assert one.median == statistics.median(own), one.origin
    # Few sources have most of the runs: the two medians are not the same.
    assert statistics.median(one.median for one in scores) != unseen_runs.score(rows).median
