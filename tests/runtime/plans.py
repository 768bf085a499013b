"""Plans by hand: one for every mechanism of the runtime, of models so small that their arithmetic
takes no time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from farspan.domain.model import ModelSpec
from farspan.domain.plan import (
    Axis,
    Edge,
    GradSync,
    Inputs,
    Mesh,
    Plan,
    PlannedDevice,
    Replica,
    Stage,
    Sync,
    Zero,
)
from farspan.domain.train import Muon, Optimizer, Schedule, TrainSpec
from farspan.semantics.tensor_sharding import RESIDUAL

#: Steps of a short training: Two meetings of replicas that meet every other step, and a step after
#: them.
STEPS = 5
#: `eps` far above the rounding of fp32, so that Adam does not make steps of noise where there is no
#: gradient.
OPTIMIZER = Optimizer(lr=3e-3, eps=1e-5)
TRAIN = TrainSpec(
    steps=STEPS,
    batch=8,
    seq_len=8,
    precision="fp32",
    seed=3,
    optimizer=OPTIMIZER,
    schedule=Schedule(warmup_steps=2),
)
GPT2 = ModelSpec(
    family="gpt2",
    layers=2,
    d_model=24,
    heads=6,
    kv_heads=6,
    d_ff=48,
    vocab_size=336,
    context=12,
    norm="layernorm",
    activation="gelu_tanh",
    positions="learned",
    bias=True,
    tied=True,
)
LLAMA = ModelSpec(
    family="llama",
    layers=3,
    d_model=48,
    heads=12,
    kv_heads=6,
    d_ff=48,
    vocab_size=336,
    context=12,
    norm="rmsnorm",
    activation="swiglu",
    positions="rope",
    bias=False,
    tied=False,
)
LLAMA_TIED = replace(LLAMA, tied=True)

MEGATRON = {
    "attn.qkv": "n",
    "attn": "n",
    "attn.out": "n",
    "mlp.up": "f",
    "mlp.act": "f",
    "mlp.down": "f",
}
VOCABULARY = {"tok": "v", "head": "v", "loss": "v"}
SEQUENCE = {RESIDUAL: "b", "attn_norm": "b", "mlp_norm": "b", "norm": "b"}
ROWS = SEQUENCE | dict.fromkeys((*MEGATRON, *VOCABULARY), "b")


def stage(
    units: tuple[int, int],
    ranks: Iterable[int],
    rows: Sequence[int],
    *,
    axes: tuple[Axis, ...] = ("data",),
    shape: tuple[int, ...] = (),
    zero: Zero = 0,
    splits: dict[str, str] | None = None,
    recompute: bool = False,
    bucket_bytes: int | None = 5_000,
    **sync: Any,
) -> Stage:
    ranks = tuple(ranks)
    return Stage(
        units=units,
        mesh=Mesh(ranks=ranks, shape=shape or (len(ranks),), axes=axes),
        rows=tuple(rows),
        zero=zero,
        splits=splits or {},
        recompute=recompute,
        grad_sync=GradSync(bucket_bytes=bucket_bytes, **sync),
    )


def replica(
    *stages: Stage,
    microbatches: int = 1,
    depths: Sequence[int] = (),
    bits: Any = 32,
    streams: int = 1,
) -> Replica:
    edges = (Edge(bits=bits, streams=streams),) * (len(stages) - 1)
    depths = tuple(depths) or (microbatches,) * len(stages)
    return Replica(stages=stages, edges=edges, microbatches=microbatches, in_flight=depths)


def plan(
    *replicas: Replica,
    sites: Sequence[int] = (),
    model: ModelSpec = GPT2,
    sync: Sync | None = None,
    train: TrainSpec = TRAIN,
) -> Plan:
    """`sites`: the site of each rank; one for all where there is none."""
    world = 1 + max(rank for one in replicas for part in one.stages for rank in part.mesh.ranks)
    devices = tuple(
        PlannedDevice(host=f"h{site}", site=f"s{site}", backend="cpu", index=i, threads=1)
        for i, site in enumerate(sites or [0] * world)
    )
    assert len(devices) == world
    return Plan(
        technique="by hand",
        model=model,
        train=replace(train, batch=sum(one.batch for one in replicas)),
        replicas=replicas,
        devices=devices,
        inputs=Inputs(cluster="", corpus="7e57" * 4),
        sync=sync,
    )


def flat() -> dict[str, Plan]:
    """One stage over batch axes."""
    whole = (0, 4)
    found = {
        "one worker": plan(replica(stage(whole, [0], [8]), microbatches=3)),
        "uneven rows, fewer than microbatches": plan(
            replica(stage(whole, range(4), [1, 2, 4, 1]), microbatches=3), sites=[0, 0, 1, 1]
        ),
        "one bucket": plan(
            replica(stage(whole, range(2), [5, 3], bucket_bytes=10**9), microbatches=2)
        ),
        "a message a tensor": plan(
            replica(stage(whole, range(2), [5, 3], bucket_bytes=None), microbatches=2)
        ),
        "hierarchical": plan(
            replica(
                stage(whole, range(6), [2, 1, 1, 2, 1, 1], topology="hierarchical"), microbatches=2
            ),
            sites=[0, 0, 1, 1, 1, 2],
        ),
        "recomputed": plan(
            replica(stage((0, 5), range(2), [4, 4], recompute=True), microbatches=2), model=LLAMA
        ),
        "a site axis": plan(
            replica(stage(whole, range(2), [4, 4], axes=("site",), zero=3)), sites=[0, 1]
        ),
    }
    three = (5, 2, 4)
    for zero in (1, 2, 3):
        found[f"zero {zero}"] = plan(
            replica(stage((0, 5), range(3), three, zero=zero), microbatches=2),
            sites=[0, 0, 1],
            model=LLAMA_TIED,
        )
    for zero in (0, 1, 2, 3):
        both: Any = {
            "axes": ("site", "data"),
            "shape": (2, 2),
            "zero": zero,
            "recompute": zero == 3,
        }
        found[f"hybrid {zero}"] = plan(
            replica(stage(whole, range(4), [2, 2, 3, 1], **both), microbatches=2),
            sites=[0, 0, 1, 1],
        )
    return found


def divided() -> dict[str, Plan]:
    """One stage with a tensor axis."""
    alone: Any = {"axes": ("tensor",)}
    found = {
        "megatron": plan(
            replica(stage((0, 4), range(2), [5], splits=MEGATRON, **alone), microbatches=2)
        ),
        "megatron, sequences and vocabulary": plan(
            replica(
                stage((0, 5), range(3), [6], splits=MEGATRON | SEQUENCE | VOCABULARY, **alone),
                microbatches=2,
            ),
            model=LLAMA,
        ),
        "rows": plan(
            replica(
                stage((0, 4), range(2), [8], splits=ROWS, recompute=True, **alone), microbatches=2
            )
        ),
        "tied ends unlike": plan(
            replica(stage((0, 4), range(2), [4], splits={"tok": "v"}, **alone))
        ),
        "a table with a copy and parts, rows between blocks": plan(
            replica(
                stage(
                    (0, 4),
                    range(4),
                    [4, 4],
                    axes=("data", "tensor"),
                    shape=(2, 2),
                    zero=3,
                    splits=MEGATRON | SEQUENCE | {"head": "v", "loss": "v"},
                ),
                microbatches=2,
            ),
        ),
        "no rows for one": plan(
            replica(
                stage(
                    (0, 4), range(4), [0, 4], axes=("data", "tensor"), shape=(2, 2), splits=MEGATRON
                )
            )
        ),
        "rows, none for one": plan(
            replica(
                stage((0, 4), range(4), [0, 4], axes=("data", "tensor"), shape=(2, 2), splits=ROWS),
                microbatches=2,
            )
        ),
        "two axes out of order": plan(
            replica(
                stage(
                    (0, 4),
                    (3, 1, 2, 0),
                    [3, 5],
                    axes=("data", "tensor"),
                    shape=(2, 2),
                    zero=3,
                    splits=MEGATRON | VOCABULARY,
                ),
                microbatches=2,
            ),
        ),
        "three axes": plan(
            replica(
                stage(
                    (0, 5),
                    range(8),
                    [2, 2, 2, 2],
                    axes=("site", "data", "tensor"),
                    shape=(2, 2, 2),
                    zero=2,
                    splits=MEGATRON | SEQUENCE,
                ),
                microbatches=1,
            ),
            sites=[0] * 4 + [1] * 4,
            model=LLAMA_TIED,
        ),
    }
    for zero in (0, 1, 3):
        sync: Any = {"topology": "hierarchical"} if zero == 0 else {}
        found[f"data and tensor, zero {zero}"] = plan(
            replica(
                stage(
                    (0, 4),
                    range(4),
                    [5, 3],
                    axes=("data", "tensor"),
                    shape=(2, 2),
                    zero=zero,
                    splits=MEGATRON | VOCABULARY,
                    **sync,
                ),
                microbatches=2,
            ),
            sites=[0, 0, 1, 1],
        )
    return found


def piped() -> dict[str, Plan]:
    """Pipelines."""
    found = {
        "two stages": plan(
            replica(stage((0, 2), [0], [8]), stage((2, 4), [1], [8]), microbatches=4), sites=[0, 1]
        ),
        "untied": plan(
            replica(
                stage((0, 2), [0], [8]),
                stage((2, 4), [2], [8]),
                stage((4, 5), [1], [8]),
                microbatches=8,
                depths=[8, 5, 1],
            ),
            sites=[0, 1, 0],
            model=LLAMA,
        ),
        "a unit each, several streams": plan(
            replica(
                *(stage((i, i + 1), [i], [8]) for i in range(4)),
                microbatches=4,
                depths=[4, 3, 2, 1],
                streams=3,
            ),
            sites=[0, 0, 1, 2],
        ),
        "unlike rows and depths, several streams": plan(
            replica(
                stage((0, 1), [0], [8]),
                stage((1, 3), [1, 2, 3], [4, 2, 2], zero=1),
                stage((3, 4), [4], [8]),
                microbatches=2,
                depths=[2, 2, 1],
                streams=2,
            ),
            sites=[0, 1, 1, 1, 2],
        ),
        "zero by stage": plan(
            replica(
                stage((0, 2), [0, 1], [8, 4], zero=2),
                stage((2, 5), [2, 3, 4], [4, 4, 4], zero=3, recompute=True),
                microbatches=4,
                depths=[3, 2],
            ),
            sites=[0, 0, 1, 1, 1],
            model=LLAMA_TIED,
        ),
        "tensor widths by stage": plan(
            replica(
                stage((0, 2), range(3), [12], axes=("tensor",), splits=MEGATRON | VOCABULARY),
                stage((2, 4), [3, 4], [6, 6], zero=3),
                stage((4, 5), [5, 6], [12], axes=("tensor",), splits=VOCABULARY | SEQUENCE),
                microbatches=3,
                depths=[3, 1, 1],
            ),
            sites=[0, 0, 0, 1, 1, 2, 2],
            model=LLAMA_TIED,
        ),
        "the residual stream by rows, out of order": plan(
            replica(
                stage((0, 2), (1, 0), [8], axes=("tensor",), splits=MEGATRON | SEQUENCE),
                stage(
                    (2, 4),
                    (4, 2, 5, 3),
                    [4, 4],
                    axes=("data", "tensor"),
                    shape=(2, 2),
                    zero=3,
                    splits=MEGATRON | VOCABULARY | SEQUENCE,
                ),
                microbatches=2,
            ),
            sites=[0, 0, 1, 1, 1, 1],
        ),
        "tied over three and three": plan(
            replica(
                stage((0, 2), range(3), [4, 2, 2]),
                stage((2, 5), range(3, 6), [2, 4, 2]),
                microbatches=2,
            ),
            sites=[0, 0, 0, 1, 1, 1],
            model=LLAMA_TIED,
        ),
    }
    return found


def apart() -> dict[str, Plan]:
    """Replicas that meet."""
    data, hybrid = (
        replica(stage((0, 4), range(2), [2, 1], zero=zero), microbatches=2) for zero in (0, 2)
    )
    pipeline = replica(stage((0, 2), [2], [4]), stage((2, 4), [3], [4]), microbatches=2)
    return {
        "replicas alike": plan(
            *(replica(stage((0, 4), (2 * i, 2 * i + 1), [2, 2], zero=1)) for i in range(2)),
            sites=[0, 0, 1, 1],
            sync=Sync(every=2),
        ),
        "replicas unlike": plan(
            hybrid,
            pipeline,
            replica(stage((0, 4), [4], [2])),
            sites=[0, 0, 1, 1, 2],
            sync=Sync(every=2),
        ),
        "replicas unlike, overlapped": plan(
            data, pipeline, sites=[0, 0, 1, 1], sync=Sync(every=2, overlap=True)
        ),
        "tensor axis against ZeRO, overlapped": plan(
            replica(stage((0, 4), range(2), [3], axes=("tensor",), splits=MEGATRON | VOCABULARY)),
            replica(stage((0, 4), range(2, 5), [2, 1, 1], zero=3)),
            sites=[0, 0, 1, 1, 1],
            sync=Sync(every=1, overlap=True, lr=0.5, momentum=0.6),
        ),
    }


HAND_PICKED = flat() | divided() | piped() | apart()


def picked(name: str) -> Plan:
    """A plan of HAND_PICKED; of "NAME muon" with Muon for its matrices and an average of its
    weights."""
    base = HAND_PICKED[name.removesuffix(" muon")]
    if base is HAND_PICKED.get(name):
        return base
    return replace(
        base,
        train=replace(
            base.train, optimizer=replace(base.train.optimizer, muon=Muon(), average=0.7)
        ),
    )
