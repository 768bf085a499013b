"""Choosing a plan by trials: what `farspan select`, and `farspan train` without a technique, do."""

from __future__ import annotations

from farspan.app.checks import require_torch
from farspan.app.clusters import launcher
from farspan.app.resolving import Resolved, allowed
from farspan.app.trial_cache import TrialCache
from farspan.app.updates import Progress, Tried, silent
from farspan.domain.cluster import Cluster
from farspan.domain.config import ParallelConfig
from farspan.domain.model import ModelSpec
from farspan.domain.objective import TOLERANCE
from farspan.domain.train import TrainSpec
from farspan.planning.select import Selection, SelectionTask, select

#: Up to this number of devices plans for all parts of a cluster are priced, beyond it for the
#: whole: few before training, which is to start soon; more where machines are chosen, as those of
#: 64 take 7 s (docs/benchmarks.md), less than one trial.
MAX_DEVICES_BEFORE_TRAINING = 16
PARTS = 64


def question(
    model: ModelSpec,
    train: TrainSpec,
    cluster: Cluster,
    corpus: str,
    parallel: ParallelConfig,
    tolerance: float = TOLERANCE,
    few: int = MAX_DEVICES_BEFORE_TRAINING,
) -> SelectionTask:
    """Return what to choose for a run: among all parts of a cluster of up to `few` devices, or of
    one named technique on the whole."""
    from farspan.domain.engine import engine

    named = parallel.technique != "auto"
    return SelectionTask(
        model=model,
        train=train,
        engine=engine("farspan"),
        objective=parallel.objective,
        allow=allowed(parallel),
        corpus=corpus,
        here=launcher(parallel) != "local",
        parts=not named and len(cluster.devices) <= few,
        tolerance=tolerance,
    )


def question_of(
    resolved: Resolved,
    parallel: ParallelConfig,
    tolerance: float = TOLERANCE,
    few: int = MAX_DEVICES_BEFORE_TRAINING,
) -> SelectionTask:
    """Return `question` for a run.yaml made concrete."""
    return question(
        resolved.model,
        resolved.train,
        resolved.cluster,
        resolved.corpus.hash,
        parallel,
        tolerance,
        few,
    )


def choose(
    resolved: Resolved,
    parallel: ParallelConfig,
    progress: Progress = silent,
    *,
    paying: bool,
    budget_s: float | None = None,
    tolerance: float = TOLERANCE,
    again: bool = False,
) -> Selection:
    """Choose the best plan by trials, each reported as it ends; with `paying` only by trials that
    may save more time than they take, and with `again` also by those that were made before."""
    require_torch()
    few = MAX_DEVICES_BEFORE_TRAINING if paying else PARTS
    return select(
        resolved.cluster,
        question_of(resolved, parallel, tolerance, few),
        TrialCache(resolved, launcher(parallel), again=again),
        budget_s=budget_s,
        paying=paying,
        say=lambda candidate, result: progress(Tried(candidate, result)),
    )
