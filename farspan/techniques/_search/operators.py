"""The operators of a stage over a tensor axis: a strategy for each, by integer linear
programming."""

from __future__ import annotations

import math
from collections.abc import Sequence

from farspan.domain.graph import Operator
from farspan.domain.plan import Zero
from farspan.estimate.memory import kept_per_row, state_bytes
from farspan.semantics.tensor_sharding import (
    COPY,
    RESIDUAL,
    Strategy,
    returns_to_residual,
    strategies,
    weight_share,
)
from farspan.techniques._search.ilp import Choice, Infeasible, solve
from farspan.techniques._task import Task


class Assignment:
    """The program of one stage on one kind of tensor group: nodes are the residual stream and every
    operator.

    Embedding, one block and head each enter once; the block's costs count as often as the stage has
    blocks, whose choices are thereby linked.
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
        self.names = [RESIDUAL]
        self.choices = [tuple(residual)]
        self.costs: list[list[float]] = [[0.0] * len(residual)]
        self.memory: list[list[float]] = [[0.0] * len(residual)]
        self.edges: dict[tuple[int, int], list[list[float]]] = {}
        for unit, count in task.graph.kinds(*units):
            before = 0
            for op in unit:
                node = self._add(op, unit, count)
                self._join(before, node, op, count)
                before = node
                if returns_to_residual(op):
                    self._return(node, op, count)
                    before = 0

    def _add(self, op: Operator, unit: tuple[Operator, ...], count: int) -> int:
        task = self.task
        ways = len(self.group)
        options = strategies(op, task.graph.sizes, ways, self.rows)
        device = task.costs.network.devices[self.group[0]]
        costs = []
        memory = []
        for option in options:
            # The sum with a residual stream that is copied takes longer: `_return` adds the rest.
            seconds = count * self.parts * self._op_s(op, option.split, self.choices[0][-1].split)
            own = count * sum(
                task.graph.size(w.dims) * weight_share(op, w.dims, option.split, ways)
                for w in op.weights
            )
            if option.split == "b" and own:
                width = task.engine.gradient_bytes[task.train.precision]
                seconds += task.costs.network.all_reduce_s(
                    self.group, own * width, concurrent=self.concurrent
                )
            costs.append(seconds)
            kept = kept_per_row(
                task.graph, (op,), task.train, {op.name: option.split}, ways, device.backend
            )
            state = sum(state_bytes(own, task.train, task.engine, self.zero, self.data))
            memory.append(state + count * self.in_flight * self.rows * kept)
        self.names.append(op.name)
        self.choices.append(options)
        self.costs.append(costs)
        self.memory.append(memory)
        return len(self.names) - 1

    def _join(self, before: int, node: int, op: Operator, count: int) -> None:
        """The collectives between what `before` writes and `node` reads."""
        self._edge(
            before,
            node,
            [
                [
                    self._edge_s(a.writes, b.reads, b.gradient, op.inputs[0], count)
                    for b in self.choices[node]
                ]
                for a in self.choices[before]
            ],
        )

    def _return(self, node: int, op: Operator, count: int) -> None:
        """The collectives between what `node` writes and the residual stream, and the sum with
        it."""
        divided = self.choices[0][-1].split
        rows = []
        for residual in self.choices[0]:
            row = []
            for option in self.choices[node]:
                moved_s = self._edge_s(
                    option.writes, residual.reads, residual.gradient, "bsd", count
                )
                longer_s = self._op_s(op, option.split, residual.split) - self._op_s(
                    op, option.split, divided
                )
                row.append(moved_s + count * self.parts * longer_s)
            rows.append(row)
        self._edge(0, node, rows)

    def _op_s(self, op: Operator, split: str, residual: str) -> float:
        """Seconds of the slowest device for both passes of an operator over one microbatch."""
        costs = self.task.costs
        ways = len(self.group)
        unlike = {costs.alike[rank]: rank for rank in self.group}.values()
        return max(sum(costs.op_s(rank, op, self.rows, split, ways, residual)) for rank in unlike)

    def _edge_s(self, writes: str, reads: str, gradient: str, dims: str, count: int) -> float:
        return (
            count
            * self.parts
            * sum(
                self.task.costs.edge_s(
                    self.group, writes, reads, gradient, dims, self.rows, self.concurrent
                )
            )
        )

    def _edge(self, a: int, b: int, rows: list[list[float]]) -> None:
        if (a, b) in self.edges:
            rows = [
                [x + y for x, y in zip(*pair, strict=True)]
                for pair in zip(self.edges[a, b], rows, strict=True)
            ]
        self.edges[a, b] = rows

    def solve(
        self, cap: float = math.inf, deadline_s: float = 10.0
    ) -> tuple[dict[str, str], Choice] | Infeasible:
        """The strategies by operator name, as `Stage.splits` holds them, and what they cost; or
        what memory lacks."""
        choice = solve(self.costs, self.edges, self.memory, cap, deadline_s)
        if isinstance(choice, Infeasible):
            return choice
        splits = {
            name: options[pick].split
            for name, options, pick in zip(self.names, self.choices, choice.picks, strict=True)
        }
        return {name: split for name, split in splits.items() if split}, choice
