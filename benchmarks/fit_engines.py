"""Fit the constants of the engines `alpa2022` and `torch2024` again, and record their errors,
left-out slices included.

    python benchmarks/fit_engines.py [--quick]

Deterministic: the same files give the same constants. Results go to
benchmarks/results/fabric_study.json; the constants there are those of
farspan/catalog/engines/*.yaml, rounded. About a minute on one core; `--quick` leaves the fits out,
and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from farspan.domain.engine import load_engine
from farspan_studies.papers import cost_study, fabric_study
from farspan_studies.papers.calibrate import constant
from farspan_studies.papers.published import cost_study as published_study

RESULTS = Path(__file__).parent / "results" / "reproduce.json"


def fabric(refit: bool) -> dict[str, Any]:
    used = load_engine("alpa2022")
    cells = fabric_study.cells(used)
    known = fabric_study.one_cell_known(used)
    found: dict[str, Any] = {
        "mape": fabric_study.mape(cells),
        "largest": max(
            abs(cell.error) for cell in cells if cell.counted and cell.error is not None
        ),
        "leave_one_out": fabric_study.leave_one_out(used),
        "one_cell_known_median": statistics.median(
            abs(error) for by in known.values() for error in by.values()
        ),
        "verdicts_right": fabric_study.score(cells).right,
        "inside": sum(bool(cell.inside) for cell in fabric_study.open_cells(cells)),
    }
    if refit:
        again = fabric_study.fit_verdicts(fabric_study.fit_times(used))
        found["fitted"] = {
            name: constant(again, name) for name in (*fabric_study.TIMES, *fabric_study.VERDICTS)
        }
    return found


def slm_cost(refit: bool) -> dict[str, Any]:
    used = load_engine("torch2024")
    study = published_study()
    cells = cost_study.study_cells(used)
    found: dict[str, Any] = {
        "fitted_models": cost_study.study_error(cells, study.fitted_on),
        "held_out": cost_study.study_error(cells, study.held_out),
    }
    if refit:
        again = cost_study.fit_study(used)
        found["fitted"] = {name: constant(again, name) for name in cost_study.FITTED}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="errors only, no fits")
    refit = not parser.parse_args().quick
    found = {"fabric": fabric(refit), "slm_cost": slm_cost(refit)}
    text = json.dumps(found, indent=2) + "\n"
    if refit:
        RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
