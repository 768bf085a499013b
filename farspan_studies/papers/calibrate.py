"""Few global constants of an engine, fitted by least squares in logarithms: a deterministic simplex
search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from farspan.domain.engine import Engine


def with_constants(engine: Engine, values: Mapping[str, float]) -> Engine:
    """Return the engine with these constants; `efficiency` sets the share of every dtype, integers
    are rounded."""
    changed: dict[str, object] = {}
    for name, value in values.items():
        now = getattr(engine, name)
        if isinstance(now, dict):
            changed[name] = {key: type(old)(value) for key, old in now.items()}
        else:
            changed[name] = (
                round(value) if isinstance(now, int) and not isinstance(now, bool) else value
            )
    return msgspec.structs.replace(engine, **changed)


def constant(engine: Engine, name: str) -> float:
    """Return the value of a constant; of one by dtype the first."""
    value = getattr(engine, name)
    return float(next(iter(value.values())) if isinstance(value, dict) else value)


def fit(
    engine: Engine, names: Sequence[str], cost: Callable[[Engine], float], rounds: int = 150
) -> Engine:
    """Return the engine whose constants `names` make `cost` least, searched from where they are."""

    def at(point: Sequence[float]) -> float:
        return cost(
            with_constants(engine, {n: math.exp(x) for n, x in zip(names, point, strict=True)})
        )

    best = simplex(at, [math.log(constant(engine, name)) for name in names], rounds)
    return with_constants(
        engine, {name: float(f"{math.exp(x):.4g}") for name, x in zip(names, best, strict=True)}
    )


def simplex(
    cost: Callable[[Sequence[float]], float], start: Sequence[float], rounds: int, edge: float = 0.1
) -> list[float]:
    """Nelder and Mead's search (1965), with their coefficients, for so many rounds."""
    points = [list(start)]
    for i in range(len(start)):
        points.append([x + edge * (j == i) for j, x in enumerate(start)])
    corners = sorted(((cost(point), point) for point in points), key=lambda pair: pair[0])
    for _ in range(rounds):
        worst = corners[-1]
        middle = [
            math.fsum(xs) / (len(corners) - 1)
            for xs in zip(*(point for _, point in corners[:-1]), strict=True)
        ]
        tried = _moved(cost, middle, worst[1], 1.0)
        if tried[0] < corners[0][0]:
            tried = min(tried, _moved(cost, middle, worst[1], 2.0), key=lambda pair: pair[0])
        elif tried[0] >= corners[-2][0]:
            tried = min(
                _moved(cost, middle, worst[1], 0.5),
                _moved(cost, middle, worst[1], -0.5),
                key=lambda pair: pair[0],
            )
        if tried[0] < worst[0]:
            corners[-1] = tried
        else:
            closer = [
                [(a + b) / 2 for a, b in zip(corners[0][1], point, strict=True)]
                for _, point in corners[1:]
            ]
            corners = [corners[0], *((cost(point), point) for point in closer)]
        corners.sort(key=lambda pair: pair[0])
    return corners[0][1]


def _moved(
    cost: Callable[[Sequence[float]], float],
    middle: Sequence[float],
    worst: Sequence[float],
    by: float,
) -> tuple[float, list[float]]:
    """Return the worst point reflected at the middle of the others, so many times as far."""
    point = [m + by * (m - w) for m, w in zip(middle, worst, strict=True)]
    return cost(point), point
