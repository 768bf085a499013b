"""NCCL asks every rank to start its collectives in one order, over all communicators.

Each rank of a plan runs a real step on a CPU, whose collectives only note that they were started,
and end after random times, as GPUs' do; so do copies to the host's memory and back. No two ranks
may start those that they share in unlike orders, and no ranks may wait for each other in a circle.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from farspan.domain.plan import Plan, row_quantum
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model.decoder import initial_parameters
from farspan.runtime.parallel import grad_sync
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.state import full_state
from tests.runtime import plans
from tests.runtime.copies import slow_copies

#: Shares of looks at which what is under way has ended.
PACES = (0.1, 0.5, 0.9)
TRIALS = 4
PLANS = plans.flat() | plans.divided() | plans.piped() | plans.apart()


class Communicator(NamedTuple):
    """Stands for a process group."""

    ranks: tuple[int, ...]
    #: Among the groups of these ranks.
    number: int

    def size(self) -> int:
        return len(self.ranks)


class Started(NamedTuple):
    """A collective that a rank has started."""

    communicator: Communicator
    kind: str


class Work:
    def __init__(self, random_: random.Random, pace: float) -> None:
        self._random = random_
        self._pace = pace

    def is_completed(self) -> bool:
        return self._random.random() < self._pace

    def wait(self) -> None:
        """It has ended."""


def pretend_collectives(
    patch: pytest.MonkeyPatch, rank: int, random_: random.Random, pace: float, ends: float = 1.0
) -> list[Started]:
    """Have collectives and messages of this rank only note that they started; return those that
    are started. Collectives are never seen to end where `ends` is 0."""
    started: list[Started] = []
    made: dict[tuple[int, ...], int] = defaultdict(int)

    def collective(kind: str, *outputs: int) -> Callable[..., Work]:
        def start(*given: Any, group: Communicator | None = None, **options: Any) -> Work:
            communicator = group or given[-1]
            assert isinstance(communicator, Communicator)
            started.append(Started(communicator, kind))
            for place in outputs:
                parts = given[place]
                for part in parts if isinstance(parts, list) else [parts]:
                    part.zero_()
            return Work(random_, ends * pace)

        return start

    def make_communicator(ranks: list[int], *given: Any, **options: Any) -> Communicator | None:
        made[tuple(ranks)] += 1
        return Communicator(tuple(ranks), made[tuple(ranks)]) if rank in ranks else None

    def receive(buffer: torch.Tensor, *given: Any, **options: Any) -> Work:
        buffer.zero_()
        return Work(random_, pace)

    is_complete = grad_sync._is_complete

    def looked_at(wait: Any, in_stream: bool) -> bool:
        if isinstance(wait, grad_sync._StreamWait):
            return is_complete(wait, in_stream)
        return is_complete(wait, in_stream) and random_.random() < pace

    patch.setattr(dist, "all_reduce", collective("all_reduce"))
    patch.setattr(dist, "reduce", collective("reduce"))
    patch.setattr(dist, "broadcast", collective("broadcast"))
    patch.setattr(dist, "reduce_scatter", collective("reduce_scatter", 0))
    patch.setattr(dist, "reduce_scatter_tensor", collective("reduce_scatter", 0))
    patch.setattr(dist, "all_gather", collective("all_gather", 0))
    patch.setattr(dist, "all_gather_into_tensor", collective("all_gather", 0))
    patch.setattr(dist, "all_to_all", collective("all_to_all", 0))
    patch.setattr(dist, "isend", lambda *given, **options: Work(random_, 1.0))
    patch.setattr(dist, "irecv", receive)
    patch.setattr(grad_sync, "_is_complete", looked_at)
    # What waits for copies has threads of its own, which get the interpreter's lock meanwhile.
    patch.setattr(grad_sync.time, "sleep", lambda seconds, sleep=time.sleep: sleep(0))
    patch.setattr(dist, "new_group", make_communicator)
    patch.setattr(dist, "ProcessGroup", Communicator)
    patch.setattr(full_state, "all_gather_bytes", lambda own, rank, world: [own] * world)
    return started


def tokens_of(topology: Topology, microbatch: int) -> torch.Tensor:
    """Return tokens of as many sequences as this rank reads of a microbatch."""
    samples = topology.samples_by_microbatch(0)[microbatch]
    # A worker without rows computes with the fewest, which count for nothing.
    rows = len(samples) or row_quantum(topology.mesh, topology.stage.splits)
    return torch.zeros(rows, topology.plan.train.seq_len, dtype=torch.int64)


def start_step(plan: Plan, rank: int, seed: int, pace: float, ends: float = 1.0) -> list[Started]:
    """Return the collectives that a rank starts in a step, in order; those of NCCL are never seen
    to end where `ends` is 0."""
    random_ = random.Random(seed)
    with slow_copies(seed, pace) as copies, pytest.MonkeyPatch.context() as patch:
        started = pretend_collectives(patch, rank, random_, pace, ends)
        patch.setattr(Topology, "device", "cpu")
        topology = Topology(plan, rank)
        executor = Executor(topology, torch.device("cpu"))
        executor.load_parameters(initial_parameters(plan.model, 0))

        def read(microbatch: int) -> Batch:
            tokens = tokens_of(topology, microbatch)
            return Batch(tokens, tokens)

        count = len(topology.replica_samples(0))
        executor.compute_gradients(np.zeros((count, plan.train.seq_len), np.int64), read, 1.0)
        executor.messenger.close()
        assert not any(engine.changed for engine in copies())
    return started


def find_unlike_orders(logs: dict[int, list[Started]]) -> list[tuple[int, int]]:
    """Return the pairs of ranks that start what they share in unlike orders."""
    unlike = []
    for a, b in itertools.combinations(logs, 2):
        shared = []
        for log in (logs[a], logs[b]):
            both = [one for one in log if {a, b} <= set(one.communicator.ranks)]
            shared.append(both)
        if shared[0] != shared[1]:
            unlike.append((a, b))
    return unlike


def has_circle(logs: dict[int, list[Started]]) -> bool:
    """Return whether ranks that run collectives one after another would wait in a circle."""
    followers: dict[tuple[Communicator, int], set[Any]] = defaultdict(set)
    for log in logs.values():
        counts: dict[Communicator, int] = defaultdict(int)
        before = None
        for one in log:
            node = (one.communicator, counts[one.communicator])
            counts[one.communicator] += 1
            followers[node]
            if before is not None:
                followers[before].add(node)
            before = node
    # Those without anybody before them are taken away, until none is left or all are in circles.
    waiting = dict.fromkeys(followers, 0)
    for nodes in followers.values():
        for node in nodes:
            waiting[node] += 1
    free = [node for node, count in waiting.items() if count == 0]
    taken = 0
    while free:
        taken += 1
        for node in followers[free.pop()]:
            waiting[node] -= 1
            if waiting[node] == 0:
                free.append(node)
    return taken < len(followers)


def logs_of(plan: Plan, seed: int, ends: float = 1.0) -> dict[int, list[Started]]:
    """Return what each rank of a plan starts, whose workers all compute on GPUs."""
    devices = [msgspec.structs.replace(device, backend="cuda") for device in plan.devices]
    # Replicas exchange by messages, not by collectives.
    plan = msgspec.structs.replace(plan, devices=tuple(devices), sync=None)
    logs = {}
    for rank in range(len(devices)):
        pace = PACES[(seed + rank) % len(PACES)]
        logs[rank] = start_step(plan, rank, 1000 * seed + rank, pace, ends)
    return logs


@pytest.mark.parametrize("name", PLANS)
def test_ranks_start_their_collectives_in_one_order(name):
    for seed in range(TRIALS):
        logs = logs_of(PLANS[name], seed)
        assert find_unlike_orders(logs) == []
        assert not has_circle(logs)


@pytest.mark.parametrize("name", PLANS)
def test_the_host_never_waits_until_a_sum_of_nccl_has_ended(name):
    logs = logs_of(PLANS[name], 0, ends=0.0)
    assert find_unlike_orders(logs) == []
    assert not has_circle(logs)
