"""Plans as other systems' configurations: their numbers are the plan's, and what they cannot say is
refused by name."""

from __future__ import annotations

import ast
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farspan import models
from farspan.app.extensions import find_extensions
from farspan.app.predictions import load_exporter
from farspan.cli.main import main
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Edge, GradSync, Mesh, Plan, Replica, Stage, Sync
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import save
from farspan.domain.train import Muon, Optimizer, Schedule
from farspan.launch import clusters
from farspan.planning.plan_question import Question, model_of, train_of
from farspan.techniques import Task, technique
from farspan_exports.deepspeed import uniform
from farspan_exports.exporter import Exported
from farspan_exports.regular import evened
from farspan_exports.torchtitan import SPLITS

ENGINE = load_engine("farspan")
REPLACE = msgspec.structs.replace
SYSTEMS = sorted(find_extensions("exports"))


def export(plan: Plan, system: str) -> Exported:
    made = load_exporter(system).export(plan)
    assert isinstance(made, Exported)
    return made


def planned(name: str = "fsdp", model: str = "slm-1b", devices: int = 8, batch: int = 256) -> Plan:
    """A technique's own plan on A100s of one host."""
    cluster = clusters.find_cluster(f"slm-cost/a100-80:{devices}")
    spec = model_of(model)
    train = train_of(Question(model=model, tokens="100M", batch=str(batch)), spec, cluster)
    made = technique(name).plan(Task(spec, models.graph(spec), cluster, train, ENGINE))
    assert isinstance(made, Plan)
    return made


def stages(
    plan: Plan, *made: Stage, microbatches: int = 1, in_flight: tuple[int, ...] = (1,)
) -> Plan:
    edges = (Edge(bits=16),) * (len(made) - 1)
    replica = Replica(stages=made, edges=edges, microbatches=microbatches, in_flight=in_flight)
    return REPLACE(plan, replicas=(replica,))


def stage(
    ranks: range, shape: tuple[int, ...], axes: tuple[str, ...], rows: tuple[int, ...], **more: Any
) -> Stage:
    mesh = Mesh(ranks=tuple(ranks), shape=shape, axes=axes)  # type: ignore[arg-type]
    return Stage(mesh=mesh, rows=rows, **{"grad_sync": GradSync(bucket_bytes=25 * 2**20), **more})


def piped(plan: Plan, cuts: tuple[int, ...], **more: Any) -> Plan:
    """Two devices a stage, stages cut before these units; 1F1B over eight microbatches."""
    ends = [0, *cuts, plan.model.layers + 2]
    made = [
        stage(range(2 * i, 2 * i + 2), (2,), ("data",), (128, 128), units=(a, b), **more)
        for i, (a, b) in enumerate(itertools.pairwise(ends))
    ]
    return stages(plan, *made, microbatches=8, in_flight=tuple(range(len(made), 0, -1)))


def with_stage(plan: Plan, **more: Any) -> Plan:
    (replica,) = plan.replicas
    return REPLACE(
        plan, replicas=(REPLACE(replica, stages=tuple(REPLACE(s, **more) for s in replica.stages)),)
    )


def titan(plan: Plan) -> dict[str, Any]:
    """Keyword arguments of every call in the module, by the name of what is called."""
    tree = ast.parse(export(plan, "torchtitan").text)
    found: dict[str, Any] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for word in call.keywords:
            try:
                found[f"{ast.unparse(call.func)}.{word.arg}"] = ast.literal_eval(word.value)
            except ValueError:
                found[f"{ast.unparse(call.func)}.{word.arg}"] = ast.unparse(word.value)
    return found


# -- DeepSpeed
#   ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "level"), [("data", 0), ("zero1", 1), ("zero2", 2), ("fsdp", 3)])
def test_deepspeed_gets_the_plans_own_numbers(name: str, level: int) -> None:
    plan = evened(planned(name, "gpt2m", 4, 4096))
    config = json.loads(export(plan, "deepspeed").text)
    (replica,) = plan.replicas
    assert replica.microbatches > 1
    micro = config["train_micro_batch_size_per_gpu"]
    parts = config["gradient_accumulation_steps"]
    assert micro * parts * 4 == config["train_batch_size"] == plan.train.batch == replica.batch
    assert (micro, parts) == (replica.micro_rows(0, 0), replica.microbatches)
    assert config["zero_optimization"]["stage"] == level == replica.stages[0].zero
    assert (
        config["zero_optimization"]["reduce_bucket_size"] * 4
        == replica.stages[0].grad_sync.bucket_bytes
    )
    assert config["bf16"]["enabled"] and not config["fp16"]["enabled"]
    adam = plan.train.optimizer
    params = config["optimizer"]["params"]
    assert params == {
        "lr": adam.lr,
        "betas": [adam.beta1, adam.beta2],
        "eps": adam.eps,
        "weight_decay": adam.weight_decay,
    }
    assert config["gradient_clipping"] == adam.clip
    assert config["scheduler"]["params"]["total_num_steps"] == plan.train.steps


