"""One choice for every node of a graph, at least cost: an integer linear program for HiGHS.

    minimise    sum_i c_i . x_i  +  sum_(i,j) <C_ij, y_ij>
    subject to  choose[i]        sum_a x_ia = 1,  x binary           one strategy an operator
                from[i,j], to[i,j]   y_ij sums to x_i and x_j  (exact for binary x; Alpa, arXiv
                2201.12023, eq. 1) memory           sum_i m_i . x_i <= cap                 if a cap
                is given

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

#: A share of the objective within which HiGHS may stop: far below what any estimate resolves.
GAP = 1e-6


@dataclass(frozen=True)
class Choice:
    """The chosen strategy of each node, what it costs and fills, and how far from proven optimal it
    is."""

    picks: tuple[int, ...]
    cost: float
    memory: float
    gap: float


@dataclass(frozen=True)
class Infeasible:
    """No choice keeps the memory cap; the least that any choice fills."""

    least_memory: float
    cap: float


def solve(
    costs: Sequence[Sequence[float]],
    edges: Mapping[tuple[int, int], Sequence[Sequence[float]]],
    memory: Sequence[Sequence[float]] | None = None,
    cap: float = math.inf,
    deadline_s: float = 10.0,
) -> Choice | Infeasible:
    """The cheapest choice under the cap. Infinite costs forbid. Raises TimeoutError where the
    deadline leaves none."""
    if memory is not None and cap < math.inf:
        least = sum(
            min(m for m, c in zip(ms, cs, strict=True) if c < math.inf)
            for ms, cs in zip(memory, costs, strict=True)
        )
        if least > cap:
            return Infeasible(least, cap)
    picks, gap = _optimise(costs, edges, memory, cap, deadline_s)
    if picks is None:
        fits, _ = _optimise(memory or (), _forbidden(edges), None, math.inf, deadline_s)
        return Infeasible(_sum(memory or (), fits or ()), cap)
    return Choice(picks, objective(costs, edges, picks), _sum(memory or (), picks), gap)


def objective(
    costs: Sequence[Sequence[float]],
    edges: Mapping[tuple[int, int], Sequence[Sequence[float]]],
    picks: Sequence[int],
) -> float:
    """What a choice costs."""
    return _sum(costs, picks) + sum(matrix[picks[i]][picks[j]] for (i, j), matrix in edges.items())


def _sum(rows: Sequence[Sequence[float]], picks: Sequence[int]) -> float:
    return sum(row[pick] for row, pick in zip(rows, picks, strict=False))


def _forbidden(
    edges: Mapping[tuple[int, int], Sequence[Sequence[float]]],
) -> dict[tuple[int, int], list[list[float]]]:
    return {
        pair: [[0.0 if c < math.inf else c for c in row] for row in rows]
        for pair, rows in edges.items()
    }


def _optimise(
    costs: Sequence[Sequence[float]],
    edges: Mapping[tuple[int, int], Sequence[Sequence[float]]],
    memory: Sequence[Sequence[float]] | None,
    cap: float,
    deadline_s: float,
) -> tuple[tuple[int, ...] | None, float]:
    import highspy

    program = _Program(costs, edges)
    if memory is not None and cap < math.inf:
        filled = zip(itertools.chain(*program.x), itertools.chain(*memory), strict=True)
        program.row([(x, m / cap) for x, m in filled], -math.inf, 1.0)
    model = highspy.Highs()  # type: ignore[no-untyped-call]
    model.silent()
    for option, value in (
        ("time_limit", deadline_s),
        ("mip_rel_gap", GAP),
        ("threads", 1),
        ("random_seed", 0),
    ):
        model.setOptionValue(option, value)
    program.hand_to(model)
    model.run()
    status = model.getModelStatus()
    info = model.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None, math.inf
    if not info.primal_solution_status:
        raise TimeoutError(f"no plan within {deadline_s:g} s")
    values = model.getSolution().col_value
    picks = tuple(max(range(len(row)), key=lambda a: values[row[a]]) for row in program.x)
    return picks, 0.0 if status == highspy.HighsModelStatus.kOptimal else info.mip_gap


class _Program:
    """The program's columns and rows, handed to HiGHS at once: one by one they take longer than the
    solution."""

    def __init__(
        self,
        costs: Sequence[Sequence[float]],
        edges: Mapping[tuple[int, int], Sequence[Sequence[float]]],
    ) -> None:
        # Costs may be microseconds: in their own scale the solver's absolute tolerances would
        # swallow them.
        finite = [abs(c) for row in costs for c in row if c < math.inf]
        finite += [abs(c) for rows in edges.values() for row in rows for c in row if c < math.inf]
        self._scale = 1 / max(finite, default=1.0) if max(finite, default=0.0) > 0 else 1.0
        self._costs: list[float] = []
        self._rows: list[tuple[list[tuple[int, float]], float, float]] = []
        #: Columns of the choices of each node.
        self.x = [[self._column(c) for c in row] for row in costs]
        self._choices = len(self._costs)
        for row in self.x:
            self.row([(x, 1.0) for x in row], 1.0, 1.0)
        for (i, j), matrix in edges.items():
            y = [[self._column(c) for c in row] for row in matrix]
            for a, row in enumerate(y):
                self.row([(self.x[i][a], -1.0), *((column, 1.0) for column in row)], 0.0, 0.0)
            for b, x in enumerate(self.x[j]):
                self.row([(x, -1.0), *((row[b], 1.0) for row in y)], 0.0, 0.0)

    def _column(self, cost: float) -> int:
        self._costs.append(cost)
        return len(self._costs) - 1

    def row(self, terms: list[tuple[int, float]], least: float, most: float) -> None:
        """A sum of columns between two bounds."""
        self._rows.append((terms, least, most))

    def hand_to(self, model: Any) -> None:
        """Columns between 0 and 1, choices whole; an infinite cost keeps one at 0. Then the
        rows."""
        none = np.empty(0, dtype=np.int32)
        costs = np.array(self._costs)
        possible = np.isfinite(costs)
        model.addCols(
            len(costs),
            np.where(possible, costs * self._scale, 0.0),
            np.zeros(len(costs)),
            possible.astype(np.float64),
            0,
            none,
            none,
            np.empty(0),
        )
        whole = np.arange(self._choices, dtype=np.int32)
        model.changeColsIntegrality(len(whole), whole, np.ones(len(whole), dtype=np.uint8))
        terms = [term for row, _, _ in self._rows for term in row]
        starts = np.cumsum([0, *(len(row) for row, _, _ in self._rows[:-1])], dtype=np.int32)
        columns, factors = zip(*terms, strict=True)
        _, least, most = zip(*self._rows, strict=True)
        model.addRows(
            len(self._rows),
            np.array(least),
            np.array(most),
            len(terms),
            starts,
            np.array(columns, dtype=np.int32),
            np.array(factors),
        )
