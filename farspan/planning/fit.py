"""What fits: the largest model, the largest batch, or the least memory a device needs. By bisection
over real plans.

Each question is a ladder whose rungs are harder one by one; a rung fits where some technique, on
the whole cluster or on a part of it, makes a plan that every device and every host has the memory
for. The answer is a rung that fits below one that no technique fits. Techniques that plan in
milliseconds are each followed to their last rung; those that search for longer are tried only
beyond what the others reach.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from farspan import models, techniques
from farspan.domain.cluster import Cluster, Device, Host
from farspan.domain.cost import Estimate
from farspan.domain.engine import Engine
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.plan import Plan
from farspan.domain.train import TrainSpec
from farspan.domain.units import format_bytes
from farspan.estimate.estimate_plan import price
from farspan.planning.candidate import Candidate, Refused
from farspan.planning.cluster_parts import ClusterPart, all_parts
from farspan.planning.rank_plans import host_bytes, price_technique
from farspan.planning.ranking import used_ranks
from farspan.planning.size import shape_for
from farspan.techniques import Task

Asked = Literal["model", "batch", "memory"]
#: Techniques whose plans take milliseconds (one stage, no program to solve), those that divide most
#: first.
QUICK = ("fsdp", "hsdp", "zero2", "zero1", "data")
#: Neighbouring rungs of models and of memory differ by about this share; they are three digits
#: long, to be typed. More than MOST_RUNGS of them no ladder has.
MODEL_STEP = 0.02
MEMORY_STEP = 0.01
MOST_RUNGS = 1200
#: The smallest model that is tried, and the least and the most memory.
LEAST_PARAMETERS = 1_000_000
LEAST_MEMORY = 64_000_000
MOST_MEMORY = 4_000_000_000_000
#: Sequences a device at once that are tried at most.
MOST_ROWS = 2**16
#: A plan that lacks memory is looked for on devices up to this many times larger.
MOST_SCALE = 10_000


# -- the question
#   ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ground:
    """What stays the same while a question climbs: the cluster, the engine, and what training a
    model means there."""

    cluster: Cluster
    engine: Engine
    train_for: Callable[[ModelSpec, Cluster], TrainSpec]
    #: Techniques to use; none is all.
    allow: tuple[str, ...] = ()

    @property
    def allowed(self) -> list[str]:
        """The techniques to use, quick ones first."""
        allowed = self.allow or techniques.technique_names()
        quick = [name for name in QUICK if name in allowed]
        return quick + [name for name in allowed if name not in QUICK]


class Rung(msgspec.Struct, frozen=True):
    """One question of a ladder. `amount` is how hard it is, in the question's own unit."""

    amount: int
    model: ModelSpec
    train: TrainSpec
    cluster: Cluster
    #: What `--model` takes for this size.
    typed: str = ""


class Ladder(NamedTuple):
    """Questions of one kind, each harder than the one before: `rung` takes its place, from 0, and
    how many devices are used."""

    asked: Asked
    length: int
    rung: Callable[[int, int], Rung]

    def hardness(self, amount: int) -> int:
        return -amount if self.asked == "memory" else amount


def model_ladder(ground: Ground, family: str, vocab_size: int, context: int) -> Ladder:
    """Return ever larger shapes of one family, until their state alone fills all devices."""
    cluster = ground.cluster
    shape = functools.partial(shape_for, family, vocab_size=vocab_size, context=context, knobs={})
    smallest = ground.train_for(shape(LEAST_PARAMETERS), cluster)
    memory = sum(device.memory for device in cluster.devices)
    most = max(2 * LEAST_PARAMETERS, memory / state_bytes_each(ground.engine, smallest))
    targets = []
    for i in range(MOST_RUNGS):
        target = three_digits(LEAST_PARAMETERS * (1 + MODEL_STEP) ** i)
        if target <= most:
            targets.append(target)

    @functools.cache
    def rung(index: int) -> Rung:
        model = shape(targets[index])
        train = ground.train_for(model, cluster)
        return Rung(
            count_parameters(model), model, train, cluster, format_parameters(targets[index])
        )

    return Ladder("model", len(targets), lambda index, devices: rung(index))


def batch_ladder(ground: Ground, model: ModelSpec) -> Ladder:
    """Return ever more sequences a step that are computed all at once: the same number for each
    device, on average.

    Accumulating gradients over parts of a batch makes any batch fit, and so does a pipeline, which
    is made of parts: neither counts.
    """
    train = ground.train_for(model, ground.cluster)

    def rung(index: int, devices: int) -> Rung:
        rows = (index + 1) * devices
        return Rung(rows, model, replace(train, batch=rows), ground.cluster)

    return Ladder("batch", MOST_ROWS, rung)