def test_deepspeed_export_keeps_zero_clipping_and_a_constant_schedule() -> None:
    plan = planned("fsdp", "gpt2m", 4)
    train = REPLACE(
        plan.train,
        optimizer=Optimizer(clip=0.0),
        schedule=Schedule(kind="constant", warmup_steps=10),
    )
    config = json.loads(export(REPLACE(plan, train=train), "deepspeed").text)
    assert config["gradient_clipping"] == 0.0
    assert (config["scheduler"]["type"], config["scheduler"]["params"]["warmup_num_steps"]) == (
        "WarmupLR",
        10,
    )


def test_deepspeed_pipelines_where_its_even_cuts_are_the_plans() -> None:
    plan = planned("data", "slm-1b", 8)
    units = plan.model.layers + 2
    assert uniform(units, 4) == (0, 6, 11, 16, 21) and uniform(8, 4) == (0, 2, 4, 6, 8)
    made = export(piped(plan, uniform(units, 4)[1:-1]), "deepspeed")
    config = json.loads(made.text)
    assert config["pipeline"] == {"stages": 4, "partition": "uniform"}
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (
        16,
        8,
    )
    assert 2 * 16 * 8 == config["train_batch_size"]
    assert any("num_stages=4" in note for note in made.notes)
    with pytest.raises(Refusal, match="cut before units 4, 11, 16, and its own cuts are even"):
        export(piped(plan, (4, 11, 16)), "deepspeed")
    with pytest.raises(Refusal, match="ZeRO 0 and 1, not 2"):
        export(piped(plan, uniform(units, 4)[1:-1], zero=2), "deepspeed")


# -- torchtitan
#   ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "replicate", "shard", "reshard"),
    [("data", 8, 1, None), ("zero2", 1, 8, "never"), ("fsdp", 1, 8, "always")],
)
def test_torchtitan_gets_the_plans_own_numbers(
    name: str, replicate: int, shard: int, reshard: str | None
) -> None:
    plan = planned(name)
    found = titan(plan)
    (replica,) = plan.replicas
    assert found["ParallelismConfig.data_parallel_replicate_degree"] == replicate
    assert found["ParallelismConfig.data_parallel_shard_degree"] == shard
    assert found.get("ParallelismConfig.fsdp_reshard_after_forward") == reshard
    assert found["TrainingConfig.local_batch_size"] == replica.micro_rows(0, 0)
    assert found["TrainingConfig.global_batch_size"] == plan.train.batch
    assert found["TrainingConfig.local_batch_size"] * replica.microbatches * 8 == plan.train.batch
    assert (found["TrainingConfig.seq_len"], found["TrainingConfig.steps"]) == (
        plan.train.seq_len,
        plan.train.steps,
    )
    assert found["TrainingConfig.mixed_precision_param"] == "bfloat16"
    spec = plan.model
    assert (found["dict.dim"], found["dict.n_layers"], found["dict.hidden_dim"]) == (
        spec.d_model,
        spec.layers,
        spec.d_ff,
    )
    assert (found["dict.vocab_size"], found["dict.tied"]) == (spec.vocab_size, spec.tied)
    again = "FullAC.Config()" if replica.stages[0].recompute else None
    assert found["Trainer.Config.activation_checkpoint"] == again


def test_torchtitan_cuts_a_pipeline_anywhere() -> None:
    plan = piped(planned("data"), (4, 11, 16), zero=3)
    found = titan(plan)
    parts = found["ParallelismConfig.module_fqns_per_model_part"]
    assert parts[0] == ["tok_embeddings", "layers.0", "layers.1", "layers.2"]
    assert parts[-1][-2:] == ["norm", "lm_head"] and sum(map(len, parts)) == plan.model.layers + 3
    assert found["ParallelismConfig.pipeline_parallel_degree"] == 4
    assert found["ParallelismConfig.pipeline_parallel_schedule"] == "1F1B"
    assert found["TrainingConfig.local_batch_size"] == 128
    assert found["ParallelismConfig.pipeline_parallel_microbatch_size"] == 16
    all_at_once = REPLACE(plan, replicas=(REPLACE(plan.replicas[0], in_flight=(8, 8, 8, 8)),))
    assert titan(all_at_once)["ParallelismConfig.pipeline_parallel_schedule"] == "GPipe"


def test_torchtitan_divides_operators_as_its_llama_does() -> None:
    plan = planned("data")
    mesh = {"units": (0, plan.model.layers + 2), "zero": 3}
    made = stages(
        plan,
        stage(range(8), (2, 4), ("data", "tensor"), (128, 128), splits=SPLITS, **mesh),
        microbatches=4,
    )
    found = titan(made)
    assert found["ParallelismConfig.tensor_parallel_degree"] == 4
    assert found["ParallelismConfig.data_parallel_shard_degree"] == 2
    assert found["ParallelismConfig.enable_sequence_parallel"] is False
    with pytest.raises(Refusal, match=r"divided otherwise than in its Llama: mlp.up"):
        export(with_stage(made, splits={**SPLITS, "mlp.up": ""}), "torchtitan")
    with pytest.raises(Refusal, match="divided over 4 devices"):
        export(made, "deepspeed")


