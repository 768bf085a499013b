"""A plan in short form, made whole: blocks of a model on devices of a cluster.

The form holds what its author decides; all else is as usual. A person who wants other settings
edits the whole plan that `farspan plan -o` writes.
"""

from __future__ import annotations

import itertools
import math
import platform
import re
from typing import Annotated, Literal, NoReturn

import msgspec
from msgspec.structs import asdict

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.config import Positive, Quantity
from farspan.domain.engine import Engine, load_engine
from farspan.domain.escapes import key_word
from farspan.domain.graph import OpGraph
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Edge, GradSync, Mesh, Plan, Replica, Stage, Zero
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import convert
from farspan.domain.suggest import advise
from farspan.domain.units import counted
from farspan.estimate.estimate_plan import price
from farspan.estimate.network import NoLink
from farspan.planning.device_modes import settle_modes
from farspan.planning.plan_question import Question, model_of, train_of
from farspan.semantics.kernel_choice import BYTES
from farspan.techniques import Task
from farspan.techniques._search.even_grid import megatron_splits
from farspan.techniques._search.one_stage import BUCKET_BYTES

#: The dims that Megatron-LM splits, as a user knows them.
DIMS = {"n": "kv_heads", "f": "d_ff", "v": "vocab_size"}
_BLOCKS = msgspec.Meta(pattern=r"^\d{1,6}-\d{1,6}\Z", description="blocks such as 0-12 (0 to 11)")
_SOME = msgspec.Meta(min_length=1)


class ShortTrain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step: `batch` sequences, or tokens, of all devices together."""

    batch: Quantity
    seq_len: Positive | None = None
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    attention: Literal["sdpa", "vanilla"] = "sdpa"


class ShortStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Blocks `a-b`, b excluded, on devices `host:first-last`: `tp` neighbours share the operators
    of a sequence, `dp` groups of them share the sequences."""

    on: str | Annotated[tuple[str, ...], _SOME]
    layers: Annotated[str, _BLOCKS] | None = None
    tp: Positive = 1
    dp: Positive | None = None
    zero: Zero = 0
    recompute: bool = False


class ShortPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole form. A model that has no name stands there as in a whole plan."""

    model: str | ModelSpec
    train: ShortTrain
    stages: Annotated[tuple[ShortStage, ...], _SOME]
    microbatches: Positive = 1
    engine: str = "farspan"


def read_short_plan(table: object, where: str, cluster: Cluster, text: str = "") -> Plan:
    """Return the plan that a table in short form means on a cluster.

    Raises Refusal, with lines of the `text` that the table was read from.
    """
    short = convert(table, ShortPlan, where, text)
    return _Reader(short, where, cluster).make_plan()


class _Reader:
    """Makes a plan of one short form; refuses values at their place in its file."""

    def __init__(self, short: ShortPlan, where: str, cluster: Cluster) -> None:
        self.short = short
        self.where = where
        self.cluster = cluster

    def make_plan(self) -> Plan:
        short = self.short
        # Ranks are the devices of all stages in the cluster's order.
        places = self._place_stages()
        used = sorted(itertools.chain.from_iterable(places))
        model = short.model
        if isinstance(model, str):
            model = model_of(model, "model", self.where)
        models.family(model.family, self.where)
        asked = Question(model="", tokens="1", **asdict(short.train))
        train = train_of(asked, model, self.cluster.only(used), self.where)
        graph = models.graph(model)
        task = Task(model, graph, self.cluster, train, self._find_engine(), only=tuple(used))

        # Each stage's blocks and mesh decide how a step's sequences are divided.
        units = self._divide_blocks(model.layers)
        meshes = []
        for s, stage_places in enumerate(places):
            ranks = tuple(map(used.index, stage_places))
            meshes.append(self._make_mesh(s, ranks, units[s], graph))
        self._check_batch(train.batch, [len(mesh.batch) for mesh in meshes])

        stages = []
        for entry, mesh, stage_units in zip(short.stages, meshes, units, strict=True):
            groups = len(mesh.batch)
            each, more = divmod(train.batch, groups)
            splits: dict[str, str] = {}
            if entry.tp > 1:
                for op, dim in megatron_splits(graph).items():
                    if graph.sizes[dim] % entry.tp == 0:
                        splits[op] = dim
            stage = Stage(
                units=stage_units,
                mesh=mesh,
                rows=(each + 1,) * more + (each,) * (groups - more),
                grad_sync=GradSync(bucket_bytes=BUCKET_BYTES),
                zero=entry.zero,
                splits=splits,
                recompute=entry.recompute,
            )
            stages.append(stage)

        # In flight as in 1F1B (arXiv 1806.03377).
        depth = len(stages)
        in_flight = [min(short.microbatches, depth - s) for s in range(depth)]
        edge = Edge(bits=32 if BYTES[train.precision] == 4 else 16)
        replica = Replica(
            stages=tuple(stages),
            edges=(edge,) * (depth - 1),
            microbatches=short.microbatches,
            in_flight=tuple(in_flight),
        )
        plan = task.plan("given", [replica])
        try:
            estimate = price(plan, task.costs, brief=True)
        except NoLink:
            return plan  # Its price is asked next, and refused with both hosts.
        return settle_modes(plan, task.costs, estimate)

    def _refuse(self, code: str, key: str, what: str, fact: str, remedy: str) -> NoReturn:
        where = f"{self.where}, {key}"
        raise Refusal(code, what=what, where=where, fact=fact, remedy=remedy) from None

    def _find_engine(self) -> Engine:
        try:
            return load_engine(self.short.engine)
        except Refusal as refusal:
            problem = refusal.problem
            remedy = problem.remedy.replace("--engine", "set engine:")
            self._refuse(problem.code, "engine", problem.what, problem.fact, remedy)

    def _place_stages(self) -> list[list[int]]:
        """Return each stage's devices as places in the cluster; none may be named twice."""
        by_host = {}
        next_place = 0
        for host in self.cluster.machines:
            end = next_place + len(host.devices)
            by_host[host.name] = range(next_place, end)
            next_place = end
        places = []
        users: dict[int, str] = {}
        for s, stage in enumerate(self.short.stages):
            key = f"stages[{s}].on"
            stage_places: list[int] = []
            for item in (stage.on,) if isinstance(stage.on, str) else stage.on:
                item_places = self._find_places(key, item, by_host)
                for place in item_places:
                    if place in users:
                        what = f"a device of {item} is used twice"
                        fact = f"{users[place]} has it already"
                        remedy = f"take it out of {key_word(key)}"
                        self._refuse("plan-mismatch", key, what, fact, remedy)
                    users[place] = key
                stage_places += item_places
            places.append(stage_places)
        return places

    def _find_places(self, key: str, item: str, by_host: dict[str, range]) -> range:
        """Return the places of `host`, `host:2` or `host:0-3`; `localhost` is this machine."""
        match = re.fullmatch(r"(.*?)(?::(\d+)(?:-(\d+))?)?", item, re.DOTALL)
        assert match is not None
        host, first, last = match.groups()
        if host == "localhost":
            host = platform.node()
        places = by_host.get(host, range(0))
        low = int(first or 0)
        high = int(last or first or len(places) - 1)
        item_places = places[low : high + 1]
        if not item_places or len(item_places) <= high - low:
            known = ", ".join(f"{name}:0-{len(own) - 1}" for name, own in by_host.items())
            remedy = advise(host, by_host, synonyms=())
            what = f"there are no devices {item!r}"
            self._refuse("out-of-range", key, what, f"known: {known}", remedy)
        return item_places

    def _check_batch(self, batch: int, groups: list[int]) -> None:
        """Refuse a batch that does not divide; one stage without microbatches takes any that gives
        each of its groups a sequence."""
        parts = self.short.microbatches
        least = parts * math.lcm(*groups)
        if batch % least == 0 or (len(groups) == parts == 1 and batch >= least):
            return
        near = max(1, math.floor(batch / least + 0.5)) * least
        what = f"{counted(batch, 'sequence')} a step do not divide evenly"
        fact = f"dp and microbatches of the stages ask for a multiple of {least}"
        self._refuse("out-of-range", "train.batch", what, fact, f"set train.batch: {near:d}")

    def _divide_blocks(self, layers: int) -> list[tuple[int, int]]:
        """Return each stage's units: its blocks, the embedding before the first ones and the head
        after the last."""
        units = []
        done = 0
        last = len(self.short.stages) - 1
        for s, stage in enumerate(self.short.stages):
            blocks = stage.layers or f"0-{layers}"
            first, end = map(int, blocks.split("-"))
            # The first stage may have the embedding alone, the last one the head.
            least = layers if s == last else done + (s > 0)
            if first != done or not least <= end <= layers:
                key = f"stages[{s:d}].layers"
                until = min(max(least, end), layers)
                what = f"the blocks {blocks} leave out some, or are had twice"
                fact = f"the stage must begin at block {done}; the model has 0-{layers}"
                self._refuse(
                    "plan-mismatch", key, what, fact, f"set {key_word(key)}: {done:d}-{until:d}"
                )
            units.append((first + (s > 0), end + (2 if s == last else 1)))
            done = end
        return units

    def _make_mesh(
        self, s: int, ranks: tuple[int, ...], units: tuple[int, int], graph: OpGraph
    ) -> Mesh:
        stage = self.short.stages[s]
        count = len(ranks)
        tp = stage.tp
        dp = stage.dp or count // tp
        # What tp must divide: the stage's devices and the sizes of its operators.
        operators = itertools.chain.from_iterable(unit for unit, _ in graph.kinds(*units))
        dims = {op.divisible for op in operators}
        sizes = {name: graph.sizes[dim] for dim, name in DIMS.items() if dim in dims}
        common = math.gcd(count, *sizes.values())
        if tp * dp != count or common % tp:
            divisors = [ways for ways in range(1, common + 1) if common % ways == 0]
            near = min(divisors, key=lambda ways: abs(ways - tp))
            needs = ", ".join(f"{name} {size}" for name, size in sizes.items())
            code = "plan-mismatch" if tp * dp != count else "out-of-range"
            what = f"tp {tp} x dp {dp} do not divide the stage over {counted(count, 'device')}"
            fact = f"together they must be {count}, and tp must divide {needs}"
            remedy = f"set stages[{s:d}].tp: {near:d} and dp: {count // near:d}"
            self._refuse(code, f"stages[{s}].tp", what, fact, remedy)
        if tp == 1:
            return Mesh(ranks=ranks, shape=(dp,), axes=("data",))
        return Mesh(ranks=ranks, shape=(dp, tp), axes=("data", "tensor"))
