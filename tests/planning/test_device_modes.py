"""Which devices compile, and which step is recorded as a graph: by faked cards, hosts and runs."""

from __future__ import annotations

import msgspec
import pytest

from farspan import models
from farspan.domain import catalog
from farspan.domain.cluster import Cluster, Host, Link, Site
from farspan.domain.config import RunConfig
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.domain.struct_files import content_hash
from farspan.domain.train import TrainSpec
from farspan.planning.cluster_parts import whole_cluster
from farspan.planning.device_modes import explain_modes, settle_asked, settle_modes
from farspan.planning.rank_plans import price_technique, rank_plans
from farspan.planning.size import shape_for
from farspan.planning.why import costs_of
from farspan.semantics.compile_choice import (
    choose_compile,
    choose_graph,
    find_graph_obstacle,
    records_graph,
    runs_compiled,
)
from farspan.semantics.identity import plan_key
from farspan.techniques import Task
from tests.planning.test_resolve import RATE, refused, run
from tests.planning.test_resolve import cluster as cpu_cluster

HOUR_S = 3600.0
MINUTE_S = 60.0
ENGINE = load_engine("farspan")


def card(kind: str):
    known = catalog.load_devices()[kind]
    return known.device(kind) or known.device(kind, 10**10)


def cluster_of(*kinds: str, triton=msgspec.UNSET) -> Cluster:
    """A host with these cards."""
    host = Host(name="h", devices=tuple(map(card, kinds)), cpus=32, triton=triton)
    return Cluster(sites=(Site(name="s", hosts=(host,)),))


def task_on(cluster: Cluster, model: str = "gpt2", steps: int = 10**6, **train) -> Task:
    spec = models.presets()[model].spec
    if model == "gpt2":
        train = {"batch": 16, "seq_len": 1024} | train
    asked = {"batch": 8, "seq_len": spec.context, "precision": "bf16", "compile": "auto"} | train
    asked = {"graph": "auto"} | asked
    spec_train = TrainSpec(steps=steps, **asked)
    return Task(spec, models.graph(spec), cluster, spec_train, ENGINE)


def planned(task: Task, technique: str = "data") -> Plan:
    answer = price_technique(task, whole_cluster(task.cluster), technique)
    return answer.plan


@pytest.mark.parametrize(
    ("kind", "compiles"),
    [
        ("h100", True),
        ("a100-40", True),
        ("rtx4090", True),
        ("rtx5090", True),
        ("rtx3060", True),
        ("t4", False),
        ("rtx6000", False),
        ("v100-16", False),
        ("p100-16", False),
        ("mi300x", False),
        ("m3-max", False),
        ("cpu-amx", False),
    ],
)
def test_cards_from_ampere_on_compile_in_a_long_run(kind, compiles):
    choice = choose_compile(card(kind), msgspec.UNSET, HOUR_S)
    assert choice.value is compiles
    assert choice.reason.startswith((kind, f"nothing knows a compute capability of {kind}"))


def test_reasons_are_plain_sentences():
    turing = choose_compile(card("rtx6000"), msgspec.UNSET, HOUR_S)
    assert turing.reason == "rtx6000 has compute capability 7.5, before 8.0"
    short = choose_compile(card("h100"), True, MINUTE_S)
    assert short == (
        False,
        "the run takes about 1 min 00 s, and compiling pays from 5 min 00 s on",
    )
    without = choose_compile(card("h100"), False, HOUR_S)
    assert not without.value and "has no Triton" in without.reason
    divided = choose_compile(card("h100"), True, HOUR_S, ways=2)
    assert not divided.value and "tensor axis" in divided.reason


def test_what_was_measured_of_a_card_goes_before_the_catalogue():
    older = card("h100").but(capability=7.5)
    assert not choose_compile(older, True, HOUR_S).value
    unknown = card("mi300x").but(capability=9.0)
    assert choose_compile(unknown, True, HOUR_S).value


def test_every_nvidia_kind_of_the_catalogue_has_a_capability():
    for kind, device in catalog.load_devices().items():
        names = " ".join(device.match)
        is_nvidia = device.backend == "cuda" and "AMD" not in names
        assert isinstance(device.capability, float) == is_nvidia, kind


def test_each_device_of_a_plan_has_its_own_choice():
    plan = planned(task_on(cluster_of("a30", "a30", "t4"), precision="fp16", batch=12))
    assert [at.compile for at in plan.devices] == [True, True, False]
    assert [runs_compiled(plan, rank) for rank in range(3)] == [True, True, False]
    assert [at.graph for at in plan.devices] == [False] * 3


def test_plan_of_what_compiles_has_another_key_and_another_hash():
    eager = planned(task_on(cluster_of("h100"), steps=10))
    compiled = planned(task_on(cluster_of("h100"), steps=10**6))
    assert not runs_compiled(eager, 0) and runs_compiled(compiled, 0)
    assert plan_key(eager) != plan_key(compiled)
    assert plan_key(eager) == plan_key(planned(task_on(cluster_of("h100"), steps=11)))


def test_plan_that_asks_for_nothing_keeps_its_bytes():
    """As before there were rules: neither devices nor training have a key more."""
    cluster = cluster_of("h100", "h100")
    task = task_on(cluster, compile=False, graph=msgspec.UNSET)
    plan = planned(task)
    content = msgspec.to_builtins(plan)
    assert content["train"]["compile"] is False and "graph" not in content["train"]
    for at in content["devices"]:
        assert at.keys() == {"host", "site", "backend", "index", "threads", "kind"}
    asked = planned(task_on(cluster, compile=True, graph=msgspec.UNSET))
    assert [at.compile for at in asked.devices] == [msgspec.UNSET] * 2
    assert runs_compiled(asked, 1)


