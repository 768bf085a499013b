"""Choosing a plan by trials: what `farspan select`, and `farspan train` without a technique, do."""

from __future__ import annotations

from farspan.app.clusters import find_launcher
from farspan.app.preflight_checks import require_torch
from farspan.app.resolving import Resolved, allowed_techniques
from farspan.app.trial_cache import TrialCache
from farspan.app.updates import Progress, Tried, ignore_update
from farspan.domain.cluster import Cluster
from farspan.domain.config import ParallelConfig
from farspan.domain.model import ModelSpec
from farspan.domain.objective import TOLERANCE
from farspan.domain.train import TrainSpec
from farspan.planning.select_by_trials import Selection, SelectionTask, select_by_trials

#: Up to this number of devices plans for all parts of a cluster are priced, beyond it for the
#: whole: few before training, which is to start soon; more where machines are chosen, as those of
#: 64 take 7 s (docs/benchmarks.md), less than one trial.
MAX_DEVICES_BEFORE_TRAINING = 16
MAX_DEVICES_OF_SELECTION = 64


def selection_task(
    model: ModelSpec,
    train: TrainSpec,
    cluster: Cluster,
    corpus: str,
    parallel: ParallelConfig,
    tolerance: float = TOLERANCE,
    few: int = MAX_DEVICES_BEFORE_TRAINING,
) -> SelectionTask:
    """Return the selection for a run: among all parts of a cluster of up to `few` devices, or of
    one named technique on the whole."""
    from farspan.domain.engine import load_engine

    named = parallel.technique != "auto"
    return SelectionTask(
        model=model,
        train=train,
        engine=load_engine("farspan"),
        objective=parallel.objective,
        allow=allowed_techniques(parallel),
        corpus=corpus,
        here=find_launcher(parallel) != "local",
        parts=not named and len(cluster.devices) <= few,
        tolerance=tolerance,
    )


def selection_task_of(
    resolved: Resolved,
    parallel: ParallelConfig,
    tolerance: float = TOLERANCE,
    few: int = MAX_DEVICES_BEFORE_TRAINING,
) -> SelectionTask:
    """Return `selection_task` for a run.yaml made concrete."""
    return selection_task(
        resolved.model,
        resolved.train,
        resolved.cluster,
        resolved.corpus.hash,
        parallel,
        tolerance,
        few,
    )


def choose_plan(
    resolved: Resolved,
    parallel: ParallelConfig,
    progress: Progress = ignore_update,
    *,
    paying: bool,
    budget_s: float | None = None,
    tolerance: float = TOLERANCE,
    again: bool = False,
) -> Selection:
    """Choose the best plan by trials, each reported as it ends; with `paying` only by trials that
    may save more time than they take, and with `again` also by those that were made before."""
    require_torch()
    few = MAX_DEVICES_BEFORE_TRAINING if paying else MAX_DEVICES_OF_SELECTION
    return select_by_trials(
        resolved.cluster,
        selection_task_of(resolved, parallel, tolerance, few),
        TrialCache(resolved, find_launcher(parallel), again=again),
        budget_s=budget_s,
        paying=paying,
        on_trial=lambda candidate, result: progress(Tried(candidate, result)),
    )
