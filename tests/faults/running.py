"""Runs scenarios: each in a place of its own, and beside it once the same run undisturbed."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from farspan.domain.struct_files import load, save
from tests.faults.disturbing import Disturber
from tests.faults.judging import Ending, Trained, Verdict, judge
from tests.faults.places import LabPlace, Place, SshPlace
from tests.faults.scenarios import Launcher, Scenario
from tests.faults.slurm_place import SlurmPlace

NUM_DOCUMENTS = 40
PLACES: dict[Launcher, Callable[[Scenario, Path], Place]] = {
    "local": LabPlace,
    "ssh": SshPlace,
    "slurm": SlurmPlace,
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario that was run, how it ended, and the verdict on that."""

    scenario: Scenario
    ending: Ending
    verdict: Verdict
    #: Whether all its starts had the plan of the undisturbed run: losses are equal bit by bit then.
    same_plan: bool
    #: What is wrong; empty where nothing is.
    flaw: str


def run_scenario(scenario: Scenario, folder: Path) -> Outcome:
    """Run a scenario in a folder that keeps undisturbed runs, and judge it. What it leaves there
    stays only where it is wrong."""
    calm, cache = train_undisturbed(scenario, folder)
    own = folder / f"scenario-{os.getpid()}-{scenario.number}"
    shutil.rmtree(own, ignore_errors=True)
    ending = _train(scenario, own, folder, cache)
    verdict, flaw = judge(scenario, ending, calm)
    if verdict != "wrong":
        shutil.rmtree(own, ignore_errors=True)
    plans = () if ending.trained is None else ending.trained.plans
    return Outcome(
        scenario=scenario,
        ending=ending,
        verdict=verdict,
        same_plan=plans == calm.plans,
        flaw=flaw,
    )


def train_undisturbed(scenario: Scenario, folder: Path) -> tuple[Trained, Path]:
    """Return what the run of a scenario's configuration is without faults, and the cache that it
    has filled. It is trained once; processes that need the same one wait for it."""
    name = "-".join(map(str, scenario.configuration))
    calm = folder / f"calm-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "text")
    with open(folder / f"{name}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = calm / "trained.json"
        if not kept.exists():
            shutil.rmtree(calm, ignore_errors=True)
            undisturbed = msgspec.structs.replace(scenario, faults=(), on_fault="wait")
            ending = _train(undisturbed, calm, folder, None)
            if ending.code is not None or ending.hung or ending.trained is None:
                log = (calm / "log").read_text(errors="replace")
                raise RuntimeError(
                    f"the undisturbed run {name} has failed: {ending}\n{log[-3000:]}"
                )
            save(ending.trained, kept)
        return load(kept, Trained), calm / "cache"


def _train(scenario: Scenario, own: Path, folder: Path, cache: Path | None) -> Ending:
    place = PLACES[scenario.launcher](scenario, own)
    try:
        place.prepare(folder / "text")
        if cache is not None:
            shutil.copytree(cache, own / "cache", dirs_exist_ok=True)
        return Disturber(place, scenario.faults).train()
    finally:
        with suppress(shutil.Error, FileNotFoundError):  # It may not be there, or change meanwhile.
            shutil.copytree(place.run.path, own / "left", ignore=_keep_small, dirs_exist_ok=True)
        place.close()


def _keep_small(folder: str, names: list[str]) -> list[str]:
    """Leave out of a run's folder what is large, and what vanishes with the place."""
    return [name for name in names if name in ("checkpoints", "tensorboard", "report.html")]


def write_text(folder: Path) -> None:
    """Write forty short documents, the same each time."""
    if folder.exists():
        return
    made = folder.with_name(f"{folder.name}-{os.getpid()}")
    made.mkdir()
    for number in range(NUM_DOCUMENTS):
        words = " ".join(f"{word}{number % 7}" for word in ("wind", "list", "blow", "where"))
        (made / f"{number:02}.txt").write_text(f"Paper {number}\n\n{f'{words} ' * 40}.\n")
    try:
        made.rename(folder)
    except OSError:  # Another process was first.
        shutil.rmtree(made)
