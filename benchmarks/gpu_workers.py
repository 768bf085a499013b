"""Two workers with one card: gradients that meet on the host, which a single GPU can try.

A GPU and a CPU in one plan, two workers on the same GPU that talk by gloo (NCCL refuses one card
twice), each beside one worker alone on the same tokens; and NCCL's collectives with one rank.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_stage import Context
from msgspec.structs import replace
from torch.distributed import FileStore  # type: ignore[attr-defined]

from farspan.domain.plan import Plan, PlannedDevice
from farspan.domain.run import SECRET_VARIABLE, RunFolder
from farspan.domain.run_events import Step, read_events
from farspan.domain.train import Optimizer, TrainSpec
from tests import tiny

STEPS = 5
#: Largest relative difference of a loss from one worker's: fp32, sums in another order.
LOSS_BOUND = 1e-4
#: One worker of a plan, which speaks gloo whatever its devices are.
WORKER = """
import sys
from farspan.runtime.comm import topology, worker_group
worker_group.backend = topology.backend = lambda kinds: worker_group.GLOO
from farspan.runtime import worker
sys.exit(worker.main())
"""


def measure(context: Context) -> None:
    failed = []
    gpu = context.device.type
    alone = train(context, "alone", (gpu,))
    cases = {"a GPU and a CPU": (gpu, "cpu"), "two workers on one GPU": (gpu, gpu)}
    for zero in (0, 2, 3):
        for words, backends in cases.items():
            name = f"{words}, ZeRO {zero}" if zero else words
            losses = train(context, name, backends, zero=zero)
            difference = largest_difference(losses, alone)
            agrees = len(losses) == STEPS and difference <= LOSS_BOUND
            failed += [] if agrees else [name]
            context.row(
                {"case": name, "losses": losses, "difference": difference, "passed": agrees},
                f"{name}: {len(losses)} of {STEPS} steps, losses differ by {difference:.1e}"
                f"{'' if agrees else ', FAILED'}",
            )
    if gpu == "cuda":
        failed += [] if check_nccl(context) else ["NCCL"]
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


def train(context: Context, name: str, backends: tuple[str, ...], zero: int = 0) -> list[float]:
    """Return the losses of a few steps of a tiny model in fp32."""
    folder = context.folder / "workers" / name.replace(" ", "-").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    run = tiny.run_folder(folder, plan_of(backends, zero))
    processes = start_workers(run, len(backends))
    try:
        for process in processes:
            process.wait(max(1.0, context.left_s))
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        for log in sorted(run.logs.glob("worker-*.log")):
            print(f"{name}, {log.name}: {log.read_text()[-2000:]}", flush=True)
    events = read_events(run.events) if run.events.exists() else ()
    return [event.loss for event in events if isinstance(event, Step)]


def plan_of(backends: tuple[str, ...], zero: int) -> Plan:
    """Return a plan of data parallelism over devices of one host; those of a GPU share it."""
    train = TrainSpec(
        steps=STEPS,
        batch=8,
        seq_len=16,
        precision="fp32",
        optimizer=Optimizer(lr=1e-2),
        validate_every=1000,
        seed=3,
    )
    rows = (8,) if len(backends) == 1 else (4, 4)
    plan = tiny.plan(train, rows=rows)
    (replica,) = plan.replicas
    (stage,) = replica.stages
    devices = [
        PlannedDevice(host="here", backend=backend, index=0, threads=1) for backend in backends
    ]
    return replace(
        plan,
        replicas=(replace(replica, stages=(replace(stage, zero=zero),)),),
        devices=tuple(devices),
    )


def start_workers(run: RunFolder, world: int) -> list[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(world):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            SECRET_VARIABLE: "a secret of this stage alone",
        }
        with open(run.logs / f"worker-{rank}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(run.plan), str(run.path)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        processes.append(process)
    return processes


def largest_difference(losses: list[float], expected: list[float]) -> float:
    pairs = zip(losses, expected, strict=False)
    return max((abs(loss - other) / abs(other) for loss, other in pairs), default=float("inf"))


def check_nccl(context: Context) -> bool:
    """Run NCCL's collectives with one rank: they leave every tensor as it was."""
    store = FileStore(str(context.folder / "nccl-store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    x = torch.arange(1024.0, device=context.device)
    y = x.clone()
    dist.all_reduce(y)
    gathered = torch.empty_like(x)
    dist.all_gather_into_tensor(gathered, y)
    scattered = torch.empty_like(x)
    dist.reduce_scatter_tensor(scattered, gathered)
    dist.broadcast(scattered, 0)
    dist.destroy_process_group()
    Path(context.folder / "nccl-store").unlink(missing_ok=True)
    passed = torch.equal(scattered, x)
    context.row({"case": "NCCL alone", "passed": passed}, f"NCCL with one rank: {passed}")
    return passed
