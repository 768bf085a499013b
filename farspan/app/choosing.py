"""Choosing a plan by trials: what `farspan select`, and `farspan train` without a technique, do."""

from __future__ import annotations

import msgspec

from farspan._version import __version__
from farspan.app.checks import require_torch
from farspan.app.clusters import launcher
from farspan.app.resolving import Resolved, allowed
from farspan.app.updates import Progress, Tried, silent
from farspan.domain.cluster import Cluster
from farspan.domain.codec import content_hash, load, save
from farspan.domain.config import ParallelConfig
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan
from farspan.domain.run import cache_folder
from farspan.domain.train import TrainSpec
from farspan.domain.trial import Trial
from farspan.launch.trial import Limits, limits, steps_for, trial
from farspan.planning.rank import TOLERANCE
from farspan.planning.select import Selection, SelectionTask, select
from farspan.semantics.identity import cluster_hash, plan_key

#: Up to so many devices plans for all parts of a cluster are priced, beyond for all of it: few before training, which
#: is to start soon; more where machines are chosen, as those of 64 take 7 s (docs/benchmarks.md), less than one trial.
FEW, PARTS = 16, 64


class TrialCache:
    """Runs plans of one run for a few steps. What was measured of a plan on a cluster once is kept, and found again."""

    def __init__(self, resolved: Resolved, launcher: str, *, again: bool = False) -> None:
        self._resolved, self._launcher, self._again = resolved, launcher, again
        self._folder = cache_folder() / "trials"

    def __call__(self, plan: Plan, step_s: float) -> Trial:
        # How many steps are asked for follows from a prediction, which is another one after each probe.
        return self.run(plan, limits(plan, self._resolved.cluster, step_s, steps_for(step_s)), least=0)

    def run(self, plan: Plan, within: Limits, least: int | None = None) -> Trial:
        """A trial, or one that is kept and has timed so many steps at least, all that are asked for unless said: then
        it took no time."""
        key = content_hash(cluster_hash(self._resolved.cluster), plan_key(plan), __version__)
        path = self._folder / f"{key}.json"
        if path.exists() and not self._again:
            kept = load(path, Trial)
            if kept.step_s is None or len(kept.steps) >= (within.steps if least is None else least):
                return msgspec.structs.replace(kept, took_s=0.0)
        result = trial(plan, self._resolved.corpus_folder, self._resolved.cluster, self._launcher, within)
        # Another time it may not fail; who was killed may have been so for another program's memory.
        if result.problem is None or result.problem.code == "out-of-memory":
            self._folder.mkdir(parents=True, exist_ok=True)
            save(result, path)
        return result


def question(
    model: ModelSpec, train: TrainSpec, cluster: Cluster, corpus: str, parallel: ParallelConfig,
    tolerance: float = TOLERANCE, few: int = FEW,
) -> SelectionTask:  # fmt: skip
    """What is chosen for a run: all parts of a cluster of few devices, or of one named technique the whole."""
    from farspan.domain.engine import engine

    named = parallel.technique != "auto"
    return SelectionTask(
        model=model, train=train, engine=engine("farspan"), objective=parallel.objective, allow=allowed(parallel),
        corpus=corpus, here=launcher(parallel) != "local", parts=not named and len(cluster.devices) <= few,
        tolerance=tolerance,
    )  # fmt: skip


def question_of(
    resolved: Resolved, parallel: ParallelConfig, tolerance: float = TOLERANCE, few: int = FEW
) -> SelectionTask:
    """`question` for a run.yaml made concrete."""
    return question(resolved.model, resolved.train, resolved.cluster, resolved.corpus.hash, parallel, tolerance, few)


def choose(
    resolved: Resolved, parallel: ParallelConfig, progress: Progress = silent, *, paying: bool,
    budget_s: float | None = None, tolerance: float = TOLERANCE, again: bool = False,
) -> Selection:  # fmt: skip
    """The best plan by trials, each told as it ends; with `paying` only trials that may save more time than they
    take, and `again` also those that were made before."""
    require_torch()
    few = FEW if paying else PARTS
    return select(
        resolved.cluster, question_of(resolved, parallel, tolerance, few),
        TrialCache(resolved, launcher(parallel), again=again), budget_s=budget_s, paying=paying,
        say=lambda candidate, result: progress(Tried(candidate, result)),
    )  # fmt: skip
