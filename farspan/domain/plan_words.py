"""Parts of a plan, and lists, in words for people."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from farspan.domain.plan import Stage


def stage_words(stage: Stage, layers: int) -> str:
    """`embedding, blocks 1-12; data 2; ZeRO 2; gradients by site`."""
    axes = []
    for axis, size in zip(stage.mesh.axes, stage.mesh.shape, strict=True):
        if size > 1:
            axes.append(f"{axis} {size}")
    parts = [units_words(stage.units, layers), " x ".join(axes) or "one device"]
    if stage.zero:
        parts.append(f"ZeRO {stage.zero}")
    if stage.recompute:
        parts.append("recompute")
    if len(stage.mesh.ranks) > stage.mesh.size("tensor"):
        gradients = "gradients in one ring"
        if stage.grad_sync.topology == "hierarchical":
            gradients = "gradients site by site"
        if stage.grad_sync.bits != 32:
            gradients += f" in {stage.grad_sync.bits} bits"
        parts.append(gradients)
    splits = [f"{op} by {dim}" for op, dim in stage.splits.items() if dim]
    if splits:
        parts.append(f"divides {', '.join(splits)}")
    return "; ".join(parts)


def units_words(units: tuple[int, int], layers: int) -> str:
    """Units [0, layers + 2) in words: `the whole model`, `embedding, blocks 1-12`, `blocks 13-24,
    head`."""
    first, last = units
    if units == (0, layers + 2):
        return "the whole model"
    parts = ["embedding"] if first == 0 else []
    first_block = max(first, 1)
    last_block = min(last - 1, layers)
    if first_block == last_block:
        parts.append(f"block {first_block}")
    elif first_block < last_block:
        parts.append(f"blocks {first_block}-{last_block}")
    if last == layers + 2:
        parts.append("head")
    return ", ".join(parts)


def join_counted(words: Sequence[str]) -> str:
    """`2 x 16, 3 x 8`: neighbours that are the same counted."""
    runs = [f"{len(list(group))} x {word}" for word, group in itertools.groupby(words)]
    return ", ".join(runs)


def join_words(words: Sequence[str]) -> str:
    """Join a list: `a`, `a and b`, `a, b and c`; nothing of none."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
