"""Parts of a plan, and lists, in words for people."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from farspan.domain.plan import Stage


def stage_words(stage: Stage, layers: int) -> str:
    """`embedding, blocks 1-12; data 2; ZeRO 2; gradients by site`."""
    axes = [
        f"{axis} {size}"
        for axis, size in zip(stage.mesh.axes, stage.mesh.shape, strict=True)
        if size > 1
    ]
    parts = [units_words(stage.units, layers), " x ".join(axes) or "one device"]
    if stage.zero:
        parts.append(f"ZeRO {stage.zero}")
    if stage.recompute:
        parts.append("recompute")
    if len(stage.mesh.ranks) > stage.mesh.size("tensor"):
        bits = "" if stage.grad_sync.bits == 32 else f" in {stage.grad_sync.bits} bits"
        parts.append(
            (
                "gradients site by site"
                if stage.grad_sync.topology == "hierarchical"
                else "gradients in one ring"
            )
            + bits
        )
    if split := {op: dim for op, dim in stage.splits.items() if dim}:
        parts.append("divides " + ", ".join(f"{op} by {dim}" for op, dim in split.items()))
    return "; ".join(parts)


def units_words(units: tuple[int, int], layers: int) -> str:
    """Units [0, layers + 2) in words: `the whole model`, `embedding, blocks 1-12`, `blocks 13-24,
    head`."""
    first, last = units
    if units == (0, layers + 2):
        return "the whole model"
    blocks = (max(first, 1), min(last, layers + 1) - 1)
    parts = ["embedding"] if first == 0 else []
    if blocks[0] <= blocks[1]:
        parts.append(
            f"block {blocks[0]}" if blocks[0] == blocks[1] else f"blocks {blocks[0]}-{blocks[1]}"
        )
    return ", ".join([*parts, *(["head"] if last == layers + 2 else [])])


def listed(words: Sequence[str]) -> str:
    """`2 x 16, 3 x 8`: neighbours that are the same counted."""
    runs = [(word, len(list(group))) for word, group in itertools.groupby(words)]
    return ", ".join(f"{count} x {word}" for word, count in runs)


def joined(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; nothing of none."""
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else "".join(words)
