"""Fit the constants of the engines `alpa2022` and `torch2024` again, and record their errors, left-out slices included.

    python benchmarks/fit_engines.py [--quick]

Deterministic: the same files give the same constants. Results go to benchmarks/results/reproduce.json; the constants
there are those of farspan/catalog/engines/*.yaml, rounded. About a minute on one core; `--quick` leaves the fits out,
and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from farspan.domain.engine import engine
from farspan.planning import cost_study, reproduce
from farspan.planning.calibrate import constant
from farspan.planning.published import cost_study as published_study

RESULTS = Path(__file__).parent / "results" / "reproduce.json"


def fabric(refit: bool) -> dict[str, Any]:
    used = engine("alpa2022")
    cells = reproduce.cells(used)
    known = reproduce.one_cell_known(used)
    found: dict[str, Any] = {
        "mape": reproduce.mape(cells),
        "largest": max(abs(cell.error) for cell in cells if cell.counted and cell.error is not None),
        "leave_one_out": reproduce.leave_one_out(used),
        "one_cell_known_median": statistics.median(abs(error) for by in known.values() for error in by.values()),
        "verdicts_right": reproduce.score(cells).right,
        "inside": sum(bool(cell.inside) for cell in reproduce.open_cells(cells)),
    }
    if refit:
        again = reproduce.fit_verdicts(reproduce.fit_times(used))
        found["fitted"] = {name: constant(again, name) for name in (*reproduce.TIMES, *reproduce.VERDICTS)}
    return found


def slm_cost(refit: bool) -> dict[str, Any]:
    used, study = engine("torch2024"), published_study()
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="errors only, no fits")
    refit = not parser.parse_args().quick
    found = {"fabric": fabric(refit), "slm_cost": slm_cost(refit)}
    text = json.dumps(found, indent=2) + "\n"
    if refit:
        RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
