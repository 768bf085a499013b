"""Muon's price against what workers hold and make: matrices by owner, and elements of parts."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from farspan import models
from farspan.domain.train import Muon
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.model.tensor_axis import TensorAxis
from farspan.runtime.state.zero_buckets import ALIGNED, ZeroDivision, divide_buckets, owned_length
from farspan.semantics.muon_matrices import (
    block_matrices,
    matrices,
    owned_matrices,
    owners,
    update_flops,
)
from tests.runtime.plans import HAND_PICKED
from tests.runtime.random_plans import random_plan

PLANS = [*HAND_PICKED.values(), *(random_plan(seed) for seed in range(30))]


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_priced_matrix_updates_equal_those_of_the_busiest_worker(number):
    """Bytes of each stage's matrices and the arithmetic of its busiest worker, as the runtime
    divides its buckets."""
    plan = PLANS[number]
    plan = replace(
        plan, train=replace(plan.train, optimizer=replace(plan.train.optimizer, muon=Muon()))
    )
    graph = models.graph(plan.model)
    whole = block_matrices(graph)
    for replica in plan.replicas:
        for stage in replica.stages:
            priced = owned_matrices(graph, stage)
            held = list[int]()
            flops = list[float]()
            for rank in stage.mesh.ranks:
                buckets, names, slices = held_by(Topology(plan, rank))
                held.append(sum(owned_length(bucket) for bucket in buckets if bucket.matrices))
                mine = [
                    names[i]
                    for bucket in buckets
                    if bucket.matrices
                    for i, start in zip(bucket.members, bucket.starts, strict=True)
                    if bucket.own.start <= start < bucket.own.stop
                ]
                cut = [name for name in mine if name in slices]
                owner = owners(
                    [round(update_flops(whole[name], 1)) for name in cut], stage.mesh.size("tensor")
                )
                made = [
                    name
                    for name, k in zip(cut, owner, strict=True)
                    if k == Topology(plan, rank).tensor
                ]
                flops.append(
                    sum(update_flops(whole[name], 1) for name in {*mine} - {*cut} | {*made})
                )
            assert priced.elements <= max(held) <= priced.elements + ALIGNED * (len(whole) + 1)
            assert sum(count * update_flops(matrix, 1) for matrix, count in priced.updated) == max(
                flops
            )


def held_by(topology: Topology):
    """A worker's buckets, the names of its parameters, and those of which it has a slice."""
    stage = topology.stage
    data = topology.group("data")
    axis = TensorAxis(None, stage.mesh.size("tensor"), topology.tensor, stage.splits)
    with torch.device("meta"):
        model = Decoder(topology.plan.model, units=stage.units, axis=axis)
    names = [name for name, _ in model.named_parameters()]
    division = ZeroDivision(
        zero=topology.zero,
        ways=len(data),
        index=data.index(topology.rank),
        bucket_bytes=stage.grad_sync.bucket_bytes,
        partial=model.partial,
        sliced=frozenset(model.slices),
        matrices=frozenset(block_matrices(models.graph(topology.plan.model))),
    )
    return (
        divide_buckets(names, [p.shape for p in model.parameters()], division),
        names,
        model.slices,
    )


@pytest.mark.parametrize("name", models.presets())
def test_the_matrices_of_a_block_are_all_that_it_multiplies_by(name):
    graph = models.graph(models.preset(name).spec)
    with torch.device("meta"):
        block = Decoder(models.preset(name).spec).blocks[0]
    found = {
        inside: tuple(parameter.shape)
        for inside, parameter in block.named_parameters()
        if parameter.dim() == 2
    }
    assert {
        inside: (matrix.rows, matrix.columns) for inside, matrix in matrices(graph).items()
    } == found
