"""Seeded plans that no technique emits: any cuts, meshes, rows, levels, splits, edges, depths and
replicas that a Plan may have and the runtime promises to run."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

from msgspec.structs import replace

from farspan import models
from farspan.domain.model import ModelSpec, SlidingWindow
from farspan.domain.plan import Axis, Edge, GradSync, Mesh, Plan, Replica, Stage, Sync
from farspan.semantics.tensor_sharding import RESIDUAL, strategies
from tests.runtime.plans import GPT2, LLAMA, LLAMA_TIED, MEGATRON, SEQUENCE, TRAIN, VOCABULARY, plan

MOST_RANKS = 8
MODELS = (
    GPT2,
    LLAMA,
    LLAMA_TIED,
    replace(GPT2, tied=False, layers=3),
    replace(LLAMA, bias=True, layers=1),
    replace(GPT2, family="opt", activation="relu", extra_positions=2),
)
#: Of later families: the plans of a seed are recorded without them (tests/golden).
LATER_MODELS = (
    replace(LLAMA, family="qwen2", qkv_bias=True),
    replace(LLAMA, family="qwen3", qk_norm=True, head_size=6),
    replace(
        GPT2,
        family="gpt_neox",
        activation="gelu",
        positions="rope",
        rotary_dims=2,
        parallel_residual=True,
    ),
    replace(LLAMA, family="smollm3", unrotated_layers=(1,)),
    replace(LLAMA, family="olmo2", joint_qk_norm=True, norm_place="after"),
    replace(
        LLAMA_TIED,
        family="gemma3",
        activation="geglu_tanh",
        qk_norm=True,
        head_size=6,
        query_scalar=9,
        norm_place="around",
        offset_gains=True,
        scaled_embedding=True,
        window=SlidingWindow(size=3, layers=(0, 2), rope_theta=100.0),
    ),
)


def random_plan(seed: int, among: Sequence[ModelSpec] = MODELS) -> Plan:
    """Up to eight ranks of up to three sites, most of them in one replica."""
    rng = random.Random(seed)
    model = rng.choice(among)
    world = rng.randint(1, MOST_RANKS)
    sites = rng.randint(1, 3)
    ranks = list(range(world))
    if rng.random() < 0.3:
        rng.shuffle(ranks)
    count = min(world, rng.choice((1, 1, 1, 2, 3)))
    parts = _divided(rng, ranks, count)
    replicas = [replica for part in parts if (replica := _replica(rng, model, part))]
    sync = Sync(
        every=rng.randint(1, 3),
        overlap=rng.random() < 0.5,
        lr=rng.choice((0.5, 0.7, 1.0)),
        momentum=rng.choice((0.0, 0.6, 0.9)),
    )
    train = replace(
        TRAIN,
        attention=rng.choice(("sdpa", "vanilla")),
        seed=rng.randrange(100),
        seq_len=rng.choice((1, 5, 8, 12)),
        optimizer=replace(TRAIN.optimizer, clip=rng.choice((0.0, 1.0))),
    )
    at = (
        sorted(rng.randrange(sites) for _ in ranks)
        if rng.random() < 0.8
        else [rng.randrange(sites) for _ in ranks]
    )
    alone = count == 1 and rng.random() < 0.9
    return plan(*replicas, sites=at, model=model, sync=None if alone else sync, train=train)


def divided(rng: random.Random, model: ModelSpec, world: int, batch: int) -> Replica:
    """A synchronous step of so many sequences, divided over so many ranks in any way."""
    while (replica := _replica(rng, model, range(world), batch)) is None:
        pass
    return replica


def _divided(rng: random.Random, ranks: Sequence[int], count: int) -> list[Sequence[int]]:
    """Consecutive parts, one rank at least in each."""
    cuts = [0, *sorted(rng.sample(range(1, len(ranks)), count - 1)), len(ranks)]
    return [ranks[a:b] for a, b in itertools.pairwise(cuts)]


def _replica(
    rng: random.Random, model: ModelSpec, ranks: Sequence[int], batch: int | None = None
) -> Replica | None:
    """Of any batch, or of this one; None where what was drawn cannot be of it."""
    units = model.layers + 2
    count = min(len(ranks), units, rng.choice((1, 1, 2, 2, 3, 4)))
    cuts = _divided(rng, range(units), count)
    meshes = [_mesh(rng, part) for part in _divided(rng, ranks, count)]
    microbatches = rng.randint(1, 4)
    # Whichever stage divides rows over its tensor axis can.
    quantum = math.lcm(*(mesh.size("tensor") for mesh in meshes))
    portions = max(len(mesh.batch) for mesh in meshes) + rng.randint(0, 3)
    if batch is not None:
        portions, rest = divmod(batch, quantum * microbatches)
        if rest or portions < max(len(mesh.batch) for mesh in meshes):
            return None
    stages = tuple(
        _stage(
            rng,
            model,
            (cut[0], cut[-1] + 1),
            mesh,
            quantum,
            portions,
            microbatches,
            piped=count > 1 or batch is not None,
        )
        for cut, mesh in zip(cuts, meshes, strict=True)
    )
    edges = tuple(Edge(bits=32, streams=rng.choice((1, 1, 2, 3))) for _ in stages[1:])
    depths = tuple(rng.randint(1, microbatches + 1) for _ in stages)
    return Replica(stages=stages, edges=edges, microbatches=microbatches, in_flight=depths)


def _mesh(rng: random.Random, ranks: Sequence[int]) -> Mesh:
    """Any factors over any axes."""
    axes = list[Axis]()
    shape = list[int]()
    left = len(ranks)
    named: tuple[Axis, ...] = rng.choice((("site", "data"), ("data", "site"), ("data",), ("data",)))
    tensor = (
        rng.choice([n for n in range(1, left + 1) if left % n == 0 and n <= 6 and n != 5])
        if rng.random() < 0.5
        else 1
    )
    left //= tensor
    for axis in named[:-1]:
        size = rng.choice([n for n in range(1, left + 1) if left % n == 0])
        axes = [*axes, axis]
        shape = [*shape, size]
        left = left // size
    axes = [*axes, named[-1]]
    shape = [*shape, left]
    if tensor > 1 or rng.random() < 0.1:
        axes = [*axes, "tensor"]
        shape = [*shape, tensor]
    return Mesh(ranks=tuple(ranks), shape=tuple(shape), axes=tuple(axes))


def _stage(
    rng: random.Random,
    model: ModelSpec,
    units: tuple[int, int],
    mesh: Mesh,
    quantum: int,
    portions: int,
    microbatches: int,
    *,
    piped: bool,
) -> Stage:
    splits = _splits(rng, model, mesh.size("tensor"))
    parts = [len(part) for part in _divided(rng, range(portions), len(mesh.batch))]
    rows = [part * quantum * microbatches for part in parts]
    if not piped and "b" not in splits.values():
        # A stage by itself takes any rows, some of its coordinates none in some microbatches.
        rows = [part + rng.randint(0, 2) for part in parts]
    sync = GradSync(
        bucket_bytes=rng.choice((None, 700, 5_000, 10**9)),
        topology=rng.choice(("flat", "flat", "hierarchical")),
    )
    return Stage(
        units=units,
        mesh=mesh,
        rows=tuple(rows),
        grad_sync=sync,
        zero=rng.choice((0, 0, 1, 2, 3)),
        splits=splits,
        recompute=rng.random() < 0.3,
    )


def _splits(rng: random.Random, model: ModelSpec, ways: int) -> dict[str, str]:
    """Megatron's, or any that divide every operator's dims."""
    if ways == 1:
        return {}
    graph = models.graph(model)
    if rng.random() < 0.4 and graph.sizes["n"] % ways == 0:
        return MEGATRON | rng.choice(({}, VOCABULARY)) | rng.choice(({}, SEQUENCE))
    found = {RESIDUAL: rng.choice(("", "b"))} if rng.random() < 0.6 else {}
    for op in (op for unit in (graph.embedding, graph.block, graph.head) for op in unit):
        found[op.name] = rng.choice(strategies(op, graph.sizes, ways, ways)).split
    return found
