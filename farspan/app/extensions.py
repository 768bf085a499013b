"""What other packages add, by entry point: commands, clusters by a prefix, algorithms of `select`,
kinds of report, systems that plans and clusters are exported to.

Entry points are read where a name is not the core's own, so that what needs none starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from farspan.domain.problems import Refusal
from farspan.domain.suggest import advise, known_names

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Group = Literal["commands", "clusters", "algorithms", "reports", "exports", "cluster_exports"]


def find_extensions(group: Group) -> dict[str, EntryPoint]:
    """Return the entry points of `farspan.GROUP`, by name."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=f"farspan.{group}")}


def load_extension(
    group: Group, name: str, what: str, *, option: str, code: str, own: tuple[str, ...] = ()
) -> Any:
    """Load the object that an entry point names. Raises Refusal, which offers the nearest name.

    `own`: names of the core's own, which are no entry points.
    """
    points = find_extensions(group)
    if name not in points:
        known = (*own, *sorted(points))
        raise Refusal(
            code,
            what=what,
            where=option,
            fact=known_names(name, known),
            remedy=advise(name, known, option=option),
        )
    return points[name].load()
