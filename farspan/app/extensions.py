"""What other packages add, by entry point: commands, clusters by a prefix, algorithms of `select`,
kinds of report, systems that plans are exported to.

Entry points are read where a name is not the core's own, so that what needs none starts at once.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Literal

Group = Literal["commands", "clusters", "algorithms", "reports", "exports"]


def extensions(group: Group) -> dict[str, EntryPoint]:
    """The entry points of `farspan.GROUP`, by name."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=f"farspan.{group}")}
