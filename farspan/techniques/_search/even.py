"""The usual grid (arXiv 2104.04473): data x tensor x pipeline, equal stages on consecutive devices,
equal rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from farspan.domain.plan import GradSync, Mesh, Replica, Stage
from farspan.techniques._search.one_stage import BUCKET_BYTES
from farspan.techniques._task import Task


def even_splits(task: Task, counts: Sequence[int]) -> Iterator[Replica]:
    """Every even split in every number of microbatches of `counts`, ZeRO 0 and 1. Operators are
    split as Megatron-LM splits them (arXiv 1909.08053): heads, d_ff and the vocabulary."""
    n = len(task.ranks)
    graph = task.graph
    hosts = task.costs.network.hosts
    in_host = min(hosts.count(host) for host in hosts)
    megatron = {
        op.name: op.divisible
        for unit in (graph.embedding, graph.block, graph.head)
        for op in unit
        if op.divisible
    }
    for tensor, depth in itertools.product(range(1, in_host + 1), range(1, n + 1)):
        if n % (tensor * depth) or graph.layers % depth or in_host % tensor:
            continue
        if any(graph.sizes[dim] % tensor for dims in megatron.values() for dim in dims):
            continue
        # Whoever shares operators shares memory and pace: that of the first is asked for all.
        if any(
            len({(hosts[r], task.costs.alike[r]) for r in range(k, k + tensor)}) > 1
            for k in range(0, n, tensor)
        ):
            continue
        data = n // (tensor * depth)
        for parts in (count for count in counts if task.train.batch % (count * data) == 0):
            for zero in (0, 1) if data > 1 else (0,):
                sync = GradSync(bucket_bytes=BUCKET_BYTES)
                stages = [
                    Stage(
                        units=_units(graph.layers, depth, s),
                        mesh=_mesh(s, data, tensor),
                        zero=zero,
                        grad_sync=sync,
                        rows=(task.train.batch // data,) * data,
                        splits=megatron if tensor > 1 else {},
                        recompute=task.train.recompute,
                    )
                    for s in range(depth)
                ]
                yield task.replica(stages, parts, [min(parts, depth - s) for s in range(depth)])


def _units(layers: int, depth: int, stage: int) -> tuple[int, int]:
    each = layers // depth
    return 1 + stage * each - (stage == 0), 1 + (stage + 1) * each + (stage == depth - 1)


def _mesh(stage: int, data: int, tensor: int) -> Mesh:
    ranks = tuple(range(stage * data * tensor, (stage + 1) * data * tensor))
    if tensor == 1:
        return Mesh(ranks=ranks, shape=(data,), axes=("data",))
    return Mesh(ranks=ranks, shape=(data, tensor), axes=("data", "tensor"))
