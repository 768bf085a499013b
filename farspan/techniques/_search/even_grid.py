"""The usual grid (arXiv 2104.04473): data x tensor x pipeline, with equal stages on consecutive
devices and equal rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from farspan.domain.graph import OpGraph
from farspan.domain.plan import GradSync, Mesh, Replica, Stage, Zero
from farspan.techniques._search.one_stage import BUCKET_BYTES
from farspan.techniques._task import Task


def megatron_splits(graph: OpGraph) -> dict[str, str]:
    """Return the dim of each operator that Megatron-LM splits (arXiv 1909.08053): heads, d_ff and
    the vocabulary."""
    operators = (*graph.embedding, *graph.block, *graph.head)
    return {op.name: op.divisible for op in operators if op.divisible}


def even_splits(task: Task, counts: Sequence[int]) -> Iterator[Replica]:
    """Yield every even split with each number of microbatches of `counts`, ZeRO 0 and 1."""
    n = len(task.ranks)
    splits = megatron_splits(task.graph)
    for tensor, num_stages in itertools.product(range(1, n + 1), range(1, n + 1)):
        if not _divides_evenly(task, tensor, num_stages, splits):
            continue
        data = n // (tensor * num_stages)
        for microbatches in counts:
            if task.train.batch % (microbatches * data):
                continue
            for zero in (0, 1) if data > 1 else (0,):
                stages = _even_stages(task, data, tensor, num_stages, zero, splits)
                in_flight = [min(microbatches, num_stages - s) for s in range(num_stages)]
                yield task.replica(stages, microbatches, in_flight)


def _divides_evenly(task: Task, tensor: int, num_stages: int, splits: dict[str, str]) -> bool:
    """Return whether devices, layers and operators divide, and tensor groups are of one kind."""
    n = len(task.ranks)
    graph = task.graph
    hosts = task.costs.network.hosts
    alike = task.costs.alike
    host_size = min(hosts.count(host) for host in hosts)
    if tensor > host_size or host_size % tensor:
        return False
    if n % (tensor * num_stages) or graph.layers % num_stages:
        return False
    for dims in splits.values():
        if any(graph.sizes[dim] % tensor for dim in dims):
            return False
    for first in range(0, n, tensor):
        group = range(first, first + tensor)
        if len({(hosts[rank], alike[rank]) for rank in group}) > 1:
            return False
    return True


def _even_stages(
    task: Task, data: int, tensor: int, num_stages: int, zero: Zero, splits: dict[str, str]
) -> list[Stage]:
    rows = (task.train.batch // data,) * data
    if tensor == 1:
        splits = {}
    stages = []
    for index in range(num_stages):
        stage = Stage(
            units=_units(task.graph.layers, num_stages, index),
            mesh=_mesh(index, data, tensor),
            zero=zero,
            grad_sync=GradSync(bucket_bytes=BUCKET_BYTES),
            rows=rows,
            splits=splits,
            recompute=task.train.recompute,
        )
        stages.append(stage)
    return stages


def _units(layers: int, num_stages: int, stage: int) -> tuple[int, int]:
    blocks = layers // num_stages
    first = 1 + stage * blocks - (stage == 0)
    end = 1 + (stage + 1) * blocks + (stage == num_stages - 1)
    return first, end


def _mesh(stage: int, data: int, tensor: int) -> Mesh:
    ranks = tuple(range(stage * data * tensor, (stage + 1) * data * tensor))
    if tensor == 1:
        return Mesh(ranks=ranks, shape=(data,), axes=("data",))
    return Mesh(ranks=ranks, shape=(data, tensor), axes=("data", "tensor"))
