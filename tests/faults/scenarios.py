"""Scenarios of faults as data: which run is disturbed, by what, and in which phase. A seed draws
them, the same each time, for the benchmark and for the tests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

import msgspec

from farspan.domain.config import OnFault

Launcher = Literal["local", "ssh", "slurm"]
Kind = Literal[
    # A worker gets SIGKILL, SIGSTOP or SIGTERM.
    "kill",
    "stop",
    "term",
    # The same worker is killed at every start.
    "kill-again",
    # The command that supervises the run gets SIGKILL or, as its host shuts down, SIGTERM.
    "supervisor",
    "shutdown",
    # Rank 0's host loses its disk, and its workers.
    "disk",
    # A site loses its links and its workers, and comes back.
    "site",
    "disk-full",
    "cut",
    "cut-one-way",
]
Phase = Literal["planning", "training", "save", "recovery", "last-step"]

Choice = TypeVar("Choice", bound=str)

#: Steps of a run with two to four workers: about 15 s undisturbed.
STEPS = 60
#: Steps between which a fault of the training strikes.
STRIKE_STEPS = (5, STEPS - 10)
#: Planning of such a run takes about 10 s: a fault strikes within these of its begin.
PLANNING_S = (0.5, 9.0)
#: A cold start takes some 5 s: a fault of the recovery strikes within these of the fault before.
RECOVERY_S = (0.2, 5.0)
#: Faults that pass do so before silence is noticed (4 s), or after.
PASSING_S = (1.5, 8.0)
AWAY_S = (6.0, 15.0)

STRIKABLE: tuple[Phase, ...] = ("training", "save", "recovery", "last-step")
EVERY_PHASE: tuple[Phase, ...] = ("planning", *STRIKABLE)
NO_SLURM: tuple[Launcher, ...] = ("local", "ssh")
EVERYWHERE: tuple[Launcher, ...] = ("local", "ssh", "slurm")
#: Launchers and phases that a kind can have. The nodes of a Slurm of one machine share its
#: network and its disk: links are not cut there, and no node has a disk of its own.
POSSIBLE: dict[Kind, tuple[tuple[Launcher, ...], tuple[Phase, ...]]] = {
    "kill": (EVERYWHERE, STRIKABLE),
    "stop": (EVERYWHERE, STRIKABLE),
    "term": (EVERYWHERE, STRIKABLE),
    "kill-again": (EVERYWHERE, ("training",)),
    "supervisor": (EVERYWHERE, EVERY_PHASE),
    "shutdown": (EVERYWHERE, EVERY_PHASE),
    "disk": (NO_SLURM, STRIKABLE),
    "site": (EVERYWHERE, EVERY_PHASE),
    "disk-full": (EVERYWHERE, EVERY_PHASE),
    "cut": (NO_SLURM, EVERY_PHASE),
    "cut-one-way": (NO_SLURM, EVERY_PHASE),
}
TECHNIQUES: dict[Launcher, tuple[str, ...]] = {
    "local": ("data", "zero2", "fsdp", "shard", "pipeshard", "diloco"),
    "ssh": ("data", "pipeshard", "diloco"),
    "slurm": ("data", "fsdp"),
}
#: Of ten scenarios five are on labs that are entered without a network.
LAUNCHER_WEIGHTS: dict[str, int] = {"local": 5, "ssh": 3, "slurm": 2}
#: Ends that a fault may have. Whoever has freed the disk gives the command again.
RIGHT_ENDS: dict[Kind, tuple[str, ...]] = {
    "kill-again": ("worker-lost",),
    "disk-full": ("disk-full",),
}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. `target` picks a worker, a link or a site, modulo their number."""

    kind: Kind
    phase: Phase | Literal["time"]
    target: int = 0
    #: The fault strikes once this step is made.
    step: int = 0
    #: Seconds after the begin of planning, after the fault before (recovery), or after the first
    #: step (time).
    delay_s: float = 0.0
    #: Seconds after which it passes; None where it does not.
    lasts_s: float | None = None

    def __str__(self) -> str:
        lasts = "" if self.lasts_s is None else f"+{self.lasts_s:.1f}s"
        return f"{self.kind}:{self.target}@{self.phase}{lasts}"


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A run and the faults that disturb it. The last of them is what the scenario is about."""

    number: int
    launcher: Launcher
    #: Sites of the lab, or nodes of the Slurm.
    sites: int
    technique: str
    on_fault: OnFault
    faults: tuple[Fault, ...]
    steps: int = STEPS
    #: Time between two checkpoints.
    save_every: str = "1s"

    @property
    def fault(self) -> Fault | None:
        """The fault that the scenario is about; None of an undisturbed run."""
        return self.faults[-1] if self.faults else None

    @property
    def configuration(self) -> tuple[Launcher, int, str, int]:
        """Equal for scenarios whose undisturbed runs are the same."""
        return self.launcher, self.sites, self.technique, self.steps

    @property
    def right_ends(self) -> tuple[str, ...]:
        if self.fault is None:
            return ()
        ends = RIGHT_ENDS.get(self.fault.kind, ())
        # Of a far host's kernel nobody can tell: kills at one place count as those for memory.
        if self.fault.kind == "kill-again" and self.launcher != "local":
            return (*ends, "out-of-memory")
        return ends

    def __str__(self) -> str:
        faults = ", ".join(map(str, self.faults))
        return f"{self.number:03}-{self.launcher}-{self.sites}-{self.technique}-{faults}"


def draw_scenarios(seed: int, count: int) -> tuple[Scenario, ...]:
    """Draw scenarios. Kinds take turns, so that each occurs in every eleven scenarios; of one kind,
    launchers and phases that were drawn least often come first."""
    rng = random.Random(seed)
    kinds = list[Kind]()
    used = dict[tuple[str, str], float]()
    scenarios = list[Scenario]()
    for number in range(count):
        if not kinds:
            kinds = list(get_args(Kind))
            rng.shuffle(kinds)
        kind = kinds.pop()
        launchers, phases = POSSIBLE[kind]
        launcher = _least_used(rng, used, kind, launchers, LAUNCHER_WEIGHTS)
        phase = _least_used(rng, used, kind, phases, {})
        scenarios.append(_draw_scenario(rng, number, launcher, kind, phase))
    return tuple(scenarios)


def _least_used(
    rng: random.Random,
    used: dict[tuple[str, str], float],
    kind: Kind,
    choices: tuple[Choice, ...],
    weights: Mapping[str, int],
) -> Choice:
    """Draw one of those that a kind had least often for their weight."""
    least = min(used.get((kind, choice), 0.0) for choice in choices)
    choice = rng.choice([name for name in choices if used.get((kind, name), 0.0) == least])
    used[kind, choice] = least + 1 / weights.get(choice, 1)
    return choice


def _draw_scenario(
    rng: random.Random, number: int, launcher: Launcher, kind: Kind, phase: Phase
) -> Scenario:
    technique = rng.choice(TECHNIQUES[launcher])
    on_fault: OnFault = rng.choice(("recover", "wait"))
    # Replicas that synchronize now and then have other losses under another plan.
    if technique == "diloco":
        on_fault = "wait"
    step = rng.randint(*STRIKE_STEPS)
    if phase == "last-step":
        step = STEPS - 1
    faults = list[Fault]()
    if phase == "recovery":
        faults.append(Fault(kind="kill", phase="training", target=rng.randrange(4), step=step))
    fault = Fault(
        kind=kind,
        phase=phase,
        target=rng.randrange(12),
        step=step,
        delay_s=_draw_delay(rng, phase),
        lasts_s=_draw_duration(rng, kind),
    )
    return Scenario(
        number=number,
        launcher=launcher,
        sites=rng.randint(2, 4),
        technique=technique,
        on_fault=on_fault,
        faults=(*faults, fault),
    )


def _draw_delay(rng: random.Random, phase: Phase) -> float:
    bounds = {"planning": PLANNING_S, "recovery": RECOVERY_S}.get(phase, (0.0, 0.0))
    return round(rng.uniform(*bounds), 2)


def _draw_duration(rng: random.Random, kind: Kind) -> float | None:
    if kind in ("cut", "cut-one-way"):
        return rng.choice(PASSING_S)
    if kind == "stop":
        return rng.choice((None, *PASSING_S))
    if kind in ("disk", "site", "disk-full"):
        return round(rng.uniform(*AWAY_S), 2)
    return None
