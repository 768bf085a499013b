"""On one NVIDIA GPU: gradients and losses as on the CPU in float64, in fp32 and bf16, flash attention, compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from msgspec.structs import replace

from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
from farspan.domain.train import TrainSpec
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model.decoder import Decoder, drawn, load_whole
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.worker import compile_blocks
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="waits for a machine with an NVIDIA GPU")
#: Largest relative error of a gradient: rounding of each format, through a few layers.
BOUNDS = {"fp32": 1e-4, "bf16": 5e-2}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_on_a_gpu_equal_one_process_in_float64(precision, compiled):
    rows, spec = 4, replace(tiny.SPEC, context=64)
    train = TrainSpec(steps=1, batch=rows, seq_len=64, precision=precision, seed=1)
    stage = Stage(
        units=(0, spec.layers + 2), mesh=Mesh(ranks=(0,), shape=(1,), axes=("data",)), rows=(rows,),
        grad_sync=GradSync(bucket_bytes=20_000),
    )  # fmt: skip
    plan = Plan(
        technique="data", model=spec, train=train, replicas=(Replica(stages=(stage,), microbatches=2),),
        inputs=Inputs(cluster="", corpus=""), devices=(PlannedDevice(host="h", backend="cuda", index=0, threads=1),),
    )  # fmt: skip
    executor = Executor(Topology(plan, 0), torch.device("cuda", 0))
    executor.load(drawn(spec, 1))
    if compiled:
        compile_blocks(executor.model, torch.device("cuda", 0))
    tokens = torch.randint(spec.vocab_size, (rows, 65), generator=torch.Generator().manual_seed(0))

    def read(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = tokens[2 * i : 2 * i + 2].cuda()
        return part[:, :-1], part[:, 1:]

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
        assert float((ours - exact[name]).norm()) <= BOUNDS[precision] * (float(exact[name].norm()) + 1e-2 * norm), name
