"""A run whose device lacks memory for a microbatch goes on with half of it, once; and where an
estimate is unsure the larger one is tried."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.app.microbatches import enlarge_where_unsure, price
from farspan.app.plans import Planned
from farspan.app.resolving import Resolved
from farspan.app.trial_cache import is_known_to_lack_memory, record_lack_of_memory
from farspan.domain.cluster import Cluster, Device, Host
from farspan.domain.cluster_json import load_cluster_json, save_cluster_json
from farspan.domain.config import OnFault
from farspan.domain.corpus import CorpusManifest
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Finished, Recovered
from farspan.domain.struct_files import load
from farspan.semantics.identity import training_key
from tests import tiny
from tests.app.supervised import Watched, made
from tests.launch.test_launchers import TRAIN

WIDE = replace(tiny.SPEC, context=512, heads=16, kv_heads=16, layers=1)
#: Attention by the textbook, which keeps several tables of 16 MB a sequence.
GREEDY = replace(TRAIN, steps=4, batch=8, seq_len=512, attention="vanilla")
SHORT = replace(TRAIN, steps=4, batch=8)
LACKING = Problem(code="out-of-memory", what="w", where="x", fact="f", remedy="r")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "cache"))


def limited_run(path: Path, plan: Plan, most: int, on_fault: OnFault = "recover") -> RunFolder:
    """A run whose devices hold `most` sequences at once."""
    run = made(path, plan, on_fault)
    enter = (sys.executable, "-m", "tests.app.small_device", str(most))
    cluster = load_cluster_json(run.cluster)

    def confine(host: Host, index: int) -> Device:
        device = host.devices[index]
        return replace(device, slot=replace(device.slot, enter=enter))

    save_cluster_json(cluster.with_devices(confine), run.cluster)
    return run


def test_a_run_without_memory_for_a_microbatch_goes_on_with_half_of_it(tmp_path):
    plan = tiny.plan(SHORT, micro_rows=8)
    watched = Watched(limited_run(tmp_path / "run", plan, 4))
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "done", ending
    (fault,) = watched.faulted
    assert fault.problem.code == "out-of-memory" and fault.problem.rank == 0
    assert "microbatches of 4 sequences, not 8; the batch stays 8" in fault.text
    after = watched.run.load_plan()
    assert after.replicas[0].microbatches == 2 and training_key(after) == training_key(plan)
    (again,) = [event for event in watched.events if isinstance(event, Recovered)]
    assert again.replanned and again.step == 0
    # The same samples, divided otherwise: the losses differ by rounding alone.
    whole = Watched(made(tmp_path / "whole", plan))
    assert isinstance(whole.train(), Finished)
    assert watched.losses == pytest.approx(whole.losses, rel=1e-5)
    cluster = load_cluster_json(watched.run.cluster)
    assert is_known_to_lack_memory(plan, cluster) and not is_known_to_lack_memory(after, cluster)
    assert (watched.run.plans / f"{plan.hash}.json").exists()


def test_a_run_without_memory_for_half_a_microbatch_either_ends(tmp_path):
    plan = tiny.plan(SHORT, micro_rows=8)
    watched = Watched(limited_run(tmp_path / "run", plan, 3))
    problem = watched.train()
    assert isinstance(problem, Problem) and problem.code == "out-of-memory"
    assert len(watched.faulted) == 1
    assert watched.run.load_plan().replicas[0].microbatches == 2


@pytest.mark.parametrize(("micro_rows", "on_fault"), [(1, "recover"), (8, "stop")])
def test_a_lack_of_memory_ends_a_run_that_has_nothing_to_halve_or_may_not(
    tmp_path, micro_rows, on_fault
):
    plan = tiny.plan(SHORT, micro_rows=micro_rows)
    watched = Watched(limited_run(tmp_path / "run", plan, 0, on_fault))
    problem = watched.train()
    assert isinstance(problem, Problem) and problem.code == "out-of-memory"
    assert not watched.faulted and watched.run.load_plan() == plan


# -- the larger microbatch
#   ------------------------------------------------------------------------------------------------


def on_gpu(plan: Plan, memory: int) -> tuple[Plan, Cluster]:
    """The plan, and a cluster of the one GPU that it is for."""
    at = tuple(replace(device, backend="cuda") for device in plan.devices)
    cluster = tiny.this_machine(plan).with_devices(
        lambda host, index: replace(host.devices[index], backend="cuda", memory=memory)
    )
    return replace(plan, devices=at), cluster


def planned(tmp_path: Path, plan: Plan, cluster: Cluster) -> Planned:
    corpus = tmp_path / "corpus"
    if not corpus.exists():
        tiny.corpus(corpus)
    resolved = Resolved(
        model=plan.model,
        train=plan.train,
        cluster=cluster,
        corpus=load(corpus / "corpus.json", CorpusManifest),
        corpus_folder=corpus,
        warnings=(),
        origin={},
    )
    return Planned(plan=plan, estimate=price(plan, cluster), resolved=resolved)


def test_the_larger_microbatch_is_tried_where_it_may_fit(tmp_path):
    small, cluster = on_gpu(tiny.plan(GREEDY, micro_rows=4, spec=WIDE), 2**34)
    large, _ = on_gpu(tiny.plan(GREEDY, micro_rows=8, spec=WIDE), 2**34)
    needed = price(large, cluster).memory[0].total
    fill = load_engine(large.engine).fill

    def begun_with(share: float) -> Planned:
        """With a GPU of which a plan may fill `share` of what the larger one needs."""
        _, there = on_gpu(small, int(share * needed / fill))
        return enlarge_where_unsure(planned(tmp_path, small, there))

    unsure = begun_with(0.95)
    assert unsure.plan == large
    assert unsure.estimate.memory[0].total == pytest.approx(needed, rel=1e-6)
    assert begun_with(0.85).plan == small
    _, there = on_gpu(small, int(0.95 * needed / fill))
    record_lack_of_memory(large, there, LACKING)
    assert begun_with(0.95).plan == small


def test_nothing_larger_is_tried_on_a_cpu_or_where_all_is_computed_at_once(tmp_path):
    small = tiny.plan(GREEDY, micro_rows=4, spec=WIDE)
    cpu = planned(tmp_path, small, tiny.this_machine(small))
    assert enlarge_where_unsure(cpu) is cpu
    whole, cluster = on_gpu(tiny.plan(GREEDY, micro_rows=8, spec=WIDE), 2**34)
    once = planned(tmp_path, whole, cluster)
    assert enlarge_where_unsure(once) is once
