"""Launchers, one file each: `Launch(plan, run, cluster, argument, supervisor)` is a `Workers` with
a launcher's own way to start them.

The file name is the launcher's name; a leading underscore is not a launcher. Listing them imports
none.
"""

from __future__ import annotations

import importlib
import pkgutil

from farspan.domain.cluster import Cluster
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.suggest import advise, known_names
from farspan.launch.workers import SupervisorState, Workers


def launcher_names() -> list[str]:
    modules = [module.name for module in pkgutil.iter_modules(__path__)]
    return sorted(name for name in modules if not name.startswith("_"))


def split_launcher(name: str) -> tuple[str, str]:
    """Split off a launcher's argument, which comes after a colon (`ray:10.0.0.1:6379`). Raises
    Refusal."""
    kind, _, argument = name.partition(":")
    if kind not in launcher_names() or (argument and kind != "ray"):
        raise Refusal(
            "launcher-unusable",
            what=f"there is no launcher {name!r}",
            where="run.yaml, key parallel.launcher",
            fact=f"{known_names(kind, launcher_names())}, ray:ADDRESS",
            remedy=advise(kind, launcher_names(), option="--launcher"),
            key="parallel.launcher",
        )
    return kind, argument


def launch_workers(
    name: str,
    plan: Plan,
    run: RunFolder,
    cluster: Cluster,
    supervisor: SupervisorState | None = None,
) -> Workers:
    """Return workers of `plan` on hosts of `cluster`, started by entering them; of the epoch of
    `supervisor`, if given. Raises Refusal (launcher-unusable)."""
    kind, argument = split_launcher(name)
    module = importlib.import_module(f"{__name__}.{kind}")
    workers: Workers = module.Launch(plan, run, cluster, argument, supervisor)
    return workers
