"""Stages of a plan in short form, made whole: units, mesh, rows and splits of each, and what
crosses between them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

from farspan.domain.escapes import key_word, shell_word
from farspan.domain.graph import Operator, OpGraph
from farspan.domain.plan import Axis, Edge, GradSync, Mesh, Replica, Stage, row_quantum
from farspan.domain.planfile import PlanRefusals, ReplicaEntry, StageEntry
from farspan.domain.problems import Refusal
from farspan.domain.suggest import advise
from farspan.domain.train import TrainSpec
from farspan.domain.units import counted, parse_bytes
from farspan.planning.quantities import positive
from farspan.semantics.kernel_choice import BYTES
from farspan.semantics.tensor_sharding import RESIDUAL, strategy

T = TypeVar("T")
#: The dims that Megatron-LM splits (arXiv 1909.08053), as a user knows them.
DIMS = {"n": "heads", "f": "d_ff", "v": "vocabulary"}


class _Draft(NamedTuple):
    """A stage but for its rows."""

    where: str
    entry: StageEntry
    units: tuple[int, int]
    mesh: Mesh
    splits: dict[str, str]

    @property
    def coordinates(self) -> int:
        return len(self.mesh.batch)


class StageReader:
    """Makes replicas of a model's graph and training; `sites` are those of every rank."""

    def __init__(
        self, graph: OpGraph, train: TrainSpec, sites: Sequence[str], refusals: PlanRefusals
    ) -> None:
        self._graph, self._train, self._sites, self._refusals = graph, train, sites, refusals

    def replica(
        self, at: str, entry: ReplicaEntry, batch: int, ranks: Sequence[tuple[int, ...]]
    ) -> Replica:
        """A replica that stands at `at` in the file, of `batch` sequences a step, whose stages run
        on these ranks."""
        drafts = []
        units = self._units(at, entry.stages)
        for s, (stage, own) in enumerate(zip(entry.stages, ranks, strict=True)):
            where = f"{at}stages[{s}]"
            mesh = self._mesh(where, stage, own)
            drafts.append(
                _Draft(where, stage, units[s], mesh, self._splits(where, stage, units[s], mesh))
            )
        depth, parts = len(drafts), entry.microbatches
        usual = tuple(
            parts if entry.schedule == "gpipe" else min(parts, depth - s) for s in range(depth)
        )
        in_flight = self._counted(f"{at}in_flight", entry.in_flight, depth) or usual
        edges = self._counted(f"{at}edges", entry.edges, depth - 1)
        if edges is None:
            edges = tuple(self._edge(a.mesh, b.mesh) for a, b in itertools.pairwise(drafts))
        rows = self._rows(at, entry, drafts, batch)
        stages = tuple(self._stage(draft, own) for draft, own in zip(drafts, rows, strict=True))
        return Replica(stages=stages, edges=edges, microbatches=parts, in_flight=in_flight)

    def _counted(
        self, place: str, values: tuple[T, ...] | None, count: int
    ) -> tuple[T, ...] | None:
        """Values of which there must be so many, if they are given."""
        if values is not None and len(values) != count:
            raise self._refusals.mismatch(
                place,
                f"{place} has {counted(len(values), 'value')}",
                f"the stages need {count}",
                f"remove {key_word(place)}, or give {count:d}",
            )
        return values

    def _stage(self, draft: _Draft, rows: tuple[int, ...]) -> Stage:
        entry = draft.entry
        bucket = entry.bucket
        size = (
            None
            if bucket is None
            else positive(parse_bytes, bucket, f"{draft.where}.bucket", "25MB", self._refusals.file)
        )
        far = len({self._sites[rank] for rank in draft.mesh.ranks}) > 1
        sync = GradSync(
            bucket_bytes=size,
            topology=entry.topology,
            wan_rate=entry.wan_rate,
            bits=entry.bits or (self._train.wan_bits if far else 32),
        )
        recompute = self._train.recompute if entry.recompute is None else entry.recompute
        return Stage(
            units=draft.units,
            mesh=draft.mesh,
            rows=rows,
            grad_sync=sync,
            zero=entry.zero,
            splits=draft.splits,
            recompute=recompute,
        )

    def _edge(self, a: Mesh, b: Mesh) -> Edge:
        bits: Literal[8, 16, 32] = 32 if BYTES[self._train.precision] == 4 else 16
        if self._sites[a.ranks[-1]] != self._sites[b.ranks[0]] and self._train.wan_bits < bits:
            bits = self._train.wan_bits
        return Edge(bits=bits)

    # -- blocks
    #   --------------------------------------------------------------------------------------------

    def _units(self, at: str, stages: Sequence[StageEntry]) -> list[tuple[int, int]]:
        """Each stage's units: its blocks, the embedding before the first ones and the head after
        the last."""
        layers, done, units = self._graph.layers, 0, []
        for s, stage in enumerate(stages):
            where, last = f"{at}stages[{s}].layers", s == len(stages) - 1
            first, end = self._blocks(where, stage, f"{done}-{layers}")
            # The ends may have no block: the embedding alone, or the head.
            least = done if s == 0 or last else done + 1
            until = layers if last else min(max(least, end), layers)
            fix = f"set {key_word(where)}: {done:d}-{until:d}"
            has = f"the model has blocks 0 to {layers - 1}"
            if first > done:
                raise self._refusals.mismatch(
                    where, f"no stage has {_named(done, first)}", has, fix
                )
            if first < done:
                twice = _named(first, min(done, max(end, first + 1)))
                raise self._refusals.mismatch(
                    where,
                    f"two stages have {twice}",
                    f"stages[{s - 1}] ends with block {done - 1}",
                    fix,
                )
            if not least <= end <= layers:
                raise self._refusals.mismatch(
                    where, f"the blocks {stage.layers} cannot be a stage", has, fix
                )
            if last and end < layers:
                raise self._refusals.mismatch(
                    where, f"no stage has {_named(end, layers)}", has, fix
                )
            units.append((0 if s == 0 else first + 1, end + (2 if last else 1)))
            done = end
        return units

    def _blocks(self, where: str, stage: StageEntry, example: str) -> tuple[int, int]:
        """Bounds of `a-b`; all blocks where nothing is said."""
        written = f"0-{self._graph.layers}" if stage.layers is None else stage.layers
        match = re.fullmatch(r"\s*(\d{1,6})\s*-\s*(\d{1,6})\s*", written)
        if match is None:
            raise self._refusals.value(
                where,
                f"{written!r} is no range of blocks",
                "0-12 are blocks 0 to 11",
                f"set {key_word(where)}: {example}",
            )
        return int(match[1]), int(match[2])

    # -- devices
    #   --------------------------------------------------------------------------------------------

    def _mesh(self, where: str, stage: StageEntry, ranks: tuple[int, ...]) -> Mesh:
        count, tp = len(ranks), stage.tp
        dp = stage.dp or count // tp
        if tp * dp != count:
            near = min(
                (ways for ways in range(1, count + 1) if count % ways == 0),
                key=lambda ways: abs(ways - tp),
            )
            product = (
                f"tp {tp} x dp {dp} are {tp * dp}"
                if stage.dp
                else f"tp {tp} does not divide {count}"
            )
            raise self._refusals.mismatch(
                where,
                f"tp and dp do not make {counted(count, 'device')}",
                f"on names {count}; {product}",
                f"set {key_word(where)}.tp: {near:d} and dp: {count // near:d}",
            )
        if dp % stage.sites:
            near = max(parts for parts in range(1, stage.sites) if dp % parts == 0)
            raise self._refusals.value(
                f"{where}.sites",
                f"dp {dp} does not divide into {stage.sites} sites",
                f"{dp} is no multiple of {stage.sites}",
                f"set {key_word(where)}.sites: {near:d}",
            )
        sizes: dict[Axis, int] = {"site": stage.sites, "data": dp // stage.sites, "tensor": tp}
        kept = {axis: size for axis, size in sizes.items() if axis == "data" or size > 1}
        return Mesh(ranks=ranks, shape=tuple(kept.values()), axes=tuple(kept))

    def _splits(
        self, where: str, stage: StageEntry, units: tuple[int, int], mesh: Mesh
    ) -> dict[str, str]:
        """The dim of every operator that the tensor axis divides: Megatron-LM's, unless the file
        says others."""
        ways, graph = mesh.size("tensor"), self._graph
        if stage.splits is not None:
            return self._given_splits(where, stage.splits, ways)
        if ways == 1:
            return {}
        own = {op.divisible for unit, _ in graph.kinds(*units) for op in unit if op.divisible}
        for dim in (dim for dim in DIMS if dim in own and graph.sizes[dim] % ways):
            raise self._undivided(
                where, stage, dim, [graph.sizes[other] for other in own], len(mesh.ranks)
            )
        every = (
            op for unit in (graph.embedding, graph.block, graph.head) for op in unit if op.divisible
        )
        return {op.name: op.divisible for op in every if graph.sizes[op.divisible] % ways == 0}

    def _undivided(
        self, where: str, stage: StageEntry, dim: str, sizes: list[int], count: int
    ) -> Refusal:
        size, tp = self._graph.sizes[dim], stage.tp
        common = math.gcd(count, *sizes)
        near = min(
            (ways for ways in range(1, common + 1) if common % ways == 0),
            key=lambda ways: abs(ways - tp),
        )
        grouped = dim == "n" and self._graph.sizes["r"] > self._graph.sizes["e"]
        name = "kv_heads" if grouped else DIMS[dim]
        padded = f"; a vocabulary of {-(-size // tp) * tp} would do" if dim == "v" else ""
        fix = "" if stage.dp is None else f" and dp: {count // near:d}"
        return self._refusals.value(
            f"{where}.tp",
            f"tp {tp} does not divide the model's {name}",
            f"{size} is no multiple of {tp}{padded}",
            f"set {key_word(where)}.tp: {near:d}{fix}",
        )

    def _given_splits(self, where: str, splits: dict[str, str], ways: int) -> dict[str, str]:
        graph = self._graph
        known: dict[str, Operator] = {
            op.name: op for unit in (graph.embedding, graph.block, graph.head) for op in unit
        }
        for name, dim in splits.items():
            place = f"{where}.splits.{name}"
            if name not in known and name != RESIDUAL:
                names = [*known, RESIDUAL]
                raise Refusal(
                    "unknown-key",
                    what=f"the model has no operator {name!r}",
                    where=f"{self._refusals.file}, {place}",
                    fact=f"known: {', '.join(names)}",
                    remedy=advise(name, names, synonyms=()),
                )
            fits = [
                "",
                "b",
                *(
                    d
                    for d in (known[name].divisible if name in known else "")
                    if graph.sizes[d] % ways == 0
                ),
            ]
            if dim not in fits:
                raise self._refusals.value(
                    place,
                    f"{name} cannot be divided by {dim!r} among {ways}",
                    f"possible: {', '.join(map(repr, fits))}",
                    f"set {key_word(place)}: {shell_word(fits[-1])}",
                )
            if name in known:
                strategy(known[name], dim)
        return splits

    # -- rows
    #   --------------------------------------------------------------------------------------------

    def _rows(
        self, at: str, entry: ReplicaEntry, drafts: list[_Draft], batch: int
    ) -> list[tuple[int, ...]]:
        """Sequences a step of every batch coordinate of every stage."""
        parts, piped = entry.microbatches, len(drafts) > 1
        portions = [parts * row_quantum(draft.mesh, draft.splits) for draft in drafts]
        if (
            not piped
            and parts == portions[0] == 1
            and drafts[0].entry.rows is None
            and batch >= drafts[0].coordinates
        ):
            each, more = divmod(batch, drafts[0].coordinates)
            return [tuple(each + (c < more) for c in range(drafts[0].coordinates))]
        needed = [
            portion * d.coordinates
            for portion, d in zip(portions, drafts, strict=True)
            if d.entry.rows is None
        ]
        least = math.lcm(*needed)
        if batch % least:
            near = max(1, math.floor(batch / least + 0.5)) * least
            place = f"{at}batch" if at else "train.batch"
            raise self._refusals.value(
                place,
                f"{counted(batch, 'sequence')} a step do not divide evenly",
                f"dp and microbatches of the stages ask for a multiple of {least}",
                f"set {key_word(place)}: {near:d}",
            )
        return [
            (batch // draft.coordinates,) * draft.coordinates
            if draft.entry.rows is None
            else self._given_rows(
                draft, batch, portion if piped or portion > parts else 1, piped=piped
            )
            for draft, portion in zip(drafts, portions, strict=True)
        ]

    def _given_rows(
        self, draft: _Draft, batch: int, portion: int, *, piped: bool
    ) -> tuple[int, ...]:
        place, rows, count = f"{draft.where}.rows", draft.entry.rows or (), draft.coordinates
        each, more = divmod(batch // portion, count)
        even = ", ".join(f"{(each + (c < more)) * portion:d}" for c in range(count))
        fix = f"set {key_word(place)}: [{even}]"
        if batch % portion or not each:
            near = max(1, math.floor(batch / portion / count + 0.5)) * portion * count
            raise self._refusals.value(
                place,
                f"no rows divide {counted(batch, 'sequence')}",
                f"each of {count} must be a multiple of {portion}",
                f"set train.batch: {near:d}",
            )
        if len(rows) != count:
            raise self._refusals.mismatch(
                place,
                f"there are {len(rows)} rows for {counted(count, 'group')} of devices",
                f"dp is {count}",
                fix,
            )
        if sum(rows) != batch:
            raise self._refusals.mismatch(
                place,
                "the rows do not sum to the batch",
                f"they sum to {sum(rows)}, a step has {batch}",
                fix,
            )
        for n in rows:
            if n % portion or (piped and n < 1):
                raise self._refusals.value(
                    place,
                    f"{n} rows do not come in equal microbatches",
                    f"each must be a multiple of {portion}",
                    fix,
                )
        return rows


def _named(first: int, end: int) -> str:
    return f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"
