"""How far off today's estimator is from runs over emulated wide-area links that were measured
before.

    python benchmarks/reprice.py [RESULTS.jsonl ...]     # default: wan, drawn and drawn-31

Every plan that `benchmarks/wan.py` recorded is priced again on the cluster that was probed then.
Its measured step is the median of its cells. Plans with a tensor axis are shown one by one.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec
from _wan_records import Cell, Predicted, Probed, read

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.cluster_json import parse_cluster_json
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.estimate.estimate_plan import estimate

RESULTS = Path(__file__).parent / "results"
FILES = [RESULTS / f"{name}.jsonl" for name in ("wan", "drawn", "drawn-31")]


class Repriced(NamedTuple):
    """One plan over one link: seconds a step, and the devices of its widest tensor axis."""

    name: str
    rtt_ms: float
    measured_s: float
    recorded_s: float
    now_s: float
    tensor: int

    @property
    def error(self) -> float:
        return self.now_s / self.measured_s - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=FILES)
    found = [row for file in parser.parse_args().files for row in repriced(file)]
    divided = [row for row in found if row.tensor > 1]
    for row in divided:
        print(
            f"{row.rtt_ms:6g} ms  {row.name:28} measured {row.measured_s:.3f} s  "
            f"predicted then {row.recorded_s:.3f}  now {row.now_s:.3f}  {row.error:+.1%}"
        )
    for title, rows in (("all plans", found), ("with a tensor axis", divided)):
        then = [abs(row.recorded_s / row.measured_s - 1) for row in rows]
        now = [abs(row.error) for row in rows]
        print(
            f"{title}: {len(rows)}; off in the median {statistics.median(then):.1%} then, "
            f"{statistics.median(now):.1%} now; in the mean {statistics.fmean(then):.1%} then, "
            f"{statistics.fmean(now):.1%} now"
        )


def repriced(file: Path) -> list[Repriced]:
    """Every plan of a file that was measured, priced again."""
    records = read(file)
    probed = {
        (record.work, record.rtt_ms): record.cluster
        for record in records
        if isinstance(record, Probed)
    }
    measured = defaultdict(list)
    for record in records:
        if isinstance(record, Cell) and record.step_s:
            measured[record.work, record.rtt_ms, record.contestant].append(record.typical_s)
    rows = []
    for record in records:
        if not isinstance(record, Predicted) or record.plan is None or record.step_s is None:
            continue
        steps = measured.get((record.work, record.rtt_ms, record.contestant))
        if not steps:
            continue
        # What it was made from has another form by now, and prices nothing.
        plan = msgspec.convert({**record.plan, "inputs": {"cluster": "", "corpus": ""}}, Plan)
        graph = models.graph(plan.model)
        content = msgspec.json.encode(probed[record.work, record.rtt_ms])
        cluster = _renamed(parse_cluster_json(content, file), graph.units_hash)
        now = estimate(plan, graph, cluster, load_engine("farspan")).step_s
        tensor = max(
            stage.mesh.size("tensor") for replica in plan.replicas for stage in replica.stages
        )
        rows.append(
            Repriced(
                record.contestant,
                record.rtt_ms,
                statistics.median(steps),
                record.step_s,
                now,
                tensor,
            )
        )
    return rows


def _renamed(cluster: Cluster, model: str) -> Cluster:
    """Return the cluster whose timed units are of the model by its name of today: a file has one
    model."""
    return cluster.with_devices(
        lambda host, place: host.devices[place].but(
            units=tuple(
                msgspec.structs.replace(timed, model=model)
                for timed in host.devices[place].times.units
            )
        )
    )


if __name__ == "__main__":
    main()