def memory_ladder(ground: Ground, model: ModelSpec) -> Ladder:
    """Return ever smaller devices, all alike."""
    sizes = []
    for i in range(MOST_RUNGS):
        size = three_digits(MOST_MEMORY / (1 + MEMORY_STEP) ** i)
        if size >= LEAST_MEMORY:
            sizes.append(size)
    whole = Rung(0, model, ground.train_for(model, ground.cluster), ground.cluster)
    return shrink_devices(whole, sizes, lambda device, size: size)


def scaled_ladder(rung: Rung) -> Ladder:
    """Return one rung with ever less of MOST_SCALE times its devices' memory, down to their own."""
    permilles = []
    for i in range(MOST_RUNGS):
        permille = round(1000 * MOST_SCALE / (1 + MEMORY_STEP) ** i)
        if permille >= 1000:
            permilles.append(permille)
    return shrink_devices(
        rung, permilles, lambda device, permille: device.memory * permille // 1000
    )


def shrink_devices(
    rung: Rung, amounts: Sequence[int], memory: Callable[[Device, int], int]
) -> Ladder:
    """Return the rung with each amount of memory in its devices."""

    @functools.cache
    def shrunk(index: int) -> Rung:
        amount = amounts[index]
        cluster = with_memory(rung.cluster, lambda device: memory(device, amount))
        return Rung(amount, rung.model, rung.train, cluster)

    return Ladder("memory", len(amounts), lambda index, devices: shrunk(index))


def holds_too_little(rung: Rung, engine: Engine, part: ClusterPart) -> bool:
    """Return whether weights, gradients and optimizer state, divided as they may be, are more than
    the part's devices hold."""
    devices = rung.cluster.devices
    capacity = sum(engine.fill * devices[place].memory for place in part.places)
    state = models.count_trained(rung.model) * state_bytes_each(engine, rung.train)
    if rung.model.lora:
        state += count_parameters(rung.model) * engine.weight_bytes[rung.train.precision]
    return state > capacity


def state_bytes_each(engine: Engine, train: TrainSpec) -> int:
    """Return the bytes of weights, gradients and optimizer state a parameter, at least: Muon keeps
    one moment."""
    dtype = train.precision
    optimizer = engine.optimizer_bytes[dtype] - (4 if train.optimizer.muon else 0)
    return engine.weight_bytes[dtype] + engine.gradient_bytes[dtype] + optimizer


def with_memory(cluster: Cluster, memory: Callable[[Device], int]) -> Cluster:
    """Return the cluster with other memory in every device."""

    def resize(host: Host, index: int) -> Device:
        device = host.devices[index]
        return replace(device, memory=memory(device))

    return cluster.with_devices(resize)


def three_digits(number: float) -> int:
    """Return the number in its first three digits: what a person types."""
    scale = 10 ** max(0, len(str(int(number))) - 3)
    return int(round(number / scale) * scale)


def format_parameters(parameters: int) -> str:
    """Return a count of parameters as `--model` takes it."""
    return f"{parameters / 1e9:.10g}B" if parameters >= 1e9 else f"{parameters / 1e6:.10g}M"


# -- the answer
#   ------------------------------------------------------------------------------------------------


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one device or host: bytes that a plan takes, bytes that it may, and the
    difference."""

    name: str
    used: float
    usable: float
    spare: float

    def fill(self) -> float:
        return self.used / self.usable

    def __str__(self) -> str:
        rest = f"{format_bytes(self.spare)} to spare"
        if self.spare < 0:
            rest = f"short of {format_bytes(-self.spare)}"
        usable = format_bytes(self.usable)
        return f"{self.name}: {format_bytes(self.used)} of {usable} usable, {rest}"


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The hardest rung of one technique: parameters, sequences a step, or bytes of a device."""

    technique: str
    where: str
    places: tuple[int, ...]
    amount: int
    #: The rung as an argument: what `--model` takes for this size.
    typed: str
    #: Sequences that the busiest device computes at a time, and whether it computes forward passes
    #: again.
    micro_rows: int
    recompute: bool
    #: What is fullest.
    binds: Room
    plan: Plan
    estimate: Estimate


class LargestModels(msgspec.Struct, frozen=True, kw_only=True):
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
        """Return the answer as `--json` has it."""
        limits = []
        for limit in self.limits:
            fields = msgspec.to_builtins(limit)
            limits.append({**fields, "estimate": limit.estimate.as_json()})
        return {**msgspec.to_builtins(self), "limits": limits}


