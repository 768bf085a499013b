"""The four findings of arXiv 2602.02632, as sentences with the numbers of the priced cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from farspan_studies.papers.fabric_study import Cell
from farspan_studies.papers.published import COUNTED


def ratios(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Predicted minutes of each technique over Pipeshard's, gpt2m on all GPUs, by slice across
    sites."""
    took = {
        (cell.slice, cell.technique): cell.minutes
        for cell in cells
        if cell.model == "gpt2m" and cell.devices == 4 and cell.slice != COUNTED[0]
    }
    names = dict.fromkeys(name for name, _ in took)
    return {
        name: {
            kind: took[name, kind] / took[name, "Pipeshard"] for kind in ("Data", "ZeRO2", "Shard")
        }
        for name in names
    }


def one_vm(cells: Sequence[Cell]) -> dict[tuple[str, str], dict[str, float]]:
    """Predicted TFLOP/s of each technique that fits, on one VM, by (slice, model)."""
    groups: dict[tuple[str, str], dict[str, float]] = {}
    for cell in cells:
        if cell.devices == 2 and cell.status == "ok":
            groups.setdefault((cell.slice, cell.model), {})[cell.technique] = cell.tflops
    return groups


def findings(cells: Sequence[Cell]) -> list[str]:
    """Return the paper's four findings with the numbers of the priced cells."""
    return [_across(cells), _inside(cells), _fewer(cells), _memory(cells)]


def _across(cells: Sequence[Cell]) -> str:
    factors = "; ".join(
        f"{name} {', '.join(f'{kind} {factor:.1f}' for kind, factor in by.items())}"
        for name, by in ratios(cells).items()
    )
    return (
        "Across sites Pipeshard is fastest at every latency; minutes of the others over its own: "
        f"{factors}."
    )


def _inside(cells: Sequence[Cell]) -> str:
    won = Counter(
        max(by, key=lambda kind: by[kind]) for by in one_vm(cells).values() if len(by) > 1
    )
    winners = ", ".join(f"{kind} {count}" for kind, count in won.most_common())
    return (
        f"Inside one VM, where more than one technique fits, the fastest is {winners} (the paper: "
        "Data 6, Shard 2)."
    )


def _fewer(cells: Sequence[Cell]) -> str:
    pair = next(
        cell
        for cell in cells
        if cell.slice == "UTAH-GPN"
        and cell.devices == 2
        and cell.model == "gpt2m"
        and cell.technique == "Data"
    )
    four = {
        cell.slice: cell.minutes
        for cell in cells
        if cell.devices == 4 and cell.model == "gpt2m" and cell.technique == "Pipeshard"
    }
    slower = sum(took > pair.minutes for took in four.values())
    return (
        f"One VM with 2 RTX6000 takes {pair.minutes:.0f} minutes for gpt2m with Data, faster than "
        "the best of "
        f"{slower} of {len(four)} slices with 4 GPUs ({min(four.values()):.0f} to "
        f"{max(four.values()):.0f} minutes)."
    )


def _memory(cells: Sequence[Cell]) -> str:
    def runs(technique: str) -> tuple[int, int]:
        own = [
            cell
            for cell in cells
            if cell.technique == technique and cell.model == "gpt2L" and cell.devices == 2
        ]
        return sum(cell.status == "ok" for cell in own), len(own)

    fits = ", ".join(
        "{} {} of {}".format(kind, *runs(kind)) for kind in ("Pipeshard", "Data", "ZeRO2", "Shard")
    )
    real = ", ".join(
        "{} {}".format(
            kind,
            sum(
                cell.published_status == "ok"
                for cell in cells
                if cell.technique == kind and cell.model == "gpt2L"
            ),
        )
        for kind in ("Pipeshard", "ZeRO2")
    )
    return (
        f"Pipeshard needs more memory: on one VM gpt2L is predicted to run with {fits}; that ZeRO2 "
        "runs on 2 RTX6000 + "
        "2 T4 where all else fails is not reproduced (rows of gpt2L that ran in the paper: "
        f"{real})."
    )
