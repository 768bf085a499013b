"""Plans written in short form, as a person would: what is as usual is left out."""

from __future__ import annotations

from typing import Any

import msgspec

from farspan import models
from farspan.domain.plan import Plan, Replica, Stage
from farspan.domain.planfile import BUCKET_BYTES


def short_form(plan: Plan) -> dict[str, Any]:
    """A plan as a table in short form."""
    train, replicas = plan.train, [_replica(plan, replica) for replica in plan.replicas]
    table: dict[str, Any] = {
        "model": _model(plan),
        "engine": plan.engine,
        "train": {
            name: getattr(train, name)
            for name in (
                "batch",
                "seq_len",
                "precision",
                "attention",
                "recompute",
                "steps",
                "wan_bits",
            )
        },
    }
    if plan.sync is not None:
        table["sync"] = msgspec.to_builtins(plan.sync)
    if len(replicas) == 1:
        return table | {key: value for key, value in replicas[0].items() if key != "batch"}
    return table | {"replicas": replicas}


def _model(plan: Plan) -> dict[str, Any] | str:
    spec = plan.model
    named = next((name for name, preset in models.presets().items() if preset.spec == spec), None)
    knobs = (
        "family",
        "layers",
        "d_model",
        "heads",
        "d_ff",
        "vocab_size",
        "context",
        "tied",
        "kv_heads",
    )
    return named or {knob: getattr(spec, knob) for knob in knobs}


def _replica(plan: Plan, replica: Replica) -> dict[str, Any]:
    depth, parts = len(replica.stages), replica.microbatches
    table: dict[str, Any] = {
        "stages": [_stage(plan, stage, piped=depth > 1, parts=parts) for stage in replica.stages],
        "microbatches": parts,
        "batch": replica.batch,
    }
    if replica.in_flight == (parts,) * depth:
        table["schedule"] = "gpipe"
    elif replica.in_flight != tuple(min(parts, depth - s) for s in range(depth)):
        table["in_flight"] = list(replica.in_flight)
    bits = 32 if plan.train.precision == "fp32" else 16
    if any((edge.bits, edge.streams) != (bits, 1) for edge in replica.edges):
        table["edges"] = msgspec.to_builtins(replica.edges)
    return table


def _stage(plan: Plan, stage: Stage, *, piped: bool, parts: int) -> dict[str, Any]:
    mesh, sync, layers = stage.mesh, stage.grad_sync, plan.model.layers
    first, last = (min(max(unit - 1, 0), layers) for unit in stage.units)
    ways, devices = mesh.size("tensor"), [plan.devices[rank] for rank in mesh.ranks]
    table: dict[str, Any] = {
        "layers": f"{first}-{last}",
        "on": [f"{at.host}:{at.index}" for at in devices],
        "tp": ways,
        "bits": sync.bits,
        "topology": sync.topology,
        "bucket": sync.bucket_bytes,
    }
    if sync.bucket_bytes == BUCKET_BYTES:
        del table["bucket"]
    graph = models.graph(plan.model)
    every = (
        op for unit in (graph.embedding, graph.block, graph.head) for op in unit if op.divisible
    )
    megatron = {op.name: op.divisible for op in every} if ways > 1 else {}
    usual = {
        "dp": len(mesh.ranks),
        "sites": 1,
        "zero": 0,
        "recompute": plan.train.recompute,
        "wan_rate": None,
        "splits": megatron,
    }
    found = {
        "dp": len(mesh.ranks) // ways,
        "sites": mesh.size("site"),
        "zero": stage.zero,
        "recompute": stage.recompute,
        "wan_rate": sync.wan_rate,
        "splits": stage.splits,
    }
    table |= {key: value for key, value in found.items() if value != usual[key]}
    equal = len(set(stage.rows)) == 1
    if not equal or (stage.rows[0] % parts and not piped):
        table["rows"] = list(stage.rows)
    return table
