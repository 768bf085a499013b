"""What fits: the largest model, the largest batch, or the least memory a device needs. By bisection
over real plans.

Each question is a ladder (`planning.ladders`) whose rungs are harder one by one; a rung fits where
some technique, on the whole cluster or on a part of it, makes a plan that every device and every
host has the memory for. The answer is a rung that fits below one that no technique fits. Techniques
that plan in milliseconds are each followed to their last rung; those that search for longer are
tried only beyond what the others reach.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from farspan import models
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan
from farspan.domain.results import Estimate
from farspan.domain.units import format_bytes
from farspan.estimate.price import price
from farspan.planning.candidate import Candidate, Refused
from farspan.planning.ladders import (
    QUICK,
    Asked,
    Batches,
    Ground,
    Ladder,
    Memories,
    Models,
    Rung,
    Scaled,
    holds_too_little,
)
from farspan.planning.parts import ClusterPart, all_parts
from farspan.planning.rank import candidate, host_bytes
from farspan.techniques import Task


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one device or host: bytes that a plan takes, bytes that it may, and the
    difference."""

    name: str
    used: float
    usable: float
    spare: float

    def __str__(self) -> str:
        rest = (
            f"{format_bytes(self.spare)} to spare"
            if self.spare >= 0
            else f"short of {format_bytes(-self.spare)}"
        )
        return (
            f"{self.name}: {format_bytes(self.used)} of {format_bytes(self.usable)} usable, {rest}"
        )


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The hardest rung of one technique: parameters, sequences a step, or bytes of a device."""

    technique: str
    where: str
    places: tuple[int, ...]
    amount: int
    #: The rung as an argument would say it: what `--model` takes for this size.
    typed: str
    #: Sequences that the busiest device computes at a time, and whether it computes forward passes
    #: again.
    micro_rows: int
    recompute: bool
    #: What is fullest.
    binds: Room
    plan: Plan
    estimate: Estimate


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """An answer. `limits` has the best of each technique that was followed, hardest first: the
    first is the answer."""

    asked: Asked
    limits: tuple[Limit, ...]
    #: The next rung, which nothing fits, and what the answer's technique lacks there; None at the
    #: ladder's end.
    next_amount: int | None
    next_lacks: Room | None

    @property
    def best(self) -> Limit:
        return self.limits[0]

    def as_json(self) -> dict[str, Any]:
        """The answer as `--json` has it."""
        limits = [
            {**msgspec.to_builtins(limit), "estimate": limit.estimate.as_json()}
            for limit in self.limits
        ]
        return {**msgspec.to_builtins(self), "limits": limits}


def largest_model(ground: Ground, family: str, vocab_size: int, context: int) -> Fit | None:
    """The largest shape of a family that fits; None where the smallest does not."""
    return climb(ground, Models(ground, family, vocab_size, context))


def largest_batch(ground: Ground, model: ModelSpec) -> Fit | None:
    """The most sequences a step that are computed all at once, none after another on the same
    device.

    Accumulating gradients over parts of a batch makes any batch fit, and so does a pipeline, which
    is made of parts: neither counts. None where not one sequence a device fits.
    """
    return climb(ground, Batches(ground, model))


def least_memory(ground: Ground, model: ModelSpec) -> Fit | None:
    """The least memory that every device of the cluster must have, were they all alike in that."""
    return climb(ground, Memories(ground, model))


def climb(ground: Ground, ladder: Ladder) -> Fit | None:
    """The hardest rung that any technique fits on any part, and what is lacking on the next."""
    search = _Search(ground, ladder)
    limits = search.limits()
    if not limits:
        return None
    limits.sort(
        key=lambda pair: (-search.hardness(pair[0].amount), ground.names.index(pair[0].technique))
    )
    best = limits[0][0]
    # Every technique was tried there on every part.
    following = ladder(search.after(best.amount, len(best.places)), len(best.places))
    lacks = None if following is None else search.lacking(following, best)
    return Fit(
        asked=ladder.asked,
        limits=tuple(limit for limit, _ in limits),
        next_amount=following.amount if following else None,
        next_lacks=lacks,
    )


class _Search:
    """One ladder, climbed by every technique on every part of the cluster."""

    def __init__(self, ground: Ground, ladder: Ladder) -> None:
        self.ground, self.ladder = ground, ladder
        self.parts = all_parts(ground.cluster)
        self._tasks: dict[tuple[int, tuple[int, ...]], Task] = {}
        self._tried: dict[tuple[int, str, tuple[int, ...]], Limit | None] = {}

    def limits(self) -> list[tuple[Limit, int]]:
        """The best of each technique that was followed, with its rung's index on the part it
        uses."""
        reached: dict[str, tuple[Limit, int]] = {}
        for name in self.ground.names:
            self._follow(name, reached, reached.get(name) if name in QUICK else self._best(reached))
        # What was left out beyond an earlier best is tried beyond the last one, until nothing goes
        # further.
        while any(
            self._follow(name, reached, self._best(reached))
            for name in self.ground.names
            if reached
        ):
            pass
        return list(reached.values())

    def _best(self, reached: dict[str, tuple[Limit, int]]) -> tuple[Limit, int] | None:
        return max(reached.values(), key=lambda pair: self.hardness(pair[0].amount), default=None)

    def hardness(self, amount: int) -> int:
        return -amount if self.ladder.asked == "memory" else amount

    def _follow(
        self, name: str, reached: dict[str, tuple[Limit, int]], beyond: tuple[Limit, int] | None
    ) -> bool:
        """Follows one technique on every part beyond what is known; whether it got further."""
        further = False
        for part in self.parts:
            start = 0 if beyond is None else self.after(beyond[0].amount, len(part.places))
            if self.attempt(start, name, part) is None:
                continue
            low, high = start, self.end(len(part.places))
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self.attempt(middle, name, part) else (low, middle)
            # Shapes do not grow evenly: the last rung that fits may be a little smaller than one
            # before it.
            tried = [(limit, i) for i in (start, low) if (limit := self.attempt(i, name, part))]
            reached[name] = beyond = max(tried, key=lambda pair: self.hardness(pair[0].amount))
            further = True
        return further

    def after(self, amount: int, devices: int) -> int:
        """The first rung that is harder than so much."""
        low, high = -1, self.end(devices)
        while high - low > 1:
            middle = (low + high) // 2
            rung = self.ladder(middle, devices)
            assert rung is not None
            low, high = (
                (middle, high)
                if self.hardness(rung.amount) <= self.hardness(amount)
                else (low, middle)
            )
        return high

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def end(self, devices: int) -> int:
        """How many rungs the ladder has."""
        high = 1
        while self.ladder(high, devices) is not None:
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.ladder(middle, devices) is None else (middle, high)
        return high

    def attempt(self, index: int, name: str, part: ClusterPart) -> Limit | None:
        """A technique's plan for a rung on a part, if everything has the memory for it."""
        key = (index, name, part.places)
        if key not in self._tried:
            rung = self.ladder(index, len(part.places))
            self._tried[key] = None if rung is None else self._plan(rung, index, name, part)
        return self._tried[key]

    def _plan(self, rung: Rung, index: int, name: str, part: ClusterPart) -> Limit | None:
        if holds_too_little(rung, self.ground.engine, part):
            return None
        key = (index, part.places)
        if key not in self._tasks:
            self._tasks[key] = self.task(rung, part)
        task = self._tasks[key]
        answer = candidate(task, part, name)
        if isinstance(answer, Refused):
            return None
        variants = at_once(task, answer) if self.ladder.asked == "batch" else (answer,)
        return next(
            (limit for variant in variants if (limit := self._limit(task, variant, rung))), None
        )

    def task(self, rung: Rung, part: ClusterPart) -> Task:
        only = None if len(part.places) == len(rung.cluster.devices) else part.places
        return Task(
            rung.model,
            models.graph(rung.model),
            rung.cluster,
            rung.train,
            self.ground.engine,
            only=only,
        )

    def _limit(self, task: Task, candidate: Candidate, rung: Rung) -> Limit | None:
        room = fullest(
            task, candidate.plan, candidate.estimate, hosts=self.ladder.asked != "memory"
        )
        return None if room.spare < 0 else limit_of(candidate, rung, room)

    def lacking(self, rung: Rung, best: Limit) -> Room | None:
        """What the technique of the answer lacks on a harder rung."""
        part = ClusterPart(name=best.where, places=best.places)
        if self.ladder.asked == "batch":
            task = self.task(rung, part)
            answer = candidate(task, part, best.technique)
            variants = () if isinstance(answer, Refused) else at_once(task, answer)
            fullest_rooms = [fullest(task, variant.plan, variant.estimate) for variant in variants]
            return max(fullest_rooms, key=lambda room: room.spare, default=None)
        missed = nearest_miss(self.ground, rung, best.technique, part)
        if missed is None:
            return None
        counted = [
            room
            for room in (missed.host if self.ladder.asked != "memory" else None, missed.device)
            if room
        ]
        return max(counted, key=_share)