def test_cpus_train_as_before_there_were_rules():
    train = TrainSpec(steps=10, batch=8, seq_len=64, precision="fp32")
    assert settle_asked(train, cpu_cluster()) == train
    assert content_hash(settle_asked(train, cpu_cluster())) == content_hash(train)
    assert settle_asked(train, cpu_cluster(), compiled=True).compile is True
    assert settle_asked(train, cluster_of("t4")).compile == "auto"


def test_small_model_records_its_step_and_a_large_one_does_not():
    small = shape_for("llama", 3_000_000, vocab_size=8192, context=256, knobs={})
    train = TrainSpec(steps=10**6, batch=8, seq_len=256, precision="bf16", graph="auto")
    task = Task(small, models.graph(small), cluster_of("h200"), train, ENGINE)
    plan = planned(task)
    assert records_graph(plan, 0)
    assert find_graph_obstacle(plan) == ""
    large = planned(task_on(cluster_of("h200"), model="gpt2-medium", batch=16))
    assert large.devices[0].graph is False


def with_replica(plan: Plan, **changes) -> Plan:
    replica = msgspec.structs.replace(plan.replicas[0], **changes)
    return msgspec.structs.replace(plan, replicas=(replica,))


def test_what_no_graph_can_hold_is_an_obstacle():
    plan = planned(task_on(cluster_of("h100")))
    assert find_graph_obstacle(plan) == ""
    half = msgspec.structs.replace(plan.train, precision="fp16")
    assert "loss scale" in find_graph_obstacle(msgspec.structs.replace(plan, train=half))
    assert find_graph_obstacle(with_replica(plan, microbatches=4)) == ""
    two = planned(task_on(cluster_of("h100", "h100")))
    assert "2 devices" in find_graph_obstacle(two)
    here = msgspec.structs.replace(plan.devices[0], backend="cpu")
    assert "NVIDIA" in find_graph_obstacle(msgspec.structs.replace(plan, devices=(here,)))


def test_launches_decide_between_a_graph_and_none():
    plan = planned(task_on(cluster_of("h100")))
    device = card("h100")
    taken = choose_graph(plan, device, 5e-3, 1e-3)
    assert taken.value and taken.reason == (
        "launching a step's kernels takes 5 ms, their work 1 ms"
    )
    assert not choose_graph(plan, device, 1e-3, 5e-3).value
    assert not choose_graph(plan, card("mi300x"), 5e-3, 1e-3).value


def test_graph_that_is_asked_for_where_there_can_be_none_is_refused(monkeypatch):
    single = task_on(cluster_of("h100"), graph=True)
    assert planned(single).devices[0].graph is True
    two = cluster_of("h100", "h100")
    answer = price_technique(task_on(two, graph=True), whole_cluster(two), "data")
    assert answer.problem.code == "cannot-plan" and answer.problem.key == "train.graph"
    problem = refused({"train": {"graph": True}})
    assert problem.code == "out-of-range" and "train.graph" in problem.where
    gpu = cpu_cluster(kind="t4", backend="cuda", dtypes=("fp32", "fp16"))
    monkeypatch.setitem(RATE, "fp16", 3e11)
    problem = refused({"train": {"graph": True, "precision": "fp16"}}, devices=gpu)
    assert "loss scale" in problem.fact


def test_ranking_on_one_of_two_devices_still_records():
    train = task_on(cluster_of("h100", "h100"), graph=True).train
    ranking = rank_plans(
        models.presets()["gpt2"].spec, cluster_of("h100", "h100"), train, ENGINE, allow=("data",)
    )
    assert ranking.chosen == 0
    assert len(ranking.candidates[0].plan.devices) == 1


def test_explanation_names_kinds_and_reasons():
    cluster = cluster_of("a30", "t4")
    task = task_on(cluster, precision="fp16")
    answer = price_technique(task, whole_cluster(cluster), "data")
    explained = explain_modes(answer.plan, costs_of(answer.plan, cluster), answer.estimate)
    value, reason = explained["train.compile"]
    assert value == "true on a30, false on t4"
    assert reason.startswith("auto: a30 has compute capability 8.0, and the run takes about ")
    assert reason.endswith("; t4 has compute capability 7.5, before 8.0")
    assert explained["train.graph"] == (False, "auto: 2 devices exchange within a step")


def test_run_yaml_leaves_both_to_the_rules_by_default():
    asked = RunConfig(data="pydocs").train
    assert (asked.compile, asked.graph) == ("auto", "auto")
    settled = run({})
    assert settled.train.compile is False and settled.train.graph is msgspec.UNSET
    assert settled.origin["train.compile"] == "auto: cpu compiles only where run.yaml asks for it"
    assert settled.origin["train.graph"] == "auto: only an NVIDIA GPU records its step"


def test_settling_again_changes_nothing():
    task = task_on(cluster_of("a30", "t4"), precision="fp16")
    answer = price_technique(task, whole_cluster(task.cluster), "data")
    costs = costs_of(answer.plan, task.cluster)
    assert settle_modes(answer.plan, costs, answer.estimate) == answer.plan


def test_link_between_cards_of_two_hosts_changes_no_choice():
    hosts = [Host(name=f"h{i}", devices=(card("h100"),), cpus=8, triton=i == 0) for i in (0, 1)]
    sites = tuple(Site(name=f"s{i}", hosts=(hosts[i],)) for i in (0, 1))
    cluster = Cluster(sites=sites, links=(Link(a="s0", b="s1", rtt_s=0.01, bandwidth=1e9),))
    plan = planned(task_on(cluster))
    assert [at.compile for at in plan.devices] == [True, False]
