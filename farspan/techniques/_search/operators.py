"""Choose the strategy of each operator of a stage over a tensor axis (arXiv 2201.12023, eq. 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from farspan.domain.graph import Operator, OpGraph
from farspan.domain.plan import Zero
from farspan.estimate.memory import kept_per_row, state_bytes
from farspan.semantics.communications import norm_sums_bytes
from farspan.semantics.tensor_sharding import (
    COPY,
    RESIDUAL,
    Strategy,
    norms_over,
    returns_to_residual,
    strategies,
    sums_gradient,
    weight_share,
)
from farspan.techniques._search.ilp import Infeasible, StrategyChoice, solve_ilp
from farspan.techniques._task import Task


def _merge_blocks(
    graph: OpGraph, units: tuple[int, int]
) -> Iterator[tuple[tuple[Operator, ...], int]]:
    """Yield the kinds of units with their counts. Blocks of two kinds divide their operators alike,
    and count as the one that there is more of."""
    kinds = graph.kinds(*units)
    counts = [count if graph.is_block(unit) else 0 for unit, count in kinds]
    commonest = counts.index(max(counts))
    for at, (unit, count) in enumerate(kinds):
        if not graph.is_block(unit):
            yield unit, count
        elif at == commonest:
            yield unit, sum(counts)


class Assignment:
    """The integer program of one stage on one kind of tensor group.

    Nodes are the residual stream and every operator. Embedding, one block and head enter once each;
    the block's costs are multiplied by the stage's blocks, which all make the same choice.
    """

    def __init__(
        self,
        task: Task,
        units: tuple[int, int],
        group: Sequence[int],
        rows: int,
        *,
        zero: Zero = 0,
        data: int = 1,
        microbatches: int = 1,
        in_flight: int = 1,
        concurrent: int = 1,
    ) -> None:
        self.task = task
        self.units = units
        self.group = group
        self.rows = rows
        self.zero = zero
        self.data = data
        self.parts = microbatches
        self.in_flight = in_flight
        self.concurrent = concurrent
        ways = len(group)
        residual = [Strategy("", COPY, COPY, COPY)]
        if rows % ways == 0:
            residual.append(Strategy("b", "b", "b", "b"))
        self.node_names = [RESIDUAL]
        self.choices = [tuple(residual)]
        self.costs: list[list[float]] = [[0.0] * len(residual)]
        self.memory: list[list[float]] = [[0.0] * len(residual)]
        self.edges: dict[tuple[int, int], list[list[float]]] = {}
        for unit, count in _merge_blocks(task.graph, units):
            before = 0
            for op in unit:
                node = self._add_operator(op, count)
                self._add_input_edge(before, node, op, count)
                before = node
                if returns_to_residual(op):
                    self._add_residual_edge(node, op, count)
                    before = 0

    def _add_operator(self, op: Operator, count: int) -> int:
        """Add a node for `count` operators like `op`, and return its number."""
        task = self.task
        ways = len(self.group)
        options = strategies(op, task.graph.sizes, ways, self.rows)
        backend = task.costs.network.devices[self.group[0]].backend
        residual = self.choices[0][-1].split
        costs = []
        memory = []
        for option in options:
            split = option.split
            params = 0.0
            summed = 0.0
            for weight in op.weights:
                size = count * task.graph.size(weight.dims)
                params += size * weight_share(op, weight.dims, split, ways)
                if sums_gradient(op, weight.dims, split):
                    summed += size
            # The sum with a residual stream that is copied takes longer: _add_residual_edge adds
            # the rest.
            seconds = count * self.parts * self._op_s(op, split, residual)
            if norms := norms_over(op, split):
                sums = norm_sums_bytes(
                    task.graph, norms, self.rows, task.train.seq_len, task.costs.width
                )
                wait_s = task.costs.waited_s("all_reduce", self.group, sums, self.concurrent)
                seconds += 2 * count * self.parts * wait_s
            if summed:
                nbytes = summed * task.engine.gradient_bytes[task.train.precision]
                network = task.costs.network
                seconds += network.all_reduce_s(self.group, nbytes, concurrent=self.concurrent)
            costs.append(seconds)
            row_bytes = kept_per_row(task.graph, (op,), task.train, {op.name: split}, ways, backend)
            states = sum(state_bytes(params, task.train, task.engine, self.zero, self.data))
            memory.append(states + count * self.in_flight * self.rows * row_bytes)
        self.node_names.append(op.name)
        self.choices.append(options)
        self.costs.append(costs)
        self.memory.append(memory)
        return len(self.node_names) - 1

    def _add_input_edge(self, before: int, node: int, op: Operator, count: int) -> None:
        """Add the collectives between what `before` writes and `node` reads."""
        rows = []
        for source in self.choices[before]:
            row = []
            for target in self.choices[node]:
                seconds = self._edge_s(
                    source.writes, target.reads, target.gradient, op.inputs[0], count
                )
                row.append(seconds)
            rows.append(row)
        self._add_edge(before, node, rows)

    def _add_residual_edge(self, node: int, op: Operator, count: int) -> None:
        """Add the collectives between what `node` writes and the residual stream, and their sum."""
        divided = self.choices[0][-1].split
        rows = []
        for residual in self.choices[0]:
            row = []
            for option in self.choices[node]:
                moved_s = self._edge_s(
                    option.writes, residual.reads, residual.gradient, "bsd", count
                )
                added_s = self._op_s(op, option.split, residual.split)
                added_s -= self._op_s(op, option.split, divided)
                row.append(moved_s + count * self.parts * added_s)
            rows.append(row)
        self._add_edge(0, node, rows)

    def _op_s(self, op: Operator, split: str, residual: str) -> float:
        """Return seconds of the slowest device for both passes of an operator."""
        costs = self.task.costs
        ways = len(self.group)
        by_kind = {costs.alike[rank]: rank for rank in self.group}
        seconds = []
        for rank in by_kind.values():
            passes = costs.op_s(rank, op, self.rows, split, ways, residual)
            seconds.append(sum(passes))
        return max(seconds)

    def _edge_s(self, writes: str, reads: str, gradient: str, dims: str, count: int) -> float:
        passes = self.task.costs.edge_s(
            self.group, writes, reads, gradient, dims, self.rows, self.concurrent
        )
        return count * self.parts * sum(passes)

    def _add_edge(self, a: int, b: int, rows: list[list[float]]) -> None:
        known = self.edges.get((a, b))
        if known is not None:
            rows = (np.array(known) + np.array(rows)).tolist()
        self.edges[a, b] = rows

    def solve(
        self, cap: float = math.inf, deadline_s: float = 10.0
    ) -> tuple[dict[str, str], StrategyChoice] | Infeasible:
        """Return the strategies by operator name, as `Stage.splits` holds them, and their cost."""
        choice = solve_ilp(self.costs, self.edges, self.memory, cap, deadline_s)
        if isinstance(choice, Infeasible):
            return choice
        splits = {}
        for name, options, pick in zip(self.node_names, self.choices, choice.picks, strict=True):
            if options[pick].split:
                splits[name] = options[pick].split
        return splits, choice
