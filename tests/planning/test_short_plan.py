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
from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.clusterfile import load_cluster
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Edge, GradSync, Mesh, Replica, Stage, find_flaw
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import parse_yaml
from farspan.planning.short_plan import read_short_plan
from farspan.techniques._search.even_grid import even_splits
from tests.techniques.worlds import cluster, random_model, task

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
    },
    "stages": [
        {"layers": "0-12", "on": ["a:0-3"], "tp": 2, "dp": 2},
        {"layers": "12-24", "on": ["b:0-3"], "tp": 2, "dp": 2, "zero": 1},
    ],
    "microbatches": 8,
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


def shaped(preset: str, **keys: Any) -> dict[str, Any]:
    """A preset's model, as it stands in a whole plan, with other keys."""
    return {**msgspec.to_builtins(models.preset(preset).spec), **keys}


# -- what it means
#   ------------------------------------------------------------------------------------------------


def test_short_plan_file_expands_to_the_plan_that_it_describes(there: Cluster) -> None:
    made = read_short_plan(PLAN, "plan.yaml", there)
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
    assert made.model == models.preset("gpt2m").spec and not find_flaw(made)


def test_short_plan_file_takes_defaults_for_missing_keys(there: Cluster) -> None:
    least = {"model": "gpt2m", "train": {"batch": 10}, "stages": [{"on": "a"}]}
    made = read_short_plan(least, "plan.yaml", there)
    (only,) = made.replicas[0].stages
    assert (only.units, only.mesh.shape, only.mesh.axes) == ((0, 26), (4,), ("data",))
    assert only.rows == (3, 3, 2, 2), "what is left of the batch goes to the first"
    assert made.train.seq_len == made.model.context == 1024
    assert (made.train.steps, made.train.precision, made.engine) == (1, "fp16", "farspan")


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        ("opt-1.3b", models.preset("opt-1.3b").spec),
        (msgspec.to_builtins(models.preset("slm-1b").spec), models.preset("slm-1b").spec),
    ],
)
def test_a_model_is_named_or_stands_there_as_in_a_whole_plan(
    there: Cluster, model: object, spec: ModelSpec
) -> None:
    table = changed(top(model=model, stages=[{"on": "b"}], microbatches=1))
    assert read_short_plan(table, "plan.yaml", there).model == spec


