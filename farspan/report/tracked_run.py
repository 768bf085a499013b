"""What trackers record of a run as a whole: its configuration, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from farspan._version import __version__
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import count_parameters
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load
from farspan.report.history import open_run
from farspan.report.measurement import measure_run
from farspan.report.trackers import TrackedRun

#: Of the measurement, by its name there.
SUMMARY = (
    *("best_val_loss", "best_val_step", "val_loss", "bits_per_byte", "train_loss"),
    *("steps", "tokens", "tokens_per_s", "run_s", "usd", "memory_bytes"),
)


def describe_run(run: RunFolder) -> TrackedRun:
    """Describe a run by the plan that it follows now. Paths, names of hosts and whatever may hold a
    password are left out."""
    plan = run.load_plan()
    corpus = load(run.corpus, CorpusManifest)
    tables = {
        "model": {**msgspec.to_builtins(plan.model), "params": count_parameters(plan.model)},
        "train": msgspec.to_builtins(plan.train),
        "plan": {"technique": plan.technique, "hash": plan.hash, "devices": len(plan.devices)},
        "corpus": {
            "hash": corpus.hash,
            "train_tokens": corpus.train.tokens,
            "val_tokens": corpus.val.tokens,
        },
        "farspan": __version__,
    }
    return TrackedRun(
        name=run.path.absolute().name,
        id=load(run.record, RunRecord).identity,
        folder=run.path,
        config=dict(_flatten(tables)),
    )


def _flatten(table: dict[str, Any], folder: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by their dotted keys."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{folder}{name}.")
        elif value is not None:
            yield f"{folder}{name}", value


def summarize_run(run: RunFolder) -> dict[str, Any]:
    """Return the figures of a run so far by their names in the report; empty before its first
    step."""
    try:
        measured = measure_run(open_run(run.path))
    except Refusal:
        return {}
    if measured is None:
        return {}
    figures = {name: getattr(measured, name) for name in SUMMARY}
    return {name: value for name, value in figures.items() if value is not None}
