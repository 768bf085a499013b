"""The size dial: a model's shape from the parameters asked for, and the parameters from corpus and
machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from farspan import models
from farspan.domain.model import ModelSpec, count_parameters

#: Compute-optimal training tokens a parameter (Hoffmann et al., arXiv 2203.15556).
TOKENS_PER_PARAMETER = 20
#: Repeating data so often costs almost nothing against fresh data (Muennighoff et al., arXiv
#: 2305.16264).
FRESH_EPOCHS = 4
#: The exact count may miss the asked one by so much.
TOLERANCE = 0.1

#: What `size: auto` chooses between. Below the least the embedding of a usual vocabulary is nearly
#: all of the model: a choice, not a fit. The most is the range farspan is made for.
SMALLEST = 3_000_000
LARGEST = 2_000_000_000

#: Single knobs that a user may fix, by their names in `model:`.
KNOBS = ("layers", "d_model", "heads", "kv_heads", "d_ff", "tied")
Knobs = dict[str, Any]


def fitted_shape(target: float) -> tuple[float, float]:
    """(d_model, layers) of a model of `target` parameters in all.

    Fit of arXiv 2410.19456 over LLaMA-2 and LLaMA-3, x their nominal sizes in billions, embeddings
    included: d = 1951.37 x^0.353, layers = 18.93 x^0.318.
    """
    billions = target / 1e9
    return 1951.37 * billions**0.353, 18.93 * billions**0.318


def shape_for(
    family: str, target: int, *, vocab_size: int, context: int, knobs: Knobs
) -> ModelSpec:
    """Return the shape nearest the fit among those whose exact count comes nearest `target`.

    Counts within half of TOLERANCE are equally good, so that the fit's proportions decide between
    them; a large vocabulary leaves less for the layers, which then are fewer and narrower than the
    fit's. Raises ValueError where the knobs allow no shape.
    """
    d_fit, layers_fit = fitted_shape(target)

    def badness(spec: ModelSpec) -> tuple[float, float]:
        miss = abs(math.log(count_parameters(spec) / target))
        shape = abs(math.log(spec.d_model / d_fit)) + abs(math.log(spec.layers / layers_fit))
        return max(0.0, miss - TOLERANCE / 2), shape

    build = models.family(family).shape
    shapes = []
    problem = ValueError("no shape")
    for fixed in _list_shapes(target, knobs):
        try:
            shapes.append(build(vocab_size=vocab_size, context=context, **fixed))
        except ValueError as error:  # Heads or kv_heads do not divide this width: not a candidate.
            problem = error
    if not shapes:
        raise problem
    return min(shapes, key=badness)


def _list_shapes(target: int, knobs: Knobs) -> Iterator[Knobs]:
    """Yield widths that are multiples of the head size (64; 32 for tiny models), to twice the
    fit's; depths to thrice."""
    d_fit, layers_fit = fitted_shape(target)
    head = 32 if target < 10_000_000 else 64
    step = 8 * knobs["heads"] if "heads" in knobs else head
    widest = max(4 * step, round(2 * d_fit))
    for d_model in [knobs["d_model"]] if "d_model" in knobs else range(step, widest + 1, step):
        for layers in range(1, math.ceil(3 * layers_fit) + 2):
            yield {"heads": max(1, d_model // head), "layers": layers, "d_model": d_model} | knobs


def auto_parameters(corpus_tokens: float, flops: float) -> int:
    """Parameters that a corpus and a compute budget make best use of.

    `corpus_tokens` counts repeats up to FRESH_EPOCHS; `flops` is the whole run's. With 20 tokens a
    parameter a run of N parameters costs 6 N x 20 N FLOPs, so the machine can pay for sqrt(flops /
    120).
    """
    affordable = math.sqrt(flops / (6 * TOKENS_PER_PARAMETER))
    best = min(corpus_tokens / TOKENS_PER_PARAMETER, affordable)
    return round(min(max(best, SMALLEST), LARGEST))