def test_another_setting_is_edited_in_the_whole_plan(there: Cluster, tmp_path: Path) -> None:
    short = farspan.price(PLAN, there)
    whole = msgspec.to_builtins(short.plan)
    whole["replicas"][0]["in_flight"] = [8, 8]
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(whole))
    assert max(part.total for part in farspan.price(path, there).memory) > max(
        part.total for part in short.memory
    )


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]), st.data())
def test_the_short_form_of_an_even_split_prices_equal(
    seed: int, hosts: int, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    model = random_model(rng, layers=rng.choice((2, 4, 8)))
    asked = task(model, cluster(tuple(("fast",) * 4 for _ in range(hosts))), batch=32)
    replica = data.draw(st.sampled_from(list(even_splits(asked, (1, 2, 4)))))
    made = asked.plan("even", [replica])
    layers = made.model.layers
    train = made.train
    stages = []
    for stage in replica.stages:
        first, last = (min(max(unit - 1, 0), layers) for unit in stage.units)
        ways = stage.mesh.size("tensor")
        devices = [made.devices[rank] for rank in stage.mesh.ranks]
        stages.append(
            {
                "layers": f"{first}-{last}",
                "on": [f"{at.host}:{at.index}" for at in devices],
                "tp": ways,
                "zero": stage.zero,
                "recompute": stage.recompute,
            }
        )
    table = {
        "model": msgspec.to_builtins(model),
        "train": {"batch": train.batch, "seq_len": train.seq_len, "precision": train.precision},
        "stages": stages,
        "microbatches": replica.microbatches,
        "engine": made.engine,
    }
    again = read_short_plan(table, "plan.yaml", asked.cluster)
    one_stream = tuple(msgspec.structs.replace(edge, streams=1) for edge in replica.edges)
    assert again.replicas == (msgspec.structs.replace(replica, edges=one_stream),)


# -- refusals
#   ------------------------------------------------------------------------------------------------

REFUSED = [
    # Blocks left out, or twice.
    (stage(1, layers="13-24"), "plan-mismatch", "stages[1].layers", "block 12", "12-24"),
    (stage(1, layers="10-24"), "plan-mismatch", "stages[1].layers", "block 12", "12-24"),
    (stage(1, layers="12-20"), "plan-mismatch", "stages[1].layers", "0-24", "12-24"),
    (stage(0, layers="2-12"), "plan-mismatch", "stages[0].layers", "block 0", "0-12"),
    (stage(0, layers="0-30"), "plan-mismatch", "stages[0].layers", "0-24", "0-24"),
    (stage(1, layers="12-30"), "plan-mismatch", "stages[1].layers", "0-24", "12-24"),
    (stage(0, layers="twelve"), "out-of-range", "", "stages[0].layers", "0-12"),
    # Devices.
    (stage(1, on=["b:0-2", "a:3"]), "plan-mismatch", "stages[1].on", "a:3", "stages[1].on"),
    (stage(1, on=["b:0-1", "b:1-2"]), "plan-mismatch", "stages[1].on", "b:1-2", "stages[1].on"),
    (stage(1, on=["b:2-5"]), "out-of-range", "stages[1].on", "b:0-4", "b"),
    (stage(1, on=["b:3-1"]), "out-of-range", "stages[1].on", "b:0-4", "b"),
    (stage(1, on=["b:9"]), "out-of-range", "stages[1].on", "b:0-4", "b"),
    (stage(1, on=["fra"]), "out-of-range", "stages[1].on", "'fra'", "far"),
    (stage(1, on=["here"]), "out-of-range", "stages[1].on", "a:0-3, b:0-4", ""),
    (stage(1, on=[]), "out-of-range", "", "stages[1].on", "at least 1 value"),
    # tp and dp.
    (stage(0, tp=3, dp=None), "plan-mismatch", "stages[0].tp", "must be 4", "tp: 2 and dp: 2"),
    (stage(0, dp=3), "plan-mismatch", "stages[0].tp", "must be 4", "tp: 2 and dp: 2"),
    (
        top(model=shaped("gpt2m", heads=1, kv_heads=1)),
        "out-of-range",
        "stages[0].tp",
        "kv_heads 1",
        "tp: 1",
    ),
    (top(model=shaped("gpt2m", d_ff=4097)), "out-of-range", "stages[0].tp", "d_ff 4097", "tp: 1"),
    (top(model="gpt2-medium"), "out-of-range", "stages[0].tp", "vocab_size 50257", "tp: 1"),
    (stage(1, on=["b"], tp=5, dp=1), "out-of-range", "stages[1].tp", "heads", "tp: 1 and dp: 5"),
    # The batch.
    (train(batch=60), "out-of-range", "train.batch", "a multiple of 16", "train.batch: 64"),
    (train(batch=3), "out-of-range", "train.batch", "a multiple of 16", "train.batch: 16"),
    (train(batch="many"), "out-of-range", "train.batch", "many", "32 sequences"),
    (train(seq_len=2048), "out-of-range", "train.seq_len", "1024 positions", "1024"),
    # Keys and names.
    (stage(0, tpp=2), "unknown-key", "", "stages[0].tpp", "stages[0].tp"),
    (stage(0, rows=[32, 32]), "unknown-key", "", "stages[0].rows", ""),
    (top(microbatch=8), "unknown-key", "", "'microbatch'", "microbatches"),
    (train(batchs=8), "unknown-key", "", "train.batchs", "train.batch"),
    (stage(0, zero=4), "out-of-range", "", "4", "zero"),
    (top(model="gtp2m"), "out-of-range", "model", "gtp2m", "gpt2m"),
    (top(model={"layers": 3}), "out-of-range", "", "family", "model"),
    (top(model=shaped("gpt2m", heads=5)), "out-of-range", "", "heads 5", "model"),
    (top(model=shaped("gpt2m", family="lama")), "out-of-range", "", "lama", "llama"),
    (top(engine="alpa202"), "out-of-range", "engine", "alpa2022", "engine: alpa2022"),
    (top(stages=[]), "out-of-range", "", "stages", "at least 1 value"),
    # Devices and what they compute.
    (train(precision="bf16"), "out-of-range", "train.precision", "fp16, fp32", "fp16"),
    (stage(1, on=["dark:0"], tp=1, dp=1), "out-of-range", "train.precision", "fp32", "fp32"),
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
    load_engine.cache_clear()
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
