"""Run directories as the runtime leaves them, written through the real types: a learning curve,
saves, resumptions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path

import msgspec

from farspan.domain.corpus import CorpusManifest, Skipped, Split
from farspan.domain.cost import Estimate, Memory, Workload
from farspan.domain.model import ModelSpec
from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
from farspan.domain.problems import Problem
from farspan.domain.run import RunRecord
from farspan.domain.run_events import (
    Environment,
    Event,
    Finished,
    Sampled,
    Saved,
    Started,
    Step,
    Validated,
    Warned,
)
from farspan.domain.struct_files import save
from farspan.domain.train import TrainSpec

MODEL = ModelSpec(
    family="gpt2",
    layers=6,
    d_model=384,
    heads=6,
    kv_heads=6,
    d_ff=1536,
    vocab_size=8192,
    context=256,
    norm="layernorm",
    activation="gelu_tanh",
    positions="learned",
    bias=True,
    tied=True,
)
CORPUS = CorpusManifest(
    hash="9f1c2ab37de04451",
    source="pydocs",
    vocab_size=8192,
    end_of_text=0,
    dtype="uint16",
    train=Split(tokens=2_210_000, documents=31_200, text_bytes=7_190_000),
    val=Split(tokens=116_000, documents=1_640, text_bytes=379_000),
    unigram_nats=6.93,
    bigram_nats=5.21,
    exact_duplicates=410,
    near_duplicates=1_233,
    skipped=(Skipped.file("broken.pdf", "no text in it"),),
    recoded=tuple(Skipped.file(name, "read as cp1252") for name in ("cafe.txt", "thé.txt")),
)
ENVIRONMENT = Environment(
    farspan="0.1.0",
    python="3.11.9",
    torch="2.13.0",
    platform="Linux-6.1-x86_64",
    device="CPU with AMX",
    cpus=2,
    threads=2,
    memory_bytes=24 * 10**9,
    commit="4699a65",
)
MEMORY = Memory(
    weights=3e8,
    gradients=1e8,
    optimizer=2e8,
    activations=1e8,
    logits=0.0,
    buffers=0.0,
    framework=4e8,
)
ESTIMATE = Estimate(
    step_s=0.09,
    compute_s=0.08,
    communication_s=0.01,
    bubble_s=0.0,
    memory=(MEMORY,),
    interval=(0.8, 1.3),
    workload=Workload(
        steps=1300,
        tokens_per_step=2043,
        flops_per_step=9e9,
        devices=1,
        peak_flops=1e12,
        usd_per_hour=0.72,
        watts=277.0,
    ),
    assumptions=("two threads, nothing else running",),
)
START = 1_790_000_000.0


def make_plan(steps: int, world: int = 1) -> Plan:
    rows = tuple(8 // world for _ in range(world))
    mesh = Mesh(ranks=tuple(range(world)), shape=(world,), axes=("data",))
    stage = Stage(units=(0, 8), mesh=mesh, rows=rows, grad_sync=GradSync(bucket_bytes=25 * 2**20))
    return Plan(
        technique="data",
        model=MODEL,
        train=TrainSpec(steps=steps, batch=8, seq_len=256, precision="bf16"),
        replicas=(Replica(stages=(stage,)),),
        devices=tuple(
            PlannedDevice(host="localhost", backend="cpu", index=i, threads=2) for i in range(world)
        ),
        inputs=Inputs(cluster="c0ffee00c0ffee00", corpus=CORPUS.hash),
    )


def started(
    at: float, step: int = 0, plan: Plan | None = None, peak_flops: float | None = None
) -> Started:
    plan = plan or make_plan(1400)
    return Started(
        at=at,
        step=step,
        plan=plan.hash,
        world=len(plan.devices),
        environment=ENVIRONMENT,
        estimate=ESTIMATE,
        peak_flops=peak_flops,
    )


def one_step(
    at: float, step: int, *, step_s: float = 0.1, loss: float = 5.0, tokens: int = 2048
) -> Step:
    return Step(
        at=at,
        step=step,
        loss=loss,
        lr=6e-4,
        grad_norm=1.0,
        tokens=tokens,
        step_s=step_s,
        memory_bytes=10**9 + step,
    )


def train_events(
    plan: Plan, *, first: int, last: int, at: float, reason: str | None, seed: int = 0
) -> list[Event]:
    """Steps first+1 to last of a plausible run; `reason` None is a worker that was killed."""
    rng = random.Random(seed)
    steps = plan.train.steps
    begin = at
    every = max(1, steps // 14)
    events: list[Event] = [started(at, first, plan)]
    for step in range(first + 1, last + 1):
        curve = (
            4.35 + 4.7 * math.exp(-step / (steps * 0.06)) + 0.9 * math.exp(-step / (steps * 0.5))
        )
        warm = min(1.0, step / (steps * 0.05))
        lr = 6e-4 * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        step_s = 0.088 * rng.lognormvariate(0, 0.08) * (3 if step == first + 1 else 1)
        at += step_s
        memory = round(1.02e9 + 6e7 * min(1, step / (first + 40)))
        norm = 0.8 * rng.lognormvariate(0, 0.2) + 6 * math.exp(-step / (steps * 0.02))
        loss = curve + rng.gauss(0, 0.07)
        events.append(
            Step(
                at=at,
                step=step,
                loss=loss,
                lr=lr,
                grad_norm=norm,
                tokens=plan.train.tokens_per_step,
                step_s=step_s,
                memory_bytes=memory,
            )
        )
        if step % every == 0 or step == steps:
            at += 0.6
            nats = curve + 0.06
            events.append(
                Validated(
                    at=at,
                    step=step,
                    loss=nats,
                    bits_per_byte=nats / math.log(2) * 116 / 379,
                    tokens=116_000,
                    seconds=0.6,
                    best=True,
                )
            )
        if step % (every * 4) == 0 or step == steps:
            at += 0.15
            events.append(
                Saved(
                    at=at,
                    step=step,
                    path=f"checkpoints/{step:08d}",
                    size_bytes=167_000_000,
                    seconds=0.15,
                )
            )
            text = (
                f'str.join(iterable) -> str\n\nReturn a <string> & "more" at step {step}.\n'
                "```py\n>>> '</script>'```"
            )
            events.append(Sampled(at=at, step=step, prompt="str.join", text=text, verbatim=0.25))
    if reason is not None:
        problem = None
        if reason == "failed":
            problem = Problem(
                code="non-finite",
                what="the loss of a step is not finite",
                where=f"rank 0, step {last + 1}, batch 7",
                fact="loss is nan, gradient norm is inf",
                remedy="lower train.optimizer.lr to 3e-4 in run.yaml",
            )
        events.append(
            Finished(at=at, step=last, reason=reason, seconds=at - begin, problem=problem)
        )
    return events


def write_run(folder: Path, events: Iterable[Event], plan: Plan) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save(plan, folder / "plan.json")
    save(CORPUS, folder / "corpus.json")
    record = RunRecord(
        corpus="prepared/pydocs",
        command=("farspan", "train", "run.yaml"),
        created="2026-09-21T14:13:20Z",
    )
    save(record, folder / "run.json")
    (folder / "run.yaml").write_text(
        "data: pydocs   # the <built-in> corpus & nothing else\nbudget: {time: 2m}\n"
    )
    with open(folder / "events.jsonl", "wb") as file:
        file.writelines(msgspec.json.encode(event) + b"\n" for event in events)
    return folder


def resumed_run(folder: Path, steps: int = 1400) -> Path:
    """Killed after 43 % of the steps, interrupted and resumed, then finished."""
    plan = make_plan(steps)
    killed = round(steps * 0.43)
    saved = round(steps * 0.4)
    stopped = round(steps * 0.7)
    events = train_events(plan, first=0, last=killed, at=START, reason=None, seed=1)
    events += train_events(
        plan, first=saved, last=stopped, at=START + 900, reason="interrupted", seed=2
    )
    events.insert(
        -1, Warned(at=events[-1].at, message="validation uses 12 of 1,640 documents <only>")
    )
    events += train_events(plan, first=stopped, last=steps, at=START + 5000, reason="done", seed=3)
    return write_run(folder, events, plan)
