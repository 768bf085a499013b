"""Choose one strategy for every node of a graph at least cost: an integer linear program, by HiGHS.

    minimise    sum_i c_i . x_i  +  sum_(i,j) <C_ij, y_ij>
    subject to  choose[i]        sum_a x_ia = 1,  x binary           one strategy an operator
                from[i,j], to[i,j]   y_ij sums to x_i and x_j  (exact for binary x; Alpa,
                                     arXiv 2201.12023, eq. 1)
                memory           sum_i m_i . x_i <= cap        if a cap is given

Nodes that occur several times (repeated layers) enter once, their costs multiplied: no problem
grows with depth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: HiGHS may stop within this share of the objective: far below what any estimate resolves.
MIP_GAP = 1e-6

Costs = Sequence[Sequence[float]]
EdgeCosts = Mapping[tuple[int, int], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class StrategyChoice:
    """The chosen strategy of each node, its cost and memory, and the gap to a proven optimum."""

    picks: tuple[int, ...]
    cost: float
    memory: float
    gap: float


@dataclass(frozen=True)
class Infeasible:
    """No choice keeps the memory cap; `least_memory` is the least that any choice takes."""

    least_memory: float
    cap: float


def solve_ilp(
    costs: Costs,
    edges: EdgeCosts,
    memory: Costs | None = None,
    cap: float = math.inf,
    deadline_s: float = 10.0,
) -> StrategyChoice | Infeasible:
    """Return the cheapest choice under the cap. Infinite costs forbid a strategy.

    Raises TimeoutError where the deadline leaves no choice.
    """
    if memory is not None and cap < math.inf:
        least = 0.0
        for node_memory, node_costs in zip(memory, costs, strict=True):
            pairs = zip(node_memory, node_costs, strict=True)
            least += min(size for size, cost in pairs if cost < math.inf)
        if least > cap:
            return Infeasible(least, cap)
    picks, gap = _optimise(costs, edges, memory, cap, deadline_s)
    if picks is None:
        lightest, _ = _optimise(memory or (), _free_edges(edges), None, math.inf, deadline_s)
        return Infeasible(_sum_picked(memory or (), lightest or ()), cap)
    cost = objective(costs, edges, picks)
    return StrategyChoice(picks, cost, _sum_picked(memory or (), picks), gap)


def objective(costs: Costs, edges: EdgeCosts, picks: Sequence[int]) -> float:
    """Return the cost of a choice."""
    edge_costs = sum(matrix[picks[i]][picks[j]] for (i, j), matrix in edges.items())
    return _sum_picked(costs, picks) + edge_costs


def _sum_picked(rows: Costs, picks: Sequence[int]) -> float:
    return sum(row[pick] for row, pick in zip(rows, picks, strict=False))


def _free_edges(edges: EdgeCosts) -> dict[tuple[int, int], list[list[float]]]:
    """Return edges that cost nothing where they are allowed."""
    free = {}
    for pair, rows in edges.items():
        free[pair] = [[0.0 if cost < math.inf else cost for cost in row] for row in rows]
    return free


def _optimise(
    costs: Costs, edges: EdgeCosts, memory: Costs | None, cap: float, deadline_s: float
) -> tuple[tuple[int, ...] | None, float]:
    """Return the best pick of each node and its gap; None where there is none."""
    import highspy

    program = _Program(costs, edges)
    if memory is not None and cap < math.inf:
        pairs = zip(itertools.chain(*program.x), itertools.chain(*memory), strict=True)
        program.add_row([(column, size / cap) for column, size in pairs], -math.inf, 1.0)

    model = highspy.Highs()  # type: ignore[no-untyped-call]
    model.silent()
    model.setOptionValue("time_limit", deadline_s)
    model.setOptionValue("mip_rel_gap", MIP_GAP)
    model.setOptionValue("threads", 1)
    model.setOptionValue("random_seed", 0)
    program.load_into(model)
    model.run()

    status = model.getModelStatus()
    info = model.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None, math.inf
    if not info.primal_solution_status:
        raise TimeoutError(f"no plan within {deadline_s:g} s")
    values = model.getSolution().col_value
    picks = []
    for columns in program.x:
        node_values = [values[column] for column in columns]
        picks.append(node_values.index(max(node_values)))
    is_optimal = status == highspy.HighsModelStatus.kOptimal
    return tuple(picks), 0.0 if is_optimal else info.mip_gap


class _Program:
    """Columns and rows, loaded into HiGHS at once: one by one takes longer than the solution."""

    def __init__(self, costs: Costs, edges: EdgeCosts) -> None:
        # Costs may be microseconds: in their own scale the solver's absolute tolerances would
        # swallow them.
        finite = [0.0]
        for row in itertools.chain(costs, *edges.values()):
            finite += [abs(cost) for cost in row if cost < math.inf]
        self._scale = 1 / (max(finite) or 1.0)
        self._costs: list[float] = []
        self._rows: list[tuple[list[tuple[int, float]], float, float]] = []
        #: Columns of the choices of each node.
        self.x = [[self._add_column(cost) for cost in row] for row in costs]
        self._num_choices = len(self._costs)
        for columns in self.x:
            self.add_row([(column, 1.0) for column in columns], 1.0, 1.0)
        for (i, j), matrix in edges.items():
            y = np.array([[self._add_column(cost) for cost in row] for row in matrix])
            for column, row in zip(self.x[i], y.tolist(), strict=True):
                self._add_equal_sum(column, row)
            for column, row in zip(self.x[j], y.T.tolist(), strict=True):
                self._add_equal_sum(column, row)

    def _add_column(self, cost: float) -> int:
        self._costs.append(cost)
        return len(self._costs) - 1

    def _add_equal_sum(self, column: int, parts: list[int]) -> None:
        """Require that a column is the sum of others."""
        self.add_row([(column, -1.0), *((part, 1.0) for part in parts)], 0.0, 0.0)

    def add_row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        """Require that a sum of columns lies between two bounds."""
        self._rows.append((terms, lower, upper))

    def load_into(self, model: Any) -> None:
        """Load columns between 0 and 1 and the rows; an infinite cost keeps a column at 0."""
        no_entries = np.empty(0, dtype=np.int32)
        costs = np.array(self._costs)
        allowed = np.isfinite(costs)
        scaled = np.where(allowed, costs * self._scale, 0.0)
        lower = np.zeros(len(costs))
        upper = allowed.astype(np.float64)
        model.addCols(len(costs), scaled, lower, upper, 0, no_entries, no_entries, np.empty(0))
        # Choices are whole numbers.
        choices = np.arange(self._num_choices, dtype=np.int32)
        model.changeColsIntegrality(len(choices), choices, np.ones(len(choices), dtype=np.uint8))
        # Rows, as compressed sparse rows.
        terms = list(itertools.chain.from_iterable(row for row, _, _ in self._rows))
        lengths = [len(row) for row, _, _ in self._rows]
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int32)
        columns = np.array([column for column, _ in terms], dtype=np.int32)
        factors = np.array([factor for _, factor in terms])
        row_lower = np.array([low for _, low, _ in self._rows])
        row_upper = np.array([high for _, _, high in self._rows])
        model.addRows(len(lengths), row_lower, row_upper, len(terms), starts, columns, factors)
