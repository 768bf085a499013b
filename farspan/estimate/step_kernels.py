"""What a step of one device computes, and what launching its kernels takes: whether the host or the
device decides its time."""

from __future__ import annotations

from farspan.domain.plan import Replica
from farspan.estimate.compute import Kernels
from farspan.estimate.optimizer_update import optimizer_update_s
from farspan.estimate.stage import Costs


def step_kernels(replica: Replica, costs: Costs) -> Kernels:
    """Return the seconds of a step's kernels on the first device of a replica's first stage, and
    those of launching its passes' kernels, by the roofline alone: what was timed is the longer of
    both."""
    stage = replica.stages[0]
    rank = stage.mesh.ranks[0]
    rows = max(1, replica.micro_rows(0, 0))
    computing = 0.0
    launching = 0.0
    for unit, count in costs.graph.kinds(*stage.units):
        for op in unit:
            for kernels in costs.roofline(rank, op, rows):
                computing += count * kernels.computing
                launching += count * kernels.launching
    microbatches = replica.microbatches
    update_s = optimizer_update_s(costs, stage)
    return Kernels(microbatches * computing + update_s, microbatches * launching)
