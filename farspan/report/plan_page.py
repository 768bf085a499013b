"""One HTML file that shows a plan and the ranking that it comes from; opens without a network.

Pictures are SVG whose widths are shares of the page and whose heights and letters are pixels: they
read the same on a phone as on a wide screen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from farspan.domain.struct_files import write_atomically
from farspan.domain.units import short_time
from farspan.report import plan_picture
from farspan.report.page import template_environment
from farspan.report.plan_picture import MEMORY_PARTS, DeviceBox, Picture, PictureFlow, SiteView

#: Colours of chart.css: what fills memory.
FILLS = dict(
    zip(
        MEMORY_PARTS,
        ("train", "val", "memory", "speed", "lr", "norm", "rest", "lost", "copy"),
        strict=True,
    )
)
#: Pixels of the cluster's picture: a host's heading, a row of boxes, the gap between sites, boxes
#: in a row.
HEAD, ROW, GAP, ACROSS = 26, 76, 46, 2
#: Links between sites that are not neighbours in the picture, drawn at its side; the table has the
#: others.
SIDE = 3


class PageText(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around the pictures, texts only."""

    title: str
    question: str
    choice: str
    tiles: tuple[tuple[str, str, str], ...]
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    #: The row that the pictures are of.
    marked: int | None
    refused: tuple[str, ...] = ()
    why: tuple[tuple[str, tuple[str, ...]], ...] = ()


class DrawnBox(msgspec.Struct, frozen=True):
    """A host's heading or a box at its place: shares of the width, pixels of the height."""

    kind: str
    x: float
    y: float
    width: float
    text: str
    box: DeviceBox | None = None


class DrawnFlow(msgspec.Struct, frozen=True):
    """A flow at its place: in the gap below a site, or a bracket at the side from `y` to `end`."""

    flow: PictureFlow
    y: float
    end: float
    side: int


class Drawing(msgspec.Struct, frozen=True):
    """The cluster laid out: bands of sites, what is in them, and what runs between."""

    height: float
    bands: tuple[tuple[float, float], ...]
    places: tuple[DrawnBox, ...]
    ways: tuple[DrawnFlow, ...]


def write_plan_page(shown: Picture | None, text: PageText, path: Path) -> None:
    """Write the page; without a picture (nothing fits) it has the table and the reasons."""
    write_atomically(path, plan_page(shown, text).encode())


def plan_page(shown: Picture | None, text: PageText) -> str:
    """Return the whole page as HTML. The same ranking gives the same bytes."""
    jinja = template_environment()
    jinja.globals |= drawing_words() | {
        "lane_name": plan_picture.lane_name,
        "paces": plan_picture.format_slowdowns,
        "bars": plan_picture.bars,
        "short_time": short_time,
        "fills": FILLS,
        "parts": MEMORY_PARTS,
    }
    drawing = layout(shown) if shown is not None else None
    return jinja.get_template("plan.html").render(
        shown=shown, text=text, drawing=drawing, description=describe_plan(shown)
    )


def drawing_words() -> dict[str, Any]:
    """Return the functions and tables that `template/plan.svg` uses."""
    return {
        "rows_line": plan_picture.rows_line,
        "stage_line": plan_picture.stage_line,
        "head": HEAD,
        "row": ROW,
    }


def describe_plan(shown: Picture | None) -> str:
    """Return the cluster's picture in words, for those who do not see it."""
    if shown is None:
        return ""
    boxes = [
        f"{box.host}: {box.name}, {plan_picture.stage_line(shown, box)}" for box in shown.boxes
    ]
    return "; ".join([*boxes, *(f"{flow.a} to {flow.b}: {flow.what}" for flow in shown.flows)])


def layout(shown: Picture) -> Drawing:
    """Sites from top to bottom; flows between neighbours in the gaps, the heaviest of the others at
    the side."""
    bands: list[tuple[float, float]] = []
    places: list[DrawnBox] = []
    y = 0.0
    for site in shown.sites:
        top = y
        y = _site(site, y, places)
        bands.append((top, y - top))
        y += GAP
    middle = {
        site.name: top + size / 2 for site, (top, size) in zip(shown.sites, bands, strict=True)
    }
    order = [site.name for site in shown.sites]
    ways: list[DrawnFlow] = []
    sides = 0
    for flow in shown.flows:
        if not flow.between_sites:
            continue
        first, last = sorted((order.index(flow.a), order.index(flow.b)))
        if last == first + 1:
            ways.append(DrawnFlow(flow, bands[first][0] + bands[first][1], bands[last][0], -1))
        elif sides < SIDE:
            ways.append(DrawnFlow(flow, middle[order[first]], middle[order[last]], sides))
            sides += 1
    return Drawing(y - GAP, tuple(bands), tuple(places), tuple(ways))


def _site(site: SiteView, y: float, places: list[DrawnBox]) -> float:
    """Add a site's hosts and boxes; returns where it ends."""
    for host in site.hosts:
        name = (
            site.name
            if len(site.hosts) == 1 and host.name == site.name
            else f"{site.name} / {host.name}"
        )
        places.append(DrawnBox("host", 1.8, y + 18, 0.0, name))
        y += HEAD
        for index, box in enumerate(host.boxes):
            column, row = index % ACROSS, index // ACROSS
            places.append(DrawnBox("box", 1.8 + 48.6 * column, y + ROW * row, 47.6, box.name, box))
        y += ROW * -(-len(host.boxes) // ACROSS)
    return y + 4
