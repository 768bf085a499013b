"""One choice for every node of a graph, at least cost: an integer linear program for HiGHS.

    minimise    sum_i c_i . x_i  +  sum_(i,j) <C_ij, y_ij>
    subject to  choose[i]        sum_a x_ia = 1,  x binary           one strategy an operator
                from[i,j], to[i,j]   y_ij sums to x_i and x_j  (exact for binary x; Alpa, arXiv 2201.12023, eq. 1)
                memory           sum_i m_i . x_i <= cap                 if a cap is given

Nodes that occur several times (repeated layers) enter once, their costs multiplied: no problem grows with depth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: A share of the objective within which HiGHS may stop: far below what any estimate resolves.
GAP = 1e-6


@dataclass(frozen=True)
class Choice:
    """The chosen strategy of each node, what it costs and fills, and how far from proven optimal it is."""

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
    costs: Sequence[Sequence[float]], edges: Mapping[tuple[int, int], Sequence[Sequence[float]]],
    memory: Sequence[Sequence[float]] | None = None, cap: float = math.inf, deadline_s: float = 10.0,
) -> Choice | Infeasible:  # fmt: skip
    """The cheapest choice under the cap. Infinite costs forbid. Raises TimeoutError where the deadline leaves none."""
    if memory is not None and cap < math.inf:
        least = sum(min(m for m, c in zip(ms, cs, strict=True) if c < math.inf)
                    for ms, cs in zip(memory, costs, strict=True))  # fmt: skip
        if least > cap:
            return Infeasible(least, cap)
    picks, gap = _optimise(costs, edges, memory, cap, deadline_s)
    if picks is None:
        fits, _ = _optimise(memory or (), _forbidden(edges), None, math.inf, deadline_s)
        return Infeasible(_sum(memory or (), fits or ()), cap)
    return Choice(picks, objective(costs, edges, picks), _sum(memory or (), picks), gap)


def objective(
    costs: Sequence[Sequence[float]], edges: Mapping[tuple[int, int], Sequence[Sequence[float]]], picks: Sequence[int]
) -> float:
    """What a choice costs."""
    return _sum(costs, picks) + sum(matrix[picks[i]][picks[j]] for (i, j), matrix in edges.items())


def _sum(rows: Sequence[Sequence[float]], picks: Sequence[int]) -> float:
    return sum(row[pick] for row, pick in zip(rows, picks, strict=False))


def _forbidden(edges: Mapping[tuple[int, int], Sequence[Sequence[float]]]) -> dict[tuple[int, int], list[list[float]]]:
    return {pair: [[0.0 if c < math.inf else c for c in row] for row in rows] for pair, rows in edges.items()}


def _optimise(
    costs: Sequence[Sequence[float]], edges: Mapping[tuple[int, int], Sequence[Sequence[float]]],
    memory: Sequence[Sequence[float]] | None, cap: float, deadline_s: float,
) -> tuple[tuple[int, ...] | None, float]:  # fmt: skip
    import highspy

    model = highspy.Highs()  # type: ignore[no-untyped-call]
    model.silent()
    for option, value in (("time_limit", deadline_s), ("mip_rel_gap", GAP), ("threads", 1), ("random_seed", 0)):
        model.setOptionValue(option, value)
    # Costs may be microseconds: in their own scale the solver's absolute tolerances would swallow them.
    finite = [abs(c) for row in costs for c in row if c < math.inf]
    finite += [abs(c) for rows in edges.values() for row in rows for c in row if c < math.inf]
    scale = 1 / max(finite, default=1.0) if max(finite, default=0.0) > 0 else 1.0

    def variable(cost: float, **kind: Any) -> Any:
        """Between 0 and 1 at this cost; an infinite cost keeps it at 0."""
        return model.addVariable(0, 0, 0, **kind) if cost == math.inf else model.addVariable(0, 1, cost * scale, **kind)

    x = [[variable(c, type=highspy.HighsVarType.kInteger) for c in row] for row in costs]
    for i, row in enumerate(x):
        model.addConstr(sum(row[1:], row[0]) == 1, f"choose[{i}]")
    for (i, j), rows in edges.items():
        y = [[variable(c) for c in row] for row in rows]
        for a, row in enumerate(y):
            model.addConstr(sum(row[1:], row[0]) == x[i][a], f"from[{i},{j},{a}]")
        for b in range(len(rows[0])):
            column = [row[b] for row in y]
            model.addConstr(sum(column[1:], column[0]) == x[j][b], f"to[{i},{j},{b}]")
    if memory is not None and cap < math.inf:
        terms = [m / cap * v for ms, row in zip(memory, x, strict=True) for m, v in zip(ms, row, strict=True)]
        model.addConstr(sum(terms[1:], terms[0]) <= 1, "memory")
    model.run()
    status, info = model.getModelStatus(), model.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None, math.inf
    if not info.primal_solution_status:
        raise TimeoutError(f"no plan within {deadline_s:g} s")
    values = model.getSolution().col_value
    picks = tuple(max(range(len(row)), key=lambda a: values[row[a].index]) for row in x)
    return picks, 0.0 if status == highspy.HighsModelStatus.kOptimal else info.mip_gap