def find_hardest_rung(ground: Ground, ladder: Ladder) -> LargestModels | None:
    """Return the hardest rung that any technique fits on any part, and what is lacking on the next;
    None where the first fits nowhere."""
    search = RungSearch(ground, ladder)
    allowed = ground.allowed
    for name in allowed:
        search.follow(name, None if name in QUICK else search.hardest())
    # What was left out beyond an earlier best is tried beyond the last one, until nothing goes
    # further: then every technique was tried there on every part.
    while (best := search.hardest()) and any(search.follow(name, best) for name in allowed):
        pass
    if best is None:
        return None
    order = [*search.reached.values()]
    order.sort(key=lambda limit: allowed.index(limit.technique))
    order.sort(key=lambda limit: -ladder.hardness(limit.amount))

    # The next rung, and what is lacking there.
    best = order[0]
    devices = len(best.places)
    index = search.after(best.amount, devices)
    next_amount = None
    next_lacks = None
    if index < ladder.length:
        next_amount = ladder.rung(index, devices).amount
        next_lacks = search.lacking(index, best)
    return LargestModels(
        asked=ladder.asked,
        limits=tuple(order),
        next_amount=next_amount,
        next_lacks=next_lacks,
    )


class RungSearch:
    """One ladder, climbed by every technique on every part of the cluster."""

    def __init__(self, ground: Ground, ladder: Ladder) -> None:
        self.ground = ground
        self.ladder = ladder
        self.parts = all_parts(ground.cluster)
        #: The best of each technique that was followed.
        self.reached: dict[str, Limit] = {}
        self.attempt = functools.cache(self._attempt_rung)
        self.task = functools.cache(self._make_task)

    def hardest(self) -> Limit | None:
        limits = self.reached.values()
        return max(limits, key=lambda limit: self.ladder.hardness(limit.amount), default=None)

    def follow(self, name: str, beyond: Limit | None) -> bool:
        """Follow one technique on every part beyond what is reached; return whether it got
        further."""
        further = False
        for part in self.parts:
            start = 0 if beyond is None else self.after(beyond.amount, len(part.places))
            first = self.attempt(start, name, part)
            if first is None:
                continue
            last = self.attempt(self.last_that_fits(start, name, part), name, part)
            assert last is not None
            # Shapes do not grow evenly: the last rung that fits may be a little smaller than one
            # before it.
            beyond = max(first, last, key=lambda limit: self.ladder.hardness(limit.amount))
            self.reached[name] = beyond
            further = True
        return further

    def last_that_fits(self, start: int, name: str, part: ClusterPart) -> int:
        """Return the last rung that a technique fits on a part, by bisection; `start` fits."""
        harder = range(start + 1, self.ladder.length)
        fitting = bisect_left(harder, True, key=lambda i: self.attempt(i, name, part) is None)
        return start + fitting

    def after(self, amount: int, devices: int) -> int:
        """Return the first rung that is harder than `amount`."""
        ladder = self.ladder

        def rung_hardness(index: int) -> int:
            return ladder.hardness(ladder.rung(index, devices).amount)

        return bisect_right(range(ladder.length), ladder.hardness(amount), key=rung_hardness)

    def _attempt_rung(self, index: int, name: str, part: ClusterPart) -> Limit | None:
        """Return a technique's plan for a rung on a part, if everything has the memory for it."""
        if index >= self.ladder.length:
            return None
        rung = self.ladder.rung(index, len(part.places))
        if holds_too_little(rung, self.ground.engine, part):
            return None
        task = self.task(index, part)
        for variant in self.variants(task, name, part):
            room = self.fullest(task, variant)
            if room.spare >= 0:
                return limit_of(variant, rung, room)
        return None

    def _make_task(self, index: int, part: ClusterPart) -> Task:
        return task_on(part, self.ladder.rung(index, len(part.places)), self.ground.engine)

    def variants(self, task: Task, name: str, part: ClusterPart) -> Iterator[Candidate]:
        """Yield the plans of a technique that answer the question, if it has any."""
        answer = price_technique(task, part, name)
        if isinstance(answer, Refused):
            return
        if self.ladder.asked == "batch":
            yield from at_once(task, answer)
        else:
            yield answer

    def fullest(self, task: Task, candidate: Candidate) -> Room:
        """Return the device, or the host, whose memory a plan fills to the largest share. Where
        devices' memory is asked, hosts do not count."""
        rooms = device_rooms(task, candidate)
        if self.ladder.asked != "memory":
            rooms += host_rooms(task)
        return max(rooms, key=Room.fill)

    def lacking(self, index: int, best: Limit) -> Room | None:
        """Return the memory that the technique of the answer lacks on a harder rung."""
        part = ClusterPart(name=best.where, places=best.places)
        if self.ladder.asked == "batch":
            task = self.task(index, part)
            variants = self.variants(task, best.technique, part)
            rooms = [self.fullest(task, variant) for variant in variants]
            return max(rooms, key=lambda room: room.spare, default=None)
        rung = self.ladder.rung(index, len(part.places))
        missed = nearest_miss(self.ground, rung, best.technique, part)
        if missed is None:
            return None
        if missed.host is None or self.ladder.asked == "memory":
            return missed.device
        return max(missed.host, missed.device, key=Room.fill)


