"""Thirty scenarios of faults that a seed has drawn: each run finishes without a person and with the
losses of an undisturbed one, or ends with the right cause. `benchmarks/chaos.py` runs 120."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from farspan.domain.problems import Refusal
from farspan_lab import state
from tests.faults.places import missing
from tests.faults.running import run_scenario
from tests.faults.scenarios import (
    EVERYWHERE,
    POSSIBLE,
    STEPS,
    Fault,
    Kind,
    Phase,
    Scenario,
    draw_scenarios,
)

SEED = 2
COUNT = 30
#: A killed worker of two is what happens most, and takes least.
PLAIN = Scenario(
    number=0,
    launcher="local",
    sites=2,
    technique="data",
    on_fault="recover",
    faults=(Fault(kind="kill", phase="training", target=1, step=8),),
    steps=24,
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of undisturbed runs, which all processes of these tests share."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return shared / "scenarios"


def run(scenario: Scenario, folder: Path) -> None:
    if reason := missing(scenario.launcher):
        pytest.skip(f"waits for a machine that has the launcher {scenario.launcher}: it {reason}")
    if scenario.launcher != "slurm":
        try:
            state._unshare()
        except Refusal as refusal:
            pytest.skip(f"waits for a system that allows labs: {refusal.problem.fact}")
    outcome = run_scenario(scenario, folder)
    assert outcome.verdict != "wrong", outcome


@pytest.mark.slow
@pytest.mark.parametrize("scenario", draw_scenarios(SEED, COUNT), ids=str)
def test_run_survives_the_fault_or_ends_with_its_cause(scenario: Scenario, folder: Path) -> None:
    run(scenario, folder)


def test_killed_worker_leaves_the_losses_as_they_are(folder: Path) -> None:
    run(PLAIN, folder)


def test_same_seed_draws_the_same_scenarios_of_every_kind() -> None:
    for seed in range(20):
        drawn = draw_scenarios(seed, 120)
        assert drawn == draw_scenarios(seed, 120)
        assert drawn[:COUNT] == draw_scenarios(seed, COUNT)
        assert {scenario.launcher for scenario in drawn} == set(EVERYWHERE)
        assert {scenario.sites for scenario in drawn} == {2, 3, 4}
        faults = [scenario.fault for scenario in drawn]
        assert {fault.phase for fault in faults if fault is not None} == set(get_args(Phase))
        kinds = Counter(fault.kind for fault in faults if fault is not None)
        assert kinds.keys() == set(get_args(Kind)) == POSSIBLE.keys()
        assert max(kinds.values()) - min(kinds.values()) <= 1


def test_drawn_faults_are_possible() -> None:
    for scenario in draw_scenarios(3, 500):
        assert scenario.fault is not None
        launchers, phases = POSSIBLE[scenario.fault.kind]
        assert scenario.launcher in launchers and scenario.fault.phase in phases
        assert 0 < scenario.fault.step < STEPS
        assert scenario.technique != "diloco" or scenario.on_fault == "wait"
