"""Techniques, one file each: the file name is the registration. Listing them imports none of
them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

from farspan.domain.plan import Plan
from farspan.domain.problems import Problem, Refusal
from farspan.domain.suggest import advise, known_names
from farspan.domain.units import counted
from farspan.estimate.network import NoLink
from farspan.techniques._task import Task, cannot

__all__ = ["Task", "Technique", "exact", "names", "plan", "technique"]


#: Techniques that train adapters of frozen weights.
ADAPTING = frozenset({"data"})


class Technique(Protocol):
    """What a technique file holds."""

    @staticmethod
    def plan(task: Task) -> Plan | Problem:
        """Return the technique's best plan for all devices of the task, or why there is none."""
        ...


def technique_names() -> tuple[str, ...]:
    """Return every technique, sorted."""
    return tuple(
        sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    )


def technique(name: str, key: str = "parallel.technique") -> Technique:
    """Return the technique file of that name. Raises Refusal, which offers the nearest one."""
    if name not in technique_names():
        raise Refusal(
            "out-of-range",
            what=f"there is no technique {name!r}",
            where=f"run.yaml, key {key}",
            fact=known_names(name, ("auto", *technique_names())),
            remedy=advise(name, ("auto", *technique_names())),
            key=key,
        )
    return cast(Technique, importlib.import_module(f"{__name__}.{name}"))


def exact(name: str) -> bool:
    """Return whether a technique's steps are those of one synchronous computation.

    Its file has `EXACT = False` if they are not.
    """
    return getattr(technique(name), "EXACT", True)


def plan(name: str, task: Task) -> Plan | Problem:
    """Return a technique's plan or problem.

    It is a problem also for a technique that cannot train adapters, where hosts cannot reach each
    other, and where a search takes too long.
    """
    if task.model.lora and name not in ADAPTING:
        return cannot(
            f"{name} does not train adapters (LoRA)",
            "run.yaml, key train.lora",
            "their frozen weights are whole on every device: only data parallelism has that",
            "set parallel.technique: data, or remove train.lora",
        )
    try:
        return technique(name).plan(task)
    except TimeoutError as error:
        return Problem(
            code="cannot-plan",
            what=f"{name} found no plan in its time",
            where=counted(len(task.devices), "device"),
            fact=str(error),
            remedy="farspan plan with other techniques: --technique data --technique zero2",
            subject=name,
        )
    except NoLink as error:
        return Problem(
            code="cannot-plan",
            what="some hosts cannot reach each other",
            where=", ".join(dict.fromkeys(device.site for device in task.devices)),
            fact=str(error),
            remedy=(
                "give the link in the cluster file, or measure it: farspan probe --cluster FILE "
                "-o FILE"
            ),
        )