class Miss(NamedTuple):
    """The fullest device, and the fullest host of known memory, of a plan that does not fit."""

    device: Room
    host: Room | None


def nearest_miss(ground: Ground, rung: Rung, name: str, part: ClusterPart) -> Miss | None:
    """Return the shortfall of a technique on a rung that it does not fit: its plan if every device
    were just enough larger, in proportion. None where it has no plan however large they are."""
    search = RungSearch(ground, scaled_ladder(rung))
    if search.attempt(0, name, part) is None:
        return None
    # Most misses are narrow: from the real memory upwards, in growing steps.
    step = 1
    while search.attempt(start := max(0, search.ladder.length - step), name, part) is None:
        step *= 2
    limit = search.attempt(search.last_that_fits(start, name, part), name, part)
    assert limit is not None
    task = task_on(part, rung, ground.engine)
    host = max(host_rooms(task), key=Room.fill, default=None)
    return Miss(max(device_rooms(task, limit), key=Room.fill), host)


def task_on(part: ClusterPart, rung: Rung, engine: Engine) -> Task:
    """Return the planning task of a rung on a part of its cluster."""
    only = None if len(part.places) == len(rung.cluster.devices) else part.places
    graph = models.graph(rung.model)
    return Task(rung.model, graph, rung.cluster, rung.train, engine, only=only)


def at_once(task: Task, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate's plan with a step's sequences all computed at once, without and with
    recompute; none if piped."""
    old = candidate.plan.replicas
    if any(len(replica.stages) > 1 for replica in old):
        return
    for recompute in (True,) if task.train.recompute else (False, True):
        replicas = []
        for replica in old:
            stages = tuple(replace(stage, recompute=recompute) for stage in replica.stages)
            replicas.append(replace(replica, microbatches=1, in_flight=(1,), stages=stages))
        plan = replace(candidate.plan, replicas=tuple(replicas))
        yield replace(candidate, plan=plan, estimate=price(plan, task.costs))


def limit_of(candidate: Candidate, rung: Rung, room: Room) -> Limit:
    """Return a candidate that fits a rung, and what it fills most."""
    micro_rows = 0
    recompute = False
    for replica in candidate.plan.replicas:
        for i, stage in enumerate(replica.stages):
            recompute = recompute or stage.recompute
            for c in range(len(stage.rows)):
                micro_rows = max(micro_rows, replica.micro_rows(i, c))
    return Limit(
        technique=candidate.technique,
        where=candidate.where,
        places=candidate.places,
        amount=rung.amount,
        typed=rung.typed,
        micro_rows=micro_rows,
        recompute=recompute,
        binds=room,
        plan=candidate.plan,
        estimate=candidate.estimate,
    )


def device_rooms(task: Task, priced: Candidate | Limit) -> list[Room]:
    """Return the room of every device that a plan uses."""
    rooms = []
    for rank, memory in zip(used_ranks(priced.plan), priced.estimate.memory, strict=True):
        at = task.devices[rank]
        kind = task.costs.network.devices[rank].kind
        name = f"{kind}, device {at.index} of {at.host}"
        rooms.append(_make_room(name, memory.total, task.capacity(rank)))
    return rooms


def host_rooms(task: Task) -> list[Room]:
    """Return the room of every host with known memory."""
    rooms = []
    for host in task.cluster.hosts:
        if host.memory is not None:
            name = f"host {host.name}'s own memory"
            rooms.append(_make_room(name, host_bytes(task, host.name), host.memory))
    return rooms


def _make_room(name: str, used: float, usable: float) -> Room:
    return Room(name=name, used=used, usable=usable, spare=usable - used)