# -- what neither says
#   ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYSTEMS)
def test_export_refuses_plan_features_that_the_other_system_lacks(name: str) -> None:
    plan = planned("fsdp")
    (replica,) = plan.replicas
    rows = (33, 31, *(32,) * 6)
    with pytest.raises(Refusal, match="unlike shares of a step, 31 to 33 sequences") as caught:
        export(with_stage(plan, rows=rows), name)
    assert caught.value.problem.exit_code == 40
    parts = export(REPLACE(plan, replicas=(REPLACE(replica, microbatches=5),)), name)
    assert any(
        "accumulated over 8 parts, all alike; the plan has 5" in note for note in parts.notes
    )
    for change, words in (
        (GradSync(bucket_bytes=None, topology="hierarchical"), "inside each site first"),
        (GradSync(bucket_bytes=None, bits=8), "sent in 8 bits"),
    ):
        with pytest.raises(Refusal, match=words):
            export(with_stage(plan, grad_sync=change), name)
    twice = REPLACE(plan, replicas=(replica, replica), sync=Sync(every=30))
    with pytest.raises(
        Refusal, match="2 replicas keep optimizer state of their own, which meet every 30 steps"
    ):
        export(twice, name)
    reordered = REPLACE(replica.stages[0].mesh, ranks=(1, 0, 2, 3, 4, 5, 6, 7))
    with pytest.raises(Refusal, match="no numbering of the hosts"):
        export(with_stage(plan, mesh=reordered), name)


@pytest.mark.parametrize("name", SYSTEMS)
def test_export_refuses_heterogeneous_stages(name: str) -> None:
    plan = planned("data")
    units = plan.model.layers + 2
    first = stage(range(2), (2,), ("data",), (128, 128), units=(0, 10))
    second = stage(range(2, 6), (4,), ("data",), (64,) * 4, units=(10, units), recompute=True)
    with pytest.raises(
        Refusal, match="unlike meshes: 2, 4; its stages have unlike choices of recompute"
    ):
        export(stages(plan, first, second, microbatches=8, in_flight=(2, 1)), name)
    alike = REPLACE(
        second,
        mesh=Mesh(ranks=(2, 3), shape=(2,), axes=("data",)),
        rows=(128, 128),
        recompute=False,
    )
    with pytest.raises(Refusal, match=r"1F1B"):
        export(stages(plan, first, alike, microbatches=8, in_flight=(5, 2)), name)
    even = stages(plan, first, alike, microbatches=8, in_flight=(2, 1))
    rounded = REPLACE(even.replicas[0], edges=(Edge(bits=8),))
    with pytest.raises(Refusal, match="activations between stages are sent in 8 bits"):
        export(REPLACE(even, replicas=(rounded,)), name)


def test_each_refusal_of_one_system() -> None:
    llama = planned("fsdp")
    gpt = planned("fsdp", "gpt2m", 4)
    tied: ModelSpec = REPLACE(llama.model, tied=True)
    cases = (
        ("torchtitan", gpt, "it has no gpt2 model"),
        ("torchtitan", planned("zero1"), "ZeRO 1 has no counterpart"),
        ("torchtitan", REPLACE(llama, train=REPLACE(llama.train, precision="fp16")), "not in fp16"),
        (
            "torchtitan",
            REPLACE(llama, train=REPLACE(llama.train, attention="vanilla")),
            "score matrices",
        ),
        ("torchtitan", piped(REPLACE(llama, model=tied), (6, 11, 16)), "tied embeddings"),
        (
            "deepspeed",
            REPLACE(llama, train=REPLACE(llama.train, schedule=Schedule(kind="wsd"))),
            "wsd",
        ),
        *(
            (
                name,
                REPLACE(llama, train=REPLACE(llama.train, optimizer=Optimizer(muon=Muon()))),
                "train.optimizer: adamw",
            )
            for name in ("torchtitan", "deepspeed")
        ),
    )
    for name, plan, words in cases:
        with pytest.raises(Refusal, match=words):
            export(plan, name)
    sites = stage(
        range(8), (2, 4), ("site", "data"), (32,) * 8, units=(0, llama.model.layers + 2), zero=3
    )
    assert titan(stages(llama, sites))["ParallelismConfig.data_parallel_replicate_degree"] == 2
    with pytest.raises(Refusal, match="MiCS"):
        export(stages(llama, sites), "deepspeed")


def test_every_system_is_an_entry_point_and_a_wrong_name_gets_the_nearest() -> None:
    assert SYSTEMS == ["deepspeed", "torchtitan"]
    with pytest.raises(Refusal, match="--export deepspeed"):
        export(planned("fsdp"), "deepsped")


def test_the_command_writes_the_file_of_a_plan_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(planned("fsdp"), tmp_path / "plan.json")
    words = ["price", str(tmp_path / "plan.json"), "--json"]
    export = ["--export", "torchtitan", "--export-to", str(tmp_path / "run.py")]
    assert main([*words, *export]) == 0
    answer = json.loads(capsys.readouterr().out)["export"]
    assert (
        answer["text"] == (tmp_path / "run.py").read_text()
        and answer["version"] == "torchtitan 0.3.0"
    )
