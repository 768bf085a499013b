"""The cache of trials: a plan that was measured on a cluster once is not run again."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from farspan._version import __version__
from farspan.app.resolving import Resolved
from farspan.domain.cluster import Cluster
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.domain.run import cache_folder, make_cache_folder
from farspan.domain.struct_files import content_hash, load, save
from farspan.domain.trial import Trial
from farspan.launch.trial import TrialLimits, run_trial, steps_for, trial_limits
from farspan.semantics.identity import cluster_hash, identity, plan_key


class TrialCache:
    """Runs plans of one run for a few steps; a kept trial of the same plan and cluster is used
    again."""

    def __init__(self, resolved: Resolved, launcher: str, *, again: bool = False) -> None:
        self._resolved = resolved
        self._launcher = launcher
        self._again = again
        self._folder = cache_folder() / "trials"

    def __call__(self, plan: Plan, step_s: float) -> Trial:
        # How many steps are asked for follows from a prediction, which is another one after each
        # probe.
        within = trial_limits(plan, self._resolved.cluster, step_s, steps_for(step_s))
        return self.run_trial(plan, within, least=0)

    def run_trial(self, plan: Plan, within: TrialLimits, least: int | None = None) -> Trial:
        """Run a trial, or return a kept one that has timed at least `least` steps (None: all that
        `within` asks for), which took no time."""
        cluster = self._resolved.cluster
        key = content_hash(cluster_hash(cluster), plan_key(plan), __version__)
        path = self._folder / f"{key}.json"
        if path.exists() and not self._again:
            kept = load(path, Trial)
            enough = within.steps if least is None else least
            if kept.step_s is None or len(kept.steps) >= enough:
                return replace(kept, took_s=0.0)
        result = run_trial(plan, self._resolved.corpus_folder, cluster, self._launcher, within)
        # Another time it may not fail; a worker may have been killed for another program's memory.
        if result.problem is None or result.problem.code == "out-of-memory":
            make_cache_folder("trials")
            save(result, path)
        return result


def is_known_to_lack_memory(plan: Plan, cluster: Cluster) -> bool:
    """Return whether a run of this plan on these devices ran out of memory."""
    return _lack_path(plan, cluster).exists()


def record_lack_of_memory(plan: Plan, cluster: Cluster, problem: Problem) -> None:
    """Keep that a run of this plan ran out of memory."""
    make_cache_folder("trials")
    save(Trial(plan=plan_key(plan), status="oom", problem=problem), _lack_path(plan, cluster))


def _lack_path(plan: Plan, cluster: Cluster) -> Path:
    """Name the file by the devices and their memory: how fast they are is measured again each
    time."""
    memories = [device.memory for device in cluster.devices]
    key = content_hash(identity(cluster), memories, plan_key(plan), __version__)
    return cache_folder() / "trials" / f"oom-{key}.json"
