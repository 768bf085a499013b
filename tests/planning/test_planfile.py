"""Plans in short form: they mean the plans that farspan writes itself, and what they cannot mean is
refused by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farspan
from farspan import models, techniques
from farspan.domain.cluster import Cluster
from farspan.domain.clusterfile import load_cluster
from farspan.domain.codec import parse_yaml
from farspan.domain.engine import engine
from farspan.domain.plan import Edge, GradSync, Mesh, Plan, Replica, Stage, unsound
from farspan.domain.problems import Refusal
from farspan.estimate.price import estimate
from farspan.planning.planfile import read_short
from farspan.semantics.identity import plan_key
from farspan.techniques import Task
from farspan.techniques._search.even import even_splits
from tests.planning.short_forms import short_form
from tests.techniques.worlds import cluster, random_cluster, random_model, task

CLUSTER = """\
kinds:
  bare: {memory: 8GB, bandwidth: 100GB/s, flops: {fp32: 1e13}}
sites:
  here:
    lan: 25Gbit/s
    hosts:
      a: {devices: [{kind: t4, count: 4}]}
      b: {devices: [{kind: a30, count: 5}]}
      dark: {devices: [{kind: NVIDIA Dark, backend: cuda, memory: 8GB}, bare]}
  away: {hosts: {far: {devices: [a30]}}}