class Miss(NamedTuple):
    """The fullest device, and the fullest host of known memory, of a plan that does not fit."""

    device: Room
    host: Room | None


def nearest_miss(ground: Ground, rung: Rung, name: str, part: ClusterPart) -> Miss | None:
    """What one technique lacks on a rung that it does not fit: its plan if every device were just
    enough larger, in proportion. None where it has no plan however large they are."""
    search = _Search(ground, Scaled(rung))
    if search.attempt(0, name, part) is None:
        return None
    # Most misses are narrow: from the real memory upwards, in growing steps.
    high, step = search.end(0), 1
    while not search.attempt(low := max(0, high - step), name, part):
        high, step = low, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if search.attempt(middle, name, part) else (low, middle)
    limit = search.attempt(low, name, part)
    assert limit is not None
    task = search.task(rung, part)
    devices = rooms(task, limit.plan, limit.estimate, hosts=False)
    hosts = rooms(task, limit.plan, limit.estimate)[len(devices) :]
    return Miss(max(devices, key=_share), max(hosts, key=_share, default=None))


def at_once(task: Task, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate's plan with a step's sequences all computed at once, without and with
    recompute; none if piped."""
    if any(len(replica.stages) > 1 for replica in candidate.plan.replicas):
        return
    for recompute in (True,) if task.train.recompute else (False, True):
        replicas = tuple(
            msgspec.structs.replace(
                replica,
                microbatches=1,
                in_flight=(1,),
                stages=tuple(
                    msgspec.structs.replace(stage, recompute=recompute) for stage in replica.stages
                ),
            )
            for replica in candidate.plan.replicas
        )
        plan = msgspec.structs.replace(candidate.plan, replicas=replicas)
        yield msgspec.structs.replace(candidate, plan=plan, estimate=price(plan, task.costs))


def limit_of(candidate: Candidate, rung: Rung, room: Room) -> Limit:
    """A candidate that fits a rung, and what it fills most."""
    rows = [
        replica.micro_rows(i, c)
        for replica in candidate.plan.replicas
        for i, stage in enumerate(replica.stages)
        for c in range(len(stage.rows))
    ]
    again = any(stage.recompute for replica in candidate.plan.replicas for stage in replica.stages)
    return Limit(
        technique=candidate.technique,
        where=candidate.where,
        places=candidate.places,
        amount=rung.amount,
        typed=rung.typed,
        micro_rows=max(rows),
        recompute=again,
        binds=room,
        plan=candidate.plan,
        estimate=candidate.estimate,
    )


def fullest(task: Task, plan: Plan, estimate: Estimate, *, hosts: bool = True) -> Room:
    """The device, or the host, whose memory a plan fills to the largest share."""
    return max(rooms(task, plan, estimate, hosts=hosts), key=_share)


def _share(room: Room) -> float:
    return room.used / room.usable


def rooms(task: Task, plan: Plan, estimate: Estimate, *, hosts: bool = True) -> list[Room]:
    """Every device that a plan uses, and every host whose memory is known."""
    used = sorted(
        rank for replica in plan.replicas for stage in replica.stages for rank in stage.mesh.ranks
    )
    all_rooms = []
    for rank, memory in zip(used, estimate.memory, strict=True):
        device, at = task.costs.network.devices[rank], task.devices[rank]
        all_rooms.append(
            _room(
                f"{device.kind}, device {at.index} of {at.host}", memory.total, task.capacity(rank)
            )
        )
    if hosts:
        all_rooms += [
            _room(f"host {host.name}'s own memory", host_bytes(task, host.name), host.memory)
            for host in task.cluster.hosts
            if host.memory is not None
        ]
    return all_rooms


def _room(name: str, used: float, usable: float) -> Room:
    return Room(name=name, used=used, usable=usable, spare=usable - used)
