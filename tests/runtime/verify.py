"""Whether workers compute what a plan asks for: their gradients, losses and norms against the
reference's."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from farspan.domain.plan import Plan
from farspan.runtime.comm.topology import Topology
from tests import tiny
from tests.runtime import jobs, reference
from tests.runtime.fleet import Fleet
from tests.runtime.reference import Data

#: A gradient's error may be so much of it, and of the norm of all: fp32 rounds to 6e-8 and adds up
#: hundreds of terms.
RELATIVE = 1e-5
OF_ALL = 1e-7
#: Losses and norms.
SCALAR = 1e-5


class Verdict(NamedTuple):
    """The greatest error of a gradient as a share of what is allowed, and of a loss or norm; and
    what is beyond it."""

    gradient: float
    scalar: float
    faults: list[str]


class Case:
    """A plan's run folder and the data that it reads."""

    _numbers = itertools.count()

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.plan, self.path = plan, folder / f"run-{next(self._numbers)}"
        if not (folder / "corpus").exists():
            tiny.corpus(folder / "corpus", tokens=400, val=75, documents=9)
        tiny.run_folder(self.path, plan)
        self.data = Data.of(folder / "corpus", plan.train)
        self.weights = reference.start(plan.model)

    @property
    def world(self) -> int:
        return len(self.plan.devices)

    @property
    def firsts(self) -> list[int]:
        """The first rank of each replica."""
        return [Topology(self.plan, one.stages[0].mesh.ranks[0]).rank for one in self.plan.replicas]


def verify(fleet: Fleet, folder: Path, plan: Plan) -> Verdict:
    """The gradients of a step that has a short window, and all steps of a training. Raises
    Failed."""
    case = Case(folder, plan)
    step = case.data.step_with_a_short_window(plan.train.batch)
    answers = fleet.run(jobs.check, case.world, plan, case.path, step)
    wanted = reference.gradients(plan, case.data, case.weights, step)
    trained = reference.train(plan, case.data, case.weights)
    gradient = _Worst(1.0)
    scalar = _Worst(SCALAR)
    for r, first in enumerate(case.firsts):
        found, run = answers[first]
        of_replica = f"of replica {r}"
        compare_gradients(answers[0][0].by_replica[r], wanted[r], gradient, of_replica)
        scalar.of(f"loss {of_replica}", found.loss, wanted[r].loss)
        scalar.of(f"norm {of_replica}", found.norm, wanted[r].norm)
        for what, ours, theirs in (
            ("loss", run.losses, trained.losses[r]),
            ("norm", run.norms, trained.norms[r]),
        ):
            for i, pair in enumerate(itertools.zip_longest(ours, theirs, fillvalue=float("nan"))):
                scalar.of(f"{what} {of_replica} at step {i + 1}", *pair)
    scalar.of("validation loss", answers[0][1].validation or float("nan"), trained.validation)
    return Verdict(gradient.worst, scalar.worst / SCALAR, gradient.faults + scalar.faults)


class _Worst:
    """The greatest of some errors, and those beyond a bound."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.worst = 0.0
        self.faults = list[str]()

    def add(self, what: str, error: float) -> None:
        # A NaN is beyond every bound.
        if not error <= self.bound:
            self.faults.append(f"{what} is off by {error:.2e}, allowed are {self.bound:.0e}")
        self.worst = max(self.worst, error) if error == error else float("inf")

    def of(self, what: str, found: float, wanted: float) -> None:
        self.add(what, abs(found - wanted) / abs(wanted))


def compare_gradients(
    found: jobs.Arrays, wanted: reference.Gradient, worst: _Worst, of_what: str
) -> None:
    """Every parameter's gradient, in units of what is allowed."""
    if found.keys() != wanted.by_name.keys():
        worst.faults.append(
            f"parameters {of_what}: {sorted(found.keys() ^ wanted.by_name.keys())} are missing or "
            "new"
        )
    for name in found.keys() & wanted.by_name.keys():
        exact = wanted.by_name[name].numpy()
        allowed = RELATIVE * np.linalg.norm(exact) + OF_ALL * wanted.norm
        worst.add(
            f"gradient of {name} {of_what}", float(np.linalg.norm(found[name] - exact) / allowed)
        )