"""
PLAN: dict[str, Any] = {
    "model": "gpt2m",
    "train": {
        "batch": 64,
        "seq_len": 1024,
        "precision": "fp16",
        "attention": "sdpa",
        "recompute": False,
    },
    "stages": [
        {"layers": "0-12", "on": ["a:0-3"], "tp": 2, "dp": 2},
        {"layers": "12-24", "on": ["b:0-3"], "tp": 2, "dp": 2, "zero": 1},
    ],
    "microbatches": 8,
    "schedule": "1f1b",
}


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    path.write_text(CLUSTER)
    return load_cluster(path)


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    table = copy.deepcopy(PLAN)
    change(table)
    return table


def stage(number: int, **keys: Any) -> Callable[[dict[str, Any]], object]:
    return lambda table: table["stages"][number].update(keys)


def train(**keys: Any) -> Callable[[dict[str, Any]], object]:
    return lambda table: table["train"].update(keys)


def top(**keys: Any) -> Callable[[dict[str, Any]], object]:
    return lambda table: table.update(keys)


def replicas(*stages: dict[str, Any], **keys: Any) -> Callable[[dict[str, Any]], object]:
    """The same model in replicas of one stage each."""

    def change(table: dict[str, Any]) -> None:
        for key in ("stages", "microbatches", "schedule"):
            del table[key]
        table.update(keys, replicas=[{"stages": [one]} for one in stages])

    return change


# -- what it means
#   ------------------------------------------------------------------------------------------------


def test_short_plan_file_expands_to_the_plan_that_it_describes(there: Cluster) -> None:
    made = read_short(PLAN, "plan.yaml", there)
    names = {
        "tok": "v",
        "attn.qkv": "n",
        "attn": "n",
        "attn.out": "n",
        "mlp.up": "f",
        "mlp.act": "f",
        "mlp.down": "f",
        "head": "v",
        "loss": "v",
    }

    def wanted(units: tuple[int, int], first: int, zero: int) -> Stage:
        mesh = Mesh(ranks=tuple(range(first, first + 4)), shape=(2, 2), axes=("data", "tensor"))
        sync = GradSync(bucket_bytes=25 * 2**20)
        return Stage(units=units, mesh=mesh, rows=(32, 32), grad_sync=sync, zero=zero, splits=names)  # type: ignore[arg-type]

    assert made.replicas == (
        Replica(
            stages=(wanted((0, 13), 0, 0), wanted((13, 26), 4, 1)),
            edges=(Edge(bits=16),),
            microbatches=8,
            in_flight=(2, 1),
        ),
    )
    assert [(at.host, at.site, at.index, at.kind) for at in made.devices][3:5] == [
        ("a", "here", 3, "t4"),
        ("b", "here", 0, "a30"),
    ]
    assert made.model == models.preset("gpt2m").spec and not unsound(made)


def test_short_plan_file_takes_defaults_for_missing_keys(there: Cluster) -> None:
    least = {"model": {"layers": 2, "d_model": 64}, "train": {"batch": 10}, "stages": [{"on": "a"}]}
    made = read_short(least, "plan.yaml", there)
    (only,) = made.replicas[0].stages
    assert (only.units, only.mesh.shape, only.mesh.axes) == ((0, 4), (4,), ("data",))
    assert only.rows == (3, 3, 2, 2), "what is left of the batch goes to the first"
    assert (made.model.family, made.model.vocab_size, made.model.context, made.train.seq_len) == (
        "llama",
        32000,
        1024,
        1024,
    )
    assert (made.train.steps, made.train.precision, made.engine) == (1, "fp16", "farspan")


@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [
        ({}, (2, 1)),
        ({"schedule": "gpipe"}, (8, 8)),
        ({"in_flight": [5, 3]}, (5, 3)),
        ({"schedule": "1f1b", "microbatches": 1}, (1, 1)),
    ],
)
def test_schedules(there: Cluster, schedule: dict[str, Any], in_flight: tuple[int, ...]) -> None:
    assert (
        read_short(changed(top(**schedule)), "plan.yaml", there).replicas[0].in_flight == in_flight
    )


@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        ("opt-1.3b", {"family": "opt", "layers": 24, "vocab_size": 50272}),
        (
            {"preset": "gpt2m", "layers": 4, "heads": 8},
            {"layers": 4, "kv_heads": 8, "vocab_size": 50256},
        ),
        ({"preset": "gpt2", "vocab_size": 50304}, {"layers": 12, "vocab_size": 50304}),
        (
            {"params": "30M", "family": "gpt2", "vocab_size": 8192},
            {"family": "gpt2", "vocab_size": 8192},
        ),
        (
            {
                "family": "llama",
                "layers": 24,
                "d_model": 2048,
                "heads": 16,
                "kv_heads": 4,
                "d_ff": 5504,
                "tied": False,
            },
            {"heads": 16, "kv_heads": 4, "d_ff": 5504, "tied": False},
        ),
        ("124M", {"family": "llama"}),
    ],
)
def test_models_are_named_as_in_run_yaml(
    there: Cluster, model: object, knobs: dict[str, Any]
) -> None:
    table = changed(top(model=model, stages=[{"on": "b"}], microbatches=1))
    spec = read_short(table, "plan.yaml", there).model
    assert {name: getattr(spec, name) for name in knobs} == knobs


def test_replicas_in_a_short_plan_divide_the_batch_and_sync_at_its_interval(there: Cluster) -> None:
    apart = changed(replicas({"on": "a"}, {"on": "b:0-3", "zero": 1}, sync={"every": 30}))
    apart["replicas"][1] |= {"batch": 40, "microbatches": 2}
    made = read_short(apart, "plan.yaml", there)
    assert [replica.batch for replica in made.replicas] == [24, 40] and not unsound(made)
    assert made.sync is not None and made.sync.every == 30
    once = farspan.price(apart, there).step_s
    apart["sync"]["every"] = 300
    assert farspan.price(apart, there).step_s < once


def test_numbers_travel_between_sites_in_as_few_bits_as_asked(there: Cluster) -> None:
    table = changed(train(wan_bits=8))
    assert read_short(table, "plan.yaml", there).replicas[0].edges[0].bits == 16
    table["stages"][1] |= {"on": ["far", "b:0"], "tp": 1}
    made = read_short(table, "plan.yaml", there)
    assert made.replicas[0].edges[0].bits == 8
    assert [stage.grad_sync.bits for stage in made.replicas[0].stages] == [32, 8]


# -- the plans of techniques
#   -------------------------------------------------------------------------------------------


def same_price(asked: Task, made: Plan) -> None:
    again = read_short(short_form(made), "plan.yaml", asked.cluster)
    graph, using = models.graph(made.model), engine(made.engine)
    whole, short = (estimate(plan, graph, asked.cluster, using) for plan in (made, again))
    assert short == whole
    if all(
        axis == "data"
        for replica in made.replicas
        for one in replica.stages
        for axis in one.mesh.axes
    ):
        assert plan_key(again) == plan_key(made)


@pytest.mark.parametrize("name", techniques.names())
def test_the_short_form_of_what_a_technique_plans_prices_equal(name: str) -> None:
    priced = 0
    for seed in range(16):
        rng = random.Random(seed)
        asked = task(random_model(rng), random_cluster(rng, 6), batch=rng.choice((6, 8, 16)))
        made = techniques.plan(name, asked)
        if isinstance(made, Plan):
            same_price(asked, made)
            priced += 1
    assert priced


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]), st.data())
def test_the_short_form_of_an_even_split_prices_equal(
    seed: int, hosts: int, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    model = random_model(rng, layers=rng.choice((2, 4, 8)))
    asked = task(model, cluster(tuple(("fast",) * 4 for _ in range(hosts))), batch=32)
    splits = list(even_splits(asked, (1, 2, 4)))
    replica = data.draw(st.sampled_from(splits))
    same_price(asked, asked.plan("even", [replica]))


# -- refusals
#   ------------------------------------------------------------------------------------------------

REFUSED = [
    # Blocks left out, or twice.
    (stage(1, layers="13-24"), "plan-mismatch", "stages[1].layers", "block 12", "12-24"),
    (stage(1, layers="10-24"), "plan-mismatch", "stages[1].layers", "blocks 10 to 11", "12-24"),
    (stage(1, layers="12-20"), "plan-mismatch", "stages[1].layers", "blocks 20 to 23", "12-24"),
    (stage(0, layers="2-12"), "plan-mismatch", "stages[0].layers", "blocks 0 to 1", "0-12"),
    (stage(1, layers="12-30"), "plan-mismatch", "stages[1].layers", "0 to 23", "12-24"),
    (stage(0, layers="twelve"), "out-of-range", "stages[0].layers", "twelve", "0-24"),
    # Devices.
    (stage(1, on=["b:0-2", "a:3"]), "plan-mismatch", "stages[1].on", "a:3", "b:3"),
    (stage(1, on=["b:0-1", "b:1-2"]), "plan-mismatch", "stages[1].on", "b:1", "b:3"),
    (stage(1, on=["b:2-5"]), "out-of-range", "stages[1].on", "0 to 4", "b:2-4"),
    (stage(1, on=["b:9"]), "out-of-range", "stages[1].on", "0 to 4", "b:4"),
    (stage(1, on=["fra"]), "out-of-range", "stages[1].on", "'fra'", "far"),
    (stage(1, on=["here"]), "out-of-range", "stages[1].on", "a, b", ""),
    (stage(1, on=[]), "plan-mismatch", "stages[1].on", "no devices", "a:0"),
    # tp and dp.
    (
        stage(0, tp=3, dp=None),
        "plan-mismatch",
        "stages[0]",
        "3 does not divide 4",
        "tp: 2 and dp: 2",
    ),
    (stage(0, dp=3), "plan-mismatch", "stages[0]", "are 6", "tp: 2 and dp: 2"),
    (top(model={"preset": "gpt2m", "heads": 1}), "out-of-range", "stages[0].tp", "heads", "tp: 1"),
    (top(model={"preset": "gpt2m", "d_ff": 4097}), "out-of-range", "stages[0].tp", "d_ff", "tp: 1"),
    (top(model="gpt2-medium"), "out-of-range", "stages[0].tp", "50258 would do", "tp: 1"),
    (stage(1, on=["b"], tp=5, dp=1), "out-of-range", "stages[1].tp", "heads", "tp: 1 and dp: 5"),
    (
        top(model={"preset": "slm-1b", "layers": 24, "kv_heads": 1}),
        "out-of-range",
        "stages[0].tp",
        "kv_heads",
        "tp: 1",
    ),
    # The batch and its rows.
    (train(batch=60), "out-of-range", "train.batch", "a multiple of 16", "train.batch: 64"),
    (train(batch=3), "out-of-range", "train.batch", "a multiple of 16", "train.batch: 16"),
    (stage(0, rows=[32, 24]), "plan-mismatch", "stages[0].rows", "sum to 56", "[32, 32]"),
    (stage(0, rows=[64]), "plan-mismatch", "stages[0].rows", "dp is 2", "[32, 32]"),
    (stage(0, rows=[30, 34]), "out-of-range", "stages[0].rows", "a multiple of 8", "[32, 32]"),
    (stage(0, rows=[64, 0]), "out-of-range", "stages[0].rows", "a multiple of 8", "[32, 32]"),
    (train(batch="many"), "out-of-range", "train.batch", "many", "32 sequences"),
    (train(seq_len=2048), "out-of-range", "train.seq_len", "1024 positions", "1024"),
    # Keys and names.
    (stage(0, tpp=2), "unknown-key", "", "stages[0].tpp", "stages[0].tp"),
    (top(microbatch=8), "unknown-key", "", "'microbatch'", "microbatches"),
    (train(batchs=8), "unknown-key", "", "train.batchs", "train.batch"),
    (stage(0, splits={"tok": "f"}), "out-of-range", "stages[0].splits.tok", "'v'", ": v"),
    (stage(0, splits={"hed": "v"}), "unknown-key", "stages[0].splits.hed", "head", "head"),
    (stage(0, sites=3), "out-of-range", "stages[0].sites", "3", "2"),
    (stage(0, zero=4), "out-of-range", "", "4", "zero"),
    (top(model="gtp2m"), "out-of-range", "model", "gtp2m", "gpt2m"),
    (top(model={"layers": 3}), "out-of-range", "model.d_model", "d_model", "d_model"),
    (
        top(model={"layers": 3, "d_model": 64, "heads": 5}),
        "out-of-range",
        "model",
        "heads 5",
        "model",
    ),
    (
        top(model={"preset": "gpt2m", "params": "3M"}),
        "out-of-range",
        "model.params",
        "preset",
        "remove",
    ),
    (
        top(model={"preset": "gpt2m", "family": "llama"}),
        "out-of-range",
        "model.family",
        "gpt2",
        "remove",
    ),
    (top(model={"family": "lama", "params": "3M"}), "out-of-range", "", "lama", "llama"),
    (top(engine="alpa202"), "out-of-range", "engine", "alpa2022", "engine: alpa2022"),
    (top(schedule="1b1f"), "out-of-range", "", "1f1b", "1f1b"),
    (top(in_flight=[1]), "plan-mismatch", "in_flight", "2", "2"),
    (top(edges=[]), "plan-mismatch", "edges", "1", "edges"),
    (top(stages=[]), "plan-mismatch", "stages", "one", "stages"),
    # Devices and what they compute.
    (train(precision="bf16"), "out-of-range", "train.precision", "fp16, fp32", "fp16"),
    (stage(1, on=["dark:0"], tp=1, dp=1), "out-of-range", "train.precision", "fp32", "fp32"),
    # Replicas.
    (
        replicas({"on": "a"}, {"on": "b"}),
        "plan-mismatch",
        "sync",
        "never meet",
        "sync: {every: 100}",
    ),
    (
        top(replicas=[{"stages": [{"on": "dark:0"}]}]),
        "plan-mismatch",
        "stages",
        "beside replicas",
        "replicas",
    ),
    (
        replicas({"on": "a"}, {"on": "a:1"}, sync={"every": 2}),
        "plan-mismatch",
        "replicas[1].stages[0].on",
        "a:1",
        "b:0",
    ),
    (
        replicas(
            {"on": "a"},
            {"on": "b:0-3"},
            sync={"every": 2},
            train={"batch": 63, "precision": "fp16"},
        ),
        "plan-mismatch",
        "train.batch",
        "63",
        "train.batch: 64",
    ),
]


@pytest.mark.parametrize(("change", "code", "place", "fact", "remedy"), REFUSED)
def test_invalid_short_plan_is_refused_with_its_key_and_a_valid_alternative(
    there: Cluster,
    change: Callable[[dict[str, Any]], object],
    code: str,
    place: str,
    fact: str,
    remedy: str,
) -> None:
    with pytest.raises(Refusal) as caught:
        farspan.price(changed(change), there)
    problem = caught.value.problem
    assert problem.code == code, problem
    assert "the plan" in problem.where and place in problem.where, problem
    assert fact in f"{problem.what} {problem.fact}" and remedy in problem.remedy, problem


def test_device_of_unknown_speed_is_refused(there: Cluster) -> None:
    alone = {
        "model": "gpt2m",
        "train": {"batch": 4, "precision": "fp32"},
        "stages": [{"on": "dark:0"}],
    }
    with pytest.raises(Refusal) as caught:
        farspan.price(alone, there)
    problem = caught.value.problem
    assert (problem.code, "dark:0" in problem.where) == ("cluster-invalid", True)
    assert "flops: {fp32:" in problem.remedy
    alone["stages"] = [{"on": "dark:1"}]
    assert farspan.price(alone, there).step_s > 0


def test_sites_that_no_link_joins_are_refused_by_name(there: Cluster) -> None:
    with pytest.raises(Refusal) as caught:
        farspan.price(changed(stage(1, on=["far"], tp=1, dp=1)), there)
    problem = caught.value.problem
    assert problem.code == "cluster-invalid" and "links: {between: [" in problem.remedy
    assert "far" in problem.what and "far" in problem.remedy


def test_a_file_is_refused_with_its_line(there: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: gpt2m\ntrain: {batch: 8}\nstages:\n  - {on: a}\nmicrobatchs: 2\n")
    with pytest.raises(Refusal) as caught:
        farspan.price(path, there)
    assert caught.value.problem.where == f"{path}:5"


# -- from Python
#   ------------------------------------------------------------------------------------------------


def test_pricing_reads_the_engines_file_once_however_many_devices_there_are(
    there: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []

    def parse(text: str, where: object) -> Any:
        read.append(where)
        return parse_yaml(text, where)

    monkeypatch.setattr("farspan.domain.engine.parse_yaml", parse)
    engine.cache_clear()
    priced = farspan.price(PLAN, there)
    assert priced.fits and len(priced.devices) == 8
    assert read == ["engines/farspan.yaml"]
    # A whole plan, and one under another engine.
    farspan.price(priced.plan, there)
    farspan.price(PLAN, there, engine="torch2024")
    assert read == ["engines/farspan.yaml", "engines/torch2024.yaml"]


def test_a_plan_a_table_and_a_file_price_alike(there: Cluster, tmp_path: Path) -> None:
    table = farspan.price(PLAN, there)
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(table.plan))
    cluster_file = tmp_path / "cluster.yaml"
    cluster_file.write_text(CLUSTER)
    for other in (
        farspan.price(table.plan, there),
        farspan.price(path, cluster_file),
        farspan.price(str(path), there),
    ):
        assert other == table
    assert table.fits and table.plan.replicas[0].microbatches == 8
    assert farspan.price(PLAN, there, engine="alpa2022").step_s != table.step_s
    assert farspan.price(PLAN, there, engine="alpa2022").plan.engine == "alpa2022"
    bare = msgspec.to_builtins(table.plan)
    del bare["inputs"]
    assert farspan.price(bare, there).step_s == table.step_s, "what it was made from is not needed"


def test_a_whole_plan_for_other_devices_is_refused(there: Cluster) -> None:
    made = farspan.price(PLAN, there).plan
    with pytest.raises(Refusal) as caught:
        farspan.price(made, there.first(6))
    assert (
        caught.value.problem.code == "plan-mismatch" and "b, device 2" in caught.value.problem.fact
    )


def test_plan_that_exceeds_memory_is_priced_and_marked_as_not_fitting(there: Cluster) -> None:
    large = {
        "model": "opt-6.7b",
        "train": {"batch": 8, "precision": "fp16"},
        "stages": [{"on": "a"}],
    }
    found = farspan.price(large, there)
    assert not found.fits and max(part.total for part in found.memory) > min(found.capacity)
