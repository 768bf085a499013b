"""Clusters of a bench or a paper, drawn with their plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from farspan.domain.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farspan.domain.plan import Plan
    from farspan_studies.bench.matrix import Row
    from farspan_studies.pages.drawn import Drawn


def drawn_slices(*, predicted: bool) -> list[Drawn]:
    """Return the FABRIC study's slices with their fastest published plans."""
    from farspan_studies.pages.paper_rows import slices

    return [
        _drawn(case.row.slice, case.plan, case.cluster, f"{case.row.technique} of {case.row.model}")
        for case in slices(predicted)
    ]


def drawn_bench(rows: Sequence[Row], folder: Path, *, predicted: bool) -> list[Drawn]:
    """Return a bench's clusters with the plan of each that was fastest, or was predicted to be."""
    from farspan_studies.bench.measuring import Results
    from farspan_studies.bench.trials import as_tried
    from farspan_studies.pages.drawn import Drawn

    results = Results(folder)
    drawings = list[Drawn]()
    for name in dict.fromkeys(row.cell.cluster for row in rows):
        own_rows = [row for row in rows if row.cell.cluster == name]
        cluster = results.cluster(own_rows[0].cluster_hash)
        done = [
            (step_s / row.step_tokens, row)
            for row in own_rows
            if (step_s := row.predicted_s if predicted else row.step_s) is not None
        ]
        top = min(done, key=lambda pair: pair[0])[1] if done else None
        if top is None or top.plan_hash is None:
            drawings.append(Drawn(name, cluster))
        else:
            caption = f"{top.cell.technique} of {top.cell.model}"
            plan = results.plan(top.plan_hash)
            drawings.append(
                _drawn(
                    name, plan, as_tried(results.trials, cluster, top.cluster_hash, plan), caption
                )
            )
    return drawings


def _drawn(name: str, plan: Plan, cluster: Cluster, caption: str) -> Drawn:
    from farspan.estimate.estimate_plan import price
    from farspan.planning.why import costs_of
    from farspan.report.plan_picture import picture
    from farspan_studies.pages.drawn import Drawn

    costs = costs_of(plan, cluster)
    return Drawn(name, cluster, caption, picture(plan, price(plan, costs), costs))
