"""Plans for one device, and farspan's own step of one, on random tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from farspan.domain.model import ModelSpec
from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
from farspan.domain.train import TrainSpec
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model.compiled_blocks import compile_blocks
from farspan.runtime.model.decoder import initial_parameters
from farspan.runtime.model.kernel_selection import select_kernels
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.parallel.pipeline import Batch

TINY = ModelSpec(
    family="gpt2",
    layers=2,
    d_model=32,
    heads=2,
    kv_heads=2,
    d_ff=64,
    vocab_size=301,
    context=32,
    norm="layernorm",
    activation="gelu_tanh",
    positions="learned",
    bias=True,
    tied=True,
)


def plan_of(
    spec: ModelSpec, train: TrainSpec, backend: str, corpus: str = "", *, graph: bool = False
) -> Plan:
    """Return the plan of one device, whose step may be recorded as a graph."""
    stage = Stage(
        units=(0, spec.layers + 2),
        mesh=Mesh(ranks=(0,), shape=(1,), axes=("data",)),
        rows=(train.batch,),
        grad_sync=GradSync(bucket_bytes=25 * 2**20),
        recompute=train.recompute,
    )
    device = PlannedDevice(host="here", backend=backend, index=0, threads=1, graph=graph)
    return Plan(
        technique="data",
        model=spec,
        train=train,
        replicas=(Replica(stages=(stage,)),),
        inputs=Inputs(cluster="", corpus=corpus),
        devices=(device,),
    )


def random_batch(spec: ModelSpec, rows: int, device: torch.device) -> Batch:
    tokens = torch.randint(spec.vocab_size, (rows, spec.context + 1), device=device)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def farspan_step(spec: ModelSpec, train: TrainSpec, device: torch.device) -> Callable[[], None]:
    """Return the worker's step on one batch: passes, gradient norm, clipping, update."""
    torch.backends.cuda.matmul.allow_tf32 = train.precision == "tf32"
    executor = Executor(Topology(plan_of(spec, train, device.type), 0), device)
    executor.load_parameters(initial_parameters(spec, 0))
    if train.compile:
        compile_blocks(executor.model, device)
    select_kernels(executor.model, device, executor.state.dtype)
    data = random_batch(spec, train.batch, device)
    tokens = data.inputs.cpu().numpy()
    scale = 1 / (train.batch * spec.context)
    count = iter(range(1, 10**9))

    def step() -> None:
        outcome = executor.compute_gradients(tokens, lambda i: data, scale)
        executor.optimizer_step(train.optimizer, 6e-4, next(count), max(1.0, outcome.norm))

    return step
