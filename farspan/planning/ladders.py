"""Questions on what fits, as ladders: each rung is a model, its training and a cluster, harder than
the one before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from farspan import techniques
from farspan.domain.cluster import Cluster, Device
from farspan.domain.engine import Engine
from farspan.domain.model import ModelSpec, parameters
from farspan.domain.train import TrainSpec
from farspan.planning.parts import ClusterPart
from farspan.planning.size import shape_for

Asked = Literal["model", "batch", "memory"]
#: Techniques whose plans take milliseconds (one stage, no program to solve), those that divide most
#: first.
QUICK = ("fsdp", "hsdp", "zero2", "zero1", "data")
#: Neighbouring rungs of models and of memory differ by about so much; they are three digits long,
#: to be typed.
MODEL_STEP, MEMORY_STEP = 0.02, 0.01
#: The smallest model that is tried, and the least and the most memory.
LEAST_PARAMETERS, LEAST_MEMORY, MOST_MEMORY = 1_000_000, 64_000_000, 4_000_000_000_000
#: Sequences a device at once that are tried at most.
MOST_ROWS = 2**16


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
    def names(self) -> tuple[str, ...]:
        known = self.allow or techniques.names()
        return (
            *(name for name in QUICK if name in known),
            *(name for name in known if name not in QUICK),
        )


class Rung(msgspec.Struct, frozen=True):
    """One question of a ladder. `amount` says how hard it is, in the question's own unit."""

    amount: int
    model: ModelSpec
    train: TrainSpec
    cluster: Cluster
    typed: str = ""


class Ladder(Protocol):
    """The rungs of a question on some of the devices, each harder than the one before."""

    @property
    def asked(self) -> Asked: ...

    def __call__(self, index: int, devices: int) -> Rung | None:
        """The rung, or None beyond the last one."""
        ...


@dataclass(frozen=True, eq=False)
class Models:
    """Ever larger shapes of one family."""

    ground: Ground
    family: str
    vocab_size: int
    context: int
    asked: Asked = "model"

    def __call__(self, index: int, devices: int) -> Rung | None:
        return self._rung(index)

    @functools.lru_cache(maxsize=512)  # noqa: B019 - a ladder lives as long as its question
    def _rung(self, index: int) -> Rung | None:
        target = three_digits(LEAST_PARAMETERS * (1 + MODEL_STEP) ** index)
        if target > self._most():
            return None
        model = shape_for(
            self.family, target, vocab_size=self.vocab_size, context=self.context, knobs={}
        )
        cluster = self.ground.cluster
        return Rung(
            parameters(model), model, self.ground.train_for(model, cluster), cluster, typed(target)
        )

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _most(self) -> float:
        """Parameters whose state alone fills all devices."""
        tiny = shape_for(
            self.family,
            LEAST_PARAMETERS,
            vocab_size=self.vocab_size,
            context=self.context,
            knobs={},
        )
        each = state_bytes_each(
            self.ground.engine, self.ground.train_for(tiny, self.ground.cluster)
        )
        return max(
            2 * LEAST_PARAMETERS,
            sum(device.memory for device in self.ground.cluster.devices) / each,
        )


@dataclass(frozen=True, eq=False)
class Batches:
    """Ever more sequences a step: so many for each device, on average."""

    ground: Ground
    model: ModelSpec
    asked: Asked = "batch"

    def __call__(self, index: int, devices: int) -> Rung | None:
        if index >= MOST_ROWS:
            return None
        rows = (index + 1) * devices
        train = self.ground.train_for(self.model, self.ground.cluster)
        return Rung(
            rows, self.model, msgspec.structs.replace(train, batch=rows), self.ground.cluster
        )


@dataclass(frozen=True, eq=False)
class Memories:
    """Ever smaller devices, all alike."""

    ground: Ground
    model: ModelSpec
    asked: Asked = "memory"

    def __call__(self, index: int, devices: int) -> Rung | None:
        size = three_digits(MOST_MEMORY / (1 + MEMORY_STEP) ** index)
        if size < LEAST_MEMORY:
            return None
        train = self.ground.train_for(self.model, self.ground.cluster)
        return Rung(size, self.model, train, with_memory(self.ground.cluster, lambda device: size))


@dataclass(frozen=True, eq=False)
class Scaled:
    """One rung with ever less of ten thousand times its devices' memory."""

    rung: Rung
    asked: Asked = "memory"

    def __call__(self, index: int, devices: int) -> Rung | None:
        permille = round(1e7 / (1 + MEMORY_STEP) ** index)
        if permille < 1000:
            return None
        larger = with_memory(self.rung.cluster, lambda device: device.memory * permille // 1000)
        return Rung(permille, self.rung.model, self.rung.train, larger)


def holds_too_little(rung: Rung, engine: Engine, part: ClusterPart) -> bool:
    """Whether weights, gradients and optimizer state, divided as they may be, are more than the
    part's devices hold."""
    capacity = sum(engine.fill * rung.cluster.devices[place].memory for place in part.places)
    return parameters(rung.model) * state_bytes_each(engine, rung.train) > capacity


def state_bytes_each(engine: Engine, train: TrainSpec) -> int:
    """Bytes of weights, gradients and optimizer state a parameter, at least: Muon keeps one
    moment."""
    dtype = train.precision
    optimizer = engine.optimizer_bytes[dtype] - (4 if train.optimizer.muon else 0)
    return engine.weight_bytes[dtype] + engine.gradient_bytes[dtype] + optimizer


def with_memory(cluster: Cluster, memory: Callable[[Device], int]) -> Cluster:
    """The cluster with other memory in every device."""
    return cluster.with_devices(
        lambda host, i: msgspec.structs.replace(host.devices[i], memory=memory(host.devices[i]))
    )


def three_digits(number: float) -> int:
    """The number in its first three digits: what a person types."""
    scale = 10 ** max(0, len(str(int(number))) - 3)
    return int(round(number / scale) * scale)


def typed(parameters: int) -> str:
    """A count of parameters as `--model` takes it."""
    return f"{parameters / 1e9:.10g}B" if parameters >= 1e9 else f"{parameters / 1e6:.10g}M"
