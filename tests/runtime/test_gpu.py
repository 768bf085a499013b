"""On one NVIDIA GPU: gradients and losses as on the CPU in float64, in fp32 and bf16, flash
attention, compiled; updates as on the CPU; a whole run by the command line, with a resume."""

from __future__ import annotations

import copy
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
from farspan.domain.results import Finished, Started, Step, Validated, read_events
from farspan.domain.run import RunFolder
from farspan.domain.train import Muon, Optimizer, Regularization, TrainSpec
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model.decoder import Decoder, drawn, load_whole
from farspan.runtime.model.dropout import Dropout
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.worker import compile_blocks
from tests import tiny

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="waits for a machine with an NVIDIA GPU"
)
#: Largest relative error of a gradient: rounding of each format, through a few layers.
BOUNDS = {"fp32": 1e-4, "bf16": 5e-2}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_on_a_gpu_equal_one_process_in_float64(precision, compiled):
    rows, spec = 4, replace(tiny.SPEC, context=64)
    train = TrainSpec(steps=1, batch=rows, seq_len=64, precision=precision, seed=1)
    stage = Stage(
        units=(0, spec.layers + 2),
        mesh=Mesh(ranks=(0,), shape=(1,), axes=("data",)),
        rows=(rows,),
        grad_sync=GradSync(bucket_bytes=20_000),
    )
    plan = Plan(
        technique="data",
        model=spec,
        train=train,
        replicas=(Replica(stages=(stage,), microbatches=2),),
        inputs=Inputs(cluster="", corpus=""),
        devices=(PlannedDevice(host="h", backend="cuda", index=0, threads=1),),
    )
    executor = Executor(Topology(plan, 0), torch.device("cuda", 0))
    executor.load(drawn(spec, 1))
    if compiled:
        compile_blocks(executor.model, torch.device("cuda", 0))
    tokens = torch.randint(spec.vocab_size, (rows, 65), generator=torch.Generator().manual_seed(0))

    def read(i: int) -> Batch:
        part = tokens[2 * i : 2 * i + 2].cuda()
        return Batch(part[:, :-1], part[:, 1:])

    outcome = executor.gradients(tokens.numpy(), read, 1 / (rows * 64))
    reference = Decoder(spec, attention="vanilla")
    for name, whole in drawn(spec, 1):
        load_whole(reference, name, whole)
    reference = copy.deepcopy(reference).double()
    logits = reference(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    assert outcome.loss / (rows * 64) == pytest.approx(float(loss), rel=BOUNDS[precision] / 10)
    exact = {name: parameter.grad for name, parameter in reference.named_parameters()}
    norm = sum(float(g.norm()) ** 2 for g in exact.values()) ** 0.5
    for i, name in enumerate(executor.state.names):
        ours = executor.state.view(executor.state.grad, i).double().cpu()
        assert float((ours - exact[name]).norm()) <= BOUNDS[precision] * (
            float(exact[name].norm()) + 1e-2 * norm
        ), name


@pytest.mark.parametrize(
    "optimizer", [Optimizer(), Optimizer(muon=Muon(embedding=3.0))], ids=["adamw", "muon"]
)
def test_three_steps_on_a_gpu_are_those_of_a_cpu(optimizer):
    rows, spec = 4, replace(tiny.SPEC, context=64)
    train = TrainSpec(
        steps=3,
        batch=rows,
        seq_len=64,
        precision="fp32",
        optimizer=optimizer,
        regularization=Regularization(dropout=0.1),
    )
    tokens = torch.randint(spec.vocab_size, (rows, 65), generator=torch.Generator().manual_seed(0))
    losses, weights = [], []
    for backend in ("cpu", "cuda"):
        stage = Stage(
            units=(0, spec.layers + 2),
            mesh=Mesh(ranks=(0,), shape=(1,), axes=("data",)),
            rows=(rows,),
            grad_sync=GradSync(bucket_bytes=20_000),
        )
        plan = Plan(
            technique="data",
            model=spec,
            train=train,
            replicas=(Replica(stages=(stage,)),),
            inputs=Inputs(cluster="", corpus=""),
            devices=(PlannedDevice(host="h", backend=backend, index=0, threads=1),),
        )
        device = torch.device(backend)
        executor = Executor(Topology(plan, 0), device)
        executor.load(drawn(spec, 1))
        dropout = Dropout(0.1, torch.arange(rows, dtype=torch.int32, device=device))
        batch = Batch(tokens[:, :-1].to(device), tokens[:, 1:].to(device), dropout)
        for step in range(1, 4):
            outcome = executor.gradients(
                tokens.numpy(), lambda i, batch=batch: batch, 1 / (rows * 64)
            )
            losses.append(outcome.loss)
            executor.update(optimizer, 1e-3, step, max(1.0, outcome.norm))
        weights.append(torch.cat([master.cpu() for master in executor.state.master]))
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-4)
    fresh = Executor(Topology(plan, 0), torch.device("cpu"))
    fresh.load(drawn(spec, 1))
    moved = weights[0] - torch.cat([master.clone() for master in fresh.state.master])
    assert float((weights[1] - weights[0]).norm()) < 1e-2 * float(moved.norm())


def test_a_run_on_a_gpu_is_stopped_resumed_embedded_and_searched(tmp_path):
    whole_run(tmp_path, "cuda", steps=600)


def whole_run(folder: Path, device: str, steps: int) -> None:
    config, run = folder / "run.yaml", folder / "run"
    config.write_text(
        "data: {source: pydocs}\nsize: tiny\ntokenizer: {vocab: 2048}\n"
        f"train: {{steps: {steps}, batch: {{global: 8 sequences}}}}\nparallel: {{device: "
        f"{device}}}\n"
    )
    farspan = [sys.executable, "-m", "farspan"]
    with open(folder / "train.log", "w") as log:
        training = subprocess.Popen(
            [*farspan, "train", str(config), "--run", str(run)], stdout=log, stderr=log
        )
    deadline = time.monotonic() + 200
    while reached(run) < steps // 4:
        assert training.poll() is None and time.monotonic() < deadline, (
            folder / "train.log"
        ).read_text()
        time.sleep(0.05)
    training.send_signal(signal.SIGINT)
    training.wait(60)
    assert RunFolder(run).load_plan().devices[0].backend == device
    stopped = reached(run)
    assert stopped < steps
    subprocess.run([*farspan, "resume", str(run)], check=True, timeout=200, capture_output=True)
    events = list(read_events(RunFolder(run).events))
    starts = [event.step for event in events if isinstance(event, Started)]
    assert starts[0] == 0 and 0 < starts[1] <= stopped
    assert [event.reason for event in events if isinstance(event, Finished)][-1] == "done"
    assert [event.loss for event in events if isinstance(event, Validated)][-1] < math.log(2048) - 1
    subprocess.run([*farspan, "embed", str(run)], check=True, timeout=200, capture_output=True)
    found = subprocess.run(
        [*farspan, "search", "--run", str(run), "sort a list"],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert "sort" in found.stdout.lower()


def reached(run: Path) -> int:
    events = RunFolder(run).events
    return (
        max((e.step for e in read_events(events) if isinstance(e, Step)), default=0)
        if events.exists()
        else 0
    )
