"""A small run folder over made-up but learnable tokens, for tests that need real workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec.structs import replace

from farspan.corpus import tokenizer as tokenizers
from farspan.corpus.token_files import checksums_of
from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.corpus import CorpusManifest, Split
from farspan.domain.model import ModelSpec
from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import content_hash, save
from farspan.domain.train import TrainSpec
from farspan.launch.launchers import launch_workers
from farspan.launch.workers import Workers

SPEC = ModelSpec(
    family="gpt2",
    layers=2,
    d_model=32,
    heads=2,
    kv_heads=2,
    d_ff=64,
    vocab_size=300,
    context=16,
    norm="layernorm",
    activation="gelu_tanh",
    positions="learned",
    bias=True,
    tied=True,
)
#: The hash of the corpus that its plans name.
CORPUS_HASH = "7e57" * 4


def corpus(
    folder: Path,
    *,
    tokens: int = 3000,
    val: int = 401,
    vocab: int = 300,
    seed: int = 0,
    documents: int = 1,
    verified: bool = False,
) -> CorpusManifest:
    """Token files in which the next token follows from the last, most of the time; the training
    split has so many documents, of unlike lengths. With `verified` its blocks have checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for name, count in (("train", tokens), ("val", val)):
        steps = np.where(rng.random(count) < 0.9, 7, rng.integers(0, vocab, count))
        (np.cumsum(steps) % vocab).astype("<u2").tofile(folder / f"{name}.bin")
        ends = (
            [count * k * k // documents**2 for k in range(documents + 1)]
            if name == "train"
            else [0, count]
        )
        np.array(ends, "<i8").tofile(folder / f"{name}.idx")
    manifest = CorpusManifest(
        hash="7e57" * 4,
        source="tests",
        vocab_size=vocab,
        end_of_text=0,
        dtype="uint16",
        train=Split(tokens=tokens, documents=documents, text_bytes=tokens * 3),
        val=Split(tokens=val, documents=1, text_bytes=val * 3),
        unigram_nats=5.7,
        bigram_nats=2.0,
        exact_duplicates=0,
        near_duplicates=0,
    )
    if verified:
        manifest = with_checksums(manifest, folder)
    save(manifest, folder / "corpus.json")
    tokenizers.train_bpe_tokenizer(["alpha beta gamma delta"] * 50, vocab).save(
        folder / "tokenizer.json"
    )
    return manifest


def with_checksums(manifest: CorpusManifest, folder: Path) -> CorpusManifest:
    """A manifest with the checksums of the token files as they are."""
    train, val = (
        replace(
            split,
            token_checksums=checksums_of(folder / f"{name}.bin"),
            offset_checksums=checksums_of(folder / f"{name}.idx"),
        )
        for name, split in (("train", manifest.train), ("val", manifest.val))
    )
    return replace(manifest, train=train, val=val)


def plan(
    train: TrainSpec, *, rows: tuple[int, ...] = (), micro_rows: int = 4, spec: ModelSpec = SPEC
) -> Plan:
    rows = rows or (train.batch,)
    mesh = Mesh(ranks=tuple(range(len(rows))), shape=(len(rows),), axes=("data",))
    stage = Stage(
        units=(0, spec.layers + 2),
        mesh=mesh,
        rows=rows,
        grad_sync=GradSync(bucket_bytes=20_000),
        recompute=train.recompute,
    )
    device = PlannedDevice(host="here", backend="cpu", index=0, threads=1)
    replica = Replica(stages=(stage,), microbatches=-(-max(rows) // micro_rows))
    return Plan(
        technique="data",
        model=spec,
        train=train,
        replicas=(replica,),
        devices=(device,) * len(rows),
        inputs=Inputs(cluster="", corpus=CORPUS_HASH),
    )


def this_machine(plan: Plan) -> Cluster:
    """The cluster that `plan` means: as many devices as it needs, on this machine."""
    device = Device(kind="cpu-avx2", backend="cpu", memory=2**30)
    host = Host(name="here", devices=(device,) * len(plan.devices), enter=())
    return Cluster(sites=(Site(name="here", hosts=(host,)),))


def run_folder(path: Path, plan: Plan) -> RunFolder:
    """A run directory as `farspan train` would make it, with the corpus beside it."""
    folder = path.parent / "corpus"
    if not folder.exists():
        corpus(folder)
    path.mkdir(parents=True)
    run = RunFolder(path)
    save(plan, run.plan)
    save(
        RunRecord(
            corpus=str(folder),
            command=("farspan", "train"),
            created="2026-01-01",
            id=content_hash(str(path)),
        ),
        run.record,
    )
    run.corpus.write_bytes((folder / "corpus.json").read_bytes())
    run.tokenizer.write_bytes((folder / "tokenizer.json").read_bytes())
    run.logs.mkdir()
    return run


def workers(run: RunFolder) -> Workers:
    """The workers of a run on this machine."""
    plan = run.load_plan()
    return launch_workers("local", plan, run, this_machine(plan))
