"""What a typed word is taken for: the field's synonyms, parts of names, slips of the pen, or
nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farspan.domain import catalog
from farspan.domain.clusterfile import ClusterFile, load_cluster
from farspan.domain.config import RunConfig
from farspan.domain.problems import Problem, Refusal
from farspan.domain.struct_files import convert
from farspan.domain.suggest import MIN_LIKENESS, advise, any_of, known_names, likeness, suggest
from farspan.domain.suggest_device import advise_device, suggest_device
from farspan.domain.synonyms import KEY_SYNONYMS, NOT_OFFERED, VALUE_SYNONYMS

TECHNIQUES = ("data", "diloco", "fsdp", "hsdp", "pipeshard", "shard", "zero1", "zero2")
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = ("auto", "muon", "adamw")
SCHEDULES = ("auto", "cosine", "linear", "constant", "wsd")
STORES = ("chroma", "faiss", "pgvector", "qdrant", "qdrant_server")
PRESETS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-13b", "mistral-7b", "opt-125m")
BACKENDS = ("auto", "cpu", "cuda", "mps")
LAUNCHERS = ("local", "ray", "torchrun")
CLUSTERS = ("fabric/bris-star", "fabric/gat-amst", "fabric/utah-gpn", "slm-cost/a100-40")
COMMANDS = ("demo", "init", "plan", "train", "resume", "status", "stop", "search", "serve")

#: Sixty words as people type them: where, and all that they may mean. None of the empty ones may
#: bring a likeness: each is another thing of the field, or nothing.
TYPED: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("ddp", TECHNIQUES, ("data",)),
    ("DP", TECHNIQUES, ("data",)),
    ("dta", TECHNIQUES, ("data",)),
    ("date", TECHNIQUES, ("data",)),
    ("zero3", TECHNIQUES, ("fsdp",)),
    ("FSDP2", TECHNIQUES, ("fsdp",)),
    ("fdsp", TECHNIQUES, ("fsdp",)),
    ("zero", TECHNIQUES, ("zero1", "zero2", "fsdp")),
    ("zero-2", TECHNIQUES, ("zero2",)),
    ("zerro2", TECHNIQUES, ("zero2",)),
    ("tp", TECHNIQUES, ("shard",)),
    ("tensor-parallel", TECHNIQUES, ("shard",)),
    ("pp", TECHNIQUES, ("pipeshard",)),
    ("pipeline", TECHNIQUES, ("pipeshard",)),
    ("pipeshart", TECHNIQUES, ("pipeshard",)),
    ("piepshadr", TECHNIQUES, ("pipeshard",)),
    ("local-sgd", TECHNIQUES, ("diloco",)),
    ("sdp", TECHNIQUES, ("fsdp", "hsdp")),
    ("moe", TECHNIQUES, ()),
    ("ring_attention", TECHNIQUES, ()),
    ("zero9", TECHNIQUES, ()),
    ("banana", TECHNIQUES, ()),
    ("bfloat16", PRECISIONS, ("bf16",)),
    ("BF16", PRECISIONS, ("bf16",)),
    ("half", PRECISIONS, ("fp16",)),
    ("float32", PRECISIONS, ("fp32",)),
    ("mixed", PRECISIONS, ("bf16", "fp16")),
    ("fp", PRECISIONS, ("fp32", "fp16")),
    ("fp8", PRECISIONS, ()),
    ("int8", PRECISIONS, ()),
    ("fp64", PRECISIONS, ()),
    ("fp36", PRECISIONS, ()),
    ("adam", OPTIMIZERS, ("adamw",)),
    ("adamv", OPTIMIZERS, ("adamw",)),
    ("moun", OPTIMIZERS, ("muon",)),
    ("sgd", OPTIMIZERS, ()),
    ("lion", OPTIMIZERS, ()),
    ("cos", SCHEDULES, ("cosine",)),
    ("warmup-stable-decay", SCHEDULES, ("wsd",)),
    ("polynomial", SCHEDULES, ()),
    ("postgres", STORES, ("pgvector",)),
    ("chromadb", STORES, ("chroma",)),
    ("qdrnt", STORES, ("qdrant",)),
    ("milvus", STORES, ()),
    ("gpt2-small", PRESETS, ("gpt2",)),
    ("gpt-2", PRESETS, ("gpt2",)),
    ("gpt2-medum", PRESETS, ("gpt2-medium",)),
    ("gpt3", PRESETS, ("gpt3-13b",)),
    ("bert", PRESETS, ()),
    ("gpu", BACKENDS, ("cuda",)),
    ("tpu", BACKENDS, ()),
    ("roy", LAUNCHERS, ("ray",)),
    ("slurm", LAUNCHERS, ()),
    ("gat-amst", CLUSTERS, ("fabric/gat-amst",)),
    ("fabric/gat-amts", CLUSTERS, ("fabric/gat-amst",)),
    ("a100", CLUSTERS, ("slm-cost/a100-40",)),
    ("trian", COMMANDS, ("train",)),
    ("st", COMMANDS, ("status", "stop")),
    ("kill", COMMANDS, ("stop",)),
    ("frobnicate", COMMANDS, ()),
]


@pytest.mark.parametrize(("word", "known", "meant"), TYPED, ids=[row[0] for row in TYPED])
def test_typed_word_brings_every_name_that_it_may_mean_and_no_other(
    word: str, known: tuple[str, ...], meant: tuple[str, ...]
) -> None:
    assert set(suggest(word, known)) == set(meant)


def test_sixty_words_are_typed() -> None:
    assert len({row[0] for row in TYPED}) == len(TYPED) == 60


def test_cutoff_lies_between_slips_of_the_pen_and_other_words() -> None:
    """What is a slip is at least as like as LIKE; names of other things are less."""
    slips = [("roy", "ray"), ("dta", "data"), ("nik", "nic"), ("piepshadr", "pipeshard")]
    others = [
        ("ddp", "hsdp"),
        ("fp8", "fp32"),
        ("docs", "pydocs"),
        ("pydoc", "docs"),
        ("b100", "h10"),
    ]
    assert min(likeness(*pair) for pair in slips) >= MIN_LIKENESS
    assert max(likeness(*pair) for pair in others) < MIN_LIKENESS


def test_names_that_people_choose_have_no_synonyms() -> None:
    """A file is not called otherwise by the field: `ddp` is no slip of `data`."""
    assert suggest("ddp", ["data"], synonyms=()) == ()
    assert suggest("dat", ["data", "date"], synonyms=()) == ("data", "date")
    assert suggest("pydoc", ["docs", "papers", "python"], synonyms=()) == ()
    assert suggest("test", ["latest", "attestation"], synonyms=()) == ()


@pytest.mark.parametrize(
    ("typed", "kinds"),
    [
        ("a100", ["a100-40", "a100-40-pcie", "a100-80", "a100-80-pcie"]),
        ("A100 80GB", ["a100-80", "a100-80-pcie"]),
        ("a100-sxm4", ["a100-40", "a100-80"]),
        ("A100_80", ["a100-80"]),
        ("v100", ["v100-16", "v100-16-pcie", "v100-32", "v100-32-pcie"]),
        ("V100-SXM2-32GB", ["v100-32"]),
        ("3090", ["rtx3090"]),
        ("RTX 3090 Ti", ["rtx3090ti"]),
        ("rtx-3090", ["rtx3090"]),
        ("rxt3090", ["rtx3090"]),
        ("6000 ada", ["rtx6000-ada"]),
        ("rtx600", ["rtx6000", "rtx6000-ada"]),
        ("nvidia h100 pcie", ["h100-pcie"]),
        ("GeForce RTX 3090", ["rtx3090"]),
        ("NVIDIA T4", ["t4"]),
        ("NVIDIA H200 NVL", ["h200"]),
        ("mi300", ["mi300x"]),
        ("b100", []),
        ("h800", []),
        ("4080 super", []),
        ("RTX 4090 Laptop GPU", []),
        ("gtx1080ti", []),
        ("k80", []),
        ("tpu-v4", []),
        ("rtx", []),
        ("banana", []),
        ("cpu", ["cpu-amx", "cpu-avx2", "cpu-avx512"]),
        ("cpus", ["cpu-amx", "cpu-avx2", "cpu-avx512"]),
        ("CPU, Xeon Gold", ["cpu-amx", "cpu-avx2", "cpu-avx512"]),
        ("cpu-avx", ["cpu-avx2", "cpu-avx512"]),
    ],
)
def test_device_name_brings_the_kinds_that_it_fits(typed: str, kinds: list[str]) -> None:
    assert sorted(suggest_device(typed)) == kinds


def test_kind_with_another_last_digit_is_shown_and_not_proposed() -> None:
    assert suggest_device("a31") == ()
    assert advise_device("a31") == "farspan cluster list   # among them a30"
    assert advise_device("b100") == "farspan cluster list"


def test_every_name_of_a_driver_and_of_ray_brings_its_kind_alone() -> None:
    for kind, entry in catalog.load_devices().items():
        for name in (*entry.match, *entry.labels):
            assert suggest_device(name) == (kind,), name
            assert suggest_device(name.lower()) == (kind,), name


@pytest.mark.parametrize(
    ("typed", "kinds", "rest"),
    [
        ("A100 MIG 3g.20gb", ["a100-40", "a100-40-pcie"], "memory: 20GB, share: 43%}"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", ["a100-40"], "memory: 5GB, share: 14%}"),
        ("NVIDIA H100 80GB HBM3 MIG 2g.20gb", ["h100"], "memory: 20GB, share: 29%}"),
        ("a100-80 mig-3g.40gb", ["a100-80", "a100-80-pcie"], "memory: 40GB, share: 43%}"),
        ("MIG 3g.20gb", ["a100-40", "a100-40-pcie"], "memory: 20GB, share: 43%}"),
        ("NVIDIA H200 MIG 1g.18gb", ["h200"], "memory: 18GB, share: 14%}"),
    ],
)
def test_slice_of_a_gpu_brings_the_device_that_it_is(
    typed: str, kinds: list[str], rest: str
) -> None:
    assert advise_device(typed) == "write " + " or ".join(
        f"{{kind: {kind}, {rest}" for kind in kinds
    )


def test_device_that_is_proposed_for_a_slice_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    entry = advise_device("A100 MIG 3g.20gb").removeprefix("write ").split(" or ")[0]
    file.write_text(f"sites: {{a: {{hosts: {{x: {{devices: [{entry}]}}}}}}}}\n")
    device = load_cluster(file).devices[0]
    assert (device.kind, device.memory) == ("a100-40", 20 * 10**9)


# -- keys


def key_problem(kind: type, content: object, text: str = "") -> Problem:
    with pytest.raises(Refusal) as caught:
        convert(content, kind, "the file", text)
    return caught.value.problem


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ({"learning_rate": 1}, ["train.optimizer.lr"]),
        ({"train": {"learning_rate": 1}}, ["train.optimizer.lr"]),
        ({"train": {"optimizer": {"learning_rate": 1}}}, ["train.optimizer.lr"]),
        ({"batch_size": 8}, ["train.batch.global", "train.batch.per_device"]),
        ({"bs": 8}, ["train.batch.global", "train.batch.per_device"]),
        ({"train": {"micro-batch-size": 8}}, ["train.batch.per_device"]),
        ({"seq_len": 8}, ["model.context"]),
        ({"model": {"n_embd": 8}}, ["model.d_model"]),
        ({"model": {"num_layers": 8}}, ["model.layers"]),
        ({"train": {"max_steps": 8}}, ["train.steps"]),
        ({"train": {"num_train_epochs": 8}}, ["train.epochs"]),
        ({"train": {"max_grad_norm": 1}}, ["train.optimizer.clip"]),
        ({"fp16": True}, ["train.precision"]),
        ({"parallel": {"dp": 2}}, ["parallel.technique"]),
        ({"tp": 2}, ["parallel.technique"]),
        ({"pp": 2}, ["parallel.technique"]),
        ({"num_gpus": 2}, ["parallel.workers"]),
        ({"Train": {}}, ["train"]),
        ({"time": "5m"}, ["budget.time"]),
        ({"vocab_size": 300}, ["tokenizer.vocab"]),
        ({"train": {"gradient_checkpointing": True}}, ["train.recompute"]),
        ({"zzzz": 1}, []),
    ],
)
def test_key_of_other_systems_brings_the_key_of_run_yaml(
    content: dict[str, object], keys: list[str]
) -> None:
    problem = key_problem(RunConfig, {"data": "docs", **content})
    assert problem.code == "unknown-key"
    typed = problem.what.removeprefix("unknown key ").strip("'")
    expected = f"use {' or '.join(keys)} instead of {typed}" if keys else f"remove {typed}"
    assert problem.remedy == expected


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        (
            {"sites": {}, "links": [{"between": ["a", "b"], "latency": "5ms"}]},
            "use links[0].rtt instead of links[0].latency",
        ),
        (
            {"sites": {}, "links": [{"between": ["a", "b"], "rtt": "5ms", "bw": 1}]},
            "use links[0].bandwidth instead of links[0].bw",
        ),
        (
            {"sites": {"a": {"hosts": {"x": {"gpus": ["t4"]}}}}},
            "use sites[...].hosts[...].devices instead of sites[...].hosts[...].gpus",
        ),
        (
            {"sites": {"a": {"latency": 1, "hosts": {}}}},
            "use sites[...].lan_rtt instead of sites[...].latency",
        ),
        (
            {"sites": {"a": {"hosts": {"x": {"devices": [{"type": "t4"}]}}}}},
            "use sites[...].hosts[...].devices[0].kind instead of "
            "sites[...].hosts[...].devices[0].type",
        ),
        (
            {"sites": {"a": {"hosts": {"x": {"devices": [{"kind": "t4", "vram": 1}]}}}}},
            "use sites[...].hosts[...].devices[0].memory instead of "
            "sites[...].hosts[...].devices[0].vram",
        ),
        ({"sites": {}, "egress": 1}, "use sites.NAME.egress instead of egress"),
    ],
)
def test_key_of_a_cluster_file_is_named_with_its_plain_path(content: object, fix: str) -> None:
    assert key_problem(ClusterFile, content).remedy == fix


def test_key_of_another_place_in_a_file_is_named_without_half_a_yaml() -> None:
    problem = key_problem(ClusterFile, {"sites": {}, "egress": 1}, "sites: {}\negress: 1\n")
    assert problem.remedy == "move it to sites.NAME.egress"
    problem = key_problem(RunConfig, {"data": "d", "learning_rate": 1}, "learning_rate: 1\n")
    assert problem.remedy == ("move it to train.optimizer.lr: train: {optimizer: {lr: ...}}")


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("precision", "bfloat16", "set train.precision: bf16"),
        ("precision", "fp8", "set train.precision to one of auto, fp32, tf32, bf16, fp16"),
        ("precision", "mixed", "set train.precision: bf16 or fp16"),
        ("optimizer", "adam", "set train.optimizer: adamw"),
        ("optimizer", "sgd", "set train.optimizer to one of auto, muon, adamw"),
        ("schedule", "cosine_annealing", "set train.schedule: cosine"),
        ("attention", "flash", "set train.attention: sdpa"),
    ],
)
def test_value_of_the_field_brings_what_it_is_here_or_what_there_is(
    key: str, value: str, fix: str
) -> None:
    problem = key_problem(RunConfig, {"data": "docs", "train": {key: value}})
    assert problem.remedy == fix


def test_value_that_is_not_offered_is_explained() -> None:
    problem = key_problem(RunConfig, {"data": "docs", "train": {"precision": "fp8"}})
    assert "16 or 32 bits" in problem.fact and "fp32, tf32, bf16, fp16" in problem.fact
    assert "no such store" in known_names("milvus", STORES)
    assert known_names("qdrnt", STORES) == f"known: {', '.join(STORES)}"


# -- the table, and how advice is written


def test_words_of_the_table_are_in_their_normal_form() -> None:
    rows = [words for words, _ in (*KEY_SYNONYMS, *VALUE_SYNONYMS)] + [
        group.words for group in NOT_OFFERED
    ]
    typed = [word for words in rows for word in words.split()]
    assert typed and not [word for word in typed if not re.fullmatch(r"[a-z0-9.]+", word)]


def test_advice_names_every_candidate_quoted() -> None:
    assert any_of(["a"]) == "a"
    assert any_of(["a", "b c"]) == "a or 'b c'"
    assert any_of(["a", "b", "c"], "--pick") == "--pick a, --pick b or --pick c"
    assert advise("sdp", TECHNIQUES, option="--technique") == "--technique fsdp or --technique hsdp"
    assert advise("x;rm", ["x;rm -rf"], verb="write", synonyms=()) == "write 'x;rm -rf'"
    assert advise("banana", OPTIMIZERS) == "use auto, muon or adamw"
    assert advise("banana", TECHNIQUES, fix="farspan plan") == "farspan plan"
