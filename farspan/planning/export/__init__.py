"""Plans in the words of other training systems, one file a system: the file name is the
registration.

A system either expresses a plan exactly or says why it cannot. One thing is changed, and said:
gradients accumulated over unlike parts of a device's rows are accumulated over the next larger
number of like ones, which needs less memory.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Protocol, cast

import msgspec

from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.suggest import advise, known_names
from farspan.planning.export._regular import evened

__all__ = ["Exported", "System", "evened", "export", "names", "system"]


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A file for another system. `notes` is what the file cannot say and its user must do."""

    system: str
    #: Of the system, as the file was written for it.
    version: str
    file: str
    text: str
    notes: tuple[str, ...]


class System(Protocol):
    """What the file of a system holds."""

    VERSION: str
    FILE: str

    @staticmethod
    def reasons(plan: Plan) -> Sequence[str]:
        """Why the system cannot run this plan; none where it can."""
        ...

    @staticmethod
    def write(plan: Plan) -> str:
        """The configuration of a plan without such reasons."""
        ...

    @staticmethod
    def notes(plan: Plan) -> Sequence[str]:
        """What the configuration cannot say."""
        ...


def names() -> tuple[str, ...]:
    """Every system, sorted."""
    return tuple(
        sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    )


def system(name: str) -> System:
    """The file of that system; a Refusal offers the nearest one."""
    if name not in names():
        raise Refusal(
            "out-of-range",
            what=f"farspan writes no configuration for {name!r}",
            where="--export",
            fact=known_names(name, names()),
            remedy=advise(name, names(), option="--export"),
        )
    return cast(System, importlib.import_module(f"{__name__}.{name}"))


def export(plan: Plan, name: str) -> Exported:
    """The plan in a system's own configuration; raises Refusal (cannot-export) with every reason
    why not."""
    target, parts = system(name), plan.replicas[0].microbatches
    plan = evened(plan)
    if reasons := target.reasons(plan):
        remedy = "farspan plan --technique fsdp, with the same model and cluster"
        if plan.train.optimizer.muon:
            remedy = "set train.optimizer: adamw in run.yaml"
        raise Refusal(
            "cannot-export",
            what=f"{name} cannot run this plan of {plan.technique}",
            where=f"--export {name}",
            fact="; ".join(reasons),
            remedy=remedy,
        )
    notes = list(target.notes(plan))
    if (now := plan.replicas[0].microbatches) != parts:
        notes.append(
            f"gradients are accumulated over {now} parts, all alike; the plan has {parts} parts of "
            "unlike size"
        )
    return Exported(
        system=name,
        version=target.VERSION,
        file=target.FILE,
        text=target.write(plan),
        notes=tuple(notes),
    )
