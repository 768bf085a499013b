"""Small models as `farspan train` trains them: the Trainer with its reading, events and decisions.

A step is timed from one event to the next. Reading is timed once more by itself, on the host.
"""

from __future__ import annotations

import shutil
import statistics
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from gpu_stage import Context, profile_row, seconds
from gpu_step import TINY, plan_of

from farspan.domain.corpus import CorpusManifest, Split
from farspan.domain.epoch_fence import Epoch
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import Step, read_events
from farspan.domain.struct_files import save
from farspan.domain.train import Muon, Optimizer, TrainSpec
from farspan.planning.size import shape_for
from farspan.runtime import worker
from farspan.runtime.comm.worker_group import Group
from farspan.runtime.device import open_device
from farspan.runtime.stop_and_preemption import Launcher
from farspan.runtime.training.events import EventLog
from farspan.runtime.training.prefetch import GROUP_STEPS
from farspan.runtime.training.trainer import Trainer

#: Steps that compile, allocate and are traced: not counted.
WARMUP = 20
VOCABULARY = 8192
LENGTH = 256
#: The hash that plans of random tokens name.
RANDOM_CORPUS = "0" * 16


def measure(context: Context) -> None:
    muon = {"optimizer": Optimizer(muon=Muon())}
    cases = [
        ("3m", 3_000_000, 8, {}, False),
        ("3m", 3_000_000, 8, {}, True),
        ("3m", 3_000_000, 8, muon, False),
        ("3m", 3_000_000, 8, muon, True),
        ("3m", 3_000_000, 8, {"compile": True}, True),
        ("3m", 3_000_000, 64, {}, True),
        ("15m", 15_000_000, 32, {}, False),
        ("15m", 15_000_000, 32, {}, True),
        ("15m", 15_000_000, 32, muon, True),
    ]
    if context.dry:
        cases = cases[:4]
    steps = WARMUP + (10 if context.dry else 300)
    for number, (model, size, sequences, knobs, graph) in enumerate(cases):
        if context.dry:
            spec = TINY
        else:
            spec = shape_for("llama", size, vocab_size=VOCABULARY, context=LENGTH, knobs={})
        train = TrainSpec(
            steps=steps,
            batch=sequences,
            seq_len=spec.context,
            precision="bf16",
            validate_every=10**6,
            validate_tokens=spec.context,
            checkpoint_every_s=10**6,
            **knobs,
        )
        words = "muon" if train.optimizer.muon else "adamw"
        name = f"{model}, {sequences} x {spec.context}, {words}"
        name += ", compiled" if train.compile else ""
        name += ", graph" if graph else ""
        plan = plan_of(spec, train, context.device.type, corpus=RANDOM_CORPUS, graph=graph)
        time_trainer(context, number, name, plan)


def time_trainer(context: Context, number: int, name: str, plan: Plan) -> None:
    """Train one model in a run folder of its own; keep ms per step, and reading's part of them."""
    train = plan.train
    run = run_folder(context, number, plan)
    trainer = train_run(run)
    events = [event for event in read_events(run.events) if isinstance(event, Step)][WARMUP:]
    gaps_ms = [(b.at - a.at) * 1e3 for a, b in pairwise(events)]
    mean_ms = (events[-1].at - events[0].at) / (len(events) - 1) * 1e3
    reading_ms = seconds(lambda: read_steps(trainer), 20, context.device) * 1e3 / GROUP_STEPS
    found = {
        "case": name,
        "rows": train.batch,
        "seq_len": train.seq_len,
        "steps": len(gaps_ms),
        "step_ms": statistics.median(gaps_ms),
        "mean_ms": mean_ms,
        "slowest_tenth_ms": statistics.quantiles(gaps_ms, n=10)[-1],
        "reading_ms": reading_ms,
        "tokens_per_s": train.tokens_per_step / mean_ms * 1e3,
        "recorded": trainer.recorded is not None and trainer.recorded.recorded,
        "loss": events[-1].loss,
    }
    context.row(
        found,
        f"{name}: {found['step_ms']:.2f} ms a step (mean {mean_ms:.2f}), "
        f"of them reading {reading_ms:.2f}; {found['tokens_per_s']:,.0f} tokens/s",
    )
    profile_row(context, name, lambda: trainer._train_step(0))
    shutil.rmtree(run.path)


def train_run(run: RunFolder) -> Trainer:
    """Train a run of one device in this process to its end."""
    plan = run.load_plan()
    device = open_device(plan.devices[0], plan.train.precision)
    with EventLog(run.events) as log, Group(0, 1, device, None, lambda peer, how: None) as group:
        epoch = Epoch(number=0)
        trainer = worker.start_trainer(
            plan, run, group, log.write, Launcher(), time.monotonic(), epoch
        )
        trainer.run()
    return trainer


def read_steps(trainer: Trainer) -> None:
    """Read steps as the Trainer's thread does."""
    size = trainer.batches.layout.size
    trainer.batches.read_steps(0, [torch.zeros(size, dtype=torch.int32)] * GROUP_STEPS)


def run_folder(context: Context, number: int, plan: Plan) -> RunFolder:
    """Return a run folder over random tokens."""
    corpus = corpus_folder(context.folder / f"corpus-{plan.model.vocab_size}", plan.model)
    run = RunFolder(context.folder / f"small-{number}")
    shutil.rmtree(run.path, ignore_errors=True)
    run.logs.mkdir(parents=True)
    save(plan, run.plan)
    save(RunRecord(corpus=str(corpus), command=(), created=""), run.record)
    run.corpus.write_bytes((corpus / "corpus.json").read_bytes())
    return run


def corpus_folder(folder: Path, spec: ModelSpec, tokens: int = 2_000_000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    splits = {"train": tokens, "val": 64 * spec.context + 1}
    for name, count in splits.items():
        random.integers(0, spec.vocab_size, count).astype("<u2").tofile(folder / f"{name}.bin")
        np.array([0, count], "<i8").tofile(folder / f"{name}.idx")
    manifest = CorpusManifest(
        hash=RANDOM_CORPUS,
        source="random tokens",
        vocab_size=spec.vocab_size,
        end_of_text=0,
        dtype="uint16",
        train=Split(tokens=splits["train"], documents=1, text_bytes=3 * splits["train"]),
        val=Split(tokens=splits["val"], documents=1, text_bytes=3 * splits["val"]),
        unigram_nats=9.0,
        bigram_nats=9.0,
        exact_duplicates=0,
        near_duplicates=0,
    )
    save(manifest, folder / "corpus.json")
    return folder
